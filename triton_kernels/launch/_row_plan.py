"""Common parts of plans of kernels over rows.

All plan functions of rows take

    num_segments, num_rows, num_cols    segments, rows of each, columns; a program stays within a segment
    itemsize                            bytes of an element of the widest operand
    num_operands, num_inputs            tensors of full size that are read
    num_summed, num_sums                tensors that the sums of a row take, parameters too, and how many sums
    device                              where the kernel runs
    is_aligned                          whether rows can be loaded 16 bytes at a time, as far as strides decide that
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_kernels.launch.chips import Chip

# The most that a thread of NVIDIA can have, and the least that a program of 1,024 threads leaves each.
_MAX_REGISTERS = 255
_LEAST_REGISTERS = 64


def row_options(plan: RowPlan | SumPlan, chip: Chip) -> dict[str, int]:
    """Options of a launch besides the arguments of the kernel.

    Where a plan says so, the compiler of NVIDIA gets no more registers than several programs leave it. It takes a bound
    for leave to use them all, so plans say it only where it takes more on its own, or loads one operand behind the
    other to save some. AMD's compiler has no such option, nor have graphs.
    """
    options = {"num_warps": plan.num_warps}
    if plan.resident and not chip.name.startswith("gfx"):
        threads = plan.resident * plan.num_warps * chip.warp_size
        # Registers are dealt out to whole warps in units of eight per thread.
        registers = chip.registers // threads // 8 * 8
        # A candidate of the tuner with more warps is not to be held to fewer than a kernel needs.
        if _LEAST_REGISTERS <= registers <= _MAX_REGISTERS:
            options["maxnreg"] = registers
    return options


@dataclass(frozen=True)
class RowPlan:
    """Tile of a kernel whose programs own rows; `looped` means that a row is swept tile by tile.

    `col_splits` programs share a row that is swept: each has as many adjacent tiles as the others, and the last one
    what remains. The loops over tiles have `loop_stages`. The compiler is to leave room for `resident` programs.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    looped: bool
    col_splits: int = 1
    loop_stages: int = 1
    resident: int = 0


@dataclass(frozen=True)
class SumPlan:
    """Tile, loop and partial sums of a kernel that sums over rows, `num_splits` programs over those of a segment.

    `looped` means that its programs own columns, and that whole rows are another kernel's, because a row and its sums
    do not fit in registers together. The compiler is to leave room for `resident` programs; with 0, it does so unasked.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    num_splits: int
    loop_stages: int
    looped: bool
    resident: int = 0
