r"""Dropout: elements are set to zero at random, and the others scaled so that the mean stays.

    y_i = x_i * noise_i,      noise_i = 1 / (1 - p) where word_i >= p * 2**32, else 0

word_i is random word i of the Philox stream `seed`, counted from block `offset` (see `philox.py`): an integer that is
uniform in [0, 2**32), so that an element is zeroed with probability p, to within 2**-32. i counts the elements of x in
logical, row-major order: neither strides, nor device, nor the block sizes of a kernel change the result.

The noise is never stored. y is linear in x, so that one operator is its own derivative of every order:

    jvp   y_dot = x_dot * noise
    vjp   x_bar = y_bar * noise

Shapes: x is [*batch, *rest] with `batch_ndim` batch axes, which vmap adds; seed and offset are [*batch], int64, on the
device of x (offset None: 0). i counts within [*rest]. y has the shape, dtype and strides of x (dense ones where x has
gaps or repeats). Products are taken in float32, in float64 for float64 x. As in torch, what is not finite in x gives
NaN where it is dropped.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives._core.trees.leaves import map_tensors
from primitives._core.typing import PyTree
from primitives.ops import arguments
from primitives.ops.axes import Axes, def_axes
from primitives.ops.dropout.philox import MAX_SEED, draw_words
from primitives.ops.rules import accumulation_dtype, bind_kernels

dropout_p = Primitive(
    "dropout",
    "(Tensor x, Tensor seed, Tensor? offset, float p, int batch_ndim) -> Tensor y",
    residuals=("seed", "offset"),
    recomputable=True,
)


@dropout_p.def_reference
def _dropout_reference(x: Tensor, seed: Tensor, offset: Tensor | None, p: float, batch_ndim: int) -> Tensor:
    dropped = math.ceil(p * 2**32)
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    acc = accumulation_dtype(x.dtype)
    # Zero times scale is zero: where it is dropped, an element is multiplied by zero.
    kept = draw_words(seed, offset, math.prod(x.shape[batch_ndim:]), lambda words: words >= dropped)
    noise = kept.reshape(x.shape).to(acc) * scale
    y = torch.empty_like(x)
    return y.copy_(x * noise) if x.dtype == acc else y.copy_(x.to(acc) * noise)


@dropout_p.def_fake
def _dropout_fake(x: Tensor, seed: Tensor, offset: Tensor | None, p: float, batch_ndim: int) -> Tensor:
    return torch.empty_like(x)


bind_kernels(dropout_p, "dropout.dropout", "dropout_fwd")


@dropout_p.def_vjp
def _dropout_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor]:
    r = residuals
    return {"x": dropout_p(cotangents.y, r.seed, r.offset, r.p, r.batch_ndim)}


@dropout_p.def_jvp
def _dropout_jvp(residuals: Any, tangents: Any) -> Tensor:
    r = residuals
    return dropout_p(tangents.x, r.seed, r.offset, r.p, r.batch_ndim)


# Noise follows from a place in the whole, and samples that share a seed share it.
def_axes(Axes("x y: *batch *rest, seed offset: *batch", ""), dropout_p)


def dropout(
    input: PyTree, p: float = 0.5, training: bool = True, inplace: bool = False, *, namespace: str = ""
) -> PyTree:
    r"""Zero elements of `input` at random, with probability `p`, and divide the others by `1 - p`.

    Args:
        input: Tensor of any shape, float16, bfloat16, float32 or float64, any strides; or a pytree of such tensors,
            which is mapped leaf by leaf, each with random numbers of its own.
        p: Probability of zero, in `[0, 1]`.
        training: Whether to drop anything; `input` is returned as it is if not.
        inplace: Whether to write the result into `input` and return that.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape, dtype, device and strides of `input` (dense ones where `input` has gaps or repeats); for a
        pytree, in its structure.

    Raises:
        ValueError: If `p` is not in `[0, 1]`.
        DtypeError: If a dtype is not one of the above, or `p` is not a number.
        MutationError: If `inplace` would write into a leaf that requires grad.
        RuntimeError: Under `vmap` with `randomness="error"`, as torch raises it.

    Derivatives:
        Forward and reverse mode, to any order, in `input`. Kept are 8 bytes: the seed of the noise, which every
        derivative draws anew.

    Numerics:
        One seed is drawn from torch's generator of the device, so that `torch.manual_seed`, activation checkpointing
        and vmap's `randomness` mean what they mean for any random operation. The noise of a seed is the same on
        every device, and does not depend on strides.

    Example:
        >>> import torch, primitives as pr
        >>> generator = torch.manual_seed(0)
        >>> pr.functional.dropout(torch.ones(6), p=0.25).unique()
        tensor([0.0000, 1.3333])

    References:
        Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 15, 2014.
    """
    arguments.probability("dropout", p)

    check = functools.partial(arguments.dropout, inplace=inplace and training)

    def compute(x: Tensor) -> Tensor:
        # Where nothing is left to chance, torch draws nothing either.
        if not training or p == 0.0 or x.numel() == 0:
            return x
        seed = (
            torch.zeros((), dtype=torch.int64, device=x.device)
            if p == 1.0
            else torch.randint(MAX_SEED, (), device=x.device)
        )
        y = dropout_p(x, seed, None, float(p), 0)
        return x.copy_(y) if inplace else y

    return map_tensors("dropout", check, compute, input, {}, namespace=namespace)
