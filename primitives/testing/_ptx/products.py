"""Instructions on matrices: `ldmatrix` and `stmatrix`, and products of one warp (`mma`) or of four (`wgmma`).

A fragment is a thread's share of a matrix: so many registers, each with as many elements as fit. The layouts are those
of "Matrix Fragments for mma" and of "Register Fragments" and "Shared Memory Matrix Layout" for wgmma in the PTX manual.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

from primitives.testing._ptx.arithmetic import KINDS, UNSIGNED, decode
from primitives.testing._ptx.code import Instruction
from primitives.testing._ptx.machine import DEFINED, Machine, executes

Array = Any

_U16, _U32, _U64 = KINDS["u16"], KINDS["u32"], KINDS["u64"]
# Rows and columns of both elements `[lane, 2]` that a thread has of a matrix of 8 x 8.
_PAIRS = np.broadcast_arrays(np.arange(32)[:, None] // 4, 2 * (np.arange(32)[:, None] % 4) + np.arange(2))

_SIZES = {"bf16": 2, "f16": 2, "tf32": 4, "f64": 8}
# Bytes of a row of an atom in shared memory by the swizzle that its descriptor names.
_ROW_BYTES = (16, 128, 64, 32)


def _shape_of(instruction: Instruction) -> tuple[int, int, str]:
    """Columns of the result, the length of its sums, and the kind of what is multiplied."""
    found = re.search(r"\.m\d+n(\d+)k(\d+)\.(?:.*\.)?(f64\.(f64)\.f64|f32\.(tf32|bf16|f16)\.\5)", instruction.text)
    if found is None:
        raise instruction.unsupported()
    return int(found[1]), int(found[2]), found[4] or found[5]


@functools.cache
def _fragments(left: int, right: int, result: int, size: int) -> tuple[Any, Any, Any]:
    """Rows and columns of a thread's share of both factors, `[lane, register, element]`, and of the result.

    Arguments are numbers of registers, and the bytes of an element. A result has 16 rows a warp, an element a register.
    """
    per = max(4 // size, 1)
    lane, register, element = np.ogrid[:32, : max(left, right, result), :per]
    group, thread = lane // 4, lane % 4
    inner = per * thread + element
    a = group + 8 * (register % 2), inner + 4 * per * (register // 2)
    b = inner + 4 * per * register, group
    c = group + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * thread + register % 2
    a, b, c = (np.broadcast_arrays(*each, register + 0 * element)[:2] for each in (a, b, c))
    return [x[:, :left] for x in a], [x[:, :right] for x in b], [x[:, :result, 0] for x in c]


def _elements(kind: str, words: Array) -> Array:
    """The numbers in registers `[..., register]`, as `[..., register, element]`."""
    if kind == "f64":
        return words.view(np.float64)[..., None]
    if kind == "tf32":
        # The lower bits of the mantissa are not looked at.
        return (words & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    return decode(kind, np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, -1))


def _whole(words: Array, place: Any, kind: str) -> Array:
    """The matrices `[warp, row, column]` whose fragments are in registers `[warp, lane, register]`."""
    (rows, cols), values = place, _elements(kind, words)
    matrix = np.zeros((len(words), rows.max() + 1, cols.max() + 1), values.dtype)
    matrix[:, rows, cols] = values
    return matrix


def _addresses(descriptor: int, outer: int, inner: int, size: int, is_outer_adjacent: bool) -> Array:
    """Bytes `[outer, inner]` in shared memory, of elements of `size` bytes, where a descriptor of `wgmma` has them.

    `inner` is the dim that is summed over. An atom has 8 rows of `row_bytes`. Rows lie along the outer dim, or where
    elements beside each other in memory are those of the outer dim, along the inner one. The descriptor has the first
    byte, and the bytes between atoms along the dim whose elements are adjacent, and between groups of 8 rows.
    """
    start, leading, stride = (16 * (descriptor >> shift & 0x3FFF) for shift in (0, 16, 32))
    row_bytes = _ROW_BYTES[descriptor >> 62]
    i, j = np.ogrid[:outer, :inner]
    row, col = (j, i) if is_outer_adjacent else (i, j)
    if row_bytes == 16 and is_outer_adjacent:
        # Without a swizzle the two change places.
        leading, stride = stride, leading
    per_row = row_bytes // size
    at = start + row % 8 * row_bytes + row // 8 * stride + col % per_row * size + col // per_row * leading
    # The swizzle: bits of the number of the row within the atom turn those of the chunk of 16 bytes.
    return at ^ (at >> 7 & (row_bytes // 16 - 1)) << 4


def _by_warp(machine: Machine, names: tuple[str, ...], mask: Any, dtype: np.dtype = _U32) -> Array:
    """Registers `[warp, lane, register]`."""
    return np.stack([machine.full(each, dtype, mask).reshape(-1, 32) for each in names], 2)


def _of_warps(undefined: Array) -> Array:
    """What follows from values of all threads of a warp."""
    return undefined if undefined.size == 1 else np.repeat(undefined.reshape(-1, 32).any(1), 32)


@executes("ldmatrix", "stmatrix")
def move_matrix(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Matrices of 8 x 8 numbers of 16 bits: each thread names a row, and has two elements of each matrix."""
    if not {"m8n8", "b16"} <= {*instruction.qualifiers}:
        raise instruction.unsupported()
    is_load = instruction.op == "ldmatrix"
    names, address = instruction.operands if is_load else instruction.operands[::-1]
    pairs = _PAIRS[::-1] if "trans" in instruction.qualifiers else _PAIRS
    lanes, count = machine.lanes_of(mask), len(names)
    rows = lanes.numbers[lanes.threads % 32 < 8 * count]
    lanes, at = machine.reach(instruction, address, rows, machine.shared)
    if is_load:
        values, undefined = machine.shared.load(instruction, lanes, at, 8, _U16)
        values = values.reshape(-1, count, 8, 8)[:, :, pairs[0], pairs[1]]
        words = np.ascontiguousarray(values.swapaxes(1, 2)).view(_U32).reshape(-1, count)
        undefined = np.repeat(undefined.reshape(len(values), -1).any(1), 32)
        machine.put_each(names, words, mask, undefined)
        return
    words = _by_warp(machine, names, mask)
    matrix = np.zeros((len(words), count, 8, 8), np.uint16)
    matrix[:, :, pairs[0], pairs[1]] = words.view(np.uint16).reshape(-1, 32, count, 2).swapaxes(1, 2)
    undefined = _of_warps(machine.undefined_of(names))
    undefined = undefined if undefined.size == 1 else undefined[rows]
    machine.shared.store(instruction, lanes, at, matrix.reshape(-1, 8), undefined[:, None])


@executes("mma")
def multiply(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """A product of matrices that are spread over the registers of a warp."""
    *_, kind = _shape_of(instruction)
    out, *names = ((each,) if isinstance(each, str) else each for each in instruction.operands)
    a, b, c = (_by_warp(machine, each, mask, _U64 if kind == "f64" else _U32) for each in names)
    left, right, (rows, cols) = _fragments(*(each.shape[-1] for each in (a, b, c)), _SIZES[kind])
    product = np.matmul(_whole(a, left, kind), _whole(b, right, kind))
    result = (product[:, rows, cols] + c.view(product.dtype)).reshape(-1, len(out))
    machine.put_each(out, result, mask, _of_warps(machine.undefined_of(sum(names, ()), mask)))


@executes("wgmma")
def multiply_asynchronously(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """`wgmma`: products of four warps, at least one factor of which lies in shared memory."""
    form = instruction.qualifiers[0]
    if form == "commit_group":
        machine.products.close(mask)
    elif form == "wait_group":
        machine.products.wait(mask, int(instruction.operands[0]))
    elif form == "mma_async":
        for threads in machine.lanes_of(mask).numbers.reshape(-1, 128):
            _begin_product(machine, instruction, threads)
    elif form != "fence":
        raise instruction.unsupported()


def _begin_product(machine: Machine, instruction: Instruction, threads: Array) -> None:
    cols, inner, kind = _shape_of(instruction)
    out, left, right, keeps, *numbers = instruction.operands
    turns, word = [each == "1" for each in numbers[2:]], UNSIGNED[_SIZES[kind]]
    if numbers[:2] != ["1", "1"] or kind == "f64":
        raise instruction.unsupported()
    names: tuple[str, ...] = left if isinstance(left, tuple) else ()
    reads: list[tuple[Array, Array]] = []

    def shared(operand: Any, outer: int, is_turned: bool) -> Array:
        words = machine.full(operand, _U64, threads)
        if (words != words[0]).any() or int(words[0]) >> 49 & 7:
            raise instruction.unsupported()
        at = _addresses(int(words[0]), outer, inner, word.itemsize, is_turned)
        chunks, place = np.unique(at // 16, return_inverse=True)
        lanes = machine.lanes_of(np.full(len(chunks), threads[0]))
        chunks = machine.shared.find(lanes, 16 * chunks)
        values, *read = machine.shared.begin_product(instruction, lanes, chunks, word)
        reads.append((read[0], read[1]))
        return _elements(kind, values[place.reshape(at.shape), at % 16 // word.itemsize, None])[..., 0, 0]

    of_left, _, at = _fragments(len(names), 0, len(out), word.itemsize)
    if names:
        a = _whole(_by_warp(machine, names, threads), of_left, kind).reshape(64, inner)
    else:
        a = shared(left, 64, turns[:1] == [True])
    product = np.matmul(a, shared(right, cols, turns[-1:] == [True]).T).reshape(4, 16, cols)
    result = product[:, at[0], at[1]].reshape(128, len(out))
    undefined = machine.undefined_of(names, threads).any() | any(each.any() for each, _ in reads)
    place = int(threads[0]), out
    if machine.get(keeps, KINDS["pred"], threads)[0]:
        result += np.stack([machine.full(each, KINDS["f32"], threads) for each in out], 1)
        # What accumulates goes on without a wait.
        before = machine.accumulators.get(place)
        undefined |= machine.undefined_of(out, threads).any() if before is None else before[0]
    # Nobody may look before the wait.
    machine.put_each(out, result, threads, ~DEFINED)
    machine.accumulators[place] = own = np.array([undefined])

    def finish(_done: Array) -> None:
        """Let the accumulators be looked at, unless another product takes them on, and what was read be overwritten."""
        for _, units in reads:
            machine.shared.end_product(units, machine.lanes_of(threads))
        if machine.accumulators.get(place) is own:
            del machine.accumulators[place]
            for name in out:
                machine.put(name, machine.full(name, _U32, threads), threads, own)

    machine.products.begin(threads, finish)
