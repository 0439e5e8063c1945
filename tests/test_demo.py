"""The demo as a user starts it, with few steps."""

import importlib.util
import re

import pytest

if importlib.util.find_spec("sklearn") is None:
    pytest.skip("the demo's digits are scikit-learn's", allow_module_level=True)

from perf import demo


def test_quick_run(monkeypatch, capsys):
    monkeypatch.setattr(demo, "QUICK_STEPS", 12)
    status = demo.main(["--quick"])
    output = capsys.readouterr().out
    assert status == 0, output
    rows = {line[:38].strip(): re.findall(r"[\d.]+", line[38:]) for line in output.splitlines()}
    # The error of torch is printed, and not required: a torch that is mended must not fail this test.
    _, *ours = map(float, rows["the loss's gradient is off by"])
    assert max(ours) <= 0.01
    # Guessing is right once in ten.
    assert min(map(float, rows["digits it has not seen, read rightly"])) > 40
    assert min(map(float, rows["milliseconds a step"])) > 0
    assert output.rstrip().endswith("compiled")


def test_promises_that_are_not_kept_fail_the_run():
    right = demo.Outcome(1e-9, 0.9, 0.8, 1.0, 1e-3)
    names = ("torch", "repaired", "repaired and compiled")

    def failures(*outcomes):
        return [sentence.partition(":")[0] for sentence in demo.failures(dict(zip(names, outcomes, strict=True)))]

    assert failures(right._replace(gradient_error=1.0), right, right) == []
    wrong = right._replace(gradient_error=float("nan"))
    assert failures(right, wrong, right._replace(last_loss=1.001)) == list(names[1:])
