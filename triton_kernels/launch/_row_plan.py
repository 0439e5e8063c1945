"""What plans of kernels over rows have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowPlan:
    """Tile of a kernel whose programs own rows; `looped` means that a row is swept tile by tile.

    `col_splits` programs share a row that is swept: each has as many adjacent tiles as the others, and the last one
    what remains.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    looped: bool
    col_splits: int = 1

    def options(self) -> dict[str, int]:
        """What Triton is told besides the arguments of the kernel."""
        return {"num_warps": self.num_warps}
