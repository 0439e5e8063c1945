"""Kernel tests run in Triton's interpreter, on memory that is poisoned with NaN before a kernel writes it.

No kernel may touch anything but the elements of its arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

# Read by triton when it is imported, so set before any test module is.
os.environ["TRITON_INTERPRET"] = "1"

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.kernels import interpreting
from triton_kernels import launch
from triton_kernels._kernel import intercept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

interpreting.install()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that an output which no kernel writes cannot pass."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def device() -> torch.device:
    """The interpreter's: kernels that are interpreted see CPU tensors."""
    return torch.device("cpu")


@pytest.fixture
def use_limits() -> Iterator[Callable[..., None]]:
    """Function that makes plans keep to other limits until the test ends: those of a chip that holds almost nothing."""
    with contextlib.ExitStack() as stack:
        yield lambda **limits: stack.enter_context(launch.use_limits(**limits))


@pytest.fixture
def use_processors(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Function that makes plans count on another number of processors until the test ends."""
    with contextlib.ExitStack() as stack:
        chip = launch.chip_of(device)
        yield lambda num: stack.enter_context(launch.use_chip(dataclasses.replace(chip, num_processors=num)))


@pytest.fixture
def only_the_last_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launch two programs: the last ones of the grid."""
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
