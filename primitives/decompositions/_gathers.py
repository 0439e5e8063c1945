"""Decompositions of operators that look numbers up: rows of a table by bags, segments of an axis, points of volumes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from primitives._core.decomposition import decomposition_table, register_decomposition_for_jvp
from primitives.decompositions._norms import require
from primitives.decompositions._reductions import scatter_reduce
from primitives.decompositions._statistics import constant_p, decomposes

aten = torch.ops.aten

_SUM, _MEAN, _MAX = 0, 1, 2  # as in ATen's enumeration


@decomposes(aten._embedding_bag)
def embedding_bag(c: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums, means or largest numbers of rows of `weight`, a bag of them at a time, and which rows they were."""
    factors = None if c.per_sample_weights is None else constant_p(c.per_sample_weights)
    args = c.scale_grad_by_freq, c.mode, c.sparse, factors, c.include_last_offset, c.padding_idx
    # Of rows alone, which have no derivative.
    value, bag_of, sizes, largest = aten._embedding_bag_forward_only(constant_p(c.weight), c.indices, c.offsets, *args)
    # The forward has one more of each where it is given where the last bag ends.
    sizes, largest = sizes[: len(value)], largest[: len(value)]
    if c.mode == _MAX:
        # As torch leaves a bag without rows.
        rows = c.weight.gather(0, largest.to(torch.int64))
        return torch.where((sizes > 0).unsqueeze(-1), rows, 0), bag_of, sizes, largest
    indices = c.indices.to(torch.int64)
    rows = c.weight[indices]
    if c.scale_grad_by_freq:
        counts = torch.zeros_like(c.weight[:, 0]).index_add(0, indices, torch.ones_like(rows[:, 0]))
        shares = rows / counts[indices].unsqueeze(-1)
        rows = shares + constant_p(rows - shares)
    if c.per_sample_weights is not None:
        rows = rows * c.per_sample_weights.unsqueeze(-1)
    if c.padding_idx >= 0:
        rows = torch.where((indices == c.padding_idx).unsqueeze(-1), 0, rows)
    starts = c.offsets[:-1] if c.include_last_offset else c.offsets
    places = torch.arange(indices.shape[0], device=indices.device, dtype=c.offsets.dtype)
    bags = torch.searchsorted(starts.contiguous(), places, right=True) - 1
    output = value.new_zeros(value.shape).index_add(0, bags, rows)
    if c.mode == _MEAN:
        output = output / sizes.clamp(min=1).unsqueeze(-1)
    return output, bag_of, sizes, largest


@register_decomposition_for_jvp(aten._embedding_bag_forward_only)
def embedding_bag_of_frozen_rows(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Likewise: torch calls it where `weight` takes no gradient, and `per_sample_weights` may have a tangent."""
    return aten._embedding_bag(*args)


_INITIAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


@decomposes(aten.segment_reduce)
def segment_reduce(c: Any) -> Tensor:
    """Segments of an axis reduced, the first `lengths[..., 0]` numbers first."""
    require(c.reduce in _INITIAL, f"segment_reduce: reduce must be known, got {c.reduce!r}.")
    data, lengths = c.data, c.lengths if c.offsets is None else c.offsets.diff(dim=-1)
    if lengths is None or c.indices is not None:
        raise RuntimeError("segment_reduce: expected lengths or offsets.")
    outer = lengths.dim() - 1
    require(
        data.dim() > outer and range(data.dim())[c.axis] == outer and data.shape[:outer] == lengths.shape[:-1],
        f"segment_reduce: {[*lengths.shape]} segments do not fit axis {c.axis} of {[*data.shape]}.",
    )
    if not c.unsafe and c.offsets is None:
        is_whole = (lengths >= 0).all() & (lengths.sum(-1) == data.shape[c.axis]).all()
        torch._assert_async(is_whole, "segment_reduce: lengths must be positive, and sum up to the axis.")
    ends = lengths.cumsum(-1)
    if c.offsets is not None:
        ends = ends + c.offsets[..., :1]
    rest = data.shape[lengths.dim() :]
    places = torch.arange(data.shape[c.axis], device=data.device).expand(data.shape[: lengths.dim()]).contiguous()
    # One more segment takes what lies outside.
    segments = torch.searchsorted(ends.contiguous(), places.to(ends.dtype), right=True)
    if c.offsets is not None:
        segments = torch.where(places < c.offsets[..., :1], lengths.shape[-1], segments)
    index = segments.reshape(*segments.shape, *[1] * len(rest)).expand_as(data)
    neutral = _INITIAL[c.reduce] if c.initial is None else c.initial
    start = data.new_full((*lengths.shape[:-1], lengths.shape[-1] + 1, *rest), neutral)
    kind: Any = {"mean": "sum", "max": "amax", "min": "amin"}.get(c.reduce, c.reduce)
    output = scatter_reduce(start, c.axis, index, data, kind).narrow(c.axis, 0, lengths.shape[-1])
    if c.reduce == "mean":
        sizes = lengths.reshape(*lengths.shape, *[1] * len(rest)).to(data.dtype)
        output = torch.where(sizes == 0, math.nan if c.initial is None else c.initial, output / sizes.clamp(min=1))
    return output


_ZEROS, _BORDER, _REFLECTION = range(3)  # as in ATen's enumeration
_NEAREST = 1


def _reflected(x: Tensor, low: float, high: float) -> Tensor:
    if low == high:
        return torch.zeros_like(x)
    distance = (x - low).abs()
    turns = (distance / (high - low)).floor()
    rest = distance - turns * (high - low)
    return torch.where(turns % 2 == 0, rest + low, high - rest)


@decomposes(aten.grid_sampler_3d)
def grid_sampler_3d(c: Any) -> Tensor:
    """Values of volumes `[N, C, D, H, W]` at the points `[N, *, 3]` of a grid; torch has no jvp of its backward."""
    fits = c.input.dim() == c.grid.dim() == 5 and len(c.input) == len(c.grid) and c.grid.shape[-1] == 3
    require(
        fits and min(c.input.shape[2:]) > 0 and c.interpolation_mode in (0, _NEAREST),
        f"grid_sampler: no points {[*c.grid.shape]} of volumes {[*c.input.shape]} by mode {c.interpolation_mode}.",
    )
    sizes, ways = c.input.shape[2:], []
    for size, x in zip(sizes, c.grid.flatten(1, -2).unbind(-1)[::-1], strict=True):
        place = (x + 1) / 2 * (size - 1) if c.align_corners else ((x + 1) * size - 1) / 2
        if c.padding_mode == _REFLECTION:
            place = _reflected(place, 0, size - 1) if c.align_corners else _reflected(place, -0.5, size - 0.5)
        if c.padding_mode != _ZEROS:
            place = place.clamp(0, size - 1)
        if c.interpolation_mode == _NEAREST:
            # Rounding has a derivative, which is zero.
            nearest = place.round()
            ways.append([(nearest, 1 + nearest - nearest.detach())])
        else:
            below = place.floor()
            ways.append([(below, 1 - (place - below)), (below + 1, place - below)])
    flat = c.input.flatten(2)
    total: Any = 0
    for corner in itertools.product(*ways):
        index: Any = 0
        weight: Any = 1
        for size, (at, share) in zip(sizes, corner, strict=True):
            inside = (at >= 0) & (at < size)
            weight = weight * torch.where(inside, share, 0)
            index = index * size + torch.where(inside, at, 0).to(torch.int64)
        values = flat.gather(2, index.unsqueeze(1).expand(-1, flat.shape[1], -1))
        total = total + values * weight.unsqueeze(1)
    return total.reshape(*c.input.shape[:2], *c.grid.shape[1:-1])


@decomposes(aten.grid_sampler)
def grid_sampler(c: Any) -> Tensor:
    """Values of images or volumes at the points of a grid."""
    of = aten.grid_sampler_3d.default if c.input.dim() == 5 else aten.grid_sampler_2d.default
    return decomposition_table[of](c.input, c.grid, c.interpolation_mode, c.padding_mode, c.align_corners)
