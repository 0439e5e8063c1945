"""The one interface that everything is timed through, its CPU form, and how samples are taken and summed up.

`triton.testing.do_bench_cudagraph` replays one call on one set of tensors, which small tensors spend in the L2 cache,
and `torch.utils.benchmark` times one function to its end before the next: neither rotates tensors nor providers.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Step = Callable[[], Any]

# A rotation leaves this many cache sizes between two uses of a tensor.
CACHES_PER_ROTATION = 3
MAX_SETS = 256
MAX_CALLS = 400
MIN_ROUNDS = 5
WARM_UP_SECONDS = 0.2


class Prepared(NamedTuple):
    """A provider's steps, ready to be timed.

    Attributes:
        steps: One for each set of tensors; they do the same.
        graph: Whatever the timer replays for the device time, or None.
        graph_calls: Steps in the graph.
        launches: Kernels, copies and memsets of a step, if the timer can tell.
        obstacle: Why there is no graph where there should be one.
    """

    steps: Sequence[Step]
    graph: Any = None
    graph_calls: int = 0
    launches: int | None = None
    obstacle: str | None = None


class Timer(Protocol):
    """Times steps on one device."""

    device: torch.device
    has_device_time: bool
    # A sample takes so long at least, and there is nothing to gain after so many of them.
    sample_seconds: float
    max_rounds: int
    # Whether a failure has left the process unfit to measure more.
    unfit: bool

    def num_sets(self, set_bytes: int) -> int:
        """Sets of tensors of a rotation, given the bytes that a step touches in one."""
        ...

    def prepare(self, steps: Sequence[Step], seconds: float) -> Prepared:
        """Make `steps` ready; `seconds` is about what one takes."""
        ...

    def device_seconds(self, prepared: Prepared) -> float:
        """One sample of the time of a step on the device, without what the processor does for it."""
        ...

    def call_seconds(self, prepared: Prepared, calls: int) -> float:
        """One sample of the time of a step as a user calls it, over `calls` calls in a row."""
        ...

    def peak_bytes(self, prepared: Prepared) -> int | None:
        """Memory that a step takes beyond its inputs, if the timer can tell."""
        ...

    def wait(self) -> None:
        """Return when the device is idle; raises what went wrong on it since the last time."""
        ...

    def release(self) -> None:
        """Give memory back that nobody holds."""
        ...


# Parameters of glibc's mallopt: how much free memory at the end of the heap goes back to the system (-1: none), and how
# many large allocations may be mappings of their own.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Have the process keep the memory that it frees, where its C library is glibc; returns whether it does.

    Otherwise it follows from what was allocated before whether a call finds its output's memory at hand, or fetches it
    from the system page by page, which takes as long as layer norm itself.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all([mallopt(_TRIM_THRESHOLD, -1), mallopt(_MMAP_MAX, 0)])


class CpuTimer:
    """Time of calls; a processor has no time of its own beside it.

    With one thread it is processor time, which other processes on the machine take no part of; with more, wall time.
    """

    has_device_time = False
    # A processor's clock resolves a hundredth of it. More calls in a row would find their own code in the caches, which
    # in training everything else has been through since.
    sample_seconds = 2e-4
    max_rounds = 240
    unfit = False

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """Time with `clock`, by default with the one that fits the number of torch's threads."""
        self.device = torch.device("cpu")
        self._clock = clock or (time.process_time if torch.get_num_threads() == 1 else time.perf_counter)

    def num_sets(self, set_bytes: int) -> int:
        """One: what a call finds in the cache is what the call before left there, as in training."""
        return 1

    def prepare(self, steps: Sequence[Step], seconds: float) -> Prepared:
        """The steps as they are."""
        return Prepared(steps)

    def device_seconds(self, prepared: Prepared) -> float:
        """Never called."""
        raise NotImplementedError("CpuTimer: there is no device time on a CPU.")

    def call_seconds(self, prepared: Prepared, calls: int) -> float:
        """Seconds of a call."""
        step = prepared.steps[0]
        start = self._clock()
        for _ in range(calls):
            step()
        return (self._clock() - start) / calls

    def peak_bytes(self, prepared: Prepared) -> int | None:
        """Not known: torch counts no allocations of a CPU."""
        return None

    def wait(self) -> None:
        """Return at once."""

    def release(self) -> None:
        """Do nothing: the allocator of a CPU keeps nothing that matters."""


def rotation(set_bytes: int, cache_bytes: int) -> int:
    """Sets of tensors so that three times the cache is touched before a set comes round again."""
    return min(math.ceil(CACHES_PER_ROTATION * cache_bytes / max(set_bytes, 1)) or 1, MAX_SETS)


def calls_per_sample(seconds: float, sample_seconds: float) -> int:
    """Calls of `seconds` each that make up a sample."""
    return max(1, min(math.ceil(sample_seconds / max(seconds, 1e-9)), MAX_CALLS))


class Quantiles(NamedTuple):
    """Samples summed up: median, 20 % and 80 % quantiles, and how many there were."""

    median: float
    p20: float
    p80: float
    samples: int

    def scaled(self, factor: float) -> dict[str, float]:
        """As a record, in another unit."""
        return {
            "median": self.median * factor,
            "p20": self.p20 * factor,
            "p80": self.p80 * factor,
            "samples": self.samples,
        }


def quantiles(samples: Sequence[float]) -> Quantiles:
    """Summary of at least one sample."""
    if len(samples) == 1:
        return Quantiles(samples[0], samples[0], samples[0], 1)
    low, _, _, high = statistics.quantiles(samples, n=5, method="inclusive")
    return Quantiles(statistics.median(samples), low, high, len(samples))


def interleave(
    samplers: Mapping[str, Callable[[], float]],
    budget: float,
    *,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int,
    out_of_time: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Samples of all providers in rounds, of which each begins with another provider.

    A clock that drifts, or a neighbor that comes and goes, then favors nobody, and the samples of one round can be
    compared with each other.

    Args:
        samplers: What takes one sample, for each provider.
        budget: Seconds after which no round begins.
        min_rounds: Rounds that are run whatever they take.
        max_rounds: Rounds after which there is nothing to gain.
        out_of_time: Whether the run has no time left: then the round that is under way, or the first, is the last.
        clock: Seconds.

    Returns:
        The samples of each provider, one for every round.
    """
    names = list(samplers)
    samples: dict[str, list[float]] = {name: [] for name in names}
    start = clock()
    for index in range(max_rounds if names else 0):
        if (index >= min_rounds and clock() - start >= budget) or (index > 0 and out_of_time()):
            break
        first = index % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(samplers[name]())
    return samples


def warm_up(samplers: Mapping[str, Callable[[], float]], seconds: float) -> dict[str, float]:
    """Run all providers in turn until `seconds` have passed, at least twice, and say how long the last samples took."""
    last: dict[str, float] = {}
    start = time.perf_counter()
    rounds = 0
    while samplers and (rounds < 2 or time.perf_counter() - start < seconds):
        last = {name: sampler() for name, sampler in samplers.items()}
        rounds += 1
    return last


def ratios(samples: Sequence[float], baseline: Sequence[float]) -> Quantiles:
    """Samples over those of a baseline, round by round."""
    return quantiles([a / b for a, b in zip(samples, baseline, strict=True)])
