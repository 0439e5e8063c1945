"""The red check: results against plain formulas in float64, before any time is reported.

The formulas are differentiated by torch; they are compositions of elementary operations, whose derivatives hold to any
order. A large workload is worked off in chunks along a dim that no statistic crosses: rows, or channels of batch norm.

An error is measured in units of the largest value of its tensor, so that a sum over many rows may be off by as much
more as it is larger. A sum that was accumulated in the dtype of the input is off by more than that, and is wrong.

What a dropout drops is left to chance: its results must be their operands times a noise of 0 or 1/(1 - p), the same one
for all results of a call, with about p of it zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from perf.suite.modes import Sample, leaves, make_steps
from perf.workloads import CHANNEL_OPS, DROPOUT_P

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from perf.workloads import Workload

EPS = 1e-5
# Largest error over the largest value of a result. A dozen roundings to the input's dtype pass: torch composes
# derivatives of kernels that round in between. A formula that is wrong misses by tens of percent.
TOLERANCES = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 1e-4}
# A chunk and the dozens of float64 intermediates of its second derivatives take about a GB, in several workers at once.
CHUNK_ELEMENTS = 2**22
# Standard deviations by which the number of dropped elements may differ from its mean.
DROPOUT_DEVIATIONS = 6.0


def formula(workload: Workload) -> Callable[..., Tensor]:
    """The op of `workload` in elementary operations."""
    if workload.op == "log_softmax":
        return lambda x: x - torch.logsumexp(x, workload.dim, keepdim=True)
    if workload.op == "batch_norm_eval":
        return _evaluation(workload)
    dims = (-1,) if workload.op == "layer_norm" else tuple(d for d in range(len(workload.shape)) if d != 1)
    shape = (1, -1, *[1] * (len(workload.shape) - 2)) if workload.op == "batch_norm" else (-1,)

    def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        centered = x - x.mean(dims, keepdim=True)
        y = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + EPS)
        if weight is None or bias is None:
            return y
        return y * weight.view(shape) + bias.view(shape)

    return norm


def _evaluation(workload: Workload) -> Callable[..., Tensor]:
    shape = (1, -1, *[1] * (len(workload.shape) - 2))

    def norm(x: Tensor, *rest: Tensor) -> Tensor:
        *params, mean, variance = (value.view(shape) for value in rest)
        y = (x - mean) * torch.rsqrt(variance + EPS)
        return y * params[0] + params[1] if params else y

    return norm


def errors(
    workload: Workload, mode: str, sample: Sample, results: Mapping[str, Any], chunk_elements: int = CHUNK_ELEMENTS
) -> dict[str, float]:
    """Error of each provider's results: the largest over all tensors, in units of the largest value of the tensor.

    Args:
        workload: What was computed.
        mode: In which mode.
        sample: From which tensors.
        results: What the step of each provider returned.
        chunk_elements: How much is computed at a time.

    Returns:
        Names of providers and errors; infinite where a result is not finite or not of the right structure.
    """
    found = {name: leaves(result) for name, result in results.items()}
    if workload.op == "dropout":
        return {name: _dropout_error(mode, sample, tensors, chunk_elements) for name, tensors in found.items()}
    meters = {name: [_Meter() for _ in tensors] for name, tensors in found.items()}
    sums: list[Tensor | None] = []
    broken: set[str] = set()
    for where, chunk in _chunks(workload, sample, chunk_elements):
        truth = leaves(make_steps(mode, formula(workload), lambda function: function)(chunk)())
        sums = sums or [None] * len(truth)
        for i, exact in enumerate(truth):
            if exact.dim() < len(workload.shape) and workload.op not in CHANNEL_OPS:
                # A derivative of a parameter: every chunk has its share of it.
                so_far = sums[i]
                sums[i] = exact if so_far is None else so_far + exact
                continue
            index = where if exact.dim() > 1 else where[1:]
            for name, tensors in found.items():
                if len(tensors) != len(truth) or tensors[i].dim() != exact.dim():
                    broken.add(name)
                else:
                    meters[name][i].compare(tensors[i][index], exact)
    for i, exact in enumerate(sums):
        for name in found.keys() - broken:
            if exact is not None:
                meters[name][i].compare(found[name][i], exact)
    return {name: math.inf if name in broken else max(m.error() for m in meters[name]) for name in found}


def _chunks(workload: Workload, sample: Sample, chunk_elements: int) -> Iterator[tuple[tuple[slice, ...], Sample]]:
    axis = 1 if workload.op in CHANNEL_OPS else 0
    size = workload.shape[axis]
    step = max(size * chunk_elements // workload.num_elements, 1)
    for start in range(0, size, step):
        index = (slice(None),) * axis + (slice(start, start + step),)

        def cut(value: Tensor, index: tuple[slice, ...] = index) -> Tensor:
            # Parameters belong to channels, and to no rows.
            own = index if value.dim() > 1 else index[1:]
            return value[own].detach().double()

        yield index, sample.map(cut)


def _dropout_error(mode: str, sample: Sample, tensors: list[Tensor], chunk_elements: int) -> float:
    operands = {"forward": (sample.x,), "jvp": (sample.x, sample.x_dot)}.get(mode, (sample.y_bar,))
    if [tensor.shape for tensor in tensors] != [operand.shape for operand in operands if operand is not None]:
        return math.inf
    meters = [_Meter() for _ in tensors]
    rows = max(chunk_elements * len(sample.x) // sample.x.numel(), 1)
    num_kept = num_drawn = 0
    for start in range(0, len(sample.x), rows):
        chunk = slice(start, start + rows)
        values = [operand[chunk].double() for operand in operands if operand is not None]
        # Where the operand is zero, nothing tells what was drawn.
        told, kept = values[0] != 0, tensors[0][chunk] != 0
        num_drawn, num_kept = num_drawn + told.sum().item(), num_kept + (kept & told).sum().item()
        for meter, tensor, value in zip(meters, tensors, values, strict=True):
            meter.compare(tensor[chunk] * told, value * (kept & told) / (1 - DROPOUT_P))
    deviation = math.sqrt(num_drawn * DROPOUT_P * (1 - DROPOUT_P))
    if abs(num_kept - num_drawn * (1 - DROPOUT_P)) > DROPOUT_DEVIATIONS * deviation:
        return math.inf
    return max(meter.error() for meter in meters)


class _Meter:
    """Largest difference and largest value so far, left on the device until the end."""

    def __init__(self) -> None:
        self.difference: Tensor | None = None
        self.scale: Tensor | None = None

    def compare(self, value: Tensor, exact: Tensor) -> None:
        if value.shape != exact.shape:
            self.difference = self.scale = exact.new_tensor(math.inf)
            return
        difference = (value.detach().double() - exact).abs().amax()
        scale = exact.abs().amax()
        self.difference = difference if self.difference is None else torch.maximum(self.difference, difference)
        self.scale = scale if self.scale is None else torch.maximum(self.scale, scale)

    def error(self) -> float:
        if self.difference is None or self.scale is None:
            return math.inf
        difference, scale = self.difference.item(), self.scale.item()
        # Results that are zero throughout, as the tangent of bias_bar, are measured in units of one.
        error = difference / (scale or 1.0)
        return error if math.isfinite(error) else math.inf
