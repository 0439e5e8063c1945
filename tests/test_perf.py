"""The perf suite without a GPU: a run from end to end, the red check, a made-up torch.cuda."""

import contextlib
import dataclasses
import functools
import math
import os
import signal
import time
import types
import weakref
from unittest.mock import MagicMock, call

import pytest
import torch

from perf import workloads
from perf.__main__ import main
from perf.machine_code.cases import calls_of_steps
from perf.ops import CASES
from perf.ops.attention import ATTENTION
from perf.ops.dropout import DROPOUT
from perf.ops.workload import KERNEL_MODES, Workload
from perf.suite import modes, reference, results, timing, unit
from perf.suite.plan import Options, make_plan, unit_id
from perf.suite.providers import Provider, provider
from perf.suite.run import Collector
from perf.workloads import COMPOSED, COMPOSED_WORKLOADS, FLEX, GPU_WORKLOADS, MATH, OPS, OURS
from triton_kernels.runtime.chips import CHIPS, use_chip

CPU = torch.device("cpu")
ROWS = Workload("by hand", "layer_norm", (8192, 4096), affine=False)
LOGITS = Workload("by hand", "log_softmax", (8192, 4096))
CHANNELS = Workload("by hand", "batch_norm", (64, 256, 56, 56), affine=False)
# 264 partial rows of two float32 sums, written and read: 17 MB, in passes.
PARTIAL = 2 * 264 * 2 * 4096 * 4 / ROWS.pass_bytes
# 132 of one sum over twice as many columns.
LONG_PARTIAL = PARTIAL / 4
FAULTY = tuple(Workload("tiny", "layer_norm", (rows, 8), dtype="float32", quick=True) for rows in (2, 3, 4))


def pytest_configure(config):
    """Plant faults in the workers of a run: torch is a percent off at two rows, and has the run stopped at four."""

    def function(workload):
        def layer_norm(x, *params):
            if len(x) == 4:
                os.kill(os.getppid(), signal.SIGINT)
                time.sleep(60)
            return provider("torch").function(workload)(x, *params) * (1.01 if len(x) == 2 else 1.0)

        return layer_norm

    if hasattr(config, "workerinput"):
        workloads.CPU_WORKLOADS = FAULTY
        unit.provider = lambda name: Provider(name, function) if name == "torch" else provider(name)


# Workers import torch, one after another; by day their parts are tested below.
@pytest.mark.nightly
def test_a_run_keeps_what_is_right_beside_a_wrong_peer_and_ctrl_c(tmp_path, monkeypatch, capsys):
    out = tmp_path / "result.json"
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p tests.test_perf")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(workloads, "CPU_WORKLOADS", FAULTY)
    # A shell that runs tests in the background has them ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = main(["run", "--device", "cpu", "--only", "tiny", "--modes", "forward", "--out", str(out)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 0
    assert "Stopped: what was measured is kept." in capsys.readouterr().err
    result = results.load(out)
    _, wrong, ours, right = result["rows"]
    assert [row["status"] for row in result["rows"]] == ["ok", "wrong", "ok", "ok"]
    assert not result["complete"]
    assert (wrong["call_us"], wrong["error"]) == (None, pytest.approx(1e-2, rel=0.1))
    assert ours["call_us"]["samples"] == right["call_us"]["samples"] >= timing.MIN_ROUNDS


def test_options_that_mean_nothing_are_refused_before_anything_is_measured(tmp_path, capsys):
    for option in ("--modes", "--providers", "--only", "--out"):
        assert main(["run", "--device", "cpu", "--out", str(tmp_path / "a"), option, str(tmp_path)]) == 2
        assert option in capsys.readouterr().err


def test_a_plan_has_the_quick_ones_first_and_all_modes_of_what_is_asked_for():
    whole, quick = (make_plan(Options("cuda", quick=quick)) for quick in (False, True))
    assert whole[: len(quick)] == quick
    assert {workload.op for workload, _ in quick} == set(OPS)
    everything = (*GPU_WORKLOADS, *COMPOSED_WORKLOADS, *workloads.GPU_TRAINING)
    assert {workload.key for workload, _ in whole} == {w.key for w in everything}
    assert [mode for _, mode in make_plan(Options("cuda", only=("GPT-2 XL",)))] == list(KERNEL_MODES)


SMALL = (Workload("small", "layer_norm", (4, 8), dtype="float32", affine=False), "forward")


@pytest.mark.parametrize(
    "refused, statuses", [("", ["ok", "ok"]), ("torch", ["ok", "cannot"]), (OURS, ["error", "ok"])]
)
def test_rows_are_relative_to_torch_and_a_copy_and_who_cannot_be_captured_has_no_times(monkeypatch, refused, statuses):
    timer, order = timing.CpuTimer(), iter(["copy", OURS, "torch"])

    def prepare(steps, seconds):
        name = next(order)
        if name == refused:
            raise RuntimeError("it waits")
        return timing.Prepared(steps, graph=name)

    monkeypatch.setattr(timer, "prepare", prepare)
    timer.kinds["device"] = lambda prepared, calls: {"copy": 1.0, OURS: 2.0, "torch": 8.0}[prepared.graph]
    rows = unit.measure(SMALL, [OURS, "torch", "apex"], timer, 0.0)
    assert [row["status"] for row in rows] == [*statuses, "cannot"]
    assert [row["call_us"] is None for row in rows] == [status != "ok" for status in [*statuses, "cannot"]]
    if not refused:
        assert (rows[0]["vs_torch_device"]["median"], rows[0]["fraction_of_copy"]) == (0.25, 0.5)


def test_a_new_worker_gets_the_gpu_of_the_one_that_died_and_what_it_was_at_once_more():
    collector = Collector([SMALL], ["primitives"], ["a", "b"])
    nodes = [types.SimpleNamespace(workerinput={}) for _ in range(3)]
    collector.pytest_configure_node(nodes[0])
    collector.pytest_configure_node(nodes[1])
    collector.pytest_testnodedown(nodes[1])
    collector.pytest_configure_node(nodes[2])
    assert [node.workerinput.get("gpu") for node in nodes] == ["a", None, "b"]
    again, item = [], f"test_suite.py::test_unit[{unit_id(SMALL)}]"
    for _ in range(2):
        collector.pytest_handlecrashitem(item, types.SimpleNamespace(mark_test_pending=again.append))
    assert again == [item]
    collector.pytest_runtest_logreport(pytest.TestReport(item, ("", None, ""), {}, "failed", "gw0 crashed", "???"))
    assert [(row["status"], row["message"]) for row in collector.rows[unit_id(SMALL)]] == [("error", "gw0 crashed")]


def test_workloads_move_the_bytes_that_their_launchers_declare():
    for workload, mode in ((w, mode) for w in GPU_WORKLOADS for mode in w.modes):
        with use_chip(CHIPS["sm_90"]):
            calls = [call.cost() for call in calls_of_steps(workload, mode)]
        # A mode of one operator has its minimum; others read something twice.
        ratio = sum(cost.minimum_bytes for cost in calls) / modes.minimum_bytes(workload, mode)
        assert 0.995 <= ratio <= (1.005 if len(calls) == 1 else math.inf)
        products = sum(cost.matmuls for cost in calls)
        assert modes.flops(workload, mode) == (products * workload.matmul_flops if products else None)


@pytest.mark.parametrize(
    "workload, mode, floor, passes, launches",
    [
        (ROWS, "forward", 2, 2, 1),
        (ROWS, "jvp", 4, 4, 1),
        (ROWS, "hvp", 4 + 3 + 4, 4 + 3 + 4, 3),
        (LOGITS, "jvp", 4, 4, 1),
        (CHANNELS, "jvp", 4, 6, 3),
        (dataclasses.replace(ROWS, affine=True), "backward", 3, 3 + PARTIAL, 2),
        # A cotangent of y goes on to x through the backward.
        (LOGITS, "double_backward", 3 + 2 + 3, 3 + 2 + 3, 2),
        (CHANNELS, "forward", 2, 3, 3),
        (CHANNELS, "double_backward", 5, 8, 3),
        # Rows of the longest that are held: of two tensors of log-softmax, and beside sums of second order.
        (dataclasses.replace(LOGITS, shape=(4096, 32000)), "backward", 3, 3, 1),
        (dataclasses.replace(ROWS, shape=(8192, 8192), affine=True), "double_backward", 5, 5 + LONG_PARTIAL, 2),
    ],
    ids=str,
)
def test_passes_and_launches(workload, mode, floor, passes, launches):
    with use_chip(CHIPS["sm_90"]):
        calls = [call.cost() for call in calls_of_steps(workload, mode)]
    assert sum(call.minimum_bytes for call in calls) == pytest.approx(floor * workload.pass_bytes, rel=0.005)
    assert sum(call.bytes_moved for call in calls) == pytest.approx(passes * workload.pass_bytes, rel=0.005)
    assert sum(call.launches for call in calls) == launches


# Of the operations that the suite measures.
TINY = tuple(w for case in (*CASES, *COMPOSED) if case.gpu_workloads for w in case.small_workloads if not w.masked)


@pytest.mark.parametrize("workload, mode", [(w, m) for w in TINY for m in (*w.modes, "forward_backward")])
def test_the_check_passes_what_is_right_and_nothing_else(workload, mode):
    sample = modes.make_sample(workload, mode, CPU)
    right = provider("primitives")
    leaves = modes.leaves(modes.make_steps(mode, right.function(workload), right.wrap)(sample)())
    one_value = [leaf.detach().clone() for leaf in leaves]
    one_value[-1][(-1,) * one_value[-1].dim()] += 1e-2 * one_value[-1].abs().max() + 1e-2
    results = {"right": leaves, "one value": one_value, "missing": leaves[:-1], "nan": [v * torch.nan for v in leaves]}
    # Chunks of one row or channel: sums over rows, as derivatives of keys are, come from all of them.
    found = reference.errors(workload, mode, sample, results, chunk_elements=6)
    assert {name for name, error in found.items() if error <= reference.TOLERANCES["float32"]} == {"right"}


# Compiling it takes longer than the tests around this one; the numbers are the same.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_peers_with_attention_alone_take_part_in_it_alone_and_see_the_same_pairs():
    workload = ATTENTION.small_workloads[0]
    sample = modes.make_sample(workload, "forward", CPU)
    names = ("SDPA flash", MATH, FLEX)
    found = {name: [provider(name).function(workload)(sample.x, *sample.params)] for name in names}
    assert max(reference.errors(workload, "forward", sample, found).values()) <= reference.TOLERANCES["float32"]
    # Backends of GPUs, and the others in what they cannot do, say why.
    rows = unit.measure((workload, "jvp"), ["SDPA flash", "SDPA cuDNN", "liger", MATH, OURS], timing.CpuTimer(), 0.0)
    assert [(row["provider"], row["status"]) for row in rows] == [
        *(("SDPA flash", "cannot"), ("SDPA cuDNN", "cannot"), (MATH, "ok"), (OURS, "ok"))
    ]
    assert all(row["message"] for row in rows[:2])
    assert rows[-1]["gflops"] == pytest.approx(7 * 2 * 2 * 4 * 21 * 5 / rows[-1]["call_us"]["median"] * 1e-3)
    assert [row["provider"] for row in unit.measure(SMALL, [MATH, FLEX, OURS], timing.CpuTimer(), 0.0)] == [OURS]


def test_a_dropout_must_drop_about_as_much_as_it_says_and_its_tangent_the_same():
    sample = modes.make_sample(DROPOUT.small_workloads[0], "jvp", CPU)

    def noise(p, seed):
        return (torch.rand(sample.x.shape, generator=torch.Generator().manual_seed(seed)) >= p) / (1 - p)

    def error(*noises):
        made = [value * factor for value, factor in zip((sample.x, sample.x_dot), noises, strict=True)]
        return reference.errors(DROPOUT.small_workloads[0], "jvp", sample, {"it": made})["it"]

    one, other = noise(0.1, 0), noise(0.2, 0) * 0.8 / 0.9
    assert error(one, one) < 1e-6
    assert error(one, noise(0.1, 1)) > 0.1
    assert error(other, other) == math.inf


def test_providers_take_turns_and_the_first_one_changes(monkeypatch):
    order = []

    def sampler(name):
        return lambda: order.append(name) or float(len(order))

    samplers = {name: sampler(name) for name in "abc"}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(len(order)))
    samples = timing.interleave(samplers, 12.0, 60, min_rounds=2)
    assert order == list("abcbcacababc")
    assert samples["b"] == [2.0, 4.0, 9.0, 11.0]
    # The least number of rounds is run whatever the budget.
    assert len(timing.interleave({"a": sampler("a")}, 0.0, 60, min_rounds=3)["a"]) == 3
    assert timing.spread([5.0, 1.0, 2.0, 3.0, 4.0, 100.0]) == {"median": 3.5, "p20": 2.0, "p80": 5.0, "samples": 6}


@pytest.fixture
def fake_cuda(monkeypatch):
    """torch.cuda as far as the timer calls it; `capturing` says whether a capture is under way."""
    cuda = MagicMock(capturing=False, current_device=lambda: 0)
    cuda.get_device_properties.return_value.L2_cache_size = 60 * 2**20
    cuda.Event.return_value.elapsed_time.return_value = 6.0
    cuda.Event.return_value.query = lambda: cuda._sleep.call_count < 3

    @contextlib.contextmanager
    def capture(graph, stream):
        cuda.capturing = True
        try:
            yield
        # As torch does it: the end of a capture that failed raises over the reason.
        except ValueError as error:
            raise RuntimeError("a previous error during capture") from error
        finally:
            cuda.capturing = False

    cuda.graph = capture
    monkeypatch.setattr(torch, "cuda", cuda)
    return cuda


def test_a_graph_goes_round_over_all_sets_and_keeps_their_results(fake_cuda):
    timer = timing.CudaTimer()
    # Three times the cache is touched before a set comes round again.
    assert [timer.num_sets(size) for size in (2**20, 59 * 2**20, 10**9)] == [180, 4, 1]
    order, made = [], []

    def step(index):
        # The memory of the last result of this set may be had again, that of the sets since then may not.
        assert not fake_cuda.capturing or all(earlier() is not None for earlier in made[-4:])
        order.append((fake_cuda.capturing, index))
        result = set()
        if fake_cuda.capturing:
            made.append(weakref.ref(result))
        return result

    prepared = timer.prepare([functools.partial(step, index) for index in range(5)], seconds=3e-6)
    assert [index for capturing, index in order if capturing] == [i % 5 for i in range(timing.MAX_GRAPH_CALLS)]
    assert not timer.unfit
    assert timer.device_seconds(prepared, 1) == pytest.approx(6e-3 / timing.MAX_GRAPH_CALLS)
    # Replays that began before they were all queued up are not taken.
    assert [each.args[0] // timing.SLEEP_CYCLES for each in fake_cuda._sleep.call_args_list] == [1, 2, 4]
    # Calls go round too, and share what a clock says that is asked before and after them.
    timer.clock = iter((2.0, 9.0)).__next__
    assert timer.call_seconds(prepared, 7) == 1.0
    assert [index for _, index in order[-7:]] == [0, 1, 2, 3, 4, 0, 1]


def test_what_waits_for_the_device_or_cannot_be_captured_says_so(fake_cuda):
    timer = timing.CudaTimer()

    def waits():
        if fake_cuda.set_sync_debug_mode.call_args == call("error"):
            raise RuntimeError("called a synchronizing CUDA operation")

    def refuses():
        if fake_cuda.capturing:
            raise ValueError("not in a capture")

    # A process in which a capture failed captures nothing more.
    for step, words in ((lambda: 1 // 0, "by zero"), (waits, "synchronizing"), (refuses, "not in a"), (set, "earlier")):
        assert timer.unfit == (step is set)
        with pytest.raises((RuntimeError, ZeroDivisionError), match=words):
            timer.prepare([step], seconds=1e-3)
    assert fake_cuda.set_sync_debug_mode.call_args == call("default")
