"""The result file of the bench: one JSON object, its comparison with another, and its page in the docs.

`rows` has one for each provider of each workload and mode: `status` (`ok`, `wrong`, `cannot` or `error`), `message`,
`error` (the largest over the largest value of a result, against float64), the medians `call_us`, on a GPU `device_us`,
and `vs_torch` (its time over torch's), and where memory or matrix products bound it `gbps`, `of_copy` (the time of a
copy of as many bytes over its time) and `tflops`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from perf.pages import DOCS, table
from perf.workloads import EAGER, OURS

Row = dict[str, Any]

SCHEMA = 5
# Their versions change what is measured.
PACKAGES = ("torch", "triton", "optree", "liger-kernel", "flash-attn", "apex")
# The part of its speed that a row may lose.
FALL = 0.05


def write_result(path: Path, rows: list[Row], devices: list[str]) -> None:
    """Write a file that every JSON reader takes: without NaN."""
    installed = {each.name: each.version for each in metadata.distributions()}
    result = {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "revision": _revision(),
        "device": _processor() if devices == ["cpu"] else ", ".join(devices),
        "python": platform.python_version(),
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "processor": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "load": round(os.getloadavg()[1], 1),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """The result file at `path`, which must be of this schema."""
    result = json.loads(path.read_text(encoding="utf-8"))
    found = result.get("schema") if isinstance(result, dict) else None
    if found != SCHEMA:
        raise ValueError(f"{path}: schema must be {SCHEMA}, got {found}; measure again, or use the matching checkout.")
    return result


def _revision() -> str:
    # A package that was installed into some other repository has no revision of its own.
    root = DOCS.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.check_output(command, text=True).strip() if (root / ".git").exists() else ""


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)$", file.read_text("utf-8"), re.MULTILINE) if file.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def time_of(row: Row) -> float:
    """Median microseconds: of the device, where it has a time of its own."""
    return row.get("device_us") or row["call_us"]


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, bool]:
    """What of this package became slower, is no longer right, or is gone, and whether there is any of it.

    Machines differ, and so do days on a shared one: a time is compared by the speed of a copy of as many bytes in the
    same run, or else by torch's time in it, where both runs have that.
    """
    lines = [
        f"WARNING: {name} differs: {before[name]} and then {after[name]}."
        for name in ("device", "python", "packages")
        if before[name] != after[name]
    ]
    first, second = (
        {(r["workload"], r["mode"]): r for r in run["rows"] if r["provider"] == OURS} for run in (before, after)
    )
    failures = compared = 0
    for key in dict.fromkeys([*first, *second]):
        what, old, new = ": ".join(key), first.get(key), second.get(key)
        was_right, is_right = (row is not None and row["status"] == "ok" for row in (old, new))
        if old and new and was_right and is_right:
            compared += 1
            by, change = _change(old, new)
            if abs(change) > FALL:
                lines.append(f"{'rose' if change > 0 else 'FELL':<8}{change:+.1%}  {what}  ({by})")
                failures += change < 0
        elif new is None or not is_right:
            lines.append(f"{'GONE' if new is None else 'BROKEN' if was_right else 'WRONG':<8}{what}")
            # A row that was never right is judged where it is new.
            failures += was_right or old is None
    lines.append(f"{compared} rows compared; {failures} broke, are gone or fell by more than {FALL:.0%}.")
    # Runs that share no row that is right in both prove nothing.
    return "\n".join(lines), bool(failures) or not compared


def _change(old: Row, new: Row) -> tuple[str, float]:
    """What is compared, and speed of the second run over the first minus one."""
    if old.get("device_us") and old.get("of_copy") and new.get("of_copy"):
        return "over a copy", new["of_copy"] / old["of_copy"] - 1
    if old.get("vs_torch") and new.get("vs_torch"):
        return "over torch", old["vs_torch"] / new["vs_torch"] - 1
    return "time", time_of(old) / time_of(new) - 1


def write_report(path: Path, directory: Path) -> Path:
    """Write the page of the result at `path` and a copy of it into `directory`; return the page."""
    result = load(path)
    name = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()) if "device_us" in result["rows"][0] else "cpu"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_bytes(path.read_bytes())
    page = directory / f"{name}.md"
    page.write_text("\n".join(_page(result)) + "\n", encoding="utf-8")
    return page


def _page(result: dict[str, Any]) -> Iterator[str]:
    yield f"# Times beside torch's, on {result['device']}\n"
    yield (
        "Written by `python -m perf report`; [measuring](../developers/measuring.md) says how and what, the JSON file "
        "of this name has all times. "
        f"{result['created'][:10]}, Python {result['python']}, "
        f"{', '.join(f'{name} {version}' for name, version in result['packages'].items())}, {result['processor']}, "
        f"load {result['load']} over the last five minutes. Revision {result['revision']}."
    )
    cells: dict[str, dict[tuple[str, str], Row]] = {}
    for row in result["rows"]:
        cells.setdefault(row["provider"], {})[row["workload"], row["mode"]] = row
    ours = cells.pop(OURS, {})
    # A CPU is shared: only what was taken in turns means something. The data have the rest.
    if any("device_us" in row for row in ours.values()):
        yield "\n## Times\n\nMicroseconds, and the share of the speed of a copy, or the speed of matrix products.\n"
        yield _table({key: _time(row) for key, row in ours.items()})
    for name, theirs in cells.items():
        yield f"\n## Beside {name}\n\nTimes as fast as {name}; the last line has geometric means.\n"
        yield _table({key: _beside(ours.get(key), row) for key, row in theirs.items()})
    said: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        if row["status"] != "ok":
            said.setdefault((row["provider"], row["message"]), []).append(f"{row['workload']}: {row['mode']}")
    if said:
        yield "\n## Wrong, or beyond others\n"
        rows = ([who, text.replace("|", "\\|"), str(len(found)), found[0]] for (who, text), found in said.items())
        yield table(["provider", "message", "cases", "first"], rows)


def _table(cells: Mapping[tuple[str, str], float | str]) -> str:
    """A line for each workload, a column for each mode, and the means of columns of numbers."""
    workloads, modes = (dict.fromkeys(key[place] for key in cells) for place in (0, 1))

    def text(value: float | str) -> str:
        return value if isinstance(value, str) else f"{value:.2f}"

    rows = [[name, *(text(cells.get((name, mode), "")) for mode in modes)] for name in workloads]
    numbers = {m: [x for (_, mode), x in cells.items() if mode == m and isinstance(x, float)] for m in modes}
    if any(numbers.values()):
        rows.append(
            ["**mean**", *(text(statistics.geometric_mean(found) if found else "") for found in numbers.values())]
        )
    return table(["workload", *(mode.replace("_", " ") for mode in modes)], rows)


def _time(row: Row) -> str:
    if row["status"] != "ok":
        return row["status"]
    beside = (
        f", {row['of_copy']:.2f}" if "of_copy" in row else f", {row['tflops']:.2f} TFLOP/s" if "tflops" in row else ""
    )
    return f"{time_of(row):,.0f}{beside}"


def _beside(ours: Row | None, theirs: Row) -> float | str:
    """How many times as fast this package is, or why that cannot be said."""
    if theirs["status"] != "ok":
        return f"{theirs['status']} ({theirs['error']:.0e})" if theirs.get("error") else theirs["status"]
    if ours is None or ours["status"] != "ok":
        return ""
    # Round by round, where it was so taken.
    return 1 / ours["vs_torch"] if theirs["provider"] == EAGER else time_of(theirs) / time_of(ours)
