"""Common parts of all plans: arithmetic of blocks, threads for a tile, and how many values fit in registers."""

from __future__ import annotations

from .chips import Chip, limits_of

# Triton refuses tensors of more elements than this per block.
MAX_BLOCK_ELEMENTS = 1 << 20
# One cache line; a tile narrower than this along adjacent channels wastes memory bandwidth.
CACHE_LINE_BYTES = 128
# The widest access of a thread: 16 elements or fewer. Triton knows whether an integer argument is a multiple of 16,
# and nothing finer.
ACCESS_BYTES = MAX_ALIGN = 16
# Memory is read in sectors of this many bytes; shorter runs waste bandwidth.
SECTOR_BYTES = 32
# Words of a block of Philox numbers.
PHILOX_WORDS = 4
# Products of matrices have at least this many rows, columns and terms.
MIN_MATMUL = 16
# Partial sums of one channel are merged by one program that holds all of them at once.
MAX_CHANNEL_SPLITS = 1024
# Rows that one tile takes at most: more would serialize the row reductions of very short rows.
MAX_TILE_ROWS = 32


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n` (1 for `n <= 1`)."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """Quotient `a / b` rounded up."""
    return -(-a // b)


def row_warps(num_values: int, max_threads: int, chip: Chip) -> int:
    """Warps that share a tile of `num_values` values."""
    # 16 values per thread: 16 bytes per load and two loads in flight for 2-byte elements, and registers to spare.
    threads = min(max(num_values // 16, chip.warp_size), max_threads)
    return threads // chip.warp_size


def register_values(limit: int, itemsize: int, chip: Chip) -> int:
    """The part of `limit` float32 values that fits in registers where arithmetic is in a dtype of `itemsize` bytes."""
    return max(limit // limits_of(chip).double_divisor, 1) if itemsize == 8 else limit


def tile_rows(num_values: int, block_cols: int, num_rows: int, most: int = MAX_TILE_ROWS) -> int:
    """Rows of a tile of about `num_values` values."""
    return min(max(num_values // block_cols, 1), most, next_power_of_2(num_rows))


def row_splits(num_rows: int, num_cols: int, block_cols: int, chip: Chip) -> int:
    """Programs that share each of `num_rows` rows which are swept by tiles of `block_cols` columns.

    Every split has the same whole number of tiles, apart from the last one, which may have fewer but never none.
    """
    limits = limits_of(chip)
    num_tiles = cdiv(num_cols, block_cols)
    if num_rows >= limits.min_row_programs * chip.num_processors:
        return 1
    wanted = cdiv(limits.split_row_programs * chip.num_processors, num_rows)
    tiles_per_split = cdiv(num_tiles, min(wanted, num_tiles, limits.max_row_splits))
    return cdiv(num_tiles, tiles_per_split)


def block_row_splits(num_splits: int, chip: Chip) -> int:
    """Power of two that holds the partial results of a row from `num_splits` programs, one from each."""
    # As large for every number of splits: it follows the number of rows, and a new one should compile nothing.
    return next_power_of_2(max(num_splits, limits_of(chip).max_row_splits))
