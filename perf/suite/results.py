"""The result file: one JSON object, whose meaning the number `schema` stands for.

`created` (end of the run, ISO 8601, UTC), `options`, `seconds` and `complete` (false after Ctrl-C) are of the run,
`package`, `device`, `environment` and `clocks` (of each GPU after every unit) of the functions below. `providers`
maps each name to null, or to why it could not be used; `overhead` is the result of `perf.custom_ops.measure_overhead`
on a CPU, or null; `rows` has one for each provider of each unit that was measured.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from perf.ops.workload import Workload

if TYPE_CHECKING:
    from perf.suite.plan import Unit

ROOT = Path(__file__).resolve().parents[2]
# Their versions change what is measured.
PACKAGES = ("torch", "triton", "optree", "numpy", "liger-kernel", "quack-kernels", "flash-attn", "apex")

SCHEMA = 3
OK, WRONG, CANNOT, ERROR = "ok", "wrong", "cannot", "error"
_VALUES = (
    *("message", "error", "tolerance", "device_us", "call_us", "vs_torch_device", "vs_torch_call"),
    *("minimum_bytes", "gpu", "gbps", "copy_gbps", "fraction_of_copy", "gflops"),
)

Row = dict[str, Any]


def row_for(unit: Unit, provider: str, status: str = OK, **values: Any) -> Row:
    """A row with every field; those not given are null.

    `error` is the largest over the largest value of a result, against float64. `device_us` (by CUDA graph) and
    `call_us` have median, p20, p80 and samples, and so have `vs_torch_device` and `vs_torch_call`, these times over
    torch's. `gbps` and `gflops` are `minimum_bytes` and the operations of attention's products over the device time,
    or the call time on a CPU; `copy_gbps` is of a copy of as many bytes on the same device, which `gpu` names.
    """
    workload, mode = unit
    op, columns = (workload.op, workload.num_cols) if isinstance(workload, Workload) else (workload.model, None)
    row: Row = {"workload": workload.key, "op": op, "columns": columns, "mode": mode}
    return {**row, "provider": provider, "status": status, **dict.fromkeys(_VALUES), **values}


def write_json(path: Path, value: Any) -> None:
    """Write a file that every JSON reader takes: without NaN."""
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """The result file at `path`, which must be of this schema."""
    result = json.loads(path.read_text(encoding="utf-8"))
    found = result.get("schema") if isinstance(result, dict) else None
    if found != SCHEMA:
        raise ValueError(f"{path}: schema must be {SCHEMA}, got {found}; measure again, or use the matching checkout.")
    return result


def describe(device: str) -> dict[str, Any]:
    """The device that is measured: for GPUs those that this process sees, which must be of one kind."""
    if device == "cpu":
        return {"type": "cpu", "name": _processor()}
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda: torch sees no CUDA device; --device cpu compares with torch on the CPU.")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = {(one.name, f"{one.major}.{one.minor}", one.multi_processor_count, one.L2_cache_size) for one in found}
    if len(kinds) > 1:
        names = "; ".join(sorted(kind[0] for kind in kinds))
        raise RuntimeError(f"--device cuda: CUDA_VISIBLE_DEVICES must choose GPUs of one kind, got {names}.")
    values = zip(("name", "capability", "processors", "l2_bytes"), kinds.pop(), strict=True)
    # An index is not a name: CUDA counts the fastest GPU first, NVML goes by the bus.
    return {"type": "cuda", **dict(values), "gpus": [f"GPU-{str(one.uuid).removeprefix('GPU-')}" for one in found]}


def clocks(uuid: str) -> dict[str, Any]:
    """Driver and clocks in MHz of a GPU; nothing where NVML cannot be asked."""
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        clock = partial(pynvml.nvmlDeviceGetClockInfo, gpu)
        found = {"sm_mhz": clock(pynvml.NVML_CLOCK_SM), "memory_mhz": clock(pynvml.NVML_CLOCK_MEM)}
        return {"driver": pynvml.nvmlSystemGetDriverVersion(), **found}
    # A driver without NVML, and one that does not tell: the page says that clocks are not known.
    except Exception:
        return {}


def package() -> dict[str, Any]:
    """Version of the package that is measured, and revision of its checkout and whether files of it have changed."""
    from primitives import __version__

    # A package that was installed into some other repository has no revision of its own.
    revision = None
    if (ROOT / ".git").exists() and (git := shutil.which("git")):
        command = [git, "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        revision = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    dirty = None if revision is None else revision.endswith("-dirty")
    return {"version": __version__, "revision": revision and revision.removesuffix("-dirty"), "dirty": dirty}


def environment() -> dict[str, Any]:
    """Versions, processor and threads."""
    installed = {each.name: each.version for each in metadata.distributions()}
    return {
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),
        "threads": torch.get_num_threads(),
        "clock": "processor time" if torch.get_num_threads() == 1 else "wall time",
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
