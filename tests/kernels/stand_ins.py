"""Launches without a GPU or a compiler: in place of each kernel stands what notes its launches."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from primitives.kernels.runtime.chips import CHIPS, use_chip
from primitives.testing._ptx.launching import StandInDriver

launches: list[tuple] = []


class Driver(StandInDriver):
    """Stands in for the driver of a machine with several sm_90, the first of which is in use."""

    device = 0

    def get_current_device(self) -> int:
        """Number of the device in use."""
        return self.device

    def get_current_stream(self, device: int) -> int:
        """Handle of a stream, one per device."""
        return 100 + device

    def unload_module(self, module: Any) -> None:
        """Forget a kernel: nothing was loaded."""


def _compile(source: Any, options: Any = None, **_: Any) -> CompiledKernel:
    """A stand-in for the compiled kernel that notes its launches."""
    known = repr((source.fn.__name__, source.signature, source.constants, source.attrs, options))

    def run(x, y, z, stream, function, packed, metadata, enter_hook, exit_hook, *args):
        if enter_hook is not None:
            enter_hook(metadata)
        launches.append((known, (x, y, z), stream, args))
        if exit_hook is not None:
            exit_hook(metadata)

    compiled = CompiledKernel.__new__(CompiledKernel)
    vars(compiled).update(src=source, name=source.fn.__name__, hash=known, metadata=None, packed_metadata=None)
    vars(compiled).update(module=1, function=2, _module_pid=None, _run=run)
    return compiled


@contextlib.contextmanager
def stand_ins() -> Iterator[Driver]:
    """Context in which launches are planned for sm_90 and noted."""
    driver, config = Driver("sm_90"), triton.runtime.driver
    config.set_active(driver)  # pyright: ignore[reportArgumentType] - it quacks
    with use_chip(CHIPS["sm_90"]), unittest.mock.patch("triton.compiler.compile", _compile):
        yield driver


def launched(run: Callable[[], Any]) -> tuple[list[Tensor], list[tuple]]:
    """Results, and what was launched for them."""
    launches.clear()
    results = run()
    return [results] if isinstance(results, torch.Tensor) else list(results), launches.copy()
