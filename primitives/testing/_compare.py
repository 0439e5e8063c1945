"""How results are compared, and the findings of `check_rules`: a row per property, and the error for one that fails."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from primitives._core.dtypes import has_derivatives
from primitives._core.errors import PrimitivesError

# Allowed error in units in the last place of the largest expected element (or of 1). In low precision a few roundings
# of intermediate values, in float32 and float64 the rounding of sums.
ULPS = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 64, torch.float64: 64}
ULPS.update({torch.complex64: 64, torch.complex128: 64})
LAYOUTS = ("transposed", "sliced", "expanded")
# The cotangent of `sum().backward()` has stride 0 everywhere.
COTANGENT_LAYOUTS = (*LAYOUTS, "constant")


class NotApplicableError(Exception):
    """The property says nothing about this operator; the text is the reason."""


class MismatchError(Exception):
    """The property does not hold; the text says where, what came and what was expected."""


def clone(x: Tensor) -> Tensor:
    """`x` with memory of its own and the same strides, whatever they are; its version is 0."""
    x = x.detach()
    length = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((length,), (1,), 0).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def contiguous(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def widened(x: Tensor) -> Tensor:
    """`x` in double precision, if it holds numbers that have one."""
    return x.to(torch.promote_types(x.dtype, torch.float64)) if has_derivatives(x.dtype) else x


def all_like(xs: Iterable[Tensor], seed: int) -> list[Tensor]:
    """Normal numbers with the shape, dtype and device of each of `xs`, the same in every run and on every device."""
    numbers = []
    for i, x in enumerate(xs):
        wide = torch.complex128 if x.is_complex() else torch.float64
        generator = torch.Generator().manual_seed(101 * seed + i)
        numbers.append(torch.randn(x.shape, generator=generator, dtype=wide).to(x.device, x.dtype))
    return numbers


def arranged(x: Tensor, layout: str) -> Tensor:
    """`x` in a layout of `COTANGENT_LAYOUTS`; the last two repeat the first entry, or element, with stride 0."""
    if layout == "transposed":
        axes = list(range(x.dim()))[::-1]
        return contiguous(x.permute(axes)).permute(axes)
    if layout == "sliced" and x.dim() > 0:
        wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype, device=x.device)
        # The memory between the elements must not be read.
        if has_derivatives(x.dtype):
            wide.fill_(float("nan"))
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "expanded" and x.dim() > 0 and x.shape[0] > 0:
        return contiguous(x[:1]).expand(x.shape)
    if layout == "constant" and x.numel() > 0:
        return x[(0,) * x.dim()].clone().expand(x.shape)
    return contiguous(x)


def largest(x: Tensor) -> float:
    """Largest magnitude of a finite element."""
    return x.detach().abs().to(torch.float64).nan_to_num(0.0, 0.0, 0.0).max().item() if x.numel() else 0.0


@dataclasses.dataclass
class Record:
    """The subject of a property, and its comparisons for the table."""

    order: int
    tolerances: Mapping[torch.dtype, float]
    compile: bool = True
    # Of the comparison that came nearest to what was allowed, or went beyond.
    error: float | None = None
    allowed: float | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def tolerance(self, *dtypes: torch.dtype) -> float:
        """Relative error that is allowed of the coarsest of these dtypes."""
        inexact = [d for d in dtypes if d.is_floating_point or d.is_complex]
        known = [self.tolerances.get(d, ULPS.get(d, 4) * torch.finfo(d).eps) for d in inexact]
        return max(known, default=0.0)

    def note(self, text: str) -> None:
        """Add a remark, once."""
        if text not in self.notes:
            self.notes.append(text)

    def close(self, what: str, got: Tensor, want: Tensor, *dtypes: torch.dtype) -> None:
        """Compare as `within` does, by the tolerance of the dtypes, by default those of both tensors."""
        self.within(what, got, want, self.tolerance(*(dtypes or (got.dtype, want.dtype))) * max(largest(want), 1.0))

    def within(self, what: str, got: Tensor, want: Tensor, allowed: float) -> None:
        """Compare shapes, NaNs and values; raise `MismatchError` if they differ."""
        if got.shape != want.shape:
            raise MismatchError(f"{what} has shape {list(got.shape)}, expected {list(want.shape)}.")
        wide = torch.complex128 if want.is_complex() or got.is_complex() else torch.float64
        a, b = got.detach().to(wide), want.detach().to(wide)
        # Equal infinities have no difference.
        difference = torch.where(a == b, torch.zeros_like(a), a - b).abs()
        difference = torch.where(a.isnan() & b.isnan(), 0.0, difference.nan_to_num(float("inf"), float("inf")))
        error = difference.max().item() if difference.numel() else 0.0
        if self.error is None or error * (self.allowed or 0.0) >= self.error * allowed or error > allowed:
            self.error, self.allowed = error, allowed
        if error > allowed:
            place = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
            at = f" at {place}" if place else ""
            values = [x[tuple(place)].item() for x in (got, want)]
            raise MismatchError(
                f"{what}{at} is {values[0]!r}, expected {values[1]!r}; "
                f"largest error {error:.1e}, allowed {allowed:.1e}."
            )

    def all_close(self, labels: Sequence[str], gots: Sequence[Tensor], wants: Sequence[Tensor], where: str) -> None:
        """Compare how many there are, and the dtypes and values of all that are not empty."""
        if len(gots) != len(wants):
            raise MismatchError(f"there are {len(gots)} results{where}, expected {len(wants)}.")
        for label, got, want in zip(labels, gots, wants, strict=True):
            if got.dtype != want.dtype:
                raise MismatchError(f"{label}{where} has dtype {got.dtype}, expected {want.dtype}.")
            if want.numel() or got.numel():
                self.close(f"{label}{where}", got, want)


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
