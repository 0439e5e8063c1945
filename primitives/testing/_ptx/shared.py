"""Shared memory of some blocks, with a shadow that knows who touched what since which barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from primitives.testing._ptx.code import Code, Instruction
    from primitives.testing._ptx.memory import Faults

__all__ = ["Lanes", "Shared", "unit_of"]

Array = Any
_NOBODY = 1 << 30


class Lanes(NamedTuple):
    """Threads that execute an instruction: numbers among all, of the block, within it, and of barriers so far.

    A barrier of the block also counts as one of the warp.
    """

    numbers: Array
    blocks: Array
    threads: Array
    epochs: Array
    warp_epochs: Array


class _Units(NamedTuple):
    """Bytes that lanes touch, in units: where these are, how many each has, and its thread and barriers for each."""

    at: Array
    each: int
    threads: Array
    epochs: Array
    warp_epochs: Array


class _Copies(NamedTuple):
    """`cp.async` of some threads that is under way."""

    lanes: Array
    groups: Array
    at: Array
    data: Array
    undefined: Array


def unit_of(code: Code) -> int:
    """Bytes that the shadow tells apart: as many as the narrowest access has."""
    accesses = [each for each in code.instructions if "shared" in each.qualifiers and each.op in ("ld", "st")]
    sizes = [int(each.qualifiers[-1][1:]) // 8 for each in accesses if each.qualifiers[-1][1:].isdigit()]
    return min([*sizes, 2 if any(each.op in ("ldmatrix", "stmatrix") for each in code.instructions) else 4])


class Shared:
    """Shared memory of `num_blocks` blocks; bytes that nobody has written are NaN."""

    def __init__(self, num_blocks: int, size: int, unit: int, faults: Faults) -> None:
        self.size, self.unit, self.pitch, self._faults = size, unit, max(-(-size // 1024) * 1024, 1024), faults
        self.data = np.full(num_blocks * self.pitch, 255, np.uint8)
        # The last to write, and the readers with the lowest and highest numbers since the last barrier; and when.
        self._writer, self._lowest, self._highest, self._written, self._written_warp, self._read, self._read_warp = (
            np.full(len(self.data) // unit, -1, np.int32) for _ in range(7)
        )
        self._under_way, self._defined = np.zeros(len(self._writer), np.int16), np.zeros(len(self._writer), bool)
        self._copies: list[_Copies] = []

    def place(self, instruction: Instruction, addresses: Array, size: int) -> Array:
        """Offsets of accesses; one that may not be is reported, and goes to the first byte."""
        at = addresses - addresses % size
        outside = (at < 0) | (at + size > self.size)
        for kind, wrong in (("misaligned", at != addresses), ("out of bounds", outside)):
            if wrong.any():
                detail = f"{size} bytes at byte {int(addresses[wrong][0])} of {self.size} of shared memory"
                self._faults.note(kind, instruction, detail, wrong.sum())
        return np.where(outside, 0, at)

    def load(
        self, instruction: Instruction, lanes: Lanes, at: Array, count: int, dtype: np.dtype
    ) -> tuple[Array, Array]:
        """Values `[lane, count]`, and which of them somebody has written."""
        defined = self._reads(instruction, self._units(lanes, at, count * dtype.itemsize))
        index = (lanes.blocks * self.pitch + at) // dtype.itemsize
        return self.data.view(dtype)[index[:, None] + np.arange(count)], defined.reshape(len(at), count, -1).all(2)

    def store(self, instruction: Instruction, lanes: Lanes, at: Array, values: Array, undefined: Array | None) -> None:
        """Store values `[lane, count]`, of which those of some lanes are undefined."""
        size = values.dtype.itemsize
        units, view = self._units(lanes, at, values.shape[1] * size), self.data.view(values.dtype)
        index = ((lanes.blocks * self.pitch + at) // size)[:, None] + np.arange(values.shape[1])
        same = np.repeat((view[index] == values).ravel(), size // self.unit or 1)
        self._check_write(instruction, units, same & self._defined[units.at])
        view[index] = values
        self._wrote(units, undefined)
        lost = view[index] != values
        if lost.any():
            # Copies of one result in several threads, which fused products can leave a rounding apart.
            kind = np.dtype(f"f{max(size, 2)}")
            first, last = (np.ascontiguousarray(each[lost]).view(kind)[0] for each in (values, view[index]))
            detail = f"threads store {first:.9g} and {last:.9g} at one place of shared memory"
            self._faults.note("replicas differ", instruction, detail, lost.sum())

    def copy(
        self, instruction: Instruction, lanes: Lanes, groups: Array, at: Array, data: Array, undefined: Array
    ) -> None:
        """Begin a `cp.async` of bytes `[lane, size]`, which lands when its group has been waited for."""
        units = self._units(lanes, at, data.shape[1])
        self._check_write(instruction, units, np.zeros(len(units.at), bool))
        self._under_way[units.at] = 1
        self._copies.append(_Copies(lanes.numbers, groups, at, data, undefined))

    def finish_copies(self, lanes: Lanes, groups: Array, left: int) -> None:
        """Wait until no more than `left` groups are under way; `groups` is the number of groups of each lane so far."""
        is_waiting, position = np.zeros(len(groups), bool), np.zeros(len(groups), np.int64)
        is_waiting[lanes.numbers], position[lanes.numbers] = True, np.arange(len(lanes.numbers))
        remaining = []
        for copies in self._copies:
            done = (copies.groups < groups[copies.lanes] - left) & is_waiting[copies.lanes]
            landed, late = (_Copies(*(each[which] for each in copies)) for which in (done, ~done))
            if done.any():
                mine = Lanes(*(each[position[landed.lanes]] for each in lanes))
                units = self._units(mine, landed.at, landed.data.shape[1])
                start = mine.blocks * self.pitch + landed.at
                self.data[start[:, None] + np.arange(landed.data.shape[1])] = landed.data
                self._wrote(units, landed.undefined)
                self._under_way[units.at] = 0
            if not done.all():
                remaining.append(late)
        self._copies = remaining

    def begin_reading(self, instruction: Instruction, lanes: Lanes, at: Array) -> tuple[Array, Array]:
        """An asynchronous read of chunks of 16 bytes; returns whether all is defined, and what `end_reading` takes."""
        units = self._units(lanes, at, 16)
        defined = self._reads(instruction, units)
        self._under_way[units.at] |= 2
        return defined.all(), units.at

    def end_reading(self, units: Array, epoch: int, first_thread: int, last_thread: int) -> None:
        """The read has been waited for by threads of several warps, of which any may have come last."""
        self._under_way[units] &= ~2
        self._lowest[units], self._highest[units], self._read[units] = first_thread, last_thread, epoch

    def _units(self, lanes: Lanes, at: Array, size: int) -> _Units:
        each = max(size // self.unit, 1)
        start = (lanes.blocks * self.pitch + at) // self.unit
        return _Units((start[:, None] + np.arange(each)).ravel(), each, *(np.repeat(x, each) for x in lanes[2:]))

    def _reads(self, instruction: Instruction, units: _Units) -> Array:
        at, threads, epochs = units.at, units.threads, units.epochs
        written = self._unordered(units, self._writer[at], self._written[at], self._written_warp[at])
        self._race(instruction, "reads what was just written by", written, units, self._writer[at])
        self._check_under_way(instruction, "reads", at, 1)
        new = self._read[at] != epochs
        fresh = at[new]
        self._lowest[fresh], self._highest[fresh], self._read[fresh] = _NOBODY, -1, epochs[new]
        # Threads are in ascending order, and the last assignment of several to one place counts.
        self._highest[at] = np.maximum(self._highest[at], threads)
        self._lowest[at[::-1]] = np.minimum(self._lowest[at[::-1]], threads[::-1])
        self._read_warp[at] = units.warp_epochs
        return self._defined[at]

    def _check_write(self, instruction: Instruction, units: _Units, same: Array) -> None:
        at, threads = units.at, units.threads
        written = self._unordered(units, self._writer[at], self._written[at], self._written_warp[at]) & ~same
        self._race(instruction, "overwrites what was just written by", written, units, self._writer[at])
        lowest, highest = self._lowest[at], self._highest[at]
        other = np.where(lowest // 32 != threads // 32, lowest, np.where(highest != threads, highest, lowest))
        read = self._unordered(units, other, self._read[at], self._read_warp[at]) & ~same
        self._race(instruction, "overwrites what may still be read by", read, units, other)
        self._check_under_way(instruction, "writes", at, 1)
        self._check_under_way(instruction, "writes", at, 2)

    def _check_under_way(self, instruction: Instruction, verb: str, at: Array, bit: int) -> None:
        under_way = self._under_way[at] & bit
        if under_way.any():
            kind, what = {1: ("unfinished copy", "cp.async"), 2: ("unfinished product", "wgmma")}[bit]
            self._faults.note(kind, instruction, f"{verb} where a {what} is under way", (under_way != 0).sum())

    def _wrote(self, units: _Units, undefined: Array | None) -> None:
        at = units.at
        self._writer[at], self._written[at], self._written_warp[at] = units[2:]
        self._defined[at] = True if undefined is None else np.repeat(~undefined, units.each)

    @staticmethod
    def _unordered(units: _Units, others: Array, epochs: Array, warp_epochs: Array) -> Array:
        """Whether no barrier lies between threads and others that have touched the same bytes."""
        is_near = (units.threads // 32 == others // 32) & (warp_epochs != units.warp_epochs)
        return (epochs == units.epochs) & (others != units.threads) & ~is_near

    def _race(self, instruction: Instruction, what: str, found: Array, units: _Units, others: Array) -> None:
        if found.any():
            first = int(np.flatnonzero(found)[0])
            place = int(units.at[first]) * self.unit % self.pitch
            threads = f"thread {int(units.threads[first])} {what} thread {int(others[first])}"
            self._faults.note("race", instruction, f"{threads}, at byte {place} of shared memory", found.sum())
