"""The units of a run as tests, whose rows go to the controller in their reports."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from perf.suite import compiling, machine
from perf.suite.results import ERROR, OUT_OF_TIME, SKIPPED, WRONG, row_for
from perf.suite.run import doing_file, read_against
from perf.suite.unit import UNFIT, Bench, clean, measure
from perf.workloads import OURS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from perf.suite.timing import CpuTimer

    Plan = dict[str, Any]
    Record = Callable[[str, Any], None]

# Of a unit's time, what goes to samples; the rest to tensors, first calls, the check, captures and warm-up.
SAMPLING_SHARE = {"cuda": 0.25, "cpu": 0.35}
MAX_SAMPLING_SECONDS = 4.0
OVERHEAD_ROUNDS = {True: 10, False: 30}


@pytest.fixture
def directory(pytestconfig: pytest.Config) -> Path:
    """Directory of the run."""
    return pytestconfig.option.plan.parent


def test_compile(unit: Plan, provider: str, plan: Plan, directory: Path, timer: CpuTimer) -> None:
    """The first call of a provider in a unit, which fills the caches on disk."""
    if time.time() >= plan["compile_deadline"]:
        pytest.skip(OUT_OF_TIME)
    compiling.first_call(unit, provider, timer, directory)
    clean(timer)


def test_unit(
    unit: Plan,
    plan: Plan,
    directory: Path,
    timer: CpuTimer,
    gpu: str | None,
    calibrations: dict[str, dict[str, float]],
    record_property: Record,
) -> None:
    """The rows of a unit; fails if this package is wrong or raises in it."""
    if timer.unfit:
        # What is left of the process cannot be trusted; the next one measures this unit.
        os._exit(UNFIT)
    names, now = plan["providers"], time.time()
    if now >= plan["deadline"]:
        rows = [row_for(unit, name, SKIPPED, f"{OUT_OF_TIME}; see --seconds") for name in names]
    else:
        # A run that is late shares out what is left.
        waiting = len(plan["units"]) - unit["number"]
        share = SAMPLING_SHARE[plan["device"]] * (plan["deadline"] - now) * max(len(plan["gpus"]), 1) / waiting
        against = unit["left_out"] | read_against(directory, unit)
        doing = doing_file(directory, unit)
        bench = Bench(timer, min(share, MAX_SAMPLING_SECONDS), plan["deadline"], doing, against, calibrations)
        rows = measure(unit, names, bench)
        clean(timer)
        record_property("calibration", (gpu or "cpu", calibrations))
    record_property("rows", [{**row, "gpu": gpu} for row in rows])
    if gpu is not None:
        record_property("clocks", (gpu, machine.clocks(gpu)))
    for row in rows:
        if row["provider"] == OURS and row["status"] in {WRONG, ERROR}:
            pytest.fail(f"{unit['id']}: {row['status']}: {row['message']}", pytrace=False)


@pytest.mark.timeout(180)
def test_overhead(plan: Plan, record_property: Record) -> None:
    """The bench of the front end's overhead, which belongs to whole runs on a processor."""
    from perf import overhead

    record_property("overhead", overhead.measure_all(OVERHEAD_ROUNDS[plan["options"]["quick"]]))
