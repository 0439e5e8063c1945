"""Ways to call an op without their numbers, and numbers in many memory layouts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from perf.calls import EPS
from primitives.testing import _compare

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOW_PRECISION = (torch.float16, torch.bfloat16)
# The parameters of a norm that may be absent.
ABSENT_PARAMS = ((), ("bias",), ("weight",), ("weight", "bias"))
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "channels_last")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One way to call an op: shape of `x`, the first argument, and keyword arguments.

    Arguments that are `absent` are `None`; the layout of every tensor is one of `LAYOUTS`; `mixed` makes the other
    arguments float32 beside a low-precision `x`.
    """

    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()
    absent: tuple[str, ...] = ()
    layout: str = "contiguous"
    mixed: bool = False

    @property
    def numel(self) -> int:
        """Elements of `x`."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.shape)), *[f"{k}={v}" for k, v in self.options], self.layout]
        parts += [f"no_{name}" for name in self.absent] + ["mixed"] * self.mixed
        return "-".join(parts)


def sample(
    shape: tuple[int, ...],
    absent: tuple[str, ...] = (),
    layout: str = "contiguous",
    mixed: bool = False,
    **options: Any,
) -> Sample:
    """The sample with these keyword arguments."""
    return Sample(shape, tuple(options.items()), absent, layout, mixed)


def shaped(*shapes: tuple[int, ...], **options: Any) -> list[Sample]:
    """Samples of these shapes with the same keyword arguments."""
    return [sample(shape, **options) for shape in shapes]


def make_samples(
    shaped: Sequence[Sample],
    absent: Sequence[tuple] = ((),),
    layouts: Sequence[str] = LAYOUTS[:4],
    constant_when_expanded: Callable[[tuple[int, ...]], bool] = lambda shape: False,
) -> tuple[Sample, ...]:
    """All pairs of a sample's shape with its options, layout, absent arguments and mixed dtypes.

    Left out are layouts of fewer than two elements, and expanded shapes all of whose normalized values are equal: there
    the rounding of the mean, times 1 / sqrt(eps), is all that remains.
    """
    mixed = (False, True) if len(absent) > 1 else (False,)
    rows = pairwise(one=[s for s in shaped if s.numel > 1], layout=layouts, absent=absent, mixed=mixed)
    rows += pairwise(one=[s for s in shaped if s.numel < 2], layout=layouts[:1], absent=absent)
    samples = [dataclasses.replace(row.pop("one"), **row) for row in rows]
    return tuple(s for s in samples if s.layout != "expanded" or not constant_when_expanded(s.shape))


def normal(shape: Sequence[int], seed: int, mean: float = 0.0) -> Tensor:
    """Normal numbers in float64 on the CPU, the same on every device and in every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64, device="cpu") + mean


def affine(y: Tensor, weight: Any, bias: Any) -> Tensor:
    """`y` times `weight` and plus `bias` where there is one."""
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def true_norm(x: Tensor, axes: tuple[int, ...], weight: Any, bias: Any, *, centered: bool = True) -> Tensor:
    """`x` normalized over `axes` in plain operations, times `weight` and plus `bias` where there is one."""
    y = x - x.mean(axes, keepdim=True) if centered else x
    return affine(y / (y.square().mean(axes, keepdim=True) + EPS).sqrt(), weight, bias)


def arranged(values: Tensor, layout: str) -> Tensor:
    """`values` in a layout of `LAYOUTS`; `"expanded"` repeats the first entry of the first axis with stride 0."""
    if layout == "channels_last" and values.dim() > 1:
        return values.movedim(1, -1).contiguous().movedim(-1, 1)
    return _compare.arranged(values, layout)


def pairwise(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Few combinations in which every value of each axis meets every value of each other axis."""
    names = list(axes)
    positions = list(itertools.combinations(range(len(names)), 2))
    candidates = list(itertools.product(*[range(len(values)) for values in axes.values()]))

    def pairs(row: tuple[int, ...]) -> set[tuple[int, ...]]:
        return {(i, row[i], j, row[j]) for i, j in positions}

    missing = set().union(*map(pairs, candidates))
    rows = []
    while missing:
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append({name: axes[name][i] for name, i in zip(names, best, strict=True)})
    return rows
