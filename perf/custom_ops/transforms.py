"""One operator with a rule for everything that there is a place for, and operators that lack one, under transforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import primitives as pr
from perf.custom_ops.case import NAMESPACE, Case, compiled, direction, gradient, objective, point, tracked
from perf.custom_ops.trees import library_plus, plain_plus, plus

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


# The operator of most cases, with a rule for everything that there is a place for.


def plain_scale(x: Tensor, weight: Tensor) -> Tensor:
    """`y = sin(x) * weight`."""
    return x.sin() * weight


@torch.library.custom_op(f"{NAMESPACE}::library_scale", mutates_args=())
def library_scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`plain_scale` in torch.library."""
    return x.sin() * weight


def _library_backward(ctx: Any, y_bar: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return y_bar * weight * x.cos(), y_bar * x.sin()


library_scale.register_fake(lambda x, weight: torch.empty_like(x))
library_scale.register_autograd(
    _library_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@pr.custom_op(f"{NAMESPACE}::scale")
def scale(x: Tensor, weight: Tensor) -> Tensor:
    """`plain_scale` in this package."""
    return x.sin() * weight


@scale.def_backward
def _backward(ctx: Any, saved: Any, y_bar: Tensor) -> dict:
    x, weight = saved
    return {"x": y_bar * weight * x.cos(), "weight": y_bar * x.sin()}


@scale.def_jvp
def _jvp(inputs: Any, output: Tensor, tangents: Any) -> Tensor:
    return tangents.x * inputs.x.cos() * inputs.weight + inputs.x.sin() * tangents.weight


scale.def_save_for_backward(lambda inputs, output: (inputs.x, inputs.weight))


# Probes: what is done with an operator of x and weight.


def _second_derivative(op: Callable) -> Any:
    leaves = tracked()
    bars = torch.autograd.grad(objective(op)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(torch.stack(bars).sum(), leaves)


def _batch_of_cotangents(op: Callable) -> Any:
    leaves = tracked()
    return torch.autograd.grad(op(*leaves), leaves, torch.eye(3, dtype=torch.float64), is_grads_batched=True)


def _checkpointed(op: Callable) -> Any:
    leaves = tracked()
    loss = checkpoint(objective(op), *leaves, use_reentrant=False)
    return torch.autograd.grad(loss, leaves)


def _dual_number(op: Callable) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(op(forward_ad.make_dual(point(), direction()), direction())).tangent


def _func_jvp(op: Callable) -> Any:
    return torch.func.jvp(op, (point(), direction()), (direction(), point()))[1]


def _func_grad(op: Callable) -> Any:
    return torch.func.grad(objective(op), (0, 1))(point(), direction())


def _hessian(op: Callable) -> Any:
    return torch.func.hessian(objective(op), (0, 1))(point(), direction())


def _hessian_vector(op: Callable) -> Any:
    return torch.func.jvp(torch.func.grad(objective(op)), (point(), direction()), (direction(), point()))[1]


def _batch(op: Callable) -> Any:
    return torch.func.vmap(op, (0, None))(torch.stack([point(), 2 * point()]), direction())


def _gradient_per_sample(op: Callable) -> Any:
    samples = torch.stack([point(), 2 * point()])
    return torch.func.vmap(torch.func.grad(objective(op), (0, 1)), (0, None))(samples, direction())


def _compiled_transform(transform: Callable) -> Callable:
    return lambda op: compiled(lambda x, weight: transform(op, x, weight))(point(), direction())


def _exported(op: Callable) -> Any:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, direction())

    return torch.export.export(Module(), (point(),)).module()(point())


PROBES: dict[str, Callable] = {
    "gradient": gradient,
    "gradient of a gradient": _second_derivative,
    "batch of cotangents (`is_grads_batched`)": _batch_of_cotangents,
    "gradient under checkpointing": _checkpointed,
    "`forward_ad`": _dual_number,
    "`torch.func.jvp`": _func_jvp,
    "`torch.func.grad`": _func_grad,
    "`torch.func.hessian`": _hessian,
    "Hessian-vector product, `jvp(grad)`": _hessian_vector,
    "`vmap` without a rule": _batch,
    "gradient per sample, `vmap(grad)`": _gradient_per_sample,
}
COMPILED_PROBES: dict[str, Callable] = {
    "gradient of a compiled call": lambda op: gradient(compiled(op)),
    "`torch.func.grad` inside compile": _compiled_transform(
        lambda op, *at: torch.func.grad(objective(op), (0, 1))(*at)
    ),
    "`torch.func.jvp` inside compile": _compiled_transform(lambda op, x, w: torch.func.jvp(op, (x, w), (w, x))[1]),
    "`torch.export`": _exported,
}


def _of_probes(probes: dict[str, Callable], takes_compiler: bool) -> list[Case]:
    def on(probe: Callable, op: Callable) -> Callable[[], Any]:
        return lambda: probe(op)

    return [
        Case(name, on(probe, library_scale), on(probe, scale), on(probe, plain_scale), takes_compiler)
        for name, probe in probes.items()
    ]


# Operators that lack a rule, or whose rule saves what it computed.


@torch.library.custom_op(f"{NAMESPACE}::library_saving", mutates_args=())
def library_saving(x: torch.Tensor) -> torch.Tensor:
    """Sine that saves its derivative."""
    return x.sin()


def _library_save_cosine(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0].cos())


library_saving.register_autograd(lambda ctx, y_bar: y_bar * ctx.saved_tensors[0], setup_context=_library_save_cosine)


@pr.custom_op(f"{NAMESPACE}::saving")
def saving(x: Tensor) -> Tensor:
    """Sine that saves its derivative."""
    return x.sin()


saving.def_save_for_backward(lambda inputs, output: inputs.x.cos())
saving.def_backward(lambda ctx, saved, y_bar: {"x": y_bar * saved})


def _second_of_one(op: Callable) -> Any:
    x = point().requires_grad_()
    (bar,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(bar.sum(), x)


def _no_rule_cases() -> list[Case]:
    def case(name: str, probe: Callable) -> Case:
        return Case(name, lambda: probe(library_plus), lambda: probe(plus), lambda: probe(plain_plus))

    def bar(op: Callable) -> Any:
        x = point().requires_grad_()
        return torch.autograd.grad(op(x, None).square().sum(), x)

    def tangent(op: Callable) -> Any:
        return torch.func.jvp(lambda x: op(x, None), (point(),), (direction(),))[1]

    return [
        Case(
            "gradient of a gradient where the rule saves what it computed",
            lambda: _second_of_one(library_saving),
            lambda: _second_of_one(saving),
            lambda: _second_of_one(torch.sin),
        ),
        case('gradient without a rule, `differentiate="reference"` here', bar),
        case("`torch.func.jvp` of the same", tangent),
    ]


CASES: list[Case] = [
    *_of_probes(PROBES, takes_compiler=False),
    *_no_rule_cases(),
    *_of_probes(COMPILED_PROBES, takes_compiler=True),
]
