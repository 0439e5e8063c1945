"""A run from outside: plan, start pytest-xdist workers phase by phase, show progress, merge what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf.suite import machine
from perf.suite.estimate import estimate, summary
from perf.suite.plan import Options, check, compile_items, make_plan, providers, total_seconds
from perf.suite.processes import require, running, stoppable
from perf.suite.progress import Progress
from perf.suite.providers import available
from perf.suite.results import ERROR, merge, write_json
from perf.suite.worker import note_path

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
# One core stays for the driver, and one for the worker that measures.
SPARE_CORES = 2
MAX_COMPILERS = 16
# So many take turns on a GPU: while one measures, the others wait; while they trace, which takes longer, none measures.
MEASURERS_PER_GPU = 6
# How often units are measured in which workers die: each attempt leaves one more provider out.
ATTEMPTS = 3
POLL_SECONDS = 0.25
CLOCK_SECONDS = 10.0
QUICK_OVERHEAD_ROUNDS = 10
# What is under way at the deadline may end; what still runs after that is stopped.
GRACE_SECONDS = 25.0


def run(options: Options) -> dict[str, Any]:
    """Measure, and return the result; after Ctrl-C, or another request to end, what there is of it.

    Raises:
        OptionError: If the options mean nothing, or leave nothing to measure.
        RequirementError: If a package is not there that the workers need.
        RuntimeError: If there is no GPU where one is asked for, or if there are several kinds.
    """
    start = time.time()
    check(options)
    require()
    gpus = machine.visible_gpus() if options.device == "cuda" else []
    if options.device == "cuda" and not gpus:
        raise RuntimeError(
            "--device cuda: torch sees no CUDA device; --device cpu compares with torch on the processor."
        )
    names = machine.one_kind(gpus)
    package = machine.package()
    plan = make_plan(options, available(providers(options)))
    until = start + total_seconds(options)
    plan["gpus"] = gpus
    plan["deadline"] = until - plan["overhead_seconds"]
    plan["compile_deadline"] = time.time() + plan["compile_seconds"]
    plan["to_measure"] = [unit["id"] for unit in plan["units"]]
    directory = Path(tempfile.mkdtemp(prefix="perf-run-"))
    write_json(directory / "plan.json", plan)
    clocks: dict[str, list[dict[str, str]]] = {gpu: [] for gpu in gpus}
    print(estimate(plan, _compilers(options), len(gpus)), file=sys.stderr)
    compiled, overhead, stopped = time.time(), None, False
    try:
        with stoppable():
            if items := len(compile_items(plan)):
                _phase("compile", directory, _compilers(options), items, plan["compile_deadline"], lambda: None)
                compiled = time.time()
            workers = options.workers or MEASURERS_PER_GPU * len(gpus)
            workers = min(workers, MEASURERS_PER_GPU * len(gpus), _compilers(options)) if gpus else 1
            _measure(plan, directory, workers, _clock_reader(clocks, names))
            if plan["overhead_seconds"] and merge(plan, directory)["complete"]:
                overhead = _overhead(directory, options.quick, until + GRACE_SECONDS - time.time())
    except KeyboardInterrupt:
        stopped = True
        print("Stopped: what was measured is kept.", file=sys.stderr)
    result = merge(plan, directory)
    result["package"] = package
    result["clocks"] = {gpu: asked for gpu, asked in clocks.items() if asked}
    result["overhead"] = overhead
    result["complete"] &= not stopped
    result["seconds"] = {"total": round(time.time() - start, 1), "compile": round(compiled - start, 1)}
    _tidy(plan, directory, result, stopped)
    return result


def _tidy(plan: dict[str, Any], directory: Path, result: dict[str, Any], stopped: bool) -> None:
    """Remove the directory of a run, unless its logs may say why something is missing."""
    failed = any(row["status"] == ERROR for row in result["rows"])
    lost = not all((directory / "rows" / f"{unit['id']}.json").exists() for unit in plan["units"])
    if failed or (lost and not stopped):
        print(f"What the workers said is kept in {directory}.", file=sys.stderr)
    else:
        shutil.rmtree(directory, ignore_errors=True)


def describe(options: Options) -> str:
    """What a run would measure, and how long it should take, in lines; needs no GPU.

    Raises:
        OptionError: If the options mean nothing, or leave nothing to measure.
    """
    check(options)
    gpus = len(machine.visible_gpus()) if options.device == "cuda" else 0
    plan = make_plan(options, available(providers(options)))
    return f"{summary(plan)}\n{estimate(plan, _compilers(options), gpus)}"


def _measure(plan: dict[str, Any], directory: Path, workers: int, on_poll: Callable[[], None]) -> None:
    """Measure all units, and those again in which a worker died, without the provider that was under way."""
    for _ in range(ATTEMPTS):
        _phase("measure", directory, workers, len(plan["units"]), plan["deadline"], on_poll)
        plan["to_measure"] = lost_units(plan, directory)
        if not plan["to_measure"] or time.time() >= plan["deadline"]:
            return
        write_json(directory / "plan.json", plan)


def lost_units(plan: dict[str, Any], directory: Path) -> list[str]:
    """Units in which a worker died and that are worth another attempt: it is known who to leave out."""
    lost = []
    for unit in plan["units"]:
        crashed, started = (directory / folder / unit["id"] for folder in ("crashed", "started"))
        if (directory / "rows" / f"{unit['id']}.json").exists() or not crashed.exists():
            continue
        culprit = started.read_text(encoding="utf-8") if started.exists() else ""
        if culprit:
            note = note_path(directory, unit["id"], culprit)
            said = json.loads(note.read_text(encoding="utf-8")) if note.exists() else None
            if said is None:
                write_json(note, f"{ERROR}: the worker died in a call of {culprit}, see the log")
            crashed.unlink()
            lost.append(unit["id"])
    return lost


def _compilers(options: Options) -> int:
    return options.workers or max(1, min(machine.usable_cores() - SPARE_CORES, MAX_COMPILERS))


def _clock_reader(clocks: dict[str, list[dict[str, str]]], names: dict[str, str | None]) -> Callable[[], None]:
    """What asks for the clocks of all GPUs every so often; `names` are those of the hardware."""
    last = 0.0

    def read() -> None:
        nonlocal last
        if clocks and time.time() - last >= CLOCK_SECONDS:
            last = time.time()
            for gpu, asked in clocks.items():
                if found := machine.clocks(names[gpu]):
                    asked.append(found)

    return read


def pytest_command(phase: str, directory: Path, workers: int) -> list[str]:
    """How pytest is started, with `_environment`; settings and plug-ins of the project's tests stay out of it."""
    here = Path(__file__).parent
    return [
        *(sys.executable, "-m", "pytest", str(here / "test_cases.py")),
        *("-c", os.devnull, "--rootdir", str(here), "-p", "no:cacheprovider", "-p", "xdist", "-q", "-s"),
        # One item at a time goes to a worker, in the order of the plan; one that dies is replaced.
        *("-n", str(workers), "--dist", "load", "--maxschedchunk", "1", "--max-worker-restart", "100"),
        *("--run-directory", str(directory), "--phase", phase),
    ]


def _environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {
        **own,
        "PYTHONPATH": paths,
        # What else is installed would take every worker seconds to import.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Inductor's own pools of compilers would multiply with the workers.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def _phase(phase: str, directory: Path, workers: int, items: int, deadline: float, on_poll: Callable[[], None]) -> None:
    """Run the items of a phase, and see to it that it ends."""
    done = directory / ("compiled" if phase == "compile" else "rows")
    with (
        (directory / f"{phase}.log").open("w", encoding="utf-8") as log,
        Progress(phase, items) as progress,
        running(
            pytest_command(phase, directory, workers),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            cwd=ROOT,
        ) as process,
    ):
        while process.poll() is None and time.time() < deadline + GRACE_SECONDS:
            progress.update(sum(1 for _ in done.glob("*.json")), _latest(done, directory))
            on_poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
        progress.update(sum(1 for _ in done.glob("*.json")), "")
    if phase == "measure" and not any(done.glob("*.json")):
        tail = (directory / f"{phase}.log").read_text(encoding="utf-8")[-2000:]
        print(f"No case was measured. The end of {directory / f'{phase}.log'}:\n{tail}", file=sys.stderr)


def _latest(done: Path, directory: Path) -> str:
    """The case that was begun last, for the progress line."""
    started = sorted((directory / "started").glob("*")) if done.name == "rows" else []
    if not started:
        return ""
    number = int(started[-1].name)
    plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    unit = plan["units"][number]
    return f"{unit['workload']}: {unit['mode']}"


def _overhead(directory: Path, quick: bool, seconds: float) -> dict[str, Any] | None:
    """The front-end overhead bench, in a process of its own; None where the time does not suffice for it."""
    path = directory / "overhead.json"
    rounds = ["--rounds", str(QUICK_OVERHEAD_ROUNDS)] if quick else []
    command = [sys.executable, "-m", "perf.overhead", *rounds, "--json", str(path)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.suppress(subprocess.TimeoutExpired, OSError), running(command, cwd=ROOT, **quiet) as process:
        process.wait(max(seconds, 0.1))
    # Whoever was stopped while it wrote has left half of it.
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None
