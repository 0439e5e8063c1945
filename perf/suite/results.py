"""The result file: one JSON object of the schema below, and the files of a run that it is merged from.

schema       SCHEMA; `perf.suite.reader` refuses another number, and what lacks a field
created      when the run ended, ISO 8601, UTC
options      what the run was asked for
seconds      how long it took, in all and for compiling
complete     whether every planned unit was measured (false after Ctrl-C or a deadline)
package      version of this package; revision of its checkout and whether sources differ from it, null outside of one
device       type, name, and for GPUs capability, processors, memory_bytes, l2_bytes, which are those of all GPUs of the
             run, and gpus: what CUDA_VISIBLE_DEVICES takes for each that measured; null if nothing was measured
environment  versions, processor, variables that change what is measured
clocks       of each GPU, every few seconds while it was measured: what nvidia-smi said; empty without it
providers    name -> null, or why it could not be used
calibration  GPU, or cpu -> bytes -> copy_gbps, read_gbps, two_reads_one_write_gbps of it, at exactly that many bytes
             read and written
overhead     of a CPU run: what `perf.overhead --json` writes, or null
rows         one for each unit and provider, sorted:
  workload, name, op, shape, dtype, layout, columns, mode, provider
  status           ok | wrong | cannot | error | skipped
  message          why it is not ok, or why an ok row has no device time, else null; a row is skipped because the run
                   was "out of time", or because no run asks for it ("left out")
  error            largest error over the largest value of a result, against float64; null if not finite or not run
  tolerance        what it may be
  device_us        median, p20, p80, samples: by CUDA graph over rotating tensors; null on a CPU
  call_us          the same of a call as users make it, autograd included
  vs_torch_device  the same of this provider's time over that of torch eager, round by round; null for torch itself
  vs_torch_call    likewise for calls
  minimum_bytes    what the mode cannot do without, see perf.suite.bytes; null for a training step
  kernel_bytes     those of the passes that this package's kernels are declared to make; null for others and on a CPU
  gbps             minimum_bytes over the device time (null without one), on a CPU over the call time
  gpu              on which it was measured, as `device` names it; null on a CPU, and where nobody came to it
  copy_gbps        of a copy of as many bytes on the same device in the same run
  fraction_of_copy gbps over copy_gbps
  kernel_fraction  the same with kernel_bytes
  peak_bytes       memory of a step beyond its inputs; null on a CPU
  launches         kernels, copies and memsets of a step; null where the driver does not say
"""

from __future__ import annotations

import json
import math
import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from perf.suite.budget import OUT_OF_TIME

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 3
OK, WRONG, CANNOT, ERROR, SKIPPED = "ok", "wrong", "cannot", "error", "skipped"
MICROSECONDS = 1e6

Row = dict[str, Any]


class OutputError(OSError):
    """Results cannot be written where they are asked for."""


def device_files(gpus: list[str]) -> dict[str | None, str]:
    """For each GPU of a run, or None for the processor, what the files of its device are called."""
    return {gpu: f"gpu-{number}" for number, gpu in enumerate(gpus)} if gpus else {None: "cpu"}


def check_writable(path: Path) -> None:
    """See to it that a file can be written at `path`, whose directory is made.

    Raises:
        OutputError: If it cannot.
    """
    probe = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(f"--out must name a file that can be written, got {path}: {error}.") from error


def write_json(path: Path, value: Any) -> None:
    """Write so that a reader, or a second attempt, never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def key(row: Row) -> tuple[str, str, str]:
    """What rows of two runs are matched by."""
    return row["workload"], row["mode"], row["provider"]


def row_for(unit: dict[str, Any], provider: str, status: str, message: str | None = None, **values: Any) -> Row:
    """A row with every field; those not given are null."""
    empty = dict.fromkeys(
        (
            "error",
            "tolerance",
            "device_us",
            "call_us",
            "vs_torch_device",
            "vs_torch_call",
            "minimum_bytes",
            "kernel_bytes",
            "gpu",
            "gbps",
            "copy_gbps",
            "fraction_of_copy",
            "kernel_fraction",
            "peak_bytes",
            "launches",
        )
    )
    identity = {name: unit[name] for name in ("workload", "name", "op", "shape", "dtype", "layout", "columns", "mode")}
    return {**identity, "provider": provider, "status": status, "message": message, **empty, **values}


def out_of_time(row: Row) -> bool:
    """Whether a row was skipped because the run had no time left."""
    return row["status"] == SKIPPED and (row["message"] or "").startswith(OUT_OF_TIME)


def finite(value: float | None) -> float | None:
    """`value`, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def geometric_mean(values: list[float]) -> float | None:
    """Geometric mean of positive values, None of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _files(directory: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))}


def merge(plan: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The result of a run from what its workers left in `directory`; what left nothing becomes a row that says so."""
    rows: list[Row] = []
    complete = True
    for unit in plan["units"]:
        path = directory / "rows" / f"{unit['id']}.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
        else:
            crashed = (directory / "crashed" / unit["id"]).exists()
            status = ERROR if crashed else SKIPPED
            early = f"{OUT_OF_TIME}: the run ended before this case did"
            message = "the worker died in this case, see the log" if crashed else early
            found = [row_for(unit, name, status, message) for name in plan["providers"]]
        complete &= path.exists() and not any(map(out_of_time, found))
        rows += found
    files = device_files(plan["gpus"])
    calibration = {gpu or "cpu": _files(directory / "calibration" / name) for gpu, name in files.items()}
    workers = _files(directory / "workers")
    measured = [gpu for gpu, name in files.items() if name in workers]
    said = next(iter(workers.values()), {"device": None, "environment": None})
    device = said["device"]
    if device is not None and device["type"] == "cuda":
        device = {**device, "gpus": measured}
    return {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "options": plan["options"],
        "complete": complete,
        "package": None,
        "device": device,
        "environment": said["environment"],
        "clocks": {},
        "providers": plan["available"],
        "calibration": calibration,
        "overhead": None,
        "rows": rows,
    }
