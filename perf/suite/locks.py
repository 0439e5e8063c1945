"""Who may use a device: many that compile and try things on it, or one that measures.

The locks are files that all users of the machine open, so that runs of several people take turns too. Containers that
share a GPU and no directory for temporary files do not see each other's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # Windows has no locks that several processes share.
    fcntl = None

if TYPE_CHECKING:
    from collections.abc import Iterator

# What TMPDIR says differs from user to user, and from job to job.
COMMON_DIRECTORY = Path("/tmp")
# Whoever comes second is somebody else, perhaps.
EVERYBODY = 0o666


class DeviceLock:
    """A lock of one device that every run on this machine respects.

    `shared` is for what runs on the device and is not timed: tensors, first calls, checks. `exclusive` is for what is
    timed; nobody else is in either then. Who waits for `exclusive` lets nobody into `shared` any more, so that it comes
    to its turn when those that are in have left. Where processes cannot share a lock, `shared` is exclusive too.

    Args:
        name: Of the device, as part of a file name.
        directory: Where the files of the lock lie; by default the directory of temporary files that all users share.
    """

    def __init__(self, name: str, directory: Path | None = None) -> None:
        stem = f"torch-training-primitives-perf-{name}"
        directory = directory or common_directory()
        self._door = directory / f"{stem}.lock"
        self._inside = directory / f"{stem}.inside"
        self._tuning = directory / f"{stem}.tuning.lock"
        self._turn = threading.RLock()
        self._tuners = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the device together with others."""
        if fcntl is None:
            with _held(self._door, alone=True):
                yield
            return
        with contextlib.ExitStack() as inside:
            with _held(self._door, alone=True):
                inside.enter_context(_held(self._inside, alone=False))
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the device alone."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_held(self._door, alone=True))
            if fcntl is not None:
                stack.enter_context(_held(self._inside, alone=True))
            yield

    @contextlib.contextmanager
    def tuning(self) -> Iterator[None]:
        """Be the only one who tunes, among those in `shared`: what others try beside it is short.

        Blocks of one thread may nest: what times a candidate may call something else that times it.
        """
        with self._turn:
            self._tuners += 1
            try:
                with _held(self._tuning, alone=True) if self._tuners == 1 else contextlib.nullcontext():
                    yield
            finally:
                self._tuners -= 1


def common_directory() -> Path:
    """The directory of temporary files that all users share, or else this user's."""
    shared = COMMON_DIRECTORY.is_dir() and os.access(COMMON_DIRECTORY, os.W_OK | os.X_OK)
    return COMMON_DIRECTORY if shared and fcntl is not None else Path(tempfile.gettempdir())


@contextlib.contextmanager
def _held(path: Path, *, alone: bool) -> Iterator[None]:
    """Hold the lock of a file, alone or together with others."""
    if fcntl is None:
        from filelock import FileLock

        with FileLock(path):
            yield
        return
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            # A process that was forked meanwhile has the file open too, which would hold on to the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """A descriptor of the file, which is made if there is none.

    A lock needs no right to write. Linux refuses to open a file of somebody else in a sticky directory with O_CREAT,
    whatever its mode, so that an existing one is opened without.
    """
    if not path.exists():
        # Whoever else makes it at the same time has made it.
        with contextlib.suppress(FileExistsError):
            _create(path)
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _create(path: Path) -> None:
    mask = os.umask(0)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, EVERYBODY))
    finally:
        os.umask(mask)
