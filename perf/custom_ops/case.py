"""What a case is, and what all are made of."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

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
    """One row.

    Attributes:
        name: What is done.
        library: With `torch.library.custom_op`.
        here: With `primitives.custom_op`.
        truth: The value that it should have, in plain torch, or what the error has to name.
        compiled: Whether it takes a compiler.
    """

    name: str
    library: Callable[[], Any]
    here: Callable[[], Any]
    truth: Callable[[], Any] | Names
    compiled: bool = False


def of_probe(name: str, probe: Callable, library: Callable, here: Callable, plain: Callable, *flags: bool) -> Case:
    """The case of a probe, which does the same with each of three operators."""
    return Case(name, partial(probe, library), partial(probe, here), partial(probe, plain), *flags)


def library_op(name: str, function: Callable, mutates: tuple[str, ...] = ()) -> Any:
    """The operator in torch.library; an error where it does not take the signature."""
    return torch.library.custom_op(f"{NAMESPACE}::library_{name}", function, mutates_args=mutates)


def own_op(name: str, function: Callable, **options: Any) -> Any:
    """The operator in this package."""
    return pr.custom_op(f"{NAMESPACE}::{name}", **options)(function)


def point() -> Tensor:
    """Where operators are called."""
    return torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def direction() -> Tensor:
    """A weight, or a tangent."""
    return torch.tensor([1.5, 0.3, -0.7], dtype=torch.float64)


def points() -> Tensor:
    """A batch of points."""
    return torch.stack([point(), 2 * point()])


def tracked() -> tuple[Tensor, Tensor]:
    """A point and a weight, with gradients."""
    return point().requires_grad_(), direction().requires_grad_()


def objective(op: Callable) -> Callable[[Tensor, Tensor], Tensor]:
    """A scalar function of `x` and `weight` through `op`."""
    return lambda x, weight: op(x, weight).square().sum()


def gradient(op: Callable) -> Any:
    """The gradient of the objective, in eager mode."""
    leaves = tracked()
    return torch.autograd.grad(objective(op)(*leaves), leaves)


def compiled(function: Callable) -> Callable:
    """`function`, compiled as one graph. The backend matters to no case, and this one needs no C++ compiler."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")
