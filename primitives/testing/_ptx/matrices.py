"""Layouts of the matrices that the threads of a warp (`mma`) or of four (`wgmma`) multiply together.

A fragment is a thread's share of a matrix: so many registers, each with as many elements as fit. The layouts are those
of "Matrix Fragments for mma" and of "Register Fragments" and "Shared Memory Matrix Layout" for wgmma in the PTX manual.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from primitives.testing._ptx.arithmetic import decode

if TYPE_CHECKING:
    from primitives.testing._ptx.code import Instruction

__all__ = ["Shape", "addresses", "elements", "fragments", "shape_of"]

Array = Any

_SIZES = {"bf16": 2, "f16": 2, "tf32": 4, "f64": 8}
# Bytes of a row of an atom in shared memory by the swizzle that its descriptor names.
_ROW_BYTES = (16, 128, 64, 32)


class Shape(NamedTuple):
    """`[m, k]` times `[k, n]`, of elements of a kind and a size in bytes, added up in numbers of `dtype`."""

    m: int
    n: int
    k: int
    kind: str
    size: int
    dtype: type


def shape_of(instruction: Instruction) -> Shape:
    """The sizes that an instruction names; raises `UnsupportedInstructionError` for what cannot be multiplied here."""
    text = ".".join(instruction.qualifiers)
    found = re.search(r"\bm(\d+)n(\d+)k(\d+)\b.*?\.(f64|f32)\.(f64|tf32|bf16|f16)\.\5", text)
    if found is None or (found[4] == "f64") != (found[5] == "f64"):
        raise instruction.unsupported()
    m, n, k = map(int, found.groups()[:3])
    return Shape(m, n, k, found[5], _SIZES[found[5]], np.float64 if found[4] == "f64" else np.float32)


def fragments(left: int, right: int, result: int, size: int) -> tuple[Any, Any, Any]:
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


def elements(kind: str, words: Array) -> Array:
    """The numbers in registers `[..., register]`, as `[..., register, element]`."""
    if kind == "f64":
        return words.view(np.float64)[..., None]
    if kind == "tf32":
        # The lower bits of the mantissa are not looked at.
        return (words & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    return decode(kind, np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, -1))


def addresses(descriptor: int, outer: int, inner: int, size: int, is_outer_adjacent: bool) -> Array:
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
