"""How pages are written: their folder, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def line(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table, whose rows are one line each."""
    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def alike(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """The rows, in which those that differ in their first cells alone share one."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    return [[", ".join(found), *cells] for cells, found in names.items()]
