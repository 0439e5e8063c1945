"""The machine: which GPUs there are, and what the result file says of it."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# What of the checkout changes what is measured.
SOURCES = ("primitives", "triton_kernels", "perf")
PACKAGES = ("torch", "triton", "optree", "numpy", "liger-kernel", "quack-kernels", "flash-attn", "apex")
VARIABLES = ("PRIMITIVES_", "TRITON_", "TORCHINDUCTOR_", "CUDA_", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def describe(device: str) -> dict[str, Any]:
    """The device that is measured: for GPUs those that this process sees, which must be of one kind.

    Initializes CUDA for a GPU.

    Raises:
        RuntimeError: If there is no GPU where one is asked for, or if there are several kinds.
    """
    if device == "cpu":
        return {"type": "cpu", "name": _processor()}
    if not torch.cuda.is_available():
        raise RuntimeError(
            "--device cuda: torch sees no CUDA device; --device cpu compares with torch on the processor."
        )
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


def usable_cores() -> int:
    """Processor cores that this process may run on: of those of the machine, its affinity may leave a few."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, Any]:
    """Versions, processor and the variables that change what is measured."""
    installed = {each.name: each.version for each in metadata.distributions()}
    # Where caches lie changes nothing, and is nobody's business.
    named = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "clock": "processor time" if torch.get_num_threads() == 1 else "wall time",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
        "variables": {name: value for name, value in named.items() if os.sep not in value},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
