"""A run: a session of pytest over the units of a plan, whose reports bring the rows, with one xdist worker per GPU."""

from __future__ import annotations

import contextlib
import getpass
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

from perf.suite import results
from perf.suite.plan import OVERHEAD_SECONDS, OVERHEAD_SHARE, Options, make_plan
from perf.suite.providers import reason_against
from perf.suite.results import ERROR, OUT_OF_TIME, SCHEMA, SKIPPED, out_of_time, row_for, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.suite.plan import Unit
    from perf.suite.results import Row

# A unit that takes longer, with all that it compiles, hangs, or had better: pytest-timeout ends its process.
LIMIT_SECONDS = 300


def doing_file(directory: Path, unit: Unit) -> Path:
    """File that says which provider is under way in a unit."""
    return directory / f"{unit['number']}.doing"


def _against_file(directory: Path, unit: Unit) -> Path:
    return directory / f"{unit['number']}.against"


def read_against(directory: Path, unit: Unit) -> dict[str, tuple[str, str]]:
    """Status and message of the providers that must not be tried in a unit, from what happened before."""
    path = _against_file(directory, unit)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class Collector:
    """Plug-in of the controller: gives workers their GPUs, and collects what they report.

    xdist replaces a worker that dies. The unit that it was at is measured again without the provider that was under
    way, and rows of other units are not touched.

    Args:
        plan: As `perf.suite.plan.make_plan` makes it, with the GPUs of the run.
        directory: Of the run.
    """

    def __init__(self, plan: dict[str, Any], directory: Path) -> None:
        self.plan, self.directory = plan, directory
        self.rows: dict[str, list[Row]] = {}
        self.reported: dict[str, Any] = {"calibration": {}, "clocks": {}, "overhead": None}
        self._owned: list[str] = []
        self._failed: dict[str, str] = {}

    def pytest_configure_node(self, node: Any) -> None:
        """Give a new worker the GPU that has the fewest."""
        if self.plan["gpus"]:
            gpu = node.workerinput["gpu"] = min(self.plan["gpus"], key=self._owned.count)
            self._owned.append(gpu)

    def pytest_testnodedown(self, node: Any) -> None:
        """Take back the GPU of a worker that has ended."""
        if (gpu := node.workerinput.pop("gpu", None)) is not None:
            self._owned.remove(gpu)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a test reports."""
        item, found = _item(report.nodeid), dict[str, Any](report.user_properties)
        if report.when != "call":
            return
        if "overhead" in found:
            self.reported["overhead"] = found["overhead"]
        elif "rows" in found:
            self.rows[item] = found["rows"]
            device, calibrations = found["calibration"]
            self.reported["calibration"].setdefault(device, {}).update(calibrations)
            gpu, clocks = found["clocks"]
            if clocks:
                self.reported["clocks"].setdefault(gpu, []).append(clocks)
        elif report.failed:
            self._failed[item] = report.longreprtext.strip().splitlines()[-1].removeprefix("E").strip()

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, sched: Any) -> None:
        """Note who was under way where a worker died, and have the unit measured again without it."""
        for unit in self.plan["units"]:
            if _item(crashitem) == unit["id"]:
                died = f"the process died in it, or it took more than {LIMIT_SECONDS} s"
                doing, against = doing_file(self.directory, unit), read_against(self.directory, unit)
                name = doing.read_text(encoding="utf-8") if doing.exists() else ""
                self._failed[unit["id"]] = died
                # Whoever dies without a name may do so once.
                if name not in against:
                    write_json(_against_file(self.directory, unit), against | {name: (ERROR, died)})
                    sched.mark_test_pending(crashitem)

    def all_rows(self) -> Iterator[Row]:
        """The rows of every unit, those that no test reported included."""
        for unit in self.plan["units"]:
            failed = self._failed.get(unit["id"])
            why = (ERROR, failed) if failed else (SKIPPED, f"{OUT_OF_TIME}: the run ended before this unit did")
            yield from self.rows.get(unit["id"]) or [row_for(unit, name, *why) for name in self.plan["providers"]]


def _item(nodeid: str) -> str:
    """Id of the parameters of a test."""
    return nodeid.partition("[")[2].removesuffix("]")


def run(options: Options) -> dict[str, Any]:
    """Measure, and return the result; after Ctrl-C, or another request to end, what there is of it.

    Raises:
        OptionError: If the options mean nothing, or leave nothing to measure.
        RuntimeError: If there is no GPU where one is asked for, or if there are several kinds.
    """
    start = time.time()
    options.check()
    # pytest could only say so once it runs.
    for name in ("xdist", "pytest_timeout"):
        importlib.import_module(name)
    device, package = results.describe(options.device), results.package()
    plan = make_plan(options, {name: reason_against(name) for name in options.names})
    plan["gpus"] = device.get("gpus", [])
    reserved = min(OVERHEAD_SECONDS, OVERHEAD_SHARE * options.total_seconds) if plan["overhead"] else 0.0
    plan["deadline"] = start + options.total_seconds - reserved
    status: int | pytest.ExitCode = pytest.ExitCode.INTERRUPTED
    with contextlib.ExitStack() as stack:
        for gpu in sorted(plan["gpus"]):
            # Other runs of this user wait.
            name = f"torch-training-primitives-{getpass.getuser()}-{gpu}.lock"
            stack.enter_context(FileLock(Path(tempfile.gettempdir()) / name))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perf-run-")))
        write_json(directory / "plan.json", plan)
        collector = Collector(plan, directory)
        _end_as_ctrl_c_does()
        with contextlib.suppress(KeyboardInterrupt):
            status = _pytest(collector, "test_unit", *(["test_overhead"] if plan["overhead"] else []))
    if status == pytest.ExitCode.INTERRUPTED:
        print("Stopped: what was measured is kept.", file=sys.stderr)
    rows = list(collector.all_rows())
    return {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "options": plan["options"],
        "complete": status != pytest.ExitCode.INTERRUPTED and not any(map(out_of_time, rows)),
        "package": package,
        "device": device,
        "environment": results.environment(),
        "providers": plan["available"],
        **collector.reported,
        "rows": rows,
        "seconds": {"total": round(time.time() - start, 1)},
    }


def _end_as_ctrl_c_does() -> None:
    """Have every request to end count as Ctrl-C; what is ignored, as by nohup, stays ignored."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def _pytest(collector: Collector, *tests: str) -> int | pytest.ExitCode:
    """A session over some of the tests; settings and plug-ins of the project's own tests stay out of it."""
    os.environ.setdefault("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    here, workers = Path(__file__).parent, max(len(collector.plan["gpus"]), 1)
    arguments = [
        *(f"{here / 'test_suite.py'}::{test}" for test in tests),
        *("-c", os.devnull, "--rootdir", str(here), "-p", "no:cacheprovider", "-p", "no:warnings", "-v", "--tb=short"),
        *("--plan", str(collector.directory / "plan.json")),
        # One unit at a time goes to a worker, in the order of the plan; one that dies is replaced.
        *("-p", "xdist", "-n", str(workers), "--dist", "load", "--maxschedchunk", "1", "--max-worker-restart", "1000"),
        # A process that hangs in a driver hears of nothing else than its end.
        *("-p", "timeout", "--timeout", str(LIMIT_SECONDS), "--timeout-method", "thread"),
    ]
    return pytest.main(arguments, plugins=[collector])
