"""The plots of a report: bandwidth against columns with the copy line, and speed-ups."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from perf.suite.results import OK, geometric_mean
from perf.suite.tables import FASTEST, speedups
from perf.workloads import CHANNEL_OPS, COMPILED, EAGER, OURS, PROVIDERS, TUNED

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

DPI = 150
PANELS_ACROSS = 3
# Readable with every common kind of color blindness, and apart in gray.
_SHADES = ("#0b3c6f", "#e8a33d", "#2a9d6f", "#8fd0b0", "#c0392b", "#7d4fa3", "#8c6d46", "#777777")
COLORS: dict[str, str] = dict(zip(PROVIDERS, _SHADES, strict=True))
MARKERS = {"": "o", "channels_last": "s"}
COPY_COLOR = "#999999"
SPEEDUP_COLORS = {name: COLORS[name] for name in (EAGER, COMPILED, TUNED)} | {FASTEST: "#c0392b"}


def bandwidth_plot(result: dict[str, Any], mode: str, path: Path) -> Path | None:
    """Minimum bytes over time against columns, one panel for each op; None where nothing has a bandwidth."""
    rows = [r for r in result["rows"] if r["mode"] == mode and r["status"] == OK and r["gbps"] is not None]
    ops = list(dict.fromkeys(row["op"] for row in rows))
    if not ops:
        return None
    across = min(len(ops), PANELS_ACROSS)
    down = -(-len(ops) // across)
    figure = Figure(figsize=(4.6 * across + 0.6, 3.6 * down + 0.6), dpi=DPI, layout="constrained")
    panels = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
    for op, panel in zip(ops, panels, strict=False):
        _bandwidth_panel(panel, op, [row for row in rows if row["op"] == op])
    for panel in panels[len(ops) :]:
        panel.set_visible(False)
    # Once all panels are drawn: a limit that is set ends the search for the others.
    panels[0].set_ylim(bottom=0)
    time = "device time" if any(row["device_us"] for row in rows) else "call time"
    for panel in panels[::across]:
        panel.set_ylabel(f"GB/s (minimum bytes over {time})")
    names = [name for name in COLORS if any(row["provider"] == name for row in rows)]
    handles = [Line2D([], [], color=COLORS[n], marker="o", markersize=5, linewidth=1.2, label=n) for n in names]
    handles.append(Line2D([], [], color=COPY_COLOR, marker="_", linestyle="--", label="copy of as many bytes"))
    if any(row["layout"] for row in rows):
        handles.append(Line2D([], [], color="#444444", marker="s", linestyle="", markersize=5, label="channels_last"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False, fontsize=9)
    figure.suptitle(f"{mode.replace('_', ' ')} on {result['device']['name']}", fontsize=12)
    figure.savefig(path)
    return path


def _bandwidth_panel(panel: Axes, op: str, rows: list[dict[str, Any]]) -> None:
    for name, color in COLORS.items():
        own = [row for row in rows if row["provider"] == name]
        for layout in dict.fromkeys(row["layout"] for row in own):
            points = [row for row in own if row["layout"] == layout]
            style = {"color": color, "zorder": 3 if name == OURS else 2}
            places = [row["columns"] for row in points], [row["gbps"] for row in points]
            panel.plot(*places, MARKERS[layout], markersize=4.5, alpha=0.9, markeredgewidth=0, **style)
            # Workloads of one length differ in rows and dtype: the line goes through their middle.
            panel.plot(*_middle(points, "gbps"), linewidth=1.4 if name == OURS else 0.9, alpha=0.7, **style)
    panel.plot(*_middle(rows, "copy_gbps"), color=COPY_COLOR, linestyle="--", marker="_", zorder=1)
    panel.set_xscale("log", base=2)
    columns = sorted({row["columns"] for row in rows})
    if len(columns) == 1:
        panel.set_xlim(columns[0] / 2, columns[0] * 2)
    panel.set_xticks(_spread(columns), [_short(value) for value in _spread(columns)], fontsize=8)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("values per channel" if op in CHANNEL_OPS else "columns")
    panel.set_title(op.replace("_", " "), fontsize=10)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _middle(rows: list[dict[str, Any]], what: str) -> tuple[list[int], list[float]]:
    """Median of a value for each number of columns."""
    columns = sorted({row["columns"] for row in rows})
    return columns, [statistics.median(row[what] for row in rows if row["columns"] == length) for length in columns]


def _spread(columns: list[int]) -> list[int]:
    """Those of the columns that are far enough apart for labels on a logarithmic axis."""
    least = max((columns[-1] / columns[0]) ** (1 / 9), 1.05)
    chosen = columns[:1]
    for value in columns[1:]:
        chosen += [value] if value >= chosen[-1] * least else []
    return chosen


def _short(columns: int) -> str:
    return f"{columns // 1024}k" if columns >= 2**13 and columns % 1024 == 0 else str(columns)


def speedup_plot(result: dict[str, Any], path: Path) -> Path | None:
    """Bars of geometric means for each mode, and a dot for each case; None where there is nothing to compare with."""
    values = {(mode, against): found for mode, against, found in speedups(result)}
    modes = list(dict.fromkeys(mode for mode, _ in values))
    sides = [against for against in SPEEDUP_COLORS if any(values.get((mode, against)) for mode in modes)]
    if not sides:
        return None
    figure = Figure(
        figsize=(min(max(0.55 * len(modes) * len(sides) + 2.0, 6.4), 12.0), 4.4), dpi=DPI, layout="constrained"
    )
    axes = figure.subplots()
    width = 0.8 / len(sides)
    for i, against in enumerate(sides):
        _bars(axes, [values[mode, against] for mode in modes], i * width - 0.4 + width / 2, width, against)
    axes.axhline(1.0, color="#444444", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5)))
    # A row for the figures of the means.
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(range(len(modes)), [mode.replace("_", "\n") for mode in modes])
    axes.set_ylabel("times as fast (bar: geometric mean)")
    axes.set_title(f"primitives against others on {result['device']['name']}", fontsize=12)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(sides), frameon=False, fontsize=9)
    figure.savefig(path)
    return path


def _bars(axes: Axes, values: list[list[float]], shift: float, width: float, against: str) -> None:
    means = [(i + shift, mean) for i, found in enumerate(values) if (mean := geometric_mean(found)) is not None]
    # Bars begin at one: above it this package is faster.
    axes.bar(
        [position for position, _ in means],
        [mean - 1 for _, mean in means],
        width * 0.9,
        bottom=1.0,
        color=SPEEDUP_COLORS[against],
        alpha=0.85,
        label="against " + ("fastest of all others" if against == FASTEST else against),
    )
    # In one line at the foot, where no dot hides them.
    for position, mean in means:
        axes.text(position, 0.015, f"{mean:.2f}", transform=axes.get_xaxis_transform(), ha="center", fontsize=8)
    for i, found in enumerate(values):
        step = width * 0.25 / max(len(found) - 1, 1)
        spread = [i + shift + step * (k - (len(found) - 1) / 2) for k in range(len(found))]
        axes.plot(spread, found, ".", color="#222222", markersize=3.5, alpha=0.55, markeredgewidth=0, zorder=4)
