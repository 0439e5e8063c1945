"""What becomes of the perf suite's measurements: merging, comparing, reporting, and one run from end to end."""

from __future__ import annotations

import json
import types

import pytest

from perf.__main__ import main
from perf.suite import conftest, plan, results, timers
from perf.suite.compare import compare
from perf.suite.plan import GPU_PROVIDERS, Options, make_plan
from perf.suite.targets import verdicts
from tests.perf_results import gpu_result, make_row


def test_what_workers_leave_is_merged_and_what_they_do_not_is_said(tmp_path):
    everything = dict.fromkeys(GPU_PROVIDERS)
    made = make_plan(Options("cpu", modes=("forward",), only=("ResNet",)), everything)
    done, died, never = made["units"][:3]
    results.write_json(tmp_path / "rows" / f"{done['id']}.json", [make_row(done, "primitives", 1.0)])
    sched = types.SimpleNamespace(config=types.SimpleNamespace(getoption=lambda name: tmp_path))
    conftest.pytest_handlecrashitem(f"test_cases.py::test_case[{died['id']}-all]", None, sched)
    results.write_json(tmp_path / "workers" / "cpu.json", {"device": {"type": "cpu", "name": "x"}, "environment": {}})
    result = results.merge(made, tmp_path)
    statuses = {(row["workload"], row["provider"]): row["status"] for row in result["rows"]}
    assert statuses[done["workload"], "primitives"] == "ok"
    assert statuses[died["workload"], "torch"] == "error"
    assert statuses[never["workload"], "torch"] == "skipped"
    assert not result["complete"]
    assert not list(tmp_path.rglob("*.partial"))


def save(path, result):
    results.write_json(path, result)
    return str(path)


@pytest.mark.parametrize("slower, status", [(1.0, 0), (1.04, 0), (1.07, 1), (0.8, 0)])
def test_compare_flags_a_fall_of_more_than_five_percent(tmp_path, capsys, slower, status):
    before, after = save(tmp_path / "a.json", gpu_result()), save(tmp_path / "b.json", gpu_result(slower=slower))
    assert main(["compare", before, after]) == status
    text = capsys.readouterr().out
    assert "device time over a copy" in text
    assert ("FELL" in text) == (status == 1)
    assert ("rose" in text) == (slower < 0.9)


def test_compare_goes_by_the_same_run_and_by_the_spread():
    before, other_machine = gpu_result(), gpu_result()
    other_machine["device"] = {"type": "cuda", "name": "half as fast"}
    for row in other_machine["rows"]:
        if row["device_us"]:
            row["device_us"] = {name: 2 * value for name, value in row["device_us"].items()}
            row["copy_gbps"] /= 2
    assert not compare(before, other_machine).failed
    assert "devices differ" in compare(before, other_machine).text()
    noisy = gpu_result(slower=1.2)
    for row in noisy["rows"]:
        if row["device_us"]:
            row["device_us"]["p20"] *= 0.8
    assert not compare(before, noisy).failed
    broken = gpu_result()
    broken["rows"][0].update(status="wrong", message="error 1.0")
    assert compare(before, broken).failed
    assert "BROKEN" in compare(before, broken).text()
    # A run that shares nothing with the first is no proof of anything.
    assert compare(before, {**before, "rows": []}).failed


def test_files_of_another_schema_are_refused(tmp_path, capsys):
    other = save(tmp_path / "a.json", {**gpu_result(), "schema": 0})
    assert main(["compare", other, other]) == 2
    assert main(["report", str(tmp_path / "none.json"), "--out", str(tmp_path)]) == 2
    assert "schema must be 1, got 0" in capsys.readouterr().err


def test_targets_are_met_not_met_or_not_measured():
    found = {verdict.target.split(":")[0]: verdict for verdict in verdicts(gpu_result())}
    assert found["forward"].met
    assert found["hvp"].met is None
    assert found["hvp"].text == "not measured"
    assert found["1.15 times as fast as torch.compile in the geometric mean"].figure == "1.13 over 16 cases"
    assert not found["1.15 times as fast as torch.compile in the geometric mean"].met
    assert {verdict.met for verdict in verdicts(gpu_result(slower=1.1)) if verdict.target.startswith("jvp")} == {False}


def test_the_report_has_tables_plots_and_what_others_cannot_do(tmp_path):
    assert main(["report", save(tmp_path / "a.json", gpu_result()), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "imaginary-gpu.md").read_text()
    assert "| liger | cannot | 8 |" in page
    assert "RuntimeError: liger \\| has no JVP" in page
    assert "wrong (9e-01)" in page
    assert "1.79 (63.6 us)" in page
    # 8192 x 768 bf16, read and written at the bandwidth of the run, and a launch.
    assert "| 8.8 | 1 | 67.0 |" in page
    assert json.loads((tmp_path / "out" / "imaginary-gpu-device.json").read_text())["chip"] == "sm_90"
    for name in ("speedup", "forward", "jvp"):
        assert f"![imaginary-gpu-{name}](imaginary-gpu-{name}.png)" in page
        assert (tmp_path / "out" / f"imaginary-gpu-{name}.png").stat().st_size > 10_000


def test_a_run_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setitem(plan.SAMPLING_SHARE, "cpu", 1e-3)
    out = tmp_path / "result.json"
    narrow = ["--only", "BatchNorm1d", "--modes", "backward", "--seconds", "60"]
    assert main(["run", "--device", "cpu", *narrow, "--out", str(out)]) == 0
    result = results.load(out)
    assert result["complete"]
    assert [(row["mode"], row["provider"], row["status"]) for row in result["rows"]] == [
        ("backward", "primitives", "ok"),
        ("backward", "torch", "ok"),
    ]
    assert all(row["call_us"]["samples"] >= timers.MIN_ROUNDS and row["device_us"] is None for row in result["rows"])
    assert all(row["fraction_of_copy"] > 0 for row in result["rows"])
    assert result["device"]["type"] == "cpu"
