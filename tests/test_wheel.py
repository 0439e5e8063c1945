"""The wheel, in an environment of its own."""

import pathlib
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CALL = """
import torch, triton_kernels, primitives as pr
from primitives.kernels.softmax import log_softmax
assert triton_kernels.OF_ANOTHER and "site-packages" in log_softmax.__file__
assert pr.functional.softmax(torch.zeros(2), 0).tolist() == [0.5, 0.5]
"""


@pytest.mark.nightly
def test_it_stands_beside_another_projects_triton_kernels(tmp_path):
    """It is built by pip, from what git has; torch and Triton are those of the tests."""
    source, place = tmp_path / "source", tmp_path / "venv"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = place / "bin" / "python"
    (packages,) = (place / "lib").glob("python*/site-packages")
    (packages / "triton_kernels").mkdir()
    (packages / "triton_kernels" / "__init__.py").write_text("OF_ANOTHER = True", encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", source], check=True)
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    subprocess.run([python, "-I", "-c", CALL], cwd=tmp_path, check=True)
