"""Shared by the tests of compiled functions."""

import functools

import torch
from torch import nn

import primitives as pr
from tests.nested_losses import gradients as gradients
from tests.support import data as data

# Programs run node by node: the same graphs as for Inductor, in milliseconds.
plainly = functools.partial(pr.compile, backend="eager")


def same(found, truth, tol=1e-10):
    found, truth = ([y] if isinstance(y, torch.Tensor) else list(y) for y in (found, truth))
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def mlp(norm=nn.LayerNorm, width=5):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, width), norm(width), nn.Tanh(), nn.Linear(width, 1)).double()
    return pr.nn.convert(net)
