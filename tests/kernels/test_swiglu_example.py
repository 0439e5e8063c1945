"""The example of the documentation, on its Triton kernel."""

import runpy
from pathlib import Path

import pytest
import torch

from primitives.testing import check_rules

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "swiglu.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


# More elements than a block, one, none, and a dtype that the kernel computes in itself.
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("sizes", [(4, 3, 5), (9, 2, 130), (1, 1, 1), (0, 3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_kernel_against_reference(example, sizes, dtype, device):
    weights, x, y_bar = example["example"](*sizes, device, torch.float64)
    gated = example["gated"]
    a, b = (x @ weights.gate).to(dtype), (x @ weights.up).to(dtype)
    y_bar = y_bar.to(dtype)
    for mode, others in (("value", ()), ("backward", (y_bar,)), ("jvp", (b, y_bar.mT.contiguous().mT))):
        actual = gated(a, b, others, mode=mode)
        expected = gated.__wrapped__(a.double(), b.double(), tuple(x.double() for x in others), mode=mode)
        for got, want in zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, expected)), strict=True):
            assert got.dtype == dtype
            assert got.is_contiguous()
            torch.testing.assert_close(got, want.to(dtype))


@pytest.mark.usefixtures("backend")
def test_check_rules(example, device):
    weights, x, _ = example["example"](device=device)
    report = check_rules(example["swiglu"], (weights, x), compile=False)
    assert report["reference against kernel"].status == "ok"
