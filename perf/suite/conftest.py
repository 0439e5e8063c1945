"""Gives each worker its GPU, and the tests their units; `perf.suite.run` starts pytest with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from perf.suite.plan import compile_items

if TYPE_CHECKING:
    from perf.suite.timing import CpuTimer


class Worker(NamedTuple):
    """What a worker measures with.

    Attributes:
        plan: Of the run.
        directory: Of the run.
        gpu: UUID of the GPU that it owns; None on a processor.
        timer: Of the device.
        calibrations: Copy speeds of the device by bytes.
    """

    plan: dict[str, Any]
    directory: Path
    gpu: str | None
    timer: CpuTimer
    calibrations: dict[str, dict[str, float]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the plan of the run lies."""
    parser.addoption("--plan", type=Path, help="file with the plan of a run; `python -m perf run` writes it")


def _gpu(config: pytest.Config) -> str | None:
    return getattr(config, "workerinput", {}).get("gpu")


def pytest_configure(config: pytest.Config) -> None:
    """Show a worker the one GPU that it owns, before torch looks for GPUs."""
    if (gpu := _gpu(config)) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each unit of the plan, and to compile one for each unit and provider."""
    path = metafunc.config.option.plan
    if path is None:
        raise pytest.UsageError("the units of the perf suite are run by `python -m perf run`.")
    plan = json.loads(path.read_text(encoding="utf-8"))
    if "provider" in metafunc.fixturenames:
        items = compile_items(plan)
        metafunc.parametrize("unit, provider", items, ids=[f"{unit['id']}: {name}" for unit, name in items])
    elif "unit" in metafunc.fixturenames:
        metafunc.parametrize("unit", plan["units"], ids=[unit["id"] for unit in plan["units"]])


@pytest.fixture(scope="session")
def worker(pytestconfig: pytest.Config) -> Worker:
    """The state of this worker."""
    import torch._functorch.config as functorch_config

    from perf.suite import timing

    # Backward passes are run more than once, which buffers that Inductor gives away would not survive.
    functorch_config.donated_buffer = False
    path = pytestconfig.option.plan
    plan = json.loads(path.read_text(encoding="utf-8"))
    timer = timing.CudaTimer() if plan["device"] == "cuda" else timing.CpuTimer()
    return Worker(plan, path.parent, _gpu(pytestconfig), timer, {})
