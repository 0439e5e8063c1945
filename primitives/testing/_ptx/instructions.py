"""Instructions that move data: between registers, threads and memory, and products of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from primitives.testing._ptx import matrices
from primitives.testing._ptx.arithmetic import KINDS, UNSIGNED
from primitives.testing._ptx.machine import Machine, executes, reader, wider
from primitives.testing._ptx.memory import Access
from primitives.testing._ptx.shared import Lanes, bank_passes

if TYPE_CHECKING:
    from primitives.testing._ptx.code import Address, Instruction

Array = Any

_U32, _U64 = KINDS["u32"], KINDS["u64"]
_ATOMIC: dict[str, Any] = {
    **{"add": np.add, "min": np.minimum, "max": np.maximum, "exch": lambda old, new: new},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    "cas": lambda old, expected, new: new if old == expected else old,
}


class _Product(NamedTuple):
    """A `wgmma` under way: its warpgroup, group and accumulators, and what it reads of shared memory."""

    warpgroup: int
    group: int
    out: tuple[str, ...]
    is_undefined: bool
    units: list[Array]


@executes("mov")
def move(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Words put together, or taken apart."""
    (target, source), kind = instruction.operands, KINDS[instruction.qualifiers[-1]]
    if isinstance(target, tuple):
        parts = _words(machine, source, kind).view(UNSIGNED[kind.itemsize // len(target)]).reshape(machine.lanes, -1)
        for number, name in enumerate(target):
            machine.put(name, np.ascontiguousarray(parts[:, number]), mask, machine.undefined_of([source]))
    else:
        part = UNSIGNED[kind.itemsize // len(source)]
        parts = np.stack([machine.full(each, part) for each in source], 1)
        machine.put(target, parts.view(kind)[:, 0], mask, machine.undefined_of(source))


@executes("cvta")
def convert_address(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Addresses are the same in every space."""
    target, source = instruction.operands
    machine.put(target, reader(machine.program.code, source, _U64)(machine), mask, machine.undefined_of([source]))


@executes("createpolicy")
def create_policy(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Caches change no value."""
    machine.put(instruction.operands[0], np.zeros(1, _U64), mask)


@executes("fence", "membar")
def fence(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Instructions take effect in their order."""


@executes("bar")
def synchronize_warp(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """`bar.warp.sync`: what the threads of a warp did before comes before what they do now."""
    machine.warp_epochs += 1 if mask is None else mask


@executes("shfl")
def shuffle(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """A register of another thread of the warp; where the number leaves the segment, the own one."""
    target, source, by, clamp, _ = instruction.operands
    mode = instruction.qualifiers[1]
    if "|" in target or mode not in ("bfly", "idx", "up", "down"):
        raise instruction.unsupported()
    lane, number = machine.threads % 32, machine.full(by, KINDS["s32"]).astype(np.int64)
    bounds = machine.full(clamp, _U32).astype(np.int64)
    segment, last = bounds >> 8 & 31, bounds & 31
    low = lane & segment
    high = low | last & ~segment
    other = {"bfly": lane ^ number, "up": lane - number, "down": lane + number, "idx": low | number & ~segment}[mode]
    stays = other < low if mode == "up" else other > high
    index = np.arange(machine.lanes) + np.where(stays, lane, other) - lane
    if mask is not None and not mask[index][mask].all():
        machine.faults.note("divergence", instruction, "a thread reads of one that does not take part")
    undefined = machine.undefined_of([source])
    undefined = None if undefined is None else np.broadcast_to(undefined, machine.lanes)[index]
    machine.put(target, machine.full(source, _U32)[index], mask, undefined)


@executes("redux")
def reduce_warp(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """A sum, minimum, ... of a register over the threads of a warp that are in `mask`."""
    target, source, _ = instruction.operands
    how, kind = instruction.qualifiers[1:]
    if (
        how in ("exch", "cas")
        or how not in _ATOMIC
        or (mask is not None and mask.reshape(-1, 32).any(1).sum() * 32 != mask.sum())
    ):
        raise instruction.unsupported()
    values = _ATOMIC[how].reduce(machine.full(source, KINDS[kind]).reshape(-1, 32), axis=1)
    machine.put(target, np.repeat(values.astype(KINDS[kind]), 32), mask, machine.undefined_of([source]))


# Memory.
def _vector(instruction: Instruction, operand: Any) -> tuple[tuple[str, ...], np.dtype]:
    """The registers of a load or store, and what each holds of memory."""
    dtype = KINDS.get(instruction.qualifiers[-1])
    if dtype is None or not {"global", "shared", "param"} & {*instruction.qualifiers}:
        raise instruction.unsupported()
    return (operand if isinstance(operand, tuple) else (operand,)), dtype


def _addresses(machine: Machine, instruction: Instruction, address: Address, numbers: Array, mask: Any) -> Array:
    machine.must_be_defined(instruction, [address.base], mask, "an address")
    dtype = _U64 if machine.program.code.kind_of(address.base) == "b64" else _U32
    return machine.full(address.base, dtype)[numbers].astype(np.int64) + address.offset


def _shared_place(
    machine: Machine, instruction: Instruction, address: Address, lanes: Any, size: int, mask: Any
) -> Any:
    at = _addresses(machine, instruction, address, lanes.numbers, mask)
    at = machine.shared.place(instruction, at, size)
    passes, least = bank_passes(at, size, lanes.numbers // 32)
    machine.counts.update(shared_passes=passes, bank_conflicts=passes - least)
    return at


def _global_place(
    machine: Machine, instruction: Instruction, address: Address, numbers: Array, size: int, mask: Any
) -> Array:
    at = _addresses(machine, instruction, address, numbers, mask)
    return machine.memory.place(instruction, at, size, machine.faults)


@executes("ld")
def load(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Of parameters, shared or global memory."""
    targets, dtype = _vector(instruction, instruction.operands[0])
    address, count = instruction.operands[1], len(targets)
    widened = wider(machine.program.code, targets[0], instruction.qualifiers[-1], dtype)
    if "param" in instruction.qualifiers:
        value = machine.parameters[address.base]
        value = value.view(dtype) if value.dtype.itemsize == dtype.itemsize else value.astype(dtype)
        machine.put(targets[0], value if widened is None else value.astype(widened), mask)
        return
    lanes = machine.lanes_of(mask)
    if "shared" in instruction.qualifiers:
        at = _shared_place(machine, instruction, address, lanes, count * dtype.itemsize, mask)
        values, defined = machine.shared.load(instruction, lanes, at, count, dtype)
    else:
        size = count * dtype.itemsize
        at = _global_place(machine, instruction, address, lanes.numbers, size, mask)
        index = at[:, None] // dtype.itemsize + np.arange(count)
        values = machine.memory.data.view(dtype)[index]
        defined = machine.memory.undefined.view(UNSIGNED[dtype.itemsize])[index] == 0
        machine.memory.accesses.append(Access(False, instruction, size, at, machine.numbers[lanes.numbers]))
    values = values if widened is None else values.astype(widened)
    is_defined = defined.all()
    if not is_defined:
        first = int(at[~defined.all(1)][0])
        is_shared = "shared" in instruction.qualifiers
        machine.note_origin(f"byte {first} of shared memory" if is_shared else machine.memory.where(first))
    for number, name in enumerate(targets):
        _put(machine, name, lanes.numbers, values[:, number], mask, None if is_defined else ~defined[:, number])


def _put(machine: Machine, name: str, numbers: Array, values: Array, mask: Any, undefined: Any) -> None:
    """Set a register of the threads `numbers`, which are those in the mask."""
    if mask is None:
        machine.put(name, np.ascontiguousarray(values), None, undefined)
        return
    whole, bad = np.zeros(machine.lanes, values.dtype), np.zeros(machine.lanes, bool)
    whole[numbers] = values
    if undefined is not None:
        bad[numbers] = undefined
    machine.put(name, whole, mask, None if undefined is None else bad)


@executes("st")
def store(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """To shared or global memory."""
    sources, dtype = _vector(instruction, instruction.operands[1])
    address, lanes, bits = instruction.operands[0], machine.lanes_of(mask), UNSIGNED[dtype.itemsize]
    values = np.stack([machine.full(each, bits)[lanes.numbers] for each in sources], 1)
    size = len(sources) * dtype.itemsize
    if "shared" in instruction.qualifiers:
        at = _shared_place(machine, instruction, address, lanes, size, mask)
        undefined = machine.undefined_of(sources)
        undefined = None if undefined is None else np.broadcast_to(undefined, machine.lanes)[lanes.numbers]
        machine.shared.store(instruction, lanes, at, values, undefined)
        return
    machine.must_be_defined(instruction, sources, mask, "what is stored")
    at = _global_place(machine, instruction, address, lanes.numbers, size, mask)
    index, view = at[:, None] // dtype.itemsize + np.arange(len(sources)), machine.memory.data.view(bits)
    changed = (view[index] != values).any(1)
    view[index] = values
    lost = view[index] != values
    if lost.any():
        machine.faults.note("block race", instruction, "threads store different values at one place", lost.sum())
    machine.memory.undefined.view(bits)[index] = 0
    numbers = machine.numbers[lanes.numbers]
    machine.memory.accesses.append(Access(True, instruction, size, at, numbers, changed))


@executes("atom", "red")
def update(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Atomic operations on global memory, of one thread after another."""
    target, address, *operands = instruction.operands if instruction.op == "atom" else ("_", *instruction.operands)
    form = [each for each in instruction.qualifiers if each in _ATOMIC]
    if len(form) != 1 or isinstance(operands[0], tuple) or "global" not in instruction.qualifiers:
        raise instruction.unsupported()
    (_,), dtype = _vector(instruction, operands[0])
    numbers = machine.lanes_of(mask).numbers
    machine.must_be_defined(instruction, operands, mask, "what is stored")
    at = _global_place(machine, instruction, address, numbers, dtype.itemsize, mask)
    view, values = machine.memory.data.view(dtype), [machine.full(each, dtype)[numbers] for each in operands]
    old = np.zeros(len(at), dtype)
    for number, index in enumerate(at // dtype.itemsize):
        old[number] = view[index]
        view[index] = _ATOMIC[form[0]](old[number], *(each[number] for each in values))
    _put(machine, target, numbers, old, mask, None)


@executes("cp")
def copy(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """`cp.async` from global to shared memory: its groups, and the waits for them."""
    form = instruction.qualifiers
    if form[:2] == ("async", "commit_group"):
        machine.copy_groups += 1 if mask is None else mask
        return
    if form[:2] in (("async", "wait_group"), ("async", "wait_all")):
        left = int(instruction.operands[0]) if instruction.operands else 0
        groups = machine.copy_groups if instruction.operands else machine.copy_groups + 1
        machine.shared.finish_copies(machine.lanes_of(mask), groups, left)
        return
    if form[:2] not in (("async", "ca"), ("async", "cg")):
        raise instruction.unsupported()
    to, source, text, *rest = instruction.operands
    size, lanes = int(text, 0), machine.lanes_of(mask)
    # A number of bytes, behind which zeros follow, and a policy of caches.
    rest = rest[: len(rest) - any("cache_hint" in each for each in form)]
    used = machine.full(rest[0] if rest else text, _U32)[lanes.numbers]
    if not ((used == 0) | (used == size)).all():
        raise instruction.unsupported()
    data, undefined = np.zeros((len(used), size), np.uint8), np.zeros(len(used), bool)
    reading = lanes.numbers[used > 0]
    if reading.size:
        is_reading = np.zeros(machine.lanes, bool)
        is_reading[reading] = True
        at = _global_place(machine, instruction, source, reading, size, is_reading)
        index = at[:, None] + np.arange(size)
        data[used > 0], undefined[used > 0] = machine.memory.data[index], machine.memory.undefined[index].any(1)
        machine.memory.accesses.append(Access(False, instruction, size, at, machine.numbers[reading]))
    at = _shared_place(machine, instruction, to, lanes, size, mask)
    machine.shared.copy(instruction, lanes, machine.copy_groups[lanes.numbers], at, data, undefined)


# Matrices.
def _words(machine: Machine, name: str, dtype: np.dtype) -> Array:
    return np.ascontiguousarray(machine.full(name, dtype))


def _by_warp(machine: Machine, names: tuple[str, ...], dtype: np.dtype = _U32) -> Array:
    """Registers `[warp, lane, register]`."""
    return np.stack([_words(machine, each, dtype).reshape(-1, 32) for each in names], 2)


def _of_warps(machine: Machine, names: Any, per: int = 32) -> Any:
    """Which values are undefined that follow from registers of all threads of a warp; None for none."""
    undefined = machine.undefined_of(names)
    if undefined is None:
        return None
    return np.repeat(np.broadcast_to(undefined, machine.lanes).reshape(-1, per).any(1), per)


def _rows(machine: Machine, instruction: Instruction, address: Address, count: int, mask: Any) -> Any:
    """The threads that have the addresses of the rows of `count` matrices, and their places."""
    is_row = machine.threads % 32 < 8 * count
    mask = is_row if mask is None else is_row & mask
    lanes = machine.lanes_of(mask)
    return lanes, _shared_place(machine, instruction, address, lanes, 16, mask)


def _pairs(is_transposed: bool) -> tuple[Array, Array]:
    """Row and column of both elements `[lane, 2]` that a thread has of a matrix of 8 x 8."""
    row, col = np.arange(32)[:, None] // 4, 2 * (np.arange(32)[:, None] % 4) + np.arange(2)
    row, col = np.broadcast_arrays(row, col)
    return (col, row) if is_transposed else (row, col)


@executes("ldmatrix")
def load_matrix(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Matrices of 8 x 8 numbers of 16 bits: each thread names a row, and gets two elements of each matrix."""
    targets, address = instruction.operands
    if not {"m8n8", "b16"} <= {*instruction.qualifiers}:
        raise instruction.unsupported()
    lanes, at = _rows(machine, instruction, address, len(targets), mask)
    values, defined = machine.shared.load(instruction, lanes, at, 8, KINDS["u16"])
    values = values.reshape(-1, len(targets), 8, 8)
    if not defined.all():
        machine.note_origin(f"byte {int(at[~defined.all(1)][0])} of shared memory")
    undefined = None if defined.all() else np.repeat(~defined.reshape(len(values), -1).all(1), 32)
    numbers = np.arange(machine.lanes) if mask is None else np.flatnonzero(mask)
    pairs = _pairs("trans" in instruction.qualifiers)
    for number, name in enumerate(targets):
        words = np.ascontiguousarray(values[:, number][(slice(None), *pairs)]).view(_U32)
        _put(machine, name, numbers, words.ravel(), mask, undefined)


@executes("stmatrix")
def store_matrix(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """The opposite of `ldmatrix`."""
    address, sources = instruction.operands
    if not {"m8n8", "b16"} <= {*instruction.qualifiers}:
        raise instruction.unsupported()
    words = _by_warp(machine, sources)
    matrix = np.zeros((len(words), len(sources), 8, 8), np.uint16)
    for number in range(len(sources)):
        pairs = np.ascontiguousarray(words[:, :, number]).view(np.uint16).reshape(-1, 32, 2)
        matrix[(slice(None), number, *_pairs("trans" in instruction.qualifiers))] = pairs
    lanes, at = _rows(machine, instruction, address, len(sources), mask)
    undefined = _of_warps(machine, sources)
    values = matrix[lanes.numbers // 32, lanes.numbers % 32 // 8, lanes.numbers % 8]
    machine.shared.store(instruction, lanes, at, values, None if undefined is None else undefined[lanes.numbers])


@executes("mma")
def multiply(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """A product of matrices that are spread over the registers of a warp."""
    shape = matrices.shape_of(instruction)
    out, left, right, added = ((each,) if isinstance(each, str) else each for each in instruction.operands)
    dtype = _U64 if shape.kind == "f64" else _U32
    words = (_by_warp(machine, each, dtype) for each in (left, right, added))
    result = matrices.multiply(shape, *words)
    undefined = _of_warps(machine, (*left, *right, *added))
    for number, name in enumerate(out):
        machine.put(name, np.ascontiguousarray(result[:, :, number]).ravel(), mask, undefined)


@executes("wgmma")
def multiply_asynchronously(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """`wgmma`: products of four warps, at least one factor of which lies in shared memory."""
    form = instruction.qualifiers[0]
    warpgroups = np.unique((np.arange(machine.lanes) if mask is None else np.flatnonzero(mask)) // 128).tolist()
    if form == "commit_group":
        machine.product_groups.update(warpgroups)
    elif form == "wait_group":
        for warpgroup in warpgroups:
            _wait(machine, warpgroup, int(instruction.operands[0]))
    elif form == "mma_async":
        for warpgroup in warpgroups:
            _begin_product(machine, instruction, warpgroup)
    elif form != "fence":
        raise instruction.unsupported()


def _begin_product(machine: Machine, instruction: Instruction, warpgroup: int) -> None:
    shape = matrices.shape_of(instruction)
    out, left, right, keeps, *numbers = instruction.operands
    turns = [each == "1" for each in numbers[2:]]
    if numbers[:2] != ["1", "1"] or shape.size > 4:
        raise instruction.unsupported()
    threads = slice(128 * warpgroup, 128 * (warpgroup + 1))
    reads: list[tuple[Array, Array]] = []

    def shared(operand: str, outer: int, is_turned: bool) -> Array:
        words = machine.full(operand, _U64)[threads]
        if (words != words[0]).any() or int(words[0]) >> 49 & 7:
            raise instruction.unsupported()
        described = matrices.Descriptor.of(int(words[0]))
        at = described.addresses(outer, shape.k, shape.size, is_turned)
        chunks = np.unique(at // 16 * 16)
        lanes = machine.lanes_of(None)
        lanes = Lanes(*(each[np.full(len(chunks), threads.start)] for each in lanes))
        placed = machine.shared.place(instruction, chunks, 16)
        reads.append(machine.shared.begin_reading(instruction, lanes, placed))
        at = placed[np.searchsorted(chunks, at // 16 * 16)] + at % 16
        view = machine.shared.data.view(UNSIGNED[shape.size])
        words = view[(machine.blocks[threads.start] * machine.shared.pitch + at) // shape.size]
        return matrices.elements(shape.kind, words[..., None])[..., 0, 0]

    names: tuple[str, ...] = left if isinstance(left, tuple) else ()
    if isinstance(left, tuple):
        words = _by_warp(machine, names)[4 * warpgroup : 4 * warpgroup + 4]
        a = np.zeros((4, 16, shape.k), np.float32)
        a[(slice(None), *matrices.fragment_of_left(len(names), shape.size))] = matrices.elements(shape.kind, words)
        a = a.reshape(64, shape.k)
    else:
        a = shared(left, 64, turns[:1] == [True])
    product = np.matmul(a, shared(right, shape.n, turns[-1:] == [True]).T).reshape(4, 16, shape.n)
    rows, cols = matrices.fragment_of_result(len(out))
    mask = np.zeros(machine.lanes, bool)
    mask[threads] = True
    keep = bool(machine.full(keeps, KINDS["pred"])[threads.start])
    under_way = [each for each in machine.products if each.warpgroup == warpgroup and each.out == out]
    # What accumulates goes on without a wait.
    undefined = [machine.undefined_of(names)]
    undefined += [under_way[-1].is_undefined if under_way else machine.undefined_of(out)] * keep
    is_undefined = not all(is_defined for is_defined, _ in reads) or any(
        bool(np.broadcast_to(each, machine.lanes)[threads].any()) for each in undefined if each is not None
    )
    for number, name in enumerate(out):
        value = product[:, rows[:, number], cols[:, number]].ravel()
        value = value + machine.full(name, KINDS["f32"])[threads] if keep else value
        whole = np.zeros(machine.lanes, np.float32)
        whole[threads] = value
        # Nobody may look before the wait.
        machine.put(name, whole, mask, mask)
    units = [each for _, each in reads]
    group = machine.product_groups[warpgroup]
    machine.products.append(_Product(warpgroup, group, out, is_undefined, units))


def _wait(machine: Machine, warpgroup: int, left: int) -> None:
    """Let the accumulators of all but the last groups be looked at, and what they read be overwritten."""
    until, first = machine.product_groups[warpgroup] - left, 128 * warpgroup
    done = [each for each in machine.products if each.warpgroup == warpgroup and each.group < until]
    machine.products = [each for each in machine.products if not any(each is other for other in done)]
    for each in done:
        thread = int(machine.threads[first])
        for units in each.units:
            machine.shared.end_reading(units, machine.epochs[first], thread, thread + 127)
        if any(each.out == other.out and other.warpgroup == warpgroup for other in machine.products):
            continue
        for name in each.out:
            undefined = np.broadcast_to(machine.undefined.get(name, False), machine.lanes).copy()
            undefined[first : first + 128] = each.is_undefined
            machine.put(name, machine.registers[name], None, undefined)
