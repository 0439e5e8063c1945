"""The README is short, and its example says what it prints."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short():
    assert len(README.split()) <= 600


def test_the_example_shows_the_error_of_torch_and_none_here(tmp_path, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 10
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    with torch.random.fork_rng():
        runpy.run_path(str(script))
    (printed, says) = (
        [float(number) for number in re.findall(r"\de[+-]\d+", text)]
        for text in (capsys.readouterr().out, example.rpartition("#")[2])
    )
    assert printed[0] == pytest.approx(says[0], rel=0.5)
    # The rest is the error of the difference.
    assert printed[1] < 100 * says[1] < 1e-6
