"""Result files that are damaged: each is refused by name, and none is taken for a fall."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from perf.__main__ import main
from perf.suite import results
from perf.suite.reader import ResultError, load
from tests.perf_results import cpu_result, gpu_result

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def whole():
    """A result with one row of this package and one of torch."""
    result = gpu_result(("forward",))
    return {**result, "rows": result["rows"][:2]}


def written(path, result):
    path.write_text(json.dumps(result))
    return path


def test_results_that_are_whole_are_read(tmp_path):
    for result in (gpu_result(), cpu_result(), {**gpu_result(), "device": None, "environment": None, "rows": []}):
        assert load(written(tmp_path / "a.json", result)) == json.loads(json.dumps(result))
    committed = list((ROOT / "docs" / "perf").glob("*.json"))
    for path in committed:
        if "rows" in path.read_text(encoding="utf-8"):
            assert load(path)["rows"]


def test_every_field_is_missed(tmp_path, whole):
    def said(path, damaged):
        with pytest.raises(ResultError) as caught:
            load(written(tmp_path / "a.json", damaged))
        assert str(caught.value) == f"{tmp_path / 'a.json'}: damaged: {path} is missing."

    for name in set(whole) - {"schema"}:
        said(name, {key: value for key, value in whole.items() if key != name})
    for name in whole["rows"][0]:
        damaged = copy.deepcopy(whole)
        del damaged["rows"][1][name]
        said(f"rows[1].{name}", damaged)
    for name, parts in {"device": ("type", "name", "capability", "gpus"), "seconds": ("total", "compile")}.items():
        for part in parts:
            damaged = copy.deepcopy(whole)
            del damaged[name][part]
            said(f"{name}.{part}", damaged)


@pytest.mark.parametrize(
    "place, value, said",
    [
        (("rows",), None, "rows must be a list, got null"),
        (("rows", 0), "row", 'rows[0] must be an object, got "row"'),
        (("rows", 1, "status"), "fine", "rows[1].status must be one of 'ok', 'wrong', "),
        (("rows", 0, "status"), [], "rows[0].status must be one of"),
        (("rows", 0, "mode"), "sideways", "rows[0].mode must be one of 'forward', "),
        (("rows", 0, "layout"), "diagonal", "rows[0].layout must be one of '', 'channels_last', got"),
        (
            ("rows", 0, "device_us"),
            {"median": 0.0, "p20": 1.0, "p80": 1.0},
            "rows[0].device_us must be an object with p",
        ),
        (
            ("rows", 0, "device_us"),
            {"median": 1.0},
            "rows[0].device_us must be an object with positive median, p20 and",
        ),
        (("rows", 0, "call_us"), None, "rows[0].call_us must not be null where the status is ok"),
        (("rows", 0, "copy_gbps"), float("nan"), "rows[0].copy_gbps must be a positive number or null, got NaN"),
        (("rows", 0, "copy_gbps"), None, "rows[0].copy_gbps must not be null beside a gbps"),
        (("rows", 0, "minimum_bytes"), True, "rows[0].minimum_bytes must be a positive number or null, got true"),
        (("rows", 0, "op"), "sort", "rows[0].op must be one of layer_norm, "),
        (("rows", 1, "provider"), "primitives", "rows[1] must be the only row of"),
        (("calibration",), {"512": {"copy_gbps": 1.0}}, "calibration must be for each device an object of sizes"),
        (("clocks",), {"0": []}, "clocks must be for each GPU a list"),
        (("overhead",), {"modes": {"calls": {"ratio": 1.0}}}, "overhead must be an object with modes"),
        (("complete",), 1, "complete must be true or false, got 1"),
        (("device", "type"), "tpu", "device.type must be one of 'cpu', 'cuda', got \"tpu\""),
    ],
)
@pytest.mark.parametrize("command", ["compare", "report"])
def test_what_is_damaged_is_named_and_is_no_fall(tmp_path, capsys, whole, command, place, value, said):
    damaged = copy.deepcopy(whole)
    where = damaged
    for step in place[:-1]:
        where = where[step]
    where[place[-1]] = value
    good, bad = written(tmp_path / "good.json", whole), written(tmp_path / "bad.json", damaged)
    out = tmp_path / "out"
    arguments = [str(good), str(bad)] if command == "compare" else [str(bad), "--out", str(out)]
    assert main([command, *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"{bad}: damaged: {said}")
    assert not out.exists()


@pytest.mark.parametrize("text", ["", "[]", "7", '{"schema": 3}', '{"schema": 2}', "{", "\u00ff"])
def test_what_is_no_result_is_no_fall(tmp_path, capsys, whole, text):
    good, bad = written(tmp_path / "good.json", whole), tmp_path / "bad.json"
    bad.write_text(text, encoding="latin-1")
    assert main(["compare", str(bad), str(good)]) == main(["report", str(bad), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count(f"{bad}: ") == 2


def test_what_a_run_leaves_can_be_read(tmp_path, whole):
    results.write_json(tmp_path / "a.json", whole)
    assert load(tmp_path / "a.json") == json.loads(json.dumps(whole))
