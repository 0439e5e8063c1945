"""The cases: what is done with `torch.library.custom_op`, with `primitives.custom_op`, and in plain torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from perf.custom_ops.case import (
    NAMESPACE,
    Case,
    Names,
    compiled,
    direction,
    gradient,
    library_op,
    objective,
    of_probe,
    own_op,
    point,
    points,
    tracked,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# The operator of most cases, with a rule for everything that there is a place for.


def plain_scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`y = sin(x) * weight`."""
    return x.sin() * weight


library_scale = library_op("scale", plain_scale)
library_scale.register_fake(lambda x, weight: torch.empty_like(x))


def _library_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _library_backward(ctx: Any, y_bar: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return y_bar * weight * x.cos(), y_bar * x.sin()


library_scale.register_autograd(_library_backward, setup_context=_library_setup)
scale = own_op("scale", plain_scale)
scale.def_save_for_backward(lambda inputs, output: (inputs.x, inputs.weight))


@scale.def_backward
def _backward(ctx: Any, saved: Any, y_bar: Tensor) -> dict:
    x, weight = saved
    return {"x": y_bar * weight * x.cos(), "weight": y_bar * x.sin()}


@scale.def_jvp
def _jvp(inputs: Any, output: Tensor, tangents: Any) -> Tensor:
    return tangents.x * inputs.x.cos() * inputs.weight + inputs.x.sin() * tangents.weight


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
    return torch.autograd.grad(checkpoint(objective(op), *leaves, use_reentrant=False), leaves)


def _dual_number(op: Callable) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(op(forward_ad.make_dual(point(), direction()), direction())).tangent


def _exported(op: Callable) -> Any:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, direction())

    return torch.export.export(Module(), (point(),)).module()(point())


def _func_jvp(op: Callable, x: Tensor, weight: Tensor) -> Any:
    return torch.func.jvp(op, (x, weight), (weight, x))[1]


def _func_grad(op: Callable, x: Tensor, weight: Tensor) -> Any:
    return torch.func.grad(objective(op), (0, 1))(x, weight)


def _per_sample(op: Callable) -> Any:
    return torch.func.vmap(torch.func.grad(objective(op), (0, 1)), (0, None))(points(), direction())


def _inside_compile(transform: Callable) -> Callable:
    return lambda op: compiled(partial(transform, op))(point(), direction())


PROBES: dict[str, Callable] = {
    "gradient": gradient,
    "gradient of a gradient": _second_derivative,
    "batch of cotangents (`is_grads_batched`)": _batch_of_cotangents,
    "gradient under checkpointing": _checkpointed,
    "`forward_ad`": _dual_number,
    "`torch.func.jvp`": lambda op: _func_jvp(op, point(), direction()),
    "`torch.func.grad`": lambda op: _func_grad(op, point(), direction()),
    "`torch.func.hessian`": lambda op: torch.func.hessian(objective(op), (0, 1))(point(), direction()),
    "Hessian-vector product, `jvp(grad)`": lambda op: _func_jvp(torch.func.grad(objective(op)), point(), direction()),
    "`vmap` without a rule": lambda op: torch.func.vmap(op, (0, None))(points(), direction()),
    "gradient per sample, `vmap(grad)`": _per_sample,
}
COMPILED_PROBES: dict[str, Callable] = {
    "gradient of a compiled call": lambda op: gradient(compiled(op)),
    "`torch.func.grad` inside compile": _inside_compile(_func_grad),
    "`torch.func.jvp` inside compile": _inside_compile(_func_jvp),
    "`torch.export`": _exported,
}


def _probe_cases(probes: dict[str, Callable], takes_compiler: bool) -> list[Case]:
    return [of_probe(name, p, library_scale, scale, plain_scale, takes_compiler) for name, p in probes.items()]


# Operators that lack a rule, or whose rule saves what it computed.


def plain_plus(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`sin(x) + bias`."""
    return x.sin() if bias is None else x.sin() + bias


def plain_sine(x: torch.Tensor) -> torch.Tensor:
    """`sin(x)`, whose rule saves its derivative."""
    return x.sin()


def _no_rule_cases() -> list[Case]:
    library_saving, saving = library_op("saving", plain_sine), own_op("saving", plain_sine)
    library_saving.register_autograd(
        lambda ctx, y_bar: y_bar * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0].cos()),
    )
    saving.def_save_for_backward(lambda inputs, output: inputs.x.cos())
    saving.def_backward(lambda ctx, saved, y_bar: {"x": y_bar * saved})

    def bar(op: Callable, order: int = 1) -> Any:
        x = point().requires_grad_()
        (x_bar,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=order > 1)
        return x_bar if order == 1 else torch.autograd.grad(x_bar.sum(), x)

    def tangent(op: Callable) -> Any:
        return torch.func.jvp(lambda x: op(x, None), (point(),), (direction(),))[1]

    second = partial(bar, order=2)
    return [
        of_probe(
            "gradient of a gradient where the rule saves what it computed", second, library_saving, saving, torch.sin
        ),
        of_probe('gradient without a rule, `differentiate="reference"` here', bar, library_plus, plus, plain_plus),
        of_probe("`torch.func.jvp` of the same", tangent, library_plus, plus, plain_plus),
    ]


library_plus, plus = library_op("plus", plain_plus), own_op("plus", plain_plus, differentiate="reference")

# Arguments that are trees, `None` or settings.


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class Params:
    """A node of optree's and of torch's trees."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


torch.export.register_dataclass(Params)


def plain_affine(params: Any, x: Tensor) -> dict[str, Tensor]:
    """`y = sin(x) * weight` with the weight in a dict or dataclass."""
    return {"y": x.sin() * (params["weight"] if isinstance(params, dict) else params.weight)}


affine = own_op("affine", plain_affine, differentiate="reference", tree_namespace=NAMESPACE)


def _library_affine(params_type: Any) -> Any:
    def op(params: Any, x: torch.Tensor) -> Any:
        return plain_affine(params, x)

    op.__annotations__ |= {"params": params_type, "return": dict[str, torch.Tensor]}
    return library_op(f"of_{params_type.__name__.lower()}", op)


def _configured(x: torch.Tensor, *, config: Any) -> torch.Tensor:
    return x * config[1][0]


def _library_configured() -> Any:
    def op(x: torch.Tensor, config: tuple[str, tuple[float, int]]) -> torch.Tensor:
        return _configured(x, config=config)

    return library_op("configured", op)(point(), ("by", (2.0, 3)))


def _tree_cases() -> list[Case]:
    configured = own_op("configured", _configured)

    def case(name: str, params_type: Any, build: Callable, takes_compiler: bool = False) -> Case:
        def run(op: Callable) -> Any:
            function, (x, weight) = compiled(op) if takes_compiler else op, tracked()
            return torch.autograd.grad(function(build(weight), x)["y"].square().sum(), (x, weight))

        library, truth = (lambda: run(_library_affine(params_type))), (lambda: run(plain_affine))
        return Case(name, library, lambda: run(affine), truth, takes_compiler)

    def as_dict(weight: Tensor) -> dict:
        return {"weight": weight, "unused": None}

    def with_and_without(op: Callable) -> Any:
        return op(point(), None), op(point(), direction())

    return [
        case("tensors in a dict, with gradient", dict[str, torch.Tensor], as_dict),
        case("tensors in a dataclass, with gradient", Params, Params),
        case("tensors in a dict, compiled", dict[str, torch.Tensor], as_dict, takes_compiler=True),
        case("tensors in a dataclass, compiled", Params, Params, takes_compiler=True),
        of_probe("`None` for a tensor", with_and_without, library_plus, plus, plain_plus),
        Case(
            "a setting that is a tuple of a string and a tuple",
            _library_configured,
            lambda: configured(point(), config=("by", (2.0, 3))),
            lambda: 2 * point(),
        ),
    ]


# Operators that write into an argument.


def plain_update(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Halve the state and add `x` to it; returns `2 * x`."""
    state.mul_(0.5).add_(x)
    return x * 2


library_update = library_op("update", plain_update, ("state",))
library_update.register_fake(lambda state, x: torch.empty_like(x))
update = own_op("update", plain_update, mutates=("state",), differentiate="reference")


def _mutation_cases() -> list[Case]:
    def once(op: Callable) -> Any:
        state = direction()
        return op(state, point()), state

    def under(transform: Callable) -> Callable:
        """The update of a state that lives inside of the transformed function."""

        def probe(op: Callable) -> Any:
            def function(x: Tensor) -> tuple[Tensor, Tensor]:
                state = direction() + 0 * x
                if op is update:
                    return update.pure(state, x)
                y = op(state, x)
                return y, state

            return transform(function)

        return probe

    def with_gradient(op: Callable) -> Any:
        if op is library_update:
            # An error, when the rule is registered.
            other: Any = library_op("update_with_gradient", plain_update, ("state",))
            other.register_autograd(lambda ctx, y_bar: (None, 2 * y_bar))
        state, x = direction(), point().requires_grad_()
        return state, *torch.autograd.grad(op(state, x).square().sum(), x)

    transforms: dict[str, tuple[Callable, bool]] = {
        "update in place": (once, False),
        "update in place, compiled": (under(lambda f: compiled(f)(point())), True),
        "update in place, with gradient": (with_gradient, False),
        "new state, `torch.func.jvp`": (under(lambda f: torch.func.jvp(f, (point(),), (direction(),))[1]), False),
        "new state, `vmap`": (under(lambda f: torch.func.vmap(f)(points())), False),
    }
    return [of_probe(n, probe, library_update, update, plain_update, flag) for n, (probe, flag) in transforms.items()]


# Mistakes in rules.


def plain_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x + weight`."""
    return x + weight


def _mistake(name: str, title: str, bars: Callable[[Tensor], tuple[Any, ...]]) -> Case:
    """A backward rule of `y = x + weight` that returns the wrong `bars`."""

    def library() -> Any:
        op = library_op(name, plain_sum)
        op.register_autograd(lambda ctx, y_bar: bars(y_bar))
        return gradient(op)

    def here() -> Any:
        op = own_op(name, plain_sum)
        op.def_save_for_backward(lambda inputs, output: ())
        op.def_backward(lambda ctx, saved, y_bar: dict(zip(("x", "weight"), bars(y_bar), strict=False)))
        return gradient(op)

    return Case(f"mistake: {title}", library, here, Names(name))


def _second(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight


def _mistake_cases() -> list[Case]:
    return [
        _mistake("wrong_shape", "a cotangent of another shape", lambda y_bar: (y_bar, y_bar[:2])),
        _mistake("wrong_dtype", "a cotangent of another dtype", lambda y_bar: (y_bar, y_bar.bfloat16())),
        _mistake("wrong_missing", "a cotangent is missing", lambda y_bar: (y_bar,)),
        _mistake("wrong_number", "a cotangent is no tensor", lambda y_bar: (y_bar, 0.0)),
        Case(
            "mistake: the result is an argument",
            lambda: library_op("wrong_alias", _second)(point(), direction()),
            lambda: own_op("wrong_alias", _second)(point(), direction()),
            Names("wrong_alias"),
        ),
    ]


CASES = [
    *_probe_cases(PROBES, takes_compiler=False),
    *_no_rule_cases(),
    *_probe_cases(COMPILED_PROBES, takes_compiler=True),
    *_tree_cases(),
    *_mutation_cases(),
    *_mistake_cases(),
]
