"""Costs of attention and its derivatives, and the products of matrices that they take of each tile of pairs.

A program owns a block of rows, or of keys, which it reads once, and sweeps the other side of its pairs tile by tile.
What further programs sweep again counts as `bytes_reread`: it comes from the caches of a GPU. Of bias and mask each
sweep reads every pair that it visits, those of a causal problem that no row of a tile sees left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from triton_kernels import launch
from triton_kernels._cost import Account, Cost, own_bytes
from triton_kernels._runtime import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

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
_DOTS = ("q_dot", "k_dot", "v_dot", "bias_dot")
_MOVING = {"q_dot", "k_dot", "bias_dot"}
_VALUES = {"v", "v_dot", "o_bar", "o_bar_dot"}
_KEYS, _PAIRS, _STREAM = ("k", "k_dot", "v", "v_dot"), ("bias", "bias_dot", "mask"), ("seed", "offset")


class Tiles(NamedTuple):
    """What the programs of one head visit.

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
    tiles = [launch.cdiv(end, block_keys) for end in ends]
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
    return Tiles(len(firsts), sum(launch.cdiv(rows, block_rows) for rows in swept), sum(swept), sum(pairs), end)


class _Calls:
    """Counts the kernels of one call; operands go by their names in the launchers."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout_p: float, **others: Tensor | None
    ) -> None:
        if dropout_p == 0.0 or others.get("seed") is None:
            others |= dict.fromkeys(_STREAM)
        self.account = Account()
        self.operands = {"q": q, "k": k, "v": v, **others}
        # Bytes of what one kernel of the call writes and the next one reads.
        self.made: dict[str, int] = {}
        self.lead, self.heads, self.causal = q.shape[:-2], math.prod(q.shape[:-2]), causal
        self.num_rows, self.num_keys = q.shape[-2], k.shape[-2]
        self.width, self.value_width, self.itemsize, self.device = q.shape[-1], v.shape[-1], q.element_size(), q.device
        self.o_bytes = self.heads * self.num_rows * self.value_width * self.itemsize
        self.stat_bytes = self.heads * self.num_rows * accumulation_dtype(q.dtype).itemsize
        self.is_empty = self.heads * self.num_rows * self.num_keys == 0

    def make(self, made: Mapping[str, int], wanted: bool = False) -> None:
        """Count what a kernel writes: results that are wanted, or else what only another kernel reads."""
        for name, nbytes in made.items():
            (self.account.store if wanted else self.account.write)(nbytes)
            self.made[name] = nbytes

    def kernel(
        self, kernel: str, plan_name: str, once: Sequence[str], swept: Sequence[str], there: Sequence[str] = ()
    ) -> None:
        """Count a kernel: what its programs read once, and what they sweep; `there` as in `PRODUCTS`."""
        sizes, widest = (self.num_rows, self.num_keys), max(self.width, self.value_width)
        plan = launch.plan_attention(plan_name, *sizes, widest, self.itemsize, self.device)
        blocks = (plan.block_rows, plan.block_keys)
        tiles = (tiles_of_keys if kernel == "keys" else tiles_of_rows)(*sizes, *blocks, self.causal)
        for name in once:
            self._read(name, None, None)
        for name in swept:
            if name in _PAIRS:
                self._read_pairs(name, tiles)
            else:
                self._read(name, self.heads * tiles.swept, tiles.end if name in _KEYS else None)
        for name in _STREAM if swept else ():
            if (x := self.operands.get(name)) is not None:
                self.account.load_shared(self.heads * tiles.programs / x.numel(), **{name: x})
        present = {"p", "r", *there, *(name for name, x in self.operands.items() if x is not None)}
        if not present.isdisjoint(_MOVING):
            present.add("p_dot")
        else:
            present.discard("s_dot")
        products = [product for product in PRODUCTS[kernel] if swept and present.issuperset(product)]
        widths = [self.value_width if second in _VALUES else self.width for _, second, *_ in products]
        terms = sum(max(launch.next_power_of_2(each), launch.MIN_MATMUL) for each in widths)
        num_tiles = self.heads * tiles.tiles
        self.account.multiply(len(products), num_tiles, 2 * num_tiles * math.prod(blocks) * terms)
        self.account.launch()

    def _read(self, name: str, count: int | None, end: int | None) -> None:
        """Count `count` rows of an operand, by default all of them once; only those before `end` are touched."""
        x, own = self.operands.get(name), self.made.get(name)
        if own is not None:
            row_bytes = own // (self.heads * self.num_rows)
            self.account.load_tiles(None, own, own if count is None else row_bytes * count)
        elif x is not None:
            matrices = x.unsqueeze(-1) if x.dim() == len(self.lead) + 1 else x
            row_bytes = matrices.shape[-1] * x.element_size()
            touched = matrices if end is None else matrices[..., :end, :]
            self.account.load_tiles(name, own_bytes(touched), x.nbytes if count is None else row_bytes * count)

    def _read_pairs(self, name: str, tiles: Tiles) -> None:
        """Count all pairs of the tiles, of an operand that may be one for several rows or keys."""
        x = self.operands.get(name)
        if x is None:
            return
        x = x.expand(*self.lead, self.num_rows, self.num_keys)
        all_rows, all_keys = x.stride(-2) == 0, x.stride(-1) == 0
        own = 1 if all_rows and all_keys else tiles.end if all_rows else self.num_rows if all_keys else tiles.pairs
        self.account.load_tiles(name, own * own_bytes(x[..., 0, 0]), self.heads * tiles.pairs * x.element_size())

    def jvp(self) -> None:
        """Count the kernel of the jvp."""
        self.kernel("jvp", "jvp", ("q", "q_dot", "o", "lse"), (*_KEYS, *_PAIRS), ("s_dot",))

    def sweeps(self, wanted: Mapping[str, bool]) -> None:
        """Count both sweeps, for the results that are wanted."""
        for name, want in wanted.items():
            x = self.operands.get(name.replace("_bar", "").replace("_dot", "")) if want else None
            self.account.store(0 if x is None else x.numel() * x.element_size())
        if self.is_empty or not any(wanted.values()):
            return
        there = [name for name, want in wanted.items() if want]
        has_t = any(wanted[name] for name in ("q_bar", "k_bar", "bias_bar"))
        order = "second" if has_t or wanted["v_bar"] else "first"
        own = ("o", "o_bar", "o_bar_dot", "lse_bar", *(("o_dot", "lse_bar_dot") if has_t else ()))
        scratch = {"g": self.stat_bytes, **({"w": self.stat_bytes} if has_t else {})}
        if any(wanted[name] for name in ("q_bar", "q_dot_bar", "bias_bar", "bias_dot_bar")):
            own, swept = (*own, "lse", "lse_dot", "q", "q_dot"), (*_KEYS, *_PAIRS)
        else:
            swept = ()
        self.kernel("rows", f"{order}_rows", own, swept, [*there, *(("t", "s_dot") if has_t else ())])
        self.make(scratch)
        if any(wanted[name] for name in ("k_bar", "v_bar", "k_dot_bar", "v_dot_bar")):
            there += ["t"] * wanted["k_bar"] + ["s_dot"] * (wanted["k_bar"] or wanted["v_bar"])
            moves = "s_dot" in there and any(self.operands.get(name) is not None for name in _MOVING)
            rows = ("q", "q_dot", "o_bar", "o_bar_dot", "lse", "g", *(["lse_dot"] * moves), *(["w"] * wanted["k_bar"]))
            self.kernel("keys", f"{order}_keys", _KEYS, (*rows, *_PAIRS), there)


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> Cost:
    """Cost of `attention.attention_fwd`: two products of matrices."""
    calls = _Calls(q, k, v, causal, dropout_p, bias=bias, mask=mask, seed=seed, offset=offset)
    calls.make({"o": calls.o_bytes, "lse": calls.stat_bytes}, wanted=True)
    if not calls.is_empty:
        calls.kernel("fwd", "fwd", ("q",), (*_KEYS, *_PAIRS))
    return calls.account.cost()


def attention_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q_dot: Tensor | None,
    k_dot: Tensor | None,
    v_dot: Tensor | None,
    bias_dot: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> Cost:
    """Cost of `attention.attention_jvp`: five products of matrices, fewer where tangents are absent."""
    others = {"bias": bias, "o": o, "lse": lse, "mask": mask, "seed": seed, "offset": offset}
    dots = dict(zip(_DOTS, (q_dot, k_dot, v_dot, bias_dot), strict=True))
    calls = _Calls(q, k, v, causal, dropout_p, **others, **dots)
    calls.make({"o_dot": calls.o_bytes, "lse_dot": calls.stat_bytes}, wanted=True)
    if not calls.is_empty:
        calls.jvp()
    return calls.account.cost()


def attention_bwd(
    o_bar: Tensor | None,
    lse_bar: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    wanted: Sequence[bool],
) -> Cost:
    """Cost of `attention.attention_bwd`: seven products of matrices in two sweeps, fewer for fewer results."""
    given = {"bias": bias, "o": o, "lse": lse, "mask": mask, "seed": seed, "offset": offset}
    calls = _Calls(q, k, v, causal, dropout_p, o_bar=o_bar, lse_bar=lse_bar, **given)
    calls.sweeps(dict(zip(_RESULTS, (*(False,) * 4, *wanted), strict=True)))
    return calls.account.cost()


_RESULTS = tuple(f"{name}_bar" for name in ("q", "k", "v", "bias", *_DOTS))


def attention_pairing(
    o_bar: Tensor | None,
    lse_bar: Tensor | None,
    o_bar_dot: Tensor | None,
    lse_bar_dot: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q_dot: Tensor | None,
    k_dot: Tensor | None,
    v_dot: Tensor | None,
    bias_dot: Tensor | None,
    o_dot: Tensor | None,
    lse_dot: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    wanted: Sequence[bool],
) -> Cost:
    """Cost of `attention.attention_pairing`: 21 products of matrices, and 5 more where it has to find o_dot."""
    bars = {"o_bar": o_bar, "lse_bar": lse_bar, "o_bar_dot": o_bar_dot, "lse_bar_dot": lse_bar_dot}
    others = {"bias": bias, "o": o, "lse": lse, "o_dot": o_dot, "lse_dot": lse_dot}
    dots = dict(zip(_DOTS, (q_dot, k_dot, v_dot, bias_dot), strict=True))
    calls = _Calls(q, k, v, causal, dropout_p, **bars, **others, **dots, mask=mask, seed=seed, offset=offset)
    is_missing = (o_dot is None or lse_dot is None) and any(x is not None for x in dots.values())
    if wanted[0] or wanted[1] or (is_missing and any(wanted)):
        if not calls.is_empty:
            calls.jvp()
        # Found for the sweeps alone, it is not rounded.
        calls.make({"o_dot": calls.o_bytes if wanted[0] else calls.stat_bytes * calls.value_width}, wanted[0])
        calls.make({"lse_dot": calls.stat_bytes}, wanted[1])
    calls.sweeps(dict(zip(_RESULTS, wanted[2:], strict=True)))
    return calls.account.cost()
