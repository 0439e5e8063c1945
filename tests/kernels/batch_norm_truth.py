"""Batch norm and its derivatives as float64 formulas, and checks of the launchers against them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton_kernels._runtime import accumulation_dtype
from triton_kernels.batch_norm import (
    batch_norm_eval_bwd,
    batch_norm_eval_fwd,
    batch_norm_eval_jvp,
    batch_norm_train_bwd,
    batch_norm_train_fwd,
    batch_norm_train_jvp,
)

# Far enough from a float32 number that rounding it to one shows in float64.
EPS = 1e-3 + 1e-10
MOMENTUM = 0.1

# Relative to the largest element: four roundings of the output dtype, and for the accumulation dtype as many as a sum
# over the tested channels can collect.
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 4e-6, torch.float64: 1e-13}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, shifted so that the mean matters."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)


def positive(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Numbers fit for a variance."""
    return random(*shape, dtype=torch.float64, seed=seed).abs().add(0.1).to(dtype)


def assert_matches(actual, expected, dtype: torch.dtype, computed=None, magnitude: float = 0.0) -> None:
    """Compare with a float64 value, and check dtype and shape.

    `computed` is the dtype of the computation if it is narrower, `magnitude` the sum of the absolute values of terms
    that cancel: the interpreter adds in sequence, so that rounding of equal terms adds up.
    """
    assert actual.dtype == dtype
    scale = expected.abs().max().item() if expected.numel() else 0.0
    computed = computed or dtype
    atol = max(TOLERANCES[dtype], TOLERANCES[computed]) * max(scale, 1.0) + TOLERANCES[computed] * magnitude
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0.0, atol=atol, equal_nan=True)


def stat_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Truth(NamedTuple):
    """Batch norm and its derivatives as plain float64 formulas; running statistics select evaluation."""

    x: torch.Tensor
    weight: torch.Tensor | None = None
    batch_ndim: int = 0
    running_mean: torch.Tensor | None = None
    running_var: torch.Tensor | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        return self.batch_ndim, *range(self.batch_ndim + 2, self.x.dim())

    @property
    def count(self) -> int:
        return self.x.numel() // max(self.x.shape[: self.batch_ndim].numel() * self.x.shape[self.batch_ndim + 1], 1)

    def wide(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter with the dims of x."""
        spatial = (1,) * (self.x.dim() - self.batch_ndim - 2)
        return param.double().reshape(*param.shape[:-1], 1, param.shape[-1], *spatial)

    def average(self, v: torch.Tensor) -> torch.Tensor:
        return v.double().mean(self.dims, keepdim=True)

    def mean(self) -> torch.Tensor:
        return self.average(self.x) if self.running_mean is None else self.wide(self.running_mean)

    def var(self) -> torch.Tensor:
        if self.running_var is not None:
            return self.wide(self.running_var)
        return self.average((self.x.double() - self.mean()).square())

    def rstd(self) -> torch.Tensor:
        return (self.var() + EPS) ** -0.5

    def narrow(self, statistic: torch.Tensor) -> torch.Tensor:
        return statistic.reshape(*self.x.shape[: self.batch_ndim], self.x.shape[self.batch_ndim + 1])

    def stats(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the training forward hands to the derivatives."""
        return tuple(self.narrow(s).to(stat_dtype(self.x)) for s in (self.mean(), self.rstd()))

    def x_hat(self) -> torch.Tensor:
        return (self.x.double() - self.mean()) * self.rstd()

    def weighted(self, v: torch.Tensor) -> torch.Tensor:
        return v if self.weight is None else v * self.wide(self.weight)

    def y(self, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.weighted(self.x_hat())
        return y if bias is None else y + self.wide(bias)

    def updated(self, running: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (1 - MOMENTUM) * running.double() + MOMENTUM * self.narrow(batch)

    def project(self, u: torch.Tensor, mean_dot=None, var_dot=None) -> torch.Tensor:
        if self.running_mean is None:
            return self.rstd() * (u - self.average(u) - self.x_hat() * self.average(u * self.x_hat()))
        if mean_dot is not None:
            u = u - self.wide(mean_dot)
        if var_dot is not None:
            u = u - self.x_hat() * self.rstd() / 2 * self.wide(var_dot)
        return self.rstd() * u

    def y_dot(self, x_dot, weight_dot, bias_dot, mean_dot=None, var_dot=None) -> torch.Tensor:
        u = torch.zeros(self.x.shape, dtype=torch.float64) if x_dot is None else x_dot.double()
        y_dot = self.weighted(self.project(u, mean_dot, var_dot))
        if weight_dot is not None:
            y_dot = y_dot + self.x_hat() * self.wide(weight_dot)
        return y_dot if bias_dot is None else y_dot + self.wide(bias_dot)

    def magnitude(self, y_bar: torch.Tensor) -> float:
        return y_bar.double().abs().sum(self.dims).max().item()

    def bars(self, y_bar: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cotangents of x, weight, bias, and of the running statistics if there are any."""
        y_bar = y_bar.double()
        weighted, x_hat, rstd = self.weighted(y_bar), self.x_hat(), self.rstd()
        bars = [self.project(weighted)]
        terms = [y_bar * x_hat, y_bar]
        if self.running_mean is not None:
            terms += [-rstd * weighted, -(rstd**2) / 2 * weighted * x_hat]
        return *bars, *(term.sum(self.dims) for term in terms)


def check_train(x, weight=None, bias=None, running_mean=None, running_var=None, batch_ndim=0, y_bar=None, x_dot=None):
    """All three training launchers on one input."""
    truth = Truth(x, weight, batch_ndim)
    channels = truth.narrow(truth.mean()).shape
    param_dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    outputs = batch_norm_train_fwd(x, weight, bias, running_mean, running_var, batch_ndim, MOMENTUM, EPS)
    y, mean, rstd, new_running_mean, new_running_var = outputs
    assert_matches(y, truth.y(bias), x.dtype)
    assert_matches(mean, truth.narrow(truth.mean()), stat_dtype(x))
    assert_matches(rstd, truth.narrow(truth.rstd()), stat_dtype(x))
    unbiased = truth.var() * truth.count / (truth.count - 1)
    for old, new, batch in (
        (running_mean, new_running_mean, truth.mean()),
        (running_var, new_running_var, unbiased),
    ):
        if old is None:
            assert new.shape == (0,)
        else:
            assert_matches(new, truth.updated(old, batch), old.dtype, stat_dtype(x))

    y_bar = random(*x.shape, dtype=x.dtype, seed=5) if y_bar is None else y_bar
    bars = batch_norm_train_bwd(y_bar, x, weight, *truth.stats(), batch_ndim, (True,) * 3)
    for bar, expected, dtype in zip(bars, truth.bars(y_bar), (x.dtype, param_dtype, param_dtype), strict=True):
        assert_matches(bar, expected, dtype, stat_dtype(x), truth.magnitude(y_bar))

    x_dot = random(*x.shape, dtype=x.dtype, seed=6) if x_dot is None else x_dot
    weight_dot, bias_dot = random(*channels, seed=7), random(*channels, seed=8)
    y_dot = batch_norm_train_jvp(x, weight, *truth.stats(), x_dot, weight_dot, bias_dot, batch_ndim)
    assert_matches(y_dot, truth.y_dot(x_dot, weight_dot, bias_dot), x.dtype)
    return y, bars[0], y_dot


def check_eval(x, weight, bias, running_mean, running_var, batch_ndim=0, y_bar=None, x_dot=None):
    """All three evaluation launchers on one input."""
    truth = Truth(x, weight, batch_ndim, running_mean, running_var)
    channels = x.shape[:batch_ndim] + x.shape[batch_ndim + 1 : batch_ndim + 2]
    param_dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    stats = (running_mean, running_var)
    y = batch_norm_eval_fwd(x, weight, bias, *stats, batch_ndim, EPS)
    assert_matches(y, truth.y(bias), x.dtype)

    y_bar = random(*x.shape, dtype=x.dtype, seed=5) if y_bar is None else y_bar
    bars = batch_norm_eval_bwd(y_bar, x, weight, *stats, batch_ndim, EPS, (True,) * 5)
    dtypes = (x.dtype, param_dtype, param_dtype, running_mean.dtype, running_var.dtype)
    for bar, expected, dtype in zip(bars, truth.bars(y_bar), dtypes, strict=True):
        assert_matches(bar, expected, dtype, stat_dtype(x), truth.magnitude(y_bar))

    x_dot = random(*x.shape, dtype=x.dtype, seed=6) if x_dot is None else x_dot
    dots = (x_dot, *(random(*channels, seed=seed) for seed in (7, 8, 9, 10)))
    y_dot = batch_norm_eval_jvp(x, weight, *stats, *dots, batch_ndim, EPS)
    assert_matches(y_dot, truth.y_dot(*dots), x.dtype)
    return y, bars[0], y_dot


def check_all(x, batch_ndim=0, **directions):
    """Training and evaluation, with float32 parameters (float64 for float64)."""
    channels = x.shape[:batch_ndim] + x.shape[batch_ndim + 1 : batch_ndim + 2]
    weight, bias, running_mean = (random(*channels, dtype=stat_dtype(x), seed=seed) for seed in (1, 2, 3))
    running_var = positive(*channels, dtype=stat_dtype(x), seed=4)
    params = (weight, bias, running_mean, running_var)
    return check_train(x, *params, batch_ndim, **directions) + check_eval(x, *params, batch_ndim, **directions)
