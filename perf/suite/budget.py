"""What a run still has of its time, and limits of what may not take longer."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How messages of rows begin that have no time because the run had none left: such a run is not complete.
OUT_OF_TIME = "out of time"
# How those begin that no run would have.
LEFT_OUT = "left out"
# A unit that takes longer than this with the device to itself hangs, or had better.
UNIT_SECONDS = 30.0
# What may end after the deadline, because a unit that is under way is worth more ended than stopped.
OVERTIME_SECONDS = 10.0
SOONEST = 1e-3


class Budget:
    """The time that is left until a deadline, and what of it a unit may spend on samples.

    Args:
        deadline: In the clock's seconds.
        num_units: Units of the run.
        done: Says how many of them are done with.
        devices: How many are measured at once.
        clock: Seconds, the same for all workers.
    """

    def __init__(
        self,
        deadline: float,
        num_units: int,
        done: Callable[[], int],
        devices: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.deadline = deadline
        self.clock = clock
        self._num_units = num_units
        self._done = done
        self._devices = max(devices, 1)

    def left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(self.deadline - self.clock(), 0.0)

    @property
    def spent(self) -> bool:
        """Whether the deadline has passed."""
        return self.clock() >= self.deadline

    def sampling_seconds(self, planned: float, share: float) -> float:
        """Seconds of samples for the unit that asks.

        Args:
            planned: What it gets in a run that is on time.
            share: Of a unit's time, what goes to samples. A run that is late shares out what is left.
        """
        waiting = max(self._num_units - self._done(), 1)
        return min(planned, share * self.left() * self._devices / waiting)

    def unit_seconds(self) -> float:
        """Seconds after which a unit is stopped that has the device to itself."""
        return min(UNIT_SECONDS, self.left() + OVERTIME_SECONDS)


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`, where the platform and the thread allow alarms.

    Limits nest: the one that ends first is the one that is raised.

    Args:
        seconds: Of wall-clock time.
        what: What takes that long, for the message.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.monotonic()
    outer = signal.getitimer(signal.ITIMER_REAL)[0]
    if outer and outer < seconds:
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"{what} took more than {seconds:g} s.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, SOONEST))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - start), SOONEST))
