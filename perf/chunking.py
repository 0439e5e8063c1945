"""What `chunk_size` and `chunks` do to the peak memory of `primitives.func`, measured in one run.

Each transform runs on a function whose intermediate values are much larger than its result, all at once and then in
smaller and smaller chunks. On the CPU the peak is that of the bytes allocated by torch, from its memory profiler,
which is exact and the same in every run; on CUDA it is `torch.cuda.max_memory_allocated`. Times are beside it as
ratios: smaller chunks trade time for memory.

Run: `python -m perf.chunking [--width N] [--device cuda]`. The exit status is 1 if a peak does not fall in proportion
to its chunk.
"""

from __future__ import annotations

import argparse
import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import benchmark

from primitives import func

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

ENTRIES = 64
# Entries of a chunk; None is all at once.
CHUNK_SIZES = (None, 32, 16, 8)
FEATURES = 4
WIDTH = 4096
# The peak of a chunk of 1/n may be this many times 1/n of the peak of all at once: operands, result and whole rows of
# bookkeeping do not shrink with it.
SLACK = 1.5


class Row(NamedTuple):
    """One measurement; the ratios are to the same transform all at once."""

    transform: str
    chunk: int | None
    peak_bytes: int
    peak_ratio: float
    time_ratio: float


def _peak(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes in use at most during `run`, beyond those before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        run()
    # The stubs of torch lack what its own memory timeline reads.
    events: list[Any] = profile.profiler.kineto_results.events()  # type: ignore[union-attr] - set while the profiler ran
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    return max(accumulate(change for *_, change in changes), default=0)


def _transforms(width: int, device: torch.device) -> dict[str, Callable[[int | None], Callable[[], Any]]]:
    """For each transform, the run in chunks of a size."""
    weight = torch.randn(width, FEATURES, device=device)
    out_weight = torch.randn(ENTRIES, width, device=device)
    direction = torch.randn(width, device=device)
    batch, inputs, narrow = (
        {"x": torch.randn(shape, device=device)} for shape in ((ENTRIES, FEATURES), (ENTRIES,), (FEATURES,))
    )

    def scalar(tree: dict[str, Tensor]) -> Tensor:
        return (weight @ tree["x"]).tanh().square().sum()

    def vector(tree: dict[str, Tensor]) -> Tensor:
        return out_weight @ (weight @ tree["x"]).tanh()

    def energy(tree: dict[str, Tensor]) -> Tensor:
        return (direction * tree["x"].square().sum()).tanh().sum()

    return {
        "vmap": lambda size: lambda: func.vmap(scalar, chunk_size=size)(batch),
        "chunk_vmap": lambda size: lambda: func.chunk_vmap(scalar, chunks=ENTRIES // (size or ENTRIES))(batch),
        "vmap of grad": lambda size: lambda: func.vmap(func.grad(scalar), chunk_size=size)(batch),
        "jacrev": lambda size: lambda: func.jacrev(vector, chunk_size=size)(narrow),
        "hessian": lambda size: lambda: func.hessian(energy, chunk_size=size)(inputs),
    }


def measure(width: int, device: torch.device) -> Iterator[Row]:
    """One row for each transform and chunk.

    Args:
        width: Number of intermediate values for each entry of the mapped axis.
        device: Where to run.
    """
    for name, in_chunks_of in _transforms(width, device).items():
        whole: tuple[float, int] | None = None
        for size in CHUNK_SIZES:
            run = in_chunks_of(size)
            seconds = benchmark.Timer("run()", globals={"run": run}).timeit(1).median
            peak_bytes = _peak(run, device)
            whole = whole or (seconds, peak_bytes)
            yield Row(name, size, peak_bytes, peak_bytes / whole[1], seconds / whole[0])


def failures(rows: list[Row]) -> list[Row]:
    """The measurements whose peak did not fall in proportion to the chunk."""
    return [row for row in rows if row.chunk is not None and row.peak_ratio > SLACK * row.chunk / ENTRIES]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, and say by the exit status whether every peak fell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    print(f"{ENTRIES} entries of {options.width} float32 values each, on {options.device}")
    print(f"{'transform':<14}{'chunk':>8}{'peak, KiB':>12}{'of all':>9}{'time, of all':>14}")
    rows = []
    for row in measure(options.width, torch.device(options.device)):
        rows.append(row)
        name, chunk, peak, of_all, time = row
        print(f"{name:<14}{chunk or 'all':>8}{peak / 1024:>12.0f}{of_all:>9.2f}{time:>14.2f}")
    missed = failures(rows)
    for row in missed:
        print(f"missed: {row.transform} in chunks of {row.chunk} peaks at {row.peak_ratio:.2f} of all at once")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
