"""Attention and its derivatives on some rows of queries against all keys: the pieces of references and CPU kernels.

Notation as in `attention.py`. The heads of q that share a head of k and v are rows like others here: a tensor with rows
is [batch * key heads, group * rows, width], one with keys [batch * key heads, keys, width], and pairs of a row with a
key are [batch * key heads, group * rows, keys], so that one product of matrices serves a whole group and no key is
repeated. Keys come multiplied by the scale.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from primitives.core.recomputation import Recomputable, recomputed
from primitives.ops._philox import WORDS_PER_BLOCK, draw_words
from primitives.ops._shared import accumulation_dtype, unwanted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Problem", "Rows", "as_row_major", "flipped", "in_blocks", "noised", "row_major"]

# Bytes of one temporary [rows, keys]: a handful of them stays in a processor's last cache.
BLOCK_BYTES = 1 << 20
MIN_ROWS = 8


class Problem(NamedTuple):
    """One attention and what its derivatives are given: the arguments of its operators, None where there is none.

    `in_place` says that temporaries may be written over, since nothing differentiates or traces what is computed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    offset: Tensor | None
    scale: float
    causal: bool
    dropout_p: float
    in_place: bool = False
    o: Tensor | None = None
    lse: Tensor | None = None
    o_bar: Tensor | None = None
    lse_bar: Tensor | None = None
    o_bar_dot: Tensor | None = None
    lse_bar_dot: Tensor | None = None
    q_dot: Tensor | None = None
    k_dot: Tensor | None = None
    v_dot: Tensor | None = None
    bias_dot: Tensor | None = None
    o_dot: Tensor | None = None
    lse_dot: Tensor | None = None

    @property
    def groups(self) -> int:
        """Heads of q to a head of k."""
        return self.q.shape[-3] // max(self.k.shape[-3], 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums."""
        return accumulation_dtype(self.q.dtype)


OF_ROWS = ("q", "o", "o_bar", "o_bar_dot", "q_dot", "o_dot")
STATISTICS = ("lse", "lse_bar", "lse_bar_dot", "lse_dot")
OF_KEYS = ("k", "v", "k_dot", "v_dot")
PAIRS = ("bias", "mask", "bias_dot")
TENSORS = (*OF_ROWS, *STATISTICS, *OF_KEYS, *PAIRS, "seed", "offset")


def flipped(x: Tensor | None) -> Any:
    """`x` with its last two axes exchanged."""
    return None if x is None else x.mT


def noised(pairs: Tensor | None, noise: Tensor | None) -> Any:
    """Z.pairs; the pairs themselves without noise."""
    return pairs if noise is None or pairs is None else pairs * noise


class Rows:
    """Some rows of a problem.

    Attributes:
        x: The problem, its tensors cut to these rows and shaped as above. `bias`, `mask` and `bias_dot` alone are
            [*batch, key heads or 1, group or 1, rows or 1, keys or 1].
    """

    def __init__(self, problem: Problem, start: int, num_rows: int) -> None:
        q, k, dtype = problem.q, problem.k, problem.dtype
        self._start, self._all_rows, self._inner = start, num_rows, q.shape[:-1]
        heads = (k.shape[-3], problem.groups)
        self._pairs = (*k.shape[:-3], *heads, q.shape[-2], k.shape[-2])
        self._shape = (math.prod(k.shape[:-2]), heads[1] * q.shape[-2], k.shape[-2])
        batch, rows, keys = self._shape
        tensors: dict[str, Any] = {}
        for name in OF_ROWS + STATISTICS:
            y = getattr(problem, name)
            if y is not None:
                tensors[name] = y.to(dtype).reshape(batch, rows, 1 if name in STATISTICS else y.shape[-1])
        for name in OF_KEYS:
            y = getattr(problem, name)
            if y is not None:
                tensors[name] = y.reshape(batch, keys, y.shape[-1])
        for name in PAIRS:
            y = getattr(problem, name)
            if y is not None:
                tensors[name] = y.unsqueeze(-3) if y.shape[-3] == 1 else y.unflatten(-3, heads)
        self.x = problem._replace(**tensors)

    def over(self, pairs: Tensor) -> Tensor | None:
        """Where to write something in the place of `pairs`, which are needed no more: None for new memory."""
        return pairs if self.x.in_place else None

    def plus(self, total: Tensor | None, x: Tensor | None, y: Tensor | None) -> Any:
        """`total + x y`, over `total`; None stands for nothing."""
        if x is None or y is None:
            return total
        return torch.bmm(x, y) if total is None else torch.baddbmm(total, x, y, out=self.over(total))

    def times(self, x: Tensor | None, y: Tensor | None) -> Any:
        """`x.y`, over `x`; None where one of them is not there."""
        return None if x is None or y is None else torch.mul(x, y, out=self.over(x))

    def minus(self, pairs: Tensor | None, less: Tensor | None) -> Any:
        """`pairs - less`, over `pairs`, of a statistic [*, rows, 1]; None stands for nothing."""
        if less is None:
            return pairs
        return (-less).expand(self._shape).clone() if pairs is None else torch.sub(pairs, less, out=self.over(pairs))

    def plus_pairs(self, total: Tensor | None, pairs: Tensor | None) -> Any:
        """`total + pairs`, over `total`, of pairs like those of the problem."""
        if pairs is None:
            return total
        total = self.x.q.new_zeros(self._shape) if total is None else total
        view = total.reshape(self._pairs)
        return torch.add(view, pairs, out=self.over(view)).reshape(self._shape)

    def scores(self) -> Tensor:
        """Scale * q k^T + bias, `-inf` where a row does not see a key."""
        x = self.x
        scores = self.plus_pairs(torch.bmm(x.q, x.k.mT), x.bias)
        hidden = None if x.mask is None else ~x.mask
        if x.causal:
            rows, keys = (
                torch.arange(first, first + count, device=scores.device)
                for first, count in zip((self._start, 0), self._pairs[-2:], strict=True)
            )
            later = rows.unsqueeze(-1) < keys
            hidden = later if hidden is None else hidden | later
        if hidden is None:
            return scores
        fill = torch.Tensor.masked_fill_ if x.in_place else torch.Tensor.masked_fill
        return fill(scores.reshape(self._pairs), hidden, -math.inf).reshape(self._shape)

    def scores_dot(self) -> Tensor | None:
        """The tangent of the scores; None where nothing of them moves."""
        x = self.x
        total = self.plus(None, x.q_dot, x.k.mT)
        total = self.plus(total, x.q, flipped(x.k_dot))
        return self.plus_pairs(total, x.bias_dot)

    def probabilities(self) -> tuple[Tensor, Tensor]:
        """P, and lse [*, rows, 1], that of the problem where it is given.

        A row that sees no key has P = 0 and lse = -inf.
        """
        scores, lse = self.scores(), self.x.lse
        if lse is not None:
            scores = torch.sub(scores, lse.masked_fill(lse == -math.inf, 0.0), out=self.over(scores))
            return torch.exp(scores, out=self.over(scores)), lse
        if scores.shape[-1] == 0:
            return scores, scores.new_full((*scores.shape[:-1], 1), -math.inf)
        # No derivative goes through the maximum: P is the same whatever is subtracted first.
        top = scores.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = torch.sub(scores, top, out=self.over(scores))
        weights = torch.exp(weights, out=self.over(weights))
        total = weights.sum(-1, keepdim=True)
        sees_none = total == 0.0
        total = total.masked_fill(sees_none, 1.0)
        lse = (top + total.log()).masked_fill(sees_none, -math.inf)
        return torch.div(weights, total, out=self.over(weights)), lse

    def noise(self) -> Tensor | None:
        """Z: `1 / (1 - p)` where a pair is kept, else 0; None without dropout.

        Row r of head h begins at block `(h * rows + r) * ceil(keys / 4)` of the stream, so that a kernel draws the
        words of a tile alone.
        """
        x = self.x
        if x.seed is None:
            return None
        inner, keys = self._inner[x.seed.dim() :], self._shape[-1]
        row_blocks = -(-keys // WORDS_PER_BLOCK)
        heads, rows = (torch.arange(count, device=x.q.device) for count in (math.prod(inner[:-1]), inner[-1]))
        first = (heads.unsqueeze(-1) * self._all_rows + self._start + rows).reshape(inner) * row_blocks
        seed, offset = (None if y is None else y.reshape(*y.shape, *[1] * first.dim()) for y in (x.seed, x.offset))
        first = first if offset is None else first + offset
        seed, first = torch.broadcast_tensors(seed, first)
        dropped = math.ceil(x.dropout_p * 2**32)
        kept = draw_words(seed, first, row_blocks * WORDS_PER_BLOCK, lambda words: words >= dropped)[..., :keys]
        scale = 1.0 / (1.0 - x.dropout_p) if x.dropout_p < 1.0 else 0.0
        return (kept.to(x.q.dtype) * scale).reshape(self._shape)


class Block(Recomputable):
    """Results for some rows of a problem, as a function of the tensors of these rows.

    Args:
        problem: The problem; of its tensors it counts which are there.
        function: As for `in_blocks`.
        kinds: The same.
        wanted: The same.
        start: The first row.
    """

    def __init__(self, problem: Problem, function: Callable, kinds: str, wanted: Sequence[bool], start: int) -> None:
        self._names = [name for name in TENSORS if getattr(problem, name) is not None]
        self._options = problem._replace(**dict.fromkeys(TENSORS))
        self._function, self._kinds, self._wanted = function, kinds, wanted
        self._start, self._num_rows = start, problem.q.shape[-2]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Parts of those results that are wanted."""
        problem = self._options._replace(**dict(zip(self._names, tensors, strict=True)))
        # The caller's autocast has cast the arguments; inside, sums are of the dtype that they were widened to.
        with torch._C._DisableAutocast():
            results = self._function(Rows(problem, self._start, self._num_rows))
        found = zip(results, self._kinds, self._wanted, strict=True)
        return tuple(_unfolded(part, kind, problem) for part, kind, want in found if want)

    def parts(self, problem: Problem, stop: int) -> tuple[Tensor, ...]:
        """Those of the rows up to `stop`."""
        cut = [_cut(name, getattr(problem, name), self._start, stop) for name in self._names]
        return self(*cut) if problem.in_place else recomputed(self, cut)


def _cut(name: str, x: Tensor, start: int, stop: int) -> Tensor:
    """Some rows of a tensor."""
    if name in STATISTICS:
        return x[..., start:stop]
    if name in OF_ROWS or (name in PAIRS and x.shape[-2] != 1):
        return x[..., start:stop, :]
    return x


def _unfolded(x: Tensor | None, kind: str, problem: Problem) -> Tensor:
    """A result for the rows of `problem`, shaped as the argument of its kind; zeros for None."""
    q, k, v, bias = problem[:4]
    if kind == "b" and x is not None:
        # The bias has these rows, or one for all.
        return x.reshape(*q.shape[:-1], x.shape[-1]).sum_to_size(bias.shape)  # type: ignore[union-attr] - there is one
    shapes = {"s": q.shape[:-1], "o": (*q.shape[:-1], v.shape[-1]), "q": q.shape, "k": k.shape, "v": v.shape}
    shape = bias.shape if kind == "b" else shapes[kind]  # type: ignore[union-attr] - as above
    return q.new_zeros(shape, dtype=problem.dtype) if x is None else x.reshape(shape)


def in_blocks(
    problem: Problem,
    function: Callable[[Rows], Sequence[Tensor | None]],
    kinds: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """`function` of all rows, in blocks, of which derivatives of every order keep the arguments alone.

    Args:
        problem: The arguments.
        function: Results for some rows; None for those that are zero or not wanted.
        kinds: For each result the tensor that it is shaped like: `q` or `o`, `s` for a statistic of rows; `k`, to be
            multiplied by the scale, or `v` for a sum over rows; `b` for pairs, to be summed to the shape of the bias.
        wanted: For each result, whether it is asked for.

    Returns:
        The results, in the dtype of q, statistics in that of sums.
    """
    dtype, num_rows = problem.dtype, problem.q.shape[-2]
    wide: dict[str, Any] = {name: _widened(name, getattr(problem, name), problem) for name in OF_KEYS}
    whole = problem._replace(**wide)
    row_bytes = math.prod(problem.q.shape[:-2]) * problem.k.shape[-2] * dtype.itemsize
    size = max(MIN_ROWS, BLOCK_BYTES // max(row_bytes, 1))
    places = [i for i, want in enumerate(wanted) if want]
    parts: list[list[Tensor]] = [[] for _ in kinds]
    # At least one block, which may be empty, so that results have shapes.
    for start in range(0, max(num_rows, 1) if places else 0, size):
        block = Block(problem, function, kinds, wanted, start)
        for i, part in zip(places, block.parts(whole, min(start + size, num_rows)), strict=True):
            if parts[i] and not _is_cut(kinds[i], problem):
                parts[i][0] = parts[i][0] + part
            else:
                parts[i].append(part)
    return tuple(
        _whole(found, kind, problem) if want else unwanted(problem.q)
        for found, kind, want in zip(parts, kinds, wanted, strict=True)
    )


def _widened(name: str, x: Tensor | None, problem: Problem) -> Tensor | None:
    """A tensor of keys in the dtype of sums; keys themselves are scaled."""
    if x is None:
        return None
    x = x.to(problem.dtype)
    return x * problem.scale if name in ("k", "k_dot") else x


def _is_cut(kind: str, problem: Problem) -> bool:
    """Whether each block of rows has its own part of a result, rather than a term of it."""
    return kind in "qos" or (kind == "b" and problem.bias is not None and problem.bias.shape[-2] != 1)


def _whole(parts: list[Tensor], kind: str, problem: Problem) -> Tensor:
    """A result of its parts, with memory of its own."""
    if kind == "s":
        return torch.cat(parts, -1)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
    if kind == "b":
        return whole.to(problem.bias.dtype, copy=True).contiguous()  # type: ignore[union-attr] - there is one
    return row_major(whole * problem.scale if kind == "k" else whole, problem.q.dtype)


def as_row_major(x: Tensor) -> Tensor:
    """`x`, or where its strides are others, `row_major` of it."""
    return x if x.transpose(-2, -3).is_contiguous() else row_major(x, x.dtype)


def row_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of x [*, heads, rows, width], row after row with the heads beside one another, as projections are."""
    copy = x.new_empty((*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1]), dtype=dtype)
    return copy.transpose(-2, -3).copy_(x)
