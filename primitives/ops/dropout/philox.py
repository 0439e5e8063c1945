r"""Random words from an explicit seed and offset: what every other random number of this package is made of.

    words[*batch, i] = word i of the stream `seed[*batch]`, counted from block `offset[*batch]`

The words depend on nothing but seed, offset and i: not on the device, nor on how many are drawn at a time. The stream
is that of Philox4x32-10, as Triton's `tl.randint4x` draws it. A counter of four 32-bit words goes through ten rounds,
each of which multiplies two of the words by constants, and mixes high and low halves of the products with the other two
words and with the key:

    c0, c2 = high(B * c2) ^ c1 ^ k0, high(A * c0) ^ c3 ^ k1
    c1, c3 = low(B * c2), low(A * c0)
    k0, k1 = k0 + KEY_A, k1 + KEY_B

It gives four random 32-bit words. The key is the seed, the two low words of the counter are a 64-bit block number, and
its two high words are zero. Block `b` holds the words `4 * b` to `4 * b + 3` of the stream that belongs to the seed.

Shapes: seed and offset are [*batch], int64; words are [*batch, *size], int64 in [0, 2**32).

References:
    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive, triton_kernels_module
from primitives.ops.axes import fold_batch

# Seeds are drawn below this: all that torch.randint can draw from.
MAX_SEED = 2**63 - 1
WORDS_PER_BLOCK = 4

# Multipliers of the rounds and steps of the key (golden ratio, and square root of 3 less 1), from the paper.
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
NUM_ROUNDS = 10
LOW_WORD = 0xFFFFFFFF

# Blocks that are computed at a time: the ten or so temporaries of 64 KiB each stay in a processor's second cache.
CHUNK_BLOCKS = 8192


def philox4x32(seed: Tensor, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each block number, int64 in `[0, 2**32)`; keys may be negative, and have as many axes."""
    axes = [1] * block.dim()
    rounds = torch.arange(NUM_ROUNDS, device=seed.device).view(-1, 1, *axes)
    steps, multipliers = (
        torch.tensor(pair, device=seed.device).view(2, *axes)
        for pair in ((KEY_A, KEY_B), (ROUND_B - 2**32, ROUND_A - 2**32))
    )
    # Pairs of words are computed together: small tensors cost what the calls cost.
    keys = ((torch.stack([seed, seed >> 32]) & LOW_WORD) + rounds * steps) & LOW_WORD
    # A batch of keys alone, under vmap, is one of words too: they are written into below.
    even = torch.stack([block & LOW_WORD, torch.zeros_like(block ^ seed)])  # c0, c2
    odd = torch.stack([(block >> 32) & LOW_WORD, torch.zeros_like(block)])  # c1, c3
    for key in keys:
        # Products of 32-bit words fill all 64 bits, and one that overflows int64 may be any number in compiled C++:
        # multipliers are less by 2**32, which the high word of a product makes up for.
        factors = even.flip(0)
        products = factors * multipliers
        even = (products >> 32).add_(factors).bitwise_xor_(odd).bitwise_xor_(key)
        odd = products.bitwise_and_(LOW_WORD)
    return even[0], odd[0], even[1], odd[1]


def draw_words(
    seed: Tensor, offset: Tensor | None, num_words: int, convert: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The first `num_words` words of each stream from block `offset` on, or what `convert` makes of them.

    `seed` and `offset` (None for 0) are `[*batch]`, the result is `[*batch, num_words]`; `convert` is elementwise.
    """
    num_blocks = -(-num_words // WORDS_PER_BLOCK)
    first = torch.zeros_like(seed) if offset is None else offset
    # A graph draws all at once: its nodes do not follow from sizes, which may be symbols, and its compiler fuses them.
    is_graph, pieces = torch._C._len_torch_dispatch_stack() > 0, []
    for start in (0,) if is_graph else range(0, max(num_blocks, 1), CHUNK_BLOCKS):
        stop = num_blocks if is_graph else min(start + CHUNK_BLOCKS, num_blocks)
        block = first.unsqueeze(-1) + torch.arange(start, stop, dtype=torch.int64, device=seed.device)
        words = torch.stack(philox4x32(seed.unsqueeze(-1), block), -1).flatten(-2)
        pieces.append(words if convert is None else convert(words))
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
    return whole[..., :num_words]


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
