"""Kernel tests run in Triton's interpreter.

With `--device cuda` those that take the device run the compiled kernels on it, with `--device sm_80` and `sm_90` they
emulate them (see `check_kernel`). On all, memory is poisoned with NaN before a kernel writes it.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Turn the interpreter on, or leave it off: Triton asks when it is imported, so nothing above imports it."""
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.kernels import fast_interpreter

        fast_interpreter.install()
    elif _is_emulated(config):
        from primitives.kernels.runtime.chips import CHIPS, use_chip

        few = dataclasses.replace(CHIPS[str(config.getoption("--device"))], num_processors=4)
        plans = contextlib.ExitStack()
        plans.enter_context(use_chip(few))
        config.add_cleanup(plans.close)


def _is_emulated(config: pytest.Config) -> bool:
    return str(config.getoption("--device")).startswith("sm_")


@pytest.fixture(autouse=True)
def emulation(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With `--device sm_80`, launches are compiled for it and emulated, and nothing wrong may be reported."""
    if not _is_emulated(pytestconfig):
        yield
        return
    from primitives.testing._ptx.launching import emulated

    # Public functions launch kernels on tensors of the CPU too.
    monkeypatch.setattr("primitives._core.backend.require_interpreter", lambda op_name: None)
    with emulated(str(pytestconfig.getoption("--device"))) as seen:
        yield
    assert not seen.faults, "\n".join(map(str, seen.faults))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that an output which no kernel writes cannot pass."""
    mode, fill = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    # On a GPU the references may take what torch has no deterministic version of.
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def on_device(device: torch.device) -> Iterator[None]:
    """Make the tensors of a test where the kernels run."""
    with device if device.type == "cuda" else contextlib.nullcontext():
        yield


@pytest.fixture
def interpreter(pytestconfig: pytest.Config, device: torch.device) -> None:
    """Skip a test on a device or for a chip: it looks at single loads and stores."""
    if pytestconfig.getoption("--device") != "cpu":
        pytest.skip("needs Triton's interpreter")


@pytest.fixture
def use_limits() -> Iterator[Callable[..., None]]:
    """Function that makes plans keep to other limits until the test ends: those of a chip that holds almost nothing."""
    from primitives.kernels.runtime.chips import use_limits

    with contextlib.ExitStack() as stack:
        yield lambda **limits: stack.enter_context(use_limits(**limits))


@pytest.fixture
def use_processors(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Function that makes plans count on another number of processors until the test ends."""
    from primitives.kernels.runtime.chips import chip_of, use_chip

    with contextlib.ExitStack() as stack:
        chip = chip_of(device)
        yield lambda num: stack.enter_context(use_chip(dataclasses.replace(chip, num_processors=num)))


@pytest.fixture
def only_the_last_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[None]:
    """Launch two programs: the last ones of the grid. A device has the time for all, and the memory."""
    if device.type == "cuda":
        yield
        return
    import numpy as np
    from triton.runtime import interpreter

    from primitives.kernels.runtime.kernel import intercept
    from tests.kernels.calls import need_memory

    need_memory(0)
    # Pages that nothing touches take no memory.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    base = [0]
    program_id = interpreter.InterpreterBuilder.create_get_program_id

    def shifted(self, axis):
        handle = program_id(self, axis)
        return interpreter.TensorHandle(handle.data + np.int32(base[0]), handle.dtype)

    def run(kernel, grid, args, constants):
        base[0] = grid[0] - 2
        kernel.function[(2,)](*args, **constants)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", shifted)
    with intercept(run):
        yield
