"""The calls whose kernels are compiled: every launcher at the suite's columns and dtypes, and at some that it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from perf.ops import CASES
from perf.workloads import GPU_WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.calls import Call
    from perf.ops.workload import Workload


def cases() -> Iterator[tuple[str, Workload, list[Call]]]:
    """Name, workload and calls of every case, the suite's first; their tensors are never touched."""
    for workload in (*GPU_WORKLOADS, *(other for case in CASES for other in case.other_workloads)):
        for mode in workload.modes:
            yield f"{workload.case} {mode}", workload, calls_of(workload, mode)


def calls_of_steps(workload: Workload, mode: str) -> list[Call]:
    """The calls of launchers that one step of a mode of the suite makes, on meta tensors."""
    steps = workload.record.steps[mode]
    with torch.device("meta"):
        calls = [calls_of(workload, step)[0] for step in steps]
    # One call gives value and tangent at once, where there is a launcher for it.
    at_once = steps[:2] == ("forward", "jvp") and calls[1].launcher.__name__.endswith("_fwd_jvp")
    return calls[at_once:]


def launch_mode(workload: Workload, mode: str) -> None:
    """Make the calls of one mode of an op."""
    for call in calls_of(workload, mode):
        call.results()


def calls_of(workload: Workload, mode: str) -> list[Call]:
    """The calls of one mode of an op, as the rules of the op make them."""
    return workload.record.calls(workload, mode, False)
