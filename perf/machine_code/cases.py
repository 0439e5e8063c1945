"""The calls whose kernels are compiled: every launcher at the suite's columns and dtypes, and at some that it lacks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from perf.calls import Attention, BatchNorm, Call, LayerNorm, LogSoftmax
from perf.workloads import DROPOUT_P, EPS, GPU_WORKLOADS, KERNEL_MODES, Workload
from triton_kernels import dropout, philox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    # A mode of the operands of an op, the operands that are absent, and the wanted results.
    Step = tuple[str, Sequence[str], Sequence[bool] | None]

ALL_RESULTS = (True,) * 6

# Beside the suite's own modes: the vjp of a jvp, the kernels without parameter sums, the double backward of all
# gradients (a Hessian-vector product in reverse), the pairing with all that it can be asked for, as derivatives of
# third order do, and batch norm in evaluation with the cotangents of its statistics.
ALL_MODES = (*KERNEL_MODES, "backward_of_jvp", "x_only", "gradient_backward", "all_results", "evaluation")


# One that is of no model.
unnamed = partial(Workload, "")

_OF_CURVATURE = ("backward_of_jvp", "gradient_backward", "all_results")
_OF_CHANNELS = ("backward_of_jvp", "x_only", "gradient_backward", "all_results", "evaluation")
_OF_LOG_SOFTMAX = ("backward_of_jvp", "x_only", "gradient_backward")
_OF_TRAINING = ("forward", "backward", "hvp")
_OF_FLOAT32 = (*_OF_TRAINING, "double_backward", "x_only", "all_results")
_FIRST_ORDER = ("forward", "backward", "jvp")
_OF_MASKS = (*_FIRST_ORDER, "all_results")

# What the suite lacks: very short rows (so many that partial sums are few beside them), float64, a reduced dim that is
# long and not the last, and sizes that are a multiple of nothing.
OTHER_WORKLOADS = (
    unnamed("layer_norm", (1 << 18, 24), modes=_FIRST_ORDER),
    unnamed("layer_norm", (512, 512), "float64"),
    unnamed("layer_norm", (8192, 768), modes=("gradient_backward",)),
    unnamed("layer_norm", (16384, 1152), affine=False, modes=("gradient_backward",)),
    unnamed("layer_norm", (8192, 4096), modes=("backward_of_jvp", "x_only", "gradient_backward", "all_results")),
    unnamed("layer_norm", (4096, 1000), "float32", modes=_OF_FLOAT32),
    # The longest rows that the second order holds whole, without sums beside them, and rows that it sweeps.
    unnamed("layer_norm", (8192, 8192), modes=_OF_CURVATURE),
    unnamed("layer_norm", (512, 131072), modes=_OF_CURVATURE),
    unnamed("log_softmax", (65536, 24), modes=_FIRST_ORDER),
    unnamed("log_softmax", (512, 512), "float64"),
    unnamed("log_softmax", (8192, 4096), modes=_OF_LOG_SOFTMAX),
    unnamed("log_softmax", (2048, 128256), modes=_OF_LOG_SOFTMAX),
    unnamed("log_softmax", (16, 5000, 96), "float32", dim=1),
    unnamed("batch_norm", (64, 256, 56, 56), modes=_OF_CHANNELS),
    unnamed("batch_norm", (64, 256, 56, 56), channels_last=True, modes=_OF_CHANNELS),
    unnamed("batch_norm", (64, 256, 56, 56), "float32", modes=("hvp", "all_results")),
    unnamed("batch_norm", (8192, 1000), "float32"),
    unnamed("batch_norm", (32, 64, 16, 16), "float64"),
    # Channels, or positions of a channel, that are loaded one by one.
    unnamed("batch_norm", (64, 1001, 14, 14), channels_last=True, modes=_OF_TRAINING),
    unnamed("batch_norm", (64, 1001, 14, 14), "float32", channels_last=True, modes=_OF_TRAINING),
    unnamed("batch_norm", (64, 2048, 7, 7), modes=("hvp",)),
    unnamed("batch_norm", (64, 2048, 7, 7), "float32", modes=_OF_TRAINING),
    unnamed("attention", (8, 12, 1024, 64), causal=True, modes=("all_results",)),
    unnamed("attention", (2, 32, 4096, 128), key_heads=8, causal=True, modes=("all_results",)),
    unnamed("attention", (8, 12, 1024, 64), masked=True, modes=_OF_MASKS),
    unnamed("attention", (8, 12, 1024, 64), "float32", modes=_OF_MASKS),
    unnamed("dropout", (8192, 4096), modes=("batched",)),
    unnamed("dropout", (512, 512), "float64", modes=("forward",)),
)


def cases() -> Iterator[tuple[str, Workload, list[Call]]]:
    """Name, workload and calls of every case, the suite's first; their tensors are never touched."""
    for workload in (*GPU_WORKLOADS, *OTHER_WORKLOADS):
        for mode in workload.modes:
            yield f"{workload.case} {mode}", workload, calls_of(workload, mode)


def launch_mode(workload: Workload, mode: str) -> None:
    """Make the calls of one mode of an op."""
    for call in calls_of(workload, mode):
        call.results()


def calls_of(workload: Workload, mode: str) -> list[Call]:
    """The calls of one mode of an op, as the rules of the op make them."""
    # Nobody touches its memory, which a change of its format would.
    memory_format = torch.channels_last if workload.channels_last else torch.contiguous_format
    x = torch.empty(workload.shape, dtype=workload.torch_dtype, memory_format=memory_format)
    if workload.op == "dropout":
        return _dropout_calls(x, int(mode == "batched"))
    make = _attention if workload.op == "attention" else _rows_or_channels
    steps, operands, derived = make(workload, mode, x)
    return [operands.change(**dict.fromkeys(absent)).call(name, wanted, derived) for name, absent, wanted in steps]


def _rows_or_channels(workload: Workload, mode: str, x: Tensor) -> tuple[list[Step], Any, dict[str, Any]]:
    """Steps of a mode, operands, and what is derived from them: all tensors of a size are one."""
    if workload.op == "log_softmax":
        operands = LogSoftmax(x, x, x, x, x, x, dim=workload.dim % x.dim())
        return _log_softmax_steps(mode), operands, {"x_dtype": x.dtype}
    is_rows = workload.op == "layer_norm"
    weight = torch.empty(x.shape[-1 if is_rows else 1], dtype=workload.param_dtype) if workload.affine else None
    statistics = x.shape[:-1] if is_rows else x.shape[1:2]
    stat = x.new_empty(statistics, dtype=torch.promote_types(x.dtype, torch.float32))
    params: Any = [weight] * (4 if is_rows else 8)
    operands = (LayerNorm if is_rows else BatchNorm)(x, x, x, x, *params)
    is_evaluation = workload.op == "batch_norm_eval" or mode == "evaluation"
    steps = _evaluation_steps(mode) if is_evaluation else _norm_steps(mode, is_rows, workload.affine)
    return steps, operands, {"mean": stat, "rstd": stat, "eps": EPS}


# What the pairing of a norm is asked for in each mode, each as `(absent tangents, wanted)`. Where the loss follows at
# once, y_bar depends on nothing.
_PARAM_DOTS = ("weight_dot", "bias_dot")
_OF_BACKWARD = (True, True, True, False, False, False)
_PAIRINGS = {
    "double_backward": [(_PARAM_DOTS, _OF_BACKWARD)],
    "gradient_backward": [((), _OF_BACKWARD), ((), (False, *_OF_BACKWARD[1:]))],
    "backward_of_jvp": [((), (False, *ALL_RESULTS[1:]))],
    "all_results": [((), ALL_RESULTS)],
}


def _norm_steps(mode: str, is_rows: bool, affine: bool) -> list[Step]:
    """Layer norm, or batch norm in training."""
    prefix, first = "" if is_rows else "train_", (True, affine, affine)
    fwd, fwd_jvp = (
        [(f"{prefix}{name}", absent, None) for absent in ([()] if is_rows else [_RUNNING, ()])]
        for name in ("fwd", "fwd_jvp")
    )
    steps: dict[str, Sequence[Step]] = {
        "forward": fwd,
        "backward": [(f"{prefix}bwd", (), first)],
        # With the value where forward mode is outermost, without it elsewhere.
        "jvp": [*fwd_jvp, (f"{prefix}jvp", (), None)],
        # The loss of the suite is linear in y; of any other, y_bar has a tangent too.
        "hvp": [("bwd_jvp", absent, first) for absent in (("y_bar_dot",), ())],
        "x_only": [
            (f"{prefix}bwd", (), (True, False, False)),
            *[("pairing", _PARAM_DOTS, (True, True, *(False,) * 4))] * is_rows,
            ("bwd_jvp", ("weight_dot", *["y_bar_dot"] * (not is_rows)), (True, False, False)),
        ],
    }
    if mode in steps:
        return [*steps[mode]]
    # Without parameters nobody asks for their cotangents: the third, the fifth and the last.
    return [
        ("pairing", absent, [want and (affine or number in {0, 1, 3}) for number, want in enumerate(wanted)])
        for absent, wanted in _PAIRINGS[mode]
    ]


_RUNNING = ("running_mean", "running_var")


def _evaluation_steps(mode: str) -> list[Step]:
    """Of batch norm; only the mode `"evaluation"` differentiates the running statistics."""
    has_all = mode == "evaluation"
    absent = () if has_all else tuple(f"{name}_dot" for name in _RUNNING)
    steps: dict[str, Step] = {
        "forward": ("eval_fwd", (), None),
        "backward": ("eval_bwd", (), (True, True, True, has_all, has_all)),
        "jvp": ("eval_jvp", absent, None),
    }
    return list(steps.values()) if has_all else [steps[mode]]


def _log_softmax_steps(mode: str) -> list[Step]:
    """It has no parameters: the pairing has derivatives of y_bar, y and the tangent of x."""
    first = {"forward": ["fwd"], "backward": ["bwd"], "jvp": ["fwd_jvp", "jvp"]}
    if mode in first:
        return [(name, (), None) for name in first[mode]]
    if mode == "hvp":
        return [("bwd_jvp", absent, None) for absent in (("y_bar_dot",), ())]
    wanted = {"backward_of_jvp": (False, True, True), "gradient_backward": (False, True, False)}
    return [("pairing", (), {"double_backward": (True, True, False), **wanted}.get(mode, (True, True, True)))]


# Derivatives of o_bar, lse_bar, then of q, k, v and bias and of their tangents; a bias has none where it is broadcast.
_OF_PRIMALS, _OF_NONE = (True, True, True, False), (False,) * 4
_ATTENTION_PAIRINGS = {
    "hvp": (False, False, *_OF_PRIMALS, *_OF_NONE),
    "double_backward": (True, False, *_OF_PRIMALS, *_OF_NONE),
    "backward_of_jvp": (False, False, *_OF_PRIMALS, *_OF_PRIMALS),
    "all_results": (False, False, *_OF_PRIMALS, *_OF_PRIMALS),
}


def _attention(workload: Workload, mode: str, x: Tensor) -> tuple[list[Step], Attention, dict[str, Any]]:
    batch, heads, tokens, width = workload.shape
    # The heads of a token lie side by side.
    q, k = (x.new_empty(batch, tokens, count, width).transpose(1, 2) for count in (heads, workload.key_heads or heads))
    lse = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    options: dict[str, Any] = {"scale": width**-0.5, "causal": workload.causal}
    if workload.masked:
        bias, seed = x.new_empty(1, heads, tokens, tokens), torch.empty((), dtype=torch.int64)
        mask = torch.empty(batch, 1, tokens, tokens, dtype=torch.bool)
        options |= {"bias": bias, "bias_dot": bias, "mask": mask, "seed": seed, "offset": seed, "dropout_p": DROPOUT_P}
    operands = Attention(q, k, k, q, q, q, k, k, None, None, o_dot=q, lse_dot=lse, **options)
    steps: dict[str, list[Step]] = {
        "forward": [("fwd", (), None)],
        "backward": [("bwd", (), _OF_PRIMALS)],
        "jvp": [("jvp", (), None)],
    }
    if mode not in steps:
        # Where the jvp of the forward is at hand, so is o_dot. Where the loss follows at once, o_bar does not move.
        given = ("o_dot", "lse_dot") if mode == "double_backward" else ()
        moves = {"hvp": (("o_bar_dot",), ()), "all_results": ((),)}.get(mode, (("o_bar_dot",),))
        steps[mode] = [("pairing", (*given, *absent), _ATTENTION_PAIRINGS[mode]) for absent in moves]
    return steps[mode], operands, {"o": q, "lse": lse}


def _dropout_calls(x: Tensor, batch_ndim: int) -> list[Call]:
    """It is linear: each of its derivatives is itself."""
    seed = torch.empty(x.shape[:batch_ndim], dtype=torch.int64)
    calls = [Call(dropout.dropout_fwd, (x, seed, None, DROPOUT_P, batch_ndim))]
    return [*calls, Call(philox.philox_words, (seed, seed, x.shape[1:]))] if batch_ndim else calls
