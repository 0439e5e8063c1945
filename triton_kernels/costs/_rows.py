"""What the cost functions over rows share: geometry of the rows, parameters, and the partial rows of sums over rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from triton_kernels import launch
from triton_kernels._row_view import segment_cut
from triton_kernels._runtime import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from triton_kernels._cost import Account


class Rows(NamedTuple):
    """Layer norm's rows: `num_segments` times `num_rows` of `num_cols`, and `num_groups` sets of parameters."""

    num_segments: int
    num_rows: int
    num_cols: int
    num_groups: int
    itemsize: int
    stat_itemsize: int

    @property
    def all_rows(self) -> int:
        """Rows of all segments."""
        return self.num_segments * self.num_rows

    @property
    def group_segments(self) -> int:
        """Segments that share parameters."""
        return self.num_segments // self.num_groups

    @property
    def stat_bytes(self) -> int:
        """Bytes of one statistic of every row."""
        return self.all_rows * self.stat_itemsize


def rows_of(
    tensors: Sequence[Tensor | None],
    norm_ndim: int,
    batch_ndim: int,
    *,
    segmented: bool,
    max_segments: int | None = None,
) -> Rows:
    """Rows of tensors of one shape, None where one is absent.

    They fall into segments by group if parameters or sums differ by group (`segmented`), else as their strides ask for
    it, up to `max_segments`.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    x = present[0]
    cut = x.dim() - norm_ndim
    num_groups = math.prod(x.shape[:batch_ndim])
    by_group = segmented and num_groups > 1
    num_segments = math.prod(x.shape[: batch_ndim if by_group else segment_cut(present, cut, max_segments)])
    return Rows(
        num_segments=num_segments,
        num_rows=math.prod(x.shape[:cut]) // num_segments,
        num_cols=math.prod(x.shape[cut:]),
        num_groups=num_groups if by_group else 1,
        itemsize=x.element_size(),
        stat_itemsize=accumulation_dtype(x.dtype).itemsize,
    )


def param_itemsize(rows: Rows, weight: Tensor | None) -> int:
    """Bytes of an element of a parameter's cotangent."""
    return rows.stat_itemsize if weight is None else weight.element_size()


def load_params(account: Account, rows: Rows, block_rows: int, passes: int, **params: Tensor | None) -> None:
    """Count parameters that every program with a block of rows loads, or every row where they differ by segment."""
    loads = rows.all_rows // rows.num_groups if rows.num_segments > 1 else launch.cdiv(rows.all_rows, block_rows)
    account.load_shared(passes * loads, **params)


def launch_sweeps(
    account: Account, num_rows: int, col_splits: int, num_slots: int, itemsize: int, swept: int, block_rows: int = 1
) -> None:
    """Count the launches of a kernel that owns whole rows, and the partial results of rows that programs share.

    Args:
        account: Where to count.
        num_rows: Rows.
        col_splits: Programs that share a row.
        num_slots: Partial results of a program; none where no row has to be swept for sums before it is written.
        itemsize: Bytes of a partial result.
        swept: Bytes of what was counted as loads that are second reads.
        block_rows: Rows of a program.
    """
    account.launch()
    if col_splits > 1 and num_slots > 0:
        nbytes = num_rows * num_slots * col_splits * itemsize
        account.launch()
        account.scratch(nbytes)
        # Every program of the second launch merges the results of all that share its row.
        account.reload((col_splits - 1) * nbytes)
    account.sweep(swept, num_rows // block_rows if col_splits == 1 else 1)


def add_partial_rows(account: Account, rows: Rows, num_parts: int, num_sums: int) -> None:
    """Count partial rows of `num_sums` sums, in the accumulation dtype, and the launch that adds them up."""
    if num_sums and num_parts > rows.num_groups:
        account.scratch(num_sums * num_parts * rows.num_cols * rows.stat_itemsize)
        account.launch()
