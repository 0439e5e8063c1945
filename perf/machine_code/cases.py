"""The calls whose kernels are compiled: every launcher at the suite's columns and dtypes, and at some that it lacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from perf.workloads import CHANNEL_OPS, DROPOUT_P, GPU_WORKLOADS, KERNEL_MODES
from triton_kernels import (
    attention,
    batch_norm,
    batch_norm_second_order,
    dropout,
    layer_norm,
    layer_norm_second_order,
    log_softmax,
    log_softmax_second_order,
    philox,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

EPS = 1e-5
MOMENTUM = 0.1
ALL_RESULTS = (True,) * 6

# Beside the suite's own modes: the vjp of a jvp, the kernels without parameter sums, the double backward of all
# gradients (a Hessian-vector product in reverse), the pairing with all that it can be asked for, as derivatives of
# third order do, and batch norm in evaluation with the cotangents of its statistics.
ALL_MODES = (*KERNEL_MODES, "backward_of_jvp", "x_only", "gradient_backward", "all_results", "evaluation")


@dataclass(frozen=True)
class Shape:
    """An op at one shape, dtype and layout, and the modes in which it is compiled.

    The fields are those of a workload, but for `masked`: attention with a bias, a mask and dropout.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    dim: int = -1
    affine: bool = True
    channels_last: bool = False
    key_heads: int = 0
    causal: bool = False
    masked: bool = False
    modes: tuple[str, ...] = KERNEL_MODES

    def __str__(self) -> str:
        """Op, sizes, dtype, layout; of attention the heads of keys, and what it sees."""
        sizes = "x".join(map(str, self.shape))
        words = {"channels_last": self.channels_last, f"{self.key_heads}_key_heads": self.key_heads}
        words |= {"causal": self.causal, "masked": self.masked}
        return " ".join([self.op, sizes, self.dtype, *(word for word, said in words.items() if said)])

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's object."""
        return getattr(torch, self.dtype)

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of parameters: that of the input, but at least float32 for batch norm."""
        return torch.promote_types(self.torch_dtype, torch.float32) if self.op in CHANNEL_OPS else self.torch_dtype

    @property
    def run(self) -> int:
        """Adjacent elements along which the tiles of a kernel run: columns, spatial positions or channels."""
        if self.op in {"layer_norm", "dropout", "attention"}:
            return self.shape[-1]
        if self.op == "log_softmax":
            inner = math.prod(self.shape[self.dim % len(self.shape) + 1 :])
            return inner if inner > 1 else self.shape[-1]
        spatial = math.prod(self.shape[2:])
        return self.shape[1] if self.channels_last or spatial == 1 else spatial


_OF_CURVATURE = ("backward_of_jvp", "gradient_backward", "all_results")
_OF_CHANNELS = ("backward_of_jvp", "x_only", "gradient_backward", "all_results", "evaluation")
_OF_LOG_SOFTMAX = ("backward_of_jvp", "x_only", "gradient_backward")
_OF_TRAINING = ("forward", "backward", "hvp")
_OF_FLOAT32 = (*_OF_TRAINING, "double_backward", "x_only", "all_results")
_FIRST_ORDER = ("forward", "backward", "jvp")
_OF_MASKS = (*_FIRST_ORDER, "all_results")

# What the suite lacks: very short rows (so many that partial sums are few beside them), float64, a reduced dim that is
# long and not the last, and sizes that are a multiple of nothing.
OTHER_SHAPES = (
    Shape("layer_norm", (1 << 18, 24), modes=_FIRST_ORDER),
    Shape("layer_norm", (512, 512), "float64"),
    Shape("layer_norm", (8192, 768), modes=("gradient_backward",)),
    Shape("layer_norm", (16384, 1152), affine=False, modes=("gradient_backward",)),
    Shape("layer_norm", (8192, 4096), modes=("backward_of_jvp", "x_only", "gradient_backward", "all_results")),
    Shape("layer_norm", (4096, 1000), "float32", modes=_OF_FLOAT32),
    # The longest rows that the second order holds whole, without sums beside them, and rows that it sweeps.
    Shape("layer_norm", (8192, 8192), modes=_OF_CURVATURE),
    Shape("layer_norm", (512, 131072), modes=_OF_CURVATURE),
    Shape("log_softmax", (65536, 24), modes=_FIRST_ORDER),
    Shape("log_softmax", (512, 512), "float64"),
    Shape("log_softmax", (8192, 4096), modes=_OF_LOG_SOFTMAX),
    Shape("log_softmax", (2048, 128256), modes=_OF_LOG_SOFTMAX),
    Shape("log_softmax", (16, 5000, 96), "float32", dim=1),
    Shape("batch_norm", (64, 256, 56, 56), modes=_OF_CHANNELS),
    Shape("batch_norm", (64, 256, 56, 56), channels_last=True, modes=_OF_CHANNELS),
    Shape("batch_norm", (64, 256, 56, 56), "float32", modes=("hvp", "all_results")),
    Shape("batch_norm", (8192, 1000), "float32"),
    Shape("batch_norm", (32, 64, 16, 16), "float64"),
    # Channels, or positions of a channel, that are loaded one by one.
    Shape("batch_norm", (64, 1001, 14, 14), channels_last=True, modes=_OF_TRAINING),
    Shape("batch_norm", (64, 1001, 14, 14), "float32", channels_last=True, modes=_OF_TRAINING),
    Shape("batch_norm", (64, 2048, 7, 7), modes=("hvp",)),
    Shape("batch_norm", (64, 2048, 7, 7), "float32", modes=_OF_TRAINING),
    Shape("attention", (8, 12, 1024, 64), causal=True, modes=("all_results",)),
    Shape("attention", (2, 32, 4096, 128), key_heads=8, causal=True, modes=("all_results",)),
    Shape("attention", (8, 12, 1024, 64), masked=True, modes=_OF_MASKS),
    Shape("attention", (8, 12, 1024, 64), "float32", modes=_OF_MASKS),
    Shape("dropout", (8192, 4096), modes=("batched",)),
    Shape("dropout", (512, 512), "float64", modes=("forward",)),
)


def shapes() -> Iterator[Shape]:
    """The suite's shapes, then the others."""
    names = [field.name for field in fields(Shape) if field.name != "masked"]
    for w in GPU_WORKLOADS:
        yield Shape(**{name: getattr(w, name) for name in names})
    yield from OTHER_SHAPES


def cases() -> Iterator[tuple[str, Shape, Callable[[], object]]]:
    """Name, shape and launch of every case; launching allocates tensors that are never touched."""
    for shape in shapes():
        for mode in shape.modes:
            yield f"{shape} {mode}", shape, partial(launch_mode, shape, mode)


def launch_mode(shape: Shape, mode: str) -> None:
    """Call the launchers of one mode of an op, as the rules of the op do."""
    # Nobody touches its memory, which a change of its format would.
    memory_format = torch.channels_last if shape.channels_last else torch.contiguous_format
    x = torch.empty(shape.shape, dtype=shape.torch_dtype, memory_format=memory_format)
    (_launch_evaluation if mode == "evaluation" else _LAUNCH[shape.op])(shape, mode, x)


# What the pairing of a norm is asked for in each mode, each as `(with tangents of the parameters, wanted)`. Where the
# loss follows at once, y_bar depends on nothing.
_OF_BACKWARD = (True, True, True, False, False, False)
_PAIRINGS = {
    "double_backward": [(False, _OF_BACKWARD)],
    "gradient_backward": [(True, _OF_BACKWARD), (True, (False, *_OF_BACKWARD[1:]))],
    "backward_of_jvp": [(True, (False, *ALL_RESULTS[1:]))],
    "all_results": [(True, ALL_RESULTS)],
}
# Of log-softmax, which has no parameters, derivatives of y_bar, y and the tangent of x.
_LOG_SOFTMAX_PAIRINGS = {
    "double_backward": (True, True, False),
    "backward_of_jvp": (False, True, True),
    "gradient_backward": (False, True, False),
}


def _launch_norm(shape: Shape, mode: str, x: Tensor) -> None:  # noqa: C901 - one branch for each mode
    """Layer norm, or batch norm in training: their launchers differ in the axes that they are told of."""
    is_rows = shape.op == "layer_norm"
    first, second = (layer_norm, layer_norm_second_order) if is_rows else (batch_norm, batch_norm_second_order)
    prefix = "layer_norm" if is_rows else "batch_norm_train"
    bwd, jvp = getattr(first, f"{prefix}_bwd"), getattr(first, f"{prefix}_jvp")
    pairing, bwd_jvp = getattr(second, f"{shape.op}_pairing"), getattr(second, f"{shape.op}_bwd_jvp")
    weight = torch.empty(x.shape[-1 if is_rows else 1], dtype=shape.param_dtype) if shape.affine else None
    stat = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32)) if is_rows else weight
    operands, axes, params = (x, x, weight, stat, stat), (1, 0) if is_rows else (0,), (weight is not None,) * 2
    if mode == "forward":
        if is_rows:
            layer_norm.layer_norm_fwd(x, weight, weight, 1, 0, EPS)
        for running in () if is_rows else (None, weight):
            batch_norm.batch_norm_train_fwd(x, weight, weight, running, running, 0, MOMENTUM, EPS)
    elif mode == "backward":
        bwd(*operands, *axes, (True, *params))
    elif mode == "jvp":
        jvp(*operands[1:], x, weight, weight, *axes)
    elif mode == "hvp":
        # The loss of the suite is linear in y; of any other, y_bar has a tangent too.
        for y_bar_dot in (None, x):
            bwd_jvp(*operands, y_bar_dot, x, weight, *axes, (True, *params))
    elif mode == "x_only":
        bwd(*operands, *axes, (True, False, False))
        if is_rows:
            pairing(*operands, x, None, None, *axes, (True, True, *(False,) * 4))
        bwd_jvp(*operands, x if is_rows else None, x, None, *axes, (True, False, False))
    else:
        for with_param_dots, wanted in _PAIRINGS[mode]:
            param_dot = weight if with_param_dots else None
            # Without parameters nobody asks for their cotangents: the third, the fifth and the last.
            results = tuple(want and (shape.affine or number in {0, 1, 3}) for number, want in enumerate(wanted))
            pairing(*operands, x, param_dot, param_dot, *axes, results)


def _launch_log_softmax(shape: Shape, mode: str, x: Tensor) -> None:
    dim = shape.dim % x.dim()
    if mode == "forward":
        log_softmax.log_softmax_fwd(x, dim, None)
    elif mode == "backward":
        log_softmax.log_softmax_bwd(x, x, dim, x.dtype)
    elif mode == "jvp":
        log_softmax.log_softmax_jvp(x, x, dim)
    elif mode == "hvp":
        for y_bar_dot in (None, x):
            log_softmax_second_order.log_softmax_bwd_jvp(x, x, y_bar_dot, x, dim, x.dtype)
    else:
        wanted = _LOG_SOFTMAX_PAIRINGS.get(mode, (True, True, True))
        log_softmax_second_order.log_softmax_pairing(x, x, x, dim, wanted)


def _launch_evaluation(shape: Shape, mode: str, x: Tensor) -> None:
    """Of batch norm; only the mode `"evaluation"` differentiates the running statistics."""
    weight = torch.empty(x.shape[1], dtype=shape.param_dtype)
    operands, has_all = (x, weight, weight, weight), mode == "evaluation"
    dot = weight if has_all else None
    if has_all or mode == "forward":
        batch_norm.batch_norm_eval_fwd(x, weight, *operands[1:], 0, EPS)
    if has_all or mode == "backward":
        batch_norm.batch_norm_eval_bwd(x, *operands, 0, EPS, (True, True, True, has_all, has_all))
    if has_all or mode == "jvp":
        batch_norm.batch_norm_eval_jvp(*operands, x, weight, weight, dot, dot, 0, EPS)


# Derivatives of o_bar, lse_bar, then of q, k, v and bias and of their tangents; a bias has none where it is broadcast.
_OF_PRIMALS, _OF_NONE = (True, True, True, False), (False,) * 4
_ATTENTION_PAIRINGS = {
    "hvp": (False, False, *_OF_PRIMALS, *_OF_NONE),
    "double_backward": (True, False, *_OF_PRIMALS, *_OF_NONE),
    "backward_of_jvp": (False, False, *_OF_PRIMALS, *_OF_PRIMALS),
    "all_results": (False, False, *_OF_PRIMALS, *_OF_PRIMALS),
}


def _launch_attention(shape: Shape, mode: str, x: Tensor) -> None:
    batch, heads, tokens, width = shape.shape
    # The heads of a token lie side by side.
    q, k = (x.new_empty(batch, tokens, count, width).transpose(1, 2) for count in (heads, shape.key_heads or heads))
    bias, mask, seed = None, None, None
    if shape.masked:
        bias = x.new_empty(1, heads, tokens, tokens)
        mask = torch.empty(batch, 1, tokens, tokens, dtype=torch.bool)
        seed = torch.empty((), dtype=torch.int64)
    dropout_p = DROPOUT_P if shape.masked else 0.0
    primals, dots = (q, k, k, bias), (q, k, k, bias)
    results = (q, x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32)))
    options = (mask, seed, seed, width**-0.5, shape.causal, dropout_p)
    if mode == "forward":
        attention.attention_fwd(*primals, *options)
    elif mode == "backward":
        attention.attention_bwd(q, None, *primals, *results, *options, _OF_PRIMALS)
    elif mode == "jvp":
        attention.attention_jvp(*primals, *results, *dots, *options)
    else:
        # Where the jvp of the forward is at hand, so is o_dot. Where the loss follows at once, o_bar does not move.
        given = (None, None) if mode == "double_backward" else results
        moves = {"hvp": (None, q), "all_results": (q,)}.get(mode, (None,))
        for o_bar_dot in moves:
            bars = (q, None, o_bar_dot, None)
            args: Any = (*bars, *primals, *results, *dots, *given, *options, _ATTENTION_PAIRINGS[mode])
            attention.attention_pairing(*args)


def _launch_dropout(shape: Shape, mode: str, x: Tensor) -> None:
    # It is linear: each of its derivatives is itself.
    batch_ndim = int(mode == "batched")
    seed = torch.empty(x.shape[:batch_ndim], dtype=torch.int64)
    dropout.dropout_fwd(x, seed, None, DROPOUT_P, batch_ndim)
    if mode == "batched":
        philox.philox_words(seed, seed, x.shape[1:])


_LAUNCH = {
    "layer_norm": _launch_norm,
    "log_softmax": _launch_log_softmax,
    "batch_norm": _launch_norm,
    "batch_norm_eval": _launch_evaluation,
    "attention": _launch_attention,
    "dropout": _launch_dropout,
}
