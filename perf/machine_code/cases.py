"""The calls whose kernels are compiled: every launcher at the bench's columns and dtypes, and at some that it lacks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from perf.calls import Call
from perf.ops import CASES
from perf.ops.workload import Workload
from perf.workloads import GPU_WORKLOADS


def cases() -> Iterator[tuple[str, Workload, list[Call]]]:
    """Name, workload and calls of every case, the bench's first; their tensors have no memory."""
    for workload in (*GPU_WORKLOADS, *(other for case in CASES for other in case.other_workloads)):
        for mode in workload.modes:
            yield f"{workload.case} {mode}", workload, calls_of(workload, mode)


def launch_mode(workload: Workload, mode: str) -> None:
    """Make the calls of one mode of an op."""
    for call in calls_of(workload, mode):
        call.results()


def calls_of(workload: Workload, mode: str) -> list[Call]:
    """The calls of one mode of an op, as the rules of the op make them."""
    with torch.device("meta"):
        return workload.record.calls(workload, mode)
