"""The perf suite without a GPU: its arithmetic and its verdicts, with made-up timers and providers."""

from __future__ import annotations

import contextlib
import json
import time
import types
import weakref

import filelock
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from perf.suite import cuda_timer, driver, machine, modes, reference, timers, unit, worker
from perf.suite.bytes import PASSES, kernel_bytes, kernels, minimum_bytes
from perf.suite.plan import GPU_PROVIDERS, OptionError, Options, find, make_plan
from perf.suite.providers import CannotError, Provider, provider
from perf.workloads import CPU_WORKLOADS, GPU_WORKLOADS, KERNEL_MODES, OPS, Workload

TINY = {
    "layer_norm": Workload("tiny", "layer_norm", (6, 5), dtype="float32"),
    "plain layer_norm": Workload("tiny", "layer_norm", (6, 5), dtype="float32", affine=False),
    "log_softmax": Workload("tiny", "log_softmax", (4, 3, 5), dtype="float32", dim=1),
    "batch_norm": Workload("tiny", "batch_norm", (4, 3, 2, 2), dtype="float32", channels_last=True),
}


# Workloads, plan and bytes.


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


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_samples_fit_the_time_of_a_run(device, quick):
    made = make_plan(Options(device, quick=quick), dict.fromkeys(GPU_PROVIDERS))
    total = 120 if quick else 540
    assert made["options"]["seconds"] + driver.GRACE_SECONDS < total
    assert sum(item["seconds"] for item in made["units"]) + made["compile_seconds"] < made["options"]["seconds"]
    assert [item["id"] for item in made["units"]] == sorted({item["id"] for item in made["units"]})
    assert all(find(item["workload"], device).key == item["workload"] for item in made["units"])


def test_a_run_can_be_narrowed_down_and_says_what_it_does_not_know():
    everything = dict.fromkeys(GPU_PROVIDERS)
    made = make_plan(Options("cuda", only=("batchnorm1d",), modes=("jvp",), providers=("torch",)), everything)
    assert [(item["name"], item["mode"]) for item in made["units"]] == [("BatchNorm1d", "jvp")]
    assert made["providers"] == ["torch"]
    for wrong in ({"modes": ("sideways",)}, {"providers": ("nobody",)}, {"only": ("no such words",)}):
        with pytest.raises(OptionError, match=next(iter(wrong.values()))[0]):
            make_plan(Options("cuda", **wrong), everything)


@pytest.mark.parametrize(
    "mode, passes", [("forward", 2), ("backward", 3), ("jvp", 4), ("hvp", 5), ("double_backward", 5)]
)
def test_minimum_bytes_are_the_passes_and_little_more(mode, passes):
    for workload in GPU_WORKLOADS:
        full = passes * workload.pass_bytes
        assert full <= minimum_bytes(workload, mode) <= 1.02 * full


class Operators(TorchDispatchMode):
    """Notes this package's operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        namespace, name, _ = str(function).split(".")
        if namespace == "primitives":
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("name", TINY)
def test_the_kernels_of_a_mode_are_those_whose_bytes_are_counted(name, mode):
    workload = TINY[name]
    side = provider("primitives")
    make = modes.make_steps(mode, side.function(workload), side.wrap)
    step = make(modes.make_sample(workload, mode, torch.device("cpu")))
    with Operators() as seen:
        step()
    assert tuple(seen.names) == kernels(workload, mode)
    assert kernel_bytes(workload, mode) >= 0.9 * sum(PASSES[mode][:2]) * workload.pass_bytes


def test_bytes_agree_with_what_the_launchers_declare():
    model = pytest.importorskip("perf.model", reason="costs of kernels need triton")
    with model.launch.use_chip(model.launch.CHIPS["sm_90"]):
        for workload in GPU_WORKLOADS[::4]:
            for mode in workload.modes:
                declared = sum(call.minimum_bytes for call in model.calls_of(workload, mode))
                assert kernel_bytes(workload, mode) == pytest.approx(declared, rel=0.02)
                if len(kernels(workload, mode)) == 1:
                    assert minimum_bytes(workload, mode) == pytest.approx(declared, rel=0.005)


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
    assert timers.calls_per_sample(10.0) == 1
    assert timers.calls_per_sample(0.0) == timers.MAX_CALLS


def test_providers_take_turns_and_the_first_one_changes():
    now, order = [0.0], []

    def sampler(name):
        def sample():
            order.append(name)
            now[0] += 1.0
            return now[0]

        return sample

    samples = timers.interleave({n: sampler(n) for n in "abc"}, 12.0, min_rounds=2, clock=lambda: now[0])
    assert order == list("abcbcacababc")
    assert samples["b"] == [2.0, 4.0, 9.0, 11.0]
    assert timers.interleave({}, 1.0) == {}
    # The least number of rounds is run whatever the budget.
    assert len(timers.interleave({"a": sampler("a")}, 0.0, min_rounds=3, clock=lambda: now[0])["a"]) == 3


# The red check.


@pytest.mark.parametrize("mode", [*KERNEL_MODES, "forward_backward"])
@pytest.mark.parametrize("name", TINY)
def test_the_check_passes_what_is_right_and_nothing_else(name, mode):
    workload = TINY[name]
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


class FakeTimer:
    """Says what each step costs instead of measuring it, and notes whether the lock was held meanwhile."""

    has_device_time = True
    device = torch.device("cpu")

    def __init__(self, lock):
        self.lock = lock
        self.held = set()

    def num_sets(self, set_bytes):
        return 2

    def prepare(self, steps, seconds):
        for step in steps:
            step()
        return timers.Prepared(steps, graph_calls=2, launches=3)

    def device_seconds(self, prepared):
        self.held.add(self.lock.held)
        return 1e-5

    def call_seconds(self, prepared, calls):
        self.held.add(self.lock.held)
        return 2e-5

    def peak_bytes(self, prepared):
        return 1000

    def wait(self):
        pass


class NotedLock(contextlib.AbstractContextManager):
    held = False

    def __enter__(self):
        self.held = True

    def __exit__(self, *_):
        self.held = False


def test_a_unit_times_what_is_right_and_says_of_the_rest_why_not(tmp_path, monkeypatch):
    def cannot(workload):
        raise CannotError("no layer norm here.")

    def layer_norm(scale):
        return {"layer_norm": lambda w: lambda x, *params: scale * F.layer_norm(x, w.shape[-1:], *params)}

    fakes = {
        "primitives": Provider("primitives", layer_norm(1.0)),
        "torch": Provider("torch", layer_norm(1.0)),
        "off": Provider("off", layer_norm(1.001)),
        "unable": Provider("unable", {"layer_norm": cannot}),
    }
    monkeypatch.setattr(unit, "provider", fakes.__getitem__)
    monkeypatch.setattr(unit, "WARM_UP_SECONDS", 0.0)
    workload = TINY["layer_norm"]
    record = {
        "workload": workload.key,
        "name": "tiny",
        "op": workload.op,
        "shape": [6, 5],
        "dtype": "float32",
        "layout": "",
        "columns": 5,
        "mode": "backward",
        "seconds": 0.0,
    }
    lock = NotedLock()
    timer = FakeTimer(lock)
    late = {"late": "skipped: not compiled in time"}
    rows = unit.measure(record, workload, [*fakes, "late"], timer, lock, tmp_path, late.get)
    found = {row["provider"]: row for row in rows}
    assert {name: row["status"] for name, row in found.items()} == {
        "primitives": "ok",
        "torch": "ok",
        "off": "wrong",
        "unable": "cannot",
        "late": "skipped",
    }
    assert found["unable"]["message"] == "CannotError: no layer norm here."
    assert 1e-4 < found["off"]["error"] < 1e-2
    assert found["off"]["device_us"] is None
    assert found["off"]["call_us"] is None
    ours = found["primitives"]
    assert (ours["device_us"]["median"], ours["call_us"]["median"]) == pytest.approx((10.0, 20.0))
    assert ours["vs_torch_device"]["median"] == 1.0
    assert (ours["launches"], ours["peak_bytes"]) == (3, 1000)
    assert ours["gbps"] == pytest.approx(minimum_bytes(workload, "backward") / 1e-5 / 1e9)
    assert ours["fraction_of_copy"] == pytest.approx(1.0)
    assert timer.held == {True}
    json.dumps(rows, allow_nan=False)


def test_an_error_of_this_package_is_no_inability(monkeypatch):
    contender = unit.Contender("primitives")
    assert contender.attempt(lambda: 1 // 0) is None
    assert (contender.status, contender.message.split(":")[0]) == ("error", "ZeroDivisionError")
    record = make_plan(Options("cpu"), dict.fromkeys(GPU_PROVIDERS))["units"][0]
    rows = unit.guarded(record, ["primitives", "torch"], lambda: 1 // 0)
    assert [row["status"] for row in rows] == ["error", "error"]
    assert unit.skipped_after(0.0, record, ["torch"])[0]["status"] == "skipped"


def test_a_first_call_has_a_limit():
    with pytest.raises(TimeoutError, match=r"more than 0\.02 s"), worker.time_limit(0.02):
        time.sleep(5)


# GPUs, locks and graphs.


def test_each_worker_owns_a_gpu_and_only_one_measures_on_it(tmp_path, monkeypatch):
    assert [machine.gpu_of_worker(f"gw{i}", ["2", "5"]) for i in range(4)] == ["2", "5", "2", "5"]
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path))
    with machine.device_lock("2"):
        with pytest.raises(filelock.Timeout):
            filelock.FileLock(machine.device_lock("2").lock_file).acquire(timeout=0.01)
        with machine.device_lock("5"):
            pass


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
    state = types.SimpleNamespace(capturing=False, replays=0)
    event, graph_class = fake_classes(state)

    @contextlib.contextmanager
    def capture(graph, stream):
        state.capturing = True
        yield
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
