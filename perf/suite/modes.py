"""What each mode computes, as a step without arguments over one set of tensors.

A provider brings a function `f(x, weight, bias)` (without parameters `f(x)`; what is no variable of a derivative, as
running statistics, comes last) and may bring a compiler, `wrap`; the mode decides what is called, and what of it
belongs to the step and what is prepared before the clock runs:

    forward            y = f(x, weight, bias), with what a backward pass needs
    backward           the cotangents of x, weight and bias for y_bar; y is there already
    forward_backward   both of them
    jvp                y and y_dot = df(x_dot, weight_dot, bias_dot)
    hvp                the Hessian of sum(y * y_bar) times (x_dot, weight_dot, bias_dot), and the gradient
    double_backward    cotangents of x, weight and y_bar for one of x_bar; x_bar is there already
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optree
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from perf.workloads import Workload

    Step = Callable[[], Any]
    Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

# Which of the tensors of the size of x a mode takes beside x.
OPERANDS = {
    "forward": (),
    "backward": ("y_bar",),
    "forward_backward": ("y_bar",),
    "jvp": ("x_dot",),
    "hvp": ("y_bar", "x_dot"),
    "double_backward": ("y_bar", "x_bar_bar"),
}
# Modes of torch.func take plain tensors; the others differentiate with respect to leaves.
FUNCTIONAL = ("jvp", "hvp")


@dataclass(frozen=True)
class Sample:
    """One set of tensors.

    Attributes:
        x: The input.
        params: Weight and bias, or nothing.
        param_dots: Their tangents.
        y_bar: Cotangent of the output, of the size of x; None where the mode takes none, as the next two.
        x_dot: Tangent of x.
        x_bar_bar: Cotangent of x_bar.
        constants: Running mean and variance of batch norm in evaluation, or nothing.
    """

    x: Tensor
    params: tuple[Tensor, ...]
    param_dots: tuple[Tensor, ...]
    y_bar: Tensor | None = None
    x_dot: Tensor | None = None
    x_bar_bar: Tensor | None = None
    constants: tuple[Tensor, ...] = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> Sample:
        """The sample with `function` applied to every tensor."""
        values = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                values[field.name] = tuple(map(function, value))
            elif value is not None:
                values[field.name] = function(value)
        return Sample(**values)

    def with_params(self, dtype: torch.dtype) -> Sample:
        """The sample with parameters of another dtype."""
        return dataclasses.replace(
            self,
            params=tuple(param.to(dtype) for param in self.params),
            param_dots=tuple(param.to(dtype) for param in self.param_dots),
        )


def make_sample(workload: Workload, mode: str, device: torch.device, seed: int = 0) -> Sample:
    """Random tensors for `mode` of `workload`; the same ones for the same seed and device."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    def full() -> Tensor:
        value = random(workload.shape, workload.torch_dtype)
        return value.contiguous(memory_format=torch.channels_last) if workload.channels_last else value

    def params() -> tuple[Tensor, ...]:
        dtype = getattr(torch, workload.param_dtype)
        return tuple(random((workload.num_params,), dtype) for _ in range(2 if workload.num_params else 0))

    def statistics() -> tuple[Tensor, ...]:
        if workload.op != "batch_norm_eval":
            return ()
        mean, variance = (random((workload.shape[1],), torch.float32) for _ in range(2))
        return mean, variance.square_().add_(0.5)

    operands = {name: full() for name in OPERANDS[mode]}
    # Not centered, so that an implementation which forgets to subtract the mean shows.
    return Sample(full().add_(1), params(), params(), **operands, constants=statistics())


def leaves(values: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in optree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def make_steps(mode: str, function: Callable[..., Any], wrap: Wrap) -> Callable[[Sample], Step]:
    """From a function to what makes a step of each set of tensors; what `wrap` compiles is shared by all steps."""
    if mode in FUNCTIONAL:
        transformed = wrap(_jvp if mode == "jvp" else _hvp)
        return lambda sample: (
            lambda: transformed(
                function,
                (sample.x, *sample.params),
                (sample.x_dot, *sample.param_dots),
                sample.y_bar,
                sample.constants,
            )
        )
    wrapped = wrap(function)
    return lambda sample: _REVERSE[mode](wrapped, *_tracked(sample))


def _jvp(function: Callable[..., Any], primals: tuple, tangents: tuple, y_bar: Tensor | None, constants: tuple) -> Any:
    return torch.func.jvp(lambda *primals: function(*primals, *constants), primals, tangents)


def _hvp(function: Callable[..., Any], primals: tuple, tangents: tuple, y_bar: Tensor, constants: tuple) -> Any:
    def gradient(*primals: Tensor) -> Any:
        return torch.func.vjp(lambda *primals: function(*primals, *constants), *primals)[1](y_bar)

    return torch.func.jvp(gradient, primals, tangents)


def _tracked(sample: Sample) -> tuple[tuple[Tensor, ...], Sample]:
    """Leaves that share memory with the sample, so that no two steps share an autograd graph."""
    inputs = tuple(value.detach().requires_grad_() for value in (sample.x, *sample.params))
    return inputs, sample


def _forward(function: Callable[..., Any], inputs: tuple[Tensor, ...], sample: Sample) -> Step:
    return lambda: function(*inputs, *sample.constants)


def _backward(function: Callable[..., Any], inputs: tuple[Tensor, ...], sample: Sample) -> Step:
    y = function(*inputs, *sample.constants)
    return lambda: torch.autograd.grad(y, inputs, sample.y_bar, retain_graph=True)


def _forward_backward(function: Callable[..., Any], inputs: tuple[Tensor, ...], sample: Sample) -> Step:
    return lambda: torch.autograd.grad(function(*inputs, *sample.constants), inputs, sample.y_bar)


def _double_backward(function: Callable[..., Any], inputs: tuple[Tensor, ...], sample: Sample) -> Step:
    if sample.y_bar is None:
        raise ValueError("double_backward: the sample must have y_bar.")
    y_bar = sample.y_bar.detach().requires_grad_()
    (x_bar,) = torch.autograd.grad(function(*inputs, *sample.constants), inputs[:1], y_bar, create_graph=True)
    # The bias does not enter x_bar.
    wanted = (*inputs[:2], y_bar)
    return lambda: torch.autograd.grad(x_bar, wanted, sample.x_bar_bar, retain_graph=True)


_REVERSE = {
    "forward": _forward,
    "backward": _backward,
    "forward_backward": _forward_backward,
    "double_backward": _double_backward,
}
