"""Bytes that the kernels of attention move, and the products of matrices that they take of each tile of pairs.

A program owns a block of rows, or of keys, which it reads once, and sweeps the other side of its pairs tile by tile.
Bytes that further programs sweep again are `bytes_reread`: they come from the caches of a GPU. Of bias and mask each
sweep reads every pair that it visits, those of a causal problem that no row of a tile sees left out.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from triton_kernels._cost import own_bytes
from triton_kernels.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triton_kernels._cost import Account, Tensors

# The products of matrices of a tile in each kernel: both factors, and what alone takes the product. A product is there
# if all of these are: p and r everywhere, p_dot and s_dot, which are those of P and S, where the scores move, and s_dot
# and t where a result that takes them is wanted.
_OF_PAIRS = (
    *(("q", "k"), ("o_bar", "v"), ("o_bar", "v_dot", "t"), ("o_bar_dot", "v", "t")),
    *(("q_dot", "k", "s_dot"), ("q", "k_dot", "s_dot")),
)
PRODUCTS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "fwd": (("q", "k"), ("p", "v")),
    "jvp": (("q", "k"), ("q_dot", "k"), ("q", "k_dot"), ("p_dot", "v"), ("p", "v_dot")),
    "rows": (*_OF_PAIRS, ("t", "k", "q_bar"), ("r", "k_dot", "q_bar"), ("r", "k", "q_dot_bar")),
    "keys": (
        *_OF_PAIRS,
        *(("t", "q", "k_bar"), ("r", "q_dot", "k_bar"), ("r", "q", "k_dot_bar")),
        *(("p_dot", "o_bar", "v_bar"), ("p", "o_bar_dot", "v_bar"), ("p", "o_bar", "v_dot_bar")),
    ),
}
_MOVING = {"q_dot", "k_dot", "bias_dot"}
_VALUES = {"v", "v_dot", "o_bar", "o_bar_dot"}
_OF_SWEEP = ("q", "q_dot", "lse", "lse_dot")
_ROWS = (*_OF_SWEEP, "o", "o_dot", "o_bar", "lse_bar", "o_bar_dot", "lse_bar_dot", "g", "w")
_KEYS, _PAIRS = ("k", "k_dot", "v", "v_dot"), ("bias", "bias_dot", "mask")
_OF_ROWS = ("q_bar", "bias_bar", "q_dot_bar", "bias_dot_bar")
# The results of each kernel.
_MADE: Mapping[str, Sequence[str]] = {
    "fwd": ("o", "lse"),
    "jvp": ("o_dot", "lse_dot"),
    "rows": (*_OF_ROWS, "g", "w"),
    "keys": ("k_bar", "v_bar", "k_dot_bar", "v_dot_bar"),
}


class Tiles(NamedTuple):
    """The tiles that the programs of one head visit.

    Attributes:
        programs: Programs.
        tiles: Tiles of pairs.
        swept: Rows or keys that are swept, each as often as a program does.
        pairs: Pairs of all tiles, without those past the end of rows and keys.
        end: The end of the keys that are visited.
    """

    programs: int
    tiles: int
    swept: int
    pairs: int
    end: int


def tiles_of_rows(num_rows: int, num_keys: int, block_rows: int, block_keys: int, causal: bool) -> Tiles:
    """Tiles of programs that own rows and sweep keys, of a causal problem up to their last row."""
    starts = range(0, num_rows, block_rows)
    ends = [min(num_keys, start + block_rows) if causal else num_keys for start in starts]
    tiles = [cdiv(end, block_keys) for end in ends]
    swept = [min(num_keys, count * block_keys) for count in tiles]
    pairs = sum(min(block_rows, num_rows - start) * keys for start, keys in zip(starts, swept, strict=True))
    return Tiles(len(starts), sum(tiles), sum(swept), pairs, max(swept))


def tiles_of_keys(num_rows: int, num_keys: int, block_rows: int, block_keys: int, causal: bool) -> Tiles:
    """Tiles of programs that own keys and sweep rows, of a causal problem from their first key on."""
    firsts = range(0, num_keys, block_keys)
    swept = [max(num_rows - (first // block_rows * block_rows if causal else 0), 0) for first in firsts]
    widths = [min(block_keys, num_keys - first) for first in firsts]
    pairs = [rows * keys for rows, keys in zip(swept, widths, strict=True)]
    end = max(first + keys for first, keys, rows in zip(firsts, widths, swept, strict=True) if rows)
    return Tiles(len(firsts), sum(cdiv(rows, block_rows) for rows in swept), sum(swept), sum(pairs), end)


def _count(kernel: str, account: Account, named: Mapping[str, Any], grid: tuple[int, ...], tensors: Tensors) -> None:
    """Each operand once if programs own it, else as often as they sweep it; the results; and products of matrices."""
    there = {name: value for name, value in named.items() if value is not None}
    q, blocks, by_keys = there["q"], (there["BLOCK_ROWS"], there["BLOCK_KEYS"]), kernel == "keys"
    heads = math.prod(q.shape[:-2])
    sizes = (there["num_rows"], there["num_keys"])
    tiles = (tiles_of_keys if by_keys else tiles_of_rows)(*sizes, *blocks, there["CAUSAL"])
    does_sweep = kernel != "rows" or not there.keys().isdisjoint(_OF_ROWS)
    # P and R are everywhere, T and S_dot where results take them.
    present = {"p", "r", *there, *["t"] * (("k_bar" if by_keys else "w") in there)}
    moves = not present.isdisjoint(_MOVING) and (kernel == "jvp" or not present.isdisjoint(("t", "v_bar")))
    present |= {"s_dot", "p_dot"} if moves else set()

    owned, swept = (_KEYS, _ROWS) if by_keys else (_ROWS, _KEYS)
    for name in (*owned, *swept):
        x = there.get(name)
        if x is None or name in _MADE[kernel] or (name in (*_OF_SWEEP, *_KEYS) and not does_sweep):
            continue
        if name == "lse_dot" and by_keys and not moves:
            continue
        x = x if x.dim() == q.dim() else x.unsqueeze(-1)
        loaded = x.nbytes if name in owned else heads * tiles.swept * x.shape[-1] * x.element_size()
        own = own_bytes(x[..., : tiles.end, :] if name in _KEYS and not by_keys else x)
        account.load_tiles(None if id(there[name]) in tensors.made else name, own, loaded)
    for name in _PAIRS if does_sweep else ():
        if (x := there.get(name)) is not None:
            # One number may be that of several rows or keys.
            all_rows, all_keys = x.stride(-2) == 0, x.stride(-1) == 0
            own = 1 if all_rows and all_keys else tiles.end if all_rows else sizes[0] if all_keys else tiles.pairs
            account.load_tiles(name, own * own_bytes(x[..., 0, 0]), heads * tiles.pairs * x.element_size())
    # Programs that own keys may go through several heads, and read the numbers of each at every tile.
    times = heads * (tiles.tiles if by_keys else tiles.programs)
    for name in ("seed", "offset") if does_sweep else ():
        x = there.get(name)
        account.load_often(name, x, 0 if x is None else times * x.element_size())
    for name in _MADE[kernel]:
        if (x := there.get(name)) is not None:
            (account.store if id(x) in tensors.returned else account.write)(x.nbytes)
            tensors.made.add(id(x))

    products = [product for product in PRODUCTS[kernel] if does_sweep and present.issuperset(product)]
    widths = [there["BLOCK_VALUE_WIDTH" if second in _VALUES else "BLOCK_WIDTH"] for _, second, *_ in products]
    num_tiles = heads * tiles.tiles
    account.multiply(len(products), num_tiles, 2 * num_tiles * math.prod(blocks) * sum(widths))


COUNTS = {f"attention_{kernel}_kernel": functools.partial(_count, kernel) for kernel in _MADE}
