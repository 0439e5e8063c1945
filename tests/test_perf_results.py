"""Results of the perf suite, most of them made up: comparisons, targets, reports."""

import itertools
from pathlib import Path

import pytest

from perf.__main__ import main
from perf.suite import report, results
from perf.suite.compare import compare
from perf.suite.plan import Options, make_plan
from perf.suite.results import row_for
from perf.suite.targets import verdicts
from perf.workloads import GPU_WORKLOADS, MATH, OURS, PROVIDERS

ROOT = Path(__file__).resolve().parents[1]

# Made-up results of a GPU: times in units of that of a copy of the minimum of bytes.

COPIES = {"primitives": 1.06, "torch": 1.9, "torch.compile": 1.2, "liger": 1.1}
COPY_US = 33.5


def make_row(measured, name, copies):
    if name == "liger" and measured[1] == "jvp":
        return row_for(measured, name, "cannot", message="RuntimeError: liger | has no JVP")
    if name == "torch" and measured[1] == "jvp" and measured[0].op == "log_softmax":
        return row_for(measured, name, "wrong", message="error 9.0e-01", error=0.9, tolerance=4e-2)
    timed = {
        kind: dict.fromkeys(("median", "p20", "p80"), value)
        for kind, value in (("device_us", copies * COPY_US), ("call_us", copies * COPY_US + 10))
    }
    if name != "torch":
        timed["vs_torch_device"] = {"median": copies / COPIES["torch"]}
    if measured[1] != "training_step":
        timed |= {"copy_gbps": 4000.0, "gbps": 4000.0 / copies, "fraction_of_copy": 1 / copies}
    return row_for(measured, name, "ok", **timed)


def gpu_result(slower=1.0, quick=True):
    """A run on a GPU; `slower` multiplies the times of this package."""
    copies = COPIES | {"primitives": COPIES["primitives"] * slower}
    units = make_plan(Options("cuda", quick=quick))
    return {
        **results.load(ROOT / "docs" / "perf" / "cpu.json"),
        "package": {"version": "1.0", "revision": "0123456789abcdef", "dirty": True},
        "device": {"type": "cuda", "name": "Imaginary GPU"},
        "clocks": {"0": [{"driver": "1", "sm_mhz": sm, "memory_mhz": 3201} for sm in (345, 1980)]},
        "providers": {name: None if name in COPIES else "ModuleNotFoundError" for name in PROVIDERS},
        "rows": [make_row(unit, name, copies[name]) for unit, name in itertools.product(units, copies)],
    }


@pytest.mark.parametrize("slower, failed", [(1.052, False), (1.053, True), (0.8, False)])
def test_compare_flags_a_fall_of_more_than_five_percent(slower, failed):
    # Where all is half as fast, only what is relative to the same run means something.
    other = gpu_result(slower)
    other["device"] = {"type": "cuda", "name": "half as fast"}
    for row in other["rows"]:
        row["device_us"] = row["device_us"] and {name: 2 * value for name, value in row["device_us"].items()}
    text, found = compare(gpu_result(), other)
    assert (found, "FELL" in text, "rose" in text) == (failed, failed, slower < 0.9)
    assert "device time over a copy" in text
    assert "WARNING: device differs: Imaginary GPU and then half as fast." in text
    assert "WARNING" not in compare(gpu_result(), gpu_result(slower))[0]


@pytest.mark.parametrize("word, back, field", [("BROKEN", "fixed", "status"), ("GONE", "new", "provider")])
def test_what_broke_or_is_gone_fails(word, back, field):
    before, after = gpu_result(), gpu_result()
    after["rows"][0][field] = "wrong"
    what = f"{before['rows'][0]['workload']}: {before['rows'][0]['mode']}"
    text, failed = compare(before, after)
    assert (f"{word:<8}{what}" in text, failed) == (True, True)
    # The other way round it was mended, or is new.
    text, failed = compare(after, before)
    assert (f"{back:<8}{what}" in text, failed) == (True, False)
    # A row that is right in neither is said; a run that shares nothing with the first proves nothing.
    assert ("STILL" in compare(after, after)[0]) == (word == "BROKEN")
    assert compare({**before, "rows": []}, before)[1]


def test_commands_read_files_and_refuse_those_of_another_schema(tmp_path):
    files = {"good": gpu_result(), "slow": gpu_result(1.3), "old": {**gpu_result(), "schema": 0}}
    for name, result in files.items():
        results.write_json(tmp_path / name, result)
    assert [main(["compare", str(tmp_path / "good"), str(tmp_path / name)]) for name in files] == [0, 1, 2]


def judged(result):
    """The verdicts on copy speed in forwards, on the fastest peer and on `torch.compile`, up to the cases measured."""
    copies, _, _, fastest, compiled, *_ = (verdict.text.partition(" (")[0] for verdict in verdicts(result))
    return copies, fastest, compiled


def test_targets_are_met_by_every_shape_that_they_speak_of_and_one_row_decides():
    assert judged(gpu_result(0.9, quick=False))[2] == "met"
    assert judged(gpu_result(1.1, quick=False))[:2] == ("NOT MET", "NOT MET")
    # A quick run has a few of the shapes, all of them good: that says nothing of the others.
    assert judged(gpu_result())[0] == "not measured"
    result = gpu_result(quick=False)
    assert judged(result) == ("met", "met", "NOT MET")
    forwards = [row for row in result["rows"] if row["mode"] == "forward"]

    def large(op, name):
        keys = {w.key for w in GPU_WORKLOADS if w.op == op and w.pass_bytes >= 32e6}
        return next(row for row in forwards if row["provider"] == name and row["workload"] in keys)

    # Batch norm, which no kernel does at copy speed, is held against peers alone; one that fails does not count.
    large("batch_norm", "primitives")["fraction_of_copy"] = 0.6
    large("layer_norm", "liger")["status"] = "wrong"
    assert judged(result)[:2] == ("met", "met")
    # Who was not asked may be faster than all who were; one that is faster decides.
    del result["providers"]["apex"]
    assert judged(result)[:2] == ("met", "not measured")
    ours = large("layer_norm", "primitives")
    ours["vs_torch_device"]["median"] = 50.0
    assert judged(result)[:2] == ("met", "NOT MET")
    ours["status"] = "error"
    assert judged(result)[:2] == ("NOT MET", "NOT MET")
    result["rows"].remove(ours)
    assert judged(result)[:2] == ("not measured", "not measured")


def test_attention_is_held_to_its_forward_on_a_gpu_and_to_math_on_a_cpu():
    def texts(result, mode):
        return [each.text.partition(" (")[0] for each in verdicts(result) if each.target.startswith(f"{mode} of att")]

    result = gpu_result(quick=False)
    units = [(w, mode) for w in GPU_WORKLOADS if w.op == "attention" for mode in w.modes]
    result["rows"] = [make_row(each, OURS, 4.4 if each[1] == "jvp" else 1.1) for each in units]
    assert texts(result, "jvp") == texts(result, "hvp") == ["met"]
    result["rows"][2]["device_us"]["median"] *= 1.01
    assert (texts(result, "jvp"), texts(result, "hvp")) == (["NOT MET"], ["met"])
    cpu = [each for each in make_plan(Options("cpu")) if getattr(each[0], "op", "") == "attention"]
    rows = [row for each in cpu for row in (make_row(each, OURS, 2.0), make_row(each, MATH, 2.01))]
    result |= {"device": {"type": "cpu"}, "rows": rows}
    assert texts(result, "hvp") == ["met"]
    rows[-1]["call_us"]["median"] = rows[-1]["device_us"]["median"] = 1.0
    assert (texts(result, "backward_of_jvp"), texts(result, "hvp")) == (["NOT MET"], ["met"])


def test_the_report_of_a_gpu_has_plots_and_what_others_cannot_do(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DPI", 30)
    result = gpu_result() | {"device": {"type": "cuda", "name": "NVIDIA H200"}}
    result["rows"] = [row for row in result["rows"] if row["mode"] in {"forward", "jvp"}]
    results.write_json(tmp_path / "a.json", result)
    assert main(["report", str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "nvidia-h200.md").read_text()
    said = ("RuntimeError: liger \\| has no JVP", "torch is wrong here (9e-01)", "1.79 (63.6 us)", "| 45.5 |")
    for words in (
        *said,
        "SM clock 345 to 1980 MHz",
        "revision 0123456789ab with changes that are not committed",
    ):
        assert words in page
    for name in ("speedup", "forward", "jvp"):
        assert f"![nvidia-h200-{name}](nvidia-h200-{name}.png)" in page
        assert (tmp_path / "out" / f"nvidia-h200-{name}.png").stat().st_size > 2_000


def test_the_committed_pages_of_the_cpu_are_the_reports_of_their_data(tmp_path, monkeypatch):
    # Drawing takes seconds; the report above does.
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: path.touch())
    folder = ROOT / "docs" / "perf"
    assert main(["report", *map(str, folder.glob("cpu*.json")), "--out", str(tmp_path)]) == 0
    for page in folder.glob("cpu*.md"):
        assert (tmp_path / page.name).read_text() == page.read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in folder.glob("cpu*.png")}
