"""The launches that `compile_support` compiles: each op family at the shapes that reach its different plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Case = tuple[str, Callable[[], object]]

EPS = 1e-5
MOMENTUM = 0.1

# Chips on which every case is compiled; the others take the cases marked as short, which keeps the test brief.
THOROUGH_TARGETS = ("sm_90", "gfx942")

# Rows chosen to be: several to a program, one to a program with a number of columns that is not a power of two, one to
# a program with 16-byte accesses, and too long for the registers. `bool` says whether every chip compiles the case.
ROW_SHAPES = [
    ("short rows", (4096, 24), torch.bfloat16, False),
    ("odd rows", (4096, 1000), torch.float32, True),
    ("rows", (4096, 4096), torch.bfloat16, True),
    ("long rows", (512, 131072), torch.bfloat16, False),
    ("float64 rows", (512, 512), torch.float64, False),
]


def compile_cases(target: str) -> Iterator[Case]:
    """Names of cases and functions that launch them, for one target."""
    families = (
        layer_norm_cases,
        layer_norm_second_cases,
        batch_norm_cases,
        batch_norm_second_cases,
        log_softmax_cases,
        log_softmax_second_cases,
    )
    for family in families:
        for name, launch_case, everywhere in family():
            if everywhere or target in THOROUGH_TARGETS:
                yield name, launch_case


def _case_name(op: str, what: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    sizes = "x".join(map(str, shape))
    return f"{op} {what} {sizes} {str(dtype).removeprefix('torch.')}"


def layer_norm_cases() -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Layer norm over the last dim, with float32 parameters where the input is narrower."""

    def launch_case(shape: tuple[int, ...], dtype: torch.dtype) -> None:
        from triton_kernels.layer_norm import layer_norm_bwd, layer_norm_fwd, layer_norm_jvp

        x, weight = torch.empty(shape, dtype=dtype), _params(shape[-1], dtype)
        _, mean, rstd = layer_norm_fwd(x, weight, weight, 1, 0, EPS)
        layer_norm_bwd(x, x, weight, mean, rstd, 1, 0, (True, True, True))
        layer_norm_jvp(x, weight, mean, rstd, x, weight, weight, 1, 0)

    for what, shape, dtype, everywhere in ROW_SHAPES:
        name = _case_name("layer_norm", what, shape, dtype)
        yield name, lambda shape=shape, dtype=dtype: launch_case(shape, dtype), everywhere


def layer_norm_second_cases() -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Derivatives of the backward and the JVP of layer norm, with and without what the rules may leave out."""

    def launch_case(shape: tuple[int, ...], dtype: torch.dtype, full: bool) -> None:
        from triton_kernels.layer_norm_second_order import layer_norm_bwd_jvp, layer_norm_pairing

        x, weight = torch.empty(shape, dtype=dtype), _params(shape[-1], dtype)
        stat = _params(shape[0], dtype)
        operands = (x, x, weight, stat, stat)
        # What the vjp rules of the backward, with parameters and without, and of the JVP ask for. Where the sums are
        # fused, the kernels without them are the same ones with less to hold.
        for mask in ("111000", "110000", "011111") if full else ("111000", "011111"):
            wanted = tuple(want == "1" for want in mask)
            layer_norm_pairing(*operands, x, weight, weight, 1, 0, wanted)
        layer_norm_bwd_jvp(*operands, x, x, weight, 1, 0, (True, True, True))
        if full:
            layer_norm_bwd_jvp(*operands, x, x, weight, 1, 0, (True, False, False))

    # Of the last two, a row fits in the registers and its sums do not.
    shapes = [
        *((*row_shape, row_shape[0] == "long rows") for row_shape in ROW_SHAPES),
        ("rows without sums", (8192, 8192), torch.bfloat16, False, True),
        ("rows without sums", (8192, 8192), torch.float32, False, False),
    ]
    for what, shape, dtype, everywhere, full in shapes:
        name = _case_name("layer_norm_second", what, shape, dtype)
        yield name, lambda shape=shape, dtype=dtype, full=full: launch_case(shape, dtype, full), everywhere


def batch_norm_cases() -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Batch norm in training and in evaluation, for channels before, after and without spatial dims."""

    def launch_case(x: Tensor, evaluated: bool) -> None:
        from triton_kernels import batch_norm

        weight = _params(x.shape[1], x.dtype)
        _, mean, rstd, *_ = batch_norm.batch_norm_train_fwd(x, weight, weight, weight, weight, 0, MOMENTUM, EPS)
        batch_norm.batch_norm_train_bwd(x, x, weight, mean, rstd, 0, (True, True, True))
        batch_norm.batch_norm_train_jvp(x, weight, mean, rstd, x, weight, weight, 0)
        if not evaluated:
            return
        batch_norm.batch_norm_eval_fwd(x, weight, weight, weight, weight, 0, EPS)
        batch_norm.batch_norm_eval_bwd(x, x, weight, weight, weight, 0, EPS, (True,) * 5)
        batch_norm.batch_norm_eval_jvp(x, weight, weight, weight, x, weight, weight, weight, weight, 0, EPS)

    contiguous, channels_last = torch.contiguous_format, torch.channels_last
    for what, shape, dtype, memory_format, everywhere in (
        ("channels first", (64, 256, 56, 56), torch.bfloat16, contiguous, True),
        ("channels last", (64, 256, 56, 56), torch.bfloat16, channels_last, True),
        ("odd planes", (64, 512, 7, 7), torch.float32, contiguous, False),
        ("features", (8192, 1000), torch.float32, contiguous, False),
        ("float64", (32, 64, 16, 16), torch.float64, contiguous, False),
    ):
        name = _case_name("batch_norm", what, shape, dtype)

        def launch(what=what, shape=shape, dtype=dtype, memory_format=memory_format) -> None:
            # The kernels of evaluation are those of training with a variance in the place of rstd.
            evaluated = what not in {"odd planes", "features"}
            launch_case(torch.empty(shape, dtype=dtype, memory_format=memory_format), evaluated)

        yield name, launch, everywhere


def batch_norm_second_cases() -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Derivatives of the backward and the JVP of batch norm, with and without what the rules may leave out."""

    def launch_case(x: Tensor, full: bool) -> None:
        from triton_kernels.batch_norm_second_order import batch_norm_bwd_jvp, batch_norm_pairing

        weight = _params(x.shape[1], x.dtype)
        # What the vjp rules of the backward and of the JVP ask for; all six at once are asked for by none.
        for wanted in ((True, True, True, False, False, False), (False, *[True] * 5)):
            batch_norm_pairing(x, x, weight, weight, weight, x, weight, weight, 0, wanted)
        batch_norm_bwd_jvp(x, x, weight, weight, weight, x, x, weight, 0, (True, True, True))
        if full:
            batch_norm_bwd_jvp(x, x, weight, weight, weight, None, x, None, 0, (True, False, False))

    contiguous, channels_last = torch.contiguous_format, torch.channels_last
    for what, shape, dtype, memory_format, everywhere in (
        ("channels first", (64, 256, 56, 56), torch.bfloat16, contiguous, True),
        ("channels last", (64, 256, 56, 56), torch.bfloat16, channels_last, True),
        ("features", (8192, 1000), torch.float32, contiguous, False),
        ("float64", (32, 64, 16, 16), torch.float64, contiguous, False),
    ):
        name = _case_name("batch_norm_second", what, shape, dtype)

        def launch(what=what, shape=shape, dtype=dtype, memory_format=memory_format) -> None:
            launch_case(torch.empty(shape, dtype=dtype, memory_format=memory_format), what == "channels first")

        yield name, launch, everywhere


def log_softmax_cases() -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Log-softmax over the last dim, and over a dim with others inside it."""

    def launch_case(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
        from triton_kernels.log_softmax import log_softmax_bwd, log_softmax_fwd, log_softmax_jvp

        x = torch.empty(shape, dtype=dtype)
        log_softmax_fwd(x, dim, None)
        log_softmax_bwd(x, x, dim, dtype)
        log_softmax_jvp(x, x, dim)

    shapes = [(what, shape, 1, dtype, everywhere) for what, shape, dtype, everywhere in ROW_SHAPES]
    shapes += [
        ("classes of pixels", (16, 21, 128, 128), 1, torch.bfloat16, True),
        ("long columns", (16, 5000, 96), 1, torch.float32, False),
    ]
    for what, shape, dim, dtype, everywhere in shapes:
        name = _case_name("log_softmax", what, shape, dtype)
        yield name, lambda shape=shape, dim=dim, dtype=dtype: launch_case(shape, dim, dtype), everywhere


def log_softmax_second_cases() -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Derivatives of the backward and the JVP of log-softmax, with and without what the rules may leave out."""

    def launch_case(shape: tuple[int, ...], dim: int, dtype: torch.dtype, full: bool) -> None:
        from triton_kernels.log_softmax_second_order import log_softmax_bwd_jvp, log_softmax_pairing

        x = torch.empty(shape, dtype=dtype)
        # What the vjp rules of the backward and of the JVP ask for, then everything.
        for wanted in ((True, True, False), (False, True, True), (True, True, True)):
            if full or not all(wanted):
                log_softmax_pairing(x, x, x, dim, wanted)
        log_softmax_bwd_jvp(x, x, x, x, dim, dtype)
        if full:
            log_softmax_bwd_jvp(x, x, None, x, dim, dtype)

    shapes = [(what, shape, 1, dtype, everywhere) for what, shape, dtype, everywhere in ROW_SHAPES]
    shapes += [
        ("longest rows in registers", (512, 16384), 1, torch.float32, False),
        ("classes of pixels", (16, 21, 128, 128), 1, torch.bfloat16, True),
        ("long columns", (16, 5000, 96), 1, torch.float32, False),
    ]
    for what, shape, dim, dtype, everywhere in shapes:
        name = _case_name("log_softmax_second", what, shape, dtype)
        full = everywhere or what == "long rows"
        yield (
            name,
            lambda shape=shape, dim=dim, dtype=dtype, full=full: launch_case(shape, dim, dtype, full),
            everywhere,
        )


def _params(num_cols: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(num_cols, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
