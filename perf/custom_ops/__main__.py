"""Runs the cases and prints the table: see `perf.custom_ops`."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from typing import Any, NamedTuple

import optree
import torch

import perf.custom_ops
from perf.custom_ops.cases import CASES, Names

# Float64 rounding stays far below, and no wrong value comes near.
TOLERANCE = 1e-8
# Of an error's text in the table; `--full` prints all of it.
MAX_TEXT = 70
RIGHT, WRONG, RAISES = "right", "wrong", "raises"


class Outcome(NamedTuple):
    """What came of a case on one side: `RIGHT`, `WRONG` (without an error) or `RAISES`, and what to print behind it."""

    kind: str
    text: str = ""

    def cell(self, full: bool = False) -> str:
        """The outcome in a table."""
        text = " ".join(self.text.split())
        if not full and self.kind == RIGHT:
            text = text.split(":")[0]
        elif not full and len(text) > MAX_TEXT:
            text = text[:MAX_TEXT].rsplit(" ", 1)[0] + " ..."
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


def outcome(function: Any, truth: Any) -> Outcome:
    """Run one side of a case."""
    torch._dynamo.reset()
    # torch.library warns of what the table shows, and compilers log it.
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = function()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if not isinstance(truth, Names):
                return Outcome(RAISES, text)
            missing = [what for what, word in truth._asdict().items() if word not in text]
            return Outcome(RAISES, f"without the {', '.join(missing)}: {text}") if missing else Outcome(RIGHT, text)
        finally:
            logging.disable(logging.NOTSET)
        if isinstance(truth, Names):
            return Outcome(WRONG, "goes unnoticed")
        if value is None:
            return Outcome(WRONG, "None, and no error")
        worst = _worst(value, truth())
    return Outcome(RIGHT) if worst is None else Outcome(WRONG, f"{worst[0]:.4g} for {worst[1]:.4g}, and no error")


def measure(compiled: bool = True) -> list[Row]:
    """Run every case; those under a compiler only if asked."""
    return [
        Row(case.name, outcome(case.library, case.truth), outcome(case.here, case.truth))
        for case in CASES
        if compiled or not case.compiled
    ]


def main() -> int:
    """Run, print the table in Markdown, and return the exit status."""
    text = perf.custom_ops.__doc__
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="print the whole text of every error")
    parser.add_argument("--no-compile", action="store_true", help="leave out what takes a compiler")
    options = parser.parse_args()
    rows = measure(not options.no_compile)
    print(f"torch {torch.__version__.split('+')[0]}, CPU\n")
    print("| | `torch.library.custom_op` | `primitives.custom_op` |\n|---|---|---|")
    for row in rows:
        print(f"| {row.name} | {row.library.cell(options.full)} | {row.here.cell(options.full)} |")
    print()
    sides = {"torch.library.custom_op": [r.library for r in rows], "primitives.custom_op": [r.here for r in rows]}
    for name, outcomes in sides.items():
        n = Counter(found.kind for found in outcomes)
        print(f"{name}: {n[RIGHT]} right, {n[WRONG]} wrong without an error, {n[RAISES]} raise, of {len(rows)}")
    return 0 if all(row.here.kind == RIGHT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
