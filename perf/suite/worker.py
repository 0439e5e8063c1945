"""What one xdist worker does: compile into the caches on disk, or measure, one item at a time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config as functorch_config

from perf.suite import machine, modes, unit
from perf.suite.bench import Bench
from perf.suite.budget import LEFT_OUT, OUT_OF_TIME, Budget
from perf.suite.contenders import Contender, DeviceLostError
from perf.suite.locks import DeviceLock
from perf.suite.plan import find
from perf.suite.providers import OURS
from perf.suite.results import ERROR, SKIPPED, device_files, write_json
from perf.suite.timers import CpuTimer, keep_freed_memory
from perf.workloads import TrainingWorkload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from perf.suite.timers import Timer
    from perf.workloads import Workload

# A first call that takes longer, waiting for its turns to tune included, is given up, so that others come to theirs.
FIRST_CALL_SECONDS = 90.0
# Of Inductor's benchmarker, what times on a device. The public ones call each other, or are called by themselves.
BENCHMARKS = ("benchmark", "benchmark_gpu", "benchmark_gpu_with_cuda_graph")
# How a process ends that can measure nothing more; the driver goes on with another one.
UNFIT = 70


class Worker:
    """The state that a worker process keeps between items: the plan, its GPU, the timer."""

    def __init__(self, directory: Path) -> None:
        """Read the plan."""
        self.directory = directory
        self.plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
        self.gpu = os.environ.get("PERF_GPU") if self.plan["device"] == "cuda" else None
        self.device = torch.device(self.plan["device"])
        self._timer: Timer | None = None
        self._lock = DeviceLock("cpu" if self.gpu is None else f"gpu-{machine.gpu_identity(self.gpu)}")
        # Backward passes are run more than once, which buffers that Inductor gives away would not survive.
        functorch_config.donated_buffer = False

    def timer(self) -> Timer:
        """The timer of the device, made at the first use, when the description of the machine is written too."""
        if self._timer is None:
            if self.device.type == "cuda":
                from perf.suite.cuda_timer import CudaTimer

                self._timer = CudaTimer()
            else:
                keep_freed_memory()
                self._timer = CpuTimer()
            self._describe()
        return self._timer

    def _describe(self) -> None:
        description = {"device": machine.device_description(self.gpu), "environment": machine.environment()}
        write_json(self.directory / "workers" / f"{self._device_file}.json", description)

    @property
    def _device_file(self) -> str:
        """Name of the device in the directory of the run: what CUDA calls a GPU may be no name of a file."""
        return device_files(self.plan["gpus"])[self.gpu]

    def compile(self, record: dict[str, Any], name: str) -> None:
        """Make the first call of `name` in a unit, and leave a note of what came of it."""
        budget = Budget(self.plan["compile_deadline"], 0, int)
        if budget.spent:
            return
        workload = find(record["workload"], self.plan["device"])
        contender, timer = Contender(name), self.timer()
        with unit.cleaned(), self._lock.shared(), self._tuning_alone():
            seconds = min(FIRST_CALL_SECONDS, budget.left() + 1)
            try:
                contender.attempt(lambda: self._first_call(record, workload, name), timer, seconds)
            except DeviceLostError as error:
                self._lost(record, error)
                raise
            timer.release()
        # What was not tried in time is as if there were no note.
        if contender.status != SKIPPED or not (contender.message or "").startswith(OUT_OF_TIME):
            note = None if contender.message is None else f"{contender.status}: {contender.message}"
            write_json(self._note(record, name), note)

    def _lost(self, record: dict[str, Any], error: DeviceLostError) -> None:
        """Note who lost the device, so that the unit is tried again without it, and make room for a new process."""
        write_json(self._note(record, error.name), f"{ERROR}: the device was lost: {error.message}")
        leave()

    def _first_call(self, record: dict[str, Any], workload: Workload | TrainingWorkload, name: str) -> None:
        if isinstance(workload, TrainingWorkload):
            # The demo's data set takes scikit-learn, whose import the other units can do without.
            from perf.suite import training

            training.make_step(name, workload, self.device)[1]()
            return
        make_step = unit.step_maker(name, workload, record["mode"])
        step = make_step(modes.make_sample(workload, record["mode"], self.device))
        with compile_only() if name == OURS and self.device.type == "cuda" else contextlib.nullcontext():
            step()

    def _tuning_alone(self) -> contextlib.AbstractContextManager[None]:
        return tuning_alone(self._lock) if self.device.type == "cuda" else contextlib.nullcontext()

    def _note(self, record: dict[str, Any], name: str) -> Path:
        return note_path(self.directory, record["id"], name)

    def _verdict(self, record: dict[str, Any], name: str) -> str | None:
        note = self._note(record, name)
        if note.exists():
            return json.loads(note.read_text(encoding="utf-8"))
        if name in record["left_out"]:
            return f"{SKIPPED}: {LEFT_OUT}: {record['left_out'][name]}"
        # Compiling this package takes seconds at most, and without it the unit is pointless.
        if name not in record["compiling"] or name == OURS:
            return None
        return f"{SKIPPED}: {OUT_OF_TIME}: not compiled in time; see --seconds"

    def measure(self, record: dict[str, Any]) -> None:
        """Measure a unit and leave its rows."""
        names = self.plan["providers"]
        started, rows_of = self.directory / "started", self.directory / "rows"
        started.mkdir(exist_ok=True)

        def doing(name: str) -> None:
            (started / record["id"]).write_text(name, encoding="utf-8")

        doing("")
        num_units, devices = len(self.plan["units"]), len(self.plan["gpus"])
        budget = Budget(self.plan["deadline"], num_units, lambda: sum(1 for _ in rows_of.glob("*.json")), devices)
        if budget.spent:
            rows = unit.skipped(record, names)
        else:
            with unit.cleaned():
                try:
                    rows = unit.guarded(record, names, lambda: self._rows(record, names, budget, doing))
                except DeviceLostError as error:
                    self._lost(record, error)
                    raise
        write_json(rows_of / f"{record['id']}.json", [{**row, "gpu": self.gpu} for row in rows])
        if not self._is_fit():
            leave()

    def _is_fit(self) -> bool:
        """Whether this process can measure more: an error of a kernel that nobody owned up to stays with it."""
        if self._timer is None:
            return True
        try:
            self._timer.wait()
        # Of whatever type: it is in the rows, or comes from a check that failed for the same reason.
        except Exception:
            return False
        return not self._timer.unfit

    def _rows(self, record: dict[str, Any], names: list[str], budget: Budget, doing: Any) -> list[dict[str, Any]]:
        workload = find(record["workload"], self.plan["device"])

        def verdict(name: str) -> str | None:
            return self._verdict(record, name)

        calibrations = self.directory / "calibration" / self._device_file
        bench = Bench(self.timer(), self._lock, calibrations, budget, verdict, doing)
        if isinstance(workload, TrainingWorkload):
            from perf.suite import training

            return training.measure(record, workload, names, bench)
        return unit.measure(record, workload, names, bench)


def note_path(directory: Path, unit_id: str, name: str) -> Path:
    """Where it stands why a provider must not be tried in a unit, or that it may."""
    return directory / "compiled" / f"{unit_id}-{name.replace(' ', '-')}.json"


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """Context in which this package's kernels are compiled, and kept on disk, instead of launched."""
    from triton_kernels._kernel import intercept

    def warm(kernel: Any, grid: Any, args: tuple, constants: dict[str, Any]) -> None:
        kernel.warmup(*args, grid=grid, **constants)

    with intercept(warm):
        yield


@contextlib.contextmanager
def tuning_alone(lock: DeviceLock) -> Iterator[None]:
    """Context in which Inductor and Triton time their candidates while no other process does on the device of `lock`.

    They choose by what they measure. Which of the functions exist depends on the version of torch.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    timing: list[tuple[Any, str]] = [(benchmarker, name) for name in BENCHMARKS]
    with contextlib.suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        timing.append((Autotuner, "_bench"))
    with contextlib.ExitStack() as stack:
        for owner, name in timing:
            if (timed := getattr(owner, name, None)) is not None:
                stack.enter_context(_replaced(owner, name, _timed_alone(timed, lock)))
        yield


def _timed_alone(timed: Callable[..., Any], lock: DeviceLock) -> Callable[..., Any]:
    @functools.wraps(timed)
    def benchmark(*args: Any, **kwargs: Any) -> Any:
        with lock.tuning():
            return timed(*args, **kwargs)

    return benchmark


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which `owner` has another attribute; one that it had from its class comes from there again."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def leave() -> None:
    """End the process at once: what is left of it cannot be trusted, not even to end in order."""
    os._exit(UNFIT)
