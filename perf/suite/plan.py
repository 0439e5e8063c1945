"""Which units a run has, in which order, and who takes part in each.

A unit is one workload in one mode. The plan follows from the options alone, and goes to the workers as JSON.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from perf import workloads as w
from perf.suite.results import SKIPPED
from perf.workloads import TrainingWorkload, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Seconds of a run, by device and whether it is quick.
SECONDS = {("cuda", False): 510.0, ("cuda", True): 92.0, ("cpu", False): 165.0, ("cpu", True): 90.0}
# Of a run on a CPU, seconds of the bench of the front end's overhead, and their share at most.
OVERHEAD_SECONDS, OVERHEAD_SHARE = 40.0, 0.25
# Of a tensor; the targets speak of these, smaller ones are bound by launches and caches.
LARGE_BYTES = 32e6
# Tuning takes longer than anything else, for little at kernels that are bound by memory: unless it is asked for, it
# takes part where a workload stands for its family, in its basic modes, and in no quick run.
NOT_TUNED = (
    f"left out: tuned at the workloads that stand for their families, in {' and '.join(w.BASIC_MODES)}; see --providers"
)

Either = Workload | TrainingWorkload
Unit = dict[str, Any]


class OptionError(ValueError):
    """An option of a run that means nothing."""


@dataclass(frozen=True)
class Options:
    """The options of a run; empty tuples and None stand for the defaults of the device.

    Attributes:
        device: `cpu` or `cuda`.
        quick: Whether to measure few workloads.
        only: Words of which a workload's key must contain one.
        modes: Modes.
        providers: Providers.
        seconds: Time that the run may take.
    """

    device: str
    quick: bool = False
    only: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    seconds: float | None = None

    @property
    def total_seconds(self) -> float:
        """Time of the whole run."""
        return SECONDS[self.device, self.quick] if self.seconds is None else self.seconds

    @property
    def names(self) -> tuple[str, ...]:
        """The providers that are asked for."""
        if self.providers:
            return tuple(dict.fromkeys(self.providers))
        names = w.PROVIDERS if self.device == "cuda" else (w.OURS, w.EAGER)
        return tuple(name for name in names if not (self.quick and name == w.TUNED))

    def check(self) -> None:
        """See to it that the options mean something.

        Raises:
            OptionError: If a mode or provider is unknown, or a number is out of its range.
        """
        for name, known in (("modes", w.MODES), ("providers", w.PROVIDERS)):
            if unknown := [value for value in getattr(self, name) if value not in known]:
                raise OptionError(f"--{name} must be among {', '.join(known)}, got {', '.join(unknown)}.")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise OptionError(f"--seconds must be a finite number above 0, got {self.seconds:g}.")


def find(key: str, device: str) -> Either:
    """The workload of that key.

    Raises:
        KeyError: If the device has none.
    """
    return {workload.key: workload for workload in _candidates(device)}[key]


def _candidates(device: str) -> list[Either]:
    """All workloads, in the order of a run that may end early: what stands for the rest, large ones, the others."""
    kind = device.replace("cuda", "gpu").upper()
    everything = [*getattr(w, f"{kind}_WORKLOADS"), *getattr(w, f"{kind}_TRAINING")]
    return sorted(everything, key=lambda each: 0 if each.quick else 1 if _is_large(each) else 2)


def _is_large(workload: Either) -> bool:
    return isinstance(workload, TrainingWorkload) or workload.pass_bytes >= LARGE_BYTES


def _modes(workload: Either, options: Options) -> tuple[str, ...]:
    if isinstance(workload, TrainingWorkload):
        return (w.TRAINING,) if w.TRAINING in (options.modes or (w.TRAINING,)) else ()
    wanted = options.modes or w.CPU_MODES
    if not options.modes and options.device == "cuda":
        # A workload that is asked for itself has all of its modes.
        whole = not options.quick and (workload.quick or workload.whole or options.only)
        wanted = [mode for mode in workload.modes if workload.telling or whole or mode in w.BASIC_MODES]
    return tuple(mode for mode in dict.fromkeys(wanted) if mode != w.TRAINING)


def suite(device: str) -> list[tuple[Either, str]]:
    """Every workload and mode that a full run on a device measures."""
    options = Options(device)
    return [(workload, mode) for workload in _candidates(device) for mode in _modes(workload, options)]


def make_plan(options: Options, available: Mapping[str, str | None]) -> dict[str, Any]:
    """The units of a run, as it is written for the workers.

    Args:
        options: The options of the run.
        available: Providers, and why some cannot be used.

    Raises:
        OptionError: If an option means nothing, or nothing is left to measure.
    """
    options.check()

    def is_asked_for(key: str) -> bool:
        return not options.only or any(words.lower() in key.lower() for words in options.only)

    asked = [each for each in _candidates(options.device) if is_asked_for(each.key)]
    chosen = [each for each in asked if each.quick or not options.quick] or (asked if options.only else [])
    names = [name for name in options.names if available[name] is None]
    units = [_unit(workload, mode, names, options) for workload in chosen for mode in _modes(workload, options)]
    for number, unit in enumerate(units):
        unit["number"] = number
    if not units:
        raise OptionError(f"no workload is left: --only {' '.join(options.only)} --modes {' '.join(options.modes)}.")
    if not names:
        raise OptionError(f"no provider is left: {available}.")
    return {
        "options": asdict(options) | {"seconds": options.total_seconds},
        "device": options.device,
        "providers": names,
        "available": dict(available),
        # The bench of overheads measures no workload: it belongs to runs that measure all of them.
        "overhead": options.device == "cpu" and not options.only,
        "units": units,
    }


def _unit(workload: Either, mode: str, names: Sequence[str], options: Options) -> Unit:
    """The record of a unit, which becomes part of its rows."""
    telling = getattr(workload, "telling", False) and mode in w.BASIC_MODES
    left_out = [name for name in names if name == w.TUNED and not telling and not options.providers]
    unit: Unit = {"id": f"{workload.key}: {mode}", "workload": workload.key, "name": workload.name, "mode": mode}
    if isinstance(workload, TrainingWorkload):
        dtype = "bfloat16 autocast" if options.device == "cuda" else "float32"
        unit |= {"op": workload.model, "shape": [workload.batch], "dtype": dtype, "layout": "", "columns": None}
    else:
        layout = "channels_last" if workload.channels_last else ""
        unit |= {"op": workload.op, "shape": list(workload.shape), "dtype": workload.dtype, "layout": layout}
        unit["columns"] = workload.num_cols
    unit["left_out"] = dict.fromkeys(left_out, (SKIPPED, NOT_TUNED))
    unit["taking_part"] = [
        n for n in names if n not in left_out and (unit["op"] == "layer_norm" or n not in w.LIBRARIES)
    ]
    return unit


def summary(plan: dict[str, Any]) -> str:
    """How many units a plan has, and which workloads have more than the basic modes, in lines."""
    units = plan["units"]

    def counted(values: Sequence[str]) -> str:
        return ", ".join(f"{name} {count}" for name, count in Counter(values).items())

    modes: dict[str, list[str]] = {}
    for unit in units:
        modes.setdefault(unit["workload"], []).append(unit["mode"])
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, found in modes.items():
        keys.setdefault(tuple(found), []).append(key)
    lines = [
        f"{len(units)} units of {len(modes)} workloads: {counted([unit['mode'] for unit in units])}",
        f"providers, with their units: {counted([name for unit in units for name in unit['taking_part']])}",
    ]
    for found in sorted(keys, key=lambda found: (-len(found), found)):
        lines += [f"{', '.join(found)}:", *(f"  {key}" for key in keys[found])]
    return "\n".join(lines)
