"""Timers of a processor and of a GPU, samples of all providers in turn, and copies to compare with.

`triton.testing` and `torch.utils.benchmark` time one function to its end before the next, after a warm-up of its own;
the first on one set of tensors, which small ones spend in the L2 cache. Here tensors rotate, and so do providers: who
is compared has seen the same clock and the same neighbors.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
import timeit
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import benchmark

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Step = Callable[[], Any]

# A rotation leaves this many cache sizes between two uses of a tensor.
CACHES_PER_ROTATION = 3
MAX_SETS = 256
MAX_CALLS = 400
MIN_ROUNDS = 5
# Long enough that what comes before the first kernel of a replay, one or two microseconds, is a thousandth of it.
GRAPH_SECONDS = 1.5e-3
# Steps of dozens of kernels take long to capture, and need no more for a long replay.
MAX_GRAPH_CALLS = 128
# Cycles for which the device is kept busy while the events and a replay are queued up: 50 microseconds at first.
SLEEP_CYCLES, MAX_SLEEP_CYCLES = 100_000, 25_600_000
# Triton and Inductor tune, and cuBLAS allocates, in the first calls; neither may happen in a capture.
CALLS_BEFORE_CAPTURE = 3


class Prepared(NamedTuple):
    """A provider's steps, one for each set of tensors, and the graph that is replayed for the device time."""

    steps: Sequence[Step]
    graph: Any = None
    graph_calls: int = 0


class CpuTimer:
    """Time of calls; a processor has no time of its own beside it.

    With one thread it is processor time, which other processes on the machine take no part of; with more, wall time.
    """

    # A processor's clock resolves a hundredth of it. More calls in a row would find their own code in the caches, which
    # in training everything else has been through since.
    sample_seconds = 2e-4
    # There is nothing to gain after so many of them.
    max_rounds = 240
    # Whether a failure has left the process unfit to measure more.
    unfit = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        # The timer of a sample of a step over so many calls, by the kind of time; the last shows memory traffic best.
        self.kinds: dict[str, Callable[[Prepared, int], float]] = {"call": self.call_seconds}

    def num_sets(self, set_bytes: int) -> int:
        """Sets of tensors: one, as in training a call finds in the cache what the call before has left there."""
        return 1

    def prepare(self, steps: Sequence[Step], seconds: float) -> Prepared:
        """Make `steps` ready, of which one takes about `seconds`."""
        return Prepared(steps)

    def call_seconds(self, prepared: Prepared, calls: int) -> float:
        """One sample of the time of a step as a user calls it, over `calls` calls in a row."""
        steps = itertools.cycle(prepared.steps)
        return timeit.Timer(lambda: next(steps)(), timer=self.clock).timeit(calls) / calls

    def wait(self) -> None:
        """Return when the device is idle; raises what went wrong on it since the last time."""


class CudaTimer(CpuTimer):
    """Replays CUDA graphs whose steps go round over sets of tensors, on one stream for all that a worker does.

    Backward passes run on the stream of their forward pass, which a capture could not wait for if it were another one.
    A capture that fails leaves torch's allocator waiting for its end, and its generator of random numbers in the state
    of the capture; nothing that this process measures afterwards could be trusted. A step is therefore first tried with
    synchronization forbidden, which is what most captures fail of, and the process is `unfit` after a failed capture.
    """

    # Long enough for a clock to resolve a thousandth of it.
    sample_seconds = 2e-3
    max_rounds = 60

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        # It waits for the device.
        self.clock = benchmark.timer
        self.kinds = {"call": self.call_seconds, "device": self.device_seconds}
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        self.sleep_cycles = SLEEP_CYCLES

    def num_sets(self, set_bytes: int) -> int:
        """Sets that are three times as large as the L2 cache together."""
        return min(math.ceil(CACHES_PER_ROTATION * self.cache_bytes / max(set_bytes, 1)) or 1, MAX_SETS)

    def prepare(self, steps: Sequence[Step], seconds: float) -> Prepared:
        """Capture enough steps for a sample; the results of a round stay alive during it, so that they differ.

        Raises:
            RuntimeError: If the step waits for the device, or cannot be captured.
        """
        for step in [*steps, *[steps[0]] * CALLS_BEFORE_CAPTURE]:
            step()
        self.wait()
        if self.unfit:
            raise RuntimeError("an earlier capture failed in this process.")
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps[0]()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph, results = torch.cuda.CUDAGraph(), [None] * len(steps)
        calls = max(len(steps), min(math.ceil(GRAPH_SECONDS / seconds), MAX_GRAPH_CALLS))
        self.unfit = True
        # A collection in between could destroy other graphs, which a capture may not see.
        gc.disable()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                for i in range(calls):
                    results[i % len(steps)] = steps[i % len(steps)]()
        except Exception as error:
            # The end of a failed capture raises over the reason why it failed.
            raise RuntimeError(f"it cannot be captured: {describe(error.__context__ or error)}") from error
        finally:
            gc.enable()
        self.unfit = False
        return Prepared(steps, graph, calls)

    def device_seconds(self, prepared: Prepared, calls: int) -> float:
        """Seconds of a step in a replay, between two events that wait with it behind a busy device."""
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self.sleep_cycles)
            start.record()
            prepared.graph.replay()
            end.record()
            # A sleep that ends too soon would count as time of the kernels.
            too_soon = start.query() and self.sleep_cycles < MAX_SLEEP_CYCLES
            end.synchronize()
            if not too_soon:
                return start.elapsed_time(end) * 1e-3 / prepared.graph_calls
            self.sleep_cycles *= 2

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)


def describe(error: BaseException) -> str:
    """Type and first paragraph of an error, short enough for a table."""
    text = str(error).strip().split("\n\n")[0]
    return f"{type(error).__name__}: {text}"[:500]


def calls_per_sample(seconds: float, sample_seconds: float) -> int:
    """Calls of `seconds` each that make up a sample."""
    return max(1, min(math.ceil(sample_seconds / max(seconds, 1e-9)), MAX_CALLS))


def spread(samples: Sequence[float], unit: float = 1.0) -> dict[str, float]:
    """Median, 20 % and 80 % quantiles, and number of samples, in `unit`."""
    parts = torch.tensor((0.2, 0.5, 0.8), dtype=torch.float64)
    low, middle, high = torch.tensor(samples, dtype=torch.float64).mul(unit).quantile(parts).tolist()
    return {"median": middle, "p20": low, "p80": high, "samples": len(samples)}


def interleave(
    samplers: Mapping[str, Callable[[], float]], seconds: float, max_rounds: int, min_rounds: int = MIN_ROUNDS
) -> dict[str, list[float]]:
    """Samples of all providers in rounds, until so many seconds have passed or `max_rounds` are over.

    Each round begins with another provider. A clock that drifts, or a neighbor that comes and goes, then favors none,
    and the samples of one round can be compared with each other.
    """
    names = list(samplers)
    samples: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for index in range(max_rounds if names else 0):
        if index >= min_rounds and time.perf_counter() - start >= seconds:
            break
        first = index % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(samplers[name]())
    return samples


def copies(device: torch.device, total_bytes: int, count: int) -> list[Step]:
    """Copies that move `total_bytes` each, all reads and writes, of so many tensors."""

    def tensor() -> torch.Tensor:
        return torch.ones(max(total_bytes // 8, 1), device=device)

    return [partial(tensor().copy_, tensor()) for _ in range(count)]
