"""What one xdist worker does: compile into the caches on disk, or measure, one item at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config as functorch_config

from perf.suite import machine, unit
from perf.suite.plan import find
from perf.suite.results import CANNOT, ERROR, SKIPPED, write_json
from perf.suite.timers import CpuTimer
from perf.workloads import TrainingWorkload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from perf.suite.timers import Timer

# A first call that takes longer is given up: its provider "cannot" within the time of a run.
FIRST_CALL_SECONDS = 60.0


class Worker:
    """The state that a worker process keeps between items: the plan, its GPU, the timer."""

    def __init__(self, directory: Path) -> None:
        """Read the plan."""
        self.directory = directory
        self.plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
        self.gpu = os.environ.get("PERF_GPU") if self.plan["device"] == "cuda" else None
        self.device = torch.device(self.plan["device"])
        self._timer: Timer | None = None
        # Backward passes are run more than once, which buffers that Inductor gives away would not survive.
        functorch_config.donated_buffer = False

    def timer(self) -> Timer:
        """The timer of the device, made at the first use, when the description of the machine is written too."""
        if self._timer is None:
            if self.device.type == "cuda":
                from perf.suite.cuda_timer import CudaTimer

                self._timer = CudaTimer()
            else:
                self._timer = CpuTimer()
            self._describe()
        return self._timer

    def _describe(self) -> None:
        description = {"device": machine.device_description(self.gpu), "environment": machine.environment()}
        write_json(self.directory / "workers" / f"{self.gpu or 'cpu'}.json", description)

    def compile(self, record: dict[str, Any], name: str) -> None:
        """Make the first call of `name` in a unit, and leave a note of what came of it."""
        if time.time() > self.plan["compile_deadline"]:
            return
        workload = find(record["workload"], self.plan["device"])
        verdict: str | None = None
        with unit.cleaned(None):
            try:
                with time_limit(FIRST_CALL_SECONDS):
                    if isinstance(workload, TrainingWorkload):
                        # The demo's data set takes scikit-learn, whose import the other units can do without.
                        from perf.suite import training

                        training.make_step(name, workload, self.device)[1]()
                    else:
                        contender = unit.first_call(name, workload, record["mode"], self.device)
                        verdict = None if contender.message is None else f"{contender.status}: {contender.message}"
            # Said in the results, where the unit is measured.
            except Exception as error:
                status = ERROR if name == unit.OURS else CANNOT
                verdict = f"{status}: {unit.describe(error)}"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        write_json(self._note(record, name), verdict)

    def _note(self, record: dict[str, Any], name: str) -> Path:
        return self.directory / "compiled" / f"{record['id']}-{name.replace(' ', '-')}.json"

    def _verdict(self, record: dict[str, Any], name: str) -> str | None:
        if name not in self.plan["compiling"]:
            return None
        note = self._note(record, name)
        if note.exists():
            return json.loads(note.read_text(encoding="utf-8"))
        # Compiling this package takes seconds at most, and without it the unit is pointless.
        return None if name == unit.OURS else f"{SKIPPED}: not compiled in time; see --seconds"

    def measure(self, record: dict[str, Any]) -> None:
        """Measure a unit and leave its rows."""
        (self.directory / "started").mkdir(exist_ok=True)
        (self.directory / "started" / record["id"]).touch()
        names = self.plan["providers"]
        rows = unit.skipped_after(self.plan["deadline"], record, names)
        if rows is None:
            with unit.cleaned(self._timer):
                rows = unit.guarded(record, names, lambda: self._rows(record, names))
        write_json(self.directory / "rows" / f"{record['id']}.json", rows)

    def _rows(self, record: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
        timer, lock = self.timer(), machine.device_lock(self.gpu)
        workload = find(record["workload"], self.plan["device"])

        def verdict(name: str) -> str | None:
            return self._verdict(record, name)

        if isinstance(workload, TrainingWorkload):
            from perf.suite import training

            return training.measure(record, workload, names, timer, lock, verdict)
        return unit.measure(record, workload, names, timer, lock, self.directory, verdict)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`, where the platform and the thread allow alarms."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"the first call took more than {seconds:g} s.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
