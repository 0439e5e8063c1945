"""Memory whose every byte knows if it is anybody's and has a value, and that of a launch's arguments.

All loads, stores and copies go through `Memory`; `Global` and `Shared` add what their accesses are checked for.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, UntypedStorage

from primitives.testing._ptx.arithmetic import KINDS, UNSIGNED
from primitives.testing._ptx.code import Code, Instruction

Array = Any

# Where the addresses of kernels begin, and bytes between storages: nothing that a kernel adds by mistake leads to
# another storage.
BASE, GAP = 1 << 40, 512
SECTOR_BYTES = 32
# Bits of what may be under way in shared memory.
COPY, PRODUCT = 1, 2
_UNDER_WAY = {COPY: ("unfinished copy", "cp.async"), PRODUCT: ("unfinished product", "wgmma")}
# A word whose every byte is 1.
_ONES = {size: kind.type(int.from_bytes(b"\1" * size, "little")) for size, kind in UNSIGNED.items()}


class Fault(NamedTuple):
    """Something wrong that a kernel does.

    Attributes:
        kernel: Its name.
        kind: One of the kinds that `check_kernel` lists.
        line: Of the PTX.
        times: How often.
        detail: The first time, with the instruction.
    """

    kernel: str
    kind: str
    line: int
    times: int
    detail: str

    def __str__(self) -> str:
        return f"{self.kernel}, line {self.line}: {self.kind} ({self.times} times): {self.detail}"


class Faults(dict[tuple[str, int], Fault]):
    """All faults of a launch, by kind and line."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self._kernel = kernel
        # The first read of what nobody wrote, which undefined values follow from.
        self.origin = ""

    def note(self, kind: str, instruction: Instruction, wrong: Any, detail: Callable[[int], str] | str) -> None:
        """Count where an instruction is wrong; the detail of the first place is kept."""
        if not (count := int(np.count_nonzero(wrong))):
            return
        key = kind, instruction.line
        if key not in self:
            first = detail if isinstance(detail, str) else detail(int(np.flatnonzero(wrong)[0]))
            self[key] = Fault(self._kernel, *key, 0, f"{first}: `{instruction.text}`")
        self[key] = self[key]._replace(times=self[key].times + count)


class Lanes(NamedTuple):
    """Threads that execute an instruction: among those that run, in the grid, in their block, and barriers so far.

    A barrier of the block also counts as one of the warp.
    """

    numbers: Array
    in_grid: Array
    blocks: Array
    threads: Array
    epochs: Array
    warp_epochs: Array


class Memory:
    """Bytes `data`, of which `valid` are anybody's, and nobody has written `undefined`."""

    # What it is when threads store different values at one place in one instruction.
    lost = "replicas differ"
    data: Array
    valid: Array
    undefined: Array

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def where(self, at: int) -> str:
        """A place in words."""
        raise NotImplementedError

    def check(self, instruction: Instruction, lanes: Lanes, at: Array, size: int, changed: Any = None) -> None:
        """Look at a load, or a store of which `changed`, `[lane, count]`, are places that have other values yet."""
        raise NotImplementedError

    def load(
        self, instruction: Instruction, lanes: Lanes, at: Array, count: int, dtype: np.dtype
    ) -> tuple[Array, Array]:
        """Values `[lane, count]`, and which of them nobody has written."""
        at = self.place(instruction, at, count * dtype.itemsize)
        self.check(instruction, lanes, at, count * dtype.itemsize)
        index = at[:, None] // dtype.itemsize + np.arange(count)
        undefined = self.undefined.view(UNSIGNED[dtype.itemsize])[index] != 0
        if undefined.any():
            self.faults.origin = self.faults.origin or self.where(int(at[undefined.any(1)][0]))
        return self.data.view(dtype)[index], undefined

    def store(self, instruction: Instruction, lanes: Lanes, at: Array, values: Array, undefined: Array) -> None:
        """Store words `[lane, count]`, of which some are undefined."""
        count, size = values.shape[1], values.itemsize
        at = self.place(instruction, at, count * size)
        index = at[:, None] // size + np.arange(count)
        data, shadow = self.data.view(values.dtype), self.undefined.view(values.dtype)
        self.check(instruction, lanes, at, count * size, (data[index] != values) | (shadow[index] != 0))
        data[index], shadow[index] = values, undefined * _ONES[size]
        kept = data[index]

        def detail(first: int) -> str:
            kind, place = f"f{size}" if size > 1 else "u1", slice(first, first + 1)
            mine, theirs = (each.ravel()[place].view(kind)[0] for each in (values, kept))
            return f"threads store {mine:.9g} and {theirs:.9g} at one place, {self.where(int(at[first // count]))}"

        # Copies of one result in several threads, which fused products can leave a rounding apart.
        self.faults.note(self.lost, instruction, kept != values, detail)

    def place(self, instruction: Instruction, found: Array, size: int) -> Array:
        """Where accesses go in `data`; one that may not be is reported, and goes to what is nobody's."""
        at, word = found - found % size, min(size, 8)
        outside = (at < 0) | (at > len(self.data) - size)
        index = np.where(outside, 0, at)[:, None] // word + np.arange(size // word)
        outside |= (self.valid.view(UNSIGNED[word])[index] != _ONES[word]).any(1)
        for kind, wrong in (("misaligned", at != found), ("out of bounds", outside)):
            self.faults.note(kind, instruction, wrong, lambda i: f"{size} bytes at {self.where(int(found[i]))}")
        return np.where(outside, 0, at)


class _Span(NamedTuple):
    """A storage: where it begins here, names of its tensors, and of each byte the value, and what `Memory` knows."""

    at: int
    name: str
    data: Array
    valid: Array
    undefined: Array


class _Access(NamedTuple):
    """One execution of a load or store: first byte, threads by number in the grid, and what a store changed."""

    instruction: Instruction
    size: int
    at: Array
    threads: Array
    changed: Array | None


class Traffic(NamedTuple):
    """What the loads, or the stores, of a kernel touch of one storage.

    Attributes:
        num_bytes: Bytes, of each execution by a block every byte once, whichever threads ask for it.
        distinct_bytes: Every byte once.
        requests: Executions by a warp.
        sectors: Parts of 32 bytes that these touch, each once a request.
        widths: Bytes that a thread asks for at once.
    """

    num_bytes: int
    distinct_bytes: int
    requests: int
    sectors: int
    widths: frozenset[int]


class Global(Memory):
    """The storages of tensors, between gaps; of some, `unwritten` says which bytes nobody has written."""

    lost = "block race"

    def __init__(
        self, tensors: Iterable[tuple[str, Tensor]], unwritten: Mapping[UntypedStorage, Array], faults: Faults
    ) -> None:
        super().__init__(faults)
        found: dict[int, tuple[UntypedStorage, list[str], Array]] = {}
        for name, each in tensors:
            storage, size = each.untyped_storage(), each.element_size()
            if storage.nbytes():
                nobodys = np.zeros(storage.nbytes(), np.uint8)
                _, names, valid = found.setdefault(storage.data_ptr(), (storage, [], nobodys))
                names.append(name)
                strides = (*(stride * size for stride in each.stride()), 1)
                start = valid[each.storage_offset() * size :]
                np.lib.stride_tricks.as_strided(start, (*each.shape, size), strides)[...] = 1
        self._spans: dict[int, _Span] = {}
        self._size = GAP
        for pointer, (storage, names, valid) in found.items():
            data = np.ctypeslib.as_array((ctypes.c_uint8 * len(valid)).from_address(pointer))
            at, undefined = self._size + pointer % GAP, unwritten.get(storage, np.zeros_like(valid))
            self._spans[pointer] = _Span(at, ", ".join(names), data, valid, undefined)
            self._size = -(-(at + len(data) + GAP) // GAP) * GAP
        self.data, self.valid, self.undefined = (np.zeros(self._size, np.uint8) for _ in range(3))
        for at, _, data, valid, undefined in self._spans.values():
            span = slice(at, at + len(data))
            self.data[span], self.valid[span], self.undefined[span] = data, valid, undefined & valid
        # Loads, and stores.
        self._accesses: tuple[list[_Access], list[_Access]] = [], []

    def address(self, tensor: Tensor) -> int:
        """Where kernels find a tensor; 0 for one without memory."""
        span = self._spans.get(tensor.untyped_storage().data_ptr())
        return 0 if span is None else BASE + span.at + int(tensor.storage_offset()) * tensor.element_size()

    def write_back(self) -> None:
        """Put what the kernel has stored into the storages, and into what nobody has written of them."""
        for at, _, data, valid, undefined in self._spans.values():
            data[:] = self.data[at : at + len(data)]
            # Where no element lies nothing has changed.
            undefined &= self.undefined[at : at + len(data)] | ~valid & 1

    def where(self, at: int) -> str:
        """The byte of the nearest storage."""
        spans = self._spans.values()
        start, name, data, *_ = min(spans, key=lambda span: max(span.at - at, at - span.at - len(span.data) + 1))
        return f"byte {at - start} of {name} ({len(data)} bytes)"

    def check(self, instruction: Instruction, lanes: Lanes, at: Array, size: int, changed: Any = None) -> None:
        """Remember an access for `check_blocks` and `traffic`."""
        self._accesses[changed is not None].append(_Access(instruction, size, at, lanes.in_grid, changed))

    def check_blocks(self, threads: int) -> None:
        """Blocks run in any order: none may touch what another one stores, unless that was there before."""
        loads, stores = self._accesses
        unit = min([1 if access.size == 1 else 2 for access in (*loads, *stores)], default=2)
        writer = np.full(self._size // unit, -1, np.int64)
        for access in (*stores, *loads):
            blocks = (access.threads // threads)[:, None]
            units = access.at[:, None] // unit + np.arange(access.size // unit)
            other = (writer[units] >= 0) & (writer[units] != blocks)
            if access.changed is not None:
                other &= access.changed.any(1)[:, None]
                writer[units] = blocks
            if other.any():
                what = "loads" if access.changed is None else "stores"
                what += f" what another block stores, {self.where(int(units[other][0]) * unit)}"
                self.faults.note("block race", access.instruction, other, what)

    def traffic(self, is_store: bool, threads: int) -> dict[str, Traffic]:
        """What was loaded, or stored, by storage."""
        found = {}
        for start, name, data, *_ in self._spans.values():
            num_bytes, requests, sectors, widths = 0, 0, 0, set()
            touched = np.zeros(len(data), bool)
            for access in self._accesses[is_store]:
                inside = (access.at >= start) & (access.at < start + len(data))
                if not inside.any():
                    continue
                at, lanes = access.at[inside], access.threads[inside]
                widths.add(access.size)
                num_bytes += access.size * len(np.unique(lanes // threads * self._size + at))
                requests += len(np.unique(lanes // 32))
                sector = at[:, None] // SECTOR_BYTES + np.arange(-(-access.size // SECTOR_BYTES))
                sectors += len(np.unique(lanes[:, None] // 32 * self._size + sector))
                touched[((at - start)[:, None] + np.arange(access.size)).ravel()] = True
            found[name] = Traffic(num_bytes, int(touched.sum()), requests, sectors, frozenset(widths))
        return found


class _Touches:
    """Who touched each unit of memory since its last barrier: the lowest and the highest thread, and when."""

    def __init__(self, num_units: int) -> None:
        self.lowest, self.highest, self.epochs, self.warp_epochs = np.full((4, num_units), -1, np.int32)

    def put(self, units: Array, lanes: Lanes) -> None:
        """Threads are the only ones that touch units `[lane, count]`; of several, the last."""
        self.lowest[units] = self.highest[units] = lanes.threads[:, None]
        self.epochs[units], self.warp_epochs[units] = lanes.epochs[:, None], lanes.warp_epochs[:, None]

    def add(self, units: Array, lanes: Lanes) -> None:
        """Threads touch units, as others do."""
        threads, is_new = lanes.threads[:, None], self.epochs[units] != lanes.epochs[:, None]
        lowest, highest = self.lowest[units], self.highest[units]
        self.put(units, lanes)
        # Threads are in ascending order, and the last assignment of several to one place counts.
        self.highest[units] = np.where(is_new, threads, np.maximum(highest, threads))
        self.lowest[units[::-1]] = np.where(is_new, threads, np.minimum(lowest, threads))[::-1]

    def unordered(self, units: Array, lanes: Lanes) -> tuple[Array, Array]:
        """Whether no barrier lies between threads and others that touched the same units, and who these are."""
        threads, lowest, highest = lanes.threads[:, None], self.lowest[units], self.highest[units]
        others = np.where((lowest // 32 != threads // 32) | (highest == threads), lowest, highest)
        is_near = (others // 32 == threads // 32) & (self.warp_epochs[units] != lanes.warp_epochs[:, None])
        return (self.epochs[units] == lanes.epochs[:, None]) & (others != threads) & ~is_near, others


def _bank_conflicts(threads: Array, at: Array, size: int) -> int:
    """How often threads wait: each of 32 banks hands out one word to those that together ask for 128 bytes."""
    words = at[:, None] // 4 + np.arange(max(size // 4, 1))
    distinct = np.unique(threads[:, None] * max(size, 4) // 128 << 32 | words)
    banks, counts = np.unique(distinct >> 32 << 5 | distinct & 31, return_counts=True)
    starts = np.flatnonzero(np.diff(banks >> 5, prepend=-1))
    return int((np.maximum.reduceat(counts, starts) - 1).sum())


class Shared(Memory):
    """Shared memory of `num_blocks` blocks; bytes that nobody has written are NaN."""

    def __init__(self, num_blocks: int, size: int, code: Code, faults: Faults, counts: Counter[str]) -> None:
        super().__init__(faults)
        self._counts = counts
        self._size, self._pitch = size, (size // 1024 + 2) * 1024
        self.valid = np.tile((np.arange(self._pitch) - 1024) % self._pitch < size, num_blocks).view(np.uint8)
        self.data, self.undefined = (np.full(len(self.valid), value, np.uint8) for value in (255, 1))
        # The shadow tells apart as many bytes as the narrowest access has.
        kinds = {each.qualifiers[-1] for each in code.instructions if "shared" in each.qualifiers}
        self._unit = min([4, *(KINDS[kind].itemsize for kind in kinds & KINDS.keys())])
        self._writes, self._reads = (_Touches(len(self.data) // self._unit) for _ in range(2))
        self._under_way = np.zeros(len(self.data) // self._unit, np.uint8)

    def where(self, at: int) -> str:
        """The byte of the block's."""
        return f"byte {at % self._pitch - 1024} of {self._size} of shared memory"

    def find(self, lanes: Lanes, addresses: Array) -> Array:
        """Where in `data` are places in the memory of the blocks of threads; what is far outside is nobody's."""
        return lanes.blocks * self._pitch + 1024 + np.clip(addresses, -16, self._pitch - 1024 - 16)

    def units(self, at: Array, size: int) -> Array:
        """Parts `[lane, count]` of memory that accesses touch, which the shadow tells apart."""
        return at[:, None] // self._unit + np.arange(max(size // self._unit, 1))

    def check(self, instruction: Instruction, lanes: Lanes, at: Array, size: int, changed: Any = None) -> None:
        """Hold an access against those since the last barrier; a store that changes nothing does no harm."""
        if instruction.op not in ("cp", "wgmma"):
            self._counts["bank_conflicts"] += _bank_conflicts(lanes.numbers, at, size)
        units, under_way = self.units(at, size), COPY
        if changed is None:
            self._race(instruction, "reads what was just written by", self._writes, units, lanes)
            self._reads.add(units, lanes)
        else:
            changed, under_way = np.repeat(changed, units.shape[1] // changed.shape[1], 1), COPY | PRODUCT
            self._race(instruction, "overwrites what was just written by", self._writes, units, lanes, changed)
            self._race(instruction, "overwrites what may still be read by", self._reads, units, lanes, changed)
            self._writes.put(units, lanes)
        for bit, (kind, what) in _UNDER_WAY.items():
            found = self._under_way[units] & bit & under_way
            self.faults.note(kind, instruction, found, f"touches what a {what} under way does")

    def begin_copy(self, instruction: Instruction, lanes: Lanes, at: Array, size: int) -> Array:
        """An asynchronous copy begins; returns where it goes, which nobody may touch before it lands."""
        at = self.place(instruction, at, size)
        self.check(instruction, lanes, at, size, np.ones((len(at), 1), bool))
        self._under_way[self.units(at, size)] |= COPY
        return at

    def land(self, lanes: Lanes, at: Array, data: Array, undefined: Array) -> None:
        """Bytes `[lane, size]` of a copy that threads have waited for."""
        units, index = self.units(at, data.shape[1]), at[:, None] + np.arange(data.shape[1])
        self.data[index], self.undefined[index] = data, undefined
        self._under_way[units] &= ~np.uint8(COPY)
        self._writes.put(units, lanes)

    def begin_product(
        self, instruction: Instruction, lanes: Lanes, at: Array, dtype: np.dtype
    ) -> tuple[Array, Array, Array]:
        """A product begins to read chunks of 16 bytes; returns what `load` does, and what `end_product` takes."""
        units = self.units(at, 16)
        values, undefined = self.load(instruction, lanes, at, 16 // dtype.itemsize, dtype)
        self._under_way[units] |= PRODUCT
        return values, undefined, units

    def end_product(self, units: Array, lanes: Lanes) -> None:
        """The read has been waited for by threads of several warps, of which any may have come last."""
        self._under_way[units] &= ~np.uint8(PRODUCT)
        self._reads.lowest[units], self._reads.highest[units] = lanes.threads[[0, -1]]
        self._reads.epochs[units] = lanes.epochs[0]

    def _race(
        self, instruction: Instruction, what: str, touches: _Touches, units: Array, lanes: Lanes, matters: Any = True
    ) -> None:
        found, others = touches.unordered(units, lanes)

        def detail(first: int) -> str:
            threads = f"thread {lanes.threads[first // units.shape[1]]} {what} thread {others.flat[first]}"
            return f"{threads}, {self.where(int(units.flat[first]) * self._unit)}"

        self.faults.note("race", instruction, found & matters, detail)
