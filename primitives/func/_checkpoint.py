"""Recomputation in the backward pass, under every transform: `checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import _C
from torch.utils import checkpoint as torch_checkpoint

from primitives._core.recomputation import recomputed
from primitives.func._region import Region

_P = ParamSpec("_P")
_R = TypeVar("_R")


def checkpoint(fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """`fn(*args, **kwargs)`, of which nothing but the arguments is kept: a backward pass computes the rest again.

    It works under every transform, in any nesting, where `torch.utils.checkpoint` raises: so a loss with a JVP in it
    keeps, for its backward pass, the arguments and tangents of each checkpointed block. `torch.compile` takes it too.
    Random numbers are the same when they are drawn again, also those of an explicit state.

    Args:
        fn: Function of pytrees, whose tensors are its arguments and the parameters and buffers of modules: `fn` itself,
            or what it reaches by its closure, its globals, attributes of objects, or `functools.partial`. Buffers that
            it changes are changed once. Attributes that a module assigns are forgotten.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The result of `fn`.

    Raises:
        LeafError: If `fn` uses a tensor that requires grad, or belongs to a transform, and reaches it otherwise; if it
            calls `torch.autograd.grad`, for which nothing is recorded: take `torch.func.grad` there.

    Example:
        >>> import torch, primitives as pr
        >>> block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
        >>> x, v = torch.ones(2), torch.ones(2)
        >>> y, y_dot = torch.func.jvp(lambda x: pr.func.checkpoint(block, x), (x,), (v,))
        >>> (y - y_dot).square().sum().backward()
        >>> block[0].weight.grad.shape
        torch.Size([2, 2])
    """
    if torch.compiler.is_dynamo_compiling():
        if not _may_be_marked():
            return fn(*args, **kwargs)
        # A mark for the compiler's partition.
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)
    if torch.is_inference_mode_enabled():
        # Nothing is recorded, and no tensor counts how often it is written.
        return fn(*args, **kwargs)
    region = Region(fn, args, kwargs)
    return region.output(recomputed(region, region.tensors))


def _may_be_marked() -> bool:
    """Whether no reverse-mode transform of `torch.func` is around."""
    return _C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined] - no stub


# As `torch.compiler.assume_constant_result` does, which would import the compiler.
_may_be_marked._dynamo_marked_constant = True  # type: ignore[attr-defined] - set here
