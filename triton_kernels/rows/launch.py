"""Launches of the kernels over rows, each from one description.

A description names the operands of a kernel by kind. The names are those of the kernel's arguments: `<name>_ptr` of a
tensor, `<name>_segment_stride`, `<name>_row_stride` and `<name>_col_stride` of one of full size, `<name>_stride` of a
parameter. All outputs of full size share the strides `out_*_stride`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.arithmetic import ACCESS_BYTES, block_row_splits, cdiv
from ..runtime.chips import chip_of
from ..runtime.kernel import UNFUSED, Kernel
from ..runtime.numbers import TL_DTYPES
from ..runtime.views import split_scratch
from .plan import RowPlan, SumPlan, plan_param_reduce, row_options
from .sums import add_partial_rows_kernel
from .tiles import ParamLayout
from .view import RowView

# A parameter, and the distance of two segments in it.
Param = tuple[Tensor | None, int]


class Operands(NamedTuple):
    """Operands and outputs of a kernel over rows, by name; None where one is absent.

    The view has the geometry, and the operands of full size, whose `names` are in its order. Params are `[segments,
    num_cols]`, statistics and row outputs have one number per row. The dtype is that of the arithmetic. Of `seeds` a
    program reads one, and draws `noise` from it. The `layout` of the parameters has runs of `run` columns, and so many
    rows, one after another, are `groups` with numbers of their own; so many `planes` share a statistic.
    """

    view: RowView
    names: tuple[str, ...]
    params: Mapping[str, Param]
    statistics: Mapping[str, Tensor | None]
    outputs: Mapping[str, Tensor | None]
    row_outputs: Mapping[str, Tensor | None]
    dtype: torch.dtype
    device: torch.device
    seeds: Tensor | None = None
    noise: Mapping[str, int] = MappingProxyType({})
    groups: int = 1
    layout: ParamLayout = ParamLayout.PER_COLUMN
    run: int = 1
    planes: int = 1

    def arguments(self) -> dict[str, Any]:
        """Arguments of the kernel, and constants that follow from the operands alone."""
        view = self.view
        found: dict[str, Any] = {}
        for name, strides in zip((*self.names, "out"), (*view.strides, view.out_strides), strict=True):
            for axis, stride in zip(("segment", "row", "col"), strides, strict=True):
                found[f"{name}_{axis}_stride"] = stride
        full_size = dict(zip(self.names, view.tensors, strict=True))
        tensors = {**full_size, **self.statistics, **self.outputs, **self.row_outputs}
        found |= {f"{name}_ptr": tensor for name, tensor in tensors.items()}
        for name, (param, stride) in self.params.items():
            found |= {f"{name}_ptr": param, f"{name}_stride": stride}
        return found | {
            "seed_ptr": self.seeds,
            **self.noise,
            "num_rows": view.num_rows,
            "num_cols": view.num_cols,
            "DTYPE": TL_DTYPES[self.dtype],
            "AXES": sum(axis << 2 * number for number, axis in enumerate(view.axes())),
            "TWO_LEVEL": view.num_segments > 1,
            "ALIGN": view.alignment(*(stride for _, stride in self.params.values())),
            "GROUPS": self.groups,
            "LAYOUT": int(self.layout),
            "RUN": self.run,
            "PLANES": self.planes,
        }

    def given(self) -> set[str]:
        """Names of the operands of full size, and of the parameters, that are there."""
        full_size = {name for name, tensor in zip(self.names, self.view.tensors, strict=True) if tensor is not None}
        return full_size | {name for name, (param, _) in self.params.items() if param is not None}

    def only(self, names: Collection[str]) -> Operands:
        """The operands of these names, and the statistics if what was normalized, x or s, is among them."""
        tensors = zip(self.names, self.view.tensors, strict=True)
        return self._replace(
            view=self.view._replace(tensors=tuple(tensor if name in names else None for name, tensor in tensors)),
            params={name: param if name in names else (None, 0) for name, param in self.params.items()},
            statistics={name: tensor if {"x", "s"} & {*names} else None for name, tensor in self.statistics.items()},
        )

    def sizes(self) -> tuple[int, int, int]:
        """Segments, rows of each, and columns."""
        return self.view.num_segments, self.view.num_rows, self.view.num_cols

    def partial_rows(self, plan: SumPlan | None) -> tuple[int, int]:
        """How many partial rows `launch_row_sums` leaves, and their columns."""
        return 0 if plan is None else self.view.num_segments * plan.num_splits, self.view.num_cols

    def is_aligned(self, itemsize: int) -> bool:
        """Whether rows with elements of `itemsize` bytes can be loaded 16 bytes at a time."""
        return self.view.is_aligned(itemsize, *(stride for _, stride in self.params.values()))

    def num_blocks(self, block_rows: int) -> int:
        """Blocks of rows, each within a segment."""
        return self.view.num_segments * cdiv(self.view.num_rows, block_rows)


class RowSums(NamedTuple):
    """Sums that a kernel on `rows.row_op` finds of a row before it writes.

    Attributes:
        places: How many sums it has a place for.
        reads: Operands and parameters that the sums take.
        mask: Bits of the places that are taken; None for all.
        num_anchors: A sweep begins with the first tile of so many operands.
    """

    places: int = 0
    reads: Collection[str] = ()
    mask: int | None = None
    num_anchors: int = 0

    @property
    def bits(self) -> int:
        """Bits of the places that are taken."""
        return (1 << self.places) - 1 if self.mask is None else self.mask

    @property
    def num_taken(self) -> int:
        """How many of the places are taken."""
        return self.bits.bit_count()


NO_SUMS = RowSums()


def num_row_parts(operands: Operands, plan: RowPlan, sums: RowSums) -> int:
    """Partial results of `launch_rows`: none where one program has a whole row."""
    if not plan.looped or plan.col_splits == 1 or not sums.bits:
        return 0
    return operands.num_blocks(plan.block_rows) * sums.places * plan.col_splits * plan.block_rows


def _group(operands: Operands, plan: RowPlan) -> int:
    """Columns of a tile that a thread has beside each other, or minus as many that lie far apart."""
    view, chip = operands.view, chip_of(operands.device)
    sizes = [tensor.element_size() for tensor in view.tensors if tensor is not None] or [operands.dtype.itemsize]
    # Where rows lie beside each other, the narrowest operand has the most of them in one load of a thread.
    itemsize = min(sizes) if view.along_rows else sizes[0]
    at_once = ACCESS_BYTES // itemsize
    if not view.along_rows and view.is_aligned(itemsize) and view.num_cols % at_once == 0 and at_once > 1:
        return min(at_once, plan.block_cols)
    values = plan.block_rows * plan.block_cols // (plan.num_warps * chip.warp_size)
    return -max(values // (min(at_once, plan.block_rows) if view.along_rows else 1), 1)


def launch_rows(
    kernel: Kernel, operands: Operands, plan: RowPlan, sums: RowSums = NO_SUMS, writes: Collection[str] | None = None,
    parts: Tensor | None = None, picks: Collection[str] = (), **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel on `rows.row_op`: once, or twice where programs share rows whose sums they have to find first.

    `writes` are the operands that are read again to write a row that is swept, None for all; `parts` is memory for
    `num_row_parts`, None if the call has no other scratch, so that it is allocated here; of `picks`, each row's element
    in the column of its first statistic is read by itself.
    """
    writes = operands.names if writes is None else writes
    order = (*operands.names, *operands.params)
    num_parts = num_row_parts(operands, plan, sums)
    if num_parts and parts is None:
        parts = torch.empty(num_parts, dtype=operands.dtype, device=operands.device)
    values = operands.arguments() | {
        "parts_ptr": parts,
        "num_splits": plan.col_splits,
        "ROW_ALIGN": operands.view.row_alignment(),
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_COLS": plan.block_cols,
        "SUM_READS": sum(1 << number for number, name in enumerate(order) if name in sums.reads),
        "EMIT_READS": sum(1 << number for number, name in enumerate(order) if name in writes),
        "STAGES": plan.loop_stages,
        "NUM": sums.places,
        "SUM_MASK": sums.bits,
        "ANCHOR_READS": (1 << sums.num_anchors) - 1,
        "GROUP": _group(operands, plan) if plan.looped else 1,
        "PICKS": sum(1 << number for number, name in enumerate(operands.names) if name in picks),
        "BLOCK_SPLITS": block_row_splits(plan.col_splits, chip_of(operands.device)) if num_parts else 1,
        **constants,
    }
    modes = ("whole",) if not plan.looped else ("writes",) if not sums.bits else ("swept",)
    if num_parts:
        modes = ("sums", "writes")
    options = _options(operands, plan, sums)
    for mode in modes:
        _launch(kernel, operands.num_blocks(plan.block_rows) * plan.col_splits, values | {"MODE": mode}, options)


def sums_scratch(
    like: Tensor, num_parts: int, num_cols: int, totals: Sequence[Tensor | None], num_groups: int, *sizes: int
) -> tuple[list[Tensor | None] | None, list[Tensor | None]]:
    """`num_parts` partial rows of each of the totals, and flat tensors of `sizes`, out of one allocation.

    None stands for what is empty. A group of a single part needs no second sum: its partial row is the result, and
    partial rows do not occur.
    """
    is_partial = num_parts > num_groups
    sizes = (*(num_parts * num_cols * (is_partial and total is not None) for total in totals), *sizes)
    memory = split_scratch(like, *sizes) if any(sizes) else [None] * len(sizes)
    found = [part if size else None for part, size in zip(memory, sizes, strict=True)]
    return found[: len(totals)] if is_partial else None, found[len(totals) :]


def launch_row_sums(
    kernel: Kernel, operands: Operands, plan: SumPlan, totals: Mapping[str, Tensor | None],
    parts: Sequence[Tensor | None] | None, num_groups: int, sums: RowSums = NO_SUMS,
) -> None:  # fmt: skip
    """Launch a kernel on `sums.row_sums_op`, and the sum of its partial rows, which `sums_scratch` has made.

    Totals are the sums over the rows of each of `num_groups` groups of segments, by the kernel's names of them; None
    for what is not wanted.
    """
    view = operands.view
    col_blocks, num_parts = cdiv(view.num_cols, plan.block_cols), view.num_segments * plan.num_splits
    rows = [*totals.values()] if parts is None else parts
    values = operands.arguments() | {f"{name}_ptr": part for name, part in zip(totals, rows, strict=True)}
    values |= {
        "num_splits": plan.num_splits,
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_COLS": plan.block_cols,
        "STAGES": plan.loop_stages,
        "NUM": sums.places,
        "SUM_MASK": sums.bits,
        "WRITES": bool(sums.bits) or any(output is not None for output in operands.outputs.values()),
    }
    _launch(kernel, num_parts * col_blocks, values, _options(operands, plan, sums))
    if parts is not None:
        add_partial_rows(parts, [*totals.values()], num_groups, view.num_cols)


def add_partial_rows(
    parts: Sequence[Tensor | None], sums: Sequence[Tensor | None], num_groups: int, num_cols: int
) -> None:
    """Add up to three times partial rows `[num_groups * n, num_cols]` up, to `[num_groups, num_cols]` each."""
    pairs = [(part, total) for part, total in zip(parts, sums, strict=True) if part is not None]
    pairs += [(None, None)] * (3 - len(pairs))
    first = pairs[0][0]
    if first is None:
        return
    num_parts = first.numel() // num_cols // num_groups
    plan = plan_param_reduce(num_groups, num_parts, num_cols, first.element_size(), first.device)
    grid = (num_groups * cdiv(num_cols, plan.block_cols),)
    add_partial_rows_kernel[grid](
        *(part for part, _ in pairs),
        *(total for _, total in pairs),
        num_parts,
        num_cols=num_cols,
        BLOCK_PARTS=plan.block_parts,
        BLOCK_COLS=plan.block_cols,
        num_warps=plan.num_warps,
    )


def _options(operands: Operands, plan: RowPlan | SumPlan, sums: RowSums) -> Mapping[str, Any]:
    """Options of a launch: `UNFUSED` where the threads of a warp have an element each of a row whose sums are taken."""
    chip = chip_of(operands.device)
    values = plan.block_rows * plan.block_cols / (plan.num_warps * chip.warp_size)
    if operands.view.along_rows:
        # A thread has up to so many rows beside each other.
        is_spread = values <= ACCESS_BYTES
    else:
        is_spread = values <= 1 or not operands.is_aligned(operands.dtype.itemsize)
    is_spread = is_spread and plan.block_cols <= chip.warp_size
    return row_options(plan, chip) | (UNFUSED if is_spread and sums.bits else {})


def _launch(kernel: Kernel, num_programs: int, values: dict[str, Any], options: Mapping[str, Any]) -> None:
    numbers = [values[name] for name in kernel.run_time_names]
    constants = {name: values[name] for name in kernel.argument_names[len(numbers) :]}
    kernel[(num_programs,)](*numbers, **constants, **options)
