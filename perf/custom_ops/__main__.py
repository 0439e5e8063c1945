"""Runs the cases and prints the table: see `perf.custom_ops`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch

import perf.custom_ops
from perf.custom_ops.case import Names
from perf.custom_ops.cases import CASES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Float64 rounding stays far below, and no wrong value comes near.
TOLERANCE = 1e-8
# Of an error's text in the table; `--full` prints all of it.
MAX_TEXT = 70
RIGHT, WRONG, RAISES = "right", "wrong", "raises"


class Outcome(NamedTuple):
    """What came of one case on one side.

    Attributes:
        kind: `RIGHT`, `WRONG` (without an error) or `RAISES`.
        text: What to print behind it.
    """

    kind: str
    text: str = ""

    def cell(self, width: int | None = MAX_TEXT) -> str:
        """The outcome in a table, its text cut at `width` characters."""
        text = " ".join(self.text.split())
        if width is not None and self.kind == RIGHT:
            text = text.split(":")[0]
        elif width is not None and len(text) > width:
            text = text[:width].rsplit(" ", 1)[0] + " ..."
        return f"{self.kind}: {text}" if text else self.kind


class Row(NamedTuple):
    """A case, and its outcome on either side."""

    name: str
    library: Outcome
    here: Outcome


def _worst(value: Any, truth: Any) -> tuple[float, float] | None:
    """The entry that differs most and what it should be; `None` where all agree."""
    leaves, wanted = optree.tree_leaves(value), optree.tree_leaves(truth)
    if [x.shape for x in leaves] != [y.shape for y in wanted]:
        return float("nan"), float("nan")
    x, y = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (leaves, wanted))
    difference = (x - y).abs().nan_to_num(float("inf"))
    place = difference.argmax()
    return (x[place].item(), y[place].item()) if difference[place] > TOLERANCE else None


def _judged(value: Any, truth: Any) -> Outcome:
    if isinstance(truth, Names):
        return Outcome(WRONG, "goes unnoticed")
    if value is None:
        return Outcome(WRONG, "None, and no error")
    worst = _worst(value, truth())
    return Outcome(RIGHT) if worst is None else Outcome(WRONG, f"{worst[0]:.4g} for {worst[1]:.4g}, and no error")


def _raised(error: Exception, truth: Any) -> Outcome:
    text = f"{type(error).__name__}: {error}"
    if not isinstance(truth, Names):
        return Outcome(RAISES, text)
    missing = [what for what, word in truth._asdict().items() if word not in text]
    return Outcome(RAISES, f"without the {', '.join(missing)}: {text}") if missing else Outcome(RIGHT, text)


def outcome(function: Any, truth: Any) -> Outcome:
    """Run one side of a case."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), _quiet():
        # torch.library warns of what the table shows.
        warnings.simplefilter("ignore")
        try:
            value = function()
        except Exception as error:
            return _raised(error, truth)
        return _judged(value, truth)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what compilers log of errors that are part of the table anyway."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def measure(compiled: bool = True) -> list[Row]:
    """Run every case; those under a compiler only if asked."""
    return [
        Row(case.name, outcome(case.library, case.truth), outcome(case.here, case.truth))
        for case in CASES
        if compiled or not case.compiled
    ]


def markdown(rows: Sequence[Row], width: int | None = MAX_TEXT) -> str:
    """The table, in Markdown."""
    lines = ["| | `torch.library.custom_op` | `primitives.custom_op` |", "|---|---|---|"]
    lines += [f"| {row.name} | {row.library.cell(width)} | {row.here.cell(width)} |" for row in rows]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """How many rows each side has right, and how it fails the others."""

    def counts(outcomes: Sequence[Outcome]) -> str:
        kinds = [outcome.kind for outcome in outcomes]
        return f"{kinds.count(RIGHT)} right, {kinds.count(WRONG)} wrong without an error, {kinds.count(RAISES)} raise"

    sides = {"torch.library.custom_op": [r.library for r in rows], "primitives.custom_op": [r.here for r in rows]}
    return "\n".join(f"{name}: {counts(outcomes)}, of {len(rows)}" for name, outcomes in sides.items())


def main() -> int:
    """Run, print the table, and return the exit status."""
    text = perf.custom_ops.__doc__
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="print the whole text of every error")
    parser.add_argument("--no-compile", action="store_true", help="leave out what takes a compiler")
    options = parser.parse_args()
    rows = measure(not options.no_compile)
    print(f"torch {torch.__version__.split('+')[0]}, CPU\n")
    print(markdown(rows, None if options.full else MAX_TEXT))
    print(f"\n{summary(rows)}")
    return 0 if all(row.here.kind == RIGHT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
