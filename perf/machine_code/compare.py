"""Tables of machine code of two revisions: of how many kernels of a case each figure is better, kept, or worse."""

from __future__ import annotations

import csv
import subprocess
from typing import TYPE_CHECKING

from perf.machine_code.table import TABLE
from primitives.kernels.runtime.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Iterable

# Figures, the share by which they may change and count as kept, and their columns.
FIGURES = {
    "registers of a thread": (0.05, "registers"),
    "spills": (0.0, "spills"),
    "narrow accesses": (0.0, "narrow"),
}
Figures = dict[tuple[str, str], dict[str, int]]


def figures_of(lines: Iterable[str]) -> Figures:
    """Figures of kernels and cases, of their variants the one that has most."""
    found: Figures = {}
    for row in csv.DictReader(lines):
        most = found.setdefault((row["kernel"], row["case"]), {})
        for name, (_, column) in FIGURES.items():
            most[name] = max(most.get(name, 0), int(row[column]))
    return found


def _at(revision: str, chip: str) -> Figures:
    path = f"{revision}:./{chip}.csv"
    text = subprocess.run(["git", "show", path], cwd=TABLE, check=True, capture_output=True, text=True).stdout
    return figures_of(text.splitlines())


def compared(old: Figures, new: Figures) -> dict[str, str]:
    """How many kernels of a case both have, and for each figure how many are better, kept and worse."""
    both, found = old.keys() & new.keys(), {}
    for name, (share, _) in FIGURES.items():
        pairs = [(old[key][name], new[key][name]) for key in both]
        better = sum(now < (1 - share) * then for then, now in pairs)
        worse = sum(now > (1 + share) * then for then, now in pairs)
        found[name] = f"{better} / {len(pairs) - better - worse} / {worse}"
    return {"kernels of a case": f"{len(both)} of {len(old)}", **found}


def comparison(old: str, new: str) -> str:
    """A table of revisions in Markdown."""
    columns = {chip: compared(_at(old, chip), _at(new, chip)) for chip in CHIPS}
    lines = [f"| {old} to {new}: better / kept / worse | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for name in next(iter(columns.values())):
        lines.append(f"| {name} | {' | '.join(column[name] for column in columns.values())} |")
    return "\n".join([*lines, ""])
