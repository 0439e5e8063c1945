"""Cases that a review found wrong: each is small, and none of the generic records would show it."""

from __future__ import annotations

import re

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import primitives as pr
from primitives.core import registered_primitives

functional = pr.functional
RUNNING = torch.zeros(8), torch.ones(8)
BIAS_ONLY = {
    "layer_norm": lambda x, bias: functional.layer_norm(x, (8,), None, bias),
    "batch_norm": lambda x, bias: functional.batch_norm(x, None, None, None, bias, training=True),
    "batch_norm_eval": lambda x, bias: functional.batch_norm(x, *RUNNING, None, bias),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BIAS_ONLY)
def test_the_sum_for_a_wide_bias_is_not_rounded_to_a_narrow_input(name, dtype):
    torch.manual_seed(0)
    x, bias = torch.randn(2048, 8).to(dtype), torch.zeros(8, requires_grad=True)
    (bias_bar,) = torch.autograd.grad(BIAS_ONLY[name](x, bias), bias, torch.full_like(x, 64.0))
    # Beyond the largest float16, and more digits than bfloat16 has.
    assert bias_bar.tolist() == [64.0 * 2048] * 8
    narrow = bias.detach().to(dtype)
    assert grad(lambda b: BIAS_ONLY[name](x, b).float().sum())(narrow).dtype == dtype


@pytest.mark.parametrize("perturbed", ["mean", "var", "both"])
def test_running_statistics_alone_do_not_move_the_output_in_training(perturbed):
    x, mean, var = torch.randn(3, 4), torch.zeros(4), torch.ones(4)

    def output(shift):
        shifts = {"mean": (shift, 0), "var": (0, shift), "both": (shift, shift)}[perturbed]
        return functional.pure_batch_norm(x, mean + shifts[0], var + shifts[1], training=True).output

    y_dot = jvp(output, (torch.zeros(4),), (torch.ones(4),))[1]
    assert y_dot.shape == x.shape
    assert not y_dot.any()


def test_vmap_over_parameters_alone_writes_the_common_running_statistics():
    x, weights = torch.randn(5, 3), torch.randn(6, 3)
    running, expected = [(torch.zeros(3), torch.ones(3)) for _ in range(2)]
    y = vmap(lambda w: functional.batch_norm(x, *running, w, None, training=True))(weights)
    rows = [torch.nn.functional.batch_norm(x, None, None, w, None, training=True) for w in weights]
    torch.testing.assert_close(y, torch.stack(rows))
    torch.nn.functional.batch_norm(x, *expected, training=True)
    torch.testing.assert_close(running, expected)


def test_the_backend_does_not_change_inside_a_compiled_function():
    def inside(x):
        with pr.use_backend("reference"):
            return functional.log_softmax(x, 0)

    with pytest.raises(Exception, match=re.escape("the backend cannot change inside a compiled function")):
        torch.compile(inside, backend="eager", fullgraph=True)(torch.zeros(3))


def test_eps_must_be_positive_in_training_as_in_torch():
    x = torch.randn(3, 2)
    for eps in (0.0, -1.0):
        with pytest.raises(ValueError, match=re.escape(f"batch_norm: eps must be positive in training, got {eps}.")):
            functional.batch_norm(x, None, None, training=True, eps=eps)
    assert functional.batch_norm(x, torch.zeros(2), torch.ones(2), eps=0.0).shape == x.shape


def test_devices_without_kernels_have_the_reference():
    for primitive in registered_primitives().values():
        for key in ("MPS", "XPU", "PrivateUse1"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(primitive.qualified_name, key), (primitive, key)


@pytest.mark.parametrize("weight", [[1.0, 1.0], 1.0, "one"], ids=str)
def test_a_weight_that_is_no_tensor_raises_what_torch_raises(weight):
    x = torch.randn(3, 2)
    with pytest.raises(TypeError, match="layer_norm: weight must be a tensor"):
        functional.layer_norm(x, (2,), weight)


def _plain(x, axis):
    centered = x - x.mean(axis, keepdim=True)
    return centered / (centered.square().mean(axis, keepdim=True) + 1e-5).sqrt()


SEVERAL_ROWS = {
    "layer_norm": (lambda x: functional.layer_norm(x, (3,)), lambda x: _plain(x, 1)),
    "batch_norm": (lambda x: functional.batch_norm(x.T, None, None, training=True).T, lambda x: _plain(x, 1)),
    "log_softmax": (lambda x: functional.log_softmax(x, 1), lambda x: x - x.exp().sum(1, keepdim=True).log()),
}


@pytest.mark.parametrize("order", ["ffff", "rrrr", "frfr", "rfrf"])
@pytest.mark.parametrize("name", SEVERAL_ROWS)
def test_fourth_order_with_several_rows(name, order):
    torch.manual_seed(0)
    x, weights = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    functions = [lambda x, f=f: (f(x) ** 3 * weights).sum() for f in SEVERAL_ROWS[name]]
    for transform in order:
        functions = [{"f": jacfwd, "r": jacrev}[transform](f) for f in functions]
    torch.testing.assert_close(functions[0](x), functions[1](x))


# More columns and values per channel than one program holds. The records are small for the interpreter's sake; on a
# device these run the looped kernels, the splits and their merges.
LARGE = {
    "rows": (4, 20_001),
    "long_rows": (3, 100_003),
    "many_rows": (4_099, 1_024),
    "images": (16, 24, 57, 57),
    "few_channels": (64, 3, 33, 33),
}


@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("op", ["layer_norm", "batch_norm", "log_softmax"])
def test_large_tensors(op, shape, device):
    torch.manual_seed(0)
    x, v, y_bar = (torch.randn(shape, device=device) for _ in range(3))
    size = x.shape[1] if op == "batch_norm" else x.shape[-1]
    weight = torch.rand(size, device=device) + 0.5
    batch_axes = [0, *range(2, x.dim())]

    def ours(x, weight):
        if op == "layer_norm":
            return functional.layer_norm(x, (size,), weight)
        if op == "batch_norm":
            return functional.batch_norm(x, None, None, weight, training=True)
        return functional.log_softmax(x, -1) * weight

    def truth(x, weight):
        if op == "log_softmax":
            return (x - x.logsumexp(-1, keepdim=True)) * weight
        axes = -1 if op == "layer_norm" else batch_axes
        shaped = weight if op == "layer_norm" else weight.reshape(1, -1, *[1] * (x.dim() - 2))
        centered = x - x.mean(axes, keepdim=True)
        return centered / (centered.square().mean(axes, keepdim=True) + 1e-5).sqrt() * shaped

    def derivatives(function, x, weight, v, y_bar):
        y, y_dot = jvp(lambda x: function(x, weight), (x,), (v,))
        bars = grad(lambda x, w: (function(x, w) * y_bar).sum(), argnums=(0, 1))(x, weight)
        return y, y_dot, *bars

    expected = derivatives(truth, *(t.double() for t in (x, weight, v, y_bar)))
    for got, value in zip(derivatives(ours, x, weight, v, y_bar), expected, strict=True):
        scale = value.abs().max()
        # Sums of up to 1e5 float32 products, each of 1e-7 relative error, mostly of either sign.
        assert ((got.double() - value).abs().max() / scale).item() < 2e-5
