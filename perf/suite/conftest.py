"""Gives each worker its GPU, and the tests their units; `perf.suite.run` starts pytest with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

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


def _plan(config: pytest.Config) -> dict[str, Any]:
    if config.option.plan is None:
        raise pytest.UsageError("the units of the perf suite are run by `python -m perf run`.")
    return json.loads(config.option.plan.read_text(encoding="utf-8"))


def _gpu(config: pytest.Config) -> str | None:
    return getattr(config, "workerinput", {}).get("gpu")


def pytest_configure(config: pytest.Config) -> None:
    """Show a worker the one GPU that it owns, before torch looks for GPUs."""
    if (gpu := _gpu(config)) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each unit of the plan."""
    if "unit" in metafunc.fixturenames:
        units = _plan(metafunc.config)["units"]
        metafunc.parametrize("unit", units, ids=[unit["id"] for unit in units])


@pytest.fixture(scope="session")
def worker(pytestconfig: pytest.Config) -> Worker:
    """The state of this worker."""
    import torch._functorch.config as functorch_config

    from perf.suite import timing

    # Backward passes are run more than once, which buffers that Inductor gives away would not survive.
    functorch_config.donated_buffer = False
    plan = _plan(pytestconfig)
    timer = timing.CudaTimer() if plan["device"] == "cuda" else timing.CpuTimer()
    return Worker(plan, pytestconfig.option.plan.parent, _gpu(pytestconfig), timer, {})
