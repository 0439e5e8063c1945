"""The work of each mode of a workload, as a step without arguments, and its results in float64.

`backward` has y already, `double_backward` x_bar, and `backward_of_jvp` y and y_dot; `jvp` and `hvp` are those of
torch.func, with tangents of all inputs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor
from torch.func import jvp, vjp

from perf.ops.workload import DROPOUT_P, Workload

Function = Callable[..., Any]
Step = Callable[[], Any]

# Largest error over the largest value of a result. A dozen roundings to the input's dtype pass: torch composes
# derivatives of kernels that round in between. A formula that is wrong misses by tens of percent.
TOLERANCES = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 1e-4}
# A piece and the dozens of float64 intermediates of its second derivatives take about a GB.
PIECE_ELEMENTS = 2**22
# Standard deviations by which the number of dropped elements may differ from its mean.
DROPOUT_DEVIATIONS = 6.0


class Sample(NamedTuple):
    """The tensors of a workload: x, what is of its shape, and parameters, with tangents; cotangents of y and of y_dot.

    Attention's parameters are k and v. Constants have no derivative: running statistics, labels.
    """

    primals: tuple[Tensor, ...]
    tangents: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    y_bar: Any
    y_dot_bar: Any


def make_sample(workload: Workload, device: torch.device) -> Sample:
    """Random tensors; the same ones on the same device."""
    op, generator = workload.record, torch.Generator(device).manual_seed(0)

    def random(shape: Sequence[int], dtype: torch.dtype = workload.torch_dtype) -> Tensor:
        if op.name == "attention":
            # In memory as a projection leaves them: the heads of a token side by side.
            batch, heads, tokens, width = shape
            shape = (batch, tokens, heads, width)
        value = torch.randn(tuple(shape), device=device, dtype=dtype, generator=generator)
        if op.name == "attention":
            return value.transpose(1, 2)
        is_image = workload.channels_last and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    params = [workload.param_shape] * (op.num_params * workload.affine)
    dtype = workload.torch_dtype if len(workload.param_shape) > 1 else workload.param_dtype

    def inputs() -> tuple[Tensor, ...]:
        full = (random(workload.shape) for _ in range(1 + ("residual" in op.arguments)))
        return (*full, *(random(shape, dtype) for shape in params))

    # Not centered, so that an implementation which forgets to subtract the mean shows.
    x, *rest = inputs()
    primals, constants = (x.add_(1), *rest), op.constants(workload, random)
    found: Any = x if op.is_linear else formula(workload)(*(value.to("meta") for value in (*primals, *constants)))
    bars = (optree.tree_map(lambda leaf: random(leaf.shape), found) for _ in range(2))
    return Sample(primals, inputs(), constants, *bars)


def formula(workload: Workload) -> Function:
    """The op of `workload` in elementary operations, which torch differentiates rightly to any order."""
    op, options = workload.record, workload.record.options(workload)
    if op.formula is not None:
        return functools.partial(op.formula, **options)

    def y(*tensors: Tensor) -> Tensor:
        found = op.truth(*tensors, **options)
        return found[0] if isinstance(found, tuple) else found

    return y


def leaves(values: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in optree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _leaf(values: Any) -> Any:
    return optree.tree_map(lambda value: value.detach().requires_grad_(), values)


def make_step(
    mode: str, function: Function, sample: Sample, wrap: Callable[[Function], Function] = lambda f: f
) -> Step:
    """One step of `mode` of `function(*primals, *constants)`, compiled by `wrap`."""
    primals, tangents, constants, y_bar, y_dot_bar = sample

    def of_primals(*primals: Tensor) -> Any:
        return function(*primals, *constants)

    def gradient(*primals: Tensor) -> Any:
        return vjp(of_primals, *primals)[1](y_bar)

    if mode in {"jvp", "hvp", "backward_of_jvp"}:
        moved = gradient if mode == "hvp" else of_primals
        with_tangent = wrap(lambda primals, tangents: jvp(moved, primals, tangents))
        if mode != "backward_of_jvp":
            return lambda: with_tangent(primals, tangents)
        moving = _leaf((primals, tangents))
        results, inputs = with_tangent(*moving), leaves(moving)
        return lambda: torch.autograd.grad(results, inputs, (y_bar, y_dot_bar), retain_graph=True)
    wrapped, inputs, y_bar = wrap(of_primals), _leaf(primals), _leaf(y_bar)
    if mode == "forward":
        return lambda: wrapped(*inputs)
    if mode == "forward_backward":
        return lambda: torch.autograd.grad(wrapped(*inputs), inputs, y_bar)
    y = wrapped(*inputs)
    if mode == "backward":
        return lambda: torch.autograd.grad(y, inputs, y_bar, retain_graph=True)
    # Of a norm x_bar is differentiated, into which the bias does not enter; of attention all three gradients.
    is_attention = any(value.dim() > 2 for value in primals[1:])
    of, wanted = (inputs, inputs) if is_attention else (inputs[:1], inputs[:2])
    bars = torch.autograd.grad(y, of, y_bar, create_graph=True)
    return lambda: torch.autograd.grad(bars, (*wanted, *leaves(y_bar)), tangents[: len(of)], retain_graph=True)


# The check before any time is taken.


def errors(
    workload: Workload, mode: str, sample: Sample, results: Mapping[str, Any], elements: int = PIECE_ELEMENTS
) -> dict[str, float]:
    """Largest error over the largest value of each provider's results; infinite if not finite, or of another structure.

    A sum over many rows may be off by as much more as it is larger, and one that was accumulated in the dtype of the
    input is off by more than that. The truth is computed in pieces of so many elements.
    """
    if workload.op == "dropout":
        return {name: _dropout_error(mode, sample, leaves(found)) for name, found in results.items()}
    truth, kept = _truth(workload, mode, sample, elements), None
    if workload.record.kink is not None:
        # Near the kink of a ReLU a rounding decides about a derivative.
        values = workload.record.kink(*(value.detach().float() for value in (*sample.primals, *sample.constants)))
        kept = values.abs() > TOLERANCES[workload.dtype] * values.abs().amax()
    return {name: _error(leaves(found), truth, kept) for name, found in results.items()}


def _pieces(workload: Workload, elements: int) -> Iterator[tuple[Any, Any]]:
    """Index into tensors of the input's size, and into parameters, of parts that no statistic crosses."""
    if workload.record.products:
        (batch, heads, *_), group = workload.shape, workload.shape[1] // workload.param_shape[1]
        for index, head in itertools.product(range(batch), range(heads)):
            yield tuple((slice(index, index + 1), slice(one, one + 1)) for one in (head, head // group))
        return
    axis = int(workload.record.has_channels)
    size = workload.shape[axis]
    width = max(size * elements // math.prod(workload.shape), 1)
    for start in range(0, size, width):
        part = slice(start, start + width)
        # Parameters belong to channels, and to no rows.
        yield (*(slice(None),) * axis, part), part if axis else slice(None)


def _truth(workload: Workload, mode: str, sample: Sample, elements: int) -> list[Tensor]:
    """The results in float64, summed up where every piece has its share, as of derivatives of a parameter."""
    op, function, shape = workload.record, formula(workload), workload.param_shape
    has_params = workload.num_params > 0 or op.has_channels

    def is_param(value: Tensor) -> bool:
        return has_params and (value.dim() == 1 if len(shape) == 1 else value.shape == shape)

    def results(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        def wide(value: Tensor) -> Tensor:
            part = change(value.detach())
            return part.double() if part.is_floating_point() else part

        changed: Any = optree.tree_map(wide, cast("Any", sample))
        return leaves(make_step(mode, function, changed)())

    whole = [torch.zeros_like(value, device=sample.primals[0].device) for value in results(lambda x: x.to("meta"))]
    for of_full, of_param in _pieces(workload, elements):
        parts = results(lambda x, full=of_full, param=of_param: x[param if is_param(x) else full])
        for value, part in zip(whole, parts, strict=True):
            value[of_param if is_param(value) else of_full] += part.detach()
    return whole


def _dropout_error(mode: str, sample: Sample, found: Sequence[Tensor]) -> float:
    """Chance decides what a dropout drops: results must be their operands times one noise of right values and share."""
    (x,), (x_dot,), *_ = sample
    operands = {"forward": (x,), "jvp": (x, x_dot)}.get(mode, (sample.y_bar,))
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
