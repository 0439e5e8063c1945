"""Decompositions of determinants and linear systems, by the factors `P L U` of the matrix.

ATen hands the factors that it computed to the derivatives, which take them for constants: beyond the first, forward
mode is silently wrong. Here they are functions of the matrix, whose derivatives torch has right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from primitives._core.decomposition import decomposition_table, register_decomposition
from primitives.decompositions._statistics import of_part

aten = torch.ops.aten

_MOST_ORDERS = 4


def _of_parity(product: Tensor, pivots: Tensor) -> Tensor:
    """The product for an even number of swapped rows, minus it for an odd one."""
    swapped = pivots != torch.arange(1, pivots.shape[-1] + 1, device=pivots.device, dtype=pivots.dtype)
    # Dynamo does not trace two `jvp` of a product with the sign.
    return torch.where(swapped.sum(-1) % 2 == 1, -product, product)


def det_of_factors(factors: Tensor, pivots: Tensor) -> Tensor:
    """Determinant of the matrix that `torch.linalg.lu_factor` has factored."""
    return _of_parity(factors.diagonal(dim1=-2, dim2=-1).prod(-1), pivots)


@register_decomposition(aten._linalg_det)
def linalg_det_factored(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Determinant of matrices `[*, n, n]`, and their factors.

    The factors of a singular matrix have no derivative, its determinant has: with `s = P L D`, where D selects the k
    numbers of U's diagonal that are zero, `det(A + t s)` is a polynomial of degree k in t, and so is each derivative.
    Regular matrices at t = 1, 2, ... say what it is at 0. Where k is larger than the number of points allows, all
    derivatives to order 4 are zero.
    """
    factors, pivots, _ = torch.linalg.lu_factor_ex(A)
    value = det_of_factors(factors, pivots)
    if A.shape[-1] == 0:
        return value, factors, pivots
    permutation, lower, upper = torch.lu_unpack(factors.detach(), pivots)
    largest = upper.abs().amax((-2, -1)).unsqueeze(-1)
    is_zero = upper.diagonal(dim1=-2, dim2=-1).abs() <= A.shape[-1] * torch.finfo(A.dtype).eps * largest
    shift = (permutation @ lower) * (is_zero * torch.where(largest == 0, 1, largest)).unsqueeze(-2)
    degree = min(A.shape[-1], _MOST_ORDERS)
    weights = [(-1) ** point * math.comb(degree + 1, point + 1) for point in range(degree + 1)]
    at_points = torch.stack([A + (point + 1) * shift for point in range(degree + 1)])
    dets = det_of_factors(*torch.linalg.lu_factor_ex(at_points)[:2])
    smooth = sum(weight * det for weight, det in zip(weights, dets, strict=True))
    smooth = torch.where(is_zero.sum(-1) <= degree, smooth, 0)
    # The value of the first factors has no rounding of the points.
    return value.detach() + (smooth - smooth.detach()), factors, pivots


of_part([aten.linalg_det, aten.det], aten._linalg_det.default, 0)


@register_decomposition(aten._linalg_slogdet)
def linalg_slogdet_factored(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sign of the determinant of matrices `[*, n, n]`, logarithm of its size, and their factors."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(A)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    return _of_parity(diagonal.sgn().prod(-1), pivots), diagonal.abs().log().sum(-1), factors, pivots


of_part([aten.linalg_slogdet, aten.slogdet], aten._linalg_slogdet.default, slice(2))


@register_decomposition(aten.logdet)
def logdet(self: Tensor) -> Tensor:
    """Logarithm of the determinant: NaN where that is negative."""
    sign, logarithm, *_ = linalg_slogdet_factored(self)
    return logarithm + sign.log()


@register_decomposition(aten._linalg_solve_ex)
def linalg_solve_factored(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solution X of `A X = B` (`X A = B` if not `left`), the factors of A, and whether it is singular."""
    factors, pivots, info = torch.linalg.lu_factor_ex(A)
    if check_errors:
        torch._linalg_check_errors(info, "torch.linalg.solve_ex", is_matrix=A.dim() == 2)  # type: ignore[attr-defined]
    # As in torch: of one axis, or of the axes of A but the last one, B is vectors.
    is_vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1])
    columns = B.unsqueeze(-1) if is_vector else B
    # Not `lu_solve`, whose kernel for the CPU takes wrong factors if they are broadcast, as in a batch of derivatives.
    permutation, lower, upper = torch.lu_unpack(factors, pivots)
    if left:
        half = torch.linalg.solve_triangular(lower, permutation.mT @ columns, upper=False, unitriangular=True)
        solution = torch.linalg.solve_triangular(upper, half, upper=True)
    else:
        half = torch.linalg.solve_triangular(upper, columns, upper=True, left=False)
        solution = torch.linalg.solve_triangular(lower, half, upper=False, left=False, unitriangular=True)
        solution = solution @ permutation.mT
    return solution.squeeze(-1) if is_vector else solution, factors, pivots, info


@register_decomposition(aten.linalg_solve_ex)
def linalg_solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """The solution of `linalg_solve_factored`, and whether the matrix is singular."""
    found = decomposition_table[aten._linalg_solve_ex.default](A, B, left=left, check_errors=check_errors)
    return found[0], found[3]


@register_decomposition(aten.linalg_solve)
def linalg_solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """The solution; a singular matrix is an error."""
    solution, info = linalg_solve_ex(A, B, left=left)
    torch._linalg_check_errors(info, "torch.linalg.solve", is_matrix=A.dim() == 2)  # type: ignore[attr-defined]
    return solution
