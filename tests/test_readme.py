"""The examples of the README, and the program that drew its picture, run and say what the text around them says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def float64():
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng():
        yield
    torch.set_default_dtype(dtype)


def run(example, folder):
    script = folder / "example.py"
    script.write_text(example, encoding="utf-8")
    return runpy.run_path(str(script))


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number, tmp_path):
    run(EXAMPLES[number], tmp_path)


def test_the_gradient_through_a_jvp_is_the_one_of_central_differences(float64, tmp_path, capsys):
    names = run(EXAMPLES[0].replace(".detach()", ""), tmp_path)
    (printed,) = re.findall("print.*# (.*)", EXAMPLES[0])
    assert capsys.readouterr().out.startswith(printed)
    parameters, loss, step = list(names["net"].parameters()), names["loss"], 1e-4
    # Each parameter moves along its own gradient, so that all of them count alike.
    directions = [p.grad / p.grad.norm() for p in parameters]

    @torch.no_grad()
    def moved(distance):
        for p, direction in zip(parameters, directions, strict=True):
            p += distance * direction
        return loss().item()

    above, below = moved(step), moved(-2 * step)
    slope = sum(p.grad.norm().item() for p in parameters)
    assert (above - below) / (2 * step) == pytest.approx(slope, rel=1e-7)


def test_the_example_has_twenty_lines():
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 20


# By day the demo trains, and examples above differentiate through a jvp.
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
