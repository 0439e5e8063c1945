"""The examples of the README run, and say what the text around them says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(example, folder):
    script = folder / "example.py"
    script.write_text(example, encoding="utf-8")
    return runpy.run_path(str(script))


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number, tmp_path):
    run(EXAMPLES[number], tmp_path)


def test_the_gradient_through_a_jvp_is_the_one_of_central_differences(tmp_path, capsys):
    names = run(EXAMPLES[0], tmp_path)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [module.split(".")[0] for module, _ in printed] == ["torch", "primitives"]
    weight, loss = names["net"][0].weight, names["loss"]
    direction, step = weight.grad / weight.grad.norm(), 1e-5
    with torch.no_grad():
        weight += step * direction
        above = loss()
        weight -= 2 * step * direction
        below = loss()
    slope = ((above - below) / (2 * step)).item()
    assert float(printed[1][1]) == pytest.approx(slope, rel=1e-8)


def test_the_example_has_twenty_lines():
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 20
