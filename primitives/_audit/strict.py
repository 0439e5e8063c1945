"""Nestings of a call against central differences, and the innermost calls inside it whose derivatives are wrong."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._audit.nestings import InFloat64, difference, nested, nested_by_autograd, nestings, perturbed_sum
from primitives._audit.recording import calls_seen
from primitives._audit.report import TOLERANCE, failed_in
from primitives._core.trees.nodes import leaves_of_nodes, mapped_nodes
from primitives.tracing._modules.lending import attributes_kept
from primitives.tracing._torch_private import bottom

Errors = dict[str, float | Exception]

_log = logging.getLogger("primitives.audit")

# Smaller ones where larger ones cross kinks, of which a network with ReLU has many.
_STEPS = (1e-4, 1e-6, 1e-8)


@dataclasses.dataclass
class Call:
    """A call of a function or a module, with the calls of modules inside it."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modules: Sequence[torch.nn.Module] = ()
    inner: list[Call] = dataclasses.field(default_factory=list)


class _Whole(torch.nn.Module):
    """A function and the modules that it reaches, as one module."""

    def __init__(self, function: Any, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.function, self.reached = (function,), torch.nn.ModuleList(modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function[0](*args, **kwargs)


def culprits(
    call: Call, errors: Errors, judge: Callable[[Call], Errors], namespace: str
) -> Iterator[tuple[Call, Errors]]:
    """The innermost calls in which nestings of `errors` that failed in `call` fail too, each with its own errors."""
    running = [Call(None, (), {})]

    def kept(x: Any) -> Any:
        """A tensor without history and transforms, which the call may overwrite."""
        return bottom(x).detach().clone() if isinstance(x, torch.Tensor) else x

    def enter(module: Any, args: Any) -> None:
        running[-1].inner.append(Call(module, mapped_nodes(kept, args, namespace), {}))
        running.append(running[-1].inner[-1])

    def leave(kwargs: Any) -> None:
        running.pop().kwargs = mapped_nodes(kept, kwargs, namespace)

    owners = [owner for module in call.modules for owner in module.modules()]
    with calls_seen(enter, leave), attributes_kept(owners):
        call.target(*call.args, **call.kwargs)
    # A module is the first to be called.
    call.inner = running[0].inner[0].inner if isinstance(call.target, torch.nn.Module) else running[0].inner
    yield from _innermost(call, {n: errors[n] for n in failed_in(errors)}, judge)


def _innermost(call: Call, failed: Errors, judge: Callable[[Call], Errors]) -> Iterator[tuple[Call, Errors]]:
    own = dict(failed)
    for inner in {id(c.target): c for c in reversed(call.inner)}.values():
        try:
            errors = judge(inner)
        except Exception:
            continue
        inside = {n: errors[n] for n in failed_in(errors) if n in failed}
        if inside:
            # Where this call raises, one inside that is only wrong does not say why.
            own = {
                n: e
                for n, e in own.items()
                if n not in inside or isinstance(e, Exception) > isinstance(inside[n], Exception)
            }
            yield from _innermost(inner, inside, judge)
    if own:
        yield call, own


def _settled(function: Any, directions: list[Tensor], xs: list[Tensor]) -> float:
    """The derivative along `directions` by the central differences that agree best with those of half their step."""
    found = []
    for step in _STEPS:
        wide, narrow = (difference(function, directions, h)(*xs).item() for h in (step, step / 2))
        gap = abs(wide - narrow) / max(abs(narrow), 1e-3)
        # Steps that leave the domain of the function say nothing.
        found.append((gap if math.isfinite(gap) else math.inf, narrow))
        if gap < TOLERANCE / 100:
            break
    return min(found)[1]


def errors_of(
    call: Call, order: int, namespace: str, derivative: Callable[..., Any] = nested, *, is_inner: bool = False
) -> Errors:
    """Error of each nesting, by `derivative`, of a call in float64 against central differences, or what it raised."""
    target, tree = call.target, (call.args, call.kwargs)
    module = target if isinstance(target, torch.nn.Module) else _Whole(target, call.modules)
    held = {name: _wide(p) for name, p in module.named_parameters()}
    names = [name for name in held if module.get_parameter(name).requires_grad]
    buffers = {name: _wide(b) for name, b in module.named_buffers()}
    wide = [_wide(x) for x in leaves_of_nodes(tree, namespace)]
    positions = [n for n, x in enumerate(wide) if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def scalar(*xs: Tensor) -> Tensor:
        values = list(wide)
        for position, x in zip(positions, xs, strict=False):
            # A module may overwrite what another one has made, but no leaf.
            values[position] = x.clone() if is_inner else x
        remaining = iter(values)
        args, kwargs = mapped_nodes(lambda _: next(remaining), tree, namespace)
        # Code that draws numbers draws the same ones each time.
        torch.manual_seed(0)
        with attributes_kept(list(module.modules())), InFloat64():
            moved = dict(zip(names, xs[len(positions) :], strict=True))
            state = {**held, **moved, **{name: b.clone() for name, b in buffers.items()}}
            outputs = torch.func.functional_call(module, state, args, kwargs, tie_weights=True)
        results = [y for y in leaves_of_nodes(outputs, namespace) if isinstance(y, torch.Tensor)]
        return perturbed_sum([y for y in results if y.is_floating_point()])

    xs = [*[wide[n] for n in positions], *[held[name] for name in names]]
    generator = torch.Generator().manual_seed(0)
    # Steps are shares of each number, so that they are neither lost in large ones nor larger than small ones. The zeros
    # of a ReLU are kinks of what follows it, and stay.
    directions = [
        torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device)
        * torch.where(x == 0, float(not is_inner or n >= len(positions)), x.abs())
        for n, x in enumerate(xs)
    ]
    below, errors = scalar, {}
    for level in range(1, order + 1):
        _log.info("audit: %s, derivatives of order %d", getattr(target, "__name__", type(target).__name__), level)
        truth = _settled(below, directions, xs)
        for nesting in nestings(level):
            if derivative is nested_by_autograd and nesting.count("f") > 1:
                continue  # `forward_ad` has one level
            try:
                found = derivative(scalar, directions, nesting)(*xs).item()
                errors[nesting] = abs(found - truth) / max(abs(truth), 1e-3)
            except Exception as error:
                errors[nesting] = error
        right = [n for n in errors if len(n) == level and n not in failed_in(errors)]
        below = derivative(scalar, directions, right[0]) if right else difference(below, directions, 1e-3)
    return errors


def _wide(x: Any) -> Any:
    return x.detach().double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
