"""The rules that every row of the table must satisfy, and the exceptions, each of which tests hold to be needed."""

from __future__ import annotations

import csv
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from perf.machine_code.table import Row
from primitives.kernels.runtime.chips import CHIPS


class Exempt(NamedTuple):
    """What rows may have of a fault: those whose kernel and case match `row`, on chips that match `chip`, and why."""

    rule: str
    chip: str
    row: str
    most: int
    why: str

    def covers(self, chip_name: str, row: Row) -> bool:
        """Whether it is of this row."""
        named = f"{row.kernel} {row.case}"
        return bool(re.fullmatch(self.chip, chip_name) and re.fullmatch(self.row, named))


with (pathlib.Path(__file__).parent / "exceptions.csv").open(newline="") as _file:
    EXCEPTIONS = [Exempt(**{**line, "most": int(line["most"])}) for line in csv.DictReader(_file)]

# Kernels that sum in a lone loop, whatever it writes; a lone sweep of another that writes loads as it goes.
_SUMS = re.compile(r"\w+_(sums|norm_bwd)_kernel")


def _is_excess(rule: str, number: int, chip_name: str, row: Row) -> bool:
    """Whether there is more of a fault than the exceptions say."""
    return number > 0 and number > max(
        (each.most for each in EXCEPTIONS if each.rule == rule and each.covers(chip_name, row)), default=0
    )


def broken_rules(chip_name: str, row: Row, unstaged: Collection[tuple[str, str]] = ()) -> list[str]:
    """The faults of a row of a chip of `CHIPS`, in words; empty if nothing is.

    Args:
        chip_name: The chip.
        row: The row.
        unstaged: Kernels and cases that load or copy ahead on another chip alone.
    """
    shared_bytes, is_nvidia = CHIPS[chip_name].shared_bytes, chip_name.startswith("sm_")
    waits = _copies_nothing(row) if is_nvidia else (row.kernel, row.case) in unstaged
    problems = {
        f"spills {row.spills}, more than exceptions allow": _is_excess("spills", row.spills, chip_name, row),
        f"{row.local_bytes} bytes of local memory": row.local_bytes > 0,
        f"{row.registers} registers, the plan counts on {row.register_budget}": row.registers > row.register_budget,
        f"{row.shared_bytes} bytes of shared memory, the chip has {shared_bytes}": row.shared_bytes > shared_bytes,
        f"{row.narrow} narrow accesses among loads {row.loads or 'none'} and stores {row.stores or 'none'}": _is_excess(
            "narrow", row.narrow, chip_name, row
        ),
        f"{'a loop that sums copies nothing' if is_nvidia else 'nothing is loaded'} ahead": _is_excess(
            "unstaged", waits, chip_name, row
        ),
        "a step waits for all that is copied ahead": "0" in row.ahead.split(),
    }
    return [f"{chip_name} {row.kernel} ({row.case}): {text}" for text, is_broken in problems.items() if is_broken]


def _copies_nothing(row: Row) -> bool:
    """Whether a loop that sums copies nothing ahead: the first sweep of two, one that writes nothing, or over rows."""
    first, *others = row.ahead.split() or [""]
    return first == "-" and bool(others or not row.stores or _SUMS.fullmatch(row.kernel))


def all_broken(tables: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """The faults of the tables of all chips."""
    ahead = {chip: {(r.kernel, r.case) for r in rows if r.ahead.strip("- ")} for chip, rows in tables.items()}
    for chip_name, rows in tables.items():
        for row in rows:
            yield from broken_rules(chip_name, row, ahead["sm_90"] - ahead[chip_name])
