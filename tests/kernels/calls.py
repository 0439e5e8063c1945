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
    """A launcher and its arguments."""

    launcher: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self) -> list[Tensor]:
        """The results, without the empty ones that stand for what is not wanted."""
        results = self.launcher(*self.args)
        results = [results] if isinstance(results, torch.Tensor) else results
        return [result for result in results if result.numel()]

    def operands(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [arg for arg in self.args if isinstance(arg, torch.Tensor)]


def layer_norm_backward(num_cols: int, dtype: torch.dtype, num_rows: int, wanted: tuple[bool, ...]) -> Call:
    """The first-order backward for what is wanted."""
    (x, y_bar, _, _), (weight, _, _), stats = _row_operands(num_cols, dtype, num_rows)
    return Call(layer_norm.layer_norm_bwd, (y_bar, x, weight, *stats, 1, 0, wanted))


def layer_norm_pairing(num_cols: int, dtype: torch.dtype, num_rows: int, wanted: tuple[bool, ...]) -> Call:
    """The gradient of the pairing for what is wanted."""
    (x, y_bar, x_dot, _), (weight, weight_dot, bias_dot), stats = _row_operands(num_cols, dtype, num_rows)
    args = (y_bar, x, weight, *stats, x_dot, weight_dot, bias_dot, 1, 0, wanted)
    return Call(layer_norm_second_order.layer_norm_pairing, args)


LAYER_NORM = ("forward", "jvp", "backward", "double_backward", "backward_of_jvp", "jvp_of_backward")


def layer_norm_call(mode: str, num_cols: int, dtype: torch.dtype, num_rows: int) -> Call:
    """One of the modes of `LAYER_NORM`."""
    (x, y_bar, x_dot, y_bar_dot), (weight, weight_dot, bias), stats = _row_operands(num_cols, dtype, num_rows)
    if mode == "forward":
        return Call(layer_norm.layer_norm_fwd, (x, weight, bias, 1, 0, EPS))
    if mode == "jvp":
        return Call(layer_norm.layer_norm_jvp, (x, weight, *stats, x_dot, weight_dot, bias, 1, 0))
    if mode == "backward":
        return layer_norm_backward(num_cols, dtype, num_rows, ALL)
    if mode == "jvp_of_backward":
        args = (y_bar, x, weight, *stats, y_bar_dot, x_dot, weight_dot, 1, 0, ALL)
        return Call(layer_norm_second_order.layer_norm_bwd_jvp, args)
    wanted = DOUBLE_BACKWARD if mode == "double_backward" else BACKWARD_OF_JVP
    return layer_norm_pairing(num_cols, dtype, num_rows, wanted)


def _row_operands(num_cols: int, dtype: torch.dtype, num_rows: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    full_size = [random(num_rows, num_cols, dtype=dtype, seed=seed) for seed in range(4)]
    wide = full_size[0].to(accumulation_dtype(dtype))
    stats = [wide.mean(1), (wide.var(1, correction=0) + EPS) ** -0.5]
    return full_size, [random(num_cols, seed=seed) for seed in range(3)], stats


CHANNEL_LAYOUTS = {
    "channels first": ((4, 2, 32, 32), torch.contiguous_format),
    "channels last": ((2, 8, 32, 32), torch.channels_last),
    "features": ((2048, 8), torch.contiguous_format),
}


def batch_norm_calls(layout: str, samples: int | None = None, dtype: torch.dtype = torch.float32) -> list[Call]:
    """Training, evaluation and second order in one of `CHANNEL_LAYOUTS`, with other than its number of samples."""
    shape, memory_format = CHANNEL_LAYOUTS[layout]
    shape = (samples or shape[0], *shape[1:])
    x, y_bar, x_dot, y_bar_dot = (
        random(*shape, dtype=dtype, seed=seed).contiguous(memory_format=memory_format) for seed in range(4)
    )
    weight, bias, mean, rstd, weight_dot, bias_dot, mean_dot, var_dot = (
        random(shape[1], seed=seed).abs() for seed in range(8)
    )
    operands, dots = (y_bar, x, weight, mean, rstd), (x_dot, weight_dot, bias_dot)
    evaluated = (x, weight, mean, rstd, *dots, mean_dot, var_dot, 0, EPS)
    return [
        Call(batch_norm.batch_norm_train_fwd, (x, weight, bias, mean_dot, var_dot, 0, MOMENTUM, EPS)),
        *(
            Call(batch_norm.batch_norm_train_bwd, (*operands, 0, wanted))
            for wanted in (ALL, (True, False, False), (False, False, True))
        ),
        Call(batch_norm.batch_norm_train_jvp, (x, weight, mean, rstd, *dots, 0)),
        Call(batch_norm.batch_norm_eval_fwd, (x, weight, bias, mean, rstd, 0, EPS)),
        *(
            Call(batch_norm.batch_norm_eval_bwd, (*operands, 0, EPS, wanted))
            for wanted in ((True,) * 5, (True, *(False,) * 4))
        ),
        Call(batch_norm.batch_norm_eval_jvp, evaluated),
        *(
            Call(batch_norm_second_order.batch_norm_pairing, (*operands, *dots, 0, wanted))
            for wanted in (DOUBLE_BACKWARD, BACKWARD_OF_JVP)
        ),
        Call(batch_norm_second_order.batch_norm_bwd_jvp, (*operands, y_bar_dot, x_dot, weight_dot, 0, ALL)),
    ]


def log_softmax_calls(shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32) -> list[Call]:
    """First order, and second order for every choice of results and tangents."""
    x, y_bar, x_dot, y_bar_dot, y_dot = (random(*shape, dtype=dtype, seed=seed) for seed in range(5))
    y = torch.log_softmax(x, dim)
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


def dropout_calls() -> list[Call]:
    """Dropout with one seed and with a seed per sample, and stored words; `random` tensors have whole tiles and not."""
    seeds, offsets = torch.tensor([3, 5]), torch.tensor([0, 7])
    return [
        Call(dropout.dropout_fwd, (random(3, 2000), seeds[0].clone(), None, 0.3, 0)),
        Call(dropout.dropout_fwd, (random(2, 5001), seeds, offsets, 0.3, 1)),
        Call(philox.philox_words, (seeds, offsets, (3001,))),
    ]
