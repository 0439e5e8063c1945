"""Kernels of layer norm and RMS norm and their derivatives of first order: `_layer_norm_steps` has their formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..rows.template import row_kernel, row_sums_kernel
from . import _layer_norm_steps as steps
from ._launch import Backward

# How a row is summed up in the forward, by whether it is centered.
FORWARD_SUMS = {
    True: {"stats": steps.fwd_stats, "anchor": steps.fwd_anchor, "fold": steps.fwd_fold, "merge": steps.fwd_merge},
    False: {"stats": steps.rms_stats, "fold": steps.rms_fold, "merge": steps.rms_merge},
}
# By whether the norm is centered, and by what follows x_hat: SiLU, or the dtype that it is rounded to.
FORWARD = {
    (centered, then): row_kernel(
        "layer_norm_fwd_kernel",
        ("x", "x_dot"),
        p=("weight", "bias", "weight_dot", "bias_dot"),
        out=("y", "y_dot"),
        s=("mean", "rstd"),
        options=("EPS",),
        emit=emit,
        **sums,
    )
    for centered, sums in FORWARD_SUMS.items()
    for then, emit in (
        (None, steps.fwd_emit),
        ("silu", steps.fwd_emit_silu),
        (torch.float16, steps.fwd_emit_from_float16),
        (torch.bfloat16, steps.fwd_emit_from_bfloat16),
    )
}
# The others by whether SiLU follows.
JVP = [
    row_kernel(
        "layer_norm_jvp_kernel",
        ("x", "x_dot"),
        p=("weight", "weight_dot", "bias_dot", "bias"),
        r=("mean", "rstd"),
        out=("y_dot",),
        emit=emit,
        terms=steps.jvp_terms,
    )
    for emit in (steps.jvp_emit, steps.jvp_emit_silu)
]
_OPERANDS: Mapping[str, Any] = {"x": ("y_bar", "x"), "p": ("weight", "bias"), "r": ("mean", "rstd")}
# The cotangent of rows without the sums over them, and with them.
_X_BAR = [
    row_kernel("layer_norm_x_bar_kernel", **_OPERANDS, out=("x_bar",), emit=emit, terms=terms)
    for emit, terms in ((steps.bwd_emit, steps.bwd_terms), (steps.bwd_emit_silu, steps.bwd_terms_silu))
]
_BWD = row_sums_kernel(
    "layer_norm_bwd_kernel",
    ("y_bar", "x"),
    p=("weight",),
    r=("mean", "rstd"),
    out=("x_bar",),
    s=("weight_part", "bias_part"),
    emit=steps.bwd_emit,
    columns=steps.bwd_columns,
    terms=steps.bwd_terms,
)
# Cotangents of the parameters of each plane of a group norm.
_PLANES = [
    row_kernel("layer_norm_planes_kernel", **_OPERANDS, s=("weight_part", "bias_part"), terms=terms)
    for terms in (steps.plane_terms, steps.plane_terms_silu)
]
BACKWARD = [Backward(rows, _BWD, planes) for rows, planes in zip(_X_BAR, _PLANES, strict=True)]
