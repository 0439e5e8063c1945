"""The report of a result: what a run prints, and a page of tables with plots and the result itself beside it."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from perf.suite.results import OK, WRONG, load, write_json
from perf.suite.targets import FASTEST, by_case, speedup, speedups, verdicts
from perf.workloads import CHANNEL_OPS, MATMUL_OPS, OURS, PROVIDERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from perf.suite.results import Row
    from perf.suite.targets import Case, Key

DPI = 150
# Beside each other in one plot.
MAX_PANELS = 5
# Readable with every common kind of color blindness, and apart in gray.
_SHADES = (
    *("#0b3c6f", "#e8a33d", "#2a9d6f", "#8fd0b0", "#7d4fa3", "#8c6d46", "#777777"),
    *("#f4c7a1", "#5aa9e6", "#b5179e", "#a0522d", "#4c956c"),
)
COLORS = dict(zip(PROVIDERS, _SHADES, strict=True)) | {FASTEST: "#c0392b"}
_BASIS = """
A target is met if every shape of the suite that it speaks of was measured and reaches it, and not met if one does \
not, or is wrong or fails."""


def print_summary(result: dict[str, Any]) -> None:
    """Print the means, and everything that is not right."""
    print(f"{result['device']['name']}: {len(result['rows'])} rows in {result['seconds']['total']:.0f} s")
    for line in (*_speedups(result), *_failures(result)):
        print(line)
    print(", ".join(f"{count} {status}" for status, count in Counter(row["status"] for row in result["rows"]).items()))


def write_report(path: Path, directory: Path) -> Path:
    """Write the page of the result at `path`, its plots and a copy of it into `directory`; return the page."""
    result = load(path)
    device = result["device"]
    # A run of some workloads does not take the place of one of all.
    words = ["cpu" if device["type"] == "cpu" else device["name"], *result["options"]["only"]]
    name = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower())
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / f"{name}.json", result)
    figures = [_speedup_plot(result, directory / f"{name}-speedup.png")]
    for mode in dict.fromkeys(row["mode"] for row in result["rows"]):
        figures.append(_bandwidth_plot(result, mode, directory / f"{name}-{mode.replace('_', '-')}.png"))
    page = directory / f"{name}.md"
    lines = _page(result, [figure.stem for figure in figures if figure is not None])
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _table(headings: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {headings} |\n" + "|---" * (headings.count("|") + 1) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def _page(result: dict[str, Any], figures: list[str]) -> Iterator[str]:
    yield f"# Measured on {result['device']['name']}\n"
    yield (
        "Written by `python -m perf report`; [measuring.md](../developers/measuring.md) says how it is measured and "
        "what the columns mean.\n"
    )
    yield from _circumstances(result)
    yield "\n## Targets\n"
    yield from _table("target | figure |", verdicts(result))
    yield _BASIS
    yield "\n## Speed-ups\n\nGeometric means over the cases in which both sides are right, and the least of them.\n"
    yield from _speedups(result)
    yield from (f"\n![{name}]({name}.png)" for name in figures)
    yield from _cases(result)
    yield from _failures(result)
    if result["overhead"]:
        yield "\n## Overhead of the front end\n"
        yield "Time of a call over that of the same through `torch.library.custom_op`.\n"
        modes = result["overhead"]["modes"]
        yield from _table("what | ratio | p20 to p80 | limit |", (_overhead(name, modes[name]) for name in modes))


def _overhead(name: str, found: dict[str, float]) -> list[str]:
    verdict = "ok" if found["ratio"] <= found["limit"] else "MISSED"
    spread = f"{found['ratio_p20']:.2f} to {found['ratio_p80']:.2f}"
    return [name, f"{found['ratio']:.2f}", spread, f"{found['limit']:.1f}", verdict]


def _speedups(result: dict[str, Any]) -> Iterator[str]:
    found = [
        (mode, against, f"{statistics.geometric_mean(values):.2f}", f"{min(values):.2f}", str(len(values)))
        for (mode, against), values in speedups(result).items()
    ]
    return _table("mode | against | mean | least | cases", found)


def _circumstances(result: dict[str, Any]) -> Iterator[str]:
    environment, package = result["environment"], result["package"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    yield f"{result['created'][:10]}, Python {environment['python']}, {packages}."
    cores = f"{environment['threads']} threads on {environment['cores']} cores ({environment['processor']})"
    on_gpu, seconds = result["device"]["type"] == "cuda", result["seconds"]["total"]
    clock = "" if on_gpu else f", timed in {environment['clock']}"
    clock += f"; load {environment['load']} over the last five minutes" if "load" in environment else ""
    yield f"Processor: {cores}{clock}. The run took {seconds:.0f} s."
    revision = "not from a checkout" if package["revision"] is None else f"revision {package['revision'][:12]}"
    changed = " with changes that are not committed" if package["dirty"] else ""
    yield f"Package: version {package['version']}, {revision}{changed}."
    for gpu, asked in result["clocks"].items():
        sm, memory = ([one[name] for one in asked] for name in ("sm_mhz", "memory_mhz"))
        clocks = f"SM clock {min(sm)} to {max(sm)} MHz, memory {min(memory)} to {max(memory)} MHz"
        yield f"GPU {gpu}: driver {asked[0]['driver']}, {clocks}."
    if on_gpu and not result["clocks"]:
        yield "Clocks: not known, NVML could not be asked."
    if missing := [f"{name} ({reason})" for name, reason in result["providers"].items() if reason]:
        yield f"Not installed: {'; '.join(missing)}."
    if not result["complete"]:
        yield "The run is not complete: cases without a row below were not reached."


def _cases(result: dict[str, Any]) -> Iterator[str]:
    """One table for each mode, one line for each workload; what products of matrices bound has tables of its own."""
    kinds: dict[tuple[str, bool], dict[Key, Case]] = {}
    for key, case in by_case(result["rows"]).items():
        if OURS in case:
            kinds.setdefault((key[1], case[OURS]["op"] in MATMUL_OPS), {})[key] = case
    on_device = ["call us"] if any(row["device_us"] for row in result["rows"]) else []
    for (mode, is_matmul), cases in kinds.items():
        measures = ["GFLOP/s"] if is_matmul else ["GB/s", "of copy"]
        columns = ["us", "p20 to p80", *measures, *on_device]
        others = [name for name in result["providers"] if name != OURS and any(name in case for case in cases.values())]
        rows = []
        for (workload, _), case in cases.items():
            cells, error = _cells(case[OURS], is_matmul)[: len(columns)], _number(case[OURS]["error"], ".1e")
            rows.append([workload, *cells, *(_other(case, name) for name in others), error])
        yield f"\n## {mode}{' of attention' if is_matmul else ''}\n"
        yield from _table(" | ".join(["workload", *columns, *(f"against {name}" for name in others), "error"]), rows)


def _cells(row: Row, is_matmul: bool) -> list[str]:
    """The figures of a row of this package, those of a device last."""
    if row["status"] != OK:
        return [row["status"], *[""] * 4]
    times = row["device_us"] or row["call_us"]
    cells = [f"{times['median']:.1f}", f"{times['p20']:.1f} to {times['p80']:.1f}"]
    speeds = [("gflops", ".0f")] if is_matmul else [("gbps", ".1f"), ("fraction_of_copy", ".2f")]
    return [*cells, *(_number(row[name], form) for name, form in speeds), f"{row['call_us']['median']:.1f}"]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _other(case: Case, name: str) -> str:
    """How many times as fast this package is, or why that cannot be said."""
    if (row := case.get(name)) is None:
        return ""
    if row["status"] == WRONG:
        return f"{name} is wrong here" + (f" ({row['error']:.0e})" if row["error"] is not None else "")
    value = speedup(case, name)
    if row["status"] != OK or value is None:
        return row["status"]
    return f"{value:.2f} ({(row['device_us'] or row['call_us'])['median']:.1f} us)"


def _failures(result: dict[str, Any]) -> Iterator[str]:
    """The rows that are wrong or cannot be done, grouped by their messages."""
    said: dict[tuple[str, str, str], list[Row]] = {}
    for row in result["rows"]:
        if row["status"] != OK:
            # Sizes of errors differ from case to case; the largest is shown.
            message = "" if row["status"] == WRONG else row["message"]
            said.setdefault((row["provider"], row["status"], message), []).append(row)
    rows = []
    for (name, status, message), found in said.items():
        text = " ".join((_wrong(found) if status == WRONG else message).split()).replace("|", "\\|")
        rows.append([name, status, str(len(found)), f"{found[0]['workload']}: {found[0]['mode']}", text[:200]])
    if rows:
        yield "\n## Left out, wrong, or beyond others\n"
        yield from _table("provider | | cases | first of them | message", rows)


def _wrong(rows: list[Row]) -> str:
    """How far off results are, in units of their largest value."""
    if any(row["error"] is None for row in rows):
        return "off beyond all measure: not finite, or not of the right structure"
    worst = max(rows, key=lambda row: row["error"])
    return f"off by up to {worst['error']:.1e} of the largest value, at most {worst['tolerance']:.0e} is right"


# Plots.


def _bandwidth_plot(result: dict[str, Any], mode: str, path: Path) -> Path | None:
    """Minimum bytes over time against columns, one panel for each op that they bound; None where there is none."""
    rows = [
        row for row in result["rows"] if row["mode"] == mode and row["gbps"] is not None and row["op"] not in MATMUL_OPS
    ]
    if not (ops := list(dict.fromkeys(row["op"] for row in rows))):
        return None
    columns, lines = min(len(ops), MAX_PANELS), -(-len(ops) // MAX_PANELS)
    figure = Figure(figsize=(3.6 * columns + 1.0, 3.7 * lines + 0.5), dpi=DPI, layout="constrained")
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for panel in panels[len(ops) :]:
        panel.remove()
    for op, panel in zip(ops, panels[: len(ops)], strict=True):
        shown = sorted((row for row in rows if row["op"] == op), key=lambda row: row["columns"])
        for name in dict.fromkeys(row["provider"] for row in rows):
            own = [row for row in shown if row["provider"] == name]
            columns = [row["columns"] for row in own]
            panel.plot(columns, [row["gbps"] for row in own], "o-", alpha=0.7, label=name, color=COLORS[name])
        copies = [row["copy_gbps"] for row in shown]
        panel.plot([row["columns"] for row in shown], copies, "_", color="#999999", label="copy of as many bytes")
        panel.set_xscale("log", base=2)
        panel.set_xlabel("values per channel" if op in CHANNEL_OPS else "columns")
        panel.set_title(op.replace("_", " "), fontsize=10)
    figure.suptitle(f"{mode.replace('_', ' ')} on {result['device']['name']}")
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("GB/s (minimum bytes over time)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path)
    return path


def _speedup_plot(result: dict[str, Any], path: Path) -> Path | None:
    """Bars of geometric means for each mode, and a dot for each case; None where there is nothing to compare with."""
    found = speedups(result)
    modes, sides = (list(dict.fromkeys(key[i] for key in found)) for i in range(2))
    if not sides:
        return None
    size = (min(max(0.55 * len(modes) * len(sides) + 2, 6.4), 12), 4.4)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(sides)
    for (mode, against), values in found.items():
        place, mean = modes.index(mode) - 0.4 + width * (sides.index(against) + 0.5), statistics.geometric_mean(values)
        # Bars begin at one: above it this package is faster.
        axes.bar(place, mean - 1, width * 0.9, bottom=1.0, color=COLORS[against], alpha=0.85)
        axes.plot([place] * len(values), values, ".", color="#222222", markersize=3.5, alpha=0.55)
    for against in sides:
        axes.bar(0, 0, bottom=1.0, color=COLORS[against], label=f"against {against}")
    axes.set_yscale("log", base=2)
    axes.set_xticks(range(len(modes)), [mode.replace("_", "\n") for mode in modes])
    axes.set_ylabel("times as fast (bar: geometric mean)")
    figure.legend(loc="outside lower center", ncols=len(sides), frameon=False, fontsize=9)
    figure.savefig(path)
    return path
