"""The units of a run as tests, whose rows go to the controller in their reports."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from perf.custom_ops import measure_overhead
from perf.suite import results
from perf.suite.results import ERROR, OUT_OF_TIME, SKIPPED, WRONG, row_for
from perf.suite.run import doing_file, read_against
from perf.suite.unit import UNFIT, Bench, clean, measure
from perf.workloads import OURS

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.suite.conftest import Worker
    from perf.suite.plan import Unit

# Of a unit's time, what goes to samples; the rest to tensors, first calls, the check, captures and warm-up.
SAMPLING_SHARE = {"cuda": 0.25, "cpu": 0.35}
MAX_SAMPLING_SECONDS = 4.0
OVERHEAD_ROUNDS = {True: 10, False: 30}


def test_unit(unit: Unit, worker: Worker, record_property: Callable[[str, Any], None]) -> None:
    """The rows of a unit; fails if this package is wrong or raises in it."""
    plan, directory, gpu, timer, calibrations = worker
    left = plan["deadline"] - time.time()
    if timer.unfit:
        # What is left of the process cannot be trusted; the next one measures this unit.
        os._exit(UNFIT)
    if left <= 0:
        rows = [row_for(unit, name, SKIPPED, f"{OUT_OF_TIME}; see --seconds") for name in plan["providers"]]
    else:
        # A run that is late shares out what is left.
        mine = left * max(len(plan["gpus"]), 1) / (len(plan["units"]) - unit["number"])
        seconds = min(SAMPLING_SHARE[plan["device"]] * mine, MAX_SAMPLING_SECONDS)
        against = unit["left_out"] | read_against(directory, unit)
        bench = Bench(timer, seconds, plan["deadline"], doing_file(directory, unit), against, calibrations)
        rows = measure(unit, plan["providers"], bench)
        clean(timer)
    record_property("rows", [{**row, "gpu": gpu} for row in rows])
    record_property("calibration", (gpu or "cpu", calibrations))
    record_property("clocks", (gpu, gpu and results.clocks(gpu)))
    for row in rows:
        if row["provider"] == OURS and row["status"] in {WRONG, ERROR}:
            pytest.fail(f"{unit['id']}: {row['status']}: {row['message']}", pytrace=False)


def test_overhead(worker: Worker, record_property: Callable[[str, Any], None]) -> None:
    """The bench of the front end's overhead, which belongs to whole runs on a processor."""
    record_property("overhead", measure_overhead(OVERHEAD_ROUNDS[worker.plan["options"]["quick"]]))
