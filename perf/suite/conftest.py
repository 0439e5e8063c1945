"""Gives each worker its GPU, and the tests their units; `perf.suite.run` starts pytest with it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from perf.suite.plan import Options, make_plan, unit_id

if TYPE_CHECKING:
    from perf.suite.timing import CpuTimer


def pytest_addoption(parser: pytest.Parser) -> None:
    """How the options of a run reach its workers."""
    parser.addoption("--run-options", help="JSON that `python -m perf run` writes")


def pytest_configure(config: pytest.Config) -> None:
    """Show a worker the one GPU that it owns, before torch looks for GPUs."""
    if (gpu := getattr(config, "workerinput", {}).get("gpu")) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def _options(config: pytest.Config) -> Options:
    device, quick, *lists = json.loads(config.option.run_options).values()
    return Options(device, quick, *map(tuple, lists))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each unit of the plan."""
    if "unit" in metafunc.fixturenames:
        metafunc.parametrize("unit", make_plan(_options(metafunc.config)), ids=unit_id)


@pytest.fixture(scope="session")
def options(pytestconfig: pytest.Config) -> Options:
    """Those of the run, with the providers that take part."""
    return _options(pytestconfig)


@pytest.fixture(scope="session")
def timer(options: Options) -> CpuTimer:
    """That of this worker's device."""
    import torch._functorch.config as functorch_config

    from perf.suite import timing

    # Backward passes are run more than once, which buffers that Inductor gives away would not survive.
    functorch_config.donated_buffer = False
    return timing.CudaTimer() if options.device == "cuda" else timing.CpuTimer()
