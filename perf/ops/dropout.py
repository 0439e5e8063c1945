"""Dropout, for a seed and an offset with more than 32 bits each, and its random words by their definition."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from perf.calls import Call, Operands, random
from perf.ops.record import PASSES, Op
from perf.ops.samples import make_samples, sample
from perf.ops.workload import DROPOUT_P, Workload
from primitives.ops.dropout.dropout import dropout_p

LOW = 2**32 - 1


def rounds(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """The four words for a counter of four words and a key of two (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & LOW, (a >> 32) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


@functools.cache
def block(seed: int, number: int) -> tuple[int, ...]:
    """The words of block `number` of the stream `seed`."""
    return rounds((number & LOW, (number >> 32) & LOW, 0, 0), (seed & LOW, (seed >> 32) & LOW))


def true_words(seed: int, offset: int, count: int) -> list[int]:
    """The first `count` words of the stream `seed` from block `offset` on."""
    return [block(seed, offset + i // 4)[i % 4] for i in range(count)]


@functools.lru_cache(maxsize=4)
def _kept(count: int, seed: int, offset: int, p: float) -> list[bool]:
    """Whether dropout keeps each of so many elements."""
    return [word >= p * 2**32 for word in true_words(seed, offset, count)]


def true_noise(shape: tuple[int, ...], seed: int, offset: int, p: float) -> torch.Tensor:
    """The factors of dropout for a tensor of this shape, in float64."""
    size = torch.Size(shape)
    kept = _kept(size.numel(), seed, offset, p)
    return torch.tensor(kept, dtype=torch.float64).reshape(size) * (1 / (1 - p) if p < 1 else 0.0)


SEED, OFFSET = -(2**40) + 12345, 2**33 + 7


def _drawn(functional: Any, x: Tensor, p: float = DROPOUT_P) -> Tensor:
    return functional.dropout(x, p, training=True)


def _dropout(x: Tensor, p: float) -> Tensor:
    return dropout_p(x, torch.tensor(SEED, device=x.device), torch.tensor(OFFSET, device=x.device), p, 0)


def _true_dropout(x: Tensor, p: float) -> Tensor:
    return x * true_noise(tuple(x.shape), SEED, OFFSET, p).to(x.device, x.dtype)


class Dropout(Operands):
    """Operands of dropout, and of the words of its samples."""

    MODULES: ClassVar = ("dropout.dropout", "dropout.philox")

    @classmethod
    def of(cls, workload: Workload) -> Any:
        """Random operands."""
        return cls(x=random(*workload.shape, dtype=workload.torch_dtype), p=DROPOUT_P)

    def steps(self, op: str, mode: str) -> list[Call]:
        """As for all, with a seed, or one for each sample, whose words are drawn too."""
        batch_ndim = int(mode == "batched")
        seed = torch.full(self.x.shape[:batch_ndim], SEED)
        noise = {"seed": seed, "offset": seed, "batch_ndim": batch_ndim, "size": self.x.shape[1:]}
        return Operands.steps(self.change(**noise), op, mode)

    def derived(self) -> dict[str, Any]:
        """Nothing: each of its derivatives is itself."""
        return {}


DROPOUT = Op(
    name="dropout",
    is_linear=True,
    num_kept=0,
    call=_drawn,
    function=_dropout,
    truth=_true_dropout,
    torch_function=_true_dropout,
    arguments=("x",),
    samples=make_samples(
        [
            *(sample((5, 13), p=0.1), sample((0, 5), p=0.5), sample((), p=0.3), sample((2, 8, 3, 4), p=0.9)),
            sample((9,), p=1.0),
        ],
        absent=[()],
        layouts=["contiguous", "transposed", "expanded", "channels_last"],
    ),
    small=sample((2, 3, 4), p=0.4),
    tiny=sample((1, 3), p=0.4),
    large=(sample((3, 4099), p=0.4),),
    not_kept=("x", "y"),
    operands=Dropout.of,
    # y_bar alone gives x_bar: what is dropped is drawn anew.
    passes={**PASSES, "backward": 2, "forward_backward": 4},
)
