"""What kernels read and multiply in Triton's interpreter.

What leaves a tensor, or depends on the order of programs, shows on the emulator (`tests/ptx`).
"""

import contextlib
import math
import unittest.mock
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class Accesses(NamedTuple):
    """Addresses of the elements that one load of a program read: one per active lane."""

    addresses: np.ndarray
    program: tuple[int, ...]

    def within(self, start: int, stop: int) -> np.ndarray:
        """Those in a range of addresses."""
        return self.addresses[(self.addresses >= start) & (self.addresses < stop)]


class Launch:
    """A launch of as many programs, their loads and how many products of matrices they take."""

    def __init__(self, num_programs: int) -> None:
        self.num_programs, self.num_matmuls = num_programs, 0
        self.loads: list[Accesses] = []


@contextlib.contextmanager
def watched() -> Iterator[list[Launch]]:
    """Record the launches inside, with all that they load and multiply."""
    seen: list[Launch] = []
    run, load, dot = GridExecutor.__call__, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_dot

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(Launch(math.prod(self.grid)))
        return run(self, *args, **kwargs)

    def loaded(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        active = np.broadcast_to(mask.data, pointers.data.shape)
        seen[-1].loads.append(Accesses(pointers.data[active], self.grid_idx))
        return load(self, pointers, mask, *others)

    def multiplied(self: Any, *args: Any) -> Any:
        seen[-1].num_matmuls += 1
        return dot(self, *args)

    in_class = {"create_masked_load": loaded, "create_dot": multiplied}
    with (
        unittest.mock.patch.object(GridExecutor, "__call__", launched),
        unittest.mock.patch.multiple(InterpreterBuilder, **in_class),
    ):
        yield seen
