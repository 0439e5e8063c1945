"""Autocast: what torch casts is cast, on the same devices, to the same dtype."""

import pytest
import torch
import torch.nn.functional as F
from torch import _C
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import primitives as pr
from perf.ops import CASES
from primitives._audit.nestings import nested, nestings
from primitives.ops.norms.layer_norm import NormOptions, layer_norm_p
from primitives.ops.softmax.log_softmax import log_softmax_p
from primitives.ops.softmax.softmax import softmax_p
from tests.properties import leaves
from tests.support import data

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Cross-entropy's records run the primitive, and its function casts; attention is cast on the CPU too.
NOT_CAST = [case for case in CASES if "cross_entropy" not in case.name and not case.forward.has_rule("AutocastCPU")]
AUTOCAST_CUDA = _C.DispatchKeySet(_C.DispatchKey.AutocastCUDA)


def under_cuda_autocast(op, *args):
    """Run the kernel registered for CUDA's autocast, which needs no CUDA itself, on CPU tensors."""
    return op.overload.redispatch(AUTOCAST_CUDA, *args)


def both(case, inputs):
    """The result of the op, and that of torch's."""
    return case.outputs(inputs, case.small)[0], case.torch_function(*inputs.values(), **dict(case.small.options))


@pytest.mark.parametrize("case", NOT_CAST, ids=lambda case: case.name)
def test_nothing_is_cast_on_the_cpu(case, device):
    for dtype in DTYPES:
        inputs = case.inputs(case.small, dtype, device)
        outside = case.outputs(inputs, case.small)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, theirs = both(case, inputs)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, outside)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_run_in_float32_under_cuda_autocast(dtype):
    x, weight = data(5, 4, dtype=dtype), data(5, 4, dtype=dtype)[0]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Each argument is cast by itself.
    for bias in (None, data(5, 4, dtype=wide)[1]):
        y, mean, rstd = under_cuda_autocast(layer_norm_p, x, weight, bias, *NormOptions(1, 1e-5))
        assert (y.dtype, mean.dtype, rstd.dtype) == (wide, wide, wide)
        assert torch.equal(y, pr.functional.layer_norm(x.to(wide), (4,), weight.to(wide), bias))
    for output_dtype in (None, torch.float16, torch.float64):
        y = under_cuda_autocast(log_softmax_p, x, 1, output_dtype)
        assert torch.equal(y, pr.functional.log_softmax(x, 1, dtype=output_dtype or wide))
        assert y.dtype == (output_dtype or wide)
        y = under_cuda_autocast(softmax_p, x, None, 1, 0.5, output_dtype)
        assert torch.equal(y, pr.functional.softmax(x, 1, dtype=output_dtype or wide, scale=0.5))


def test_gradients_come_back_in_the_dtype_of_the_input_under_cuda_autocast():
    x, weight = data(5, 4, dtype=torch.bfloat16).requires_grad_(), data(5, 4, dtype=torch.bfloat16)[0].requires_grad_()
    y, z = (
        under_cuda_autocast(layer_norm_p, x, weight, None, *NormOptions(1, 1e-5))[0],
        under_cuda_autocast(log_softmax_p, x, 1, None),
    )
    (y.square().sum() + z.square().sum()).backward()
    wide = [t.detach().float().requires_grad_() for t in (x, weight)]
    (F.layer_norm(wide[0], (4,), wide[1]).square().sum() + F.log_softmax(wide[0], 1).square().sum()).backward()
    for ours, theirs in zip((x, weight), wide, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        assert_close(ours.grad.float(), theirs.grad, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 4, (torch.bfloat16, *[torch.float32] * 3), (torch.float64,) * 4])
def test_attention_is_cast_on_the_cpu_as_torchs_is(dtypes):
    """All but float64 to autocast's dtype, the bias too; gradients come back in the dtypes of the arguments."""
    shapes = ((2, 2, 3, 4), (2, 1, 5, 4), (2, 1, 5, 4), (2, 1, 3, 5))
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    results = []
    for f in (pr.functional, F):
        inputs = [x.to(dtype).requires_grad_() for x, dtype in zip(wide, dtypes, strict=True)]
        with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            y = f.scaled_dot_product_attention(*inputs, enable_gqa=True)
        bars = torch.autograd.grad(y.sin().sum(), inputs)
        assert [x.dtype for x in bars] == list(dtypes)
        results.append((y, bars))
    assert_close(*results, rtol=2e-2, atol=2e-2)
    assert results[0][0].dtype == (torch.float64 if torch.float64 in dtypes else torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", NOT_CAST, ids=lambda case: case.name)
def test_cuda_autocast_is_that_of_torch(device, case, dtype):
    inputs = leaves(case.inputs(case.small, dtype, device), ["x"])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours, theirs = both(case, inputs)
    assert ours.dtype == theirs.dtype
    assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    bars = [torch.autograd.grad(result.float().sin().sum(), inputs["x"])[0] for result in (ours, theirs)]
    assert bars[0].dtype == bars[1].dtype
    assert_close(*bars, rtol=2e-2, atol=2e-2)


def test_attention_sums_in_its_own_dtype_inside_autocast(backend):
    q, k, v, *tangents = torch.randn(6, 2, 2, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()

    def derivatives():
        leaf = q.clone().requires_grad_()
        y, y_dot = jvp(pr.functional.scaled_dot_product_attention, (leaf, k, v), tuple(tangents))
        return y, y_dot, torch.autograd.grad((y * y_dot.float()).sum(), leaf)[0]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = derivatives()
    for found, expected in zip(inside, derivatives(), strict=True):
        assert torch.equal(found, expected)


LINEAR_ALGEBRA = {
    "det": lambda a: torch.linalg.det(a),
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "solve": lambda a: torch.linalg.solve(a, a[0]).sum(),
    "cholesky_solve": lambda a: torch.cholesky_solve(a[:2].mT, a.tril()).sum(),
    "ormqr": lambda a: torch.ormqr(a, a[0], a[:2].mT).sum(),
}


@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_formulas_of_linear_algebra_are_not_rounded(name):
    f, a = LINEAR_ALGEBRA[name], torch.eye(4) + data(5, 4, dtype=torch.float32)[:4] / 4
    with pr.repair_torch():
        # Reverse mode alone is torch's where torch has it right, until a first tangent registers the formulas.
        for nesting in ("f", "r", *nestings(2)):
            with torch.autocast("cpu", torch.bfloat16):
                found = nested(f, [a], nesting)(a)
            assert found.dtype == torch.float32
            assert_close(found, nested(f, [a.double()], nesting)(a.double()).float(), rtol=1e-5, atol=1e-5)
