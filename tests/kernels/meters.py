"""Meters of a launcher: bytes that its kernels move, products of matrices, launches, and what torch does beside them.

    with measured() as seen:
        results = call.results()
    check_cost(call, seen, results)

Lanes that are masked off do not count. Loads that a cache would serve count like all others: the figures are those of
a GPU without caches.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perf.calls import Call
from tests.kernels.interpreting import Accesses, Launch, watched
from triton_kernels.runtime.kernel import intercept

# Share by which what is moved beside full-size operands and results may differ from what is declared: parameters,
# statistics and partial results, of which a kernel reads a few numbers again.
TOLERANCE = 0.02
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
COPIES = {"clone", "copy_", "_to_copy"}


class Bytes(NamedTuple):
    """Bytes touched: every access counted (`total`), and every address once (`unique`)."""

    total: int = 0
    unique: int = 0


class Seen(TorchDispatchMode):
    """The findings of `measured`: launches, names of kernels, and operations of torch beside them that touch memory."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.kernels: list[str] = []
        self.operations: list[str] = []
        # Kept alive, so that no two of them have one address.
        self.allocated: list[Tensor] = []
        self._launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._launching:
            name = func.overloadpacket.__name__
            if name in ALLOCATIONS:
                self.allocated.append(result)
            elif not _is_view(func) and _has_tensors(func):
                self.operations.append(name)
        return result

    def launch(self, kernel: Any, grid: Any, args: tuple, constants: dict[str, Any]) -> None:
        """Launch a kernel, whose interpreter does as it likes with tensors."""
        self.kernels.append(kernel.__name__)
        self._launching = True
        try:
            kernel.function[grid](*args, **constants)
        finally:
            self._launching = False

    def loaded(self, *tensors: Tensor) -> Bytes:
        """Bytes loaded from the memory of `tensors`, or without any from anywhere: then only the total."""
        return _bytes([access for launch in self.launches for access in launch.loads], tensors)

    def stored(self, *tensors: Tensor) -> Bytes:
        """Bytes stored, likewise."""
        return _bytes([access for launch in self.launches for access in launch.stores], tensors)

    def scratch(self, results: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Shapes of the tensors with elements that were allocated inside and hold none of the results."""
        kept = {result.untyped_storage().data_ptr() for result in results}
        found = [tensor for tensor in self.allocated if tensor.numel()]
        return [tuple(tensor.shape) for tensor in found if tensor.untyped_storage().data_ptr() not in kept]


def _bytes(accesses: list[Accesses], tensors: tuple[Tensor, ...]) -> Bytes:
    if not tensors:
        return Bytes(sum(access.addresses.size * access.itemsize for access in accesses))
    total = unique = 0
    storages = (tensor.untyped_storage() for tensor in tensors)
    for start, stop in {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}:
        inside = [part for access in accesses if (part := access.within(start, stop)).addresses.size]
        total += sum(access.addresses.size * access.itemsize for access in inside)
        # A map of the memory takes a tenth of the time that sorting the addresses takes.
        touched = np.zeros(stop - start, dtype=bool)
        for access in inside:
            touched[access.addresses - np.uint64(start)] = True
        # The elements of one tensor are all of one size.
        unique += int(touched.sum()) * max((access.itemsize for access in inside), default=0)
    return Bytes(total, unique)


def _has_tensors(func: Any) -> bool:
    return any("Tensor" in str(value.type) for value in (*func._schema.arguments, *func._schema.returns))


def _is_view(func: Any) -> bool:
    """Whether an operation returns what an argument of it holds, and writes to none."""
    return not func._schema.is_mutable and any(result.alias_info is not None for result in func._schema.returns)


@contextlib.contextmanager
def measured() -> Iterator[Seen]:
    """Record launches and operations of torch inside; tensors asked about later must live on, for memory is reused."""
    seen = Seen()
    with watched() as seen.launches, intercept(seen.launch), seen:
        yield seen


def check_cost(call: Call, seen: Seen, results: Sequence[Tensor]) -> None:
    """Assert that a call took what it declares: launches, copies, and the bytes of operands, results and all else."""
    name, cost, results = call.launcher.__name__, call.cost(), [result for result in results if result.numel()]
    others = [operation for operation in seen.operations if operation not in COPIES]
    assert not others, f"{name} runs {', '.join(others)} beside its kernels"
    scratch = seen.scratch(results)
    assert len(scratch) <= 1, f"{name} allocates {len(scratch)} scratch tensors, {scratch}, beside its results"
    copies = len(seen.operations)
    assert copies == call.copies, f"{name} runs {copies} copies, {call.copies} declared"
    assert len(seen.kernels) == cost.launches, f"{name} launches {seen.kernels}, {cost.launches} launches are declared"
    matmuls = [sizes for launch in seen.launches for sizes in launch.matmuls]
    found, flops = len(matmuls), sum(2 * math.prod(sizes) for sizes in matmuls)
    assert found == cost.tile_matmuls, f"{name} multiplies {found} tiles, {cost.tile_matmuls} declared"
    assert flops == cost.flops, f"{name} takes {flops} operations to multiply, {cost.flops} declared"
    if copies:
        return
    given = inspect.signature(call.launcher).bind(*call.args).arguments
    for operand, declared in cost.loads:
        loaded = seen.loaded(given[operand]).total
        assert loaded == declared, f"{name} loads {loaded} bytes of {operand}, {declared} declared"
    read, written = seen.loaded(*call.tensors()).unique if call.tensors() else 0, seen.stored(*results)
    assert read == cost.bytes_read, f"{name} reads {read} bytes of operands, {cost.bytes_read} declared"
    if results:
        assert written.unique == cost.bytes_written, f"{name} writes {written.unique}, {cost.bytes_written} declared"
        assert written.total == written.unique, f"{name} writes a result twice"
    moved, declared = seen.loaded().total + seen.stored().total, cost.bytes_moved + cost.bytes_reread
    beside = declared - cost.bytes_written - sum(nbytes for _, nbytes in cost.loads)
    assert abs(moved - declared) <= TOLERANCE * beside, f"{name} moves {moved} bytes, {declared} declared"
    # Bytes that are swept again are among those moved beyond the minimum; all of them were loaded twice.
    swept = sum(sweep.num_bytes for sweep in cost.sweeps)
    assert 0 <= swept <= cost.bytes_moved - cost.minimum_bytes, f"{name} declares {swept} bytes as swept again"
    twice = [seen.loaded(tensor) for tensor in call.tensors()]
    assert swept <= sum(loaded.total - loaded.unique for loaded in twice), f"{name} does not sweep {swept} bytes again"
