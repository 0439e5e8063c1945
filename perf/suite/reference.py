"""The red check: results against plain formulas in float64, before any time is reported.

The formulas are differentiated by torch; they are compositions of elementary operations, whose derivatives hold to any
order. A large workload is worked off in chunks along a dim that no statistic crosses: rows, or channels of batch norm.
Attention takes some rows of the heads of one sample that share their keys against all of these; derivatives of the keys
are sums over the chunks of rows.

An error is measured in units of the largest value of its tensor: a sum over many rows may be off by as much more as it
is larger, and one that was accumulated in the dtype of the input is off by more than that.

Chance decides what a dropout drops: its results must be their operands times one noise of right values and share.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, cast

import optree
import torch

from perf.ops.workload import DROPOUT_P
from perf.suite.modes import Sample, leaves, make_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from perf.ops.workload import Workload

# Largest error over the largest value of a result. A dozen roundings to the input's dtype pass: torch composes
# derivatives of kernels that round in between. A formula that is wrong misses by tens of percent.
TOLERANCES = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 1e-4}
# A chunk and the dozens of float64 intermediates of its second derivatives take about a GB.
CHUNK_ELEMENTS = 2**22
# Standard deviations by which the number of dropped elements may differ from its mean.
DROPOUT_DEVIATIONS = 6.0


def formula(workload: Workload) -> Callable[..., Tensor]:
    """The op of `workload` in elementary operations."""
    op, options = workload.record, workload.record.options(workload)
    if op.formula is not None:
        return functools.partial(op.formula, **options)

    def y(*tensors: Tensor) -> Tensor:
        found = op.truth(*tensors, **options)
        return found[0] if isinstance(found, tuple) else found

    return y


def _attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Of queries `[group, rows, width]`, and keys that the group shares; `hidden` pairs have no weight."""
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def errors(
    workload: Workload, mode: str, sample: Sample, results: Mapping[str, Any], chunk_elements: int = CHUNK_ELEMENTS
) -> dict[str, float]:
    """Error of what the step of each provider returned, infinite where that is not finite or of the right structure.

    The truth is computed in chunks of so many elements.
    """
    if workload.op == "dropout":
        return {name: _dropout_error(mode, sample, leaves(result)) for name, result in results.items()}
    make_truth = _truth_of_attention if workload.op == "attention" else _truth
    truth = make_truth(workload, mode, sample, chunk_elements)
    kept = _away_from_kink(workload, sample)
    return {name: _error(leaves(result), truth, kept) for name, result in results.items()}


def _away_from_kink(workload: Workload, sample: Sample) -> Tensor | None:
    """Where no rounding of what a ReLU takes decides about a derivative."""
    if workload.record.kink is None:
        return None
    tensors = (value.detach().float() for value in (sample.x, *sample.params, *sample.constants))
    value = workload.record.kink(*tensors)
    return value.abs() > TOLERANCES[workload.dtype] * value.abs().amax()


def _truth(workload: Workload, mode: str, sample: Sample, chunk_elements: int) -> list[Tensor]:
    """The results in float64."""
    axis, shape = int(workload.record.has_channels), workload.param_shape
    has_params = workload.num_params > 0 or axis == 1

    def is_param(value: Tensor) -> bool:
        return has_params and (value.dim() == 1 if len(shape) == 1 else value.shape == shape)

    size = workload.shape[axis]
    width = max(size * chunk_elements // math.prod(workload.shape), 1)
    chunks: list[list[Tensor]] = []
    for start in range(0, size, width):
        index = (slice(None),) * axis + (slice(start, start + width),)

        def cut(value: Tensor, index: tuple[slice, ...] = index) -> Tensor:
            # Parameters belong to channels, and to no rows.
            part = value[index[1:] if is_param(value) else index].detach()
            return part.double() if part.is_floating_point() else part

        chunk: Any = optree.tree_map(cut, cast("Any", sample))
        step = make_steps(mode, formula(workload), lambda function: function)(chunk)
        chunks.append([value.detach() for value in leaves(step())])

    def whole(parts: Sequence[Tensor]) -> Tensor:
        if not is_param(parts[0]):
            return torch.cat(list(parts), axis)
        # Of a derivative of a parameter every chunk of rows has its share, one of channels the values themselves.
        return torch.cat(list(parts)) if axis else torch.stack(list(parts)).sum(0)

    return [whole(parts) for parts in zip(*chunks, strict=True)]


def _truth_of_attention(workload: Workload, mode: str, sample: Sample, chunk_elements: int) -> list[Tensor]:
    """The same in chunks of so many scores, never of all pairs."""
    (batch, heads, tokens, _), key_heads = workload.shape, workload.param_shape[1]
    group, make = heads // key_heads, make_steps(mode, _attention, lambda function: function)
    width, keys = max(chunk_elements // (group * tokens), 1), torch.arange(tokens, device=sample.x.device)
    truth: list[Tensor] = []
    for index, head, start in itertools.product(range(batch), range(key_heads), range(0, tokens, width)):
        rows = index, slice(head * group, (head + 1) * group), slice(start, start + width)
        hidden = keys[rows[2], None] < keys if workload.causal else keys[rows[2], None] < 0
        tensors = {
            name: value[rows] if isinstance(value, torch.Tensor) else tuple(each[index, head] for each in value)
            for name, value in sample._asdict().items()
            if value is not None
        }
        doubles: Any = optree.tree_map(lambda value: value.detach().double(), cast("Any", tensors))
        parts = leaves(make(Sample(**{**doubles, "constants": (hidden,)}))())
        # Tensors with keys have no axis of the group.
        of_rows = [part.dim() == len(rows) for part in parts]
        shapes = [workload.shape if own else workload.param_shape for own in of_rows]
        truth = truth or [part.new_zeros(shape) for part, shape in zip(parts, shapes, strict=True)]
        for whole, part, own in zip(truth, parts, of_rows, strict=True):
            whole[rows if own else (index, head)] += part.detach()
    return truth


def _dropout_error(mode: str, sample: Sample, found: Sequence[Tensor]) -> float:
    named = {"forward": (sample.x,), "jvp": (sample.x, sample.x_dot)}.get(mode, (sample.y_bar,))
    operands = [operand for operand in named if operand is not None]
    if [value.shape for value in found] != [operand.shape for operand in operands]:
        return math.inf
    # Where the operand is zero, nothing tells what was drawn.
    told, kept = operands[0] != 0, found[0] != 0
    drawn, dropped = told.sum().item(), (told & ~kept).sum().item()
    if abs(dropped - drawn * DROPOUT_P) > DROPOUT_DEVIATIONS * math.sqrt(drawn * DROPOUT_P * (1 - DROPOUT_P)):
        return math.inf
    return _error(found, [operand.double() * (kept | ~told) / (1 - DROPOUT_P) for operand in operands])


def _error(found: Sequence[Tensor], truth: Sequence[Tensor], kept: Tensor | None = None) -> float:
    if [value.shape for value in found] != [exact.shape for exact in truth]:
        return math.inf
    differences = [value.detach() - exact for value, exact in zip(found, truth, strict=True)]
    if kept is not None:
        differences = [value.where(kept, 0.0) if value.shape == kept.shape else value for value in differences]
    off, scales = (torch.stack([value.abs().amax() for value in values]) for values in (differences, truth))
    # Results that are zero throughout, as the tangent of bias_bar, are measured in units of one. A NaN is the largest.
    worst = (off / scales.where(scales > 0, 1.0)).amax().item()
    return worst if math.isfinite(worst) else math.inf
