"""The units of a run as tests, whose rows go to the controller in their reports."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from perf.custom_ops import measure_overhead
from perf.suite import results
from perf.suite.plan import unit_id
from perf.suite.results import ERROR, WRONG
from perf.suite.unit import UNFIT, clean, measure
from perf.workloads import OURS

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.suite.plan import Options, Unit
    from perf.suite.timing import CpuTimer

# Of samples, in each unit; tensors, first calls, the check, captures and warm-up take about twice as much.
SAMPLING_SECONDS = 1.0


def test_unit(unit: Unit, options: Options, timer: CpuTimer, record_property: Callable[[str, Any], None]) -> None:
    """The rows of a unit; fails if this package is wrong or raises in it."""
    if timer.unfit:
        # The rest of the process cannot be trusted; the next one measures this unit.
        os._exit(UNFIT)
    gpu = os.environ["CUDA_VISIBLE_DEVICES"] if options.device == "cuda" else None
    rows = measure(unit, options.providers, timer, SAMPLING_SECONDS)
    clean()
    record_property("rows", [{**row, "gpu": gpu} for row in rows])
    record_property("clocks", gpu and results.clocks(gpu))
    for row in rows:
        if row["provider"] == OURS and row["status"] in {WRONG, ERROR}:
            pytest.fail(f"{unit_id(unit)}: {row['status']}: {row['message']}", pytrace=False)


def test_overhead(options: Options, record_property: Callable[[str, Any], None]) -> None:
    """The bench of the front end's overhead, which belongs to whole runs on a processor."""
    record_property("overhead", measure_overhead(10 if options.quick else 30))
