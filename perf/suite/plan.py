"""Which units a run has, in which order, and how much time each may take."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from perf import workloads
from perf.workloads import BASIC_MODES, TrainingWorkload, Workload

# Seconds of a run, by device and whether it is quick. They leave room for the start of workers and the report.
SECONDS = {("cuda", False): 510.0, ("cuda", True): 92.0, ("cpu", False): 165.0, ("cpu", True): 90.0}
# Of a run on a GPU, what goes to compiling in parallel before anything is measured.
COMPILE_SHARE = 0.4
# Of a run on a CPU, seconds of the bench of the front end's overhead, by whether it is quick, and their share at most.
OVERHEAD_SECONDS = {True: 20.0, False: 40.0}
OVERHEAD_SHARE = 0.25
# Of a unit's time, what goes to samples; the rest to tensors, first calls, the check, captures and warm-up.
SAMPLING_SHARE = {"cuda": 0.25, "cpu": 0.35}
MAX_SAMPLING_SECONDS = 4.0
# Of a tensor; the targets speak of these, smaller ones are bound by launches and caches.
LARGE_BYTES = 32e6
CPU_MODES = ("forward", "forward_backward", "jvp", "hvp", "training_step")
CPU_PROVIDERS = ("primitives", "torch")
GPU_PROVIDERS = (*CPU_PROVIDERS, "torch.compile", "torch.compile max-autotune", "liger", "quack", "flash-attn", "apex")
# Tuning takes longer than anything else, for little at kernels that are bound by memory: unless these are asked for,
# they take part where a workload stands for its family, in its basic modes, and in no quick run.
TUNED = ("torch.compile max-autotune",)
NOT_TUNED = f"tuned at the workloads that stand for their families, in {' and '.join(BASIC_MODES)}; see --providers"
# Peers that have nothing else, and those whose first calls take no longer than others.
LIBRARIES = ("liger", "quack", "flash-attn", "apex")
LIBRARY_OPS = ("layer_norm",)
NOT_COMPILED = ("torch", "apex")


class OptionError(ValueError):
    """An option of a run that means nothing."""


@dataclass(frozen=True)
class Options:
    """What a run was asked for; empty tuples and None stand for the defaults of the device.

    Attributes:
        device: `cpu` or `cuda`.
        quick: Whether to measure few workloads.
        only: Words of which a workload's key must contain one.
        modes: Modes.
        providers: Providers.
        seconds: Time that the run may take.
        workers: Processes that compile, and that prepare what is measured.
    """

    device: str
    quick: bool = False
    only: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    seconds: float | None = None
    workers: int | None = None


def total_seconds(options: Options) -> float:
    """Time of the whole run."""
    return SECONDS[options.device, options.quick] if options.seconds is None else options.seconds


def providers(options: Options) -> tuple[str, ...]:
    """Names of the providers that are asked for, this package first."""
    if options.providers:
        return tuple(dict.fromkeys(options.providers))
    names = GPU_PROVIDERS if options.device == "cuda" else CPU_PROVIDERS
    return tuple(name for name in names if not (options.quick and name in TUNED))


def find(key: str, device: str) -> Workload | TrainingWorkload:
    """The workload of that key.

    Raises:
        KeyError: If the device has none.
    """
    return {workload.key: workload for workload in _candidates(device)}[key]


def _candidates(device: str) -> tuple[Workload | TrainingWorkload, ...]:
    if device == "cuda":
        everything = (*workloads.GPU_WORKLOADS, *workloads.GPU_TRAINING)
    else:
        everything = (*workloads.CPU_WORKLOADS, *workloads.CPU_TRAINING)
    return tuple(sorted(everything, key=_rank))


def _rank(workload: Workload | TrainingWorkload) -> int:
    """Place in a run that may end early: what stands for the rest, then what the targets speak of, then the others."""
    if workload.quick:
        return 0
    return 1 if isinstance(workload, TrainingWorkload) or workload.pass_bytes >= LARGE_BYTES else 2


def _modes(workload: Workload | TrainingWorkload, options: Options) -> tuple[str, ...]:
    if isinstance(workload, TrainingWorkload):
        return () if options.modes and "training_step" not in options.modes else ("training_step",)
    wanted = options.modes or (CPU_MODES if options.device == "cpu" else _gpu_modes(workload, options))
    return tuple(mode for mode in dict.fromkeys(wanted) if mode != "training_step")


def _gpu_modes(workload: Workload, options: Options) -> tuple[str, ...]:
    """What a run measures of a workload if it is not asked for certain modes; one that is asked for itself, whole."""
    full = not options.quick and (workload.quick or workload.whole or options.only)
    if workload.telling or full:
        return workload.modes
    return tuple(mode for mode in workload.modes if mode in BASIC_MODES)


def suite(device: str) -> list[tuple[Workload | TrainingWorkload, str]]:
    """Every workload and mode that a full run on a device measures."""
    options = Options(device)
    return [(workload, mode) for workload in _candidates(device) for mode in _modes(workload, options)]


def compile_items(plan: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Units and providers to compile, in order: whoever tunes for long comes when the others are done."""
    return [
        (unit, name)
        for slow in (False, True)
        for unit in plan["units"]
        for name in unit["compiling"]
        if (name in TUNED) == slow
    ]


def make_plan(options: Options, available: dict[str, str | None]) -> dict[str, Any]:
    """The units of a run with their budgets, as it is written for the workers.

    Args:
        options: What was asked for.
        available: Providers, and why some cannot be used.

    Raises:
        OptionError: If an option means nothing, or nothing is left to measure.
    """
    check(options)
    chosen = [w for w in _candidates(options.device) if (w.quick or not options.quick) and _wanted(w.key, options.only)]
    if options.only and options.quick and not chosen:
        chosen = [w for w in _candidates(options.device) if _wanted(w.key, options.only)]
    units = [_record(workload, mode, options) for workload in chosen for mode in _modes(workload, options)]
    if not units:
        raise OptionError(f"no workload is left: --only {' '.join(options.only)} --modes {' '.join(options.modes)}.")
    names = [name for name in providers(options) if available[name] is None]
    if not names:
        raise OptionError(f"no provider is left: {available}.")
    for unit in units:
        unit["left_out"] = _left_out(unit, names, options)
        unit["compiling"] = _compiling(unit, names, options.device)
    compile_seconds = COMPILE_SHARE * total_seconds(options) if any(unit["compiling"] for unit in units) else 0.0
    # The bench of overheads measures no workload: it belongs to runs that measure all of them.
    overhead_seconds = 0.0
    if options.device == "cpu" and not options.only:
        overhead_seconds = min(OVERHEAD_SECONDS[options.quick], OVERHEAD_SHARE * total_seconds(options))
    per_unit = (total_seconds(options) - compile_seconds - overhead_seconds) / len(units)
    for number, unit in enumerate(units):
        unit["id"] = f"{number:04d}"
        unit["seconds"] = min(per_unit * SAMPLING_SHARE[options.device], MAX_SAMPLING_SECONDS)
    return {
        "options": asdict(options) | {"seconds": total_seconds(options)},
        "device": options.device,
        "providers": names,
        "available": available,
        "compile_seconds": compile_seconds,
        "overhead_seconds": overhead_seconds,
        "units": units,
    }


def _left_out(unit: dict[str, Any], names: list[str], options: Options) -> dict[str, str]:
    """Providers that take no part in a unit by design, and why."""
    if options.providers:
        return {}
    telling = getattr(find(unit["workload"], options.device), "telling", False) and unit["mode"] in BASIC_MODES
    return {name: NOT_TUNED for name in names if name in TUNED and not telling}


def _compiling(unit: dict[str, Any], names: list[str], device: str) -> list[str]:
    """Providers whose first calls in a unit are worth a phase of their own."""
    eager = NOT_COMPILED if device == "cuda" else CPU_PROVIDERS
    return [name for name in taking_part(unit, names) if name not in eager]


def taking_part(unit: dict[str, Any], names: list[str]) -> list[str]:
    """Providers that have the op of a unit and are not left out of it."""
    without = set(unit["left_out"]) | (set() if unit["op"] in LIBRARY_OPS else set(LIBRARIES))
    return [name for name in names if name not in without]


def _wanted(key: str, only: tuple[str, ...]) -> bool:
    return not only or any(words.lower() in key.lower() for words in only)


def check(options: Options) -> None:
    """See to it that options mean something.

    Raises:
        OptionError: If a mode or provider is unknown, or a number is none of its kind.
    """
    unknown = [mode for mode in options.modes if mode not in workloads.MODES]
    if unknown:
        raise OptionError(f"--modes must be among {', '.join(workloads.MODES)}, got {', '.join(unknown)}.")
    unknown = [name for name in options.providers if name not in GPU_PROVIDERS]
    if unknown:
        raise OptionError(f"--providers must be among {', '.join(GPU_PROVIDERS)}, got {', '.join(unknown)}.")
    if options.seconds is not None and not 0 < options.seconds < math.inf:
        raise OptionError(f"--seconds must be a finite number above 0, got {options.seconds:g}.")
    if options.workers is not None and options.workers < 1:
        raise OptionError(f"--workers must be at least 1, got {options.workers}.")


def _record(workload: Workload | TrainingWorkload, mode: str, options: Options) -> dict[str, Any]:
    record: dict[str, Any] = {"workload": workload.key, "name": workload.name, "mode": mode}
    if isinstance(workload, TrainingWorkload):
        dtype = "bfloat16 autocast" if options.device == "cuda" else "float32"
        return record | {
            "op": workload.model,
            "shape": [workload.batch],
            "dtype": dtype,
            "layout": "",
            "columns": None,
        }
    return record | {
        "op": workload.op,
        "shape": list(workload.shape),
        "dtype": workload.dtype,
        "layout": "channels_last" if workload.channels_last else "",
        "columns": workload.num_cols,
    }
