"""The report of a result: a page of tables, the plots beside it, and the result itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from perf.suite import targets
from perf.suite.plots import bandwidth_plot, speedup_plot
from perf.suite.predictions import describe_device, predictions
from perf.suite.results import CANNOT, OK, SKIPPED, load, write_json
from perf.suite.tables import OURS, by_case, means, microseconds, speedup

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from perf.suite.results import Row


def write_report(path: Path, directory: Path) -> Path:
    """Write the page of the result at `path`, its plots and a copy of it into `directory`; return the page.

    Raises:
        ResultError: If there is no result file of this schema.
    """
    result = load(path)
    name = slug(result)
    write_json(directory / f"{name}.json", result)
    modes = dict.fromkeys(row["mode"] for row in result["rows"])
    figures = [
        speedup_plot(result, directory / f"{name}-speedup.png"),
        *(bandwidth_plot(result, mode, directory / f"{name}-{mode.replace('_', '-')}.png") for mode in modes),
    ]
    device = describe_device(result)
    if device is not None:
        from perf.model import write_device

        write_device(directory / f"{name}-device.json", device)
    page = directory / f"{name}.md"
    page.write_text("\n".join(_page(result, [f.name for f in figures if f is not None])) + "\n", encoding="utf-8")
    return page


def slug(result: dict[str, Any]) -> str:
    """Name of the device as part of a file name."""
    device = result["device"]
    if not device or device["type"] == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", device["name"].lower()).strip("-")


def _page(result: dict[str, Any], figures: list[str]) -> Iterator[str]:
    device = result["device"] or {"name": "no device", "type": "cpu"}
    yield f"# Measured on {device['name']}\n"
    yield (
        "Written by `python -m perf report`; [performance.md](../performance.md) says how it is measured and what the "
        "columns mean.\n"
    )
    yield from _circumstances(result)
    yield "\n## Targets\n\n| target | figure | |\n|---|---|---|"
    for verdict in targets.verdicts(result):
        yield f"| {verdict.target} | {verdict.figure} | {verdict.text} |"
    yield "\n## Speed-ups\n\nGeometric means over the cases in which both sides are right, and the least of them.\n"
    yield "| mode | against | mean | least | cases |\n|---|---|---|---|---|"
    for mode, against, mean, least, count in means(result):
        yield f"| {mode} | {_against(against)} | {mean:.2f} | {least:.2f} | {count} |"
    for name in figures:
        yield f"\n![{name.removesuffix('.png')}]({name})"
    yield from _cases(result)
    yield from _failures(result)
    yield from _overhead(result)


_CALL_HEADINGS = ("workload", "us", "p20 to p80", "GB/s", "of copy", "kernels")
_DEVICE_HEADINGS = (
    "workload",
    "us",
    "p20 to p80",
    "call us",
    *_CALL_HEADINGS[3:],
    "predicted us",
    "launches",
    "peak MB",
)


def _against(name: str) -> str:
    return "fastest of all others" if name == "fastest" else name


def _circumstances(result: dict[str, Any]) -> Iterator[str]:
    environment = result["environment"] or {}
    packages = ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items())
    yield f"{result['created'][:10]}, Python {environment.get('python')}, {packages}."
    threads = (
        f"{environment.get('threads')} threads on {environment.get('cores')} cores ({environment.get('processor')})"
    )
    clock = "" if result["device"] and result["device"]["type"] == "cuda" else f", timed in {environment.get('clock')}"
    yield f"Processor: {threads}{clock}. The run took {result['seconds']['total']:.0f} s."
    for gpu, asked in result["clocks"].items():
        sm, memory = ([sample[name] for sample in asked] for name in ("clocks.sm", "clocks.mem"))
        yield (
            f"GPU {gpu}: driver {asked[0]['driver_version']}, SM clock {min(sm)} to {max(sm)}, memory {min(memory)} to "
            f"{max(memory)}."
        )
    missing = [f"{name} ({reason})" for name, reason in result["providers"].items() if reason]
    if missing:
        yield f"Not installed: {'; '.join(missing)}."
    if not result["complete"]:
        yield "The run is not complete: cases without a row below were not reached."


def _cases(result: dict[str, Any]) -> Iterator[str]:
    """One table for each mode, one line for each workload."""
    cases = by_case(result["rows"])
    on_device = any(row["device_us"] for row in result["rows"])
    expected = predictions(result, describe_device(result))
    for mode in dict.fromkeys(mode for _, mode in cases):
        yield f"\n## {mode}\n"
        headings = [
            "workload",
            "us",
            "p20 to p80",
            "call us",
            "GB/s",
            "of copy",
            "kernels",
            "predicted us",
            "launches",
            "peak MB",
        ]
        headings = headings if on_device else ["workload", "us", "p20 to p80", "GB/s", "of copy", "kernels"]
        others = [name for name in result["providers"] if name != OURS and not result["providers"][name]]
        yield "| " + " | ".join([*headings, *(f"against {name}" for name in others), "error"]) + " |"
        yield "|" + "---|" * (len(headings) + len(others) + 1)
        for (workload, other), case in cases.items():
            if other == mode and OURS in case and case[OURS]["status"] != SKIPPED:
                cells = _ours(case[OURS], expected.get((workload, mode)), on_device)
                cells += [_other(case, name) for name in others]
                yield "| " + " | ".join([workload, *cells, _number(case[OURS]["error"], ".1e")]) + " |"


def _ours(row: Row, predicted: float | None, on_device: bool) -> list[str]:
    times = row["device_us"] or row["call_us"]
    if row["status"] != OK or not times:
        return [row["status"]] + [""] * (8 if on_device else 4)
    cells = [_number(times["median"], ".1f"), f"{times['p20']:.1f} to {times['p80']:.1f}"]
    rates = [_number(row["gbps"], ".0f" if on_device else ".1f"), _number(row["fraction_of_copy"], ".2f")]
    rates.append(_number(row["kernel_fraction"], ".2f"))
    if not on_device:
        return cells + rates
    call = _number(row["call_us"] and row["call_us"]["median"], ".1f")
    peak = _number(row["peak_bytes"] and row["peak_bytes"] / 1e6, ".1f")
    return [*cells, call, *rates, _number(predicted, ".1f"), _number(row["launches"], "d"), peak]


def _other(case: Mapping[str, Row], name: str) -> str:
    """How many times as fast this package is, or why that cannot be said."""
    row = case.get(name)
    if row is None:
        return ""
    if row["status"] != OK:
        error = f" ({row['error']:.0e})" if row["status"] == "wrong" and row["error"] is not None else ""
        return row["status"] + error
    value = speedup(dict(case), name)
    return "" if value is None else f"{value:.2f} ({_number(microseconds(row), '.1f')} us)"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _failures(result: dict[str, Any]) -> Iterator[str]:
    """What is wrong or cannot be done, grouped by what was said about it."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for row in result["rows"]:
        if row["status"] not in {OK, SKIPPED}:
            # Sizes of errors differ from case to case; the tables have them.
            message = "not the derivative, by more than rounding" if row["status"] == "wrong" else row["message"] or ""
            said.setdefault((row["provider"], row["status"], message), []).append(f"{row['workload']}: {row['mode']}")
    if said:
        yield "\n## What others cannot do, and what is wrong\n\n| provider | | cases | first of them | message |"
        yield "|---|---|---|---|---|"
    for (name, status, message), where in said.items():
        text = " ".join(message.split()).replace("|", "\\|")
        yield f"| {name} | {status} | {len(where)} | {where[0]} | {text[:200]} |"
    if any(status == CANNOT for _, status, _ in said):
        yield ""


def _overhead(result: dict[str, Any]) -> Iterator[str]:
    """The front-end overhead bench of a CPU run."""
    if result["overhead"]:
        yield "\n## Overhead of the front end\n"
        yield "Time of a call over that of the same through `torch.library.custom_op`.\n"
        yield "| what | ratio | p20 to p80 | limit |\n|---|---|---|---|"
        for name, found in result["overhead"]["modes"].items():
            spread = f"{found['ratio_p20']:.2f} to {found['ratio_p80']:.2f}"
            yield f"| {name} | {found['ratio']:.2f} | {spread} | {found['limit']:.1f} |"
