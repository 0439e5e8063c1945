"""How results are compared: tolerances, random directions, memory layouts, and the record that a property keeps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from primitives.core.dtypes import has_derivatives

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

# Allowed error in units in the last place of the largest expected element (or of 1). In low precision a few roundings
# of intermediate values, in float32 and float64 the rounding of sums.
ULPS = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 64, torch.float64: 64}
ULPS.update({torch.complex64: 64, torch.complex128: 64})
# A central difference of fourth order with step 1e-4 leaves about 1e-16 of the fifth derivative and 1e-12 of rounding:
# the first number is relative to the derivative, and far above what a right rule needs; the second to the value.
STEP = 1e-4
# A step is at most this part of an argument, so that functions such as sqrt are smooth within it; but of an argument
# smaller than the floor, which a difference of fourth order would not resolve from rounding, it is that of the floor.
FLOOR = 1e-5
DIFFERENCE_TOLERANCE = 1e-6
ROUNDING_OF_DIFFERENCES = 1e-9
# Relative to the product of the norms, float64.
IDENTITY_TOLERANCE = 1e-10

LAYOUTS = ("transposed", "sliced", "expanded")
# What `sum().backward()` gives has stride 0 everywhere.
COTANGENT_LAYOUTS = (*LAYOUTS, "constant")


class NotApplicableError(Exception):
    """The property says nothing about this operator; the text is the reason."""


class MismatchError(Exception):
    """The property does not hold; the text says where, what came and what was expected."""


def normal(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers in double precision on the CPU, the same in every run."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def like(x: Tensor, seed: int) -> Tensor:
    """Normal numbers with the shape, dtype and device of `x`."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    return normal(x.shape, seed, wide).to(x.device, x.dtype)


def all_like(xs: Iterable[Tensor], seed: int) -> list[Tensor]:
    """Normal numbers like each of `xs`."""
    return [like(x, 101 * seed + i) for i, x in enumerate(xs)]


def directions(xs: Iterable[Tensor], seed: int) -> list[Tensor]:
    """Tangents of `xs` along which differences are taken: random, and small where an element of `xs` is small."""
    xs = list(xs)
    return [
        dot * torch.where(x == 0, torch.ones_like(x.abs()), x.abs().clamp(FLOOR, 1.0))
        for x, dot in zip(xs, all_like(xs, seed), strict=True)
    ]


def arranged(x: Tensor, layout: str) -> Tensor:
    """`x` in a layout of `COTANGENT_LAYOUTS`.

    `"expanded"` repeats the first entry of the first axis with stride 0, `"constant"` the first element everywhere.
    """
    if layout == "transposed":
        axes = list(range(x.dim()))[::-1]
        return x.permute(axes).clone(memory_format=torch.contiguous_format).permute(axes)
    if layout == "sliced" and x.dim() > 0:
        wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype, device=x.device)
        # What lies between the elements must never be read.
        if has_derivatives(x.dtype):
            wide.fill_(float("nan"))
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "expanded" and x.dim() > 0 and x.shape[0] > 0:
        return x[:1].clone(memory_format=torch.contiguous_format).expand(x.shape)
    if layout == "constant" and x.numel() > 0:
        return x[(0,) * x.dim()].clone().expand(x.shape)
    return x.clone(memory_format=torch.contiguous_format)


def contiguous(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the last bit, NaNs too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = [x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*bits)


def largest(x: Tensor) -> float:
    """Largest magnitude of a finite element."""
    return x.detach().abs().to(torch.float64).nan_to_num(0.0, 0.0, 0.0).max().item() if x.numel() else 0.0


@dataclasses.dataclass
class Record:
    """What one property keeps of its comparisons.

    Attributes:
        order: Highest order of derivatives that is wanted.
        tolerances: Relative errors by dtype that take the place of the usual ones.
        error: Error of the comparison that came nearest to what was allowed, or went beyond.
        allowed: What was allowed there.
        notes: Remarks for the table.
    """

    order: int
    tolerances: Mapping[torch.dtype, float]
    error: float | None = None
    allowed: float | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def tolerance(self, *dtypes: torch.dtype) -> float:
        """Relative error that is allowed of the coarsest of these dtypes."""
        inexact = [d for d in dtypes if d.is_floating_point or d.is_complex]
        known = [self.tolerances.get(d, ULPS.get(d, 4) * torch.finfo(d).eps) for d in inexact]
        return max(known, default=0.0)

    def note(self, text: str) -> None:
        """Add a remark, once."""
        if text not in self.notes:
            self.notes.append(text)

    def close(self, what: str, got: Tensor, want: Tensor, *dtypes: torch.dtype) -> None:
        """Compare within the tolerance of the dtypes, by default those of both tensors."""
        self.within(what, got, want, self.tolerance(*(dtypes or (got.dtype, want.dtype))) * max(largest(want), 1.0))

    def within(self, what: str, got: Tensor, want: Tensor, allowed: float) -> None:
        """Compare shapes, NaNs and values.

        Raises:
            MismatchError: If they differ.
        """
        if got.shape != want.shape:
            raise MismatchError(f"{what} has shape {list(got.shape)}, expected {list(want.shape)}.")
        wide = torch.complex128 if want.is_complex() or got.is_complex() else torch.float64
        a, b = got.detach().to(wide), want.detach().to(wide)
        # Equal infinities have no difference.
        difference = torch.where(a == b, torch.zeros_like(a), a - b).abs()
        difference = torch.where(a.isnan() & b.isnan(), 0.0, difference.nan_to_num(float("inf"), float("inf")))
        error = difference.max().item() if difference.numel() else 0.0
        if self.error is None or error * (self.allowed or 0.0) >= self.error * allowed or error > allowed:
            self.error, self.allowed = error, allowed
        if error > allowed:
            place = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
            at = f" at {place}" if place else ""
            values = [x[tuple(place)].item() for x in (got, want)]
            raise MismatchError(
                f"{what}{at} is {values[0]!r}, expected {values[1]!r}; "
                f"largest error {error:.1e}, allowed {allowed:.1e}."
            )

    def dtype(self, what: str, got: Tensor, want: torch.dtype) -> None:
        """Compare a dtype.

        Raises:
            MismatchError: If it differs.
        """
        if got.dtype != want:
            raise MismatchError(f"{what} has dtype {got.dtype}, expected {want}.")
