"""Device time by CUDA graphs, and call time, on the GPU that the worker owns."""

from __future__ import annotations

import ctypes
import gc
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from perf.suite.timers import Prepared, rotation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Step = Callable[[], Any]

# Long enough that what comes before the first kernel of a replay, one or two microseconds, is a thousandth of it.
GRAPH_SECONDS = 1.5e-3
# Steps of dozens of kernels take long to capture, and need no more for a long replay.
MAX_GRAPH_CALLS = 128
# No kernel takes less, however small.
SHORTEST_SECONDS = 2e-6
# Cycles that keep the device busy while the events and the replay are queued up behind: 50 microseconds for a call, and
# half a microsecond for each node of the graph. A sleep that ends too soon would count as time of the kernels.
SLEEP_CYCLES = 100_000
NODE_CYCLES = 1_000
# Where the nodes cannot be counted: as many as the longest eager chains have.
UNKNOWN_LAUNCHES = 60
# Triton and Inductor tune, and cuBLAS allocates, in the first calls; neither may happen in a capture.
CALLS_BEFORE_CAPTURE = 3
MESSAGE_CHARACTERS = 300


class CudaTimer:
    """Replays CUDA graphs whose steps go round over sets of tensors.

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
        """Make a stream and stay on it."""
        self.unfit = False
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        self.cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size

    def num_sets(self, set_bytes: int) -> int:
        """Sets that are three times as large as the L2 cache together."""
        return rotation(set_bytes, self.cache_bytes)

    def prepare(self, steps: Sequence[Step], seconds: float) -> Prepared:
        """Capture enough steps for a sample; the results of a round stay alive during it, so that they differ.

        Without a graph, and with what stands in the way of one, where the step waits for the device or the capture
        fails. What the step itself raises goes to the caller.
        """
        for step in [*steps, *[steps[0]] * CALLS_BEFORE_CAPTURE]:
            step()
        self.wait()
        if self.unfit:
            return Prepared(steps, obstacle="an earlier capture failed in this process")
        obstacle = self._waits(steps[0])
        if obstacle is not None:
            return Prepared(steps, obstacle=obstacle)
        wanted = math.ceil(GRAPH_SECONDS / max(seconds, SHORTEST_SECONDS))
        calls = max(len(steps), min(wanted, MAX_GRAPH_CALLS))
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            self._capture(graph, steps, calls)
        # Whatever it is, the step works without a capture, as the calls above have shown. The end of a failed capture
        # raises over the reason why it failed.
        except Exception as error:
            self.unfit = True
            return Prepared(steps, obstacle=_describe(error.__context__ or error))
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
            return _describe(error)
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

    def call_seconds(self, prepared: Prepared, calls: int) -> float:
        """Seconds of a call by the wall clock, until the device has done the last of them."""
        steps = prepared.steps
        self.wait()
        start = time.perf_counter()
        for i in range(calls):
            steps[i % len(steps)]()
        self.wait()
        return (time.perf_counter() - start) / calls

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


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"[:MESSAGE_CHARACTERS]


def _graph_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    """Nodes of a captured graph: kernels, copies, memsets. None where the driver is not NVIDIA's."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_size_t()
    status = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    return count.value if status == 0 else None
