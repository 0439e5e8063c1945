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
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from perf.workloads import Workload

EPS = 1e-5
# Largest error over the largest value of a result. A dozen roundings to the input's dtype pass: torch composes
# derivatives of kernels that round in between. A formula that is wrong misses by tens of percent.
TOLERANCES = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 1e-4}
# A chunk and the dozens of float64 intermediates of its second derivatives take about a GB.
CHUNK_ELEMENTS = 2**22
# Standard deviations by which the number of dropped elements may differ from its mean.
DROPOUT_DEVIATIONS = 6.0


def formula(workload: Workload) -> Callable[..., Tensor]:
    """The op of `workload` in elementary operations."""
    if workload.op == "log_softmax":
        return lambda x: x - torch.logsumexp(x, workload.dim, keepdim=True)
    by_channel = workload.op in CHANNEL_OPS
    num_dims = len(workload.shape)
    dims = tuple(d for d in range(num_dims) if d != 1) if by_channel else (-1,)
    shape = (1, -1, *[1] * (num_dims - 2)) if by_channel else (-1,)

    def norm(x: Tensor, *rest: Tensor) -> Tensor:
        params = [value.view(shape) for value in rest]
        if workload.op == "batch_norm_eval":
            *params, mean, variance = params
            centered = x - mean
        else:
            centered = x - x.mean(dims, keepdim=True)
            variance = centered.square().mean(dims, keepdim=True)
        y = centered * torch.rsqrt(variance + EPS)
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
    sums: dict[int, Tensor] = {}
    broken: set[str] = set()
    for where, chunk in _chunks(workload, sample, chunk_elements):
        truth = leaves(make_steps(mode, formula(workload), lambda function: function)(chunk)())
        broken |= {name for name, tensors in found.items() if [t.dim() for t in tensors] != [t.dim() for t in truth]}
        for i, exact in enumerate(truth):
            if exact.dim() < len(workload.shape) and workload.op not in CHANNEL_OPS:
                # A derivative of a parameter: every chunk has its share of it.
                sums[i] = sums[i] + exact if i in sums else exact
                continue
            for name in found.keys() - broken:
                meters[name][i].compare(found[name][i][where if exact.dim() > 1 else where[1:]], exact)
    for i, exact in sums.items():
        for name in found.keys() - broken:
            meters[name][i].compare(found[name][i], exact)
    return {name: math.inf if name in broken else _error(meters[name]) for name in found}


def _chunks(workload: Workload, sample: Sample, chunk_elements: int) -> Iterator[tuple[tuple[slice, ...], Sample]]:
    axis = 1 if workload.op in CHANNEL_OPS else 0
    size = workload.shape[axis]
    step = max(size * chunk_elements // workload.num_elements, 1)
    for start in range(0, size, step):
        index = (slice(None),) * axis + (slice(start, start + step),)

        def cut(value: Tensor, index: tuple[slice, ...] = index) -> Tensor:
            # Parameters belong to channels, and to no rows.
            return value[index if value.dim() > 1 else index[1:]].detach().double()

        yield index, sample.map(cut)


def _dropout_error(mode: str, sample: Sample, tensors: Sequence[Tensor], chunk_elements: int) -> float:
    named = {"forward": (sample.x,), "jvp": (sample.x, sample.x_dot)}.get(mode, (sample.y_bar,))
    operands = [operand for operand in named if operand is not None]
    if [tensor.shape for tensor in tensors] != [operand.shape for operand in operands]:
        return math.inf
    meters = [_Meter() for _ in tensors]
    rows = max(chunk_elements * len(sample.x) // sample.x.numel(), 1)
    num_kept = num_drawn = 0
    for start in range(0, len(sample.x), rows):
        chunk = slice(start, start + rows)
        values = [operand[chunk].double() for operand in operands]
        # Where the operand is zero, nothing tells what was drawn.
        told, kept = values[0] != 0, tensors[0][chunk] != 0
        num_drawn, num_kept = num_drawn + told.sum().item(), num_kept + (kept & told).sum().item()
        for meter, tensor, value in zip(meters, tensors, values, strict=True):
            meter.compare(tensor[chunk] * told, value * (kept & told) / (1 - DROPOUT_P))
    deviation = math.sqrt(num_drawn * DROPOUT_P * (1 - DROPOUT_P))
    if abs(num_kept - num_drawn * (1 - DROPOUT_P)) > DROPOUT_DEVIATIONS * deviation:
        return math.inf
    return _error(meters)


class _Meter:
    """Largest difference and largest value so far, left on the device until the end."""

    def __init__(self) -> None:
        self.pairs: list[Tensor] = []

    def compare(self, value: Tensor, exact: Tensor) -> None:
        if value.shape != exact.shape:
            exact = exact.new_tensor([math.nan])
        self.pairs.append(torch.stack([(value.detach().double() - exact).abs().amax(), exact.abs().amax()]))

    def error(self) -> float:
        # A NaN is the largest of all.
        difference, scale = torch.stack(self.pairs).amax(0).tolist() if self.pairs else (math.nan, 1.0)
        # Results that are zero throughout, as the tangent of bias_bar, are measured in units of one.
        return difference / (scale or 1.0)


def _error(meters: Sequence[_Meter]) -> float:
    found = [meter.error() for meter in meters]
    return max(found) if all(map(math.isfinite, found)) else math.inf
