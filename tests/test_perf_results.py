"""What becomes of the perf suite's measurements: merging, comparing, reporting, and one run from end to end."""

from __future__ import annotations

import json
import types

import pytest

from perf.__main__ import main
from perf.suite import conftest, plan, plots, reader, results, timers
from perf.suite.bytes import is_multi_pass
from perf.suite.compare import compare
from perf.suite.plan import GPU_PROVIDERS, Options, make_plan
from perf.suite.tables import speedup
from perf.suite.targets import verdicts
from perf.workloads import Workload
from tests.perf_results import cpu_result, gpu_result, make_row


def test_what_workers_leave_is_merged_and_what_they_do_not_is_said(tmp_path):
    everything = dict.fromkeys(GPU_PROVIDERS)
    made = make_plan(Options("cpu", modes=("forward",), only=("ResNet",)), everything) | {"gpus": []}
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
    # What no run would measure makes a run no less complete.
    results.write_json(
        tmp_path / "rows" / f"{died['id']}.json", [results.row_for(died, "torch", "skipped", "left out: x")]
    )
    results.write_json(tmp_path / "rows" / f"{never['id']}.json", [results.row_for(never, "torch", "cannot", "no")])
    for unit in made["units"][3:]:
        results.write_json(tmp_path / "rows" / f"{unit['id']}.json", [make_row(unit, "primitives", 1.0)])
    assert results.merge(made, tmp_path)["complete"]
    assert not list(tmp_path.rglob("*.partial"))


def save(path, result):
    results.write_json(path, result)
    return str(path)


@pytest.mark.parametrize("slower, status", [(1.0, 0), (1.052, 0), (1.053, 1), (1.3, 1), (0.8, 0)])
def test_compare_flags_a_fall_of_more_than_five_percent(tmp_path, capsys, slower, status):
    before, after = save(tmp_path / "a.json", gpu_result()), save(tmp_path / "b.json", gpu_result(slower=slower))
    assert main(["compare", before, after]) == status
    text = capsys.readouterr().out
    assert "device time over a copy" in text
    assert ("FELL" in text) == (status == 1)
    assert ("rose" in text) == (slower < 0.9)
    assert "WARNING" not in text


def noisy(slower):
    result = gpu_result(slower=slower)
    for row in result["rows"]:
        if row["device_us"]:
            row["device_us"]["p20"] /= 2 * slower
    return result


@pytest.mark.parametrize("slower", [1.07, 1.13])
def test_a_fall_within_the_spread_fails_too_and_is_to_be_measured_again(tmp_path, capsys, slower):
    paths = [save(tmp_path / "a.json", gpu_result()), save(tmp_path / "b.json", noisy(slower))]
    assert main(["compare", *paths]) == 1
    text = capsys.readouterr().out
    assert text.count("within the spread of both runs: measure again") == text.count("FELL") == 20
    assert text.endswith("Failed: of the rows, 20 fell by more than 5%.\n")
    # Of what is allowed then, a fall of more than twice as much is none.
    assert main(["compare", "--allow-spread", *paths]) == (1 if slower > 1.12 else 0)
    text = capsys.readouterr().out
    assert ("FELL" in text) == (slower > 1.12)
    assert ("allowed" in text) == (slower < 1.12)
    if slower < 1.12:
        assert "Nothing fell by more than 5% but 20 within the spread of both runs, which --allow-spread lets" in text
    # A fall beyond the spread is not allowed, however small.
    assert compare(gpu_result(), gpu_result(slower=1.07), allow_spread=True).failed
    assert "Nothing fell by more than 5%." in compare(gpu_result(), noisy(1.04)).text()


def test_what_is_flagged_is_a_part_of_one(tmp_path, capsys):
    path = save(tmp_path / "a.json", gpu_result())
    # Five percent as 5 would let everything pass.
    for fall in ("5", "-0.1"):
        with pytest.raises(SystemExit, match="2"):
            main(["compare", path, path, "--fall", fall])
        assert f"must be a part of one, as 0.05 for 5 %, got {fall}" in capsys.readouterr().err


def test_compare_goes_by_the_same_run_and_says_what_differs():
    before, other_machine = gpu_result(), gpu_result()
    other_machine["device"] = {"type": "cuda", "name": "half as fast"}
    other_machine["environment"] = {**before["environment"], "packages": {"torch": "2.13"}}
    for row in other_machine["rows"]:
        if row["device_us"]:
            row["device_us"] = {name: 2 * value for name, value in row["device_us"].items()}
            row["copy_gbps"] /= 2
    comparison = compare(before, other_machine)
    assert not comparison.failed
    lines = comparison.text().splitlines()
    assert "WARNING: device differs: Imaginary GPU and then half as fast." in lines
    assert "WARNING: torch differs: 2.11 and then 2.13." in lines
    assert any("DEVICES differ" in line for line in lines)
    # A run that shares nothing with the first is no proof of anything.
    assert compare(before, {**before, "rows": []}).failed
    assert compare({**before, "rows": []}, before).failed
    # Nothing to compare is no sentence about rows that are there.
    nothing = gpu_result()
    for row in nothing["rows"]:
        row["status"] = "error"
    assert compare(nothing, nothing).text().endswith("Failed: no row is right in both runs.")


@pytest.mark.parametrize("status", ["wrong", "error", "skipped", None])
def test_what_broke_or_is_gone_fails(tmp_path, capsys, status):
    before, after = gpu_result(), gpu_result()
    if status is None:
        del after["rows"][0]
    else:
        after["rows"][0].update(status=status, message="for a reason")
    paths = [save(tmp_path / "a.json", before), save(tmp_path / "b.json", after)]
    assert main(["compare", *paths]) == 1
    text = capsys.readouterr().out
    what = f"{before['rows'][0]['workload']}: {before['rows'][0]['mode']}"
    words = {"wrong": f"BROKEN  {what}: wrong: for a reason", "error": f"BROKEN  {what}: error: for a reason"}
    assert words.get(status, f"GONE    {what}") in text
    # The other way round something was mended, or is new, and nothing is held against it.
    assert main(["compare", *reversed(paths)]) == 0
    text = capsys.readouterr().out
    assert (f"new     {what}" if status is None else f"fixed   {what}: was {status}") in text


def test_what_is_new_and_wrong_fails_and_what_was_wrong_before_is_said():
    before, after = gpu_result(), gpu_result()
    after["rows"][0].update(status="wrong", message="error 1.0")
    still = gpu_result()
    still["rows"][0].update(status="error", message="boom")
    comparison = compare(after, still)
    assert not comparison.failed
    assert "STILL" in comparison.text()
    del before["rows"][0]
    assert compare(before, after).failed


def test_files_of_another_schema_are_refused(tmp_path, capsys):
    other = save(tmp_path / "a.json", {**gpu_result(), "schema": 0})
    assert main(["compare", other, other]) == 2
    assert main(["report", str(tmp_path / "none.json"), "--out", str(tmp_path)]) == 2
    assert "schema must be 3, got 0" in capsys.readouterr().err


COPY_TARGET = "forward: at least 0.92 of copy speed at every shape of 32 MB and more, by minimum bytes"
OWN_TARGET = COPY_TARGET.replace("minimum bytes", "its own passes (kernels of several passes)")
FASTEST = "as fast as the fastest peer at each shape"
COMPILED = "1.15 times as fast as torch.compile in the geometric mean"


def judged(result):
    return {verdict.target: verdict for verdict in verdicts(result)}


def rows_of(result, provider="primitives", large=True, **values):
    """Rows of large workloads, or of small ones, whose fields have these values."""
    sizes = {workload.key: workload.pass_bytes for workload, _ in plan.suite("cuda") if isinstance(workload, Workload)}
    return [
        row
        for row in result["rows"]
        if row["provider"] == provider
        and (sizes.get(row["workload"], 0) >= 32e6) == large
        and all(row[name] == value for name, value in values.items())
    ]


def test_targets_are_met_by_every_shape_that_they_speak_of():
    whole = gpu_result(("forward", "jvp"), quick=False)
    found = judged(whole)
    assert (found[COPY_TARGET].text, found[OWN_TARGET].text) == ("met", "met")
    assert found[COPY_TARGET].measured == len(
        [row for row in rows_of(whole, mode="forward") if row["op"] != "batch_norm"]
    )
    assert "by its own passes least 0.93" in found[COPY_TARGET].figure
    assert found[COMPILED].met is False
    assert found[COMPILED].figure.startswith("1.13 over")
    # Of the other modes there is nothing.
    assert {v.text[:12] for target, v in found.items() if target.startswith(("hvp", "training"))} == {"not measured"}
    slow = judged(gpu_result(("forward",), slower=1.1, quick=False))
    assert (slow[COPY_TARGET].met, slow[FASTEST].met) == (False, False)
    # A quick run has a few of the shapes, all of them good: that says nothing of the others.
    quick = judged(gpu_result())
    assert quick[COPY_TARGET].text.startswith("not measured (")
    assert quick[COPY_TARGET].figure.startswith("7 of")


def test_targets_speak_of_what_is_planned_and_of_what_was_measured_beyond_it():
    planned = {(workload.key, mode) for workload, mode in plan.suite("cuda")}
    whole = gpu_result((), quick=False)
    jvps = "jvp: at least 0.92 of copy speed at every shape of 32 MB and more, by minimum bytes"
    assert judged(whole)[jvps].met
    assert 0 < judged(whole)[jvps].expected < judged(whole)[COPY_TARGET].expected
    # What the plan leaves out is not missing; what it has and the time did not suffice for is.
    tuned = [row for row in whole["rows"] if row["provider"] == "liger" and row["op"] != "layer_norm"]
    for row in tuned:
        row.update(results.row_for(row, "liger", "skipped", "left out: by design"))
    assert judged(whole)[FASTEST].met
    tuned[0].update(message="out of time: not compiled in time")
    assert judged(whole)[FASTEST].met is None
    fast = gpu_result((), slower=0.9, quick=False)
    assert judged(fast)[COMPILED].met
    row = rows_of(fast, "torch.compile", mode="forward")[0]
    for message, met in (("left out: by design", True), ("out of time: not compiled in time", None)):
        row.update(results.row_for(row, "torch.compile", "skipped", message))
        assert judged(fast)[COMPILED].met is met
    # Who asks for a mode everywhere is told of all of it.
    more = gpu_result(("jvp",), quick=False)
    beyond = [row for row in rows_of(more, op="layer_norm") if (row["workload"], "jvp") not in planned]
    assert judged(more)[jvps].expected == judged(whole)[jvps].expected + len(
        [row for row in rows_of(more) if (row["workload"], "jvp") not in planned and row["op"] != "batch_norm"]
    )
    beyond[0]["fraction_of_copy"] = 0.5
    assert judged(more)[jvps].met is False


def test_jvps_are_judged_by_the_minimum_and_what_takes_several_passes_by_its_own():
    result = gpu_result(("forward",), quick=False)
    (row, *_) = rows_of(result, op="layer_norm")
    row["fraction_of_copy"], row["kernel_fraction"] = 0.8, 0.99
    (other, *_) = rows_of(result, op="batch_norm")
    other["fraction_of_copy"], other["kernel_fraction"] = 0.6, 0.93
    found = judged(result)
    assert found[COPY_TARGET].met is False
    assert found[OWN_TARGET].met
    assert "by minimum bytes least 0.60" in found[OWN_TARGET].figure
    other["kernel_fraction"] = 0.9
    assert judged(result)[OWN_TARGET].met is False
    assert [is_multi_pass("layer_norm", mode) for mode in ("forward", "backward", "jvp", "hvp")] == [False] * 3 + [True]
    assert is_multi_pass("batch_norm_eval", "backward")
    assert not is_multi_pass("batch_norm_eval", "forward")


@pytest.mark.parametrize(
    "status, text",
    [("wrong", "NOT MET"), ("error", "NOT MET"), ("skipped", "not measured"), (None, "not measured")],
)
def test_one_row_of_ours_decides_whatever_the_others_are(status, text):
    result = gpu_result(("forward",), quick=False)
    row = rows_of(result, op="layer_norm")[0]
    if status is None:
        result["rows"].remove(row)
    else:
        row.update(results.row_for(row, "primitives", status, "out of time"))
    found = judged(result)
    assert found[COPY_TARGET].text.startswith(text)
    if text == "NOT MET":
        assert f"wrong or failed in 1, first {row['workload']}: forward" in found[COPY_TARGET].figure
    else:
        expected = found[COPY_TARGET].expected
        assert found[COPY_TARGET].text == f"not measured ({expected - 1} of {expected})"
    assert found[FASTEST].text.startswith(text)
    # The others are judged by shapes of their own; those that are small are nobody's.
    assert found[OWN_TARGET].met
    small = gpu_result(("forward",), quick=False)
    rows_of(small, large=False)[0].update(fraction_of_copy=0.1, kernel_fraction=0.1)
    assert judged(small)[COPY_TARGET].met


def test_a_peer_that_fails_is_no_failure_of_ours_and_one_that_was_not_measured_is_unknown():
    result = gpu_result(("forward",), quick=False)
    assert judged(result)[FASTEST].met is None, "the other modes were not measured"
    whole = gpu_result((), quick=False)
    assert judged(whole)[FASTEST].met
    assert judged(whole)["training_step: as fast as the fastest peer"].met
    row = rows_of(whole, "liger", mode="forward")[0]
    row.update(status="wrong", message="error 1.0", device_us=None, call_us=None)
    assert judged(whole)[FASTEST].met
    row.update(status="skipped", message="out of time: not compiled in time")
    assert judged(whole)[FASTEST].text.startswith("not measured")
    row.update(status="skipped", message="left out: it takes too long")
    assert judged(whole)[FASTEST].met
    # Who was not asked may be faster than all who were.
    del whole["providers"]["apex"]
    assert judged(whole)[FASTEST].met is None
    rows_of(whole, "torch", mode="forward")[0]["device_us"]["median"] = 1.0
    rows_of(whole, mode="forward")[0]["vs_torch_device"]["median"] = 50.0
    assert judged(whole)[FASTEST].met is False


def test_targets_of_a_cpu_say_where_torch_is_wrong():
    found = judged(cpu_result())
    first = found["forward_backward: at most 1.15 of the time of torch.nn"]
    assert first.met
    assert "torch is wrong (9e-02) at layer_norm ViT-B/16" in first.figure
    assert found["training_step: at most 1.15 of the time of torch.nn"].met
    assert found["front-end overhead within its limits"].figure == "1 of 2 comparisons; missed: backward (1.05)"
    slow = judged(cpu_result(ours=1.2))
    assert {verdict.met for verdict in slow.values()} == {False}
    without_torch = cpu_result()
    without_torch["rows"] = [row for row in without_torch["rows"] if row["provider"] == "primitives"]
    for row in without_torch["rows"]:
        row["vs_torch_call"] = None
    assert judged(without_torch)["forward: at most 1.15 of the time of torch.nn"].met is None


def test_speed_ups_compare_times_of_one_kind():
    result = gpu_result()
    case = {row["provider"]: row for row in result["rows"][:4]}
    assert speedup(case, "liger") == pytest.approx(1.1 / 1.06)
    # A peer that could not be captured has a call time alone, which no device time is measured against.
    case["liger"]["device_us"] = None
    ours, theirs = case["primitives"]["call_us"]["median"], case["liger"]["call_us"]["median"]
    assert speedup(case, "liger") == pytest.approx(theirs / ours)
    case["primitives"]["device_us"] = None
    assert speedup(case, "torch.compile") == pytest.approx(case["torch.compile"]["call_us"]["median"] / ours)


def test_the_report_has_tables_plots_and_what_others_cannot_do(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "DPI", 50)
    assert main(["report", save(tmp_path / "a.json", gpu_result()), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "imaginary-gpu.md").read_text()
    assert "| liger | cannot | 10 |" in page
    assert "RuntimeError: liger \\| has no JVP" in page
    assert "torch is wrong here (9e-01)" in page
    assert "SM clock 345 to 1980 MHz" in page
    assert "revision 0123456789ab with changes that are not committed" in page
    assert "| batch norm | forward | 2 | 3 | its own passes |" in page
    assert "| layer norm | jvp | 4 | 4 | minimum bytes |" in page
    assert "1.79 (63.6 us)" in page
    # 8192 x 768 bf16, read and written at the bandwidth of the run, and a launch.
    assert "| 8.8 | 1 | 67.0 |" in page
    assert json.loads((tmp_path / "out" / "imaginary-gpu-device.json").read_text())["chip"] == "sm_90"
    for name in ("speedup", "forward", "jvp"):
        assert f"![imaginary-gpu-{name}](imaginary-gpu-{name}.png)" in page
        assert (tmp_path / "out" / f"imaginary-gpu-{name}.png").stat().st_size > 5_000


def test_the_report_of_a_cpu_says_what_is_wrong_and_what_the_front_end_costs(tmp_path):
    assert main(["report", save(tmp_path / "a.json", cpu_result()), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "cpu.md").read_text()
    assert "torch is wrong here (9e-02)" in page
    assert "| torch | wrong | 1 |" in page
    assert "off by up to 9.2e-02 of the largest value, at most 4e-02 is right" in page
    assert "| backward | 1.05 | 1.00 to 1.10 | 1.0 | MISSED |" in page


def test_a_run_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setitem(plan.SAMPLING_SHARE, "cpu", 1e-3)
    out = tmp_path / "result.json"
    narrow = ["--only", "BatchNorm1d", "--modes", "backward", "--seconds", "60"]
    assert main(["run", "--device", "cpu", *narrow, "--out", str(out)]) == 0
    result = reader.load(out)
    assert result["complete"]
    assert [(row["mode"], row["provider"], row["status"]) for row in result["rows"]] == [
        ("backward", "primitives", "ok"),
        ("backward", "torch", "ok"),
    ]
    assert all(row["call_us"]["samples"] >= timers.MIN_ROUNDS and row["device_us"] is None for row in result["rows"])
    assert all(row["fraction_of_copy"] > 0 and row["kernel_bytes"] is None for row in result["rows"])
    assert result["package"]["version"]
    assert result["device"]["type"] == "cpu"
