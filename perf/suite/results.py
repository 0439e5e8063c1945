"""The result file, one JSON object of the schema below, and what it says of the machine.

schema       SCHEMA; `load` refuses another number, and a file that lacks a field
created      when the run ended, ISO 8601, UTC
options      what the run was asked for
seconds      total: how long it took
complete     whether every planned unit was measured (false after Ctrl-C or a deadline)
package      version of this package; revision of its checkout and whether sources differ from it, null outside of one
device       type, name, and for GPUs capability, processors, memory_bytes, l2_bytes, which are those of all GPUs of the
             run, and gpus: their UUIDs; null if nothing was measured
environment  versions, processor, variables that change what is measured
clocks       of each GPU, after every unit: clocks, power, temperature, driver; empty where NVML cannot be asked
providers    name -> null, or why it could not be used
calibration  GPU, or cpu -> bytes -> copy_gbps, read_gbps, two_reads_one_write_gbps of it, at exactly that many bytes
             read and written
overhead     of a CPU run: what `perf.custom_ops.measure_overhead` returns, or null
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
  minimum_bytes    what the mode cannot do without, see perf.suite.modes; null for a training step
  gbps             minimum_bytes over the device time (null without one), on a CPU over the call time
  gpu              on which it was measured, as `device` names it; null on a CPU, and where nobody came to it
  copy_gbps        of a copy of as many bytes on the same device in the same run
  fraction_of_copy gbps over copy_gbps
  peak_bytes       memory of a step beyond its inputs; null on a CPU
  launches         kernels, copies and memsets of a step; null where the driver does not say
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
# Of the checkout and of the machine, what changes what is measured.
SOURCES = ("primitives", "triton_kernels", "perf")
PACKAGES = ("torch", "triton", "optree", "numpy", "liger-kernel", "quack-kernels", "flash-attn", "apex")
VARIABLES = ("PRIMITIVES_", "TRITON_", "TORCHINDUCTOR_", "CUDA_", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

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
    *("gpu", "gbps", "copy_gbps", "fraction_of_copy", "peak_bytes", "launches"),
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
    fields = ("provider", "status", "message", *_IDENTITY, *_VALUES)
    missing = [name for name in _TOP if name not in result]
    for number, row in enumerate(() if missing else result["rows"]):
        missing += [f"rows[{number}].{name}" for name in fields if name not in row]
    if missing:
        raise ResultError(f"{path}: damaged: {', '.join(missing[:9])} is missing.")
    return result


def describe(device: str) -> dict[str, Any]:
    """The device that is measured: for GPUs those that this process sees, which must be of one kind.

    Initializes CUDA for a GPU.

    Raises:
        RuntimeError: If there is no GPU where one is asked for, or if there are several kinds.
    """
    if device == "cpu":
        return {"type": "cpu", "name": _processor()}
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda: torch sees no CUDA device; --device cpu compares with torch on the CPU.")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = {(one.name, f"{one.major}.{one.minor}", one.multi_processor_count, one.L2_cache_size) for one in found}
    if len(kinds) > 1:
        names = "; ".join(f"{name}, {processors} processors" for name, _, processors, _ in sorted(kinds))
        raise RuntimeError(
            f"--device cuda: the GPUs of a run must be of one kind, got {names}. CUDA_VISIBLE_DEVICES chooses among "
            "them."
        )
    values = zip(("name", "capability", "processors", "l2_bytes"), kinds.pop(), strict=True)
    # An index is not a name: CUDA counts the fastest GPU first, NVML goes by the bus.
    gpus = [f"GPU-{str(one.uuid).removeprefix('GPU-')}" for one in found]
    return {"type": "cuda", **dict(values), "memory_bytes": found[0].total_memory, "gpus": gpus}


def clocks(uuid: str) -> dict[str, str]:
    """Clocks, power, temperature and driver of a GPU; nothing where NVML cannot be asked."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        driver = pynvml.nvmlSystemGetDriverVersion()
        return {
            "driver_version": driver if isinstance(driver, str) else driver.decode(),
            "clocks.sm": f"{pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)} MHz",
            "clocks.mem": f"{pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)} MHz",
            "power.draw": f"{pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000:.0f} W",
            "temperature.gpu": f"{pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)}",
        }
    except pynvml.NVMLError:
        return {}


def package() -> dict[str, Any]:
    """Version of the package that is measured, and revision of its checkout; null where there is none.

    `dirty` says whether sources differ from the revision, untracked ones included.
    """
    from primitives import __version__

    revision = _git("rev-parse", "HEAD")
    changes = None if revision is None else _git("status", "--porcelain", "--", *SOURCES)
    return {"version": __version__, "revision": revision, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    # A package that was installed into some other repository has no revision of its own.
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment() -> dict[str, Any]:
    """Versions, processor and the variables that change what is measured."""
    installed = {each.name: each.version for each in metadata.distributions()}
    # Where caches lie changes nothing, and is nobody's business.
    named = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "processor time" if torch.get_num_threads() == 1 else "wall time",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "variables": {name: value for name, value in named.items() if os.sep not in value},
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
