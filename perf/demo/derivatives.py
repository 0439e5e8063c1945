"""Derivatives of trained blocks, by torch.nn and by this package, against the norm written out in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn
from torch.func import grad, jvp

import primitives as pr

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Map = Callable[[Tensor], Tensor]


class _Norm(Protocol):
    """What layer norm and batch norm modules have in common."""

    weight: Tensor
    bias: Tensor
    eps: float


class FormulaNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias in elementary operations, whose derivatives are torch's own.

    Args:
        norm: The layer norm, or batch norm in training, that this stands in for; its parameters are shared.
        axes: Axes that the mean and the variance run over.
        param_axis: First axis of the input that `weight` and `bias` lie on.
    """

    def __init__(self, norm: _Norm, axes: tuple[int, ...], param_axis: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.axes, self.param_axis = axes, param_axis

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`."""
        centered = x - x.mean(self.axes, keepdim=True)
        variance = (centered * centered).mean(self.axes, keepdim=True)
        trailing = [1] * (x.dim() - self.param_axis - self.weight.dim())
        weight, bias = (param.view(*param.shape, *trailing) for param in (self.weight, self.bias))
        return centered / torch.sqrt(variance + self.eps) * weight + bias


def _formula(norm: nn.Module) -> FormulaNorm:
    if isinstance(norm, nn.LayerNorm):
        return FormulaNorm(cast("_Norm", norm), (-1,), 2)
    return FormulaNorm(cast("_Norm", norm), (0, 2, 3), 1)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | nn.BatchNorm2d)


def variants(block: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Float64 copies of `block` in training mode: its norms by torch.nn, by this package, and written out."""
    base = copy.deepcopy(block).double().train().requires_grad_(False)
    for module in base.modules():
        if isinstance(module, nn.BatchNorm2d):
            # A derivative is of the output alone: without this, each evaluation would move the statistics on.
            module.running_mean = module.running_var = module.num_batches_tracked = None
            module.track_running_stats = False
    plain, converted, formula = base, copy.deepcopy(base), copy.deepcopy(base)
    pr.nn.revert(plain)
    pr.nn.convert(converted)
    for parent in list(formula.modules()):
        for name, child in list(parent.named_children()):
            if _is_norm(child):
                setattr(parent, name, _formula(child))
    return plain, converted, formula


def _second_jvp(block: Map, x: Tensor, v: Tensor) -> Tensor:
    """jvp(jvp): the second derivative of the block's output along `v`."""
    return jvp(lambda x: jvp(block, (x,), (v,))[1], (x,), (v,))[1]


def _grad_of_jvp(block: Map, x: Tensor, v: Tensor) -> Tensor:
    """grad(jvp): the gradient of a loss with a JVP in it, as consistency and MeanFlow losses have."""
    return grad(lambda x: jvp(block, (x,), (v,))[1].square().mean())(x)


def _third_derivative(block: Map, x: Tensor, v: Tensor) -> Tensor:
    """The third derivative of a loss along `v`, by reverse mode three times."""
    return grad(grad(grad(lambda t: block(x + t * v).square().mean())))(x.new_zeros(()))


CASES: dict[str, Callable[[Map, Tensor, Tensor], Tensor]] = {
    "jvp(jvp)": _second_jvp,
    "grad(jvp)": _grad_of_jvp,
    "third derivative": _third_derivative,
}


@dataclass(frozen=True)
class Errors:
    """Relative errors of one derivative of one block."""

    torch_nn: float
    ours: float


def compare(block: nn.Module, x: Tensor, seed: int) -> dict[str, Errors]:
    """Errors of each of `CASES` for a trained `block`.

    Args:
        block: A block whose norms are `torch.nn`'s or this package's, in training or evaluation mode.
        x: Its input; taken in float64.
        seed: Of the direction of the derivatives.
    """
    x = x.detach().double()
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype).to(x.device)
    plain, converted, formula = variants(block)
    return {
        name: Errors(_error(derivative, plain, formula, x, v), _error(derivative, converted, formula, x, v))
        for name, derivative in CASES.items()
    }


def _error(
    derivative: Callable[[Map, Tensor, Tensor], Tensor], block: nn.Module, formula: nn.Module, x: Tensor, v: Tensor
) -> float:
    expected = derivative(formula, x, v)
    return ((derivative(block, x, v) - expected).norm() / expected.norm()).item()
