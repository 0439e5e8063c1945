"""A meter of the global memory traffic of Triton kernels, for tests in Triton's interpreter.

    with measure_traffic() as traffic:
        y, mean, rstd = layer_norm_fwd(x, None, None, 1, 0, 1e-5)
    check_cost(traffic, costs.layer_norm_fwd(x, None, None, 1, 0, 1e-5), [x], [y, mean, rstd])

Lanes that are masked off do not count. What a cache would serve counts like everything else: the figures are those of
a GPU without caches.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from triton.runtime import interpreter

from tests.kernels.bounds import METHODS, active_pointers, addresses_of, bounds_checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from triton_kernels.costs import Cost


class Accesses(NamedTuple):
    """Addresses of the elements that one load or store touched, one entry per active lane, and their size in bytes."""

    addresses: np.ndarray
    itemsize: int

    def within(self, start: int, stop: int) -> Accesses:
        """Those in a range of addresses."""
        return self._replace(addresses=self.addresses[(self.addresses >= start) & (self.addresses < stop)])


class Bytes(NamedTuple):
    """Bytes touched: every access counted (`total`), and every address once (`unique`)."""

    total: int = 0
    unique: int = 0


def count(accesses: list[Accesses]) -> Bytes:
    """Bytes of some accesses of one tensor."""
    total = sum(access.addresses.size * access.itemsize for access in accesses)
    unique = 0
    for itemsize in {access.itemsize for access in accesses}:
        addresses = [access.addresses for access in accesses if access.itemsize == itemsize and access.addresses.size]
        if not addresses:
            continue
        # A map of one tensor's memory takes a tenth of the time that sorting the addresses takes.
        first = min(part.min() for part in addresses)
        touched = np.zeros((max(part.max() for part in addresses) - first) // itemsize + 1, dtype=bool)
        for part in addresses:
            touched[(part - first) // itemsize] = True
        unique += int(touched.sum()) * itemsize
    return Bytes(total, unique)


class Launch:
    """Loads and stores of one launch by `num_programs` programs; an atomic operation is one of each."""

    def __init__(self, num_programs: int) -> None:
        """Start with no access."""
        self.num_programs = num_programs
        self.loads: list[Accesses] = []
        self.stores: list[Accesses] = []


class Traffic:
    """What a meter saw, launch by launch."""

    def __init__(self) -> None:
        """Start with no launch."""
        self.launches: list[Launch] = []

    @property
    def num_launches(self) -> int:
        """Number of kernels launched."""
        return len(self.launches)

    def loaded(self, *tensors: Tensor) -> Bytes:
        """Bytes loaded from the memory of `tensors`, or from anywhere (then only the total) without any."""
        return self._count([access for launch in self.launches for access in launch.loads], tensors)

    def stored(self, *tensors: Tensor) -> Bytes:
        """Bytes stored to the memory of `tensors`, or to anywhere (then only the total) without any."""
        return self._count([access for launch in self.launches for access in launch.stores], tensors)

    def moved(self, *tensors: Tensor) -> int:
        """Bytes loaded and stored, every access counted."""
        return self.loaded(*tensors).total + self.stored(*tensors).total

    def _count(self, accesses: list[Accesses], tensors: tuple[Tensor, ...]) -> Bytes:
        if not tensors:
            return Bytes(sum(access.addresses.size * access.itemsize for access in accesses), 0)
        ranges = {_memory(tensor) for tensor in tensors}
        counts = [count([access.within(start, stop) for access in accesses]) for start, stop in ranges]
        return Bytes(sum(found.total for found in counts), sum(found.unique for found in counts))


# Share by which what is moved beside full-size operands and results may differ from what is declared: parameters,
# statistics and partial results, of which a kernel reads a few numbers again.
TOLERANCE = 0.02


def check_cost(traffic: Traffic, cost: Cost, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Assert that a call took what its cost declares: bytes of operands and results, bytes moved, launches.

    Args:
        traffic: What the meter saw during the call.
        cost: What the call declares.
        operands: What it was given, each in memory of its own.
        results: What it returned.
    """
    assert traffic.num_launches == cost.launches, f"{traffic.num_launches} launches, {cost.launches} declared"
    read, written = traffic.loaded(*operands).unique, traffic.stored(*results)
    assert read == cost.bytes_read, f"{read} bytes of operands are read, {cost.bytes_read} declared"
    assert written.unique == cost.bytes_written, f"{written.unique} bytes written, {cost.bytes_written} declared"
    assert written.total == written.unique, "a result is written twice"
    moved, declared = traffic.moved(), cost.bytes_moved + cost.bytes_reread
    beside = declared - cost.bytes_written - sum(nbytes for _, nbytes in cost.loads)
    assert abs(moved - declared) <= TOLERANCE * beside, f"{moved} bytes are moved, {declared} declared"


def _memory(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _recording(traffic: Traffic, name: str, original: Callable) -> Callable:
    def method(self, *args, **kwargs):
        pointers, itemsize = active_pointers(name, args)
        for kind in METHODS[name][2]:
            getattr(traffic.launches[-1], kind).append(Accesses(addresses_of(pointers), itemsize))
        return original(self, *args, **kwargs)

    return method


@contextlib.contextmanager
def measure_traffic() -> Iterator[Traffic]:
    """Record what the kernels launched inside load and store, and hold them to the bounds of their tensors.

    The tensors asked about afterwards must have been alive throughout: freed memory may serve another tensor.
    """
    traffic = Traffic()
    with bounds_checked(), _recorded(traffic):
        yield traffic


@contextlib.contextmanager
def _recorded(traffic: Traffic) -> Iterator[None]:
    builder = interpreter.InterpreterBuilder
    originals = {name: getattr(builder, name) for name in METHODS}
    run_grid = interpreter.GridExecutor.__call__

    def run_and_count(self, *args, **kwargs):
        traffic.launches.append(Launch(0 if callable(self.grid) else math.prod(self.grid)))
        return run_grid(self, *args, **kwargs)

    for name, original in originals.items():
        setattr(builder, name, _recording(traffic, name, original))
    interpreter.GridExecutor.__call__ = run_and_count
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = run_grid
        for name, original in originals.items():
            setattr(builder, name, original)
