"""Instructions on matrices: `ldmatrix` and `stmatrix`, and products of one warp (`mma`) or of four (`wgmma`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from primitives.testing._ptx import matrices
from primitives.testing._ptx.arithmetic import KINDS, UNSIGNED
from primitives.testing._ptx.machine import Machine, executes
from primitives.testing._ptx.shared import Lanes

if TYPE_CHECKING:
    from primitives.testing._ptx.code import Address, Instruction

Array = Any

_U32, _U64 = KINDS["u32"], KINDS["u64"]
# Row and column of both elements `[lane, 2]` that a thread has of a matrix of 8 x 8.
_PAIRS = np.broadcast_arrays(np.arange(32)[:, None] // 4, 2 * (np.arange(32)[:, None] % 4) + np.arange(2))


class _Product(NamedTuple):
    """A `wgmma` under way: its warpgroup, group and accumulators, and what it reads of shared memory."""

    warpgroup: int
    group: int
    out: tuple[str, ...]
    is_undefined: bool
    units: list[Array]


def _by_warp(machine: Machine, names: tuple[str, ...], dtype: np.dtype = _U32) -> Array:
    """Registers `[warp, lane, register]`."""
    return np.stack([machine.full(each, dtype).reshape(-1, 32) for each in names], 2)


def _undefined_of_warps(machine: Machine, names: Any) -> Any:
    """Which values are undefined that follow from registers of all threads of a warp; None for none."""
    found = machine.undefined_of(names)
    return None if found is None else np.repeat(np.broadcast_to(found, machine.lanes).reshape(-1, 32).any(1), 32)


def _rows(machine: Machine, instruction: Instruction, address: Address, count: int, mask: Any) -> Any:
    """The threads that have the addresses of the rows of `count` matrices, their places, and a thread's pairs."""
    if not {"m8n8", "b16"} <= {*instruction.qualifiers}:
        raise instruction.unsupported()
    is_row = machine.threads % 32 < 8 * count
    lanes = machine.lanes_of(is_row if mask is None else is_row & mask)
    place = machine.shared_place(instruction, address, lanes, 16, mask)
    return lanes, place, _PAIRS[::-1] if "trans" in instruction.qualifiers else _PAIRS


@executes("ldmatrix")
def load_matrix(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Matrices of 8 x 8 numbers of 16 bits: each thread names a row, and gets two elements of each matrix."""
    targets, address = instruction.operands
    lanes, at, pairs = _rows(machine, instruction, address, len(targets), mask)
    values, defined = machine.shared.load(instruction, lanes, at, 8, KINDS["u16"])
    values = values.reshape(-1, len(targets), 8, 8)
    undefined = None
    if not defined.all():
        machine.note_origin(f"byte {int(at[~defined.all(1)][0])} of shared memory")
        undefined = np.repeat(~defined.reshape(len(values), -1).all(1), 32)
    for number, name in enumerate(targets):
        words = np.ascontiguousarray(values[:, number][(slice(None), *pairs)]).view(_U32)
        machine.put_some(name, words.ravel(), mask, undefined)


@executes("stmatrix")
def store_matrix(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """The opposite of `ldmatrix`."""
    address, sources = instruction.operands
    lanes, at, pairs = _rows(machine, instruction, address, len(sources), mask)
    words = _by_warp(machine, sources)
    matrix = np.zeros((len(words), len(sources), 8, 8), np.uint16)
    for number in range(len(sources)):
        values = np.ascontiguousarray(words[:, :, number]).view(np.uint16).reshape(-1, 32, 2)
        matrix[(slice(None), number, *pairs)] = values
    undefined = _undefined_of_warps(machine, sources)
    values = matrix[lanes.numbers // 32, lanes.numbers % 32 // 8, lanes.numbers % 8]
    machine.shared.store(instruction, lanes, at, values, None if undefined is None else undefined[lanes.numbers])


@executes("mma")
def multiply(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """A product of matrices that are spread over the registers of a warp."""
    shape = matrices.shape_of(instruction)
    out, *names = ((each,) if isinstance(each, str) else each for each in instruction.operands)
    words = [_by_warp(machine, each, _U64 if shape.kind == "f64" else _U32) for each in names]
    counts = [each.shape[-1] for each in words]
    left, right, (rows, cols) = matrices.fragments(counts[0], counts[1], counts[2], shape.size)
    a = np.zeros((len(words[0]), shape.m, shape.k), shape.dtype)
    b = np.zeros((len(words[0]), shape.k, shape.n), shape.dtype)
    a[(slice(None), *left)] = matrices.elements(shape.kind, words[0])
    b[(slice(None), *right)] = matrices.elements(shape.kind, words[1])
    result = np.matmul(a, b)[:, rows, cols] + words[2].view(shape.dtype)
    undefined = _undefined_of_warps(machine, sum(names, ()))
    for number, name in enumerate(out):
        machine.put(name, np.ascontiguousarray(result[:, :, number]).ravel(), mask, undefined)


@executes("wgmma")
def multiply_asynchronously(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """`wgmma`: products of four warps, at least one factor of which lies in shared memory."""
    form, lanes = instruction.qualifiers[0], machine.lanes_of(mask)
    for warpgroup in np.unique(lanes.numbers // 128).tolist():
        if form == "commit_group":
            machine.product_groups[warpgroup] += 1
        elif form == "wait_group":
            _wait(machine, warpgroup, int(instruction.operands[0]))
        elif form == "mma_async":
            _begin_product(machine, instruction, warpgroup)
        elif form != "fence":
            raise instruction.unsupported()


def _begin_product(machine: Machine, instruction: Instruction, warpgroup: int) -> None:
    shape = matrices.shape_of(instruction)
    out, left, right, keeps, *numbers = instruction.operands
    turns = [each == "1" for each in numbers[2:]]
    if numbers[:2] != ["1", "1"] or shape.size > 4:
        raise instruction.unsupported()
    first = 128 * warpgroup
    threads, mask = slice(first, first + 128), np.zeros(machine.lanes, bool)
    mask[threads] = True
    reads: list[tuple[Array, Array]] = []

    def shared(operand: Any, outer: int, is_turned: bool) -> Array:
        words = machine.full(operand, _U64)[threads]
        if (words != words[0]).any() or int(words[0]) >> 49 & 7:
            raise instruction.unsupported()
        at = matrices.addresses(int(words[0]), outer, shape.k, shape.size, is_turned)
        chunks = np.unique(at // 16 * 16)
        lanes = Lanes(*(np.full(len(chunks), each[first]) for each in machine.lanes_of(None)))
        placed = machine.shared.place(instruction, chunks, 16)
        reads.append(machine.shared.begin_reading(instruction, lanes, placed))
        at = placed[np.searchsorted(chunks, at // 16 * 16)] + at % 16
        view = machine.shared.data.view(UNSIGNED[shape.size])
        words = view[(machine.blocks[first] * machine.shared.pitch + at) // shape.size]
        return matrices.elements(shape.kind, words[..., None])[..., 0, 0]

    names: tuple[str, ...] = left if isinstance(left, tuple) else ()
    of_left, _, (rows, cols) = matrices.fragments(len(names), 0, len(out), shape.size)
    if names:
        a = np.zeros((4, 16, shape.k), np.float32)
        words = _by_warp(machine, names)[4 * warpgroup : 4 * warpgroup + 4]
        a[(slice(None), *of_left)] = matrices.elements(shape.kind, words)
        a = a.reshape(64, shape.k)
    else:
        a = shared(left, 64, turns[:1] == [True])
    product = np.matmul(a, shared(right, shape.n, turns[-1:] == [True]).T).reshape(4, 16, shape.n)
    keep = bool(machine.full(keeps, KINDS["pred"])[first])
    under_way = [each for each in machine.products if each.warpgroup == warpgroup and each.out == out]
    # What accumulates goes on without a wait.
    undefined = [machine.undefined_of(names)]
    undefined += [under_way[-1].is_undefined if under_way else machine.undefined_of(out)] * keep
    is_undefined = not all(is_defined for is_defined, _ in reads) or any(
        bool(np.broadcast_to(each, machine.lanes)[threads].any()) for each in undefined if each is not None
    )
    for number, name in enumerate(out):
        whole = np.zeros(machine.lanes, np.float32)
        whole[threads] = product[:, rows[:, number], cols[:, number]].ravel()
        if keep:
            whole[threads] += machine.full(name, KINDS["f32"])[threads]
        # Nobody may look before the wait.
        machine.put(name, whole, mask, mask)
    group = machine.product_groups[warpgroup]
    machine.products.append(_Product(warpgroup, group, out, is_undefined, [each for _, each in reads]))


def _wait(machine: Machine, warpgroup: int, left: int) -> None:
    """Let the accumulators of all but the last groups be looked at, and what they read be overwritten."""
    until, first = machine.product_groups[warpgroup] - left, 128 * warpgroup
    done = [each for each in machine.products if each.warpgroup == warpgroup and each.group < until]
    machine.products = [each for each in machine.products if not any(each is other for other in done)]
    under_way = {each.out for each in machine.products if each.warpgroup == warpgroup}
    for each in done:
        thread = int(machine.threads[first])
        for units in each.units:
            machine.shared.end_reading(units, machine.epochs[first], thread, thread + 127)
        for name in each.out if each.out not in under_way else ():
            undefined = np.broadcast_to(machine.undefined.get(name, False), machine.lanes).copy()
            undefined[first : first + 128] = each.is_undefined
            machine.put(name, machine.registers[name], None, undefined)
