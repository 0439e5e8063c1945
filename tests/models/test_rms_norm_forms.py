"""The forms of RMS norm that transformers write, by the options of `rms_norm`."""

import functools

import pytest
import torch
from torch.testing import assert_close

import primitives as pr
from tests.test_norms import EPS, HALF, randn

WHY = "transformers is not installed: run make test-models"
gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma", reason=WHY)
llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason=WHY)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("backend")
def test_forms_of_rms_norm_are_those_of_models(dtype):
    """Value, gradients, and both by one call in forward mode."""
    x, weight = randn(5, 24, dtype=dtype), randn(24, dtype=dtype, seed=1)
    forms = {llama.LlamaRMSNorm: {"cast_first": True}, gemma.GemmaRMSNorm: {"add_one": True}}
    for cls, options in forms.items():
        theirs = cls(24, eps=EPS).to(dtype)
        theirs.weight.data.copy_(weight)
        f = functools.partial(pr.functional.rms_norm, eps=EPS, **options)
        y, want = f(x, (24,), weight), theirs(x)
        assert y.dtype == dtype
        # Models of float64 compute in float32.
        precision = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float64 else {}
        assert_close(y, want, **precision)
        if dtype in HALF:
            # The same roundings, but where sums of another order tip one of them; without the option others.
            assert (y == want).float().mean() > 0.98
            one_more = weight + (cls is gemma.GemmaRMSNorm)
            assert (y == pr.functional.rms_norm(x, (24,), one_more, EPS)).float().mean() < 0.98
        ours, dots = [x.clone().requires_grad_(), weight.clone().requires_grad_()], (randn(5, 24, dtype=dtype, seed=2),)
        x_theirs = x.clone().requires_grad_()
        bars = torch.autograd.grad(f(ours[0], (24,), ours[1]).double().sin().sum(), ours)
        true = torch.autograd.grad(theirs(x_theirs).double().sin().sum(), [x_theirs, theirs.weight])
        precision = {"rtol": 4e-2, "atol": 4e-2} if dtype in HALF else {"rtol": 1e-4, "atol": 1e-5}
        assert_close(bars, true, **precision)
        tangents = torch.func.jvp(lambda x, f=f: f(x, (24,), weight), (x,), dots)
        assert_close(tangents, torch.func.jvp(theirs, (x,), dots), **precision)
        assert torch.equal(tangents[0], y)
