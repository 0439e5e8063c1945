"""Attention and its derivatives on some rows of queries against all keys: the pieces of references and CPU kernels.

Notation as in `attention.py`. The heads of q that share a head of k and v are rows like others here: a tensor with rows
is [batch * key heads, group * rows, width], one with keys [batch * key heads, keys, width], and pairs of a row with a
key are [batch * key heads, group * rows, keys], so that one product of matrices serves a whole group and no key is
repeated. Keys come multiplied by the scale.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primitives.ops.dropout.philox import WORDS_PER_BLOCK, draw_words
from primitives.ops.rules import accumulation_dtype


class Problem(NamedTuple):
    """One attention and what its derivatives are given: the arguments of its operators, None where there is none.

    `in_place` says that temporaries may be written over, since nothing differentiates or traces what is computed; the
    first row is row `start`.
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
    start: int = 0
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

    @property
    def num_bytes(self) -> int:
        """Bytes of all pairs of a row with a key."""
        return math.prod(self.q.shape[:-1]) * self.k.shape[-2] * self.dtype.itemsize


OF_ROWS = ("q", "o", "o_bar", "o_bar_dot", "q_dot", "o_dot")
STATISTICS = ("lse", "lse_bar", "lse_bar_dot", "lse_dot")
OF_KEYS = ("k", "v", "k_dot", "v_dot")
PAIRS = ("bias", "mask", "bias_dot")
STREAMS = ("seed", "offset")
TENSORS = (*OF_ROWS, *STATISTICS, *OF_KEYS, *PAIRS, *STREAMS)


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

    def __init__(self, problem: Problem) -> None:
        q, k, dtype = problem.q, problem.k, problem.dtype
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
        # Added: torch fills where a mask says so at the cost of a product of matrices.
        if x.mask is not None:
            scores = self.plus_pairs(scores, torch.where(x.mask, 0.0, -math.inf).to(scores.dtype))
        if x.causal:
            hidden = scores.new_full(self._pairs[-2:], -math.inf).triu(x.start + 1)
            scores = self.plus_pairs(scores, hidden)
        return scores

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
        if self.x.in_place:
            # Torch's softmax takes a faster exponential than its `exp`.
            lse = torch.logsumexp(scores, -1, keepdim=True) if lse is None else lse
            p, sees_none = torch.softmax(scores, -1), lse == -math.inf
            return p.masked_fill_(sees_none, 0.0) if sees_none.any() else p, lse
        if scores.shape[-1] == 0:
            return scores, scores.new_full((*scores.shape[:-1], 1), -math.inf)
        # No derivative goes through the maximum: P is the same whatever is subtracted first.
        top = scores.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        sees_none = total == 0.0
        total = total.masked_fill(sees_none, 1.0)
        lse = (top + total.log()).masked_fill(sees_none, -math.inf)
        return weights / total, lse

    def noise(self) -> Tensor | None:
        """Z: `1 / (1 - p)` where a pair is kept, else 0; None without dropout.

        Row r of head h begins at block `(h * rows + r) * ceil(keys / 4)` of the stream, so that a kernel draws the
        words of a tile alone.
        """
        x = self.x
        if x.seed is None or x.offset is None:
            return None
        rows, keys = self._pairs[-2:]
        row_blocks = -(-keys // WORDS_PER_BLOCK)
        first = x.offset.unsqueeze(-1) + (x.start + torch.arange(rows, device=x.q.device)) * row_blocks
        seed = x.seed.unsqueeze(-1).expand(first.shape)
        dropped = math.ceil(x.dropout_p * 2**32)
        kept = draw_words(seed, first, row_blocks * WORDS_PER_BLOCK, lambda words: words >= dropped)[..., :keys]
        scale = 1.0 / (1.0 - x.dropout_p) if x.dropout_p < 1.0 else 0.0
        return (kept.to(x.q.dtype) * scale).reshape(self._shape)


def as_row_major(x: Tensor) -> Tensor:
    """`x`, or where its strides are others, `row_major` of it."""
    return x if x.transpose(-2, -3).is_contiguous() else row_major(x, x.dtype)


def row_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of x [*, heads, rows, width], row after row with the heads beside one another, as projections are."""
    heads, rows, width = (max(n, 1) for n in x.shape[-3:])
    strides, count = [width, heads * width, 1], heads * rows * width
    for n in reversed(x.shape[:-3]):
        strides, count = [count, *strides], count * max(n, 1)
    # Not a view of other strides: what an operator returns may be written in place.
    return x.new_empty_strided(x.shape, strides, dtype=dtype).copy_(x)
