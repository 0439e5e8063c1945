"""How long a run should take: counts from its plan, times a table of assumed costs.

The costs are assumptions, of an H200 beside 16 cores, and no measurements; they are there so that a plan which cannot
fit its time shows before it is run. What a run has really taken is in its result.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from perf.suite.bytes import minimum_bytes
from perf.suite.plan import TUNED, compile_items, find, taking_part
from perf.workloads import BASIC_MODES, TrainingWorkload

# Seconds until the workers of a phase have imported torch and collected the cases, by device.
START_SECONDS = {"cuda": 10.0, "cpu": 8.0}
# Part of the workers' time that goes to items: they share caches, locks and memory.
UTILIZATION = 0.8
# Processor seconds of a first call with cold caches, by provider, in the basic modes and in the others.
COMPILE_SECONDS = {
    "primitives": (1.5, 3.0),
    "torch.compile": (4.5, 9.0),
    "torch.compile max-autotune": (15.0, 40.0),
}
LIBRARY_COMPILE_SECONDS = (2.0, 0.5)
TRAINING_COMPILE_SECONDS = {"primitives": 10.0, "torch.compile": 60.0}
# Of those, seconds in which candidates are timed, which one process does at a time.
TUNING_SECONDS = {"torch.compile": 0.4, "torch.compile max-autotune": 5.0}
# Seconds of a first call with warm caches, in the company of others.
FIRST_CALL_SECONDS = {"torch.compile": (0.8, 1.6), "torch.compile max-autotune": (0.8, 1.6)}
OTHER_FIRST_CALL_SECONDS = (0.1, 0.2)
# Seconds to make tensors and to check results, by device.
CHECK_SECONDS = {"cuda": 0.3, "cpu": 0.6}
# So many workers get on with their first calls at a time, while others wait for their turns.
OVERLAP = {"cuda": 3.0, "cpu": 1.0}
# Seconds alone with the device, beside samples: warm-up and release of memory, and for each provider its calls before
# the capture, the capture, and the warm-up of its calls.
ALONE_SECONDS = {"cuda": 0.35, "cpu": 0.3}
PROVIDER_SECONDS = {"cuda": 0.08, "cpu": 0.05}
# Seconds of the copies of a size that no unit before had.
CALIBRATION_SECONDS = 0.15
TRAINING_SECONDS = 10.0


class Estimate(NamedTuple):
    """Seconds that the phases of a run should take.

    Attributes:
        compile: Until everything is compiled; 0 without that phase.
        compile_limit: When that phase ends at the latest.
        measure: From then on until the last unit is measured, the bench of overheads included.
        limit: What the run has in all.
        workers: Processes that compile.
        gpus: Devices that measure at once; 0 for a processor.
    """

    compile: float
    compile_limit: float
    measure: float
    limit: float
    workers: int
    gpus: int

    @property
    def fits(self) -> bool:
        """Whether nothing should be skipped."""
        return self.compile <= self.compile_limit and self.compile + self.measure <= self.limit

    def __str__(self) -> str:
        """The estimate in a line."""
        where = f"on {self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else "on the processor"
        compiled = f"compiling {self.compile:.0f} s in {self.workers} processes (at most {self.compile_limit:.0f} s), "
        verdict = "all of it should fit" if self.fits else "what comes last may be SKIPPED, see --seconds and --workers"
        return (
            f"Assumed, not measured: {compiled if self.compile_limit else ''}measuring {self.measure:.0f} s {where}, "
            f"{self.compile + self.measure:.0f} s in all of {self.limit:.0f} s: {verdict}."
        )


def estimate(plan: dict[str, Any], workers: int, gpus: int) -> Estimate:
    """What a plan should take.

    Args:
        plan: As `perf.suite.plan.make_plan` makes it.
        workers: Processes that compile.
        gpus: Devices that measure at once; where there is none, one.
    """
    device = plan["device"]
    gpus = max(gpus, 1) if device == "cuda" else 0
    alone = sum(_unit_seconds(unit, plan) for unit in plan["units"])
    sizes = {_size(unit, device) for unit in plan["units"]} - {None}
    measure = START_SECONDS[device] + (alone + CALIBRATION_SECONDS * len(sizes)) / max(gpus, 1)
    return Estimate(
        compile=_compile_seconds(plan, workers),
        compile_limit=plan["compile_seconds"],
        measure=measure + plan["overhead_seconds"],
        limit=plan["options"]["seconds"],
        workers=workers,
        gpus=gpus,
    )


def _compile_seconds(plan: dict[str, Any], workers: int) -> float:
    """Whoever tunes for long comes when the others are done; among the ones and among the others tuning takes turns."""
    items = compile_items(plan)
    if not items:
        return 0.0
    seconds = START_SECONDS[plan["device"]]
    for tuned in (False, True):
        group = [(unit, name) for unit, name in items if (name in TUNED) == tuned]
        spread = sum(_first_call(unit, name) for unit, name in group) / (workers * UTILIZATION)
        seconds += max(spread, sum(TUNING_SECONDS.get(name, 0.0) for _, name in group))
    return seconds


def _first_call(unit: dict[str, Any], name: str) -> float:
    if unit["mode"] == "training_step":
        return TRAINING_COMPILE_SECONDS.get(name, 0.0)
    return COMPILE_SECONDS.get(name, LIBRARY_COMPILE_SECONDS)[unit["mode"] not in BASIC_MODES]


def _unit_seconds(unit: dict[str, Any], plan: dict[str, Any]) -> float:
    """Seconds that a unit adds to the run of one device: alone with it, and its part of what units do at a time."""
    device = plan["device"]
    names = taking_part(unit, plan["providers"])
    if unit["mode"] == "training_step" and device == "cuda":
        return TRAINING_SECONDS + unit["seconds"]
    derived = unit["mode"] not in BASIC_MODES
    calls = sum(FIRST_CALL_SECONDS.get(name, OTHER_FIRST_CALL_SECONDS)[derived] for name in names)
    shared = (CHECK_SECONDS[device] + calls) / OVERLAP[device]
    return shared + ALONE_SECONDS[device] + PROVIDER_SECONDS[device] * len(names) + unit["seconds"]


def _size(unit: dict[str, Any], device: str) -> int | None:
    workload = find(unit["workload"], device)
    return None if isinstance(workload, TrainingWorkload) else minimum_bytes(workload, unit["mode"])


def summary(plan: dict[str, Any]) -> str:
    """How many units and first calls a plan has, and which workloads have more than the basic modes, in lines."""
    units = plan["units"]

    def counted(values: list[str]) -> str:
        return ", ".join(f"{name} {count}" for name, count in Counter(values).items())

    modes: dict[str, list[str]] = {}
    for unit in units:
        modes.setdefault(unit["workload"], []).append(unit["mode"])
    workloads: dict[tuple[str, ...], list[str]] = {}
    for key, found in modes.items():
        workloads.setdefault(tuple(found), []).append(key)
    taking = Counter(name for unit in units for name in taking_part(unit, plan["providers"]))
    lines = [
        f"{len(units)} units of {len(modes)} workloads: {counted([unit['mode'] for unit in units])}",
        f"providers, with their units: {', '.join(f'{name} {count}' for name, count in taking.items())}",
        f"first calls to compile: {counted([name for _, name in compile_items(plan)]) or 'none'}",
    ]
    for found, keys in sorted(workloads.items(), key=lambda entry: (-len(entry[0]), entry[0])):
        lines += [f"{', '.join(found)}:", *(f"  {key}" for key in keys)]
    return "\n".join(lines)
