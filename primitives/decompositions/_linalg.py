"""Decompositions of determinants and linear systems, and of operators on factors of a matrix.

Of the first, ATen hands the factors `P L U` that it computed to the derivatives, which take them for constants: beyond
the first, forward mode is silently wrong. Here they are functions of the matrix, whose derivatives torch has right. Of
triangular factors, reflections and eigenvectors, torch's own derivatives raise, or take for constants what moves, or
miscount what is broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives._core.decomposition import decomposition_table, register_decomposition
from primitives.decompositions._norms import require
from primitives.decompositions._statistics import constant_p, decomposes, of_part

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


@decomposes(aten._linalg_solve_ex)
def linalg_solve_factored(c: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solution X of `A X = B` (`X A = B` if not `left`), the factors of A, and whether it is singular."""
    factors, pivots, info = torch.linalg.lu_factor_ex(c.A)
    if c.check_errors:
        torch._linalg_check_errors(info, "torch.linalg.solve_ex", is_matrix=c.A.dim() == 2)  # type: ignore[attr-defined]
    # As in torch: of one axis, or of the axes of A but the last one, B is vectors.
    is_vector = c.B.dim() == 1 or (c.A.dim() - 1 == c.B.dim() and c.B.shape == c.A.shape[:-1])
    columns = c.B.unsqueeze(-1) if is_vector else c.B
    # Not `lu_solve`, whose kernel for the CPU takes wrong factors if they are broadcast, as in a batch of derivatives.
    permutation, lower, upper = torch.lu_unpack(factors, pivots)
    if c.left:
        half = torch.linalg.solve_triangular(lower, permutation.mT @ columns, upper=False, unitriangular=True)
        solution = torch.linalg.solve_triangular(upper, half, upper=True)
    else:
        half = torch.linalg.solve_triangular(upper, columns, upper=True, left=False)
        solution = torch.linalg.solve_triangular(lower, half, upper=False, left=False, unitriangular=True)
        solution = solution @ permutation.mT
    return solution.squeeze(-1) if is_vector else solution, factors, pivots, info


@decomposes(aten.linalg_solve_ex)
def linalg_solve_ex(c: Any) -> tuple[Tensor, Tensor]:
    """The solution of `linalg_solve_factored`, and whether the matrix is singular."""
    found = decomposition_table[aten._linalg_solve_ex.default](c.A, c.B, left=c.left, check_errors=c.check_errors)
    return found[0], found[3]


@register_decomposition(aten.linalg_solve)
def linalg_solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """The solution; a singular matrix is an error."""
    solution, info = linalg_solve_ex(A, B, left=left)
    torch._linalg_check_errors(info, "torch.linalg.solve", is_matrix=A.dim() == 2)  # type: ignore[attr-defined]
    return solution


def _check_square(caller: str, x: Tensor) -> None:
    require(x.dim() > 1 and x.shape[-1] == x.shape[-2], f"{caller}: not square matrices: {[*x.shape]}.")


def _cholesky(self: Tensor, upper: bool = False) -> Tensor:
    """Cholesky factor, as of `torch.linalg`, which has all its derivatives."""
    return torch.linalg.cholesky(self, upper=upper)


# Torch has it up to 2.14.
if hasattr(aten, "cholesky"):
    register_decomposition(aten.cholesky)(_cholesky)


@register_decomposition(aten.cholesky_inverse)
def cholesky_inverse(self: Tensor, upper: bool = False) -> Tensor:
    """Inverse of the matrix of a Cholesky factor."""
    _check_square("cholesky_inverse", self)
    eye = torch.eye(self.shape[-1], dtype=self.dtype, device=self.device).expand_as(self)
    inverse = torch.linalg.solve_triangular(self, eye, upper=upper)
    return inverse @ inverse.mH if upper else inverse.mH @ inverse


@register_decomposition(aten.cholesky_solve)
def cholesky_solve(self: Tensor, input2: Tensor, upper: bool = False) -> Tensor:
    """Solution of a system by the Cholesky factor `input2` of its matrix; either may have the axes of a batch."""
    _check_square("cholesky_solve", input2)
    require(self.dim() > 1 and self.shape[-2] == input2.shape[-1], "cholesky_solve: shapes do not fit.")
    factor = input2.mH if upper else input2
    half = torch.linalg.solve_triangular(factor, self, upper=False)
    return torch.linalg.solve_triangular(factor.mH, half, upper=True)


@decomposes(aten.triangular_solve)
def triangular_solve(c: Any) -> tuple[Tensor, Tensor]:
    """Solution of a triangular system, and the matrix."""
    _check_square("triangular_solve", c.A)
    require(c.self.dim() > 1 and c.self.shape[-2] == c.A.shape[-1], "triangular_solve: shapes do not fit.")
    options = {"upper": c.upper != c.transpose, "unitriangular": c.unitriangular}
    solution = torch.linalg.solve_triangular(c.A.mT if c.transpose else c.A, c.self, **options)
    return solution, c.A.expand(*solution.shape[:-2], *c.A.shape[-2:]).clone(memory_format=torch.contiguous_format)


def _reflected(x: Tensor, vectors: Tensor, tau: Tensor, order: Iterable[int]) -> Tensor:
    """`x` after the reflections `1 - tau[i] v[i] v[i]^H`, one after the other."""
    vectors = vectors[..., : tau.shape[-1]]
    eye = torch.eye(*vectors.shape[-2:], dtype=vectors.dtype, device=vectors.device)
    vectors = vectors.tril(-1) + eye
    for i in order:
        v = vectors[..., i : i + 1]
        x = x - tau[..., i, None, None] * v @ (v.mH @ x)
    return x


def _check_reflections(caller: str, x: Tensor, tau: Tensor) -> None:
    fits = x.dim() > 1 and x.shape[:-2] == tau.shape[:-1] and tau.shape[-1] <= x.shape[-1] and x.dtype == tau.dtype
    require(fits, f"{caller}: {[*tau.shape]} numbers do not fit reflections {[*x.shape]}, or in dtype.")


@register_decomposition(aten.linalg_householder_product)
def linalg_householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """The first columns of a product of reflections."""
    _check_reflections("linalg.householder_product", input, tau)
    require(input.shape[-2] >= input.shape[-1], "linalg.householder_product: more columns than rows.")
    eye = torch.eye(*input.shape[-2:], dtype=input.dtype, device=input.device)
    return _reflected(eye.expand_as(input), input, tau, reversed(range(tau.shape[-1])))


@register_decomposition(aten.ormqr)
def ormqr(self: Tensor, input2: Tensor, input3: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
    """Product of a matrix with a product of reflections, or its adjoint, at its left or right."""
    _check_reflections("ormqr", self, input2)
    fits = self.dim() == input3.dim() and self.shape[:-2] == input3.shape[:-2] and self.dtype == input3.dtype
    require(fits and input3.shape[-2 if left else -1] == self.shape[-2], "ormqr: shapes do not fit.")
    if not left:
        # Not `mH`, which is lazy: neither a view of real numbers nor vmap takes that.
        return ormqr(self, input2, input3.mT.conj_physical(), True, not transpose).mT.conj_physical()
    numbers = range(input2.shape[-1])
    if transpose:
        return _reflected(input3, self, input2.conj(), numbers)
    return _reflected(input3, self, input2, reversed(numbers))


# Its rules call it, so that they have derivatives of any order; torch's divide by zeros that they overwrite.
eigh_p = Primitive(
    "eigh", "(Tensor A, str UPLO) -> (Tensor w, Tensor V)", residuals=("w", "V"), namespace="primitives_decompositions"
)


@eigh_p.def_reference
def _eigh_reference(A: Tensor, UPLO: str) -> tuple[Tensor, Tensor]:
    return torch.linalg.eigh(A, UPLO)


def _by_gaps(x: Tensor, w: Tensor) -> Tensor:
    """`x[i, j] / (w[j] - w[i])`, and 0 for i = j."""
    eye = torch.eye(w.shape[-1], dtype=torch.bool, device=w.device)
    return x / (w.unsqueeze(-2) - w.unsqueeze(-1)).masked_fill(eye, torch.inf)


@eigh_p.def_vjp
def _eigh_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor | None]:
    w, V = residuals.w, residuals.V
    terms = []
    if cotangents.w is not None:
        terms.append(torch.diag_embed(cotangents.w).to(V.dtype))
    if cotangents.V is not None:
        terms.append(_by_gaps(V.mH @ cotangents.V, w))
    return {"A": V @ (terms[0] if len(terms) == 1 else terms[0] + terms[1]) @ V.mH}


@eigh_p.def_jvp
def _eigh_jvp(residuals: Any, tangents: Any) -> tuple[Tensor, Tensor]:
    w, V = residuals.w, residuals.V
    moved = V.mH @ tangents.A @ V
    return moved.diagonal(dim1=-2, dim2=-1).real, V @ _by_gaps(moved, w)


@eigh_p.def_vmap
def _eigh_vmap(batch: Any, primals: Any) -> Any:
    return eigh_p(primals.A.movedim(batch.axes.A, 0), primals.UPLO), (0, 0)


@register_decomposition(aten._linalg_eigh)
def linalg_eigh(A: Tensor, UPLO: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of hermitian matrices, of which a half is read and both halves move."""
    _check_square("linalg.eigh", A)
    require(UPLO.upper() in ("L", "U"), f"linalg.eigh: UPLO must be 'L' or 'U', got {UPLO!r}.")
    half = A.tril(-1) if UPLO.upper() == "L" else A.triu(1)
    diagonal = torch.diag_embed(A.diagonal(dim1=-2, dim2=-1).real).to(A.dtype)
    symmetric = (A + A.mH) / 2
    w, V = eigh_p(symmetric + constant_p(half + half.mH + diagonal - symmetric), UPLO)
    return w, V if compute_v else V.new_empty(0)


_EIG = "(Tensor A, bool is_real) -> (Tensor w, Tensor V)"
eig_p = Primitive("eig", _EIG, residuals=("w", "V"), namespace="primitives_decompositions")


@eig_p.def_reference
def _eig_reference(A: Tensor, is_real: bool) -> tuple[Tensor, Tensor]:
    return torch.linalg.eig(A.real if is_real else A)


def _of_one_length(x: Tensor, V: Tensor) -> Tensor:
    """`real(V^H x)` of each eigenvector and its column of `x`: how far these leave the length 1 of torch's vectors."""
    return (V.conj() * x).real.sum(-2, keepdim=True)


@eig_p.def_vjp
def _eig_vjp(residuals: Any, cotangents: Any, wanted: Any) -> dict[str, Tensor | None]:
    w, V = residuals.w, residuals.V
    terms = []
    if cotangents.w is not None:
        terms.append(torch.diag_embed(cotangents.w))
    if cotangents.V is not None:
        bar = cotangents.V
        terms.append(_by_gaps(V.mH @ (bar - V * _of_one_length(bar, V)), w.conj()))
    return {"A": torch.linalg.solve(V.mH, (terms[0] if len(terms) == 1 else terms[0] + terms[1]) @ V.mH)}


@eig_p.def_jvp
def _eig_jvp(residuals: Any, tangents: Any) -> tuple[Tensor, Tensor]:
    w, V = residuals.w, residuals.V
    moved = torch.linalg.solve(V, tangents.A @ V)
    V_dot = V @ _by_gaps(moved, w)
    return moved.diagonal(dim1=-2, dim2=-1), V_dot - V * _of_one_length(V_dot, V)


@eig_p.def_vmap
def _eig_vmap(batch: Any, primals: Any) -> Any:
    return eig_p(primals.A.movedim(batch.axes.A, 0), primals.is_real), (0, 0)


@register_decomposition(aten.linalg_eig)
def linalg_eig(self: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of any matrices; what depends on the phases of these has no derivative."""
    _check_square("linalg.eig", self)
    return eig_p(self.to(self.dtype.to_complex()), not self.is_complex())
