"""Who may use a device: many that compile and try things on it, or one that measures."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from filelock import FileLock

try:
    import fcntl
except ImportError:  # Windows has no locks that several processes share.
    fcntl = None

if TYPE_CHECKING:
    from collections.abc import Iterator


class DeviceLock:
    """A lock of one device that every run on this machine respects.

    `shared` is for what runs on the device and is not timed: tensors, first calls, checks. `exclusive` is for what is
    timed; nobody else is in either then. Who waits for `exclusive` lets nobody into `shared` any more, so that it comes
    to its turn when those that are in have left. Where processes cannot share a lock, `shared` is exclusive too.

    Args:
        name: Of the device, as part of a file name.
        directory: Where the files of the lock lie; by default that of temporary files.
    """

    def __init__(self, name: str, directory: Path | None = None) -> None:
        stem = f"torch-training-primitives-perf-{name}"
        self._directory = directory or Path(tempfile.gettempdir())
        self._door = FileLock(self._directory / f"{stem}.lock")
        self._inside = self._directory / f"{stem}.inside"
        self._tuning = FileLock(self._directory / f"{stem}.tuning.lock")

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the device together with others."""
        if fcntl is None:
            with self._door:
                yield
            return
        with self._inside.open("a") as file:
            with self._door:
                _lock(file, alone=False)
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the device alone."""
        if fcntl is None:
            with self._door:
                yield
            return
        with self._inside.open("a") as file, self._door:
            _lock(file, alone=True)
            yield

    @contextlib.contextmanager
    def tuning(self) -> Iterator[None]:
        """Be the only one who tunes, among those in `shared`: what others try beside it is short."""
        with self._tuning:
            yield


def _lock(file: IO[str], *, alone: bool) -> None:
    """Wait for the lock of an open file, which is given back when it is closed."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
