"""Philox words: launcher of the kernel that stores random words for explicit seeds and offsets."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..runtime.arithmetic import MAX_ALIGN, cdiv
from ..runtime.philox_steps import philox_kernel
from ..runtime.views import device_guard, per_stream
from ..tuning import tunable
from ._plan import plan_philox


@tunable
def philox_words(seed: Tensor, offset: Tensor, size: Sequence[int]) -> Tensor:
    """Random words of each stream.

    Args:
        seed: Keys `[*batch]`, int64.
        offset: Numbers of the blocks to begin at `[*batch]`, int64.
        size: Shape of the words of one stream.

    Returns:
        Words `[*batch, *size]`, int64 in `[0, 2**32)`, contiguous.
    """
    words = seed.new_empty((*seed.shape, *size))
    if not words.numel():
        return words
    num_words = math.prod(size)
    (seeds, seed_stride), (offsets, offset_stride) = per_stream(seed), per_stream(offset)
    plan = plan_philox(num_words, words.device)
    grid = (seed.numel() * cdiv(num_words, plan.block_cols),)
    with device_guard(words):
        constants = {"BLOCK": plan.block_cols, "ALIGN": math.gcd(MAX_ALIGN, num_words), "num_warps": plan.num_warps}
        philox_kernel[grid](words, seeds, offsets, num_words, seed_stride, offset_stride, **constants)
    return words
