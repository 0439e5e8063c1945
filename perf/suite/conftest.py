"""Options of the cases, and the GPU that a worker owns; `perf.suite.driver` starts pytest with them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from perf.suite.machine import gpu_of_worker
from perf.suite.plan import compile_items


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the plan lies, and which phase of it to run."""
    parser.addoption("--run-directory", type=Path, help="directory of the run, with its plan.json")
    parser.addoption("--phase", choices=("compile", "measure"), help="which items of the plan to run")


def pytest_configure(config: pytest.Config) -> None:
    """Show a worker the one GPU that it owns, before torch looks for GPUs."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    directory = config.getoption("--run-directory")
    if worker and directory is not None:
        gpus = _plan(directory)["gpus"]
        if gpus:
            os.environ["PERF_GPU"] = os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of_worker(worker, gpus)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each unit of the plan, or, to compile, for each unit and provider."""
    directory = metafunc.config.getoption("--run-directory")
    if directory is None:
        raise pytest.UsageError("the cases of the perf suite are run by `python -m perf run`.")
    plan = _plan(directory)
    if metafunc.config.getoption("--phase") == "compile":
        items: list[dict[str, Any]] = [{"unit": unit, "provider": name} for unit, name in compile_items(plan)]
    else:
        # A second attempt is for what the first one left.
        units = [unit for unit in plan["units"] if unit["id"] in plan["to_measure"]]
        items = [{"unit": unit, "provider": None} for unit in units]
    ids = [f"{item['unit']['id']}-{item['provider'] or 'all'}" for item in items]
    metafunc.parametrize("item", items, ids=ids)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """Note in which case a worker died: what is merely unfinished has nothing wrong with it."""
    directory = sched.config.getoption("--run-directory")
    (directory / "crashed").mkdir(exist_ok=True)
    (directory / "crashed" / crashitem.rsplit("[", maxsplit=1)[-1].split("-", maxsplit=1)[0]).touch()


def _plan(directory: Path) -> dict:
    return json.loads((directory / "plan.json").read_text(encoding="utf-8"))
