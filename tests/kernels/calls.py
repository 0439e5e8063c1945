"""Calls of every launcher, each operand in memory of its own: what the gates of bytes and determinism go through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tests.kernels.layer_norm_truth import EPS, random
from triton_kernels import (
    batch_norm,
    batch_norm_second_order,
    dropout,
    layer_norm,
    layer_norm_second_order,
    log_softmax,
    log_softmax_second_order,
    philox,
)
from triton_kernels._runtime import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MOMENTUM = 0.1
ALL = (True, True, True)
DOUBLE_BACKWARD = (True, True, True, False, False, False)
BACKWARD_OF_JVP = (False, True, True, True, True, True)

_ROW_LIMITS = {
    "layer_norm": (
        "two_row_cols",
        "accumulated_cols",
        "sweep_cols",
        "second_cols",
        "second_summed_cols",
        "second_sweep_cols",
    ),
    "log_softmax": ("row_cols", "two_row_cols", "three_row_cols", "sweep_cols", "second_sweep_cols"),
}


def short_rows(num_cols: int, max_splits: int) -> dict[str, int]:
    """Limits with which rows of more than `num_cols` columns take the plans of rows that do not fit in registers."""
    limits = {f"{op}_{name}": num_cols for op, names in _ROW_LIMITS.items() for name in names}
    tiles = {"log_softmax_tile": num_cols // 2, "log_softmax_two_tile": num_cols // 2}
    return limits | tiles | {"layer_norm_fwd_bytes": num_cols * 4, "max_row_splits": max_splits}


class Call(NamedTuple):
    """A launcher, its arguments, and how many operands it copies first because no view fits their strides."""

    launcher: Callable[..., Any]
    args: tuple[Any, ...]
    copies: int = 0

    def run(self) -> list[Tensor]:
        """The results, without the empty ones that stand for what is not wanted."""
        results = self.launcher(*self.args)
        results = [results] if isinstance(results, torch.Tensor) else results
        return [result for result in results if result.numel()]

    def operands(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [arg for arg in self.args if isinstance(arg, torch.Tensor)]


# Rows one after another; with parameters of their own for each of two groups; and two segments of rows with gaps
# between them, or with rows that stand for several.
ROW_LAYOUTS = ("contiguous", "groups", "strided", "expanded")


class _Rows(NamedTuple):
    """Operands of layer norm in one of `ROW_LAYOUTS`."""

    full_size: list[Tensor]
    params: list[Tensor]
    stats: list[Tensor]
    batch_ndim: int


def _row_operands(num_cols: int, dtype: torch.dtype, num_rows: int, layout: str) -> _Rows:
    def rows(*shape: int, seed: int) -> Tensor:
        return random(*shape, num_cols, dtype=dtype, seed=seed)

    if layout == "contiguous":
        full_size = [rows(num_rows, seed=seed) for seed in range(4)]
    elif layout == "groups":
        full_size = [rows(2, num_rows, seed=seed) for seed in range(4)]
    elif layout == "strided":
        full_size = [rows(2, num_rows + 1 + seed % 2, seed=seed)[:, :num_rows] for seed in range(4)]
    else:
        whole, of_segment, of_row, one = (
            rows(*shape, seed=seed).expand(2, num_rows, -1)
            for seed, shape in enumerate([(2, num_rows), (2, 1), (1, num_rows), (1, 1)])
        )
        full_size = [whole, of_segment, of_row, one]
    wide = full_size[0].to(accumulation_dtype(dtype))
    stats = [wide.mean(-1), (wide.var(-1, correction=0) + EPS) ** -0.5]
    groups = (2,) if layout == "groups" else ()
    return _Rows(full_size, [random(*groups, num_cols, seed=seed) for seed in range(3)], stats, len(groups))


def layer_norm_backward(
    num_cols: int, dtype: torch.dtype, num_rows: int, wanted: tuple[bool, ...], layout: str = "contiguous"
) -> Call:
    """The first-order backward for what is wanted."""
    (x, y_bar, _, _), (weight, _, _), stats, batch_ndim = _row_operands(num_cols, dtype, num_rows, layout)
    return Call(layer_norm.layer_norm_bwd, (y_bar, x, weight, *stats, 1, batch_ndim, wanted))


def layer_norm_pairing(
    num_cols: int, dtype: torch.dtype, num_rows: int, wanted: tuple[bool, ...], layout: str = "contiguous"
) -> Call:
    """The gradient of the pairing for what is wanted."""
    rows = _row_operands(num_cols, dtype, num_rows, layout)
    (x, y_bar, x_dot, _), (weight, weight_dot, bias_dot), stats, batch_ndim = rows
    args = (y_bar, x, weight, *stats, x_dot, weight_dot, bias_dot, 1, batch_ndim, wanted)
    return Call(layer_norm_second_order.layer_norm_pairing, args)


LAYER_NORM = ("forward", "jvp", "backward", "double_backward", "backward_of_jvp", "jvp_of_backward")


def layer_norm_call(mode: str, num_cols: int, dtype: torch.dtype, num_rows: int, layout: str = "contiguous") -> Call:
    """One of the modes of `LAYER_NORM`."""
    rows = _row_operands(num_cols, dtype, num_rows, layout)
    (x, y_bar, x_dot, y_bar_dot), (weight, weight_dot, bias), stats, batch_ndim = rows
    if mode == "forward":
        return Call(layer_norm.layer_norm_fwd, (x, weight, bias, 1, batch_ndim, EPS))
    if mode == "jvp":
        return Call(layer_norm.layer_norm_jvp, (x, weight, *stats, x_dot, weight_dot, bias, 1, batch_ndim))
    if mode == "backward":
        return layer_norm_backward(num_cols, dtype, num_rows, ALL, layout)
    if mode == "jvp_of_backward":
        args = (y_bar, x, weight, *stats, y_bar_dot, x_dot, weight_dot, 1, batch_ndim, ALL)
        return Call(layer_norm_second_order.layer_norm_bwd_jvp, args)
    wanted = DOUBLE_BACKWARD if mode == "double_backward" else BACKWARD_OF_JVP
    return layer_norm_pairing(num_cols, dtype, num_rows, wanted, layout)


# Channels and positions that fill no tile, so that lanes past the last one have to be masked off.
CHANNEL_LAYOUTS = {
    "channels first": ((3, 3, 17, 19), torch.contiguous_format),
    "channels last": ((2, 9, 17, 19), torch.channels_last),
    "features": ((521, 9), torch.contiguous_format),
}
# Parameters of their own for each of two groups; samples with gaps between them; a cotangent and tangents that are one
# for all samples, or for all positions. Two have whole tiles.
STRIDED_CHANNELS = {"groups": (2, 2, 2, 32, 32), "strided": (3, 3, 29, 31), "expanded": (4, 2, 32, 32)}


def _channel_operands(layout: str, samples: int | None, dtype: torch.dtype) -> list[Tensor]:
    """x, y_bar, x_dot and y_bar_dot."""
    if layout in CHANNEL_LAYOUTS:
        shape, memory_format = CHANNEL_LAYOUTS[layout]
        shape = (samples or shape[0], *shape[1:])
        return [random(*shape, dtype=dtype, seed=seed).contiguous(memory_format=memory_format) for seed in range(4)]
    shape = STRIDED_CHANNELS[layout]
    if layout == "groups":
        return [random(*shape, dtype=dtype, seed=seed) for seed in range(4)]
    num_samples, num_channels, *spatial = shape
    if layout == "strided":
        return [
            random(num_samples, num_channels + 2, *spatial, dtype=dtype, seed=seed)[:, :num_channels]
            for seed in range(4)
        ]
    parts = [shape, (1, num_channels, *spatial), (num_samples, num_channels, 1, 1), (1, 1, 1, 1)]
    return [random(*part, dtype=dtype, seed=seed).expand(shape) for seed, part in enumerate(parts)]


def batch_norm_calls(layout: str, samples: int | None = None, dtype: torch.dtype = torch.float32) -> list[Call]:
    """Training, evaluation and second order in a layout.

    Args:
        layout: One of `CHANNEL_LAYOUTS` or `STRIDED_CHANNELS`.
        samples: Number of samples instead of that of one of `CHANNEL_LAYOUTS`.
        dtype: Of what has full size.
    """
    x, y_bar, x_dot, y_bar_dot = _channel_operands(layout, samples, dtype)
    batch_ndim = int(layout == "groups")
    channels = (*x.shape[:batch_ndim], x.shape[batch_ndim + 1])
    weight, bias, mean, rstd, weight_dot, bias_dot, mean_dot, var_dot = (
        random(*channels, seed=seed).abs() for seed in range(8)
    )
    operands, dots = (y_bar, x, weight, mean, rstd), (x_dot, weight_dot, bias_dot)
    evaluated = (x, weight, mean, rstd, *dots, mean_dot, var_dot, batch_ndim, EPS)
    return [
        Call(batch_norm.batch_norm_train_fwd, (x, weight, bias, mean_dot, var_dot, batch_ndim, MOMENTUM, EPS)),
        *(
            Call(batch_norm.batch_norm_train_bwd, (*operands, batch_ndim, wanted))
            for wanted in (ALL, (True, False, False), (False, False, True))
        ),
        Call(batch_norm.batch_norm_train_jvp, (x, weight, mean, rstd, *dots, batch_ndim)),
        Call(batch_norm.batch_norm_eval_fwd, (x, weight, bias, mean, rstd, batch_ndim, EPS)),
        *(
            Call(batch_norm.batch_norm_eval_bwd, (*operands, batch_ndim, EPS, wanted))
            for wanted in ((True,) * 5, (True, *(False,) * 4))
        ),
        Call(batch_norm.batch_norm_eval_jvp, evaluated),
        *(
            Call(batch_norm_second_order.batch_norm_pairing, (*operands, *dots, batch_ndim, wanted))
            for wanted in (DOUBLE_BACKWARD, BACKWARD_OF_JVP)
        ),
        Call(batch_norm_second_order.batch_norm_bwd_jvp, (*operands, y_bar_dot, x_dot, weight_dot, batch_ndim, ALL)),
    ]


# Rows one after another; with gaps between them; and operands that stand for several: one row, one number per row, and
# one number for all, as the cotangent of a sum is.
REDUCED_LAYOUTS = ("contiguous", "strided", "expanded")


def _reduced_operands(shape: tuple[int, ...], dim: int, dtype: torch.dtype, layout: str) -> list[Tensor]:
    """x, y_bar, x_dot, y_bar_dot, y_dot."""
    if layout == "contiguous":
        return [random(*shape, dtype=dtype, seed=seed) for seed in range(5)]
    if layout == "strided":
        # As many gaps for each, so that rows that several tensors share are seen with two levels at most.
        return [
            random(*shape[:-1], shape[-1] + 1 + seed % 2, dtype=dtype, seed=seed)[..., : shape[-1]] for seed in range(5)
        ]
    row = tuple(size if axis == dim else 1 for axis, size in enumerate(shape))
    column = tuple(1 if axis == dim else size for axis, size in enumerate(shape))
    parts = [row, column, (1,) * len(shape), shape, row]
    return [random(*part, dtype=dtype, seed=seed).expand(shape) for seed, part in enumerate(parts)]


def log_softmax_calls(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous"
) -> list[Call]:
    """First order, and second order for every choice of results and tangents.

    Args:
        shape: Of the operands.
        dim: That is reduced.
        dtype: Of the operands.
        layout: One of `REDUCED_LAYOUTS`.
    """
    x, y_bar, x_dot, y_bar_dot, y_dot = _reduced_operands(shape, dim, dtype, layout)
    y = torch.log_softmax(random(*shape, dtype=dtype, seed=5), dim)
    if layout == "strided":
        y = torch.cat([y, y], -1)[..., : shape[-1]]
    choices = [tuple(bool(number & bit) for bit in (1, 2, 4)) for number in range(8)]
    return [
        Call(log_softmax.log_softmax_fwd, (x, dim, None)),
        Call(log_softmax.log_softmax_bwd, (y_bar, y, dim, x.dtype)),
        Call(log_softmax.log_softmax_jvp, (x_dot, y, dim)),
        *(Call(log_softmax_second_order.log_softmax_pairing, (y_bar, y, x_dot, dim, wanted)) for wanted in choices),
        *(
            Call(log_softmax_second_order.log_softmax_bwd_jvp, (y_bar, y, *dots, dim, y.dtype))
            for dots in ((y_bar_dot, y_dot), (y_bar_dot, None), (None, y_dot))
        ),
    ]


def dropout_calls(dtype: torch.dtype = torch.float32) -> list[Call]:
    """Dropout with one seed and with a seed per sample, and stored words, whose tiles are partial.

    Tensors are contiguous, or have gaps between their rows, are transposed, or stand for several rows or columns.
    """
    seeds, offsets = torch.tensor([3, 5]), torch.tensor([0, 7])
    one, per_sample = seeds[0].clone(), random(2, 2501, dtype=dtype)
    with_gaps = random(2, 4, 75, dtype=dtype, seed=1)[:, :3, :70]
    whole, row, column = (random(*shape, dtype=dtype, seed=2) for shape in ((75, 40), (1, 40), (75, 1)))
    return [
        Call(dropout.dropout_fwd, (random(3, 1100, dtype=dtype), one, None, 0.3, 0)),
        Call(dropout.dropout_fwd, (per_sample, seeds, offsets, 0.3, 1)),
        Call(dropout.dropout_fwd, (with_gaps, seeds, None, 0.3, 1)),
        Call(dropout.dropout_fwd, (whole.t(), one, offsets[1].clone(), 0.3, 0)),
        Call(dropout.dropout_fwd, (row.expand(75, 40), one, None, 0.3, 0)),
        Call(dropout.dropout_fwd, (column.expand(75, 40), one, None, 0.3, 0)),
        Call(philox.philox_words, (seeds, offsets, (2101,))),
    ]


def calls_of_all_launchers() -> list[Call]:
    """Each launcher at least once: whatever the gates go through is made by the functions that this one calls."""
    return [
        *(layer_norm_call(mode, 20, torch.float32, 3) for mode in LAYER_NORM),
        *batch_norm_calls("channels first", samples=1),
        *log_softmax_calls((2, 20), 1),
        *dropout_calls(),
    ]


def copying_calls(dtype: torch.dtype) -> list[Call]:
    """Calls whose operands no view fits, so that they are copied first, and dropout that drops nothing: a copy itself.

    Strides have no view where dims that a kernel merges lie apart: two normalized dims that are exchanged, positions
    of an image that is turned around, three levels of rows.
    """
    normalized = random(3, 8, 5, dtype=dtype).transpose(1, 2)
    images, y_bar = random(2, 3, 8, 6, dtype=dtype).transpose(2, 3), random(2, 3, 6, 8, dtype=dtype)
    levels = random(2, 4, 3, 6, 10, dtype=dtype)[:, ::2, :, ::2].transpose(0, 2)
    mean, var = random(3).abs(), random(3, seed=1).abs()
    seed = torch.tensor(3)
    return [
        Call(layer_norm.layer_norm_fwd, (normalized, None, None, 2, 0, EPS), 1),
        Call(batch_norm.batch_norm_train_fwd, (images, None, None, None, None, 0, MOMENTUM, EPS), 1),
        Call(batch_norm.batch_norm_train_bwd, (y_bar, images, None, mean, var, 0, ALL), 1),
        Call(batch_norm.batch_norm_train_bwd, (images, images, None, mean, var, 0, ALL), 2),
        Call(batch_norm.batch_norm_eval_fwd, (images, None, None, mean, var, 0, EPS), 1),
        Call(log_softmax.log_softmax_fwd, (levels, 4, None), 1),
        Call(dropout.dropout_fwd, (random(3, 20, dtype=dtype), seed, None, 0.0, 0), 1),
        Call(dropout.dropout_fwd, (levels.as_strided((2, 2, 2, 2, 2), (64, 30, 14, 6, 2)), seed, None, 0.3, 0), 2),
    ]
