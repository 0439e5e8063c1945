"""The demo as a user starts it, with few steps."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

if importlib.util.find_spec("sklearn") is None:
    pytest.skip("the demo's digits are scikit-learn's", allow_module_level=True)

from perf.demo import report
from perf.demo.__main__ import main
from perf.demo.derivatives import Errors
from perf.demo.train import Contest, Duel, Run


def row(output: str, name: str) -> list[float]:
    """Numbers of the only line that starts with `name`; those behind "at step" are left out."""
    (line,) = [line for line in output.splitlines() if re.match(rf"\s*{re.escape(name)}\s+\d[\d.e+-]*\s", line)]
    return [float(number) for number in re.sub(r"at step \d+", "", line.strip().removeprefix(name)).split()]


# One test, because parallel workers would each train for a test of their own.
def test_quick_run(tmp_path, capsys):
    folder = tmp_path / "new" / "pictures"
    with torch.random.fork_rng():
        status = main(["--device", "cpu", "--quick", "--output", str(folder)])
    output = capsys.readouterr().out
    assert status == 0, output
    for name in ("conv net", "transformer"):
        required, torch_accuracy, our_accuracy, float64_gap, float32_gap, torch_ms, our_ms = row(output, name)
        assert min(torch_accuracy, our_accuracy) >= required == 0.5
        assert float64_gap <= 1e-9
        # On the CPU both may call the same kernels of ATen, and agree in every bit.
        assert 0 <= float32_gap < 1e-3
        assert min(torch_ms, our_ms) > 0
    for name in ("jvp(jvp)", "grad(jvp)", "third derivative"):
        # The error of torch is printed, and not required: a torch that is mended must not fail this test.
        _, our_conv, _, our_transformer = row(output, name)
        assert max(our_conv, our_transformer) <= 1e-9
    for name in ("loss_curves.png", "digits.png"):
        assert (folder / name).stat().st_size > 10_000


def test_missed_bound_fails_the_run():
    def duel(last_loss, accuracy):
        runs = [Run(None, [loss], 1.0) for loss in (1.0, 1.0, 1.0, last_loss)]
        return Duel(Contest("net", None, 1.0, 1, 0.9), *runs, 0.95, accuracy)

    right, wrong = Errors(torch_nn=1.0, ours=1e-15), Errors(torch_nn=1.0, ours=float("nan"))
    assert report.failures([duel(1.0, 0.95)], {"block": {"jvp(jvp)": right}}) == []
    missed = report.failures([duel(1.0 + 1e-8, 0.85)], {"block": {"jvp(jvp)": wrong}})
    assert [re.split("[,:]", sentence)[0] for sentence in missed] == ["net", "net", "block"]
