"""The demo as a user starts it, with few steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    # The width keeps each row of a table on one line.
    environment = {**os.environ, "COLUMNS": "140", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "perf.demo", "--device", "cpu", *options]
    return subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8"
    )


def row(output: str, name: str) -> list[float]:
    """Numbers of the only line that starts with `name`; those behind "at step" are left out."""
    (line,) = [line for line in output.splitlines() if re.match(rf"\s*{re.escape(name)}\s+\d[\d.e+-]*\s", line)]
    return [float(number) for number in re.sub(r"at step \d+", "", line.strip().removeprefix(name)).split()]


def check_training(output, name, required):
    printed, torch_accuracy, our_accuracy, float64_gap, float32_gap, torch_ms, our_ms = row(output, name)
    assert printed == required
    assert min(torch_accuracy, our_accuracy) >= required
    assert float64_gap <= 1e-9
    # On the CPU both may call the same kernels of ATen, and agree in every bit.
    assert 0 <= float32_gap < 1e-3
    assert min(torch_ms, our_ms) > 0


def check_derivative(output, name):
    # What torch is off by is printed, and not required: a torch that is mended must not fail this test.
    _, our_conv, _, our_transformer = row(output, name)
    assert max(our_conv, our_transformer) <= 1e-9


def check_picture(path):
    content = path.read_bytes()
    assert content.startswith(PNG_SIGNATURE)
    assert len(content) > 10_000


# One test, because parallel workers would each train for a test of their own.
def test_quick_run(tmp_path):
    folder = tmp_path / "new" / "pictures"
    result = run_demo("--quick", "--output", str(folder))
    assert result.returncode == 0, result.stdout + result.stderr
    assert str(folder) in result.stdout
    for name in ("conv net", "transformer"):
        check_training(result.stdout, name, required=0.5)
    for name in ("jvp(jvp)", "grad(jvp)", "third derivative"):
        check_derivative(result.stdout, name)
    for name in ("loss_curves.png", "digits.png"):
        check_picture(folder / name)


def test_missed_bound_fails_the_run():
    from perf.demo import report
    from perf.demo.derivatives import Errors
    from perf.demo.train import Contest, Duel, Run

    def contestant(*losses):
        return Run(model=None, losses=list(losses), step_seconds=1.0)

    contest = Contest("net", make_model=None, learning_rate=1.0, epochs=1, min_accuracy=0.9)
    good = Duel(contest, contestant(1.0), contestant(1.0), contestant(1.0), contestant(1.0), 0.95, 0.95)
    bad = Duel(contest, contestant(1.0), contestant(1.0), contestant(1.0), contestant(1.0 + 1e-8), 0.95, 0.85)
    right, wrong = Errors(torch_nn=1.0, ours=1e-15), Errors(torch_nn=1.0, ours=float("nan"))
    assert report.failures([good], {"block": {"jvp(jvp)": right}}) == []
    missed = report.failures([bad], {"block": {"jvp(jvp)": wrong}})
    assert [re.split("[,:]", sentence)[0] for sentence in missed] == ["net", "net", "block"]
