"""The calls whose kernels are compiled: every launcher at the suite's columns and dtypes, and at some that it lacks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from perf.workloads import GPU_WORKLOADS, KERNEL_MODES
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

EPS = 1e-5
MOMENTUM = 0.1
DOUBLE_BACKWARD = (True, True, True, False, False, False)
DOUBLE_BACKWARD_OF_X = (True, True, False, False, False, False)
BACKWARD_OF_JVP = (False, True, True, True, True, True)

# Beside the suite's own modes: the vjp of a jvp, the kernels without parameter sums, and batch norm in evaluation.
ALL_MODES = (*KERNEL_MODES, "backward_of_jvp", "x_only", "evaluation")


@dataclass(frozen=True)
class Shape:
    """An op at one shape, dtype and layout, and the modes in which it is compiled."""

    op: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    dim: int = -1
    affine: bool = True
    channels_last: bool = False
    modes: tuple[str, ...] = KERNEL_MODES

    def __str__(self) -> str:
        """Op, sizes, dtype, layout."""
        sizes = "x".join(map(str, self.shape))
        return f"{self.op} {sizes} {self.dtype}{' channels_last' if self.channels_last else ''}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's object."""
        return getattr(torch, self.dtype)

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of parameters: that of the input, but at least float32 for batch norm."""
        return torch.promote_types(self.torch_dtype, torch.float32) if self.op == "batch_norm" else self.torch_dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the input."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def run(self) -> int:
        """Adjacent elements along which the tiles of a kernel run: columns, spatial positions or channels."""
        if self.op in {"layer_norm", "dropout"}:
            return self.shape[-1]
        if self.op == "log_softmax":
            inner = math.prod(self.shape[self.dim % len(self.shape) + 1 :])
            return inner if inner > 1 else self.shape[-1]
        spatial = math.prod(self.shape[2:])
        return self.shape[1] if self.channels_last or spatial == 1 else spatial


# Rows that the suite lacks: very short ones (so many that partial sums are few beside them), float64, and where the
# reduced dim is long and not the last.
OTHER_SHAPES = (
    Shape("layer_norm", (1 << 18, 24), modes=("forward", "backward", "jvp")),
    Shape("layer_norm", (512, 512), "float64"),
    Shape("layer_norm", (8192, 4096), modes=("backward_of_jvp", "x_only")),
    Shape("layer_norm", (4096, 1000), "float32", modes=("forward", "backward", "hvp", "double_backward", "x_only")),
    Shape("log_softmax", (65536, 24), modes=("forward", "backward", "jvp")),
    Shape("log_softmax", (512, 512), "float64"),
    Shape("log_softmax", (8192, 4096), modes=("backward_of_jvp", "x_only")),
    Shape("log_softmax", (16, 5000, 96), "float32", dim=1),
    Shape("batch_norm", (64, 256, 56, 56), modes=("backward_of_jvp", "x_only", "evaluation")),
    Shape("batch_norm", (64, 256, 56, 56), channels_last=True, modes=("backward_of_jvp", "x_only", "evaluation")),
    Shape("batch_norm", (8192, 1000), "float32"),
    Shape("batch_norm", (32, 64, 16, 16), "float64"),
    Shape("dropout", (8192, 4096), modes=("forward", "batched")),
    Shape("dropout", (8192, 4096), "float32", modes=("forward",)),
    Shape("dropout", (512, 512), "float64", modes=("forward",)),
)


def shapes() -> Iterator[Shape]:
    """The suite's shapes, then the others."""
    for w in GPU_WORKLOADS:
        yield Shape(w.op, w.shape, w.dtype, w.dim, w.affine, w.channels_last, w.modes)
    yield from OTHER_SHAPES


def cases() -> Iterator[tuple[str, Shape, Callable[[], object]]]:
    """Name, shape and launch of every case; launching allocates tensors that are never touched."""
    for shape in shapes():
        for mode in shape.modes:
            yield f"{shape} {mode}", shape, lambda shape=shape, mode=mode: launch_mode(shape, mode)


def launch_mode(shape: Shape, mode: str) -> None:
    """Call the launchers of one mode of an op, as the rules of the op do."""
    x = torch.empty(shape.shape, dtype=shape.torch_dtype)
    if shape.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    _LAUNCH[shape.op](shape, mode, x)


def _launch_layer_norm(shape: Shape, mode: str, x: Tensor) -> None:
    weight = torch.empty(x.shape[-1], dtype=shape.param_dtype) if shape.affine else None
    stat = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    params = (weight is not None,) * 2
    operands = (x, x, weight, stat, stat)
    if mode == "forward":
        layer_norm.layer_norm_fwd(x, weight, weight, 1, 0, EPS)
    elif mode == "backward":
        layer_norm.layer_norm_bwd(*operands, 1, 0, (True, *params))
    elif mode == "jvp":
        layer_norm.layer_norm_jvp(x, weight, stat, stat, x, weight, weight, 1, 0)
    elif mode == "hvp":
        layer_norm_second_order.layer_norm_bwd_jvp(*operands, x, x, weight, 1, 0, (True, *params))
    elif mode == "double_backward":
        wanted = DOUBLE_BACKWARD if shape.affine else DOUBLE_BACKWARD_OF_X
        layer_norm_second_order.layer_norm_pairing(*operands, x, None, None, 1, 0, wanted)
    elif mode == "backward_of_jvp":
        layer_norm_second_order.layer_norm_pairing(*operands, x, weight, weight, 1, 0, BACKWARD_OF_JVP)
    else:
        layer_norm.layer_norm_bwd(*operands, 1, 0, (True, False, False))
        layer_norm_second_order.layer_norm_pairing(*operands, x, None, None, 1, 0, DOUBLE_BACKWARD_OF_X)
        layer_norm_second_order.layer_norm_bwd_jvp(*operands, x, x, None, 1, 0, (True, False, False))


def _launch_log_softmax(shape: Shape, mode: str, x: Tensor) -> None:
    dim = shape.dim % x.dim()
    if mode == "forward":
        log_softmax.log_softmax_fwd(x, dim, None)
    elif mode == "backward":
        log_softmax.log_softmax_bwd(x, x, dim, x.dtype)
    elif mode == "jvp":
        log_softmax.log_softmax_jvp(x, x, dim)
    elif mode == "hvp":
        log_softmax_second_order.log_softmax_bwd_jvp(x, x, x, x, dim, x.dtype)
    elif mode == "double_backward":
        log_softmax_second_order.log_softmax_pairing(x, x, x, dim, (True, True, False))
    elif mode == "backward_of_jvp":
        log_softmax_second_order.log_softmax_pairing(x, x, x, dim, (False, True, True))
    else:
        log_softmax_second_order.log_softmax_pairing(x, x, x, dim, (True, True, True))
        log_softmax_second_order.log_softmax_bwd_jvp(x, x, None, x, dim, x.dtype)


def _launch_batch_norm(shape: Shape, mode: str, x: Tensor) -> None:
    weight = torch.empty(x.shape[1], dtype=shape.param_dtype)
    operands = (x, x, weight, weight, weight)
    if mode == "forward":
        batch_norm.batch_norm_train_fwd(x, weight, weight, weight, weight, 0, MOMENTUM, EPS)
    elif mode == "backward":
        batch_norm.batch_norm_train_bwd(*operands, 0, (True, True, True))
    elif mode == "jvp":
        batch_norm.batch_norm_train_jvp(x, weight, weight, weight, x, weight, weight, 0)
    elif mode == "hvp":
        batch_norm_second_order.batch_norm_bwd_jvp(*operands, x, x, weight, 0, (True, True, True))
    elif mode == "double_backward":
        batch_norm_second_order.batch_norm_pairing(*operands, x, None, None, 0, DOUBLE_BACKWARD)
    elif mode == "backward_of_jvp":
        batch_norm_second_order.batch_norm_pairing(*operands, x, weight, weight, 0, BACKWARD_OF_JVP)
    elif mode == "x_only":
        batch_norm.batch_norm_train_bwd(*operands, 0, (True, False, False))
        batch_norm_second_order.batch_norm_bwd_jvp(*operands, None, x, None, 0, (True, False, False))
    else:
        batch_norm.batch_norm_eval_fwd(x, weight, weight, weight, weight, 0, EPS)
        batch_norm.batch_norm_eval_bwd(*operands, 0, EPS, (True,) * 5)
        batch_norm.batch_norm_eval_jvp(x, weight, weight, weight, x, weight, weight, weight, weight, 0, EPS)


def _launch_dropout(shape: Shape, mode: str, x: Tensor) -> None:
    batch_ndim = int(mode == "batched")
    seed = torch.empty(x.shape[:batch_ndim], dtype=torch.int64)
    dropout.dropout_fwd(x, seed, None, 0.5, batch_ndim)
    if mode == "batched":
        philox.philox_words(seed, seed, x.shape[1:])


_LAUNCH = {
    "layer_norm": _launch_layer_norm,
    "log_softmax": _launch_log_softmax,
    "batch_norm": _launch_batch_norm,
    "dropout": _launch_dropout,
}
