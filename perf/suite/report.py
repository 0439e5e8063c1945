"""The report of a result: a page of tables, the plots beside it, and the result itself."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING, Any

from perf.suite import targets
from perf.suite.bytes import is_multi_pass, passes_of
from perf.suite.plan import find
from perf.suite.plots import bandwidth_plot, speedup_plot
from perf.suite.results import OK, SKIPPED, WRONG, check_writable, load, write_json
from perf.suite.tables import FASTEST, by_case, means, speedup
from perf.workloads import OURS, TRAINING, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from perf.model import Device
    from perf.suite.results import Row
    from perf.suite.tables import Case

# Smaller copies have a part in caches, and of their launches.
LARGE_BYTES = 256e6
# Where what a launch takes is looked up: no run measures it.
DESCRIBED = "h200"
_BASIS = """
A target is met if every shape of the suite that it speaks of was measured and reaches it, and not met if one does \
not, or is wrong or fails."""
_COPY_BASIS = """\
Copy speed by *minimum bytes* credits each operand once and each result once; a JVP takes two operators, which read x \
twice, so that 0.80 is the most it can reach on rows. *Its own passes* are credited where one kernel cannot do: batch \
norm needs all of a channel for its sums before it can write any of it, in training and in the backward of its \
evaluation, and derivatives of second order are made of several operators. The passes are those that the kernels are \
declared to make, to which the byte gate holds them:
"""


def write_report(path: Path, directory: Path) -> Path:
    """Write the page of the result at `path`, its plots and a copy of it into `directory`; return the page.

    Raises:
        ResultError: If there is no result file of this schema, or nothing can be written into the directory.
    """
    result = load(path)
    name = "cpu"
    if _is_gpu(result):
        name = re.sub(r"[^a-z0-9]+", "-", result["device"]["name"].lower()).strip("-")
    check_writable(directory / f"{name}.json")
    write_json(directory / f"{name}.json", result)
    figures = [
        speedup_plot(result, directory / f"{name}-speedup.png"),
        *(
            bandwidth_plot(result, mode, directory / f"{name}-{mode.replace('_', '-')}.png")
            for mode in dict.fromkeys(row["mode"] for row in result["rows"])
        ),
    ]
    device = describe_device(result)
    if device is not None:
        from perf.model import write_device

        write_device(directory / f"{name}-device.json", device)
    page = directory / f"{name}.md"
    lines = _page(result, [figure.name for figure in figures if figure is not None], device)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _is_gpu(result: dict[str, Any]) -> bool:
    return bool(result["device"]) and result["device"]["type"] == "cuda"


def describe_device(result: dict[str, Any]) -> Device | None:
    """The device of a result as the time model takes it; None for a CPU, an unknown chip, and without triton."""
    try:
        from perf import model
        from triton_kernels import launch
    except ImportError:
        return None
    found = result["device"] or {}
    chip = "sm_" + found.get("capability", "").replace(".", "")
    copies = [(int(size), one["copy_gbps"]) for sizes in result["calibration"].values() for size, one in sizes.items()]
    speeds = [speed for size, speed in copies if size >= LARGE_BYTES]
    if chip not in launch.CHIPS or not speeds:
        return None
    created = f"measured by `python -m perf run` on {result['created'][:10]}"
    return model.Device(
        found["name"],
        chip,
        model.Value(statistics.median(speeds) * 1e9, True, f"{created}: median of {len(speeds)} large copies"),
        model.read_device(DESCRIBED).launch_seconds,
        model.Value(found["l2_bytes"], True, created),
        model.Value(found["processors"], True, created),
    )


def _predicted(row: Row, device: Device | None) -> float | None:
    """Microseconds that the model expects of a case: what is read again comes from the cache if it fits."""
    try:
        workload = find(row["workload"], "cuda")
    except KeyError:
        return None
    if device is None or not isinstance(workload, Workload) or row["mode"] == TRAINING:
        return None
    from perf import model

    return model.predict(workload, row["mode"], device).cached_us


def _page(result: dict[str, Any], figures: list[str], device: Device | None) -> Iterator[str]:
    yield f"# Measured on {(result['device'] or {'name': 'no device'})['name']}\n"
    yield (
        "Written by `python -m perf report`; [performance.md](../performance.md) says how it is measured and what the "
        "columns mean.\n"
    )
    yield from _circumstances(result)
    yield "\n## Targets\n\n| target | figure | |\n|---|---|---|"
    for verdict in targets.verdicts(result):
        yield f"| {verdict.target} | {verdict.figure} | {verdict.text} |"
    yield _BASIS
    if _is_gpu(result):
        yield _COPY_BASIS
        yield from _passes(result)
    yield "\n## Speed-ups\n\nGeometric means over the cases in which both sides are right, and the least of them.\n"
    yield "| mode | against | mean | least | cases |\n|---|---|---|---|---|"
    for mode, against, mean, least, count in means(result):
        name = "fastest of all others" if against == FASTEST else against
        yield f"| {mode} | {name} | {mean:.2f} | {least:.2f} | {count} |"
    for name in figures:
        yield f"\n![{name.removesuffix('.png')}]({name})"
    yield from _cases(result, device)
    yield from _failures(result)
    yield from _overhead(result)


def _passes(result: dict[str, Any]) -> Iterator[str]:
    """Least passes over tensors of full size, and the range of those that the kernels make."""
    made: dict[tuple[str, str], list[float]] = {}
    for row in result["rows"]:
        if row["provider"] == OURS and row["kernel_bytes"]:
            passes = passes_of(row["op"], row["mode"]).full * row["kernel_bytes"] / row["minimum_bytes"]
            made.setdefault((row["op"], row["mode"]), []).append(passes)
    yield "| op | mode | minimum passes | its own | judged by |\n|---|---|---|---|---|"
    for (op, mode), found in made.items():
        own = " to ".join(dict.fromkeys(f"{value:.1f}".removesuffix(".0") for value in (min(found), max(found))))
        judged = "its own passes" if is_multi_pass(op, mode) else "minimum bytes"
        yield f"| {op.replace('_', ' ')} | {mode} | {passes_of(op, mode).full} | {own} | {judged} |"


def _circumstances(result: dict[str, Any]) -> Iterator[str]:
    environment, device = result["environment"] or {}, result["device"] or {}
    packages = ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items())
    yield f"{result['created'][:10]}, Python {environment.get('python')}, {packages}."
    cores = f"{environment.get('threads')} threads on {environment.get('cores')} cores"
    clock = "" if _is_gpu(result) else f", timed in {environment.get('clock')}"
    seconds = result["seconds"]["total"]
    yield f"Processor: {cores} ({environment.get('processor')}){clock}. The run took {seconds:.0f} s."
    yield _package(result["package"])
    gpus = device.get("gpus", [])
    if len(gpus) > 1:
        yield f"Measured on {len(gpus)} GPUs of this kind ({', '.join(gpus)}); each row of the data says on which."
    for gpu, asked in result["clocks"].items():
        sm, memory = (_span([sample[name] for sample in asked]) for name in ("clocks.sm", "clocks.mem"))
        yield f"GPU {gpu}: driver {asked[0]['driver_version']}, SM clock {sm}, memory {memory}."
    if _is_gpu(result) and not result["clocks"]:
        yield "Clocks: not known, NVML could not be asked."
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
    numbers = sorted(float(clock.split()[0]) for clock in clocks)
    return f"{numbers[0]:g} to {numbers[-1]:g} MHz"


def _cases(result: dict[str, Any], device: Device | None) -> Iterator[str]:
    """One table for each mode, one line for each workload."""
    cases = by_case(result["rows"])
    columns = _DEVICE_COLUMNS if any(row["device_us"] for row in result["rows"]) else _CALL_COLUMNS
    others = [name for name, reason in result["providers"].items() if name != OURS and not reason]
    headings = ["workload", *columns, *(f"against {name}" for name in others), "error"]
    for mode in dict.fromkeys(mode for _, mode in cases):
        yield f"\n## {mode}\n"
        yield "| " + " | ".join(headings) + " |\n|" + "---|" * len(headings)
        for (workload, other), case in cases.items():
            if other == mode and OURS in case and case[OURS]["status"] != SKIPPED:
                row = case[OURS]
                cells = [row["status"]] + [""] * (len(columns) - 1)
                if row["status"] == OK:
                    row = {**row, "predicted": _predicted(row, device)}
                    cells = [cell(row) for cell in columns.values()]
                cells += [_other(case, name) for name in others]
                yield "| " + " | ".join([workload, *cells, _number(row["error"], ".1e")]) + " |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _times(row: Row) -> dict[str, float]:
    """The times by which a row is compared: of the device where it has them, else of the call."""
    return row["device_us"] or row["call_us"]


# Columns of the tables and what stands in them.
_CALL_COLUMNS = {
    "us": lambda row: _number(_times(row)["median"], ".1f"),
    "p20 to p80": lambda row: f"{_times(row)['p20']:.1f} to {_times(row)['p80']:.1f}",
    "GB/s": lambda row: _number(row["gbps"], ".1f"),
    "of copy": lambda row: _number(row["fraction_of_copy"], ".2f"),
}
_DEVICE_COLUMNS = {
    "us": _CALL_COLUMNS["us"],
    "p20 to p80": _CALL_COLUMNS["p20 to p80"],
    "call us": lambda row: _number(row["call_us"]["median"], ".1f"),
    "GB/s": lambda row: _number(row["gbps"], ".0f"),
    "of copy": _CALL_COLUMNS["of copy"],
    "by own passes": lambda row: _number(row["kernel_fraction"], ".2f"),
    "predicted us": lambda row: _number(row["predicted"], ".1f"),
    "launches": lambda row: _number(row["launches"], "d"),
    "peak MB": lambda row: _number(row["peak_bytes"] and row["peak_bytes"] / 1e6, ".1f"),
}


def _other(case: Case, name: str) -> str:
    """How many times as fast this package is, or why that cannot be said."""
    row = case.get(name)
    if row is None:
        return ""
    if row["status"] == WRONG:
        error = f" ({row['error']:.0e})" if row["error"] is not None else ""
        return f"{name} is wrong here{error}"
    if row["status"] != OK:
        return row["status"]
    value = speedup(case, name)
    kind = " by call" if case[OURS]["device_us"] and not row["device_us"] else ""
    return "" if value is None else f"{value:.2f}{kind} ({_times(row)['median']:.1f} us)"


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
    if any(row["error"] is None for row in rows):
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
