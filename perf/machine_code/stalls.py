"""Cycles that one warp alone takes over a kernel, from the control words that NVIDIA's assembler writes.

Since Volta an instruction has 128 bits, of which 105 to 125 tell the scheduler how many cycles to stall before the
warp's next instruction (4 bits), whether to yield (1), which of six scoreboards to hold until the result is there (3)
and until the operands are read (3), which of them to wait for first (6), and which operands to reuse (4). Results of
fixed latency are waited for by stalling, all others by scoreboards. So the cycles between two instructions follow from
these words, but for the latencies behind the scoreboards, which `LATENCIES` assumes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# Cycles until a result is there, by the beginning of the opcode: round numbers near those of published
# microbenchmarks of sm_90, memory as it is under load. The first that fits counts.
LATENCIES = {"LDGSTS": 800, "LDG": 800, "LDS": 30, "LDC": 30, "ULDC": 30, "SHFL": 25, "MUFU": 20, "S2R": 20, "STG": 10}
OTHER_LATENCY = 15
# Until every warp of a block has arrived, beyond what the slowest takes.
BARRIER_CYCLES = 30
# Trips until a loop runs steadily, twice.
ROUNDS = 8

_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);"
    r"\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/"
)


class Instruction(NamedTuple):
    """One instruction and its control word; of scoreboards 7 is none, and `waits` is a mask."""

    address: int
    opcode: str
    operands: str
    stall: int
    writes: int
    reads: int
    waits: int


def decode(sass: str) -> list[Instruction]:
    """The instructions of what NVIDIA's disassemblers print for sm_70 and later, without those that pad a kernel."""
    found = []
    for address, opcode, operands, word in _LINE.findall(sass):
        control = int(word, 16) >> 41
        fields = (control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63)
        found.append(Instruction(int(address, 16), opcode, operands, *fields))
    return without_padding(found)


def without_padding(code: list[Instruction]) -> list[Instruction]:
    """The code of a kernel up to where it ends."""
    is_code = [one.opcode != "NOP" and _target(one) != one.address for one in code]
    return code[: len(code) - is_code[::-1].index(True)]


def _target(instruction: Instruction) -> int | None:
    match = re.search(r"0x([0-9a-f]+)", instruction.operands)
    return int(match.group(1), 16) if match and instruction.opcode.startswith("BRA") else None


def loops(code: Sequence[Instruction]) -> list[tuple[int, int]]:
    """First and last address of every loop, outer ones first."""
    end = max((one.address for one in code if one.opcode.startswith("EXIT")), default=code[-1].address)
    found: dict[int, int] = {}
    for one in code:
        target = _target(one)
        # Code behind the end jumps back to where it came from.
        if target is not None and target < one.address < end:
            found[target] = one.address
    return sorted(found.items(), key=lambda span: (span[0], -span[1]))


def is_in(span: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a loop lies in another one."""
    return other[0] <= span[0] and span[1] <= other[1] and span != other


class _Warp:
    """One undisturbed warp."""

    def __init__(self) -> None:
        self.now = 0.0
        self._free = [0.0] * 8
        self._copies: list[float] = []
        self._copied = 0.0

    def run(self, code: list[Instruction]) -> None:
        """Issue these instructions one after the other, taking every branch that leads on."""
        for one in code:
            self.now = max(self.now, *(self._free[board] for board in range(6) if one.waits >> board & 1), 0.0)
            ready = self.now + next((n for name, n in LATENCIES.items() if one.opcode.startswith(name)), OTHER_LATENCY)
            self._free[one.writes] = max(self._free[one.writes], ready)
            self._free[one.reads] = max(self._free[one.reads], self.now + OTHER_LATENCY)
            if one.opcode.startswith("LDGSTS"):
                self._copied = ready
            elif one.opcode == "LDGDEPBAR":
                self._copies.append(self._copied)
            elif one.opcode.startswith("DEPBAR"):
                under_way = int(one.operands.split(",")[-1], 16)
                done = self._copies[: len(self._copies) - under_way]
                self.now = max(self.now, *done, 0.0)
            elif one.opcode.startswith("BAR"):
                self.now += BARRIER_CYCLES
            self.now += max(one.stall, 1)


def cycles(code: Sequence[Instruction], spans: Sequence[tuple[int, int]]) -> tuple[float, list[float]]:
    """Those outside of these loops, and of a trip of each once it runs steadily, without the loops in it."""
    warp, trips = _Warp(), {}

    def straight(first: int, last: int) -> float:
        before = warp.now
        warp.run([one for one in code if first <= one.address <= last])
        return warp.now - before

    def outside(first: int, last: int, spans: Sequence[tuple[int, int]]) -> float:
        found = 0.0
        # Those of an inner loop are found with the loop around it.
        for span in (each for each in spans if not any(is_in(each, other) for other in spans)):
            found += straight(first, span[0] - 1)
            rounds = [outside(*span, [each for each in spans if is_in(each, span)]) for _ in range(ROUNDS)]
            trips[span] = sum(rounds[ROUNDS // 2 :]) / (ROUNDS - ROUNDS // 2)
            # The first trips also wait for what was under way before.
            found += sum(rounds) - ROUNDS * trips[span]
            first = span[1] + 1
        return found + straight(first, last)

    return outside(code[0].address, code[-1].address, spans), [trips[span] for span in spans]
