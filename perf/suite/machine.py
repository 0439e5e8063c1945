"""The machine: which GPUs there are, who may measure on one, and what the result file says of it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
# What of the checkout changes what is measured.
SOURCES = ("primitives", "triton_kernels", "perf")
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

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA stops reading at the first name that is none.
        return [name.strip() for name in visible.split(",") if name.strip()][:count]
    return [str(index) for index in range(count)]


def gpu_of_worker(worker: str, gpus: list[str]) -> str:
    """The GPU that an xdist worker, `gw3`, owns; workers beyond the number of GPUs share them evenly."""
    number = int(worker.removeprefix("gw") or 0) if worker.startswith("gw") else 0
    return gpus[number % len(gpus)]


def gpu_identity(gpu: str) -> str:
    """What tells a GPU from all others, however it was asked for, as part of a file name.

    Initializes CUDA, in a process that sees no other GPU than this one.

    Args:
        gpu: What CUDA_VISIBLE_DEVICES takes for it.
    """
    # Of two notations of one UUID only the prefix and the case differ; a file name takes no other characters.
    words = (hardware_name(gpu, 0) or gpu).lower().removeprefix("gpu-")
    return re.sub(r"[^a-z0-9-]+", "-", words)


def hardware_name(gpu: str, index: int) -> str | None:
    """What nvidia-smi and all processes call a GPU: its UUID, or its address on the PCI bus; None if neither is known.

    An index is no name: CUDA counts the fastest GPU first, nvidia-smi goes by the bus, and CUDA_VISIBLE_DEVICES says
    which of them there are. Initializes CUDA.

    Args:
        gpu: What CUDA_VISIBLE_DEVICES takes for it.
        index: Of the GPU among those that this process sees.
    """
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return f"GPU-{str(uuid).removeprefix('GPU-')}"
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in address:
        return "{:08x}:{:02x}:{:02x}.0".format(*address)
    # A whole UUID names a GPU to everybody; its beginning, which CUDA takes too, does not.
    return gpu if re.fullmatch(r"GPU(-[0-9a-f]+){5}", gpu, re.IGNORECASE) else None


def one_kind(gpus: list[str]) -> dict[str, str | None]:
    """The hardware's names of the GPUs of a run, which must be of one kind: a result is of one. Initializes CUDA.

    Args:
        gpus: As `visible_gpus` has them.

    Raises:
        RuntimeError: If they are of several kinds.
    """
    kinds: dict[tuple, list[str]] = {}
    for index, gpu in enumerate(gpus):
        description = device_description(gpu, index)
        kind = tuple(description[name] for name in ("name", "capability", "processors", "l2_bytes"))
        kinds.setdefault(kind, []).append(gpu)
    if len(kinds) > 1:
        found = "; ".join(f"{', '.join(same)}: {kind[0]}, {kind[2]} processors" for kind, same in kinds.items())
        raise RuntimeError(
            f"--device cuda: the GPUs of a run must be of one kind, got {found}. "
            "CUDA_VISIBLE_DEVICES chooses among them."
        )
    return {gpu: hardware_name(gpu, index) for index, gpu in enumerate(gpus)}


def clocks(name: str | None) -> dict[str, str]:
    """What nvidia-smi says of a GPU: clocks, power, temperature, driver; nothing where it cannot be asked.

    Args:
        name: As `hardware_name` has it.
    """
    values = _ask_nvidia_smi(name, CLOCKS)
    return dict(zip(CLOCKS, values, strict=True)) if values else {}


def _ask_nvidia_smi(name: str | None, names: Sequence[str]) -> list[str]:
    """The values of these names; nothing if it does not answer with as many."""
    program = shutil.which("nvidia-smi")
    if program is None or name is None:
        return []
    command = [program, f"--id={name}", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    values = [value.strip() for value in answer.partition("\n")[0].split(",")]
    return values if len(values) == len(names) and all(values) else []


def package() -> dict[str, Any]:
    """Version of the package that is measured, and revision of its checkout; null where it is none.

    `dirty` says whether sources differ from the revision, untracked ones included.
    """
    from primitives import __version__

    revision = _git("rev-parse", "HEAD")
    changes = None if revision is None else _git("status", "--porcelain", "--", *SOURCES)
    dirty = None if changes is None else bool(changes)
    return {"version": __version__, "revision": revision, "dirty": dirty}


def _git(*arguments: str) -> str | None:
    """What git says of the checkout; None if it is none, or there is no git."""
    # A package that was installed into some other repository has no revision of its own.
    if not (ROOT / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def usable_cores() -> int:
    """Processor cores that this process may run on: of those of the machine, its affinity may leave a few."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment() -> dict[str, Any]:
    """Versions, processor and the variables that change what is measured."""
    import torch

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
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


def device_description(gpu: str | None, index: int = 0) -> dict[str, Any]:
    """The device that is measured: name, processors, memory, cache. Initializes CUDA for a GPU.

    Args:
        gpu: What CUDA_VISIBLE_DEVICES takes for it; None for the processor.
        index: Of the GPU among those that this process sees; a worker sees one.
    """
    if gpu is None:
        return {"type": "cpu", "name": _processor()}
    import torch

    properties = torch.cuda.get_device_properties(index)
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
