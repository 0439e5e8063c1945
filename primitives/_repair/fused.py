"""Operators of torch by this package's primitives: what transforms differentiate, and what runs on a GPU.

Each function takes the arguments of its operator and returns its outputs, or `NotImplemented` for arguments that the
primitives do not take: the decomposition of the operator answers for these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from primitives import functional
from primitives._core.errors import DeviceError, DtypeError, ShapeError
from primitives._core.write_back import write_back
from primitives.ops import arguments
from primitives.ops.attention.functions import attention_of_tensors
from primitives.ops.norms.batch_norm import batch_norm_p
from primitives.ops.norms.batch_norm_eval import batch_norm_eval_p
from primitives.ops.norms.channels import ChannelOptions
from primitives.ops.norms.group_norm import group_norm_of_tensors
from primitives.ops.norms.layer_norm import NormOptions, layer_norm_p
from primitives.ops.rules import accumulation_dtype, weight_beside

__all__ = ["FUSED", "ON_CUDA_ALONE"]

aten = torch.ops.aten
# Errors before any work.
_REFUSALS = (ShapeError, DtypeError, DeviceError)


def _served(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def formula(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _REFUSALS:
            return NotImplemented

    return formula


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    y, mean, rstd = _norm_of_rows("layer_norm", x, shape, weight_beside(bias, weight, x), bias, eps)
    return y, mean.reshape(rstd.shape), rstd


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
    eps = torch.finfo(accumulation_dtype(x.dtype)).eps if eps is None else eps
    y, _, rstd = _norm_of_rows("rms_norm", x, shape, weight, None, eps)
    return y, rstd


def _norm_of_rows(name: str, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, ...]:
    shape = arguments.normalized_shape(name, shape)
    arguments.layer_norm(name, "input", x, shape, weight=weight, bias=bias)
    y, mean, rstd = layer_norm_p(x, weight, bias, *NormOptions(len(shape), eps, centered=name == "layer_norm"))
    return y, mean, rstd.reshape([*x.shape[: x.dim() - len(shape)], *[1] * len(shape)])


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, _n: int, _c: int, _hw: int, groups: int, eps: float
) -> Any:
    arguments.group_norm("input", x, groups, weight=weight, bias=bias)
    return group_norm_of_tensors(x, groups, weight_beside(bias, weight, x), bias, eps, None)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    arguments.batch_norm("batch_norm", "input", x, mean, var, weight, bias, training=training)
    if x.numel() == 0 or eps <= 0.0:
        return NotImplemented
    weight = weight_beside(bias, weight, x)
    if not training:
        nothing = x.new_zeros(0)
        return batch_norm_eval_p(x, weight, bias, mean, var, *ChannelOptions(eps)), nothing, nothing
    y, *statistics, new_mean, new_var = batch_norm_p(x, weight, bias, mean, var, momentum, *ChannelOptions(eps))
    if mean is not None and var is not None:
        write_back([mean, var], [new_mean, new_var])
    return y, *statistics


def _cudnn_batch_norm(*args: Any) -> Any:
    outputs = _batch_norm(*args)
    return outputs if outputs is NotImplemented else (*outputs, args[0].new_zeros(0, dtype=torch.uint8))


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    if dropout_p or q.numel() == 0 or k.numel() == 0:
        return NotImplemented
    is_mask = attn_mask is not None and attn_mask.dtype == torch.bool
    bias, mask = (None, attn_mask) if is_mask else (attn_mask, None)
    return attention_of_tensors(q, k, v, bias, mask, None, None, is_causal, scale, 0.0)


FUSED: dict[OpOverload, Callable[..., Any]] = {
    operator: _served(formula)
    for operator, formula in {
        aten.native_layer_norm.default: _layer_norm,
        aten.native_group_norm.default: _group_norm,
        aten.native_batch_norm.default: _batch_norm,
        aten._native_batch_norm_legit.default: _batch_norm,
        aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, *rest: _batch_norm(
            x, weight, bias, None, None, *rest
        ),
        aten.cudnn_batch_norm.default: _cudnn_batch_norm,
        aten.miopen_batch_norm.default: _batch_norm,
        aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
        aten.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
        aten._fused_rms_norm.default: _rms_norm,
    }.items()
}
ON_CUDA_ALONE = frozenset([aten.scaled_dot_product_attention.default, aten._fused_rms_norm.default])
"""Operators that torch composes of others on the CPU, which are right there."""
