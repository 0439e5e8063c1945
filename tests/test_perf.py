"""The perf suite without a GPU: a run from end to end, the red check, comparisons, reports, a made-up torch.cuda."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import signal
import types
import weakref
from pathlib import Path

import pytest
import torch

from perf import workloads
from perf.__main__ import main
from perf.suite import modes, reference, report, results, timing, unit
from perf.suite.compare import compare
from perf.suite.plan import Options, make_plan, unit_id
from perf.suite.providers import provider
from perf.suite.results import row_for
from perf.suite.run import Collector
from perf.suite.targets import verdicts
from perf.workloads import CPU_WORKLOADS, GPU_WORKLOADS, KERNEL_MODES, OPS, PROVIDERS, Workload
from tests.perf_faults import TINY as FAULTY

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")

# One run.


def test_a_run_keeps_what_is_right_beside_a_wrong_peer_and_ctrl_c(tmp_path, monkeypatch, capsys):
    out = tmp_path / "result.json"
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p tests.perf_faults")
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
    wrong, right = result["rows"][1::2]
    assert [row["status"] for row in result["rows"]] == ["ok", "wrong", "ok", "ok"]
    assert not result["complete"]
    # A provider that is wrong is not timed.
    assert wrong["call_us"] is None
    assert wrong["error"] == pytest.approx(1e-2, rel=0.1)
    ours = result["rows"][2]
    assert ours["call_us"]["samples"] == right["call_us"]["samples"] >= timing.MIN_ROUNDS
    assert ours["device_us"] is None
    assert ours["fraction_of_copy"] > 0
    ratio = ours["call_us"]["median"] / right["call_us"]["median"]
    assert ours["vs_torch_call"]["median"] == pytest.approx(ratio, rel=0.3)
    assert result["package"]["version"]


@pytest.mark.parametrize(
    "options, word",
    [
        (["--modes", "sideways"], "--modes"),
        (["--providers", "nobody"], "--providers"),
        (["--out", "."], "--out"),
        (["--only", "nothing like it"], "no workload is left"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused_before_anything_is_measured(options, word, tmp_path, capsys):
    assert main(["run", "--device", "cpu", "--out", str(tmp_path / "a"), *options]) == 2
    assert word in capsys.readouterr().err


def test_a_plan_has_the_quick_ones_first_and_all_modes_of_what_is_asked_for():
    whole, quick = (make_plan(Options("cuda", quick=quick)) for quick in (False, True))
    assert whole[: len(quick)] == quick
    assert {workload.op for workload, _ in quick} == set(OPS)
    assert {workload.key for workload, _ in whole} == {w.key for w in (*GPU_WORKLOADS, *workloads.GPU_TRAINING)}
    assert [mode for _, mode in make_plan(Options("cuda", only=("GPT-2 XL",)))] == list(KERNEL_MODES)


SMALL = (Workload("small", "layer_norm", (4, 8), dtype="float32", affine=False), "forward")


@pytest.mark.parametrize("refused, status", [("torch", "cannot"), ("primitives", "error")])
def test_who_cannot_be_captured_has_no_times_and_only_ours_is_an_error(monkeypatch, refused, status):
    timer = timing.CpuTimer()
    # The first capture is that of the copy.
    captures = iter([False, refused == "primitives", refused == "torch"])

    def prepare(steps, seconds):
        if next(captures):
            raise RuntimeError("it waits")
        return timing.Prepared(steps)

    monkeypatch.setattr(timer, "prepare", prepare)
    timer.kinds["device"] = lambda prepared, calls: 1.0
    names = ["primitives", "torch", "apex"]
    rows = dict(zip(names, unit.measure(SMALL, names, timer, 0.0), strict=True))
    assert rows.pop("apex")["status"] == "cannot"
    bad, good = rows.pop(refused), *rows.values()
    assert (bad["status"], bad["message"], bad["call_us"]) == (status, "RuntimeError: it waits", None)
    assert (good["status"], good["device_us"]["median"], good["fraction_of_copy"]) == ("ok", 1e6, 1.0)


def test_a_device_that_answers_with_errors_alone_ends_the_process(monkeypatch):
    class EndError(BaseException):
        pass

    def end(code):
        raise EndError

    timer = timing.CpuTimer()
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(timer, "wait", lambda: 1 // 0)
    with pytest.raises(EndError):
        unit.measure(SMALL, ["torch"], timer, 0.0)


def test_a_new_worker_gets_the_gpu_of_the_one_that_died_and_what_it_was_at_once_more():
    collector = Collector([SMALL], ["primitives"], ["a", "b"])
    nodes = [types.SimpleNamespace(workerinput={}) for _ in range(3)]
    for node in nodes[:2]:
        collector.pytest_configure_node(node)
    assert [node.workerinput["gpu"] for node in nodes[:2]] == ["a", "b"]
    collector.pytest_testnodedown(nodes[1])
    collector.pytest_configure_node(nodes[2])
    assert nodes[2].workerinput["gpu"] == "b"
    again, item = [], f"test_suite.py::test_unit[{unit_id(SMALL)}]"
    for _ in range(2):
        collector.pytest_handlecrashitem(item, types.SimpleNamespace(mark_test_pending=again.append))
    assert again == [item]
    crashed = pytest.TestReport(item, ("", None, ""), {}, "failed", "worker 'gw0' crashed", "???")
    collector.pytest_runtest_logreport(crashed)
    (row,) = collector.rows[unit_id(SMALL)]
    assert (row["status"], row["message"]) == ("error", "worker 'gw0' crashed")


def test_workloads_move_the_bytes_that_their_launchers_declare():
    model = pytest.importorskip("perf.model", reason="costs of kernels need triton")
    keys = [workload.key for workload in (*GPU_WORKLOADS, *CPU_WORKLOADS)]
    assert len(set(keys)) == len(keys)
    for workload, mode in ((w, mode) for w in GPU_WORKLOADS for mode in w.modes):
        least = modes.minimum_bytes(workload, mode)
        with model.launch.use_chip(model.launch.CHIPS["sm_90"]):
            calls = model.calls_of(workload, mode)
        declared = sum(call.minimum_bytes for call in calls)
        if len(calls) == 1:
            # One operator, whose minimum is that of the mode.
            assert declared == pytest.approx(least, rel=0.005)
        else:
            assert declared >= 0.999 * least


# The red check.

TINY = {
    "layer_norm": Workload("tiny", "layer_norm", (6, 5), dtype="float32"),
    "plain layer_norm": Workload("tiny", "layer_norm", (6, 5), dtype="float32", affine=False),
    "log_softmax": Workload("tiny", "log_softmax", (4, 3, 5), dtype="float32", dim=1),
    "batch_norm": Workload("tiny", "batch_norm", (4, 3, 2, 2), dtype="float32", channels_last=True),
    "batch_norm_eval": Workload("tiny", "batch_norm_eval", (4, 3, 2, 2), dtype="float32"),
    "dropout": Workload("tiny", "dropout", (40, 50), dtype="float32"),
}
LINEAR = ("batch_norm_eval", "dropout")


@pytest.mark.parametrize(
    "name, mode",
    [
        (n, m)
        for n, m in itertools.product(TINY, (*KERNEL_MODES, "forward_backward"))
        if n not in LINEAR or m in {"forward", "backward", "jvp"}
    ],
)
def test_the_check_passes_what_is_right_and_nothing_else(name, mode):
    workload = TINY[name]
    sample = modes.make_sample(workload, mode, CPU)
    right = provider("primitives")
    leaves = modes.leaves(modes.make_steps(mode, right.function(workload), right.wrap)(sample)())
    one_value = [leaf.detach().clone() for leaf in leaves]
    one_value[-1][(-1,) * one_value[-1].dim()] += 1e-2 * one_value[-1].abs().max() + 1e-2
    wrong = {"one value": one_value, "missing": leaves[:-1], "nan": [*leaves[:-1], leaves[-1] * torch.nan]}
    # Chunks of one row or channel: sums over rows come from all of them.
    found = reference.errors(workload, mode, sample, {"right": leaves, **wrong}, chunk_elements=6)
    assert {name for name, error in found.items() if error <= reference.TOLERANCES["float32"]} == {"right"}


def test_a_dropout_must_drop_about_as_much_as_it_says_and_its_tangent_the_same():
    sample = modes.make_sample(TINY["dropout"], "jvp", CPU)

    def noise(p, seed):
        return (torch.rand(sample.x.shape, generator=torch.Generator().manual_seed(seed)) >= p) / (1 - p)

    def error(first, second):
        made = {"it": (sample.x * first, sample.x_dot * second)}
        return reference.errors(TINY["dropout"], "jvp", sample, made)["it"]

    one = noise(0.1, 0)
    assert error(one, one) < 1e-6
    assert error(one, noise(0.1, 1)) > 0.1
    assert error(noise(0.2, 0) * 0.8 / 0.9, noise(0.2, 0) * 0.8 / 0.9) == math.inf
    assert error(one * 0.9, one * 0.9) > 0.05


# Samples, and graphs on a made-up GPU.


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
    state = types.SimpleNamespace(capturing=False, sync_mode="default", sleeps=[])

    def event(enable_timing):
        return types.SimpleNamespace(
            record=lambda: None,
            query=lambda: len(state.sleeps) < 3,
            synchronize=lambda: None,
            elapsed_time=lambda end: 6.0,
        )

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

    fakes = {
        "current_device": lambda: 0,
        "Stream": object,
        "set_stream": lambda stream: None,
        "get_device_properties": lambda device: types.SimpleNamespace(L2_cache_size=60 * 2**20),
        "synchronize": lambda device: None,
        "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),
        "graph": capture,
        "Event": event,
        "_sleep": state.sleeps.append,
        "set_sync_debug_mode": lambda mode: setattr(state, "sync_mode", mode),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return state


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
    assert {index for capturing, index in order if not capturing} == set(range(5))
    assert timer.device_seconds(prepared, 1) == pytest.approx(6e-3 / timing.MAX_GRAPH_CALLS)
    # Replays that began before they were all queued up are not taken.
    assert fake_cuda.sleeps == [timing.SLEEP_CYCLES * factor for factor in (1, 2, 4)]
    # Calls go round too, and share what a clock says that is asked before and after them.
    timer.clock = iter((2.0, 9.0)).__next__
    assert timer.call_seconds(prepared, 7) == 1.0
    assert [index for _, index in order[-7:]] == [0, 1, 2, 3, 4, 0, 1]


def test_what_waits_for_the_device_or_cannot_be_captured_says_so(fake_cuda):
    timer = timing.CudaTimer()

    def waits():
        if fake_cuda.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def refuses():
        if fake_cuda.capturing:
            raise ValueError("not in a capture")

    with pytest.raises(RuntimeError, match="a synchronizing CUDA operation"):
        timer.prepare([waits], seconds=1e-3)
    # Nothing was captured, so nothing is broken.
    assert (timer.unfit, fake_cuda.sync_mode) == (False, "default")
    timer.prepare([lambda: None], seconds=1e-3)
    with pytest.raises(RuntimeError, match="ValueError: not in a capture"):
        timer.prepare([refuses], seconds=1e-3)
    # A process in which a capture failed captures nothing more.
    assert timer.unfit
    with pytest.raises(RuntimeError, match="an earlier capture"):
        timer.prepare([lambda: None], seconds=1e-3)
    # What a step raises by itself is not about captures.
    with pytest.raises(ZeroDivisionError):
        timer.prepare([lambda: 1 // 0], seconds=1e-3)


# Made-up results of a GPU: times in units of that of a copy of the minimum of bytes.

COPIES = {"primitives": 1.06, "torch": 1.9, "torch.compile": 1.2, "liger": 1.1}
COPY_GBPS = 4000.0
MINIMUM_BYTES = 134_000_000


def spread(median):
    return {"median": median, "p20": median * 0.99, "p80": median * 1.01, "samples": 20}


def make_row(measured, name, copies):
    copy_us = MINIMUM_BYTES / COPY_GBPS * 1e-3
    timed = {"device_us": spread(copies * copy_us), "call_us": spread(copies * copy_us + 10), "gpu": "0"}
    timed |= {"error": 1e-3, "tolerance": 4e-2}
    if name != "torch":
        timed["vs_torch_device"] = spread(copies / COPIES["torch"])
    if measured[1] != "training_step":
        timed |= {"copy_gbps": COPY_GBPS, "gbps": COPY_GBPS / copies, "fraction_of_copy": 1 / copies}
    return row_for(measured, name, "ok", **timed)


def gpu_result(slower=1.0, quick=True):
    """A run on a GPU; `slower` multiplies the times of this package."""
    rows = []
    for measured, (name, copies) in itertools.product(make_plan(Options("cuda", quick=quick)), COPIES.items()):
        if name == "liger" and measured[1] == "jvp":
            rows.append(row_for(measured, name, "cannot", message="RuntimeError: liger | has no JVP"))
        elif name == "torch" and measured[1] == "jvp" and measured[0].op == "log_softmax":
            rows.append(row_for(measured, name, "wrong", message="error 9.0e-01", error=0.9, tolerance=4e-2))
        else:
            rows.append(make_row(measured, name, copies * (slower if name == "primitives" else 1.0)))
    asked = [{"driver": "1", "sm_mhz": sm, "memory_mhz": 3201} for sm in (345, 1980)]
    return {
        "schema": results.SCHEMA,
        "created": "2026-01-01T00:00:00+00:00",
        "options": {"quick": quick},
        "complete": True,
        "package": {"version": "1.0", "revision": "0123456789abcdef", "dirty": True},
        "seconds": {"total": 100.0},
        "device": {"type": "cuda", "name": "Imaginary GPU"},
        "environment": {"python": "3.12", "packages": {"torch": "2.11"}, "threads": 1, "cores": 16, "processor": "CPU"},
        "clocks": {"0": asked},
        "providers": {name: None if name in COPIES else "ModuleNotFoundError" for name in PROVIDERS},
        "overhead": None,
        "rows": rows,
    }


def save(path, result):
    results.write_json(path, result)
    return str(path)


@pytest.mark.parametrize("slower, failed", [(1.052, False), (1.053, True), (0.8, False)])
def test_compare_flags_a_fall_of_more_than_five_percent(slower, failed):
    # Where all is half as fast, only what is relative to the same run means something.
    other = gpu_result(slower)
    other["device"] = {"type": "cuda", "name": "half as fast"}
    for row in other["rows"]:
        row["device_us"] = row["device_us"] and {name: 2 * value for name, value in row["device_us"].items()}
    text, found = compare(gpu_result(), other)
    assert found == failed
    assert "device time over a copy" in text
    assert (("FELL" in text), ("rose" in text)) == (failed, slower < 0.9)
    assert "WARNING: device differs: Imaginary GPU and then half as fast." in text
    assert "WARNING" not in compare(gpu_result(), gpu_result(slower))[0]


@pytest.mark.parametrize("status", ["wrong", "error", None])
def test_what_broke_or_is_gone_fails(tmp_path, capsys, status):
    before, after = gpu_result(), gpu_result()
    if status is None:
        del after["rows"][0]
    else:
        after["rows"][0].update(status=status, message="for a reason")
    paths = [save(tmp_path / "a.json", before), save(tmp_path / "b.json", after)]
    assert main(["compare", *paths]) == 1
    what = f"{before['rows'][0]['workload']}: {before['rows'][0]['mode']}"
    assert f"{'GONE' if status is None else 'BROKEN':<8}{what}" in capsys.readouterr().out
    # The other way round something was mended, or is new, and nothing is held against it.
    assert main(["compare", *reversed(paths)]) == 0
    assert f"{'new' if status is None else 'fixed':<8}{what}" in capsys.readouterr().out
    # A row that is right in neither is said; a run that shares nothing with the first proves nothing.
    assert ("STILL" in compare(after, after)[0]) == (status is not None)
    assert compare({**before, "rows": []}, before)[1]


def test_files_of_another_schema_are_refused(tmp_path, capsys):
    path = save(tmp_path / "a.json", {**gpu_result(), "schema": 0})
    assert main(["compare", path, path]) == 2
    assert "schema must be" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none.json"), "--out", str(tmp_path)]) == 2


# Targets and reports.

COPY_TARGET = "forward: at least 0.92 of copy speed at every shape of 32 MB and more, where one kernel can do it"
FASTEST = "as fast as the fastest peer at each shape"
COMPILED = "1.15 times as fast as torch.compile in the geometric mean"


def judged(result):
    return {verdict.target: verdict.text for verdict in verdicts(result)}


def large_row(result, name="primitives", op="layer_norm"):
    large = {w.key for w in GPU_WORKLOADS if w.op == op and w.pass_bytes >= 32e6}
    return next(r for r in result["rows"] if (r["provider"], r["mode"]) == (name, "forward") and r["workload"] in large)


def test_targets_are_met_by_every_shape_that_they_speak_of():
    whole = judged(gpu_result(quick=False))
    assert (whole[COPY_TARGET], whole[FASTEST], whole[COMPILED]) == ("met", "met", "NOT MET")
    assert judged(gpu_result(0.9, quick=False))[COMPILED] == "met"
    slow = judged(gpu_result(1.1, quick=False))
    assert (slow[COPY_TARGET], slow[FASTEST]) == ("NOT MET", "NOT MET")
    # A quick run has a few of the shapes, all of them good: that says nothing of the others.
    assert judged(gpu_result())[COPY_TARGET].startswith("not measured (")


@pytest.mark.parametrize("status, text", [("error", "NOT MET"), (None, "not measured (")])
def test_one_row_of_ours_decides_whatever_the_others_are(status, text):
    result = gpu_result(quick=False)
    row = large_row(result)
    # Batch norm, which no kernel does at the speed of a copy, is held against peers alone.
    large_row(result, op="batch_norm")["fraction_of_copy"] = 0.6
    assert judged(result)[COPY_TARGET] == "met"
    if status is None:
        result["rows"].remove(row)
    else:
        row["status"] = status
    found = judged(result)
    assert found[COPY_TARGET].startswith(text)
    assert found[FASTEST].startswith(text)


def test_a_peer_that_fails_is_no_failure_of_ours_and_one_that_was_not_measured_is_unknown():
    result = gpu_result(quick=False)
    large_row(result, "liger")["status"] = "wrong"
    assert judged(result)[FASTEST] == "met"
    # Who was not asked may be faster than all who were; one that is faster decides.
    del result["providers"]["apex"]
    assert judged(result)[FASTEST].startswith("not measured (")
    large_row(result)["vs_torch_device"]["median"] = 50.0
    assert judged(result)[FASTEST] == "NOT MET"


def test_the_report_of_a_gpu_has_tables_plots_and_what_others_cannot_do(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DPI", 30)
    result = gpu_result()
    result["rows"] = [row for row in result["rows"] if row["mode"] in {"forward", "jvp"}]
    assert main(["report", save(tmp_path / "a.json", result), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "imaginary-gpu.md").read_text()
    for words in (
        "RuntimeError: liger \\| has no JVP",
        "torch is wrong here (9e-01)",
        "SM clock 345 to 1980 MHz",
        "revision 0123456789ab with changes that are not committed",
        "1.79 (63.6 us)",
        "| 45.5 |",
    ):
        assert words in page
    for name in ("speedup", "forward", "jvp"):
        assert f"![imaginary-gpu-{name}](imaginary-gpu-{name}.png)" in page
        assert (tmp_path / "out" / f"imaginary-gpu-{name}.png").stat().st_size > 2_000


def test_the_committed_page_of_the_cpu_is_the_report_of_its_data(tmp_path, monkeypatch):
    # Drawing takes seconds; the report above does.
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: path.touch())
    folder = ROOT / "docs" / "perf"
    assert main(["report", str(folder / "cpu.json"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "cpu.md").read_text() == (folder / "cpu.md").read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in folder.glob("cpu*.png")}
