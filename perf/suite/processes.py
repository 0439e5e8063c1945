"""The processes of a run: what they need, how they are ended, and what asks a run to end."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from perf.suite import locks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# What asks a process to end, beside Ctrl-C: the system, a scheduler, a terminal that is closed.
STOP_SIGNALS = ("SIGTERM", "SIGHUP")
STOP_SECONDS = 5.0
# What the workers import before torch; where files cannot be locked by the system, also what locks them.
REQUIRED = ("pytest", "xdist", *(() if locks.fcntl else ("filelock",)))


class RequirementError(RuntimeError):
    """A package is not there that a run cannot do without."""


def require() -> None:
    """See to it that what the workers import can be imported: they could say so in a log alone.

    Raises:
        RequirementError: If something cannot.
    """
    name = ""
    try:
        for name in REQUIRED:
            importlib.import_module(name)
    except ImportError as error:
        raise RequirementError(
            f"python -m perf run needs {name} ({error}): pip install 'torch-training-primitives[perf]'."
        ) from error


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Context in which every request to end counts as Ctrl-C: a driver that just dies leaves its workers measuring."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with _handled(stop, STOP_SIGNALS):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[..., None], names: Sequence[str]) -> Iterator[None]:
    """Context in which signals have another handler, where the thread may set one; what is ignored stays ignored."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        before = {n: signal.signal(n, handler) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process and all that it starts, in a session of their own, which have ended when the block has.

    Ctrl-C reaches this process alone, which then ends the others.

    Args:
        command: What to run.
        options: Of `subprocess.Popen`.
    """
    process, asked = None, []
    try:
        # An exception from a handler in here would lose a process that has been started already.
        with _handled(lambda number, _: asked.append(number), ("SIGINT", *STOP_SIGNALS)):
            process = subprocess.Popen(command, start_new_session=True, **options)
        if asked:
            raise KeyboardInterrupt
        yield process
    finally:
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """End a session: politely, then not. A second Ctrl-C meanwhile ends the politeness."""
    try:
        if process.poll() is None:
            _signal(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
    finally:
        # What it has started may outlive it.
        _signal(process, signal.SIGKILL)
        # Whoever hangs in a driver ends when that lets go.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


def _signal(process: subprocess.Popen, number: int) -> None:
    # The group is that of the session which was made for this process.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
