"""Attention and its derivatives on some rows of queries against all keys: the pieces of references and CPU kernels.

Notation as in `attention.py`. The heads of q that share a head of k and v are an axis of their own here: rows are
[*batch, key heads, group, rows, width] and pairs of a row with a key [*batch, key heads, group, rows, keys], so that
one product of matrices serves a whole group and no key is repeated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from primitives.ops._philox import WORDS_PER_BLOCK, draw_words
from primitives.ops._shared import accumulation_dtype, unwanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

__all__ = [
    "Dots",
    "Problem",
    "Rows",
    "across",
    "as_row_major",
    "in_blocks",
    "noised",
    "row_major",
    "sum_terms",
    "with_keys",
]

# Bytes of one temporary [rows, keys]: a handful of them stays in a processor's last cache.
BLOCK_BYTES = 4 << 20
MIN_ROWS = 8


class Dots(NamedTuple):
    """Tangents of q, k, v and bias; None where there is none."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None


class Problem(NamedTuple):
    """The arguments of one attention, as its operators have them."""

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

    @property
    def groups(self) -> int:
        """Heads of q to a head of k."""
        return self.q.shape[-3] // max(self.k.shape[-3], 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums."""
        return accumulation_dtype(self.q.dtype)


def with_keys(rows: Tensor, keys: Tensor) -> Tensor:
    """The product of rows [*, group, rows, i] with a matrix [*, i, j] that the group shares."""
    return (rows.flatten(-3, -2) @ keys).unflatten(-2, rows.shape[-3:-1])


def across(pairs: Tensor, rows: Tensor) -> Tensor:
    """The sum over rows and group of pairs [*, group, rows, keys] times rows [*, group, rows, j]: [*, keys, j]."""
    return pairs.flatten(-3, -2).mT @ rows.flatten(-3, -2)


def sum_terms(*terms: Tensor | None) -> Any:
    """The sum of the terms that are there; None without any."""
    given = [term for term in terms if term is not None]
    return sum(given[1:], given[0]) if given else None


def noised(pairs: Tensor, noise: Tensor | None) -> Tensor:
    """Z.pairs."""
    return pairs if noise is None else pairs * noise


class Rows:
    """Rows `start` to `stop` of a problem.

    Attributes:
        problem: The whole problem.
        q: These rows.
        k: All keys, in the dtype of sums.
        v: All values, in the dtype of sums.
    """

    def __init__(self, problem: Problem, start: int, stop: int, k: Tensor, v: Tensor) -> None:
        self.problem, self.start, self.stop, self.k, self.v = problem, start, stop, k, v
        self._heads = (k.shape[-3], problem.groups)
        self.q: Tensor = self.of(problem.q)

    def of(self, x: Tensor | None) -> Any:
        """These rows of x [*batch, heads, all rows, width]: [*, key heads, group, rows, width]."""
        if x is None:
            return None
        return x[..., self.start : self.stop, :].to(self.k.dtype).unflatten(-3, self._heads)

    def of_statistic(self, x: Tensor | None) -> Any:
        """The same of a statistic [*batch, heads, all rows]: [*, key heads, group, rows, 1]."""
        return None if x is None else self.of(x.unsqueeze(-1))

    def of_pairs(self, x: Tensor | None) -> Any:
        """The same of x [*batch, heads, all rows, keys], any axis of which may be 1."""
        if x is None:
            return None
        rows = x if x.shape[-2] == 1 else x[..., self.start : self.stop, :]
        return rows.unsqueeze(-3) if rows.shape[-3] == 1 else rows.unflatten(-3, self._heads)

    def scores(self) -> Tensor:
        """Scale * q k^T + bias, `-inf` where a row does not see a key."""
        problem = self.problem
        scores = with_keys(self.q * problem.scale, self.k.mT)
        if problem.bias is not None:
            scores = scores + self.of_pairs(problem.bias)
        if problem.mask is not None:
            scores = scores.masked_fill(~self.of_pairs(problem.mask), -math.inf)
        if problem.causal:
            rows, keys = (
                torch.arange(*ends, device=scores.device) for ends in ((self.start, self.stop), (0, self.k.shape[-2]))
            )
            scores = scores.masked_fill(rows.unsqueeze(-1) < keys, -math.inf)
        return scores

    def scores_dot(self, dots: Dots) -> Tensor | None:
        """The tangent of the scores along `dots`; None where nothing of them moves."""
        problem = self.problem
        return sum_terms(
            None if dots.q is None else with_keys(self.of(dots.q) * problem.scale, self.k.mT),
            None if dots.k is None else with_keys(self.q * problem.scale, dots.k.to(self.q.dtype).mT),
            self.of_pairs(dots.bias),
        )

    def probabilities(self, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """P, and lse [*, rows, 1], of `lse` where the whole of it is given.

        A row that sees no key has P = 0 and lse = -inf.
        """
        scores = self.scores()
        if lse is not None:
            lse = self.of_statistic(lse)
            return (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp_(), lse
        if scores.shape[-1] == 0:
            return scores, self.q.new_full((*scores.shape[:-1], 1), -math.inf)
        # No derivative goes through the maximum: P is the same whatever is subtracted first.
        top = scores.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        sees_none = total == 0.0
        total = total.masked_fill(sees_none, 1.0)
        return weights / total, (top + total.log()).masked_fill(sees_none, -math.inf)

    def noise(self) -> Tensor | None:
        """Z: `1 / (1 - p)` where a pair is kept, else 0; None without dropout.

        Row r of head h begins at block `(h * rows + r) * ceil(keys / 4)` of the stream, so that a kernel draws the
        words of a tile alone.
        """
        problem = self.problem
        if problem.seed is None:
            return None
        inner = problem.q.shape[problem.seed.dim() : -1]
        keys = problem.k.shape[-2]
        row_blocks = -(-keys // WORDS_PER_BLOCK)
        first = torch.arange(math.prod(inner), device=problem.q.device).reshape(inner) * row_blocks
        first = first[..., self.start : self.stop]
        seed, offset = (
            None if x is None else x.reshape(*x.shape, *[1] * first.dim()) for x in (problem.seed, problem.offset)
        )
        first = first if offset is None else first + offset
        seed, first = torch.broadcast_tensors(seed, first)
        dropped = math.ceil(problem.dropout_p * 2**32)
        kept = draw_words(seed, first, row_blocks * WORDS_PER_BLOCK, lambda words: words >= dropped)[..., :keys]
        scale = 1.0 / (1.0 - problem.dropout_p) if problem.dropout_p < 1.0 else 0.0
        return (kept.to(self.k.dtype) * scale).unflatten(-3, self._heads)


def _blocks(problem: Problem) -> Iterator[Rows]:
    """All rows, in blocks: at least one, which may be empty, so that results have shapes."""
    k, v = problem.k.to(problem.dtype), problem.v.to(problem.dtype)
    num_rows = problem.q.shape[-2]
    row_bytes = math.prod(problem.q.shape[:-2]) * problem.k.shape[-2] * problem.dtype.itemsize
    size = max(MIN_ROWS, BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, max(num_rows, 1), size):
        yield Rows(problem, start, min(start + size, num_rows), k, v)


def in_blocks(
    problem: Problem, function: Callable[[Rows], Sequence[Tensor | None]], kinds: str, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """`function` of all rows, in blocks.

    Args:
        problem: The arguments.
        function: Results for some rows, those that are not wanted None.
        kinds: For each result a letter: `r` for rows, `s` for a statistic of rows, `k` and `v` for sums over rows,
            shaped like the keys and values, `b` for pairs, to be summed to the shape of the bias.
        wanted: For each result, whether it is asked for.

    Returns:
        The results, in the dtype of q, statistics in that of sums.
    """
    parts: list[list[Tensor]] = [[] for _ in kinds]
    for rows in _blocks(problem):
        for i, part in enumerate(function(rows)):
            if not wanted[i] or part is None:
                continue
            if kinds[i] == "b":
                part = _like_bias(part, problem)
            if parts[i] and not _is_cut(kinds[i], problem):
                parts[i][0] = parts[i][0] + part
            else:
                parts[i].append(part)
    return tuple(
        _whole(found, kind, problem) if want else unwanted(problem.q)
        for found, kind, want in zip(parts, kinds, wanted, strict=True)
    )


def _is_cut(kind: str, problem: Problem) -> bool:
    """Whether each block of rows has its own part of a result, rather than a term of it."""
    return kind in "rs" or (kind == "b" and problem.bias is not None and problem.bias.shape[-2] != 1)


def _like_bias(pairs: Tensor, problem: Problem) -> Tensor:
    """Pairs summed over the axes that the bias does not have; rows are left as they are unless it has one for all."""
    bias: Any = problem.bias
    pairs = pairs.flatten(-4, -3)
    rows = 1 if bias.shape[-2] == 1 else pairs.shape[-2]
    return pairs.sum_to_size(*bias.shape[:-2], rows, bias.shape[-1])


def _whole(parts: list[Tensor], kind: str, problem: Problem) -> Tensor:
    """A result of its parts, zeros without any, with memory of its own."""
    if not parts:
        parts = [_zeros(kind, problem)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
    if kind == "s":
        return whole.squeeze(-1).flatten(-3, -2).contiguous()
    if kind == "b":
        return whole.to(problem.bias.dtype if problem.bias is not None else problem.q.dtype, copy=True).contiguous()
    return row_major(whole.flatten(-4, -3) if kind == "r" else whole, problem.q.dtype)


def _zeros(kind: str, problem: Problem) -> Tensor:
    shapes = {"k": problem.k.shape, "v": problem.v.shape}
    if kind == "b":
        return torch.zeros_like(problem.bias)  # type: ignore[arg-type] - asked for where there is one
    if kind in shapes:
        return problem.q.new_zeros(shapes[kind])
    rows = problem.q.unflatten(-3, (problem.k.shape[-3], problem.groups))
    return torch.zeros_like(rows)


def as_row_major(x: Tensor) -> Tensor:
    """`x`, or where its strides are others, `row_major` of it."""
    return x if x.transpose(-2, -3).is_contiguous() else row_major(x, x.dtype)


def row_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of x [*, heads, rows, width], row after row with the heads beside one another, as projections are."""
    copy = x.new_empty((*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1]), dtype=dtype)
    return copy.transpose(-2, -3).copy_(x)
