"""The cases: what is done with `torch.library.custom_op`, with `primitives.custom_op`, and in plain torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import primitives as pr

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NAMESPACE = "perf_custom_ops"


class Names(NamedTuple):
    """What the error of a mistake has to name."""

    operator: str
    argument: str = "weight"
    file: str = "cases.py"


class Case(NamedTuple):
    """One row: what is done with either side's operator, and the value that it should have, or what its error names."""

    name: str
    library: Callable[[], Any]
    here: Callable[[], Any]
    truth: Callable[[], Any] | Names
    compiled: bool = False


def _probed(name: str, probe: Callable, ops: tuple[Any, Any, Callable], *flags: bool) -> Case:
    """The case of a probe, which does the same with the operators of either side and with plain torch."""
    library, here, plain = (partial(probe, op) for op in ops)
    return Case(name, library, here, plain, *flags)


def _library(name: str, function: Callable, mutates: tuple[str, ...] = ()) -> Any:
    return torch.library.custom_op(f"{NAMESPACE}::library_{name}", function, mutates_args=mutates)


def _own(name: str, function: Callable, **options: Any) -> Any:
    return pr.custom_op(f"{NAMESPACE}::{name}", **options)(function)


# Where operators are called, and with what weights or tangents.


def _point() -> Tensor:
    return torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def _direction() -> Tensor:
    return torch.tensor([1.5, 0.3, -0.7], dtype=torch.float64)


def _points() -> Tensor:
    return torch.stack([_point(), 2 * _point()])


def _tracked() -> tuple[Tensor, Tensor]:
    return _point().requires_grad_(), _direction().requires_grad_()


def _objective(op: Callable) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: op(x, weight).square().sum()


def _gradient(op: Callable) -> Any:
    leaves = _tracked()
    return torch.autograd.grad(_objective(op)(*leaves), leaves)


def _compiled(function: Callable) -> Callable:
    # The backend matters to no case, and this one needs no C++ compiler.
    return torch.compile(function, fullgraph=True, backend="aot_eager")


# The operator of most cases, with a rule for everything that there is a place for.


def _plain_scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.sin() * weight


library_scale = _library("scale", _plain_scale)
library_scale.register_fake(lambda x, weight: torch.empty_like(x))


def _library_backward(ctx: Any, y_bar: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return y_bar * weight * x.cos(), y_bar * x.sin()


library_scale.register_autograd(
    _library_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
scale = _own("scale", _plain_scale)
scale.def_save_for_backward(lambda inputs, output: (inputs.x, inputs.weight))
scale.def_backward(lambda ctx, saved, y_bar: {"x": y_bar * saved[1] * saved[0].cos(), "weight": y_bar * saved[0].sin()})
scale.def_jvp(lambda inputs, y, dots: dots.x * inputs.x.cos() * inputs.weight + inputs.x.sin() * dots.weight)


# Probes: what is done with an operator of x and weight.


def _second_derivative(op: Callable) -> Any:
    leaves = _tracked()
    bars = torch.autograd.grad(_objective(op)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(torch.stack(bars).sum(), leaves)


def _batch_of_cotangents(op: Callable) -> Any:
    leaves = _tracked()
    return torch.autograd.grad(op(*leaves), leaves, torch.eye(3, dtype=torch.float64), is_grads_batched=True)


def _checkpointed(op: Callable) -> Any:
    leaves = _tracked()
    return torch.autograd.grad(checkpoint(_objective(op), *leaves, use_reentrant=False), leaves)


def _dual_number(op: Callable) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(op(forward_ad.make_dual(_point(), _direction()), _direction())).tangent


def _exported(op: Callable) -> Any:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, _direction())

    return torch.export.export(Module(), (_point(),)).module()(_point())


def _func_jvp(op: Callable, x: Tensor, weight: Tensor) -> Any:
    return torch.func.jvp(op, (x, weight), (weight, x))[1]


def _func_grad(op: Callable, x: Tensor, weight: Tensor) -> Any:
    return torch.func.grad(_objective(op), (0, 1))(x, weight)


def _inside_compile(transform: Callable) -> Callable:
    return lambda op: _compiled(partial(transform, op))(_point(), _direction())


PROBES: dict[str, Callable] = {
    "gradient": _gradient,
    "gradient of a gradient": _second_derivative,
    "batch of cotangents (`is_grads_batched`)": _batch_of_cotangents,
    "gradient under checkpointing": _checkpointed,
    "`forward_ad`": _dual_number,
    "`torch.func.jvp`": lambda op: _func_jvp(op, _point(), _direction()),
    "`torch.func.grad`": lambda op: _func_grad(op, _point(), _direction()),
    "`torch.func.hessian`": lambda op: torch.func.hessian(_objective(op), (0, 1))(_point(), _direction()),
    "Hessian-vector product, `jvp(grad)`": lambda op: _func_jvp(
        torch.func.grad(_objective(op)), _point(), _direction()
    ),
    "`vmap` without a rule": lambda op: torch.func.vmap(op, (0, None))(_points(), _direction()),
    "gradient per sample, `vmap(grad)`": lambda op: torch.func.vmap(torch.func.grad(_objective(op), (0, 1)), (0, None))(
        _points(), _direction()
    ),
}
COMPILED_PROBES: dict[str, Callable] = {
    "gradient of a compiled call": lambda op: _gradient(_compiled(op)),
    "`torch.func.grad` inside compile": _inside_compile(_func_grad),
    "`torch.func.jvp` inside compile": _inside_compile(_func_jvp),
    "`torch.export`": _exported,
}


def _probe_cases(probes: dict[str, Callable], takes_compiler: bool) -> list[Case]:
    return [_probed(name, p, (library_scale, scale, _plain_scale), takes_compiler) for name, p in probes.items()]


# Operators that lack a rule, or whose rule saves what it computed.


def _plain_plus(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.sin() if bias is None else x.sin() + bias


def _plain_sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def _no_rule_cases() -> list[Case]:
    library_saving, saving = _library("saving", _plain_sine), _own("saving", _plain_sine)
    library_saving.register_autograd(
        lambda ctx, y_bar: y_bar * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0].cos()),
    )
    saving.def_save_for_backward(lambda inputs, output: inputs.x.cos())
    saving.def_backward(lambda ctx, saved, y_bar: {"x": y_bar * saved})

    def bar(op: Callable, order: int = 1) -> Any:
        x = _point().requires_grad_()
        (x_bar,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=order > 1)
        return x_bar if order == 1 else torch.autograd.grad(x_bar.sum(), x)

    def tangent(op: Callable) -> Any:
        return torch.func.jvp(lambda x: op(x, None), (_point(),), (_direction(),))[1]

    second = partial(bar, order=2)
    return [
        _probed(
            "gradient of a gradient where the rule saves what it computed", second, (library_saving, saving, torch.sin)
        ),
        _probed('gradient without a rule, `differentiate="reference"` here', bar, PLUS),
        _probed("`torch.func.jvp` of the same", tangent, PLUS),
    ]


PLUS = _library("plus", _plain_plus), _own("plus", _plain_plus, differentiate="reference"), _plain_plus

# Arguments that are trees, `None` or settings.


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class Params:
    """A node of optree's and of torch's trees."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


torch.export.register_dataclass(Params)


def _plain_affine(params: Any, x: Tensor) -> dict[str, Tensor]:
    return {"y": x.sin() * (params["weight"] if isinstance(params, dict) else params.weight)}


affine = _own("affine", _plain_affine, differentiate="reference", tree_namespace=NAMESPACE)


def _library_affine(params_type: Any) -> Any:
    def op(params: Any, x: torch.Tensor) -> Any:
        return _plain_affine(params, x)

    op.__annotations__ |= {"params": params_type, "return": dict[str, torch.Tensor]}
    return _library(f"of_{params_type.__name__.lower()}", op)


def _as_dict(weight: Tensor) -> dict:
    return {"weight": weight, "unused": None}


def _configured(x: torch.Tensor, *, config: Any) -> torch.Tensor:
    return x * config[1][0]


def _library_configured() -> Any:
    def op(x: torch.Tensor, config: tuple[str, tuple[float, int]]) -> torch.Tensor:
        return _configured(x, config=config)

    return _library("configured", op)(_point(), ("by", (2.0, 3)))


def _tree_cases() -> list[Case]:
    configured = _own("configured", _configured)

    def case(name: str, params_type: Any, build: Callable, takes_compiler: bool = False) -> Case:
        def run(op: Callable) -> Any:
            function, (x, weight) = _compiled(op) if takes_compiler else op, _tracked()
            return torch.autograd.grad(function(build(weight), x)["y"].square().sum(), (x, weight))

        library, truth = (lambda: run(_library_affine(params_type))), (lambda: run(_plain_affine))
        return Case(name, library, lambda: run(affine), truth, takes_compiler)

    def with_and_without(op: Callable) -> Any:
        return op(_point(), None), op(_point(), _direction())

    return [
        case("tensors in a dict, with gradient", dict[str, torch.Tensor], _as_dict),
        case("tensors in a dataclass, with gradient", Params, Params),
        case("tensors in a dict, compiled", dict[str, torch.Tensor], _as_dict, takes_compiler=True),
        case("tensors in a dataclass, compiled", Params, Params, takes_compiler=True),
        _probed("`None` for a tensor", with_and_without, PLUS),
        Case(
            "a setting that is a tuple of a string and a tuple",
            _library_configured,
            lambda: configured(_point(), config=("by", (2.0, 3))),
            lambda: 2 * _point(),
        ),
    ]


# Operators that write into an argument.


def _plain_update(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    state.mul_(0.5).add_(x)
    return x * 2


library_update = _library("update", _plain_update, ("state",))
library_update.register_fake(lambda state, x: torch.empty_like(x))
update = _own("update", _plain_update, mutates=("state",), differentiate="reference")


def _mutation_cases() -> list[Case]:
    def once(op: Callable) -> Any:
        state = _direction()
        return op(state, _point()), state

    def under(transform: Callable) -> Callable:
        """The update of a state that lives inside of the transformed function."""

        def probe(op: Callable) -> Any:
            def function(x: Tensor) -> tuple[Tensor, Tensor]:
                state = _direction() + 0 * x
                if op is update:
                    return update.pure(state, x)
                y = op(state, x)
                return y, state

            return transform(function)

        return probe

    def with_gradient(op: Callable) -> Any:
        if op is library_update:
            # An error, when the rule is registered.
            other: Any = _library("update_with_gradient", _plain_update, ("state",))
            other.register_autograd(lambda ctx, y_bar: (None, 2 * y_bar))
        state, x = _direction(), _point().requires_grad_()
        return state, *torch.autograd.grad(op(state, x).square().sum(), x)

    transforms: dict[str, tuple[Callable, bool]] = {
        "update in place": (once, False),
        "update in place, compiled": (under(lambda f: _compiled(f)(_point())), True),
        "update in place, with gradient": (with_gradient, False),
        "new state, `torch.func.jvp`": (under(lambda f: torch.func.jvp(f, (_point(),), (_direction(),))[1]), False),
        "new state, `vmap`": (under(lambda f: torch.func.vmap(f)(_points())), False),
    }
    ops = library_update, update, _plain_update
    return [_probed(name, probe, ops, flag) for name, (probe, flag) in transforms.items()]


# Mistakes in rules.


def _plain_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x + weight


def _mistake(name: str, title: str, bars: Callable[[Tensor], tuple[Any, ...]]) -> Case:
    """A backward rule of `y = x + weight` that returns the wrong `bars`."""

    def library() -> Any:
        op = _library(name, _plain_sum)
        op.register_autograd(lambda ctx, y_bar: bars(y_bar))
        return _gradient(op)

    def here() -> Any:
        op = _own(name, _plain_sum)
        op.def_save_for_backward(lambda inputs, output: ())
        op.def_backward(lambda ctx, saved, y_bar: dict(zip(("x", "weight"), bars(y_bar), strict=False)))
        return _gradient(op)

    return Case(f"mistake: {title}", library, here, Names(name))


def _mistake_cases() -> list[Case]:
    def second(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight

    return [
        _mistake("wrong_shape", "a cotangent of another shape", lambda y_bar: (y_bar, y_bar[:2])),
        _mistake("wrong_dtype", "a cotangent of another dtype", lambda y_bar: (y_bar, y_bar.bfloat16())),
        _mistake("wrong_missing", "a cotangent is missing", lambda y_bar: (y_bar,)),
        _mistake("wrong_number", "a cotangent is no tensor", lambda y_bar: (y_bar, 0.0)),
        Case(
            "mistake: the result is an argument",
            lambda: _library("wrong_alias", second)(_point(), _direction()),
            lambda: _own("wrong_alias", second)(_point(), _direction()),
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
