"""A provider in a unit, and what its failures mean."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from perf.suite.budget import LEFT_OUT, OUT_OF_TIME, time_limit
from perf.suite.providers import OURS, LeftOutError
from perf.suite.results import CANNOT, ERROR, OK, SKIPPED

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.suite.modes import Sample
    from perf.suite.timers import Step, Timer

MESSAGE_CHARACTERS = 500


class DeviceLostError(BaseException):
    """The device answers nothing but errors in this process since a provider failed; a new process may go on.

    No handler of ordinary errors may take it for the failure of whoever comes next.

    Attributes:
        name: The provider.
        message: What it raised.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name, self.message = name, message


@dataclass
class Contender:
    """A provider in a unit: how it makes steps of samples, and what has come of it."""

    name: str
    make_step: Callable[[Sample], Step] | None = None
    result: Any = None
    status: str = OK
    message: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def attempt(self, function: Callable[[], Any], timer: Timer | None = None, seconds: float | None = None) -> Any:
        """What `function` returns; None if it raises, which is the answer of this provider.

        Args:
            function: Does what the provider is asked for.
            timer: Of the device, to wait for it, so that what goes wrong there is laid at the right door.
            seconds: After which it is stopped, if ever.

        Raises:
            DeviceLostError: If the device has failed for good.
            UnitTimeoutError: If the unit's time ends, which is nobody's failure.
        """
        limit = contextlib.nullcontext() if seconds is None else time_limit(seconds, f"a call of {self.name}")
        try:
            with limit:
                found = function()
                if timer is not None:
                    timer.wait()
                return found
        except Exception as error:
            self.fail(error)
        if timer is not None:
            self._survive(timer)
        return None

    def _survive(self, timer: Timer) -> None:
        try:
            timer.wait()
        # Errors of kernels stay with the process: every further call reports them.
        except Exception as error:
            raise DeviceLostError(self.name, self.message or describe(error)) from error

    def fail(self, error: BaseException) -> None:
        """Take it out, with what it said.

        Of this package an error is one; a peer just cannot do it, unless the machine or the run's time were too small.
        """
        self.make_step = self.result = None
        if isinstance(error, TimeoutError):
            self.status, self.message = SKIPPED, f"{OUT_OF_TIME}: {error}"
        elif isinstance(error, (LeftOutError, ImportError)):
            self.status, self.message = SKIPPED, f"{LEFT_OUT}: {error}"
        else:
            own = self.name == OURS or isinstance(error, (torch.OutOfMemoryError, MemoryError))
            self.status, self.message = ERROR if own else CANNOT, describe(error)

    def skip(self, message: str) -> None:
        """Take it out, if it is still in, because it is not asked for more."""
        if self.status == OK:
            self.status, self.message, self.make_step, self.result = SKIPPED, message, None, None


def describe(error: BaseException) -> str:
    """Type and first paragraph of an error, short enough for a table."""
    text = str(error).strip().split("\n\n")[0]
    return f"{type(error).__name__}: {text}"[:MESSAGE_CHARACTERS]
