"""The result file: one JSON object of the schema below.

schema       SCHEMA; `load` refuses another number, and a file that lacks a field
created      when the run ended, ISO 8601, UTC
options      what the run was asked for
seconds      how long it took, in all and for compiling
complete     whether every planned unit was measured (false after Ctrl-C or a deadline)
package      version of this package; revision of its checkout and whether sources differ from it, null outside of one
device       type, name, and for GPUs capability, processors, memory_bytes, l2_bytes, which are those of all GPUs of the
             run, and gpus: their UUIDs; null if nothing was measured
environment  versions, processor, variables that change what is measured
clocks       of each GPU, after every unit: clocks, power, temperature, driver; empty where NVML cannot be asked
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA = 3
OK, WRONG, CANNOT, ERROR, SKIPPED = "ok", "wrong", "cannot", "error", "skipped"
# How messages of rows begin that have no time because the run had none left: such a run is not complete.
OUT_OF_TIME = "out of time"
_TOP = (
    *("created", "options", "seconds", "complete", "package", "device", "environment", "clocks", "providers"),
    *("calibration", "overhead", "rows"),
)
_IDENTITY = ("workload", "name", "op", "shape", "dtype", "layout", "columns", "mode")
_VALUES = (
    *("error", "tolerance", "device_us", "call_us", "vs_torch_device", "vs_torch_call", "minimum_bytes"),
    *("kernel_bytes", "gpu", "gbps", "copy_gbps", "fraction_of_copy", "kernel_fraction", "peak_bytes", "launches"),
)

Row = dict[str, Any]


class ResultError(ValueError):
    """A file is not a result file of this schema, or a place for one cannot be written."""


def row_for(unit: Mapping[str, Any], provider: str, status: str, message: str | None = None, **values: Any) -> Row:
    """A row with every field; those not given are null."""
    identity = {name: unit[name] for name in _IDENTITY}
    said = {"provider": provider, "status": status, "message": message}
    return {**identity, **said, **dict.fromkeys(_VALUES), **values}


def key(row: Row) -> tuple[str, str, str]:
    """What rows of two runs are matched by."""
    return row["workload"], row["mode"], row["provider"]


def out_of_time(row: Row) -> bool:
    """Whether a row was skipped because the run had no time left."""
    return row["status"] == SKIPPED and (row["message"] or "").startswith(OUT_OF_TIME)


def geometric_mean(values: list[float]) -> float | None:
    """Geometric mean of positive values, None of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def check_writable(path: Path) -> None:
    """See to it that a file can be written at `path`, whose directory is made.

    Raises:
        ResultError: If it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError("it is a directory, or belongs to somebody else")
    except OSError as error:
        raise ResultError(f"--out must name a file that can be written, got {path}: {error}.") from error


def write_json(path: Path, value: Any) -> None:
    """Write so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> dict[str, Any]:
    """The result file at `path`.

    Raises:
        ResultError: If there is none, or one of another schema, or if a field of it is missing.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: not a result file ({error}).") from error
    found = result.get("schema") if isinstance(result, dict) else None
    if found != SCHEMA:
        raise ResultError(f"{path}: schema must be {SCHEMA}, got {found}; measure again, or use the matching checkout.")
    missing = [name for name in _TOP if name not in result]
    seen: set[tuple[str, str, str]] = set()
    for number, row in enumerate(() if missing else result["rows"]):
        fields = ("provider", "status", "message", *_IDENTITY, *_VALUES)
        missing += [f"rows[{number}].{name}" for name in fields if name not in row]
        if missing:
            break
        if row["status"] == OK and not row["call_us"]:
            raise ResultError(f"{path}: damaged: rows[{number}] is {OK} and has no call_us.")
        if key(row) in seen:
            raise ResultError(f"{path}: damaged: {', '.join(key(row))} has several rows.")
        seen.add(key(row))
    if missing:
        raise ResultError(f"{path}: damaged: {', '.join(missing)} is missing.")
    return result
