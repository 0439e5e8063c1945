"""First calls ahead of the measurements, in parallel: they fill the caches of Triton and Inductor on disk."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any
from unittest import mock

from filelock import FileLock

from perf.suite.tasks import make_task
from perf.suite.unit import UNFIT
from perf.workloads import OURS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from perf.suite.plan import Unit
    from perf.suite.timing import CpuTimer

# Of Inductor's benchmarker, what times on a device. The public ones call each other, or are called by themselves.
BENCHMARKS = ("benchmark", "benchmark_gpu", "benchmark_gpu_with_cuda_graph")


def first_call(unit: Unit, provider: str, timer: CpuTimer, directory: Path) -> None:
    """Make the first call of a provider in a unit; this package's kernels are compiled for it and not launched."""
    task = make_task(unit, timer.device)
    ours = provider == OURS and timer.has_device_time
    with contextlib.suppress(Exception), compile_only() if ours else tuning_alone(directory / "tuning.lock"):
        task.enter(provider)
    # What a provider cannot do, it says when it is measured. Errors of kernels stay with the process, which ends here.
    try:
        timer.wait()
    except Exception:
        os._exit(UNFIT)


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """Context in which this package's kernels are compiled, and kept on disk, instead of launched."""
    from triton_kernels._kernel import intercept

    def warm(kernel: Any, grid: Any, args: tuple, constants: dict[str, Any]) -> None:
        kernel.warmup(*args, grid=grid, **constants)

    with intercept(warm):
        yield


@contextlib.contextmanager
def tuning_alone(path: Path) -> Iterator[None]:
    """Context in which Inductor and Triton time their candidates while no other process does that holds this lock.

    They choose by what they measure. Which of the functions exist depends on the version of torch.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    # Who holds it may take it again: what times a candidate may call something else that times it.
    lock = FileLock(path)

    def alone(timed: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(timed)
        def benchmark(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return timed(*args, **kwargs)

        return benchmark

    timing: list[tuple[Any, str]] = [(benchmarker, name) for name in BENCHMARKS if hasattr(benchmarker, name)]
    with contextlib.suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        timing.append((Autotuner, "_bench"))
    with contextlib.ExitStack() as stack:
        for owner, name in timing:
            stack.enter_context(mock.patch.object(owner, name, alone(getattr(owner, name))))
        yield
