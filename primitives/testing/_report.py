"""The findings of `check_rules`: one row per property, as a table, and the error for the first one that fails."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any, Literal

from primitives._core.errors import PrimitivesError

OK, FAILED, NOT_APPLICABLE = "ok", "failed", "not applicable"
NOTE_WIDTH = 60


def html_table(before: str, header: Sequence[str], rows: Sequence[Sequence[str]], after: str = "") -> str:
    """Texts and a table for a notebook, which gives them its own colors."""

    def line(tag: str, cells: Sequence[str]) -> str:
        style = 'style="text-align: left; vertical-align: top; white-space: pre-wrap"'
        return "<tr>" + "".join(f"<{tag} {style}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join([line("th", header), *[line("td", row) for row in rows]])
    texts = [f"<pre>{html.escape(text)}</pre>" if text else "" for text in (before, after)]
    return f"{texts[0]}<table>{body}</table>{texts[1]}" if rows else "".join(texts)


@dataclasses.dataclass(frozen=True)
class Row:
    """Outcome of one property.

    Attributes:
        property: Its name, one of `PROPERTIES`.
        status: `"ok"`, `"failed"` or `"not applicable"`.
        error: Largest error of a number, where numbers were compared; of a failed property, that of the comparison
            that failed.
        allowed: The bound of that comparison.
        note: For `"ok"` what limits the check, for `"failed"` what is wrong, for `"not applicable"` why.
        raised: For `"failed"`, the name of the exception that was raised, if one was.
        reproducer: For `"failed"`, a program that shows the fault.
    """

    property: str
    status: Literal["ok", "failed", "not applicable"]
    error: float | None = None
    allowed: float | None = None
    note: str = ""
    raised: str = ""
    reproducer: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """Outcome of `check_rules`; prints as a table.

    Attributes:
        op: Name of the operator.
        rows: One row per property, in the order of `PROPERTIES`.
    """

    op: str
    rows: tuple[Row, ...]

    def __getitem__(self, name: str) -> Row:
        """The row of the property `name`."""
        return {row.property: row for row in self.rows}[name]

    @property
    def ok(self) -> bool:
        """Whether no property failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the properties that failed."""
        return tuple(row.property for row in self.rows if row.status == FAILED)

    def _lines(self) -> list[tuple[str, ...]]:
        lines: list[tuple[str, ...]] = [("property", "status", "error", "allowed", "note")]
        for row in self.rows:
            numbers = ["" if value is None else f"{value:.1e}" for value in (row.error, row.allowed)]
            note = row.note.split("\n")[0]
            if len(note) > NOTE_WIDTH and row.status == FAILED:
                note = f"{note[: NOTE_WIDTH - 3]}..."
            lines.append((row.property, row.status, *numbers, note))
        return lines

    def __str__(self) -> str:
        lines = self._lines()
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([f"{self.op}:", *[f"  {line}" for line in table]])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, *rows = self._lines()
        return html_table(self.op, header, rows)


class RuleError(PrimitivesError, AssertionError):
    """A property does not hold.

    Attributes:
        property: Name of the property.
        op: Name of the operator.
        note: The fault: the tensor, its value and the expected one.
        reproducer: Python program that shows the fault.
        report: Outcome of all properties that were checked.
    """

    def __init__(self, row: Row, report: Report) -> None:
        self.property: str = row.property
        self.op: str = report.op
        self.note: str = row.note
        self.reproducer: str = row.reproducer
        self.report = report
        indented = "\n".join(f"    {line}".rstrip() for line in row.reproducer.splitlines())
        parts = [f"{self.op}: {row.property} failed: {row.note}", f"Reproducer:\n\n{indented}"]
        if len(report.rows) > 1:
            parts.append(str(report))
        super().__init__("\n\n".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        """Test runners send errors between processes."""
        return RuleError, (self.report[self.property], self.report)
