"""Shared memory of some blocks, with a shadow that knows who touched what since which barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from primitives.testing._ptx.code import Code, Instruction
    from primitives.testing._ptx.memory import Faults

__all__ = ["Lanes", "Shared", "bank_passes", "unit_of"]

Array = Any

BANKS, BANK_BYTES = 32, 4
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

    def repeated(self, times: int) -> tuple[Array, Array, Array]:
        """Thread, and barriers of block and warp, of each of so many bytes."""
        return np.repeat(self.threads, times), np.repeat(self.epochs, times), np.repeat(self.warp_epochs, times)


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
    return min([*sizes, 2 if any(each.op == "ldmatrix" for each in code.instructions) else 4])


def bank_passes(at: Array, size: int, warps: Array) -> tuple[int, int]:
    """Passes over the banks that an access takes, and how many it would take without conflicts.

    So many lanes of a warp are served together as have 128 bytes.
    """
    group = max(BANKS * BANK_BYTES // max(size, BANK_BYTES), 1)
    order = np.argsort(warps, kind="stable")
    warps, at = warps[order], at[order]
    starts = np.r_[0, np.flatnonzero(np.diff(warps)) + 1]
    rank = np.arange(len(at)) - np.repeat(starts, np.diff(np.r_[starts, len(at)]))
    part = warps * 32 + rank // group
    words = at[:, None] // BANK_BYTES + np.arange(max(size // BANK_BYTES, 1))
    distinct = np.unique((part[:, None] << 32 | words).ravel())
    banks, counts = np.unique(distinct >> 32 << 5 | distinct % BANKS, return_counts=True)
    parts, firsts = np.unique(banks >> 5, return_index=True)
    return int(np.maximum.reduceat(counts, firsts).sum()), len(parts)


class Shared:
    """Shared memory of `num_blocks` blocks; bytes that nobody has written are NaN."""

    def __init__(self, num_blocks: int, size: int, unit: int, faults: Faults) -> None:
        self.size, self.unit, self.pitch, self._faults = size, unit, max(-(-size // 1024) * 1024, 1024), faults
        self.data = np.full(num_blocks * self.pitch, 255, np.uint8)
        units = len(self.data) // unit
        # The last to write, and the readers with the lowest and highest numbers since the last barrier.
        self._writer, self._lowest, self._highest = (np.full(units, -1, np.int32) for _ in range(3))
        self._written, self._written_warp, self._read, self._read_warp = (
            np.full(units, -1, np.int32) for _ in range(4)
        )
        self._under_way, self._defined = np.zeros(units, np.int16), np.zeros(units, bool)
        self._copies: list[_Copies] = []

    def place(self, instruction: Instruction, addresses: Array, size: int) -> Array:
        """Offsets of accesses; one that may not be is reported, and goes to the first byte."""
        odd = addresses % size != 0
        if odd.any():
            detail = f"{size} bytes at byte {int(addresses[odd][0])} of shared memory"
            self._faults.note("misaligned", instruction, detail, odd.sum())
        at = addresses - addresses % size
        outside = (at < 0) | (at + size > self.size)
        if outside.any():
            detail = f"{size} bytes at byte {int(at[outside][0])} of {self.size} of shared memory"
            self._faults.note("out of bounds", instruction, detail, outside.sum())
        return np.where(outside, 0, at)

    def load(
        self, instruction: Instruction, lanes: Lanes, at: Array, count: int, dtype: np.dtype
    ) -> tuple[Array, Array]:
        """Values `[lane, count]`, and which of them somebody has written."""
        defined = self._reads(instruction, lanes, at, count * dtype.itemsize)
        index = (lanes.blocks * self.pitch + at) // dtype.itemsize
        return self.data.view(dtype)[index[:, None] + np.arange(count)], defined.reshape(len(at), count, -1).all(2)

    def store(self, instruction: Instruction, lanes: Lanes, at: Array, values: Array, undefined: Array | None) -> None:
        """Store values `[lane, count]`, of which those of some lanes are undefined."""
        size = values.shape[1] * values.dtype.itemsize
        units, each = self._units(lanes, at, size)
        owners = lanes.repeated(each)
        view = self.data.view(values.dtype)
        index = ((lanes.blocks * self.pitch + at) // values.dtype.itemsize)[:, None] + np.arange(values.shape[1])
        same = np.repeat((view[index] == values).ravel(), values.dtype.itemsize // self.unit or 1)
        self._check_write(instruction, units, owners, same & self._defined[units])
        view[index] = values
        self._wrote(units, owners)
        self._defined[units] = True if undefined is None else np.repeat(~undefined, each)
        lost = view[index] != values
        if lost.any():
            # Copies of one result in several threads, which fused products can leave a rounding apart.
            kind = np.dtype(f"f{max(values.dtype.itemsize, 2)}")
            first, last = (np.ascontiguousarray(each[lost]).view(kind)[0] for each in (values, view[index]))
            detail = f"threads store {first:.9g} and {last:.9g} at one place of shared memory"
            self._faults.note("replicas differ", instruction, detail, lost.sum())

    def copy(
        self, instruction: Instruction, lanes: Lanes, groups: Array, at: Array, data: Array, undefined: Array
    ) -> None:
        """Begin a `cp.async` of bytes `[lane, size]`, which lands when its group has been waited for."""
        units, each = self._units(lanes, at, data.shape[1])
        self._check_write(instruction, units, lanes.repeated(each), np.zeros(len(units), bool))
        self._under_way[units] = 1
        self._copies.append(_Copies(lanes.numbers, groups, at, data, undefined))

    def finish_copies(self, lanes: Lanes, groups: Array, left: int) -> None:
        """Wait until no more than `left` groups are under way; `groups` is the number of groups of each lane so far."""
        is_waiting = np.zeros(len(groups), bool)
        is_waiting[lanes.numbers] = True
        position = np.zeros(len(groups), np.int64)
        position[lanes.numbers] = np.arange(len(lanes.numbers))
        remaining = []
        for copies in self._copies:
            done = (copies.groups < groups[copies.lanes] - left) & is_waiting[copies.lanes]
            if done.any():
                mine = Lanes(*(each[position[copies.lanes[done]]] for each in lanes))
                size = copies.data.shape[1]
                units, each = self._units(mine, copies.at[done], size)
                start = mine.blocks * self.pitch + copies.at[done]
                self.data[start[:, None] + np.arange(size)] = copies.data[done]
                self._wrote(units, mine.repeated(each))
                self._under_way[units] = 0
                self._defined[units] = np.repeat(~copies.undefined[done], each)
            if not done.all():
                remaining.append(_Copies(*(each[~done] for each in copies)))
        self._copies = remaining

    def begin_reading(self, instruction: Instruction, lanes: Lanes, at: Array) -> tuple[Array, Array]:
        """An asynchronous read of chunks of 16 bytes; returns whether all is defined, and what `end_reading` takes."""
        defined = self._reads(instruction, lanes, at, 16)
        units, _ = self._units(lanes, at, 16)
        self._under_way[units] |= 2
        return defined.all(), units

    def end_reading(self, units: Array, epoch: int, first_thread: int, last_thread: int) -> None:
        """The read has been waited for by threads of several warps, of which any may have come last."""
        self._under_way[units] &= ~2
        self._lowest[units], self._highest[units] = first_thread, last_thread
        self._read[units] = epoch

    def _units(self, lanes: Lanes, at: Array, size: int) -> tuple[Array, int]:
        each = max(size // self.unit, 1)
        return (((lanes.blocks * self.pitch + at) // self.unit)[:, None] + np.arange(each)).ravel(), each

    def _reads(self, instruction: Instruction, lanes: Lanes, at: Array, size: int) -> Array:
        units, each = self._units(lanes, at, size)
        threads, epochs, warp_epochs = owners = lanes.repeated(each)
        written = self._unordered(owners, self._writer[units], self._written[units], self._written_warp[units])
        self._race(instruction, "reads what was just written by", written, units, threads, self._writer[units])
        under_way = self._under_way[units] & 1
        if under_way.any():
            self._faults.note("unfinished copy", instruction, "reads where a cp.async is under way", under_way.sum())
        new = self._read[units] != epochs
        fresh = units[new]
        self._lowest[fresh], self._highest[fresh], self._read[fresh] = _NOBODY, -1, epochs[new]
        # Threads are in ascending order, and the last assignment of several to one place counts.
        self._highest[units] = np.maximum(self._highest[units], threads)
        self._lowest[units[::-1]] = np.minimum(self._lowest[units[::-1]], threads[::-1])
        self._read_warp[units] = warp_epochs
        return self._defined[units]

    def _check_write(self, instruction: Instruction, units: Array, owners: tuple[Array, ...], same: Array) -> None:
        threads = owners[0]
        written = self._unordered(owners, self._writer[units], self._written[units], self._written_warp[units]) & ~same
        self._race(instruction, "overwrites what was just written by", written, units, threads, self._writer[units])
        lowest, highest = self._lowest[units], self._highest[units]
        other = np.where(lowest // 32 != threads // 32, lowest, np.where(highest != threads, highest, lowest))
        read = self._unordered(owners, other, self._read[units], self._read_warp[units]) & ~same
        self._race(instruction, "overwrites what may still be read by", read, units, threads, other)
        for bit, kind, what in ((1, "unfinished copy", "a cp.async"), (2, "unfinished product", "a wgmma")):
            under_way = self._under_way[units] & bit
            if under_way.any():
                self._faults.note(kind, instruction, f"writes where {what} is under way", (under_way != 0).sum())

    def _wrote(self, units: Array, owners: tuple[Array, ...]) -> None:
        self._writer[units], self._written[units], self._written_warp[units] = owners

    @staticmethod
    def _unordered(owners: tuple[Array, ...], others: Array, epochs: Array, warp_epochs: Array) -> Array:
        """Whether no barrier lies between threads and others that have touched the same bytes."""
        threads, mine, mine_of_warp = owners
        is_near = (threads // 32 == others // 32) & (warp_epochs != mine_of_warp)
        return (epochs == mine) & (others != threads) & ~is_near

    def _race(
        self, instruction: Instruction, what: str, found: Array, units: Array, threads: Array, others: Array
    ) -> None:
        if found.any():
            first = int(np.flatnonzero(found)[0])
            place = int(units[first]) * self.unit % self.pitch
            detail = (
                f"thread {int(threads[first])} {what} thread {int(others[first])}, at byte {place} of shared memory"
            )
            self._faults.note("race", instruction, detail, found.sum())
