"""Shared by all tests: the device that the records run on, and the implementations that they run."""

import atexit
import gc
import os
import pathlib
from collections.abc import Iterator

import pytest
import torch

KERNEL_TESTS = pathlib.Path(__file__).parent / "kernels"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--device`."""
    parser.addoption(
        "--device",
        choices=("cpu", "cuda", "sm_80", "sm_90"),
        default="cpu",
        help="where the tests that take the device fixture run: on cuda they run the Triton kernels themselves, for "
        "sm_80 and sm_90 compiled and emulated on the CPU",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that use the device are what `-m gpu` selects on a device; what needs a GPU is skipped without one."""
    name = config.getoption("--device")
    items[:] = [item for item in items if not _has_its_turn_elsewhere(item)]
    for item in items:
        if item.get_closest_marker("gpu") and name != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with --device cuda"))
        elif name != "cpu" and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        elif name != "cpu" and KERNEL_TESTS in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs Triton's interpreter, or no kernel: run without --device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage rarely, and not among what importing made: tracers make that a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()
    # Triton's bindings complain of whatever is never freed. A worker has sent what it found: freeing all takes seconds.
    atexit.register(*(os._exit, 0) if hasattr(session.config, "workerinput") else (gc.unfreeze,))
    gc.set_threshold(20_000, 10, 10)


def _has_its_turn_elsewhere(item: pytest.Item) -> bool:
    """Whether another of the backends of this process has the turn of a test for which one of them is enough."""
    marker, callspec = item.get_closest_marker("in_turns"), getattr(item, "callspec", None)
    backend = callspec.params.get("backend") if callspec else None
    return marker is not None and backend in FRONT and backend != FRONT[marker.args[0] % len(FRONT)]


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Device of the tensors that a test makes."""
    name = pytestconfig.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.exit("--device cuda: torch sees no CUDA device.", returncode=pytest.ExitCode.USAGE_ERROR)
    return torch.device("cuda" if name == "cuda" else "cpu")


BACKENDS = {"reference": "reference", "cpu": "auto", "triton": "triton", "cuda": "auto"}
FRONT = ("reference", "cpu")


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of records run on every implementation that a process has, for each of their parameters in turn."""
    if "backend" not in metafunc.fixturenames:
        return
    if KERNEL_TESTS in metafunc.definition.path.parents:
        names = ["triton"]
    else:
        names = ["cuda"] if metafunc.config.getoption("--device") == "cuda" else FRONT
    metafunc.parametrize("backend", names, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which implementation every primitive runs: the reference, kernels for the CPU, or Triton's."""
    from primitives import use_backend

    with use_backend(BACKENDS[request.param]):
        yield request.param


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of this package run primitives, and leave no plain call to a kernel of torch's."""
    monkeypatch.setattr("primitives._repair.plain._DTYPES", ())


@pytest.fixture(autouse=True)
def torch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node is repaired that an earlier test recorded: after an `undo`, all of them are."""
    monkeypatch.setattr("primitives._repair.nodes._Recorded.until", 0)


@pytest.fixture
def seeded() -> None:
    """Random numbers that are the same in every run."""
    torch.manual_seed(0)
