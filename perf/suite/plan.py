"""Which units a run has, in which order: a unit is one workload in one mode. It follows from the options alone."""

from __future__ import annotations

from dataclasses import dataclass

from perf import workloads as w
from perf.ops.workload import Workload
from perf.workloads import TrainingWorkload

Unit = tuple[Workload | TrainingWorkload, str]


@dataclass(frozen=True)
class Options:
    """The options of a run, as `python -m perf run` documents them; empty tuples stand for the device's defaults."""

    device: str
    quick: bool = False
    only: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The providers that are asked for: who tunes for long only by name."""
        everybody = tuple(name for name in w.PROVIDERS if name != w.TUNED)
        return self.providers or (everybody if self.device == "cuda" else (w.OURS, w.EAGER, w.MATH))


def unit_id(unit: Unit) -> str:
    """Name of a unit, as of its test."""
    return f"{unit[0].key}: {unit[1]}"


def all_workloads(device: str) -> list[Workload | TrainingWorkload]:
    """Those of a device, in the order of a run that may be ended early: the quick ones stand for the rest."""
    operations = (*w.GPU_WORKLOADS, *w.COMPOSED_WORKLOADS) if device == "cuda" else w.CPU_WORKLOADS
    training = w.GPU_TRAINING if device == "cuda" else w.CPU_TRAINING
    return sorted([*operations, *training], key=lambda workload: not workload.quick)


def _modes(workload: Workload | TrainingWorkload, options: Options) -> tuple[str, ...]:
    if isinstance(workload, TrainingWorkload):
        return (w.TRAINING,) if w.TRAINING in (options.modes or w.MODES) else ()
    if options.modes or options.device == "cpu":
        has = (*workload.modes, "forward_backward")
        default = (*w.CPU_MODES, *w.MODES[4:6]) if workload.record.products else w.CPU_MODES
        return tuple(mode for mode in options.modes or default if mode in has)
    # A workload that is asked for itself has all of its modes.
    return workload.modes if workload.quick or workload.whole or options.only else w.BASIC_MODES


def make_plan(options: Options) -> list[Unit]:
    """The units of a run, or, with default options, of all that the targets speak of."""
    for name, known in (("modes", w.MODES), ("providers", w.PROVIDERS)):
        if unknown := [value for value in getattr(options, name) if value not in known]:
            raise ValueError(f"--{name} must be among {', '.join(known)}, got {', '.join(unknown)}.")
    chosen = [
        workload
        for workload in all_workloads(options.device)
        if (workload.quick or not options.quick or options.only)
        and (not options.only or any(words.lower() in workload.key.lower() for words in options.only))
    ]
    units = [(workload, mode) for workload in chosen for mode in _modes(workload, options)]
    if not units:
        raise ValueError(f"no workload is left: --only {' '.join(options.only)} --modes {' '.join(options.modes)}.")
    return units
