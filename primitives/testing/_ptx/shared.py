"""Shared memory of some blocks, with a shadow that knows who touched what since which barrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from primitives.testing._ptx.arithmetic import KINDS
from primitives.testing._ptx.code import Code, Instruction
from primitives.testing._ptx.memory import Faults, Lanes, Memory

Array = Any
# Bits of what may be under way.
COPY, PRODUCT = 1, 2
_UNDER_WAY = {COPY: ("unfinished copy", "cp.async"), PRODUCT: ("unfinished product", "wgmma")}


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


class Shared(Memory):
    """Shared memory of `num_blocks` blocks; bytes that nobody has written are NaN."""

    def __init__(self, num_blocks: int, size: int, code: Code, faults: Faults) -> None:
        super().__init__(faults)
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
