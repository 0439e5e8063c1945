"""Operators that write into an argument, and mistakes in rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import primitives as pr
from perf.custom_ops.case import NAMESPACE, Case, Names, compiled, direction, gradient, point

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


# Operators that write into an argument.


def _update(state: Tensor, x: Tensor) -> Tensor:
    state.mul_(0.5).add_(x)
    return x * 2


@torch.library.custom_op(f"{NAMESPACE}::library_update", mutates_args=("state",))
def library_update(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`_update` in torch.library."""
    return _update(state, x)


library_update.register_fake(lambda state, x: torch.empty_like(x))
update = pr.custom_op(f"{NAMESPACE}::update", mutates=("state",), differentiate="reference")(_update)


def _gradient_of_update(op: Callable) -> Any:
    state, x = direction(), point().requires_grad_()
    (bar,) = torch.autograd.grad(op(state, x).square().sum(), x)
    return state, bar


def _update_under(transform: Callable) -> Callable:
    """A probe: the update of a state that lives inside of the transformed function."""

    def probe(op: Callable) -> Any:
        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            state = direction() + 0 * x
            if op is update:
                y, state = update.pure(state, x)
            else:
                y = op(state, x)
            return y, state

        return transform(function)

    return probe


def _library_update_with_gradient() -> Callable:
    """What torch.library makes of a gradient for such an operator: an error, when the rule is registered."""

    @torch.library.custom_op(f"{NAMESPACE}::library_update_with_gradient", mutates_args=("state",))
    def op(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _update(state, x)

    op.register_autograd(lambda ctx, y_bar: (None, 2 * y_bar))
    return op


def _mutation_cases() -> list[Case]:
    def case(name: str, probe: Callable, takes_compiler: bool = False) -> Case:
        return Case(name, lambda: probe(library_update), lambda: probe(update), lambda: probe(_update), takes_compiler)

    def update_once(op: Callable) -> Any:
        state = direction()
        return op(state, point()), state

    return [
        case("update in place", update_once),
        case("update in place, compiled", lambda op: _update_under(compiled)(op)(point()), takes_compiler=True),
        Case(
            "update in place, with gradient",
            lambda: _gradient_of_update(_library_update_with_gradient()),
            lambda: _gradient_of_update(update),
            lambda: _gradient_of_update(_update),
        ),
        case("new state, `torch.func.jvp`", _update_under(lambda f: torch.func.jvp(f, (point(),), (direction(),))[1])),
        case("new state, `vmap`", _update_under(lambda f: torch.func.vmap(f)(torch.stack([point(), 2 * point()])))),
    ]


# Mistakes in rules.


def _mistake(name: str, title: str, bars: Callable[[Tensor], tuple[Any, ...]]) -> Case:
    """A backward rule of `y = x + weight` that returns the wrong `bars`."""

    def library() -> Any:
        @torch.library.custom_op(f"{NAMESPACE}::library_{name}", mutates_args=())
        def op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x + weight

        op.register_autograd(lambda ctx, y_bar: bars(y_bar))
        return gradient(op)

    def here() -> Any:
        op = pr.custom_op(f"{NAMESPACE}::{name}")(lambda x, weight: x + weight)
        op.def_save_for_backward(lambda inputs, output: ())
        op.def_backward(lambda ctx, saved, y_bar: dict(zip(("x", "weight"), bars(y_bar), strict=False)))
        return gradient(op)

    return Case(f"mistake: {title}", library, here, Names(name, "weight"))


def _alias_mistake() -> Case:
    def library() -> Any:
        @torch.library.custom_op(f"{NAMESPACE}::library_wrong_alias", mutates_args=())
        def op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return weight

        return op(point(), direction())

    def here() -> Any:
        return pr.custom_op(f"{NAMESPACE}::wrong_alias")(lambda x, weight: weight)(point(), direction())

    return Case("mistake: the result is an argument", library, here, Names("wrong_alias", "weight"))


def _mistake_cases() -> list[Case]:
    return [
        _mistake("wrong_shape", "a cotangent of another shape", lambda y_bar: (y_bar, y_bar[:2])),
        _mistake("wrong_dtype", "a cotangent of another dtype", lambda y_bar: (y_bar, y_bar.bfloat16())),
        _mistake("wrong_missing", "a cotangent is missing", lambda y_bar: (y_bar,)),
        _mistake("wrong_number", "a cotangent is no tensor", lambda y_bar: (y_bar, 0.0)),
        _alias_mistake(),
    ]


CASES: list[Case] = [*_mutation_cases(), *_mistake_cases()]
