"""Cross-entropy of rows of logits: launchers of `primitives.ops.losses.cross_entropy`, of first and of second order.

Two kernels serve all: one for what is a number of a row, the value and its tangent, one for what has the shape of x,
the vjp and its jvp. Every launcher views its tensors as those of log-softmax do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..rows.launch import RowSums
from ..rows.maps import launch_map
from ..runtime.numbers import accumulation_dtype
from ..tuning import tunable
from ._cross_entropy_kernels import cross_entropy_gradient_kernel, cross_entropy_sums_kernel

_ROW_RESULTS = ("loss", "lse", "loss_dot", "lse_dot")


def _operands(
    x: Tensor, target: Tensor, x_dot: Tensor | None, target_dot: Tensor | None
) -> tuple[dict[str, Tensor | None], Tensor | None]:
    """Operands of full size, and labels."""
    if target.is_floating_point():
        return {"x": x, "target": target, "x_dot": x_dot, "target_dot": target_dot}, None
    return {"x": x, "target": None, "x_dot": x_dot, "target_dot": None}, target


def _numbers(x: Tensor, dim: int, smoothing: float) -> dict[str, Any]:
    """Keep and share of t."""
    return {"NUMBER_0": 1.0 - smoothing, "NUMBER_1": smoothing / x.shape[dim]}


def _launch_sums(
    x: Tensor, target: Tensor, x_dot: Tensor | None, target_dot: Tensor | None, dim: int, smoothing: float,
    names: Sequence[str],
) -> list[Tensor]:  # fmt: skip
    """The named numbers of each row."""
    shape, dtype = (*x.shape[:dim], *x.shape[dim + 1 :]), accumulation_dtype(x.dtype)
    results = {name: torch.empty(shape, dtype=dtype, device=x.device) for name in names}
    inputs, label = _operands(x, target, x_dot, target_dot)
    present = [name for name, tensor in inputs.items() if tensor is not None]
    # The maximum and the sum of exponentials, with x_dot one weighted with them; the sum of t * x, of labels for their
    # share alone, and with a tangent another; of probabilities their own sums.
    has_x_dot, has_target_dot = "x_dot" in present, "target_dot" in present
    has_t = label is None or smoothing != 0.0
    has_dot, has_target = has_target_dot or (has_t and has_x_dot), label is None
    bits = 3 + 4 * has_x_dot + 8 * has_t + 16 * has_dot + 32 * has_target + 64 * has_target_dot
    launch_map(
        cross_entropy_sums_kernel,
        inputs,
        {},
        dim,
        RowSums(7, present, bits),
        writes=(),
        statistics={"label": label},
        row_outputs={name: results.get(name) for name in _ROW_RESULTS},
        picks=() if label is None else present,
        EPS=bits,
        **_numbers(x, dim, smoothing),
    )
    return [*results.values()]


@tunable
def cross_entropy_fwd(x: Tensor, target: Tensor, dim: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Loss and lse of the rows of `x` along `dim`, in the dtype of sums."""
    loss, lse = _launch_sums(x, target, None, None, dim, smoothing, _ROW_RESULTS[:2])
    return loss, lse


@tunable
def cross_entropy_fwd_jvp(
    x: Tensor, target: Tensor, x_dot: Tensor | None, target_dot: Tensor | None, dim: int, smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cross_entropy_fwd` and the tangents of both results, for those of `x` and of probabilities."""
    loss, lse, loss_dot, lse_dot = _launch_sums(x, target, x_dot, target_dot, dim, smoothing, _ROW_RESULTS)
    return loss, lse, loss_dot, lse_dot


@tunable
def cross_entropy_jvp(
    x: Tensor, target: Tensor, x_dot: Tensor | None, target_dot: Tensor | None, dim: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The tangents `(loss_dot, lse_dot)` of `cross_entropy_fwd`, without its results."""
    loss_dot, lse_dot = _launch_sums(x, target, x_dot, target_dot, dim, smoothing, _ROW_RESULTS[2:])
    return loss_dot, lse_dot


def _launch_gradient(
    x: Tensor, target: Tensor, lse: Tensor, x_dot: Tensor | None, target_dot: Tensor | None, dim: int,
    smoothing: float, bars: Mapping[str, Tensor | None], results: Sequence[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inputs, label = _operands(x, target, x_dot, target_dot)
    x_bar = torch.empty(x.shape, dtype=x.dtype, device=x.device) if results[0] else None
    target_bar = None
    if results[1] and label is None:
        target_bar = torch.empty(x.shape, dtype=target.dtype, device=x.device)
    terms = ("target", "x_dot", "target_dot")
    summed = [name for name in terms if inputs[name] is not None]
    bits = sum(1 << place for place, name in enumerate(terms) if name in summed)
    launch_map(
        cross_entropy_gradient_kernel,
        inputs,
        {"x_bar": x_bar, "target_bar": target_bar},
        dim,
        RowSums(3, ["x", *summed] if summed else (), bits),
        statistics={"label": label, "lse": lse, **bars},
        num_results=3 if len(summed) == 3 else 1 + (x_dot is not None),
        **_numbers(x, dim, smoothing),
    )
    return x.new_empty(0) if x_bar is None else x_bar, x.new_empty(0) if target_bar is None else target_bar


@tunable
def cross_entropy_bwd(
    loss_bar: Tensor | None, lse_bar: Tensor | None, x: Tensor, target: Tensor, lse: Tensor,
    dim: int, smoothing: float, output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cotangents of `x` and `target` by those of the results of `cross_entropy_fwd`, of which None is zero.

    They have the shapes and dtypes of the arguments; one that is not wanted is empty, as that of labels always is.
    """
    bars = {"u": None, "v": None, "u_dot": loss_bar, "v_dot": lse_bar}
    return _launch_gradient(x, target, lse, None, None, dim, smoothing, bars, output_mask)


@tunable
def cross_entropy_bwd_jvp(
    loss_bar: Tensor | None, lse_bar: Tensor | None, x: Tensor, target: Tensor, lse: Tensor,
    loss_bar_dot: Tensor | None, lse_bar_dot: Tensor | None, x_dot: Tensor | None, target_dot: Tensor | None,
    dim: int, smoothing: float, output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tangents of the results of `cross_entropy_bwd`, for those of its arguments; None for zero."""
    bars = {"u": loss_bar, "v": lse_bar, "u_dot": loss_bar_dot, "v_dot": lse_bar_dot}
    return _launch_gradient(x, target, lse, x_dot, target_dot, dim, smoothing, bars, output_mask)
