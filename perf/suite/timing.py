"""Timers of a processor and of a GPU, samples of all providers in turn, and copies to compare with.

`triton.testing` and `torch.utils.benchmark` time one function to its end before the next, after a warm-up of its own;
the first on one set of tensors, which small ones spend in the L2 cache. Here tensors rotate, and so do providers: who
is compared has seen the same clock and the same neighbors.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import math
import statistics
import sys
import time
import timeit
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import benchmark

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Step = Callable[[], Any]
    Spread = dict[str, float]

# A rotation leaves this many cache sizes between two uses of a tensor.
CACHES_PER_ROTATION = 3
MAX_SETS = 256
MAX_CALLS = 400
MIN_ROUNDS = 5
WARM_UP_SECONDS = 0.2
CALIBRATION_SECONDS = 0.05
# Long enough that what comes before the first kernel of a replay, one or two microseconds, is a thousandth of it.
GRAPH_SECONDS = 1.5e-3
# Steps of dozens of kernels take long to capture, and need no more for a long replay.
MAX_GRAPH_CALLS = 128
# No kernel takes less, however small.
SHORTEST_SECONDS = 2e-6
# Cycles that keep the device busy while the events and the replay are queued up behind: 50 microseconds for a call, and
# half a microsecond for each node of the graph. A sleep that ends too soon would count as time of the kernels.
SLEEP_CYCLES, NODE_CYCLES = 100_000, 1_000
# Where the nodes cannot be counted: as many as the longest eager chains have.
UNKNOWN_LAUNCHES = 60
# Triton and Inductor tune, and cuBLAS allocates, in the first calls; neither may happen in a capture.
CALLS_BEFORE_CAPTURE = 3
# Parameters of glibc's mallopt: how much free memory at the end of the heap goes back to the system, and how many large
# allocations may be mappings of their own.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


@dataclass(frozen=True)
class Prepared:
    """A provider's steps, one for each set of tensors, ready to be timed."""

    steps: Sequence[Step]
    # Replayed for the device time.
    graph: Any = None
    graph_calls: int = 0
    # Kernels, copies and memsets of a step, if the driver says.
    launches: int | None = None
    # Why there is no graph where there should be one.
    obstacle: str | None = None


class CpuTimer:
    """Time of calls; a processor has no time of its own beside it.

    With one thread it is processor time, which other processes on the machine take no part of; with more, wall time.
    """

    has_device_time = False
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
        keep_freed_memory()

    def num_sets(self, set_bytes: int) -> int:
        """Sets of tensors: one, as in training a call finds in the cache what the call before has left there."""
        return 1

    def prepare(self, steps: Sequence[Step], seconds: float) -> Prepared:
        """Make `steps` ready, of which one takes about `seconds`."""
        return Prepared(steps)

    def device_seconds(self, prepared: Prepared) -> float:
        """One sample of the time of a step on the device, without what the processor does for it."""
        raise NotImplementedError("CpuTimer: there is no device time on a CPU.")

    def call_seconds(self, prepared: Prepared, calls: int) -> float:
        """One sample of the time of a step as a user calls it, over `calls` calls in a row."""
        steps = itertools.cycle(prepared.steps)

        def rotate() -> None:
            next(steps)()

        step = rotate if len(prepared.steps) > 1 else prepared.steps[0]
        return timeit.Timer(step, timer=self.clock).timeit(calls) / calls

    def peak_bytes(self, prepared: Prepared) -> int | None:
        """Memory that a step takes beyond its inputs; torch does not count allocations of a CPU."""
        return None

    def wait(self) -> None:
        """Return when the device is idle; raises what went wrong on it since the last time."""

    def release(self) -> None:
        """Give memory back that nobody holds."""
        gc.collect()


def keep_freed_memory() -> None:
    """Have the process keep the memory that it frees, where its C library is glibc.

    Otherwise it follows from what was allocated before whether a call finds its output's memory at hand, or fetches it
    from the system page by page, which takes as long as layer norm itself.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MMAP_MAX, 0)


class CudaTimer(CpuTimer):
    """Replays CUDA graphs whose steps go round over sets of tensors, on the GPU that the worker owns.

    Everything that a worker does on the device runs on one stream of its own, so that captures, and the backward passes
    in them, which run on the stream of their forward pass, need no synchronization with another.

    A capture that fails leaves torch's allocator waiting for its end, and its generator of random numbers in the state
    of the capture; nothing that this process measures afterwards could be trusted. A step is therefore first tried with
    synchronization forbidden, which is what most captures fail of, and the process is `unfit` after a failed capture.
    """

    has_device_time = True
    # Long enough for a clock to resolve a thousandth of it.
    sample_seconds = 2e-3
    max_rounds = 60

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        # It waits for the device.
        self.clock = benchmark.timer
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size

    def num_sets(self, set_bytes: int) -> int:
        """Sets that are three times as large as the L2 cache together."""
        return min(math.ceil(CACHES_PER_ROTATION * self.cache_bytes / max(set_bytes, 1)) or 1, MAX_SETS)

    def prepare(self, steps: Sequence[Step], seconds: float) -> Prepared:
        """Capture enough steps for a sample; the results of a round stay alive during it, so that they differ.

        Without a graph, and with what stands in the way of one, where the step waits for the device or the capture
        fails. What the step itself raises goes to the caller.
        """
        for step in [*steps, *[steps[0]] * CALLS_BEFORE_CAPTURE]:
            step()
        self.wait()
        obstacle = "an earlier capture failed in this process" if self.unfit else self._waits(steps[0])
        if obstacle is not None:
            return Prepared(steps, obstacle=obstacle)
        calls = max(len(steps), min(math.ceil(GRAPH_SECONDS / max(seconds, SHORTEST_SECONDS)), MAX_GRAPH_CALLS))
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            self._capture(graph, steps, calls)
        # Whatever it is, the step works without a capture, as the calls above have shown. The end of a failed capture
        # raises over the reason why it failed.
        except Exception as error:
            self.unfit = True
            return Prepared(steps, obstacle=describe(error.__context__ or error))
        graph.instantiate()
        nodes = _graph_nodes(graph)
        return Prepared(steps, graph, calls, None if nodes is None else round(nodes / calls))

    def _waits(self, step: Step) -> str | None:
        """What torch says if a step waits for the device, which no capture allows; None if it does not."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        # Only torch knows the type; that a step without this mode raises nothing was seen before.
        except Exception as error:
            return describe(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.wait()
        return None

    def _capture(self, graph: torch.cuda.CUDAGraph, steps: Sequence[Step], calls: int) -> None:
        results: list[Any] = [None] * len(steps)
        # A collection in between could destroy other graphs, which a capture may not see.
        gc.disable()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                for i in range(calls):
                    results[i % len(steps)] = steps[i % len(steps)]()
        finally:
            gc.enable()

    def device_seconds(self, prepared: Prepared) -> float:
        """Seconds of a step in a replay, between two events that wait with it behind a busy device."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        launches = UNKNOWN_LAUNCHES if prepared.launches is None else prepared.launches
        torch.cuda._sleep(SLEEP_CYCLES + NODE_CYCLES * launches * prepared.graph_calls)
        start.record()
        prepared.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / prepared.graph_calls

    def peak_bytes(self, prepared: Prepared) -> int | None:
        """Memory that the allocator handed out at most during a step, beyond what was in use before."""
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        prepared.steps[0]()
        return torch.cuda.max_memory_allocated(self.device) - before

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Destroy graphs that nobody holds, and give cached memory back to other processes."""
        gc.collect()
        torch.cuda.empty_cache()


def _graph_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    """Nodes of a captured graph: kernels, copies, memsets. None where the driver is not NVIDIA's."""
    count = ctypes.c_size_t()
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)) == 0:
            return count.value
    return None


def describe(error: BaseException, characters: int = 500) -> str:
    """Type and first paragraph of an error, short enough for a table."""
    text = str(error).strip().split("\n\n")[0]
    return f"{type(error).__name__}: {text}"[:characters]


def calls_per_sample(seconds: float, sample_seconds: float) -> int:
    """Calls of `seconds` each that make up a sample."""
    return max(1, min(math.ceil(sample_seconds / max(seconds, 1e-9)), MAX_CALLS))


def spread(samples: Sequence[float], unit: float = 1.0) -> Spread:
    """Median, 20 % and 80 % quantiles, and number of at least one sample, in `unit`."""
    low, _, _, high = statistics.quantiles(
        samples if len(samples) > 1 else [*samples, *samples], n=5, method="inclusive"
    )
    middle = statistics.median(samples)
    return {"median": middle * unit, "p20": low * unit, "p80": high * unit, "samples": len(samples)}


def interleave(
    samplers: Mapping[str, Callable[[], float]],
    seconds: float,
    max_rounds: int,
    min_rounds: int = MIN_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Samples of all providers in rounds, of which each begins with another provider.

    A clock that drifts, or a neighbor that comes and goes, then favors nobody, and the samples of one round can be
    compared with each other.

    Args:
        samplers: What takes one sample, for each provider.
        seconds: Time after which no round begins.
        max_rounds: Rounds after which there is nothing to gain.
        min_rounds: Rounds that are run whatever they take.
        clock: Seconds.

    Returns:
        The samples of each provider, one for every round.
    """
    names = list(samplers)
    samples: dict[str, list[float]] = {name: [] for name in names}
    start = clock()
    for index in range(max_rounds if names else 0):
        if index >= min_rounds and clock() - start >= seconds:
            break
        first = index % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(samplers[name]())
    return samples


def warm_up(samplers: Mapping[str, Callable[[], float]], seconds: float) -> dict[str, float]:
    """Run all providers in turn until `seconds` have passed, at least twice, and say how long the last samples took."""
    samples = interleave(samplers, seconds, sys.maxsize, min_rounds=2)
    return {name: taken[-1] for name, taken in samples.items()}


def calibrate(timer: CpuTimer, total_bytes: int) -> dict[str, float]:
    """Bandwidths in GB/s of moving `total_bytes`, all reads and writes: copied, only read, two reads for one write.

    Raises:
        RuntimeError: If a copy cannot be captured; a fraction of its speed would mean nothing then.
    """

    def tensors(parts: int) -> list[torch.Tensor]:
        return [torch.ones(max(total_bytes // parts // 4, 1), device=timer.device) for _ in range(parts)]

    kinds: dict[str, tuple[int, Callable[..., Any]]] = {
        "copy_gbps": (2, lambda source, target: target.copy_(source)),
        "read_gbps": (1, torch.sum),
        "two_reads_one_write_gbps": (3, lambda first, second, target: torch.add(first, second, out=target)),
    }
    samplers: dict[str, Callable[[], float]] = {}
    for name, (parts, operate) in kinds.items():
        steps = [partial(operate, *tensors(parts)) for _ in range(timer.num_sets(total_bytes))]
        # Any bandwidth of this order sizes the samples well enough.
        prepared = timer.prepare(steps, total_bytes / 4e12)
        if prepared.obstacle is not None:
            raise RuntimeError(f"calibration: no copy can be captured: {prepared.obstacle}.")
        samplers[name] = partial(timer.device_seconds, prepared)
        if not timer.has_device_time:
            calls = calls_per_sample(timer.call_seconds(prepared, 1), timer.sample_seconds)
            samplers[name] = partial(timer.call_seconds, prepared, calls)
    warm_up(samplers, CALIBRATION_SECONDS / 2)
    samples = interleave(samplers, CALIBRATION_SECONDS, timer.max_rounds)
    return {name: total_bytes / statistics.median(taken) / 1e9 for name, taken in samples.items()}
