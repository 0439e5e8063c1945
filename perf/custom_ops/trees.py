"""Arguments that are trees, `None` or settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import torch

import primitives as pr
from perf.custom_ops.case import NAMESPACE, Case, compiled, direction, point, tracked

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


# Arguments that are trees, `None` or settings.


def _trees_gradient(op: Callable, build: Callable) -> Any:
    x, weight = tracked()
    return torch.autograd.grad(op(build(weight), x)["y"].square().sum(), (x, weight))


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class Params:
    """A node of optree's and of torch's trees."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


torch.export.register_dataclass(Params)


def plain_affine(params: Any, x: Tensor) -> dict[str, Tensor]:
    """`y = sin(x) * weight` with the weight in a dict or dataclass."""
    return {"y": x.sin() * (params["weight"] if isinstance(params, dict) else params.weight)}


affine = pr.custom_op(f"{NAMESPACE}::affine", differentiate="reference", tree_namespace=NAMESPACE)(plain_affine)


def _library_of_dicts() -> Callable:
    """What torch.library makes of a signature with dicts: an error, when the operator is defined."""

    @torch.library.custom_op(f"{NAMESPACE}::library_of_dicts", mutates_args=())
    def op(params: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        return plain_affine(params, x)

    return op


def _library_of_dataclasses() -> Callable:
    @torch.library.custom_op(f"{NAMESPACE}::library_of_dataclasses", mutates_args=())
    def op(params: Params, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return plain_affine(params, x)

    return op


def plain_plus(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`sin(x) + bias`."""
    return x.sin() if bias is None else x.sin() + bias


@torch.library.custom_op(f"{NAMESPACE}::library_plus", mutates_args=())
def library_plus(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same in torch.library, without rules."""
    return plain_plus(x, bias)


plus = pr.custom_op(f"{NAMESPACE}::plus", differentiate="reference")(plain_plus)


def _with_and_without(op: Callable) -> Any:
    return op(point(), None), op(point(), direction())


def _config(library: bool) -> Callable[[], Any]:
    """An operator whose setting is a tuple of a string and a tuple."""
    plain = lambda x, config: x * config[1][0]  # noqa: E731 - three words
    if not library:
        return lambda: configured(point(), config=("by", (2.0, 3)))

    def define() -> Any:
        @torch.library.custom_op(f"{NAMESPACE}::library_configured", mutates_args=())
        def op(x: torch.Tensor, config: tuple[str, tuple[float, int]]) -> torch.Tensor:
            return plain(x, config)

        return op(point(), ("by", (2.0, 3)))

    return define


@pr.custom_op(f"{NAMESPACE}::configured")
def configured(x: Tensor, *, config: tuple) -> Tensor:
    """A setting that is a tuple."""
    return x * config[1][0]


def _tree_cases() -> list[Case]:
    def case(name: str, define: Callable, build: Callable, takes_compiler: bool = False) -> Case:
        def run(op: Callable) -> Any:
            function = compiled(op) if takes_compiler else op
            return _trees_gradient(function, build)

        def truth() -> Any:
            return _trees_gradient(plain_affine, build)

        return Case(name, lambda: run(define()), lambda: run(affine), truth, takes_compiler)

    def as_dict(weight: Tensor) -> dict:
        return {"weight": weight, "unused": None}

    return [
        case("tensors in a dict, with gradient", _library_of_dicts, as_dict),
        case("tensors in a dataclass, with gradient", _library_of_dataclasses, Params),
        case("tensors in a dict, compiled", _library_of_dicts, as_dict, takes_compiler=True),
        case("tensors in a dataclass, compiled", _library_of_dataclasses, Params, takes_compiler=True),
        Case(
            "`None` for a tensor",
            lambda: _with_and_without(library_plus),
            lambda: _with_and_without(plus),
            lambda: _with_and_without(plain_plus),
        ),
        Case("a setting that is a tuple of a string and a tuple", _config(True), _config(False), lambda: 2 * point()),
    ]


CASES: list[Case] = _tree_cases()
