"""The example of documentation that needs transformers."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "fine_tune.py"


def test_products_of_the_hessian_are_right_here_in_both_orders(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="it draws")
    picture = tmp_path / "picture.png"
    with torch.random.fork_rng():
        figures = runpy.run_path(str(EXAMPLE))["main"](["--quick", "--output", str(picture)])
    wrong = figures.pop("torch, eager, reverse over forward")
    assert wrong > 1e-2
    assert len(figures) == 3
    assert max(figures.values()) < 1e-6
    assert capsys.readouterr().out.count("raises NotImplementedError") == 2
    assert picture.stat().st_size > 10_000
    assert EXAMPLE.with_suffix(".png").stat().st_size < 80_000
