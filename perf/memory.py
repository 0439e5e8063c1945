"""Peak memory on the CPU, where the profiler of torch counts every allocation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that are alive at one time while it runs, of what it allocates."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    profiler: Any = profile.profiler
    events = profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    return max(itertools.accumulate(change for *_, change in changes))
