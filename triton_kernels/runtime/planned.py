"""Plan functions, for which an advisor may answer, and what is to be forgotten when plans change.

Every block size, number of warps, stage and split is decided in the `plan` modules of the rooms, by the `Limits`
of chips. A plan is a frozen dataclass; the function that fills it states the reason for each number next to it. Numbers
of columns (a model constant) may be compile-time constants of a kernel; numbers of rows never are, so that a new batch
size compiles nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

Plan = TypeVar("Plan")


class PlanKey(NamedTuple):
    """The request for a plan: the function and its arguments, apart from the device."""

    function: str
    arguments: tuple[Hashable, ...]

    def __str__(self) -> str:
        """As a call."""
        return f"{self.function}({', '.join(map(str, self.arguments))})"


class Request(NamedTuple):
    """A call of a plan function, the plan that it answers by itself, and what makes those that might be faster."""

    key: PlanKey
    device: Any
    default: Any
    candidates: Callable[[], Sequence[Any]]


_advisor: Callable[[Request], tuple[Any, bool]] | None = None
_remembered: list[dict[Any, Any]] = []
# Counts changes of plans, and plans for the time being.
_num_changes = 0


def planned(candidates: Callable[[Any, Any, Mapping[str, Any]], Sequence[Any]]) -> Callable:
    """Decorate a plan function, which has an argument `device`, so that an advisor may answer.

    Of a plan, the device, and the other arguments by name, `candidates` makes the plans that might be faster; they must
    lead to the same results up to rounding.
    """

    def decorate(function: Callable[..., Plan]) -> Callable[..., Plan]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def plan(*args: Any, **kwargs: Any) -> Plan:
            # Sizes that a compiler traces are symbols. A plan fixes them.
            args, kwargs = _concrete(args), {name: _concrete(value) for name, value in kwargs.items()}
            default = function(*args, **kwargs)
            if _advisor is None:
                return default
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            device = arguments.pop("device")
            key = PlanKey(function.__name__, tuple(arguments.values()))
            request = Request(key, device, default, lambda: candidates(default, device, arguments))
            result, is_settled = _advisor(request)
            if not is_settled:
                _note_change()
            return result

        return plan

    return decorate


def _concrete(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_concrete, value))
    return int(value) if isinstance(value, torch.SymInt) else value


def remembered(facts: dict[Any, Any]) -> dict[Any, Any]:
    """The same dictionary, which is cleared from here on whenever plans change."""
    _remembered.append(facts)
    return facts


def plan_changes() -> int:
    """A number that is another one after plans have changed, or a plan was given that is not settled."""
    return _num_changes


def _note_change() -> None:
    global _num_changes
    _num_changes += 1


def forget_plans() -> None:
    """Forget what follows from plans, because something that they depend on has changed."""
    _note_change()
    for facts in _remembered:
        facts.clear()


def set_advisor(advisor: Callable[[Request], tuple[Any, bool]] | None) -> None:
    """Let a function answer requests for plans; None for the planner alone.

    It returns the plan to take, and whether that is settled, so that what follows from it may be remembered.
    """
    global _advisor
    _advisor = advisor
    forget_plans()
