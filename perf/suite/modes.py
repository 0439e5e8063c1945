"""The work of each mode, as a step without arguments over one set of tensors, and the bytes that it must move.

A provider brings a function `f(x, weight, bias)` (without parameters `f(x)`; a residual comes before them, and what no
derivative is taken of, as running statistics and labels, last; for attention `f(q, k, v)`) and may bring a compiler,
`wrap`; the mode decides what is called.
`backward` has y already, `double_backward` x_bar, and `backward_of_jvp` y and y_dot; `jvp` and `hvp` are those of
torch.func, with tangents of all inputs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from perf.ops.workload import Workload

    Step = Callable[[], Any]
    Function = Callable[..., Any]

# Which of the tensors of the size of x a mode takes beside x.
OPERANDS = {
    "backward": ("y_bar",),
    "forward_backward": ("y_bar",),
    "jvp": ("x_dot",),
    "hvp": ("y_bar", "x_dot"),
    "double_backward": ("y_bar", "x_bar_bar"),
    "backward_of_jvp": ("y_bar", "x_dot", "y_dot_bar"),
}


def minimum_bytes(workload: Workload, mode: str) -> int | None:
    """Bytes of `mode` of `workload` at least: each operand read once, each result written once."""
    op = workload.record
    if not op.passes:
        return None
    full, params, statistics = op.passes[mode]
    # Statistics are float32.
    rows = 4 * statistics * op.has_statistics * (math.prod(workload.shape) // workload.num_cols)
    return full * workload.pass_bytes + params * workload.num_params * workload.param_dtype.itemsize + rows


def flops(workload: Workload, mode: str) -> int | None:
    """Multiplications and additions of the products of matrices in a step; None where memory decides."""
    products = workload.record.products
    return products[mode] * workload.matmul_flops if products else None


class Sample(NamedTuple):
    """One set of tensors: the input, its parameters, and tangents and cotangents where the mode takes them.

    `x_bar_bar` is the cotangent of x_bar; constants are the running mean and variance of batch norm in evaluation, or
    labels. The input of attention is q, and its parameters are k and v, of which `param_dots` are also cotangents of
    the gradients; a residual is one of the parameters. Cotangents of several results are a tuple.
    """

    x: Tensor
    params: tuple[Tensor, ...]
    param_dots: tuple[Tensor, ...]
    y_bar: Any = None
    x_dot: Tensor | None = None
    x_bar_bar: Tensor | None = None
    y_dot_bar: Any = None
    constants: tuple[Tensor, ...] = ()


def make_sample(workload: Workload, mode: str, device: torch.device) -> Sample:
    """Random tensors for `mode` of `workload`; the same ones on the same device."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    op = workload.record

    def full(shape: tuple[int, ...] = workload.shape) -> Tensor:
        if workload.op == "attention":
            # In memory as a projection leaves them: the heads of a token side by side.
            batch, num_heads, tokens, width = shape
            return random((batch, tokens, num_heads, width), workload.torch_dtype).transpose(1, 2)
        value = random(shape, workload.torch_dtype)
        return value.contiguous(memory_format=torch.channels_last) if workload.channels_last else value

    def params() -> tuple[Tensor, ...]:
        shape, count = workload.param_shape, op.num_params * workload.affine
        vectors = (full(shape) if len(shape) > 1 else random(shape, workload.param_dtype) for _ in range(count))
        return (*(full() for _ in range(op.num_full)), *vectors)

    def operand(name: str) -> Any:
        if not name.startswith("y_"):
            return full()
        shapes = op.result_shapes(workload)
        found = [full() if shape == workload.shape else random(shape, workload.torch_dtype) for shape in shapes]
        return tuple(found) if len(found) > 1 else found[0]

    operands = {name: operand(name) for name in OPERANDS.get(mode, ())}
    constants = op.constants(workload, random)
    # Not centered, so that an implementation which forgets to subtract the mean shows.
    return Sample(full().add_(1), params(), params(), **operands, constants=constants)


def leaves(values: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in optree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def make_steps(mode: str, function: Function, wrap: Callable[[Function], Function]) -> Callable[[Sample], Step]:
    """From a function to what makes a step of each set of tensors; what `wrap` compiles is shared by all steps."""
    if transform := _FUNCTIONAL.get(mode):
        transformed = wrap(transform)
        return lambda sample: lambda: transformed(function, sample)
    if mode == "backward_of_jvp":
        transformed = wrap(_jvp)
        return lambda sample: _backward_of_jvp(lambda moving: transformed(function, moving), sample)
    wrapped = wrap(function)

    def make(sample: Sample) -> Step:
        # Leaves that share memory with the sample, so that no two steps share an autograd graph.
        inputs = tuple(_leaf(value) for value in (sample.x, *sample.params))
        return _REVERSE[mode](lambda: wrapped(*inputs, *sample.constants), inputs, sample)

    return make


def _jvp(function: Function, sample: Sample) -> Any:
    primals, tangents = (sample.x, *sample.params), (sample.x_dot, *sample.param_dots)
    return torch.func.jvp(lambda *primals: function(*primals, *sample.constants), primals, tangents)


def _hvp(function: Function, sample: Sample) -> Any:
    def gradient(*primals: Tensor) -> Any:
        return torch.func.vjp(lambda *primals: function(*primals, *sample.constants), *primals)[1](sample.y_bar)

    return torch.func.jvp(gradient, (sample.x, *sample.params), (sample.x_dot, *sample.param_dots))


def _leaf(value: Any) -> Tensor:
    return value.detach().requires_grad_()


def _backward_of_jvp(jvp: Callable[[Sample], Any], sample: Sample) -> Step:
    names = ("x", "params", "x_dot", "param_dots")
    moving = sample._replace(**{name: optree.tree_map(_leaf, getattr(sample, name)) for name in names})
    results = jvp(moving)
    inputs = leaves([getattr(moving, name) for name in names])
    return lambda: torch.autograd.grad(results, inputs, (sample.y_bar, sample.y_dot_bar), retain_graph=True)


def _backward(forward: Step, inputs: tuple[Tensor, ...], sample: Sample) -> Step:
    y = forward()
    return lambda: torch.autograd.grad(y, inputs, sample.y_bar, retain_graph=True)


def _double_backward(forward: Step, inputs: tuple[Tensor, ...], sample: Any) -> Step:
    y_bar, is_attention = _leaf(sample.y_bar), any(param.dim() > 1 for param in sample.params)
    # Of a norm x_bar is differentiated, into which the bias does not enter; of attention all three gradients.
    of, wanted = (inputs, inputs) if is_attention else (inputs[:1], inputs[:2])
    bars = torch.autograd.grad(forward(), of, y_bar, create_graph=True)
    bar_bars = (sample.x_bar_bar, *sample.param_dots)[: len(of)]
    return lambda: torch.autograd.grad(bars, (*wanted, y_bar), bar_bars, retain_graph=True)


# Modes of torch.func take plain tensors; the others differentiate with respect to leaves.
_FUNCTIONAL: dict[str, Function] = {"jvp": _jvp, "hvp": _hvp}
_REVERSE: dict[str, Callable[..., Step]] = {
    "forward": lambda forward, inputs, sample: forward,
    "backward": _backward,
    "forward_backward": lambda forward, inputs, sample: lambda: torch.autograd.grad(forward(), inputs, sample.y_bar),
    "double_backward": _double_backward,
}
