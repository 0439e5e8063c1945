"""Directional derivatives of a scalar function by every nesting of forward and reverse mode, and by differences.

Every nesting of one order along one direction is the same number, `d^n/dt^n f(x + t v)` at `t = 0`, so that nestings
can be compared with each other and with differences of the nesting below.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

Scalar = Callable[..., Tensor]

# Of central differences, in float64, at values and arguments near one.
STEP = 1e-4


def nestings(order: int) -> list[str]:
    """All nestings of this order, outermost first: `"fr"` is forward mode over reverse mode, `jvp(vjp)`."""
    return ["".join(modes) for modes in itertools.product("fr", repeat=order)]


def plain(nesting: str) -> str:
    """The nesting of `torch.func` without `vmap` that takes the same derivative."""
    return nesting.lower().replace("d", "f")


def described(nesting: str) -> str:
    """A nesting in words: `"fr"` is `"jvp(vjp)"`, and `"FR"` is `"jacfwd(jacrev)"`, which is `torch.func.hessian`.

    `"d"` is the dual level of `torch.autograd.forward_ad`.
    """
    names = [{"f": "jvp", "r": "vjp", "F": "jacfwd", "R": "jacrev", "d": "forward_ad"}[mode] for mode in nesting]
    return "(".join(names) + ")" * (len(names) - 1)


def nested(function: Scalar, directions: Sequence[Tensor], nesting: str) -> Scalar:
    """The derivative of a scalar function along `directions`, one for each argument, by a nesting of modes.

    Modes in capitals run under `vmap`, by which `torch.func.jacfwd` and `jacrev` take all directions at once.
    """
    numbers = tuple(range(len(directions)))

    def forward(inner: Scalar) -> Scalar:
        return lambda *xs: torch.func.jvp(inner, xs, tuple(directions))[1]

    def reverse(inner: Scalar) -> Scalar:
        def derivative(*xs: Tensor) -> Tensor:
            gradients = torch.func.grad(inner, numbers)(*xs)
            return torch.stack([(g * v).sum() for g, v in zip(gradients, directions, strict=True)]).sum()

        return derivative

    def under_vmap(jacobian: Callable[..., Scalar], inner: Scalar) -> Scalar:
        def derivative(*xs: Tensor) -> Tensor:
            line = jacobian(lambda t: inner(*[x + t * v for x, v in zip(xs, directions, strict=True)]))
            return line(xs[0].new_zeros(()))

        return derivative

    modes = {
        "f": forward,
        "r": reverse,
        "F": functools.partial(under_vmap, functools.partial(torch.func.jacfwd, randomness="same")),
        "R": functools.partial(under_vmap, torch.func.jacrev),
    }
    for mode in reversed(nesting):
        function = modes[mode](function)
    return function


def nested_by_autograd(function: Scalar, directions: Sequence[Tensor], nesting: str) -> Scalar:
    """`nested` by `torch.autograd` alone, whose forward mode cannot be nested."""

    def forward(inner: Scalar) -> Scalar:
        def derivative(*xs: Tensor) -> Tensor:
            with forward_ad.dual_level(), torch.enable_grad():
                points = [_recorded(x) for x in xs]
                y = inner(*[forward_ad.make_dual(x, v) for x, v in zip(points, directions, strict=True)])
                tangent = forward_ad.unpack_dual(y).tangent
            return torch.zeros_like(y) if tangent is None else tangent

        return derivative

    def reverse(inner: Scalar) -> Scalar:
        def derivative(*xs: Tensor) -> Tensor:
            points = [_recorded(x) for x in xs]
            with torch.enable_grad():
                y = inner(*points)
                if not y.requires_grad:
                    return torch.zeros_like(y)
                gradients = torch.autograd.grad(y, points, create_graph=True, materialize_grads=True)
                return torch.stack([(g * v).sum() for g, v in zip(gradients, directions, strict=True)]).sum()

        return derivative

    for mode in reversed(nesting):
        function = (forward if mode == "f" else reverse)(function)
    return function


def _recorded(x: Tensor) -> Tensor:
    """A tensor that autograd records: a view has the tangent that a detached tensor loses."""
    return x if x.requires_grad else x.view_as(x).requires_grad_()


def along(function: Scalar, xs: Sequence[Tensor], directions: Sequence[Tensor], t: float) -> Tensor:
    """The function at `x + t v`; it may take derivatives itself."""
    return function(*[_recorded(x + t * v) for x, v in zip(xs, directions, strict=True)]).detach()


def difference(function: Scalar, directions: Sequence[Tensor], step: float = STEP) -> Scalar:
    """The derivative of a scalar function along `directions` by central differences, to the fourth order of `step`."""

    def derivative(*xs: Tensor) -> Tensor:
        wide, narrow = (
            (along(function, xs, directions, h) - along(function, xs, directions, -h)) / (2 * h)
            for h in (step, step / 2)
        )
        return (4 * narrow - wide) / 3

    return derivative


def perturbed_sum(outputs: Sequence[Tensor]) -> Tensor:
    """A scalar that depends on all outputs, with cotangents that depend on them too: `sum(w * (y + y**2 / 2))`."""
    generator = torch.Generator().manual_seed(1)
    terms = []
    for y in outputs:
        weights = torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y.device, y.dtype)
        terms.append((weights * (y + 0.5 * y * y)).sum())
    return torch.stack(terms).sum()


_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


def _wide(given: Any) -> Any:
    """A tensor in float64, or that dtype, for a narrower one."""
    if isinstance(given, torch.Tensor):
        return given.double() if given.dtype in _NARROW else given
    return torch.float64 if isinstance(given, torch.dtype) and given in _NARROW else given


class InFloat64(TorchFunctionMode):
    """Inside, float64 stays float64 where code asks for a narrower dtype: what it computes shows all its digits.

    All that it holds or makes by itself in these dtypes is widened. Parameters that a function holds by itself follow.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, writes = kwargs or {}, getattr(func, "__name__", "").endswith("_")
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in args):
            if func in _CASTS:
                return args[0]
            # But for what is written in place.
            args = (*args[:writes], *map(_wide, args[writes:]))
            kwargs = {key: _wide(given) for key, given in kwargs.items()}
        out = func(*args, **kwargs)
        return out if writes else _wide(out)
