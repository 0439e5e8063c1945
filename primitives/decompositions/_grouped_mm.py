r"""Products of matrices by groups of rows, as a mixture of experts takes them.

With group g the rows from `offs[g - 1]` to `offs[g]`, one of two forms, by the number of dims of b:

    y[t] = a[t] b[g]   for all t of group g         a [T, K], b [G, K, N], y [T, N]
    y[g] = sum of a[:, t] b[t] over t of group g    a [K, T], b [T, N], y [G, K, N]

Both are linear in a and in b, and each one's derivatives are of these forms: the first one's cotangents are `y_bar[t]
b[g]^T` and the second form of `a^T` and y_bar, the second one's the first forms of b and `y_bar^T`, and of `a^T` and
y_bar. Rows of no group are zero. Torch's `_grouped_mm` has no forward mode; it computes what it can of this.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives.decompositions._statistics import decomposes

# Records, and gates that follow from them, are of ops with kernels of their own.
grouped_mm_p = Primitive(
    "grouped_mm", "(Tensor a, Tensor b, Tensor offs) -> Tensor y", residuals=("a", "b", "offs"),
    namespace="primitives_composed",
)  # fmt: skip


@grouped_mm_p.def_fake
def _grouped_mm_fake(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    groups = [offs.shape[0]] * (b.dim() == 2)
    return a.new_empty((*groups, a.shape[0], b.shape[-1]))


def _is_aligned(x: Tensor) -> bool:
    """Whether torch takes `x`: not in float64, and lines of whole 16 bytes."""
    distance, adjacent = max(x.stride()[-2:]), min(x.stride()[-2:])
    starts = (distance * x.itemsize, x.data_ptr())
    return x.dtype != torch.float64 and adjacent == 1 and all(start % 16 == 0 for start in starts)


@grouped_mm_p.def_reference
def _grouped_mm_reference(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if _is_aligned(a) and _is_aligned(b):
        y = torch._grouped_mm(a, b, offs).contiguous()
        if b.dim() == 2:
            return y
        # Torch leaves rows of no group unwritten.
        return y.masked_fill_((torch.arange(y.shape[0], device=y.device) >= offs[-1])[:, None], 0)
    y = torch.zeros_like(_grouped_mm_fake(a, b, offs))
    start = 0
    for group, end in enumerate(offs.tolist()):
        rows = slice(start, end)
        if b.dim() == 3:
            torch.mm(a[rows], b[group], out=y[rows])
        else:
            torch.mm(a[:, rows], b[rows], out=y[group])
        start = end
    return y


@grouped_mm_p.def_vjp
def _grouped_mm_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor | None]:
    (a, b, offs), y_bar = residuals[:3], cotangents.y
    bars: dict[str, Tensor | None] = {}
    if output_mask.a and b.dim() == 3:
        bars["a"] = grouped_mm_p(y_bar, b.transpose(1, 2), offs)
    elif output_mask.a:
        bars["a"] = grouped_mm_p(b, y_bar.transpose(1, 2), offs).t()
    if output_mask.b:
        bars["b"] = grouped_mm_p(a.t(), y_bar, offs)
    return bars


@grouped_mm_p.def_jvp
def _grouped_mm_jvp(residuals: Any, tangents: Any) -> Tensor:
    (a, b, offs), (a_dot, b_dot) = residuals[:3], tangents[:2]
    terms = [grouped_mm_p(*pair, offs) for pair in ((a_dot, b), (a, b_dot)) if None not in pair]
    return functools.reduce(torch.add, terms)


@decomposes(torch.ops.aten._grouped_mm)
def grouped_mm(c: Any) -> Tensor:
    """Products of a mixture of experts, of which torch has no forward mode; also of float64, which it refuses."""
    if c.bias is not None or (c.offs is None) != (c.self.dim() == c.mat2.dim() == 3):
        return torch._grouped_mm(c.self, c.mat2, c.offs, c.bias, c.out_dtype)
    if c.offs is None:
        product = torch.bmm(c.self, c.mat2)
    elif c.self.dim() == 3:
        product = grouped_mm_p(c.mat2.t(), c.self.transpose(1, 2), c.offs).t()
    else:
        product = grouped_mm_p(c.self, c.mat2, c.offs)
    return product.to(c.out_dtype or c.self.dtype)
