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
# Of what a unit may take, what one call of a provider may: the others come to theirs.
CALL_SHARE = 0.5
# What may end after the deadline, because a unit that is under way is worth more ended than stopped.
OVERTIME_SECONDS = 10.0
SOONEST = 1e-3
# A limit that has passed is raised again and again: libraries that try several ways take an error for one that failed.
AGAIN_SECONDS = 2.0


class UnitTimeoutError(BaseException):
    """A unit has had the device for as long as it may.

    Whoever is under way is not the only one who is out of time, so that no handler of a provider's errors may take it
    for the failure of that one alone.
    """


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

    def call_seconds(self) -> float:
        """Seconds after which a call of a provider is stopped in such a unit."""
        return CALL_SHARE * self.unit_seconds()


@contextlib.contextmanager
def time_limit(seconds: float, what: str, error: type[BaseException] = TimeoutError) -> Iterator[None]:
    """Raise an error in the block after `seconds`, where the platform and the thread allow alarms.

    It is raised until the block ends, and at its end if something in it has caught it, or has raised another error for
    it. Limits nest: the one that ends first is the one that is raised.

    Args:
        seconds: Of wall-clock time.
        what: What takes that long, for the message.
        error: Type of what is raised.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.monotonic()
    outer, again = signal.getitimer(signal.ITIMER_REAL)
    if outer and outer < seconds:
        yield
        return
    alarm = _Alarm(lambda: error(f"{what} took more than {seconds:g} s."))
    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, SOONEST), AGAIN_SECONDS)
    try:
        try:
            yield
        finally:
            alarm.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if outer:
                signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - start), SOONEST), again)
    except Exception as found:
        if alarm.passed and not isinstance(found, error):
            raise alarm.make() from found
        raise
    if alarm.passed:
        raise alarm.make()


class _Alarm:
    """Handler of a signal that raises what `make` makes for as long as it is armed, and knows whether it ever did."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make = make
        self.armed = True
        self.passed = False

    def __call__(self, *_: object) -> None:
        if self.armed:
            self.passed = True
            raise self.make()
