"""The report of a result: a page of tables, the plots beside it, and the result itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from perf.suite import targets
from perf.suite.bytes import is_multi_pass, passes_of
from perf.suite.plots import bandwidth_plot, speedup_plot
from perf.suite.predictions import describe_device, predictions
from perf.suite.reader import load
from perf.suite.results import OK, SKIPPED, WRONG, check_writable, write_json
from perf.suite.tables import OURS, by_case, means, microseconds, speedup

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from perf.suite.results import Row


def write_report(path: Path, directory: Path) -> Path:
    """Write the page of the result at `path`, its plots and a copy of it into `directory`; return the page.

    Raises:
        ResultError: If there is no result file of this schema.
        OutputError: If nothing can be written into the directory.
    """
    result = load(path)
    name = slug(result)
    check_writable(directory / f"{name}.json")
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
    yield from _basis(result)
    yield "\n## Speed-ups\n\nGeometric means over the cases in which both sides are right, and the least of them.\n"
    yield "| mode | against | mean | least | cases |\n|---|---|---|---|---|"
    for mode, against, mean, least, count in means(result):
        yield f"| {mode} | {_against(against)} | {mean:.2f} | {least:.2f} | {count} |"
    for name in figures:
        yield f"\n![{name.removesuffix('.png')}]({name})"
    yield from _cases(result)
    yield from _failures(result)
    yield from _overhead(result)


def _basis(result: dict[str, Any]) -> Iterator[str]:
    """How the targets of copy speed are judged, in words."""
    yield (
        "\nA target is met if every shape of the suite that it speaks of was measured and reaches it, and not met if "
        "one does not, or is wrong or fails."
    )
    if result["device"] and result["device"]["type"] == "cuda":
        yield (
            "Copy speed by *minimum bytes* credits each operand once and each result once; a JVP takes two operators, "
            "which read x twice, so that 0.80 is the most it can reach on rows. *Its own passes* are credited where "
            "one kernel cannot do: batch norm needs all of a channel for its sums before it can write any of it, in "
            "training and in the backward of its evaluation, and derivatives of second order are made of several "
            "operators. The passes are those that the kernels are declared to make, to which the byte gate holds "
            "them:\n"
        )
        yield "| op | mode | minimum passes | its own | judged by |\n|---|---|---|---|---|"
        for op, mode, minimum, own in _passes(result):
            judged = "its own passes" if is_multi_pass(op, mode) else "minimum bytes"
            yield f"| {op.replace('_', ' ')} | {mode} | {minimum} | {own} | {judged} |"


def _passes(result: dict[str, Any]) -> Iterator[tuple[str, str, int, str]]:
    """Op, mode, least passes over tensors of full size, and the range of those that the kernels make."""
    made: dict[tuple[str, str], list[float]] = {}
    for row in result["rows"]:
        if row["provider"] == OURS and row["kernel_bytes"]:
            passes = passes_of(row["op"], row["mode"]).full * row["kernel_bytes"] / row["minimum_bytes"]
            made.setdefault((row["op"], row["mode"]), []).append(passes)
    for (op, mode), found in made.items():
        span = dict.fromkeys(f"{value:.1f}".removesuffix(".0") for value in (min(found), max(found)))
        yield op, mode, passes_of(op, mode).full, " to ".join(span)


_CALL_HEADINGS = ("workload", "us", "p20 to p80", "GB/s", "of copy")
_DEVICE_HEADINGS = (
    *("workload", "us", "p20 to p80", "call us", "GB/s", "of copy", "by own passes"),
    *("predicted us", "launches", "peak MB"),
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
    yield _package(result["package"])
    gpus = (result["device"] or {}).get("gpus", [])
    if len(gpus) > 1:
        yield f"Measured on {len(gpus)} GPUs of this kind ({', '.join(gpus)}); each row of the data says on which."
    for gpu, asked in result["clocks"].items():
        sm, memory = (_span([sample[name] for sample in asked]) for name in ("clocks.sm", "clocks.mem"))
        yield f"GPU {gpu}: driver {asked[0]['driver_version']}, SM clock {sm}, memory {memory}."
    if result["device"] and result["device"]["type"] == "cuda" and not result["clocks"]:
        yield "Clocks: not known, nvidia-smi could not be asked."
    missing = [f"{name} ({reason})" for name, reason in result["providers"].items() if reason]
    if missing:
        yield f"Not installed: {'; '.join(missing)}."
    if not result["complete"]:
        yield "The run is not complete: cases without a row below were not reached."


def _package(package: dict[str, Any] | None) -> str:
    if not package:
        return "Version of the package: not known."
    if package["revision"] is None:
        return f"Package: version {package['version']}, not from a checkout."
    changed = " with changes that are not committed" if package["dirty"] else ""
    return f"Package: version {package['version']}, revision {package['revision'][:12]}{changed}."


def _span(clocks: list[str]) -> str:
    """The range of clocks such as `1980 MHz`, in the order of their numbers."""
    numbers = sorted(float(clock.split()[0]) for clock in clocks if clock.split()[0].replace(".", "", 1).isdigit())
    return f"{numbers[0]:g} to {numbers[-1]:g} MHz" if numbers else "not known"


def _cases(result: dict[str, Any]) -> Iterator[str]:
    """One table for each mode, one line for each workload."""
    cases = by_case(result["rows"])
    on_device = any(row["device_us"] for row in result["rows"])
    expected = predictions(result, describe_device(result))
    for mode in dict.fromkeys(mode for _, mode in cases):
        yield f"\n## {mode}\n"
        headings = _DEVICE_HEADINGS if on_device else _CALL_HEADINGS
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
        return [row["status"]] + [""] * (len(_DEVICE_HEADINGS if on_device else _CALL_HEADINGS) - 2)
    cells = [_number(times["median"], ".1f"), f"{times['p20']:.1f} to {times['p80']:.1f}"]
    rates = [_number(row["gbps"], ".0f" if on_device else ".1f"), _number(row["fraction_of_copy"], ".2f")]
    if not on_device:
        return cells + rates
    rates.append(_number(row["kernel_fraction"], ".2f"))
    call = _number(row["call_us"] and row["call_us"]["median"], ".1f")
    peak = _number(row["peak_bytes"] and row["peak_bytes"] / 1e6, ".1f")
    return [*cells, call, *rates, _number(predicted, ".1f"), _number(row["launches"], "d"), peak]


def _other(case: Mapping[str, Row], name: str) -> str:
    """How many times as fast this package is, or why that cannot be said."""
    row = case.get(name)
    if row is None:
        return ""
    if row["status"] == WRONG:
        error = f" ({row['error']:.0e})" if row["error"] is not None else ""
        return f"{name} is wrong here{error}"
    if row["status"] != OK:
        return row["status"]
    value = speedup(dict(case), name)
    kind = " by call" if case[OURS]["device_us"] and not row["device_us"] else ""
    return "" if value is None else f"{value:.2f}{kind} ({_number(microseconds(row), '.1f')} us)"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _failures(result: dict[str, Any]) -> Iterator[str]:
    """What is wrong, cannot be done or was skipped, grouped by what was said about it."""
    said: dict[tuple[str, str, str], list[Row]] = {}
    for row in result["rows"]:
        # A row that is right may have something to say too: why it has no device time.
        if row["message"]:
            # Sizes of errors differ from case to case; the largest is shown.
            message = "" if row["status"] == WRONG else row["message"]
            said.setdefault((row["provider"], row["status"], message), []).append(row)
    if said:
        yield "\n## What others cannot do, what is wrong, and what was left out\n"
        yield "| provider | | cases | first of them | message |\n|---|---|---|---|---|"
    for (name, status, message), rows in said.items():
        text = " ".join((_wrong(rows) if status == WRONG else message).split()).replace("|", "\\|")
        yield f"| {name} | {status} | {len(rows)} | {rows[0]['workload']}: {rows[0]['mode']} | {text[:200]} |"


def _wrong(rows: list[Row]) -> str:
    """How far off results are, in units of their largest value."""
    errors = [row["error"] for row in rows if row["error"] is not None]
    if len(errors) < len(rows):
        return "off beyond all measure: not finite, or not of the right structure"
    worst = max(rows, key=lambda row: row["error"])
    return f"off by up to {worst['error']:.1e} of the largest value, at most {worst['tolerance']:.0e} is right"


def _overhead(result: dict[str, Any]) -> Iterator[str]:
    """The front-end overhead bench of a CPU run."""
    if result["overhead"]:
        yield "\n## Overhead of the front end\n"
        yield "Time of a call over that of the same through `torch.library.custom_op`.\n"
        yield "| what | ratio | p20 to p80 | limit | |\n|---|---|---|---|---|"
        for name, found in result["overhead"]["modes"].items():
            spread = f"{found['ratio_p20']:.2f} to {found['ratio_p80']:.2f}"
            verdict = "ok" if found["ratio"] <= found["limit"] else "MISSED"
            yield f"| {name} | {found['ratio']:.2f} | {spread} | {found['limit']:.1f} | {verdict} |"
