"""Decompositions of operators on factors of a matrix: triangular ones, reflections and eigenvectors.

Torch's own derivatives of them raise, or take for constants what moves, or miscount what is broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives._core.decomposition import register_decomposition
from primitives.decompositions._norms import require
from primitives.decompositions._statistics import constant_p

aten = torch.ops.aten


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


@register_decomposition(aten.triangular_solve)
def triangular_solve(
    self: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """Solution of a triangular system, and the matrix."""
    _check_square("triangular_solve", A)
    require(self.dim() > 1 and self.shape[-2] == A.shape[-1], "triangular_solve: shapes do not fit.")
    options = {"upper": upper != transpose, "unitriangular": unitriangular}
    solution = torch.linalg.solve_triangular(A.mT if transpose else A, self, **options)
    return solution, A.expand(*solution.shape[:-2], *A.shape[-2:]).clone(memory_format=torch.contiguous_format)


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
