"""The README is short, its example says what it prints, and the programs that drew the pictures run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def float64():
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng():
        yield
    torch.set_default_dtype(dtype)


def test_the_readme_is_short():
    assert len(README.split()) <= 600


def test_the_example_shows_the_error_of_torch_and_none_here(tmp_path, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    with torch.random.fork_rng():
        runpy.run_path(str(script))
    torchs, ours = (float(line.split()[1]) for line in capsys.readouterr().out.splitlines())
    says = [float(number) for number in re.findall(r"print.*# (\S+e-\d+)", example)]
    assert torchs == pytest.approx(says[0], rel=0.5)
    # What is left is the error of the difference.
    assert ours < 100 * says[1] < 1e-6


def test_the_oscillator_is_learned_right_here_alone(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="it draws")
    picture = tmp_path / "picture.png"
    with torch.random.fork_rng():
        program = runpy.run_path(str(ROOT / "docs" / "examples" / "oscillator.py"))
        program["main"](["--quick", "--output", str(picture)])
    torchs, ours = (float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines())
    assert torchs > 0.1
    assert ours < 1e-4
    assert picture.stat().st_size > 10_000


# By day the demo trains, and the example above differentiates through a jvp.
@pytest.mark.nightly
def test_meanflow_learns_the_same_with_torch_and_here(float64, tmp_path, capsys):
    pytest.importorskip("sklearn", reason="its digits are scikit-learn's")
    picture = tmp_path / "picture.png"
    runpy.run_path(str(ROOT / "docs" / "examples" / "meanflow.py"))["main"](["--quick", "--output", str(picture)])
    output = capsys.readouterr().out
    (gap,) = re.findall(r"errors differ by at most (\S+)", output)
    assert float(gap) < 1e-12
    torch_peak, our_peak = (float(peak) for peak in re.findall(r"64 tokens (\S+)$", output, flags=re.MULTILINE))
    assert 0 < our_peak < torch_peak
    assert picture.stat().st_size > 10_000
