"""Operands and calls that only the tests of the kernels need: strided, copied, under other plans."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from perf.calls import Call, random
from perf.ops._row_maps import RowMapOperands
from perf.ops.add_layer_norm import AddLayerNorm
from perf.ops.attention import Attention
from perf.ops.batch_norm import BatchNorm
from perf.ops.batch_norm_relu import BatchNormRelu
from perf.ops.cross_entropy import CrossEntropy
from perf.ops.layer_norm import LayerNorm
from primitives.kernels.dropout import dropout, philox
from primitives.kernels.runtime.kernel import INTERPRETED, intercept
from primitives.kernels.softmax import log_softmax

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def channels_last(x: Tensor) -> Tensor:
    """The same, with its channels next to each other."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


class Launched(NamedTuple):
    """One launch: a `Kernel`, its grid, its arguments by position, and its constants and options."""

    kernel: Any
    grid: Any
    args: tuple
    constants: dict[str, Any]

    @property
    def named(self) -> dict[str, Any]:
        """Arguments, constants and options by name."""
        return {**dict(zip(self.kernel.argument_names, self.args, strict=False)), **self.constants}


def launched_by(run: Callable[[], object], watch: Callable[..., Any] = intercept) -> list[Launched]:
    """The launches of `run`: without launching it, or besides with `observe`."""
    found: list[Launched] = []
    with watch(lambda *launch: found.append(Launched(*launch))):
        run()
    return found


def need_memory(num_bytes: int) -> None:
    """Skip the test on a GPU that has less left, and on the emulator, which copies storages: there all pages exist."""
    if not INTERPRETED and torch.get_default_device().type == "cpu":
        pytest.skip("the emulator copies storages: it would need all of their gigabytes")
    if torch.get_default_device().type == "cuda":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < num_bytes:
            pytest.skip(f"needs another {num_bytes >> 30} GiB of the GPU's memory")


def far_apart(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`values` in memory of that many elements between them, of which only the pages that are used exist."""
    span = sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True)) + 1
    need_memory(span * values.element_size())
    # Pages that nothing touches take no memory, and storage that is made so is not filled.
    storage = torch.UntypedStorage(span * values.element_size(), device=torch.get_default_device())
    return torch.empty(0, dtype=values.dtype).set_(storage, 0, values.shape, strides).copy_(values)


def short_rows(num_cols: int, max_splits: int) -> dict[str, int]:
    """Limits with which rows of more than `num_cols` columns take the plans of rows that do not fit in registers."""
    names = ("two_row_cols", "accumulated_cols", "sweep_cols", "second_cols", "second_summed_cols", "second_sweep_cols")
    limits = {f"layer_norm_{name}": num_cols for name in names} | {"layer_norm_second_long_tiles": 0}
    names = ("row_cols", "three_row_cols", "sweep_cols", "second_sweep_cols")
    limits |= {f"log_softmax_{name}": num_cols for name in names} | {"log_softmax_two_row_bytes": num_cols * 2}
    tiles = {"log_softmax_tile": 4 * num_cols, "log_softmax_two_tile": 4 * num_cols, "layer_norm_param_cols": num_cols}
    return limits | tiles | {"layer_norm_fwd_bytes": num_cols * 2, "max_row_splits": max_splits, "double_divisor": 1}


# Plans that rows of more than 16 columns take under other limits.
ROW_PLANS = {
    "in registers": {},
    "sums apart": {f"layer_norm_{name}": 16 for name in ("second_summed_cols", "accumulated_cols", "param_cols")},
    "swept": short_rows(16, 1),
    "shared": short_rows(16, 4),
}


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


def some_calls() -> list[Call]:
    """Every launcher, in every mode that its operands have."""
    rows, added = LayerNorm.draw((9, 40)), AddLayerNorm.draw((9, 40))
    groups = (2, 2, 2, 20)
    operands = (
        *(
            rows,
            LayerNorm.draw(groups, norm_ndim=2, grouped=1),
            LayerNorm.draw(groups, norm_ndim=2, grouped=1, silu=True),
            added,
        ),
        *(kind.draw((2, 40), 1) for kind in (*RowMapOperands.__subclasses__(), CrossEntropy)),
        *(BatchNorm.draw((2, 3, 5, 5)), BatchNormRelu.draw((2, 3, 5, 5)), Attention.draw((1, 1, 3, 4), 3)),
    )
    # Every kernel of a forward: centered or not, with SiLU or a rounded x_hat.
    kinds = itertools.product((LayerNorm, AddLayerNorm), (torch.float16, torch.bfloat16), (False, True))
    forwards = [kind.draw((9, 40), dtype).change(rounded=True, centered=centered) for kind, dtype, centered in kinds]
    forwards.append(LayerNorm.draw(groups, norm_ndim=2, grouped=1, silu=True, centered=False))
    of_rms = [call for each in (rows, added) for call in each.change(centered=False).calls()]
    some_wanted = rows.call("bwd", (False, True, False)), added.call("bwd", (True, True, False, False))
    return [
        *(call for each in operands for call in each.calls()),
        *some_wanted,
        *dropout_calls(),
        *of_rms,
        *(each.call("fwd") for each in forwards),
    ]


def copying_calls(dtype: torch.dtype) -> list[Call]:
    """Calls whose operands no view fits, so that they are copied first, and dropout that drops nothing: a copy itself.

    Strides have no view where dims that a kernel merges lie apart: two normalized dims that are exchanged, positions
    of an image that is turned around, three levels of rows.
    """
    normalized = random(3, 8, 5, dtype=dtype).transpose(1, 2)
    rows = LayerNorm.draw(normalized.shape, dtype, norm_ndim=2).change(x=normalized, weight=None, bias=None)
    turned = random(2, 3, 8, 6, dtype=dtype).transpose(2, 3)
    images = BatchNorm.draw(turned.shape, dtype).change(x=turned)
    # Operands beside x have no strides of its own in the kernels.
    beside = dict.fromkeys(("y", "y_bar", "residual", "residual_dot"), turned)
    block = BatchNormRelu.draw(turned.shape, dtype).change(**beside)
    levels = random(2, 4, 3, 6, 10, dtype=dtype)[:, ::2, :, ::2].transpose(0, 2)
    seed = torch.tensor(3)
    return [
        rows.call("fwd"),
        *images.calls("train_fwd", "train_bwd", "eval_fwd"),
        images.change(y_bar=turned).call("train_bwd"),
        *block.calls("train_fwd", "train_fwd_jvp", "train_bwd", "train_jvp"),
        Call(log_softmax.log_softmax_fwd, (levels, 4, None)),
        Call(dropout.dropout_fwd, (random(3, 20, dtype=dtype), seed, None, 0.0, 0)),
        Call(dropout.dropout_fwd, (levels.as_strided((2, 2, 2, 2, 2), (64, 30, 14, 6, 2)), seed, None, 0.3, 0)),
    ]
