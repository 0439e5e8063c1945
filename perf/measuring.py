"""How times are taken, of all contestants in turns, so that a clock that drifts favors none; and memory on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import benchmark

from primitives.tracing._torch_private import bottom

Name = TypeVar("Name")


def in_turns(
    samplers: Mapping[Name, Callable[[], float]], seconds: float, least: int = 1, most: int = 10**9
) -> dict[Name, list[float]]:
    """Samples of everybody in rounds, `least` to `most` of them, each of which another one begins."""
    taken: dict[Name, list[float]] = {name: [] for name in samplers}
    order, end = list(samplers), time.perf_counter() + seconds
    for number in range(most if order else 0):
        if number >= least and time.perf_counter() > end:
            break
        for name in order:
            taken[name].append(samplers[name]())
        order.append(order.pop(0))
    return taken


def timer(step: Callable[[], Any], device: torch.device | str = "cpu") -> benchmark.Timer:
    """Torch's timer of a step. On one CPU thread it counts processor time, which other processes take no part of."""
    threads = torch.get_num_threads()
    clock = time.process_time if str(device) == "cpu" and threads == 1 else benchmark.timer
    return benchmark.Timer("step()", globals={"step": step}, timer=clock, num_threads=threads)


def once(step: Callable[[], Any]) -> float:
    """Seconds of one call, and of what it has begun on a GPU."""
    start = benchmark.timer()
    step()
    return benchmark.timer() - start


def saved_bytes(value: Tensor, excluded: Iterable[Tensor]) -> int:
    """Bytes that the graph of a value keeps for the backward pass, besides some tensors."""
    own = {x.untyped_storage().data_ptr() for x in excluded}
    stack: list[Any] = [value.grad_fn]
    seen, kept = set(), {}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [each for each, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")] or ["saved_tensors"]
        for y in pytree.tree_leaves([getattr(node, name, ()) for name in names]):
            # Zero tangents have no memory.
            with contextlib.suppress(AttributeError, RuntimeError):
                storage = (bottom(y) if isinstance(y, torch.Tensor) else y).untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
    return sum(size for number, size in kept.items() if number not in own)


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
