"""The machine: which GPUs there are, who may measure on one, and what the result file says of it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from filelock import FileLock

CLOCKS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "persistence_mode",
)
PACKAGES = ("torch", "triton", "optree", "numpy", "liger-kernel", "quack-kernels", "flash-attn", "apex")
VARIABLES = ("PRIMITIVES_", "TRITON_", "TORCHINDUCTOR_", "CUDA_", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES takes for each GPU that this process may use."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(index) for index in range(torch.cuda.device_count())]


def gpu_of_worker(worker: str, gpus: list[str]) -> str:
    """The GPU that an xdist worker, `gw3`, owns; workers beyond the number of GPUs share them evenly."""
    number = int(worker.removeprefix("gw") or 0) if worker.startswith("gw") else 0
    return gpus[number % len(gpus)]


def device_lock(gpu: str | None) -> FileLock:
    """What a process must hold to measure on a GPU, or on the CPU if None; the same for every run on this machine."""
    from filelock import FileLock

    name = "cpu" if gpu is None else f"gpu-{gpu}"
    return FileLock(Path(tempfile.gettempdir()) / f"torch-training-primitives-perf-{name}.lock")


def clocks(gpu: str | None) -> dict[str, str]:
    """What nvidia-smi says of a GPU: clocks, power, temperature, driver; nothing where it cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None or gpu is None:
        return {}
    command = [program, f"--id={gpu}", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(CLOCKS, (value.strip() for value in answer.splitlines()[0].split(",")), strict=False))


def environment() -> dict[str, Any]:
    """Versions, processor and the variables that change what is measured."""
    import torch

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "processor time" if torch.get_num_threads() == 1 else "wall time",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        # Where caches lie changes nothing, and is nobody's business.
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and os.sep not in value
        },
    }


def device_description(gpu: str | None) -> dict[str, Any]:
    """The device that is measured: name, processors, memory, cache. Initializes CUDA for a GPU."""
    if gpu is None:
        return {"type": "cpu", "name": _processor()}
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
