"""Layer norm and its derivatives as plain float64 formulas, and the comparison of the launchers with them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton_kernels._runtime import accumulation_dtype
from triton_kernels.layer_norm import layer_norm_bwd, layer_norm_fwd, layer_norm_jvp

EPS = 1e-5
ALL = (True, True, True)
# Relative to the largest element: four roundings of the output dtype, and for the accumulation dtype as many as a sum
# over the tested rows and columns can collect.
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 3e-6, torch.float64: 1e-13}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, shifted so that the mean matters."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)


def assert_matches(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with a float64 value, and check dtype and shape."""
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    scale = expected.abs().max().item() if expected.numel() else 0.0
    atol = TOLERANCES[dtype] * max(scale, 1.0)
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=atol, equal_nan=True)


class Truth(NamedTuple):
    """Layer norm and its derivatives as plain float64 formulas."""

    x: torch.Tensor
    weight: torch.Tensor | None
    norm_ndim: int = 1
    batch_ndim: int = 0

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(range(-self.norm_ndim, 0))

    def param(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter with the dims of x."""
        rest = self.x.dim() - self.norm_ndim - self.batch_ndim
        shape = (*param.shape[: self.batch_ndim], *(1,) * rest, *param.shape[self.batch_ndim :])
        return param.double().reshape(shape)

    def mean(self) -> torch.Tensor:
        return self.x.double().mean(self.dims, keepdim=True)

    def rstd(self, eps: float = EPS) -> torch.Tensor:
        return ((self.x.double() - self.mean()).square().mean(self.dims, keepdim=True) + eps) ** -0.5

    def x_hat(self) -> torch.Tensor:
        return (self.x.double() - self.mean()) * self.rstd()

    def stats(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the forward hands to the derivatives."""
        dtype = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        shape = self.x.shape[: self.x.dim() - self.norm_ndim]
        return self.mean().reshape(shape).to(dtype), self.rstd().reshape(shape).to(dtype)

    def weighted(self, v: torch.Tensor) -> torch.Tensor:
        return v if self.weight is None else v * self.param(self.weight)

    def y(self, bias: torch.Tensor | None) -> torch.Tensor:
        y = self.weighted(self.x_hat())
        return y if bias is None else y + self.param(bias)

    def project(self, v: torch.Tensor) -> torch.Tensor:
        x_hat = self.x_hat()
        v_mean, v_x_hat_mean = (u.mean(self.dims, keepdim=True) for u in (v, v * x_hat))
        return self.rstd() * (v - v_mean - x_hat * v_x_hat_mean)

    def bars(self, y_bar: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y_bar = y_bar.double()
        summed = tuple(range(self.batch_ndim, self.x.dim() - self.norm_ndim))

        def over_rows(v: torch.Tensor) -> torch.Tensor:
            return v.sum(summed) if summed else v

        return self.project(self.weighted(y_bar)), over_rows(y_bar * self.x_hat()), over_rows(y_bar)

    def y_dot(self, x_dot, weight_dot, bias_dot) -> torch.Tensor:
        y_dot = torch.zeros(self.x.shape, dtype=torch.float64)
        if x_dot is not None:
            y_dot = y_dot + self.weighted(self.project(x_dot.double()))
        if weight_dot is not None:
            y_dot = y_dot + self.x_hat() * self.param(weight_dot)
        return y_dot if bias_dot is None else y_dot + self.param(bias_dot)


def check_fwd(x, weight, bias, norm_ndim=1, batch_ndim=0) -> None:
    truth = Truth(x, weight, norm_ndim, batch_ndim)
    y, mean, rstd = layer_norm_fwd(x, weight, bias, norm_ndim, batch_ndim, EPS)
    stat_dtype = truth.stats()[0].dtype
    row_shape = x.shape[: x.dim() - norm_ndim]
    assert_matches(y, truth.y(bias), x.dtype)
    assert_matches(mean, truth.mean().reshape(row_shape), stat_dtype)
    assert_matches(rstd, truth.rstd().reshape(row_shape), stat_dtype)


def check_bwd(y_bar, x, weight, norm_ndim=1, batch_ndim=0, wanted=ALL) -> tuple[torch.Tensor, ...]:
    truth = Truth(x, weight, norm_ndim, batch_ndim)
    bars = layer_norm_bwd(y_bar, x, weight, *truth.stats(), norm_ndim, batch_ndim, wanted)
    param_dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    dtypes = (x.dtype, param_dtype, param_dtype)
    for bar, expected, want, dtype in zip(bars, truth.bars(y_bar), wanted, dtypes, strict=True):
        if want:
            assert_matches(bar, expected, dtype)
        else:
            assert bar.shape == (0,)
    return bars


def check_jvp(x, weight, x_dot, weight_dot, bias_dot, norm_ndim=1, batch_ndim=0) -> None:
    truth = Truth(x, weight, norm_ndim, batch_ndim)
    mean, rstd = truth.stats()
    y_dot = layer_norm_jvp(x, weight, mean, rstd, x_dot, weight_dot, bias_dot, norm_ndim, batch_ndim)
    assert_matches(y_dot, truth.y_dot(x_dot, weight_dot, bias_dot), x.dtype)


def check_all(x, weight, bias, norm_ndim=1, batch_ndim=0) -> None:
    """All three launchers; tangents and cotangents are contiguous, whatever the strides of x."""
    check_fwd(x, weight, bias, norm_ndim, batch_ndim)
    check_bwd(random(*x.shape, dtype=x.dtype, seed=1), x, weight, norm_ndim, batch_ndim)
    param_shape = (*x.shape[:batch_ndim], *x.shape[x.dim() - norm_ndim :])
    dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    tangents = (random(*param_shape, dtype=dtype, seed=seed) for seed in (2, 3))
    check_jvp(x, weight, random(*x.shape, dtype=x.dtype, seed=4), *tangents, norm_ndim, batch_ndim)
