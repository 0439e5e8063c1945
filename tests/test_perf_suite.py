"""The perf suite without a GPU: its workloads, bytes, samples, checks and captures, with a made-up torch.cuda."""

from __future__ import annotations

import contextlib
import math
import types
import weakref

import pytest
import torch

from perf.suite import cuda_timer, modes, reference, timers
from perf.suite.bytes import is_multi_pass, kernel_bytes, minimum_bytes
from perf.suite.providers import provider
from perf.workloads import CPU_WORKLOADS, GPU_WORKLOADS, KERNEL_MODES, OPS, Workload

TINY = {
    "layer_norm": Workload("tiny", "layer_norm", (6, 5), dtype="float32"),
    "plain layer_norm": Workload("tiny", "layer_norm", (6, 5), dtype="float32", affine=False),
    "log_softmax": Workload("tiny", "log_softmax", (4, 3, 5), dtype="float32", dim=1),
    "batch_norm": Workload("tiny", "batch_norm", (4, 3, 2, 2), dtype="float32", channels_last=True),
}


LINEAR = {
    "batch_norm_eval": Workload("tiny", "batch_norm_eval", (4, 3, 2, 2), dtype="float32"),
    "dropout": Workload("tiny", "dropout", (40, 50), dtype="float32"),
}

# Workloads and bytes.


def test_the_shapes_that_models_call_are_all_there():
    assert len({workload.key for workload in (*GPU_WORKLOADS, *CPU_WORKLOADS)}) == len(GPU_WORKLOADS) + len(
        CPU_WORKLOADS
    )
    columns = {op: {workload.num_cols for workload in GPU_WORKLOADS if workload.op == op} for op in OPS}
    assert columns["log_softmax"] >= {32000, 50257, 128256, 262144, 65536, 131072, 1000, 4097, 5124}
    assert columns["layer_norm"] >= {768, 4096, 8192, 65536, 131072, 262144, 1000, 4097, 5124}
    layouts = {workload.channels_last for workload in GPU_WORKLOADS if workload.op == "batch_norm"}
    assert layouts == {False, True}
    assert {workload.op for workload in GPU_WORKLOADS if workload.quick} == set(OPS)
    assert {workload.dtype for workload in GPU_WORKLOADS} == {"bfloat16", "float16", "float32"}


def test_minimum_bytes_are_the_passes_and_little_more():
    passes = {"forward": 2, "backward": 3, "jvp": 4, "hvp": 5, "double_backward": 5}
    for workload in GPU_WORKLOADS:
        for mode in workload.modes:
            # A dropout draws its noise anew, and reads no x for it.
            count = 2 if (workload.op, mode) == ("dropout", "backward") else passes[mode]
            full = count * workload.pass_bytes
            assert full <= minimum_bytes(workload, mode) <= 1.02 * full


def test_bytes_are_those_that_the_launchers_declare():
    model = pytest.importorskip("perf.model", reason="costs of kernels need triton")
    chip = model.launch.CHIPS["sm_90"]
    for workload in (*GPU_WORKLOADS[::4], *(w for w in GPU_WORKLOADS if w.op in {"dropout", "batch_norm_eval"})):
        for mode in workload.modes:
            with model.launch.use_chip(chip):
                calls = model.calls_of(workload, mode)
            made = kernel_bytes(workload, mode, chip)
            if is_multi_pass(workload.op, mode):
                assert made >= 0.999 * minimum_bytes(workload, mode)
            elif len(calls) == 1:
                # One operator, whose minimum is that of the mode.
                assert made == pytest.approx(minimum_bytes(workload, mode), rel=0.005)
            if workload.op == "batch_norm" and mode in {"forward", "backward"}:
                # All of it is read for the sums, and again for the transform.
                passes = {"forward": 3, "backward": 5}[mode]
                assert made == pytest.approx(passes * workload.pass_bytes, rel=0.01)


# Samples.


@pytest.mark.parametrize("set_bytes", [1, 10_000, 2**20, 7 * 2**20, 59 * 2**20, 10**9])
def test_a_rotation_is_larger_than_three_times_the_cache(set_bytes):
    cache = 60 * 2**20
    sets = timers.rotation(set_bytes, cache)
    assert sets == timers.MAX_SETS or sets * set_bytes >= 3 * cache
    assert sets == 1 or (sets - 1) * set_bytes < 3 * cache


def test_quantiles_and_ratios():
    found = timers.quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median, found.p20, found.p80, found.samples) == (3.5, 2.0, 5.0, 6)
    assert timers.quantiles([2.0]) == (2.0, 2.0, 2.0, 1)
    # A clock that slows down tenfold half way changes no ratio.
    assert timers.ratios([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == (0.5, 0.5, 0.5, 3)


def test_calls_per_sample_are_bounded():
    assert timers.calls_per_sample(1e-3, 2e-3) == 2
    assert timers.calls_per_sample(10.0, 2e-3) == 1
    assert timers.calls_per_sample(0.0, 2e-3) == timers.MAX_CALLS


def test_providers_take_turns_and_the_first_one_changes():
    now, order = [0.0], []

    def sampler(name):
        def sample():
            order.append(name)
            now[0] += 1.0
            return now[0]

        return sample

    samples = timers.interleave({n: sampler(n) for n in "abc"}, 12.0, min_rounds=2, max_rounds=60, clock=lambda: now[0])
    assert order == list("abcbcacababc")
    assert samples["b"] == [2.0, 4.0, 9.0, 11.0]
    assert timers.interleave({}, 1.0, max_rounds=60) == {}
    # The least number of rounds is run whatever the budget.
    assert len(timers.interleave({"a": sampler("a")}, 0.0, min_rounds=3, max_rounds=60, clock=lambda: now[0])["a"]) == 3


# The red check.


CASES = [(name, mode) for name in TINY for mode in (*KERNEL_MODES, "forward_backward")]
FIRST_ORDER = [(name, mode) for name in LINEAR for mode in ("forward", "backward", "jvp", "forward_backward")]


@pytest.mark.parametrize("name, mode", CASES + FIRST_ORDER)
def test_the_check_passes_what_is_right_and_nothing_else(name, mode):
    workload = {**TINY, **LINEAR}[name]
    sample = modes.make_sample(workload, mode, torch.device("cpu"))
    right = provider("primitives")
    step = modes.make_steps(mode, right.function(workload), right.wrap)(sample)
    leaves = modes.leaves(step())
    one_value = [leaf.detach().clone() for leaf in leaves]
    one_value[0][(-1,) * one_value[0].dim()] += 1e-2 * one_value[0].abs().max() + 1e-2
    wrong = {"one value": one_value, "missing": leaves[:-1], "nan": [leaf * torch.nan for leaf in leaves]}
    # Chunks of one row or channel: sums over rows come from all of them.
    found = reference.errors(workload, mode, sample, {"right": leaves, **wrong}, chunk_elements=6)
    tolerance = reference.TOLERANCES["float32"]
    assert {name for name, error in found.items() if error <= tolerance} == {"right"}


def test_a_dropout_must_drop_about_as_much_as_it_says_and_its_tangent_the_same():
    sample = modes.make_sample(LINEAR["dropout"], "jvp", torch.device("cpu"))

    def noise(p, seed):
        generator = torch.Generator().manual_seed(seed)
        return (torch.rand(sample.x.shape, generator=generator) >= p) / (1 - p)

    def error(first, second):
        results = {"it": (sample.x * first, sample.x_dot * second)}
        return reference.errors(LINEAR["dropout"], "jvp", sample, results, chunk_elements=500)["it"]

    one = noise(0.1, 0)
    assert error(one, one) < 1e-6
    assert error(one, noise(0.1, 1)) > 0.1
    assert error(noise(0.2, 0) * 0.8 / 0.9, noise(0.2, 0) * 0.8 / 0.9) == math.inf
    assert error(one * 0.9, one * 0.9) > 0.05


# Graphs.


def fake_classes(state):
    """Events and graphs that do nothing, and nothing that a capture forbids during one."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def synchronize(self):
            assert not state.capturing

        def elapsed_time(self, end):
            return 6.0

    class Graph:
        def __init__(self, keep_graph):
            assert keep_graph

        def instantiate(self):
            assert not state.capturing

        def replay(self):
            state.replays += 1

    return Event, Graph


@pytest.fixture
def fake_cuda(monkeypatch):
    """torch.cuda as far as the timer calls it; `capturing` says whether a capture is under way."""
    state = types.SimpleNamespace(capturing=False, replays=0, sync_mode="default")
    event, graph_class = fake_classes(state)

    @contextlib.contextmanager
    def capture(graph, stream):
        state.capturing = True
        try:
            yield
        # As torch does it: the end of a capture that failed raises over the reason.
        except ValueError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        finally:
            state.capturing = False

    def synchronize(device):
        assert not state.capturing

    fakes = {
        "current_device": lambda: 0,
        "Stream": object,
        "set_stream": lambda stream: None,
        "get_device_properties": lambda device: types.SimpleNamespace(L2_cache_size=60 * 2**20),
        "synchronize": synchronize,
        "CUDAGraph": graph_class,
        "graph": capture,
        "Event": event,
        "_sleep": lambda cycles: None,
        "set_sync_debug_mode": lambda mode: setattr(state, "sync_mode", mode),
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 100,
        "max_memory_allocated": lambda device: 350,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cuda_timer, "_graph_nodes", lambda graph: 3 * 500)
    return state


def test_a_graph_goes_round_over_all_sets_and_keeps_their_results(fake_cuda):
    timer = cuda_timer.CudaTimer()
    assert timer.num_sets(2**20) == 180
    order, made = [], []

    class Result:
        pass

    def make_step(index):
        def step():
            # The memory of the last result of this set may be had again, that of the sets since then may not.
            assert not fake_cuda.capturing or all(earlier() is not None for earlier in made[-4:])
            order.append((fake_cuda.capturing, index))
            result = Result()
            if fake_cuda.capturing:
                made.append(weakref.ref(result))
            return result

        return step

    prepared = timer.prepare([make_step(i) for i in range(5)], seconds=3e-6)
    # A launch a step and a half milliseconds of them, in turn; every step ran before the capture.
    captured = [index for capturing, index in order if capturing]
    assert captured == [i % 5 for i in range(cuda_timer.MAX_GRAPH_CALLS)]
    assert prepared.graph_calls == cuda_timer.MAX_GRAPH_CALLS
    assert prepared.launches == round(1500 / cuda_timer.MAX_GRAPH_CALLS)
    assert {index for capturing, index in order if not capturing} == set(range(5))
    assert timer.device_seconds(prepared) == pytest.approx(6e-3 / cuda_timer.MAX_GRAPH_CALLS)
    assert fake_cuda.replays == 1
    assert timer.call_seconds(prepared, 7) > 0
    assert timer.peak_bytes(prepared) == 250


def test_what_waits_for_the_device_or_cannot_be_captured_says_so(fake_cuda):
    timer = cuda_timer.CudaTimer()

    def waits():
        if fake_cuda.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def refuses():
        if fake_cuda.capturing:
            raise ValueError("not in a capture")

    prepared = timer.prepare([waits], seconds=1e-3)
    assert (prepared.graph, prepared.obstacle) == (None, "RuntimeError: called a synchronizing CUDA operation")
    # Nothing was captured, so nothing is broken.
    assert not timer.unfit
    assert fake_cuda.sync_mode == "default"
    assert timer.prepare([lambda: None], seconds=1e-3).obstacle is None
    prepared = timer.prepare([refuses], seconds=1e-3)
    assert (prepared.graph, prepared.obstacle) == (None, "ValueError: not in a capture")
    assert timer.unfit
    # A process in which a capture failed captures nothing more.
    assert "earlier capture failed" in timer.prepare([lambda: None], seconds=1e-3).obstacle
    # What a step raises by itself is not about captures.
    with pytest.raises(ZeroDivisionError):
        timer.prepare([lambda: 1 // 0], seconds=1e-3)
