"""Attention in blocks: some rows of some heads at a time, which derivatives of every order recompute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core.recomputation import Recomputable, recomputed
from primitives.ops.attention.rows import OF_KEYS, PAIRS, STREAMS, TENSORS, Problem, Rows, row_major
from primitives.ops.dropout.philox import WORDS_PER_BLOCK
from primitives.ops.rules import empty_output

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
