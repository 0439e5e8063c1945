r"""Random words from an explicit seed and offset: what every other random number of this package is made of.

    words[*batch, i] = word i of the stream `seed[*batch]`, counted from block `offset[*batch]`

The stream is that of Philox4x32-10 (see `_philox`). The words depend on nothing but seed, offset and i: not on the
device, nor on how many are drawn at a time.

Shapes: seed and offset are [*batch], int64; words are [*batch, *size], int64 in [0, 2**32).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from primitives._core import Primitive, triton_kernels_module
from primitives.ops.axes import fold_batch
from primitives.ops.dropout.words import draw_words

philox_p = Primitive(
    "philox",
    "(Tensor seed, Tensor offset, SymInt[] size) -> Tensor words",
    state=("words",),
    decomposable=True,
    recomputable=True,
)


@philox_p.def_reference
def _philox_reference(seed: Tensor, offset: Tensor, size: Sequence[int]) -> Tensor:
    return draw_words(seed, offset, math.prod(size)).reshape(*seed.shape, *size)


@philox_p.def_fake
def _philox_fake(seed: Tensor, offset: Tensor, size: Sequence[int]) -> Tensor:
    return seed.new_empty((*seed.shape, *size))


@philox_p.def_kernel("cuda")
def _philox_cuda(seed: Tensor, offset: Tensor, size: Sequence[int]) -> Tensor:
    return triton_kernels_module("dropout.philox").philox_words(seed, offset, size)


@philox_p.def_vmap
def _philox_vmap(batch: Any, primals: Any) -> tuple[Tensor, int]:
    return philox_p(*fold_batch(batch, primals, ("seed", "offset"))), 0
