"""Time of the host: calls that repeat an earlier one beside Triton's own launches of the same kernels.

`kernel_calls` runs the check; `python -m tests.kernels.host_time` prints the times of each launcher.
"""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from perf.calls import Attention, BatchNorm, Call, LayerNorm, LogSoftmax
from tests.kernels.calls import dropout_calls, launched_by
from tests.kernels.stand_ins import stand_ins

if TYPE_CHECKING:
    from collections.abc import Callable

# The most that a call may take, of the time of Triton's own launches of the same kernels. Calls take 0.4 to 0.9 by a
# recipe and 1.2 to 4 without, nearly all of them more than 1.5.
MOST_OF_TRITON = 1.5
ROUNDS, CALLS_PER_ROUND = 15, 10


def timed_calls() -> list[Call]:
    """A call of each launcher, as rules call it."""
    images, attention = BatchNorm.draw((8, 16, 14, 14)), Attention.draw((2, 4, 64, 32), 64)
    operands = images, LayerNorm.draw((64, 512)), LogSoftmax.draw((64, 512), 1), attention
    return [*(call for each in operands for call in each.calls()), dropout_calls()[0]]


def time_in_launches(call: Call, run: Callable[[], Any]) -> float:
    """Median time of `run`, in times of Triton's own launches of what the call launches."""
    made = launched_by(call.results)

    def launch_all() -> None:
        for kernel, grid, args, constants in made:
            kernel.function[grid](*args, **constants)

    def processor_time(function: Callable[[], Any]) -> float:
        start = time.process_time()
        for _ in range(CALLS_PER_ROUND):
            function()
        return time.process_time() - start

    for function in (launch_all, run, run):
        function()
    return statistics.median(processor_time(run) / processor_time(launch_all) for _ in range(ROUNDS))


def check_host_time() -> None:
    """A call takes little more than Triton takes to find its kernels."""
    gc.disable()
    with stand_ins():
        found = [(call.launcher.__name__, time_in_launches(call, call.results)) for call in timed_calls()]
    gc.enable()
    slow = [(name, ratio) for name, ratio in found if ratio > MOST_OF_TRITON]
    assert not slow, slow


if __name__ == "__main__":
    gc.disable()
    with stand_ins():
        for timed in timed_calls():
            plain: Any = timed.launcher.__wrapped__  # pyright: ignore[reportFunctionMemberAccess] - decorated
            before, after = (time_in_launches(timed, run) for run in (partial(plain, *timed.args), timed.results))
            print(f"{timed.launcher.__name__:<22} without a recipe {before:.2f}, with it {after:.2f}")  # noqa: T201 - what a user asked for
