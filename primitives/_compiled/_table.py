"""What a compiled function shows of itself: its programs as a table, and what makes it compile again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from primitives._compiled._graphs import Program

__all__ = ["difference", "table"]

_HEADER = ("program", "inputs", "nodes", "saved bytes", "trace s", "compile s", "calls")


def table(name: str, programs: Sequence[Program]) -> str:
    """One line for each program."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for p in programs:
        seconds = (f"{x:.1f}" for x in (p.trace_seconds, p.compile_seconds))
        rows.append((p.name, _short(p.sizes), str(p.num_nodes), str(p.saved_bytes), *seconds, str(p.num_calls)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([f"compiled {name}, {len(programs)} programs", *lines])


def _short(sizes: str) -> str:
    return sizes if len(sizes) <= 40 else f"{sizes[:37]}..."


def difference(before: Sequence[Any], after: Sequence[Any]) -> str:
    """The first thing that differs between two calls, each a list of pairs of a name and what counts of it."""
    for (name, old), (_, new) in zip(before, after, strict=False):
        if old != new:
            return f"{name} was {old} and is {new}"
    return "the structure of the arguments, or what the function reaches, differs"
