"""Products of matrices that the threads of a warp (`mma`) or of four (`wgmma`) take together.

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

__all__ = ["Descriptor", "Shape", "fragment_of_left", "fragment_of_result", "fragment_of_right", "multiply", "shape_of"]

Array = Any

_LANE = np.arange(32)
_SIZES = {"bf16": 2, "f16": 2, "tf32": 4, "f64": 8, "s8": 1, "u8": 1}
# Bytes of a row of an atom in shared memory by the swizzle that its descriptor names.
_ROW_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}


class Shape(NamedTuple):
    """`[m, k]` times `[k, n]`, of elements of a kind and a size in bytes."""

    m: int
    n: int
    k: int
    kind: str
    size: int


def shape_of(instruction: Instruction) -> Shape:
    """The sizes that an instruction names; raises `UnsupportedInstructionError` for what cannot be multiplied here."""
    named = next(
        (found for each in instruction.qualifiers if (found := re.fullmatch(r"m(\d+)n(\d+)k(\d+)", each))), None
    )
    kinds = [each for each in instruction.qualifiers if each in _SIZES or each in ("f32", "s32")]
    if named is None or len(kinds) < 3:
        raise instruction.unsupported()
    result, left, right = kinds[:3]
    expected = "f64" if left == "f64" else "s32" if left in ("s8", "u8") else "f32"
    if left != right or result != expected or left not in _SIZES:
        raise instruction.unsupported()
    m, n, k = map(int, named.groups())
    return Shape(m, n, k, left, _SIZES[left])


def _together(rows: Array, cols: Array) -> tuple[Array, Array]:
    shape = np.broadcast_shapes(rows.shape, cols.shape)
    return np.broadcast_to(rows, shape), np.broadcast_to(cols, shape)


def fragment_of_left(registers: int, size: int) -> tuple[Array, Array]:
    """Rows and columns `[lane, register, element]` of a thread's share of the left factor."""
    lane, register, element = np.ogrid[:32, :registers, : max(4 // size, 1)]
    each = element.size
    return _together(lane // 4 + 8 * (register % 2) + 0 * element, each * (lane % 4 + 4 * (register // 2)) + element)


def fragment_of_right(registers: int, size: int) -> tuple[Array, Array]:
    """The same of the right factor."""
    lane, register, element = np.ogrid[:32, :registers, : max(4 // size, 1)]
    each = element.size
    return _together(each * (lane % 4 + 4 * register) + element, lane // 4 + 0 * (register + element))


def fragment_of_result(registers: int) -> tuple[Array, Array]:
    """Rows and columns `[lane, register]` of a thread's share of a sum or product: of a warp, 16 rows."""
    lane, register = np.ogrid[:32, :registers]
    rows = lane // 4 + 8 * (register // 2 % 2)
    return _together(rows, 8 * (register // 4) + 2 * (lane % 4) + register % 2)


def elements(kind: str, words: Array) -> Array:
    """The numbers in registers `[..., register]`, as `[..., register, element]`."""
    if kind == "f64":
        return words.view(np.float64)[..., None]
    if kind == "tf32":
        # The lower bits of the mantissa are not looked at.
        return (words & np.uint32(0xFFFFE000)).view(np.float32)[..., None]
    stored = {1: f"{'i' if kind == 's8' else 'u'}1", 2: "u2"}[_SIZES[kind]]
    parts = np.ascontiguousarray(words).view(stored).reshape(*words.shape, -1)
    return decode(kind, parts) if kind[0] != "s" and kind[0] != "u" else parts.astype(np.int32)


def multiply(shape: Shape, left: Array, right: Array, added: Array) -> Array:
    """`mma`: registers `[warp, lane, register]` of both factors and of what is added, to those of the result."""
    rows, cols = fragment_of_result(added.shape[-1])
    dtype = {"f64": np.float64, "s8": np.int32, "u8": np.int32}.get(shape.kind, np.float32)
    a = np.zeros((len(left), shape.m, shape.k), dtype)
    b = np.zeros((len(left), shape.k, shape.n), dtype)
    a[(slice(None), *fragment_of_left(left.shape[-1], shape.size))] = elements(shape.kind, left)
    b[(slice(None), *fragment_of_right(right.shape[-1], shape.size))] = elements(shape.kind, right)
    return np.matmul(a, b)[:, rows, cols] + added.view(dtype)


class Descriptor(NamedTuple):
    """Where `wgmma` finds a matrix in shared memory: addresses of its elements come in chunks of 16 bytes.

    Attributes:
        start: Byte of the first element.
        leading: Bytes between atoms along the dim whose elements are adjacent, where it has several.
        stride: Bytes between groups of 8 rows of atoms along the other dim.
        row_bytes: Bytes of a row of an atom.
    """

    start: int
    leading: int
    stride: int
    row_bytes: int

    @classmethod
    def of(cls, word: int) -> Descriptor:
        """The matrix that a register describes."""
        start, leading, stride = (16 * (word >> shift & 0x3FFF) for shift in (0, 16, 32))
        return cls(start, leading, stride, _ROW_BYTES[word >> 62])

    def addresses(self, outer: int, inner: int, size: int, is_outer_adjacent: bool) -> Array:
        """Bytes `[outer, inner]` of elements of `size` bytes; `inner` is the dim that is summed over.

        An atom has 8 rows of `row_bytes`. Rows lie along the outer dim, or where elements beside each other in memory
        are those of the outer dim, along the inner one.
        """
        i, j = np.ogrid[:outer, :inner]
        row, col = (j, i) if is_outer_adjacent else (i, j)
        per_row = self.row_bytes // size
        leading, stride = self.leading, self.stride
        if self.row_bytes == 16 and is_outer_adjacent:
            # Without a swizzle the two change places.
            leading, stride = stride, leading
        at = self.start + row % 8 * self.row_bytes + row // 8 * stride + col % per_row * size + col // per_row * leading
        # The swizzle: bits of the number of the row within the atom turn those of the chunk of 16 bytes.
        return at ^ (at >> 7 & (self.row_bytes // 16 - 1)) << 4
