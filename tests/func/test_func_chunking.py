"""chunk_size and chunks bound peak memory: bytes that torch allocates, from its profiler, the same in every run."""

import pytest
import torch

from perf.memory import peak
from primitives import func

ENTRIES, WIDTH = 64, 512
# The peak of a chunk of 1/n may be this many times 1/n of the peak of all at once: operands, result and whole rows of
# bookkeeping do not shrink with it.
SLACK = 1.5
WEIGHT, OUT_WEIGHT, DIRECTION = torch.ones(WIDTH, 4), torch.ones(ENTRIES, WIDTH), torch.ones(WIDTH)


def scalar(tree):
    return (WEIGHT @ tree["x"]).tanh().square().sum()


def vector(tree):
    return OUT_WEIGHT @ (WEIGHT @ tree["x"]).tanh()


def energy(tree):
    return (DIRECTION * tree["x"].square().sum()).tanh().sum()


@pytest.mark.parametrize(
    "function, shape",
    [
        (lambda size: func.vmap(scalar, chunk_size=size), (ENTRIES, 4)),
        (lambda size: func.chunk_vmap(scalar, chunks=ENTRIES // (size or ENTRIES)), (ENTRIES, 4)),
        (lambda size: func.vmap(func.grad(scalar), chunk_size=size), (ENTRIES, 4)),
        (lambda size: func.jacrev(vector, chunk_size=size), (4,)),
        (lambda size: func.hessian(energy, chunk_size=size), (ENTRIES,)),
    ],
    ids=["vmap", "chunk_vmap", "vmap of grad", "jacrev", "hessian"],
)
def test_the_peak_falls_with_the_chunk(function, shape):
    tree = {"x": torch.randn(shape)}
    whole, *peaks = (peak(lambda size=size: function(size)(tree)) for size in (None, 32, 16, 8))
    # All values of all entries, at least: the meter sees the work.
    assert whole >= ENTRIES * WIDTH * 4
    for size, found in zip((32, 16, 8), peaks, strict=True):
        assert found <= SLACK * size / ENTRIES * whole
