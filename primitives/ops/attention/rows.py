"""Attention and its derivatives on some rows of queries against all keys: the pieces of references and CPU kernels.

Blocks are some rows of some heads at a time, which derivatives of every order recompute.

Notation as in `attention.py`. The heads of q that share a head of k and v are rows like others here: a tensor with rows
is [batch * key heads, group * rows, width], one with keys [batch * key heads, keys, width], and pairs of a row with a
key are [batch * key heads, group * rows, keys], so that one product of matrices serves a whole group and no key is
repeated. Keys come multiplied by the scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primitives._core.levels import recomputed
from primitives._core.recomputation import Recomputable
from primitives.ops.dropout.philox import WORDS_PER_BLOCK, draw_words
from primitives.ops.rules import accumulation_dtype, empty_output


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


# Bytes of one temporary [rows, keys]: a handful of them stays in a processor's last cache.
BLOCK_BYTES = 2 << 20
MIN_ROWS = 8


class Block(Recomputable):
    """The results for a problem that `output_mask` asks for, as a function of its tensors."""

    def __init__(self, problem: Problem, function: Callable, kinds: str, output_mask: Sequence[bool]) -> None:
        self._names = [name for name in TENSORS if getattr(problem, name) is not None]
        self._options = problem._replace(**dict.fromkeys(TENSORS))
        self._function, self._kinds, self._output_mask = function, kinds, output_mask

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results."""
        problem = self._options._replace(**dict(zip(self._names, tensors, strict=True)))
        # The caller's autocast has cast the arguments; inside, sums are of the dtype that they were widened to.
        with torch._C._DisableAutocast():
            results = self._function(Rows(problem))
        found = zip(results, self._kinds, self._output_mask, strict=True)
        return tuple(_unfolded(part, kind, problem) for part, kind, want in found if want)

    def of(self, problem: Problem) -> tuple[Tensor, ...]:
        """The results, of which a derivative keeps the tensors of `problem` alone."""
        tensors = [getattr(problem, name) for name in self._names]
        return self(*tensors) if problem.in_place else recomputed(self, tensors)


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
    problem: Problem, function: Callable[[Rows], Sequence[Tensor | None]], kinds: str, output_mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    """`function` of all rows, in blocks, of which derivatives of every order keep the arguments alone.

    Args:
        problem: The arguments.
        function: Results for some rows; None for those that are zero or not wanted.
        kinds: For each result the tensor that it is shaped like: `q` or `o`, `s` for a statistic of rows; `k`, to be
            multiplied by the scale, or `v` for a sum over rows; `b` for pairs, to be summed to the shape of the bias.
        output_mask: For each result, whether it is asked for.

    Returns:
        The results, in the dtype of q, statistics in that of sums.
    """
    found = iter(_in_parts(_prepared(problem), function, kinds, output_mask, 0) if any(output_mask) else ())
    pairs = zip(kinds, output_mask, strict=True)
    return tuple(_finished(next(found), kind, problem) if want else empty_output(problem.q) for kind, want in pairs)


def _prepared(problem: Problem) -> Problem:
    """The problem with keys and values in the dtype of sums, keys scaled, and a random stream for each head."""
    new: dict[str, Any] = {}
    for name in OF_KEYS:
        x = getattr(problem, name)
        if x is not None:
            x = x.to(problem.dtype)
            new[name] = x * problem.scale if name in ("k", "k_dot") else x
    if problem.seed is not None:
        lead, num_rows = problem.q.shape[:-2], problem.q.shape[-2]
        inner = lead[problem.seed.dim() :]
        blocks = num_rows * -(-problem.k.shape[-2] // WORDS_PER_BLOCK)
        seed, offset = (
            None if x is None else x.reshape(*x.shape, *[1] * len(inner)).expand(lead)
            for x in (problem.seed, problem.offset)
        )
        heads = (torch.arange(math.prod(inner), device=problem.q.device) * blocks).reshape(inner).expand(lead)
        new.update(seed=seed, offset=heads if offset is None else heads + offset)
    return problem._replace(**new)


def _in_parts(problem: Problem, function: Callable, kinds: str, output_mask: Sequence[bool], axis: int) -> list[Tensor]:
    """The results for a problem that is cut along `axis`, and axes after it up to the rows, to the size of blocks."""
    count, num_bytes = (problem.k if axis < problem.k.dim() - 2 else problem.q).shape[axis], problem.num_bytes
    is_last = axis == problem.k.dim() - 2
    if num_bytes > BLOCK_BYTES and count > (MIN_ROWS if is_last else 1):
        size = max(MIN_ROWS if is_last else 1, count * BLOCK_BYTES // num_bytes)
        problems = _split(problem, axis, size)
    else:
        problems = [problem]
    chosen = list(itertools.compress(kinds, output_mask))
    parts: list[list[Tensor]] = [[] for _ in chosen]
    for part in problems:
        if is_last:
            found = Block(part, function, kinds, output_mask).of(part)
        else:
            found = _in_parts(part, function, kinds, output_mask, axis + 1)
        for kind, each, new in zip(chosen, parts, found, strict=True):
            if each and _is_sum(kind, problem, axis):
                # At once: terms are as large as the sum.
                each[0] = each[0] + new
            else:
                each.append(new)
    return [each[0] if len(each) == 1 else torch.cat(each, axis) for each in parts]


def _is_sum(kind: str, problem: Problem, axis: int) -> bool:
    """Whether a result is the sum of those for parts along an axis, rather than these one after another."""
    if kind == "b":
        return problem.bias is not None and problem.bias.shape[axis] == 1
    return kind in "kv" and axis == problem.k.dim() - 2


def _split(problem: Problem, axis: int, size: int) -> list[Problem]:
    """The problem cut along an axis of the keys up to that of heads, or along the next one, of rows."""
    heads_axis = problem.k.dim() - 3
    pieces: dict[str, Sequence[Tensor]] = {}
    for name in TENSORS:
        x = getattr(problem, name)
        if x is None or (name in PAIRS and x.shape[axis] == 1) or (axis > heads_axis and name in OF_KEYS + STREAMS):
            continue
        has_groups = axis == heads_axis and name not in OF_KEYS
        pieces[name] = x.split(size * problem.groups if has_groups else size, axis)
    starts = [problem.start + (i * size if axis > heads_axis else 0) for i in range(len(pieces["q"]))]
    return [
        problem._replace(start=start, **{name: each[i] for name, each in pieces.items()})
        for i, start in enumerate(starts)
    ]


def _finished(x: Tensor, kind: str, problem: Problem) -> Tensor:
    """A result in its dtype and layout, with memory of its own."""
    if kind == "s":
        return x.clone(memory_format=torch.contiguous_format)
    if kind == "b":
        dtype = problem.q.dtype if problem.bias is None else problem.bias.dtype
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return row_major(x * problem.scale if kind == "k" else x, problem.q.dtype)
