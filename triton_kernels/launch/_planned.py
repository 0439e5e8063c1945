"""Plan functions that answer from memory: one dictionary look-up where the same launch was planned before."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

Plan = TypeVar("Plan")

# Batch sizes vary without end; beyond this many plans, those of a function are forgotten and made again.
MAX_REMEMBERED = 4096


class PlanKey(NamedTuple):
    """What a plan was asked for: the function and its arguments, apart from the device."""

    function: str
    arguments: tuple[Hashable, ...]

    def __str__(self) -> str:
        """As a call."""
        return f"{self.function}({', '.join(map(str, self.arguments))})"


class Request(NamedTuple):
    """A call of a plan function, and the plan that it answers by itself.

    Attributes:
        key: The function and its arguments, apart from the device.
        device: Where the kernel runs.
        default: The plan of the function.
        candidates: Makes the plans that might be faster.
    """

    key: PlanKey
    device: Any
    default: Any
    candidates: Callable[[], Sequence[Any]]


class Advisor(Protocol):
    """Who may answer with another plan than the default."""

    def advise(self, request: Request) -> tuple[Any, bool]:
        """The plan to take, and whether it is settled, so that the same request need not be made again."""
        ...


def _no_candidates(plan: Any, device: Any, arguments: Mapping[str, Any]) -> Sequence[Any]:
    del plan, device, arguments
    return ()


_advisor: Advisor | None = None
_remembered: list[dict[Hashable, Any]] = []


def planned(candidates: Callable[[Any, Any, Mapping[str, Any]], Sequence[Any]] = _no_candidates) -> Callable:
    """Decorate a plan function, which has an argument `device`, so that it answers from memory.

    Args:
        candidates: Function of a plan, the device, and the other arguments by name; returns the plans that might be
            faster. They must lead to the same results up to rounding.
    """

    def decorate(function: Callable[..., Plan]) -> Callable[..., Plan]:
        signature = inspect.signature(function)
        settled: dict[Hashable, Plan] = {}
        defaults: dict[Hashable, Request] = {}
        _remembered.extend((settled, defaults))

        def request(args: tuple, kwargs: dict[str, Any]) -> Request:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            device = arguments.pop("device")
            default = function(*args, **kwargs)
            key = PlanKey(function.__name__, tuple(arguments.values()))
            return Request(key, device, default, lambda: candidates(default, device, arguments))

        def answer(key: Hashable, args: tuple, kwargs: dict[str, Any]) -> Plan:
            if len(defaults) >= MAX_REMEMBERED:
                settled.clear()
                defaults.clear()
            asked = defaults.get(key)
            if asked is None:
                asked = defaults[key] = request(args, kwargs)
            result, is_settled = (asked.default, True) if _advisor is None else _advisor.advise(asked)
            if is_settled:
                settled[key] = result
            return result

        @functools.wraps(function)
        def plan(*args: Any, **kwargs: Any) -> Plan:
            key = (args, *kwargs.items()) if kwargs else args
            try:
                return settled[key]
            except KeyError:
                return answer(key, args, kwargs)
            except TypeError:
                # Sizes that a compiler traces as symbols have no hash. A plan fixes them.
                return function(*_concrete(args), **{name: _concrete(value) for name, value in kwargs.items()})

        return plan

    return decorate


def _concrete(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_concrete, value))
    return int(value) if isinstance(value, torch.SymInt) else value


def forget_plans() -> None:
    """Plan everything anew, because something that plans depend on has changed."""
    for plans in _remembered:
        plans.clear()


def set_advisor(advisor: Advisor | None) -> None:
    """Let `advisor` answer requests for plans; None for the planner alone."""
    global _advisor
    _advisor = advisor
    forget_plans()
