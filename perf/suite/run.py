"""A run: a session of pytest over the units of a plan, whose reports bring the rows, with one xdist worker per GPU."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perf.suite import results
from perf.suite.plan import make_plan, unit_id
from perf.suite.providers import reason_against
from perf.suite.results import ERROR, SCHEMA, row_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.suite.plan import Options, Unit
    from perf.suite.results import Row

# A unit that takes longer, with all that it compiles, hangs, or had better: pytest-timeout ends its process.
LIMIT_SECONDS = 300
# Has the processes keep the memory that they free, where their C library is glibc: otherwise it follows from what was
# allocated before whether a call finds its output's memory at hand, or fetches it from the system page by page, which
# takes as long as layer norm itself.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_MAX_": "0"}


class Collector:
    """Plug-in of the controller: gives workers their GPUs (UUIDs, none on a processor), and collects their reports."""

    def __init__(self, plan: Sequence[Unit], names: Sequence[str], gpus: Sequence[str]) -> None:
        self.units, self.names, self.gpus = {unit_id(unit): unit for unit in plan}, names, gpus
        self.rows: dict[str, list[Row]] = {}
        self.clocks: dict[str, list[dict[str, str]]] = {}
        self.overhead: Any = None
        self._owned: list[str] = []
        self._died: set[str] = set()

    def pytest_configure_node(self, node: Any) -> None:
        """Give a new worker the GPU that has the fewest."""
        if self.gpus:
            gpu = node.workerinput["gpu"] = min(self.gpus, key=self._owned.count)
            self._owned.append(gpu)

    def pytest_testnodedown(self, node: Any) -> None:
        """Take back the GPU of a worker that has ended."""
        if (gpu := node.workerinput.pop("gpu", None)) is not None:
            self._owned.remove(gpu)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a test reports; a unit that reports nothing is an error of all that take part."""
        found = dict[str, Any](report.user_properties)
        item = report.nodeid.partition("[")[2].removesuffix("]")
        if report.when == "call":
            self.overhead = found.get("overhead", self.overhead)
            if found.get("clocks"):
                self.clocks.setdefault(found["rows"][0]["gpu"], []).append(found["clocks"])
        if "rows" in found:
            self.rows[item] = found["rows"]
        elif report.failed and item in self.units:
            message = report.longreprtext.strip().splitlines()[-1].removeprefix("E").strip()
            self.rows[item] = [row_for(self.units[item], name, ERROR, message=message) for name in self.names]

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, sched: Any) -> None:
        """Have a unit measured once more in which a process died; it may have been unfit by an earlier one."""
        if crashitem not in self._died:
            self._died.add(crashitem)
            sched.mark_test_pending(crashitem)


def run(options: Options) -> dict[str, Any]:
    """Measure, and return the result; after Ctrl-C what there is of it."""
    start = time.time()
    plan, device = make_plan(options), results.describe(options.device)
    available = {name: reason_against(name) for name in options.names}
    names = tuple(name for name, reason in available.items() if reason is None)
    collector = Collector(plan, names, device.get("gpus", []))
    # The bench of overheads measures no workload: it belongs to runs that measure all of them.
    tests = ["test_unit", *(["test_overhead"] if options.device == "cpu" and not options.only else [])]
    package = results.package()
    status = _pytest(collector, tests, replace(options, providers=names))
    if status == pytest.ExitCode.INTERRUPTED:
        print("Stopped: what was measured is kept.", file=sys.stderr)
    return {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "options": asdict(options),
        "complete": status != pytest.ExitCode.INTERRUPTED,
        "package": package,
        "device": device,
        "environment": results.environment(),
        "clocks": collector.clocks,
        "providers": available,
        "overhead": collector.overhead,
        "rows": [row for item in collector.units for row in collector.rows.get(item, ())],
        "seconds": {"total": round(time.time() - start, 1)},
    }


def _pytest(collector: Collector, tests: Sequence[str], options: Options) -> int | pytest.ExitCode:
    """A session over some of the tests; settings and plug-ins of the project's own tests stay out of it."""
    for name, value in {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **KEEP_FREED_MEMORY}.items():
        os.environ.setdefault(name, value)
    here, workers = Path(__file__).parent, max(len(collector.gpus), 1)
    arguments = [
        *(f"{here / 'test_suite.py'}::{test}" for test in tests),
        *("-c", os.devnull, "--rootdir", str(here), "-p", "no:cacheprovider", "-p", "no:warnings", "-v", "--tb=short"),
        *("--run-options", json.dumps(asdict(options))),
        # One unit at a time goes to a worker, in the order of the plan; one that dies is replaced.
        *("-p", "xdist", "-n", str(workers), "--dist", "load", "--maxschedchunk", "1", "--max-worker-restart", "1000"),
        # A process that hangs in a driver hears of nothing else than its end.
        *("-p", "timeout", "--timeout", str(LIMIT_SECONDS), "--timeout-method", "thread"),
    ]
    return pytest.main(arguments, plugins=[collector])
