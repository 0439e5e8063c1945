"""Gives each worker its GPU, and the tests their units; `perf.suite.run` starts pytest with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perf.suite.plan import compile_items

if TYPE_CHECKING:
    from perf.suite.timing import CpuTimer


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the plan of the run lies."""
    parser.addoption("--plan", type=Path, help="file with the plan of a run; `python -m perf run` writes it")


def pytest_configure(config: pytest.Config) -> None:
    """Show a worker the one GPU that it owns, before torch looks for GPUs."""
    gpu = getattr(config, "workerinput", {}).get("gpu")
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each unit of the plan, and to compile one for each unit and provider."""
    if metafunc.config.option.plan is None:
        raise pytest.UsageError("the units of the perf suite are run by `python -m perf run`.")
    plan = _plan(metafunc.config)
    if "provider" in metafunc.fixturenames:
        items = compile_items(plan)
        metafunc.parametrize("unit, provider", items, ids=[f"{unit['id']}: {name}" for unit, name in items])
    elif "unit" in metafunc.fixturenames:
        metafunc.parametrize("unit", plan["units"], ids=[unit["id"] for unit in plan["units"]])


def _plan(config: pytest.Config) -> dict[str, Any]:
    return json.loads(config.option.plan.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def plan(pytestconfig: pytest.Config) -> dict[str, Any]:
    """The plan of the run."""
    return _plan(pytestconfig)


@pytest.fixture(scope="session")
def gpu(pytestconfig: pytest.Config) -> str | None:
    """UUID of the GPU that this worker owns; None on a processor."""
    return getattr(pytestconfig, "workerinput", {}).get("gpu")


@pytest.fixture(scope="session")
def timer(plan: dict[str, Any]) -> CpuTimer:
    """The timer of the device."""
    import torch._functorch.config as functorch_config

    from perf.suite import timing

    # Backward passes are run more than once, which buffers that Inductor gives away would not survive.
    functorch_config.donated_buffer = False
    return timing.CudaTimer() if plan["device"] == "cuda" else timing.CpuTimer()


@pytest.fixture(scope="session")
def calibrations() -> dict[str, dict[str, float]]:
    """Copy speeds of this worker's device by bytes."""
    return {}
