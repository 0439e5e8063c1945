"""Second-order derivatives of layer norm in float64, from torch's autograd alone, and comparisons with them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from tests.kernels.layer_norm_truth import EPS, Truth, assert_matches, random
from triton_kernels.layer_norm_second_order import layer_norm_bwd_jvp, layer_norm_pairing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ALL_SIX = (True,) * 6
TANGENTS = ("y_bar_dot", "x_dot", "weight_dot", "bias_dot")


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, norm_ndim: int = 1, batch_ndim: int = 0) -> Tensor:
    """Layer norm of elementary operations, which torch differentiates right at every order."""
    dims = tuple(range(-norm_ndim, 0))
    rest = x.dim() - norm_ndim - batch_ndim

    def per_row(param: Tensor) -> Tensor:
        return param.reshape(*param.shape[:batch_ndim], *(1,) * rest, *param.shape[batch_ndim:])

    centered = x - x.mean(dims, keepdim=True)
    x_hat = centered / (centered.square().mean(dims, keepdim=True) + EPS).sqrt()
    return x_hat * per_row(weight) + per_row(bias)


@dataclasses.dataclass(frozen=True)
class Point:
    """Where second-order derivatives are taken, and along what; None for an absent weight and for zero tangents."""

    y_bar: Tensor
    x: Tensor
    weight: Tensor | None
    y_bar_dot: Tensor | None
    x_dot: Tensor | None
    weight_dot: Tensor | None
    bias_dot: Tensor | None
    norm_ndim: int = 1
    batch_ndim: int = 0

    @property
    def param_dtype(self) -> torch.dtype:
        return self.x.dtype if self.weight is None else self.weight.dtype

    @property
    def stats(self) -> tuple[Tensor, Tensor]:
        return Truth(self.x, self.weight, self.norm_ndim, self.batch_ndim).stats()

    def doubles(self, *names: str) -> list[Tensor]:
        """Fields in float64, with the values that None stands for."""
        param_shape = (*self.x.shape[: self.batch_ndim], *self.x.shape[self.x.dim() - self.norm_ndim :])
        values = []
        for name in names:
            value = getattr(self, name)
            if value is None:
                shape = param_shape if name in {"weight", "weight_dot", "bias_dot"} else self.x.shape
                value = torch.full(shape, float(name == "weight"))
            values.append(value.double())
        return values

    def function(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return plain_layer_norm(x, weight, bias, self.norm_ndim, self.batch_ndim)

    def true_pairing(self) -> tuple[Tensor, ...]:
        """Gradient of `<y_bar, y_dot>` with respect to y_bar, x, weight, and the tangents of x, weight and bias."""

        def pairing(y_bar, x, weight, *tangents):
            # The bias itself does not matter.
            primals = (x, weight, torch.zeros_like(weight))
            return (y_bar * torch.func.jvp(self.function, primals, tangents)[1]).sum()

        return torch.func.grad(pairing, tuple(range(6)))(
            *self.doubles("y_bar", "x", "weight", "x_dot", "weight_dot", "bias_dot")
        )

    def true_bwd_jvp(self) -> tuple[Tensor, ...]:
        """Tangents of the cotangents of x, weight and bias."""

        def backward(y_bar, x, weight):
            return torch.func.vjp(self.function, x, weight, torch.zeros_like(weight))[1](y_bar)

        primals, tangents = self.doubles("y_bar", "x", "weight"), self.doubles("y_bar_dot", "x_dot", "weight_dot")
        return torch.func.jvp(backward, tuple(primals), tuple(tangents))[1]

    def pairing(self, wanted: Sequence[bool] = ALL_SIX) -> tuple[Tensor, ...]:
        """What the launcher returns."""
        tangents = (self.x_dot, self.weight_dot, self.bias_dot)
        return layer_norm_pairing(
            self.y_bar, self.x, self.weight, *self.stats, *tangents, self.norm_ndim, self.batch_ndim, wanted
        )

    def bwd_jvp(self, wanted: Sequence[bool] = (True,) * 3) -> tuple[Tensor, ...]:
        """What the launcher returns."""
        tangents = (self.y_bar_dot, self.x_dot, self.weight_dot)
        return layer_norm_bwd_jvp(
            self.y_bar, self.x, self.weight, *self.stats, *tangents, self.norm_ndim, self.batch_ndim, wanted
        )


def draw_point(shape, dtype=torch.float32, param_dtype=None, norm_ndim=1, batch_ndim=0, absent=()) -> Point:
    """A random point with contiguous tensors, without the `absent` ones."""
    param_dtype = dtype if param_dtype is None else param_dtype
    param_shape = (*shape[:batch_ndim], *shape[len(shape) - norm_ndim :])
    full_size = {
        name: random(*shape, dtype=dtype, seed=seed) for seed, name in enumerate(("x", "y_bar", "y_bar_dot", "x_dot"))
    }
    params = {
        name: random(*param_shape, dtype=param_dtype, seed=seed)
        for seed, name in enumerate(("weight", "weight_dot", "bias_dot"))
    }
    tensors = {**full_size, **params, **dict.fromkeys(absent)}
    return Point(**tensors, norm_ndim=norm_ndim, batch_ndim=batch_ndim)


def check_results(results, truth, wanted, is_param, point: Point) -> None:
    """Each wanted result is the truth, in its dtype; each other one an empty tensor of its own."""
    assert len({id(result) for result in results}) == len(wanted)
    for result, expected, want, param in zip(results, truth, wanted, is_param, strict=True):
        if want:
            assert_matches(result, expected, point.param_dtype if param else point.x.dtype)
        else:
            assert result.shape == (0,)


def check_pairing(point: Point, masks: Sequence[Sequence[bool]] = (ALL_SIX,)) -> None:
    """Compare the launcher with autograd, for several `wanted`."""
    truth = point.true_pairing()
    for wanted in masks:
        check_results(point.pairing(wanted), truth, wanted, (False, False, True, False, True, True), point)


def check_bwd_jvp(point: Point, masks: Sequence[Sequence[bool]] = ((True,) * 3,)) -> None:
    """Compare the launcher with autograd, for several `wanted`."""
    truth = point.true_bwd_jvp()
    for wanted in masks:
        check_results(point.bwd_jvp(wanted), truth, wanted, (False, True, True), point)


def check_both(point: Point) -> None:
    """All results of both launchers."""
    check_pairing(point)
    check_bwd_jvp(point)
