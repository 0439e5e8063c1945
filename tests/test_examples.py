"""Every example in docs runs, draws, and shows what it claims: figures that its `main` returns are held to bounds."""

import functools
import math
import re
import runpy
from pathlib import Path

import pytest
import torch

import primitives as pr

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "examples"

RIGHT, WRONG, SAME = (0, 1e-5), (1e-2, math.inf), (0, 1e-10)

# Figures by their names, of a file and what it is asked for. A torch that is mended fails these: words are then wrong.
CLAIMS = {
    "critic": {"(repaired|compiled), .*|torch, by reverse mode": RIGHT, "torch, by forward mode": WRONG, "gap.*": SAME},
    "ensemble": {"repaired, .*|torch, loop": RIGHT, "torch, curvature": WRONG},
    "fine_tune": {"repaired, .*|torch, eager, forward.*": (0, 1e-6), "torch, eager, reverse.*": WRONG},
    "hessian_spectrum": {
        "(repaired|compiled), .*": RIGHT,
        "gap.*": SAME,
        "torch, forward over reverse.*": RIGHT,
        "torch, reverse over forward.*|torch, torch.func.hessian": WRONG,
    },
    "per_sample_gradients": {"together, .*|noise, primitives": RIGHT, "alone, .*|noise, torch.nn": WRONG, "gap": SAME},
    "pinn": {"repaired|compiled": RIGHT, "torch": WRONG, "gap": SAME},
    "pinn soliton": {"(repaired|compiled), .*": RIGHT, "torch, .*": WRONG, "gap.*": SAME},
}

# Half a minute together, of what the others have too, and one that needs transformers.
LONG = ("critic", "fine_tune", "hessian_spectrum", "pinn soliton")
# By night, below.
OTHERS = ("meanflow", "swiglu")


@pytest.fixture(autouse=True)
def own_random_numbers():
    with torch.random.fork_rng():
        yield


# The same programs as Inductor's, run node by node, in seconds; by night as users run them.
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in LONG)) for name in CLAIMS])
def test_the_example_shows_what_it_claims(name, compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(pr, "compile", functools.partial(pr.compile, backend=compiler))
    stem, *words = name.split()
    picture, example = tmp_path / "picture.png", FOLDER / f"{stem}.py"
    for library in re.findall("^from (matplotlib|scipy|sklearn|transformers)", example.read_text(), flags=re.MULTILINE):
        pytest.importorskip(library, reason="the demo's extra or that of the models brings it")
    figures = runpy.run_path(str(example))["main"]([*words, "--quick", "--output", str(picture)])
    assert len(figures) >= 2
    for figure, value in figures.items():
        ((low, high),) = [bounds for claim, bounds in CLAIMS[name].items() if re.fullmatch(claim, figure)]
        assert low <= value <= high, f"{figure}: {value}"
    assert picture.stat().st_size > 10_000


def test_every_example_is_run_and_pictures_are_small():
    assert {name.split()[0] for name in CLAIMS} | {*OTHERS} == {path.stem for path in FOLDER.glob("*.py")}
    assert all(path.stat().st_size < 80_000 for path in FOLDER.glob("*.png"))


@pytest.fixture
def float64():
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(dtype)


# By day others train.
@pytest.mark.nightly
def test_meanflow_learns_the_same_with_torch_and_here(float64, tmp_path, capsys):
    pytest.importorskip("sklearn", reason="its digits are scikit-learn's")
    picture = tmp_path / "picture.png"
    runpy.run_path(str(FOLDER / "meanflow.py"))["main"](["--quick", "--output", str(picture)])
    output = capsys.readouterr().out
    (gap,) = re.findall(r"errors differ by at most (\S+)", output)
    assert float(gap) < 1e-12
    torch_peak, our_peak = (float(peak) for peak in re.findall(r"64 tokens (\S+)$", output, flags=re.MULTILINE))
    assert 0 < our_peak < torch_peak
    assert picture.stat().st_size > 10_000


# By day kernel tests check its rules, and tests/test_custom_transforms.py compiles operators with trees.
@pytest.mark.nightly
def test_swiglu_checks_its_rules_and_trains(capsys):
    pytest.importorskip("triton")
    runpy.run_path(str(FOLDER / "swiglu.py"))["main"]()
    printed = capsys.readouterr().out
    assert "compile against eager     ok" in printed
    losses = [float(value) for value in re.findall(r"loss (\S+)", printed)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
