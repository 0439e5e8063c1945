"""One option for every test: the device that the records run on."""

from __future__ import annotations

import pathlib

import pytest
import torch

KERNEL_TESTS = pathlib.Path(__file__).parent / "kernels"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--device`."""
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the tests that take the device fixture run; on cuda they run the Triton kernels themselves",
    )


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Leave the interpreter's tests out on a device: importing them would turn the interpreter on for all others."""
    on_device = config.getoption("--device") == "cuda"
    return True if on_device and collection_path == KERNEL_TESTS else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that use the device are what `-m gpu` selects on a device; what needs a GPU is skipped without one."""
    on_device = config.getoption("--device") == "cuda"
    for item in items:
        if on_device and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        elif not on_device and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with --device cuda"))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Device of the tensors that a test makes."""
    name = pytestconfig.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.exit("--device cuda: torch sees no CUDA device.", returncode=pytest.ExitCode.USAGE_ERROR)
    return torch.device(name)


@pytest.fixture
def seeded() -> None:
    """Random numbers that are the same in every run."""
    torch.manual_seed(0)
