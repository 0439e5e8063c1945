"""Beside the records: the forms of RMS norm that models write, and adaptive layer norm."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import primitives as pr

HALF = (torch.float16, torch.bfloat16)
EPS = 1e-3


def randn(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_eps_none_is_that_of_torch(dtype):
    x = torch.full((2, 4), 1e-4, dtype=dtype)
    for ours, theirs in ((pr.functional.rms_norm, F.rms_norm),):
        assert_close(ours(x, (4,)), theirs(x, (4,)))
        tree = ours({"a": x, "b": [x.double()]}, (4,))
        assert_close([tree["a"], tree["b"][0]], [theirs(x, (4,)), theirs(x.double(), (4,))])


def test_adding_one_and_the_weight_have_derivatives_of_two_orders():
    x, weight = randn(3, 4).requires_grad_(), randn(4, seed=1).requires_grad_()
    f = functools.partial(pr.functional.rms_norm, eps=EPS, add_one=True, cast_first=True)
    gradcheck(lambda x, w: f(x, (4,), w), (x, weight), check_forward_ad=True, fast_mode=True)
    gradgradcheck(lambda x, w: f(x, (4,), w), (x, weight), check_fwd_over_rev=True, fast_mode=True)
    assert_close(f(x, (4,), weight), F.rms_norm(x, (4,), 1 + weight, EPS))


def composed(x, scale, shift, normalized_shape=None, eps=1e-5):
    shape = x.shape[-1:] if normalized_shape is None else normalized_shape
    lead = scale.shape[: scale.dim() - len(shape)]
    rest = x.dim() - len(shape) - len(lead)
    scale, shift = (t.reshape(*lead, *[1] * rest, *shape) for t in (scale, shift))
    return F.layer_norm(x, tuple(shape), eps=eps) * (1 + scale) + shift


ADAPTIVE = {
    "of samples": ((2, 5, 6), (2, 6), None),
    "with an axis for tokens": ((2, 5, 6), (2, 1, 6), None),
    "of batch and frame": ((2, 3, 4, 6), (2, 3, 6), None),
    "of tokens": ((2, 3, 6), (2, 3, 6), None),
    "shared": ((4, 6), (6,), None),
    "one sample": ((1, 3, 6), (1, 6), None),
    "two axes": ((2, 3, 4, 5), (2, 4, 5), (4, 5)),
    "no tokens": ((2, 0, 6), (2, 6), None),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape, param_shape, normalized", ADAPTIVE.values(), ids=ADAPTIVE)
def test_ada_layer_norm_is_the_composition(shape, param_shape, normalized):
    values = randn(*shape), randn(*param_shape, seed=1), randn(*param_shape, seed=2)
    dots = randn(*shape, seed=3), randn(*param_shape, seed=4), randn(*param_shape, seed=5)
    results = []
    for f in (pr.functional.ada_layer_norm, composed):

        def y(*values, f=f):
            return f(*values, normalized, EPS)

        def loss(*values, y=y):
            return y(*values).sin().sum()

        gradient = torch.func.grad(loss, (0, 1, 2))
        # Torch takes statistics for constants in second derivatives, but not in jvp of grad of what is composed here.
        results.append((y(*values), gradient(*values), torch.func.jvp(y, values, dots)[1]))
    assert_close(*results)


@pytest.mark.usefixtures("backend")
def test_ada_layer_norm_at_higher_orders_and_in_batches():
    values = tuple(v.requires_grad_() for v in (randn(2, 3, 4), randn(2, 4, seed=1), randn(2, 4, seed=2)))
    f = functools.partial(pr.functional.ada_layer_norm, eps=EPS)
    options = {"check_batched_grad": True, "fast_mode": True}
    gradgradcheck(f, values, check_fwd_over_rev=True, check_rev_over_rev=True, **options)
    values = tuple(v.detach() for v in values)
    batch = randn(3, 2, 4, seed=6)
    want = torch.stack([f(values[0], scale, values[2]) for scale in batch])
    assert_close(torch.vmap(f, (None, 0, None))(values[0], batch, values[2]), want)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_ada_layer_norm_of_half_precision_rounds_once(dtype):
    x, scale, shift = randn(2, 3, 8, dtype=dtype), randn(2, 8, dtype=dtype, seed=1), randn(2, 8, dtype=dtype, seed=2)
    exact = composed(x.double(), scale.double(), shift.double())
    for params in ((scale, shift), (scale.float(), shift.float())):
        y = pr.functional.ada_layer_norm(x, *params)
        assert y.dtype == dtype
        assert (y == exact.to(dtype)).float().mean() > 0.95
        bars = torch.func.grad(lambda *p: pr.functional.ada_layer_norm(x, *p).float().sum(), (0, 1))(*params)
        assert [bar.dtype for bar in bars] == [param.dtype for param in params]


X = torch.ones(3, 4)
WRONG = {
    "a number": ((torch.ones(()), X, X), pr.ShapeError, "normalized_shape must name at least one axis"),
    "scale of others": ((X, torch.ones(2, 4), X), pr.ShapeError, r"scale must have .*\[3, 4\].*got \[2, 4\]"),
    "scale width": ((X, torch.ones(3, 1), X), pr.ShapeError, r"scale must have .*got \[3, 1\]"),
    "scale axes": ((X, torch.ones(1, 3, 4), X), pr.ShapeError, r"scale must have .*got \[1, 3, 4\]"),
    "scale None": ((X, None, X), pr.DtypeError, "scale must be a tensor, got None"),
    "shift shape": ((X, X, torch.ones(4)), pr.ShapeError, r"shift must have shape \[3, 4\].*got \[4\]"),
    "shift dtype": ((X, X, X.half()), pr.DtypeError, "shift must have dtype torch.float32"),
    "eps": ((X, X, X, None, "1"), pr.DtypeError, "eps must be a number"),
}


@pytest.mark.parametrize("args, error, text", WRONG.values(), ids=WRONG)
def test_errors_of_ada_layer_norm(args, error, text):
    with pytest.raises(error, match=f"^ada_layer_norm: {text}"):
        pr.functional.ada_layer_norm(*args)
