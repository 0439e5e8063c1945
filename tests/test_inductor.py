"""Derivatives of derivatives of converted modules, compiled by Inductor on the CPU: what eager code computes.

Other tests of compiled code stop at ahead-of-time autograd. Inductor plans memory and writes kernels, which is where a
tensor without memory, or a wrong stride, ends a process or a number.
"""

import pytest
import torch
from torch.func import jvp
from torch.nn import BatchNorm2d, Conv2d, Dropout, LayerNorm, Linear, Sequential

import primitives as pr


def jvp_in_a_loss(net, x, v):
    y, y_dot = jvp(net, (x,), (v,))
    return (y - y_dot).square().mean()


CASES = {
    # The zero tangent of the last weight has no memory in torch, and the process died.
    "layer norm": (LayerNorm(8, elementwise_affine=False), (4, 6, 8)),
    "batch norm of channels_last": (BatchNorm2d(4), (2, 4, 3, 3)),
    "dropout": (Dropout(0.5), (4, 6, 8)),
}


@pytest.mark.parametrize("module, shape", CASES.values(), ids=CASES)
def test_a_differentiated_derivative_is_that_of_eager(module, shape):
    torch.manual_seed(0)
    x, v = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    ends = [Linear(8, 8), Linear(8, 8)]
    if len(shape) == 4:
        ends = [Conv2d(4, 4, 1), Conv2d(4, 4, 1)]
        x, v = (t.to(memory_format=torch.channels_last) for t in (x, v))
    net = pr.nn.convert(Sequential(ends[0], module, ends[1]).double())
    parameters = list(net.parameters())

    # With its own random numbers Inductor would draw another mask.
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(1)
        compiled = torch.compile(jvp_in_a_loss, fullgraph=True)(net, x, v)
    torch.manual_seed(1)
    expected = jvp_in_a_loss(net, x, v)
    torch.testing.assert_close(compiled, expected)
    gradients = [torch.autograd.grad(value, parameters, materialize_grads=True) for value in (compiled, expected)]
    torch.testing.assert_close(*gradients)
