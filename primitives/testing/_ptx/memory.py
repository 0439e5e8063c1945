"""Global memory of a launch: storages between gaps, whose every byte knows if it is anybody's and has a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from primitives.testing._ptx.arithmetic import UNSIGNED

if TYPE_CHECKING:
    from primitives.testing._ptx.code import Instruction

__all__ = ["BASE", "SECTOR_BYTES", "Access", "Fault", "Faults", "Memory", "Traffic"]

Array = Any

# Where the addresses of kernels begin, and bytes between storages: nothing that a kernel adds by mistake leads to
# another storage.
BASE, GAP = 1 << 40, 512
SECTOR_BYTES = 32


class Fault(NamedTuple):
    """Something wrong that a kernel does.

    Attributes:
        kernel: Its name.
        kind: One of the kinds that `check_kernel` lists.
        line: Of the PTX; 0 for what no instruction does by itself.
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

    def note(self, kind: str, instruction: Instruction | None, detail: str, count: int = 1) -> None:
        """Count one kind of fault of one instruction, of which the first detail is kept."""
        line, text = (0, "") if instruction is None else (instruction.line, f": `{instruction.text}`")
        found = self.get((kind, line))
        before, first = (0, detail + text) if found is None else (found.times, found.detail)
        self[kind, line] = Fault(self._kernel, kind, line, before + int(count), first)


class Access(NamedTuple):
    """One execution of a load or store: first byte, threads by number in the grid, and what a store changed."""

    is_store: bool
    instruction: Instruction
    size: int
    at: Array
    threads: Array
    changed: Array | None = None


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


class Memory:
    """Storages are added first; `data`, `valid` and `undefined` have a byte for each of theirs."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, str, Array]] = []
        self._parts: list[tuple[Array, Array, Array | None]] = []
        self.size = GAP
        self.accesses: list[Access] = []

    def add(self, name: str, data: Array, valid: Array, undefined: Array | None, alignment: int) -> int:
        """Add a storage whose address leaves `alignment` when divided by 512; returns its address here."""
        at, self.size = self.size + alignment, -(-(self.size + alignment + len(data) + GAP) // GAP) * GAP
        self._spans.append((at, name, data))
        self._parts.append((data, valid, undefined))
        return BASE + at

    def freeze(self) -> None:
        """Put the storages side by side."""
        self.data, self.valid, self.undefined = (np.zeros(self.size, np.uint8) for _ in range(3))
        for (at, *_), (data, valid, undefined) in zip(self._spans, self._parts, strict=True):
            span = slice(at, at + len(data))
            self.data[span], self.valid[span] = data, valid
            if undefined is not None:
                self.undefined[span] = undefined & valid

    def write_back(self) -> None:
        """Put what the kernel has stored into the storages."""
        for at, _, data in self._spans:
            data[:] = self.data[at : at + len(data)]

    def where(self, offset: int) -> str:
        """A place in words."""
        at, name, data = min(self._spans, key=lambda span: max(span[0] - offset, offset - span[0] - len(span[2]) + 1))
        return f"byte {offset - at} of {name} ({len(data)} bytes)"

    def place(self, instruction: Instruction, addresses: Array, size: int, faults: Faults) -> Array:
        """Offsets of accesses; one that may not be is reported, and goes to the gap before all storages."""
        at = addresses - BASE
        odd = at % size != 0
        if odd.any():
            faults.note("misaligned", instruction, f"{size} bytes at {self.where(int(at[odd][0]))}", odd.sum())
            at = at - at % size
        outside = (at < 0) | (at > self.size - size)
        inside, word = np.where(outside, 0, at), min(size, 8)
        valid, ones = self.valid.view(UNSIGNED[word]), int.from_bytes(b"\1" * word, "little")
        for part in range(size // word):
            outside |= valid[inside // word + part] != ones
        if outside.any():
            faults.note(
                "out of bounds", instruction, f"{size} bytes at {self.where(int(at[outside][0]))}", outside.sum()
            )
        return np.where(outside, 0, at)

    def check_blocks(self, threads: int, faults: Faults) -> None:
        """Blocks run in any order: none may touch what another one stores, unless that was there before."""
        unit = min([1 if access.size == 1 else 2 for access in self.accesses], default=2)
        writer = np.full(self.size // unit, -1, np.int64)
        for access in sorted(self.accesses, key=lambda access: not access.is_store):
            blocks = (access.threads // threads)[:, None]
            units = access.at[:, None] // unit + np.arange(access.size // unit)
            other = (writer[units] >= 0) & (writer[units] != blocks)
            if access.changed is not None:
                other &= access.changed[:, None]
                writer[units] = blocks
            if other.any():
                place = self.where(int(units[other][0]) * unit)
                verb = "stores" if access.is_store else "loads"
                faults.note("block race", access.instruction, f"{verb} what another block stores, {place}", other.sum())

    def traffic(self, is_store: bool, threads: int) -> dict[str, Traffic]:
        """What was loaded, or stored, by storage."""
        accesses = [access for access in self.accesses if access.is_store == is_store and access.at.size]
        found = {}
        for start, name, data in self._spans:
            num_bytes, requests, sectors, widths = 0, 0, 0, set()
            touched = np.zeros(len(data), bool)
            for access in accesses:
                inside = (access.at >= start) & (access.at < start + len(data))
                if not inside.any():
                    continue
                at, lanes = access.at[inside], access.threads[inside]
                widths.add(access.size)
                num_bytes += access.size * len(np.unique(lanes // threads * self.size + at))
                requests += len(np.unique(lanes // 32))
                sector = at[:, None] // SECTOR_BYTES + np.arange(-(-access.size // SECTOR_BYTES))
                sectors += len(np.unique(lanes[:, None] // 32 * self.size + sector))
                touched[((at - start)[:, None] + np.arange(access.size)).ravel()] = True
            found[name] = Traffic(num_bytes, int(touched.sum()), requests, sectors, frozenset(widths))
        return found
