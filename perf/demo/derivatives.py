"""Derivatives of trained blocks, by torch.nn and by this package, against the norm written out in float64."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.func import grad, jvp

import primitives as pr

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Map = Callable[[Tensor], Tensor]


class FormulaNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias in elementary operations, which stands in for a norm in training."""

    def __init__(self, norm: nn.LayerNorm | nn.BatchNorm2d) -> None:
        super().__init__()
        self.axes, shape = ((-1,), (-1,)) if isinstance(norm, nn.LayerNorm) else ((0, 2, 3), (-1, 1, 1))
        self.weight, self.bias, self.eps = norm.weight.view(shape), norm.bias.view(shape), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`."""
        centered = x - x.mean(self.axes, keepdim=True)
        variance = (centered * centered).mean(self.axes, keepdim=True)
        return centered / torch.sqrt(variance + self.eps) * self.weight + self.bias


def variants(block: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Float64 copies of `block` in training mode: its norms by torch.nn, by this package, and written out."""
    plain = copy.deepcopy(block).double().train().requires_grad_(False)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            # A derivative is of the output alone: without this, each evaluation would move the statistics on.
            module.running_mean = module.running_var = module.num_batches_tracked = None
            module.track_running_stats = False
    converted, formula = copy.deepcopy(plain), copy.deepcopy(plain)
    pr.nn.revert(plain)
    pr.nn.convert(converted)
    for name, module in list(formula.named_modules()):
        if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            formula.set_submodule(name, FormulaNorm(module))
    return plain, converted, formula


CASES: dict[str, Callable[[Map, Tensor, Tensor], Tensor]] = {
    # The second derivative of the block's output along `v`.
    "jvp(jvp)": lambda block, x, v: jvp(lambda x: jvp(block, (x,), (v,))[1], (x,), (v,))[1],
    # The gradient of a loss with a JVP in it, as consistency and MeanFlow losses have.
    "grad(jvp)": lambda block, x, v: grad(lambda x: jvp(block, (x,), (v,))[1].square().mean())(x),
    # The third derivative of a loss along `v`, by reverse mode three times.
    "third derivative": lambda block, x, v: grad(grad(grad(lambda t: block(x + t * v).square().mean())))(
        x.new_zeros(())
    ),
}


class Errors(NamedTuple):
    """Relative errors of one derivative of one block."""

    torch_nn: float
    ours: float


def compare(block: nn.Module, x: Tensor, seed: int) -> dict[str, Errors]:
    """Errors of each of `CASES` for a trained `block` and its input `x`, in float64; `seed` draws the direction."""
    x = x.detach().double()
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype).to(x.device)
    *sides, formula = variants(block)
    found = {}
    for name, derivative in CASES.items():
        expected = derivative(formula, x, v)
        found[name] = Errors(*(((derivative(side, x, v) - expected).norm() / expected.norm()).item() for side in sides))
    return found
