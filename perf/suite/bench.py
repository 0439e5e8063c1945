"""What a unit is measured with: the timer and the lock of a device, the time that is left, notes for the driver."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perf.suite.budget import Budget, UnitTimeoutError, time_limit

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
        calibrations: Directory of what was measured of this device alone, see `perf.suite.calibration`.
        budget: Time of the run.
        compiled: Says of a provider why it must not be tried here: None, or `status: message`.
        doing: Is told which provider is under way, so that it is known if the process dies; empty for none.
    """

    timer: Timer
    lock: Lock
    calibrations: Path
    budget: Budget
    compiled: Callable[[str], str | None]
    doing: Callable[[str], None]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the device alone, for as long as a unit may take.

        Raises:
            UnitTimeoutError: If the block takes longer.
        """
        with self.lock.exclusive():
            try:
                with time_limit(self.budget.unit_seconds(), "the unit", UnitTimeoutError):
                    yield
            except UnitTimeoutError as error:
                # What still runs would run beside what another worker times, and take memory that it needs.
                self.timer.wait()
                traceback.clear_frames(error.__traceback__)
                self.timer.release()
                raise
