"""The bench without a GPU: its check, its rows, who gets which GPU, and what becomes of a result."""

import contextlib
import itertools
import json
import math
import types
from pathlib import Path

import pytest
import torch

from perf import steps, test_bench
from perf.__main__ import main
from perf.conftest import Collector
from perf.ops import CASES
from perf.ops.attention import ATTENTION
from perf.ops.dropout import DROPOUT
from perf.ops.workload import table
from perf.results import compare
from perf.test_bench import function_of, measure
from perf.workloads import COMPOSED, FLEX, MATH, OURS

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
# Of the operations that the bench measures.
TINY = tuple(w for op in (*CASES, *COMPOSED) if op.workloads("gpu") for w in op.workloads("small") if not w.masked)


def test_every_line_of_the_table_of_workloads_is_of_a_record_a_use_and_modes():
    records = {op.name: op for op in (*CASES, *COMPOSED)}
    known = {mode for op in records.values() for mode in op.modes}
    for use, workload in table():
        assert workload.op in records, workload
        assert use in {"gpu", "cpu", "small", "other", "resized"}, use
        assert known.issuperset(workload.modes), workload
        assert bool(workload.resized) == (use == "resized"), workload


@pytest.mark.parametrize("workload", TINY, ids=lambda workload: workload.key)
def test_the_check_passes_what_is_right_and_nothing_else(workload):
    sample = steps.make_sample(workload, CPU)
    for mode in (*workload.modes, "forward_backward"):
        leaves = steps.leaves(steps.make_step(mode, function_of(OURS, workload, CPU), sample)())
        one_value = [leaf.detach().clone() for leaf in leaves]
        one_value[-1][(-1,) * one_value[-1].dim()] += 1e-2 * one_value[-1].abs().max() + 1e-2
        found = {"right": leaves, "one": one_value, "missing": leaves[:-1], "nan": [v * torch.nan for v in leaves]}
        # Pieces of one row or channel: sums over rows, as derivatives of parameters are, come from all of them.
        errors = steps.errors(workload, mode, sample, found, elements=6)
        assert {name for name, error in errors.items() if error <= steps.TOLERANCES["float32"]} == {"right"}, mode


def test_a_dropout_must_drop_about_as_much_as_it_says_and_its_tangent_the_same():
    sample = steps.make_sample(DROPOUT.workloads("small")[0], CPU)

    def noise(p, seed):
        return (torch.rand(sample.y_bar.shape, generator=torch.Generator().manual_seed(seed)) >= p) / (1 - p)

    def error(*noises):
        made = [value * factor for (value,), factor in zip(sample[:2], noises, strict=True)]
        return steps.errors(DROPOUT.workloads("small")[0], "jvp", sample, {"it": made})["it"]

    one, other = noise(0.1, 0), noise(0.2, 0) * 0.8 / 0.9
    assert error(one, one) < 1e-6
    assert error(one, noise(0.1, 1)) > 0.1
    assert error(other, other) == math.inf


# Compiling it takes longer than the tests around this one; the numbers are the same.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_peers_of_attention_see_the_same_pairs():
    workload = ATTENTION.workloads("small")[0]
    sample = steps.make_sample(workload, CPU)
    found = {name: function_of(name, workload, CPU)(*sample.primals) for name in ("SDPA flash", MATH, FLEX)}
    assert max(steps.errors(workload, "forward", sample, found).values()) <= steps.TOLERANCES["float32"]


def measured(monkeypatch, ours_is_right=True, **results):
    """Rows of providers whose steps return these numbers, of which one is right, on a clock of fixed times."""
    us = {OURS: 2.0, "torch": 8.0, "liger": 4.0}
    monkeypatch.setattr(test_bench, "SECONDS", 0.0)
    monkeypatch.setattr(
        test_bench, "samplers", lambda step, device: {"call_us": lambda: us.get(getattr(step, "name", ""), 1.0)}
    )

    def make(name):
        def step():
            if isinstance(results[name], Exception):
                raise results[name]
            return results[name]

        step.name = name
        return step

    fixed = {"status": "error", "message": "", "tolerance": 0.1}
    rows = {n: {"workload": "w", "mode": "jvp", "provider": n, **fixed} for n in results}
    fails = contextlib.nullcontext() if ours_is_right else pytest.raises(pytest.fail.Exception, match="w, jvp")
    with fails:
        measure(rows, CPU, make, lambda found: {name: abs(value - 1.0) for name, value in found.items()}, 16_000, 8_000)
    return rows


def test_who_is_wrong_or_raises_has_no_time_and_times_are_relative_to_torch_and_a_copy(monkeypatch):
    rows = measured(monkeypatch, **{OURS: 1.0, "torch": 1.05, "liger": 1.5, "apex": RuntimeError("no | JVP")})
    assert [row["status"] for row in rows.values()] == ["ok", "ok", "wrong", "cannot"]
    assert [row.get("call_us") for row in rows.values()] == [2.0, 8.0, None, None]
    assert (rows[OURS]["vs_torch"], rows[OURS]["of_copy"], rows[OURS]["gbps"]) == (0.25, 0.5, 8.0)
    assert rows["apex"]["message"] == "RuntimeError: no | JVP"
    for bad in (2.0, math.nan, RuntimeError("dead")):
        assert measured(monkeypatch, False, **{OURS: bad, "torch": 1.0})["torch"]["status"] == "ok"


def test_a_new_worker_gets_the_gpu_of_the_one_that_died_which_is_an_error_of_its_unit(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    option = types.SimpleNamespace(result=tmp_path / "new" / "a.json", device="cuda")
    collector = Collector(types.SimpleNamespace(option=option))
    nodes = [types.SimpleNamespace(workerinput={}) for _ in range(3)]
    collector.pytest_configure_node(nodes[0])
    collector.pytest_configure_node(nodes[1])
    collector.pytest_testnodedown(nodes[1])
    collector.pytest_configure_node(nodes[2])
    assert [node.workerinput.get("gpu") for node in nodes] == ["GPU-a", None, "GPU-b"]
    item = "perf/test_bench.py::test_operation[layer_norm GPT-2: jvp]"
    for when, properties in (("???", []), ("teardown", [("rows", [{"provider": "torch"}]), ("device", "H")])):
        collector.pytest_runtest_logreport(
            pytest.TestReport(item, ("", None, ""), {}, "failed", "gw0 crashed", when, user_properties=properties)
        )
    collector.pytest_sessionfinish()
    died, torch_row = json.loads(option.result.read_text())["rows"]
    assert (died["workload"], died["mode"], died["status"]) == ("layer_norm GPT-2", "jvp", "error")
    assert torch_row == {"provider": "torch"}


# Its workers import torch, one after another; by day its parts are tested above.
@pytest.mark.nightly
def test_a_run_measures_writes_and_reports(tmp_path):
    result = tmp_path / "result.json"
    given = ["--device", "cpu", "--quick", "-k", "add_rms_norm and forward", "--result", str(result)]
    assert main(["run", *given]) == 0
    assert main(["compare", str(result), str(result)]) == main(["report", str(result), "--out", str(tmp_path)]) == 0
    assert "| add_rms_norm Llama 8B" in (tmp_path / "cpu.md").read_text()


def gpu_result(ours=1.06, modes=("forward", "jvp")):
    """Made-up times in units of a copy; liger cannot do a jvp, and torch's is wrong."""

    def row(workload, mode, name, copies):
        made = {"workload": workload, "mode": mode, "provider": name, "status": "ok", "message": "", "error": 1e-3}
        if mode == "jvp" and name != OURS:
            status = {"torch": "wrong", "liger": "cannot"}[name]
            return {**made, "status": status, "message": f"{name} | has no jvp", "error": {"torch": 0.9}.get(name)}
        ratio = {"vs_torch": copies / 1.9} if mode != "jvp" else {}
        return made | dict.fromkeys(("device_us", "call_us"), 33.5 * copies) | ratio | {"of_copy": 1 / copies}

    names = {OURS: ours, "torch": 1.9, "liger": 1.1}
    rows = [row(w, m, *name) for w, m, name in itertools.product("ab", modes, names.items())]
    head = json.loads((ROOT / "docs" / "perf" / "cpu.json").read_text())
    return {**head, "device": "Imaginary GPU", "rows": rows}


@pytest.mark.parametrize("slower, failed", [(1.052, False), (1.053, True), (0.8, False)])
def test_compare_flags_a_fall_of_more_than_five_percent(slower, failed):
    # Where all is half as fast, only what is relative to the same run means something.
    other = gpu_result(1.06 * slower) | {"device": "half as fast"}
    for row in other["rows"]:
        row |= {kind: 2 * row[kind] for kind in ("device_us", "call_us") if kind in row}
    text, found = compare(gpu_result(), other)
    assert (found, "FELL" in text, "rose" in text) == (failed, failed, slower < 0.9)
    assert "WARNING: device differs: Imaginary GPU and then half as fast." in text


def test_compare_flags_what_broke_or_is_gone_and_a_run_that_proves_nothing():
    good, broken, gone = gpu_result(), gpu_result(), gpu_result()
    broken["rows"][0]["status"] = "wrong"
    del gone["rows"][0]
    for bad, word in ((broken, "BROKEN  a: forward"), (gone, "GONE    a: forward")):
        text, failed = compare(good, bad)
        assert (word in text, failed) == (True, True)
        assert not compare(bad, good)[1]
    assert compare({**good, "rows": []}, good)[1]


def test_commands_read_files_and_refuse_those_of_another_schema(tmp_path):
    files = {"good": gpu_result(), "slow": gpu_result(1.3), "old": {**gpu_result(), "schema": 0}}
    for name, result in files.items():
        (tmp_path / name).write_text(json.dumps(result))
    assert [main(["compare", str(tmp_path / "good"), str(tmp_path / name)]) for name in files] == [0, 1, 2]


def test_the_report_says_how_fast_and_what_others_cannot_do(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(gpu_result()))
    assert main(["report", str(tmp_path / "a.json"), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "imaginary-gpu.md").read_text()
    for words in ("| a | 36, 0.94 | 36, 0.94 |", "| a | 1.79 | wrong (9e-01) |", "| **mean** | 1.04 |  |"):
        assert words in page
    assert "| liger | liger \\| has no jvp | 2 | a: jvp |" in page


def test_the_committed_page_is_the_report_of_its_data(tmp_path):
    folder = ROOT / "docs" / "perf"
    assert main(["report", str(folder / "cpu.json"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "cpu.md").read_text() == (folder / "cpu.md").read_text()
