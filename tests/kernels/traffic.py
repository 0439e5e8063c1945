"""A meter of the global memory traffic of Triton kernels, for tests in Triton's interpreter.

    with measure_traffic() as traffic:
        y, mean, rstd = layer_norm_fwd(x, None, None, 1, 0, 1e-5)
    check_traffic(traffic, read=[x], written=[y], small=[mean, rstd], launches=1)

Every load and store of the interpreter ends in one of four methods of its builder, whose signatures differ between
releases of Triton only behind the pointers, values and masks; the meter wraps these four. Lanes that are masked off do
not count. What a cache would serve counts like everything else: the figures are those of a GPU without caches.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor


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
    """Bytes of some accesses."""
    total = sum(access.addresses.size * access.itemsize for access in accesses)
    unique = 0
    for itemsize in {access.itemsize for access in accesses}:
        addresses = [access.addresses for access in accesses if access.itemsize == itemsize]
        unique += np.unique(np.concatenate(addresses)).size * itemsize
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
        """Bytes loaded from the memory of `tensors`, or from anywhere without any."""
        return self._count([access for launch in self.launches for access in launch.loads], tensors)

    def stored(self, *tensors: Tensor) -> Bytes:
        """Bytes stored to the memory of `tensors`, or to anywhere without any."""
        return self._count([access for launch in self.launches for access in launch.stores], tensors)

    def moved(self, *tensors: Tensor) -> int:
        """Bytes loaded and stored, every access counted."""
        return self.loaded(*tensors).total + self.stored(*tensors).total

    def _count(self, accesses: list[Accesses], tensors: tuple[Tensor, ...]) -> Bytes:
        if tensors:
            ranges = sorted({_memory(tensor) for tensor in tensors})
            accesses = [access.within(start, stop) for access in accesses for start, stop in ranges]
        return count(accesses)


# What a call may move beyond what it declares, for what is read again by each of a few programs.
TOLERANCE = 0.02


def check_traffic(
    traffic: Traffic,
    *,
    read: Sequence[Tensor] = (),
    written: Sequence[Tensor] = (),
    small: Sequence[Tensor] = (),
    extra: int = 0,
    launches: int,
) -> None:
    """Assert that a call moved what it declares and no more than `TOLERANCE` beyond it.

    Args:
        traffic: What the meter saw during the call.
        read: Full-size inputs, contiguous; one that takes several passes occurs as many times.
        written: Full-size results, contiguous.
        small: Statistics, parameters and results of their size, each moved once.
        extra: Bytes of partial results and of parameters that every program reads anew.
        launches: Number of kernels.
    """
    for tensor in read:
        declared = tensor.nbytes * sum(tensor is other for other in read)
        loaded = traffic.loaded(tensor)
        assert loaded.unique == tensor.nbytes
        assert declared <= loaded.total <= (1 + TOLERANCE) * declared, f"{loaded.total / tensor.nbytes} passes"
    for tensor in written:
        assert traffic.stored(tensor) == (tensor.nbytes, tensor.nbytes)
    assert traffic.num_launches == launches
    declared = sum(tensor.nbytes for tensor in (*read, *written, *small)) + extra
    assert declared <= traffic.moved() <= (1 + TOLERANCE) * declared, f"{traffic.moved()} bytes, {declared} declared"


def _memory(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


# Methods of the builder: positions of the pointers and of the mask among their arguments, and what they count as.
_METHODS = {
    "create_masked_load": (0, 1, ("loads",)),
    "create_masked_store": (0, 2, ("stores",)),
    "create_atomic_cas": (0, None, ("loads", "stores")),
    "create_atomic_rmw": (1, 3, ("loads", "stores")),
}


def _recording(traffic: Traffic, name: str, original: Callable) -> Callable:
    pointer_index, mask_index, kinds = _METHODS[name]

    def method(self, *args, **kwargs):
        pointers, mask = args[pointer_index], None if mask_index is None else args[mask_index]
        addresses = np.asarray(pointers.data)
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape)]
        itemsize = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        for kind in kinds:
            getattr(traffic.launches[-1], kind).append(Accesses(addresses.ravel(), itemsize))
        return original(self, *args, **kwargs)

    return method


@contextlib.contextmanager
def measure_traffic() -> Iterator[Traffic]:
    """Record what the kernels launched inside load and store.

    The tensors asked about afterwards must have been alive throughout: freed memory may serve another tensor.
    """
    traffic = Traffic()
    builder = interpreter.InterpreterBuilder
    originals = {name: getattr(builder, name) for name in _METHODS}
    run_grid = interpreter.GridExecutor.__call__

    def run_and_count(self, *args, **kwargs):
        traffic.launches.append(Launch(0 if callable(self.grid) else math.prod(self.grid)))
        return run_grid(self, *args, **kwargs)

    for name, original in originals.items():
        setattr(builder, name, _recording(traffic, name, original))
    interpreter.GridExecutor.__call__ = run_and_count
    try:
        yield traffic
    finally:
        interpreter.GridExecutor.__call__ = run_grid
        for name, original in originals.items():
            setattr(builder, name, original)
