"""What a unit is measured with: the timer and the lock of a device, the time that is left, notes for the driver."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perf.suite.budget import Budget, time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Protocol

    from perf.suite.timers import Timer

    class Lock(Protocol):
        """A device's lock, see `perf.suite.locks.DeviceLock`."""

        def shared(self) -> contextlib.AbstractContextManager[None]:
            """Hold the device together with others."""
            ...

        def exclusive(self) -> contextlib.AbstractContextManager[None]:
            """Hold the device alone."""
            ...


@dataclass(frozen=True)
class Bench:
    """What a unit is measured with.

    Attributes:
        timer: Of the device.
        lock: Of the device: shared for all that runs on it, exclusive for what is timed.
        directory: Of the run, where calibrations are kept.
        budget: Time of the run.
        compiled: Says of a provider why it must not be tried here: None, or `status: message`.
        doing: Is told which provider is under way, so that it is known if the process dies; empty for none.
    """

    timer: Timer
    lock: Lock
    directory: Path
    budget: Budget
    compiled: Callable[[str], str | None]
    doing: Callable[[str], None]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the device alone, for as long as a unit may take."""
        with self.lock.exclusive(), time_limit(self.budget.unit_seconds(), "the unit"):
            yield
