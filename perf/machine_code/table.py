"""The committed table: one line per compiled kernel and chip, sorted, so that a change shows as a readable diff."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Iterable
from typing import NamedTuple, get_type_hints

TABLE = pathlib.Path(__file__).parents[2] / "docs" / "perf" / "machine_code"
# The release of Triton whose compiler made the table; another one makes other code.
VERSION_FILE = "triton_version.txt"


class Row(NamedTuple):
    """The compiler's result for one kernel.

    Attributes:
        kernel: Name of the kernel.
        case: First case that launches it.
        num_warps: Warps per block.
        registers: Registers per thread.
        register_budget: Registers per thread that the plan counts on.
        spills: Bytes of stack per thread on NVIDIA, registers on AMD.
        local_bytes: Local memory per thread.
        shared_bytes: Shared memory per block.
        loads: Loads of large tensors in the code, as `width in bytes x number`, the widest first.
        stores: Likewise.
        narrow: How many of these are narrower than size and alignment of their tensor allow, and how many large tensors
            are used in a way that is neither.
        ahead: For each loop that loads, how much is under way when a step waits for its own, as `loads_ahead` has it.
        key: Hash of all that the code depends on.
    """

    kernel: str
    case: str
    num_warps: int
    registers: int
    register_budget: int
    spills: int
    local_bytes: int
    shared_bytes: int
    loads: str
    stores: str
    narrow: int
    ahead: str
    key: str


def read_table(chip_name: str) -> list[Row]:
    """Rows of one chip; none of a table with other columns, or without one."""
    path = TABLE / f"{chip_name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        names, *lines = csv.reader(file)
    kinds = get_type_hints(Row)
    if names != [*kinds]:
        return []
    return [Row(*(kind(cell) for kind, cell in zip(kinds.values(), line, strict=True))) for line in lines]


def write_table(chip_name: str, rows: Iterable[Row]) -> None:
    """Write the rows of one chip, sorted."""
    with (TABLE / f"{chip_name}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Row._fields, *sorted(rows)])


def read_version() -> str:
    """Release of Triton that the table is of; empty without a table."""
    path = TABLE / VERSION_FILE
    return path.read_text().strip() if path.exists() else ""
