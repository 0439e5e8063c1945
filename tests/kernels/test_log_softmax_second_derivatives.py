"""Second derivatives of log-softmax through the primitives and the Triton kernels, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

import primitives as pr
import primitives.ops.log_softmax_second_order
from triton_kernels import log_softmax_second_order


def random(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_log_softmax(x, dim):
    return x - torch.logsumexp(x, dim, keepdim=True)


def derivatives(log_softmax, dim, x, weight, v):
    """Second derivatives of a loss, by route; those of autograd also with respect to the weight in the loss."""

    def loss(x, weight):
        y = log_softmax(x, dim)
        return (y.sin() * weight).sum() + (y.exp() * y).sum()

    def directional(x):
        return torch.func.jvp(lambda x: loss(x, weight), (x,), (v,))[1]

    grad = torch.func.grad(loss)
    yield "jvp(grad)", torch.func.jvp(lambda x: grad(x, weight), (x,), (v,))[1]
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (x_bar,) = torch.autograd.grad(loss(*leaves), leaves[0], create_graph=True)
    yield "double backward", *torch.autograd.grad((x_bar * v).sum(), leaves)
    yield "backward(jvp)", *torch.autograd.grad(directional(leaves[0]), leaves[0])
    yield "grad(grad)", torch.func.grad(lambda x: (grad(x, weight) * v).sum())(x)
    yield "grad(jvp)", torch.func.grad(directional)(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape, dim", [((3, 7), 1), ((5, 3), 0), ((2, 6, 3), 1)], ids=str)
def test_second_derivatives_through_the_primitives(shape, dim, dtype, monkeypatch):
    launched = []
    for name in ("log_softmax_pairing", "log_softmax_bwd_jvp"):
        launcher = getattr(log_softmax_second_order, name)

        def recorded(*args, name=name, launcher=launcher):
            launched.append((name, list(args[-1])) if name == "log_softmax_pairing" else name)
            return launcher(*args)

        monkeypatch.setattr(log_softmax_second_order, name, recorded)
    x, weight, v = (random(shape, dtype, seed) for seed in range(3))
    exact = derivatives(plain_log_softmax, dim, x.double(), weight.double(), v.double())
    expected_launches = {
        "jvp(grad)": ["log_softmax_bwd_jvp"],
        "double backward": [("log_softmax_pairing", [True, True, False])],
    }
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    with pr.use_backend("triton"):
        actual = derivatives(lambda x, dim: pr.functional.log_softmax(x, dim=dim), dim, x, weight, v)
        for (what, *expected), (_, *results) in zip(exact, actual, strict=True):
            for result, number in zip(results, expected, strict=True):
                assert result.dtype == dtype
                error = (result.double() - number).abs().max()
                assert error <= tolerance * max(1, number.abs().max()), what
            assert launched == expected_launches.get(what, launched)
            launched.clear()


def test_gradgradcheck_and_vmap():
    x = random((2, 4), torch.float64).requires_grad_()
    with pr.use_backend("triton"):
        assert torch.autograd.gradgradcheck(lambda x: pr.functional.log_softmax(x, dim=0), (x[:, :2],))
        hessians = torch.vmap(torch.func.hessian(lambda x: (pr.functional.log_softmax(x, dim=0)[1:] ** 2).sum()))(x)
    exact = torch.vmap(torch.func.hessian(lambda x: (plain_log_softmax(x, 0)[1:] ** 2).sum()))(x)
    torch.testing.assert_close(hessians, exact)
