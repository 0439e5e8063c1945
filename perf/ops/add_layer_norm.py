"""Norms of a sum: of a residual stream, and of what dropout leaves of x."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import primitives as pr
from perf.calls import EPS, Operands, randoms
from perf.ops.dropout import SEED, true_noise
from perf.ops.layer_norm import with_params
from perf.ops.record import Op
from perf.ops.samples import make_samples, sample, shaped, true_norm
from perf.ops.workload import DROPOUT_P, Workload
from primitives.ops.norms.add_layer_norm import add_layer_norm_p
from primitives.ops.norms.layer_norm import NormOptions


def _call(
    functional: Any, x: Tensor, residual: Tensor, weight: Any = None, bias: Any = None, ndim: int = 1, *, centered: bool
) -> tuple[Tensor, Tensor]:
    """Of this package, or composed of functions of torch."""
    name, shape = "layer_norm" if centered else "rms_norm", x.shape[x.dim() - ndim :]
    params = (weight, bias)[: 1 + centered]
    if functional is pr.functional:
        return getattr(functional, f"add_{name}")(x, residual, shape, *params, EPS)
    s = x + residual
    return getattr(functional, name)(s, shape, *params, EPS), s


def _both(y: Tensor, s: Tensor, x: Tensor) -> Tensor:
    """A number of each of the results: a loss takes both."""
    # No product by a number, for which torch fixes sizes in forward mode.
    return torch.add(y, s, alpha=2).to(x.dtype)


def _function(
    x: Tensor, residual: Tensor, weight: Any = None, bias: Any = None, norm_ndim: int = 1, p: float = 0.0, *,
    centered: bool,
) -> Tensor:  # fmt: skip
    if not p:
        return _both(*_call(pr.functional, x, residual, weight, bias, norm_ndim, centered=centered), x)
    seed = torch.tensor(SEED, device=x.device)
    options = NormOptions(norm_ndim, EPS, centered=centered)
    y, s, *_ = add_layer_norm_p(x, residual, weight, bias, seed, p, x.dtype, *options)
    return _both(y, s, x)


def _truth(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return _both(*_formula(x, *args, **options), x)


def _formula(
    x: Tensor, residual: Tensor, weight: Any = None, bias: Any = None, norm_ndim: int = 1, p: float = 0.0, *,
    centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    s = residual + (x * true_noise(tuple(x.shape), SEED, 0, p).to(x.device, x.dtype) if p else x)
    return true_norm(s, tuple(range(-norm_ndim, 0)), weight, bias, centered=centered), s


class AddLayerNorm(Operands):
    """Operands of the norm of a sum."""

    MODULES: ClassVar = ("norms.add_layer_norm",)
    DEFAULTS: ClassVar = {**NormOptions(1, EPS)._asdict(), "p": DROPOUT_P}

    @classmethod
    def draw(cls, shape: Sequence[int], dtype: torch.dtype = torch.float32, **dims: Any) -> Any:
        """Contiguous random operands."""
        full_size = randoms("x residual y_bar s_bar x_dot residual_dot", shape, dtype)
        param_shape = (*shape[: dims.get("batch_ndim", 0)], shape[-1])
        params = randoms("weight bias weight_dot bias_dot", param_shape, dtype, len(full_size))
        seed = torch.arange(SEED, SEED + param_shape[0]) if dims.get("batch_ndim") else torch.tensor(SEED)
        return cls(**full_size, **params, **{"seed": seed, **dims})

    @classmethod
    def of(cls, workload: Workload, *, centered: bool) -> Any:
        """With dropout where the workload is masked."""
        operands = with_params(cls.draw(workload.shape, workload.torch_dtype), workload, centered=centered)
        return operands if workload.masked else operands.change(seed=None)

    def derived(self) -> dict[str, Any]:
        """A sum, and its statistics."""
        s = (self.residual + self.x).contiguous()
        return {**self.value("layer_norm", **{**vars(self), "x": s}), "s": s, "y_dtype": self.x.dtype}


def _functions(*, centered: bool) -> dict[str, Any]:
    of = {"call": _call, "formula": _formula, "function": _function, "truth": _truth, "operands": AddLayerNorm.of}
    return {n: functools.partial(f, centered=centered) for n, f in {**of, "torch_function": _truth}.items()}


# Both summands become y and s; what is left of the cotangents of y and of s is that of both.
_PASSES = {"forward": 4, "backward": 4, "jvp": 8, "forward_backward": 8}
_NOISY: dict[str, Any] = {"norm_ndim": 1, "p": 0.4}
ADD_LAYER_NORM = Op(
    name="add_layer_norm",
    **_functions(centered=True),
    arguments=("x", "residual", "weight", "bias"),
    parameter_shape=lambda sample, name: (
        sample.shape if name == "residual" else sample.shape[-dict(sample.options)["norm_ndim"] :]
    ),
    samples=make_samples(
        [
            *(sample((13, 31), **_NOISY), sample((2, 2, 5, 4), norm_ndim=2, p=0.3)),
            *shaped((0, 5), (3, 64), (9,), norm_ndim=1),
        ],
        absent=[(), ("bias",), ("weight", "bias")],
        constant_when_expanded=lambda shape: len(shape) == 1,
    ),
    small=sample((2, 3, 4), **_NOISY),
    tiny=sample((1, 3), ("bias",), **_NOISY),
    large=tuple(shaped((3, 8195), (17_000, 9), **_NOISY)),
    not_kept=("x", "residual", "bias", "y"),
    rounds_twice=("forward", "fwd_jvp"),
    passes=_PASSES,
    num_params=2,
)
ADD_RMS_NORM = ADD_LAYER_NORM.sibling(
    "add_rms_norm",
    ("x", "residual", "weight"),
    **_functions(centered=False),
    samples=(
        sample((13, 31), **_NOISY),
        sample((2, 3, 8), layout="transposed", mixed=True, norm_ndim=1),
        sample((2, 5, 4), ("weight",), "sliced", norm_ndim=2),
    ),
    tiny=sample((1, 3), norm_ndim=1),
    large=(sample((3, 8195), **_NOISY),),
    num_params=1,
)
