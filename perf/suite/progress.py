"""A progress bar with rich, or lines where rich is missing or nobody watches."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

LINE_SECONDS = 10.0


class Progress:
    """How far a phase is."""

    def __init__(self, phase: str, total: int) -> None:
        """Start at nothing of `total` items."""
        self.phase = phase
        self.total = total
        self._bar: Any = None
        self._task: Any = None
        self._printed = time.time()
        self._done = -1
        if sys.stderr.isatty():
            try:
                from rich import progress as rich_progress
                from rich.console import Console
            except ImportError:
                return
            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}"),
                rich_progress.BarColumn(),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TimeElapsedColumn(),
                rich_progress.TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )

    def __enter__(self) -> Progress:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.phase, total=self.total, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, note: str) -> None:
        """Show that `done` items are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif done != self._done and (time.time() - self._printed >= LINE_SECONDS or done == self.total):
            self._printed = time.time()
            self._done = done
            print(f"{self.phase}: {done} of {self.total} {note}".rstrip(), file=sys.stderr, flush=True)
