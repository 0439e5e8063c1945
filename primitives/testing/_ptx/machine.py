"""Registers and the order of execution: all threads of some blocks go through the code together.

The threads with the lowest program counter go first, so that those that part meet again; those of a warp wait for each
other where an instruction is one of the warp.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from primitives.testing._ptx.arithmetic import KINDS, UNSIGNED, operation
from primitives.testing._ptx.code import Address, Code, Instruction, UnsupportedInstructionError, parse
from primitives.testing._ptx.shared import Lanes, Shared, unit_of

if TYPE_CHECKING:
    from primitives.testing._ptx.memory import Faults, Memory

__all__ = ["Machine", "Program", "executes", "prepared"]

Array = Any
Read = Callable[["Machine"], Array]
Step = Callable[["Machine", Any], None]

# Threads that are executed at once: as many as keep NumPy's own time above that of its calls.
MAX_THREADS = 1 << 14
_DONE = 1 << 30
_ALL = np.ones(1, bool)
_NUMBER = re.compile(r"-?\d+U?$|-?0x[\da-fA-F]+U?$")
_HANDLERS: dict[str, Callable[[Machine, Instruction, Any], None]] = {}
_OF_A_WARP = {"shfl", "ldmatrix", "stmatrix", "mma", "wgmma"}
_CONTROL = {"bra", "ret", "exit", "bar", "barrier"}


class Program(NamedTuple):
    """Code whose instructions are steps; those of `of_a_warp` need all threads of a warp."""

    code: Code
    steps: tuple[Step | None, ...]
    of_a_warp: tuple[bool, ...]
    targets: frozenset[int]


def executes(*ops: str) -> Callable[[Any], Any]:
    """Decorator: a function of the machine, an instruction and the threads that execute it."""

    def register(handler: Any) -> Any:
        for op in ops:
            _HANDLERS[op] = handler
        return handler

    return register


@functools.lru_cache(maxsize=512)
def prepared(ptx: str, is_approximate: bool = False) -> Program:
    """The steps of a kernel; raises `UnsupportedInstructionError` for what is not known."""
    code = parse(ptx)
    steps = tuple(_step(code, each, is_approximate) for each in code.instructions)
    of_a_warp = tuple(each.op in _OF_A_WARP or "warp" in each.qualifiers for each in code.instructions)
    return Program(code, steps, of_a_warp, frozenset(code.labels.values()))


def _step(code: Code, instruction: Instruction, is_approximate: bool) -> Step | None:
    if instruction.op in _CONTROL and "warp" not in instruction.qualifiers:
        known = instruction.op in ("bra", "ret", "exit") or instruction.operands == ("0",)
        if not known:
            raise instruction.unsupported()
        return None
    handler = _HANDLERS.get(instruction.op)
    if handler is None or (instruction.op == "mov" and all(isinstance(each, str) for each in instruction.operands)):
        step = _computing(code, instruction, is_approximate)
    else:
        step = functools.partial(_execute, handler, instruction)

    def guarded(machine: Machine, mask: Any) -> None:
        mask = machine.guarded(instruction, mask)
        if mask is None or mask.any():
            step(machine, mask)

    return step if instruction.guard is None else guarded


def _execute(handler: Any, instruction: Instruction, machine: Machine, mask: Any) -> None:
    handler(machine, instruction, mask)


def _computing(code: Code, instruction: Instruction, is_approximate: bool) -> Step:
    computed = operation(instruction, is_approximate)
    target, *sources = instruction.operands
    reads = [reader(code, *each) for each in zip(sources, computed.sources, strict=True)]
    names = [each for each in sources if each[0] == "%"]
    kind = instruction.qualifiers[-2 if instruction.op == "cvt" else -1]
    widened = wider(code, target, kind, computed.result)
    function, dtype = computed.function, computed.result

    def step(machine: Machine, mask: Any) -> None:
        value = function(*[read(machine) for read in reads])
        if value.dtype != dtype:
            value = value.astype(dtype)
        if widened is not None:
            value = value.astype(widened)
        undefined = machine.undefined_of(names) if machine.undefined else None
        if undefined is not None and instruction.op == "selp":
            # It takes one of two.
            first, second, choice = (machine.undefined.get(each, False) for each in sources)
            undefined = np.where(reads[2](machine), first, second) | choice
        machine.put(target, value, mask, undefined)

    return step


def wider(code: Code, register: str, kind: str, dtype: np.dtype) -> np.dtype | None:
    """The type that values of a kind take in a register that has more bits; None where they fit."""
    declared = code.kind_of(register)
    size = 1 if declared in (None, "pred") else KINDS[declared].itemsize
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{size}") if size > dtype.itemsize else None


def reader(code: Code, operand: Any, dtype: np.dtype) -> Read:
    """A function of the machine that gives an operand as an array: of one element where all threads have the same."""
    if not isinstance(operand, str):
        raise UnsupportedInstructionError(f"The emulator does not know the operand `{operand}`.")
    if operand[0] == "%" and code.kind_of(operand) is None:
        return functools.partial(_special, operand, dtype)
    if operand in code.written:
        return lambda machine: machine.get(operand, dtype)
    if operand[0] == "%":
        operand = "-1"
    constant = _constant(code, operand, dtype)
    return lambda machine: constant


def _constant(code: Code, text: str, dtype: np.dtype) -> Array:
    if text in code.symbols:
        return np.zeros(1, dtype)
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return np.array([int(text[2:], 16)], f"u{(len(text) - 2) // 2}").view(dtype)
    if not _NUMBER.match(text):
        raise UnsupportedInstructionError(f"The emulator does not know the operand `{text}`.")
    number = int(text.rstrip("U"), 0)
    if dtype == np.bool_:
        return np.array([number != 0])
    return np.array([number & (1 << 8 * dtype.itemsize) - 1], UNSIGNED[dtype.itemsize]).view(dtype)


def _special(name: str, dtype: np.dtype, machine: Machine) -> Array:
    threads, count = machine.threads, machine.program.code.threads
    values = {f"%ctaid.{axis}": place for axis, place in zip("xyz", machine.places, strict=True)}
    values |= {f"%nctaid.{axis}": size for axis, size in zip("xyz", machine.grid, strict=True)}
    values |= {"%tid.x": threads, "%tid.y": 0, "%tid.z": 0, "%ntid.x": count, "%ntid.y": 1, "%ntid.z": 1}
    values |= {"%laneid": threads % 32, "%warpid": threads // 32}
    if name not in values:
        raise UnsupportedInstructionError(f"The emulator does not know the register `{name}`.")
    return np.atleast_1d(np.asarray(values[name])).astype(np.uint32).view(dtype)


class Machine:
    """One launch of a program.

    Attributes:
        program: The program.
        memory: Global memory.
        parameters: Arrays of one element, by name.
        faults: What is wrong.
        counts: Instructions of threads and warps, and barriers.
        registers: Values of all threads of the blocks that run, by name.
        undefined: Which of these follow from memory that nobody has written.
        lanes: How many threads run.
    """

    def __init__(
        self, program: Program, memory: Memory, parameters: Sequence[Array], shared_bytes: int, faults: Faults
    ) -> None:
        self.program, self.memory, self.faults, self.shared_bytes = program, memory, faults, shared_bytes
        names = (name for name, _ in program.code.parameters)
        self.parameters = dict(zip(names, parameters, strict=True))
        self.counts: Counter[str] = Counter()
        self.registers: dict[str, Array] = {}
        self.undefined: dict[str, Array] = {}
        self._unit, self._origin = unit_of(program.code), ""

    def run(self, grid: Sequence[int]) -> None:
        """Run all blocks, and compare what they touch."""
        x, y, _ = self.grid = (*grid, 1, 1)[:3]
        total, step = math.prod(self.grid), max(1, MAX_THREADS // self.program.code.threads)
        with np.errstate(all="ignore"):
            for first in range(0, total, step):
                self._run_blocks(np.arange(first, min(first + step, total)), x, y)
        self.memory.check_blocks(self.program.code.threads, self.faults)

    def _run_blocks(self, numbers: Array, x: int, y: int) -> None:
        threads, count = self.program.code.threads, len(numbers)
        self.lanes, self._count = threads * count, count
        self.threads, self.blocks = np.tile(np.arange(threads), count), np.repeat(np.arange(count), threads)
        self.numbers = numbers[self.blocks] * threads + self.threads
        places = (numbers % x, numbers // x % y, numbers // (x * y))
        self.places = tuple(each if count == 1 else each[self.blocks] for each in places)
        self.shared = Shared(count, self.shared_bytes, self._unit, self.faults)
        self.registers.clear()
        self.undefined.clear()
        self.epochs, self.warp_epochs, self.copy_groups = (np.zeros(self.lanes, np.int32) for _ in range(3))
        # Products of `wgmma` that nobody has waited for.
        self.products: list[Any] = []
        self.product_groups: Counter[int] = Counter()
        counters, waiting = np.zeros(self.lanes, np.int64), np.zeros(self.lanes, bool)
        while (chosen := self._choose(counters, waiting)) is not None:
            start, mask = chosen
            end = self._straight(start, mask)
            here = np.ones(self.lanes, bool) if mask is None else mask
            counters[here] = end
            warps = self.lanes // 32 if mask is None else int(mask.reshape(-1, 32).any(1).sum())
            self.counts.update(warp_instructions=(end - start) * warps, instructions=(end - start) * int(here.sum()))
            if self.program.steps[end] is None:
                self._control(self.program.code.instructions[end], mask, here, counters, waiting)

    def _choose(self, counters: Array, waiting: Array) -> tuple[int, Any] | None:
        """The instruction to go on with, and the threads that do, None for all; None where all have ended."""
        if not waiting.any() and (counters == counters[0]).all():
            return None if counters[0] == _DONE else (int(counters[0]), None)
        active = ~waiting & (counters != _DONE)
        if not active.any():
            if not waiting.any():
                return None
            self.faults.note("barrier divergence", None, "threads wait at a barrier for others that have ended")
            counters[waiting] += 1
            waiting[:] = False
            return self._choose(counters, waiting)
        for counter in np.unique(counters[active]).tolist():
            mask = active & (counters == counter)
            if self.program.of_a_warp[counter]:
                mask &= np.repeat((mask | (counters == _DONE)).reshape(-1, 32).all(1), 32)
            if mask.any():
                return counter, None if mask.all() else mask
        counter = int(counters[active].min())
        self.faults.note("divergence", self.program.code.instructions[counter], "threads of a warp wait for each other")
        return counter, active & (counters == counter)

    def _straight(self, start: int, mask: Any) -> int:
        """Execute up to the next control instruction, or where others may join in."""
        steps, at = self.program.steps, start
        while (step := steps[at]) is not None:
            if mask is not None and at > start and (at in self.program.targets or self.program.of_a_warp[at]):
                break
            step(self, mask)
            at += 1
        return at

    def _control(self, instruction: Instruction, mask: Any, here: Array, counters: Array, waiting: Array) -> None:
        if instruction.op in ("bra", "ret", "exit"):
            target = self.program.code.labels[instruction.operands[0]] if instruction.op == "bra" else _DONE
            taken = self.guarded(instruction, mask)
            counters[here] += 1
            counters[here if taken is None else taken] = target
            return
        waiting |= here
        per_block = (self._count, self.program.code.threads)
        arrived = (waiting | (counters == _DONE)).reshape(per_block).all(1)
        arrived &= waiting.reshape(per_block).any(1)
        if arrived.any():
            freed = arrived[self.blocks] & waiting
            if len(np.unique(counters[freed])) > 1 or (counters.reshape(per_block)[arrived] == _DONE).any():
                self.faults.note("barrier divergence", instruction, "not all threads of a block come to this barrier")
            self.epochs[arrived[self.blocks]] += 1
            self.warp_epochs[arrived[self.blocks]] += 1
            self.counts["barriers"] += int(arrived.sum())
            waiting[freed] = False
            counters[freed] += 1

    # Registers.
    def get(self, name: str, dtype: np.dtype) -> Array:
        """A register, of which narrower types take the low bits; one that nobody has written is undefined."""
        value = self.registers.get(name)
        if value is None:
            self.note_origin(f"the register {name}")
            self.undefined[name] = _ALL
            return np.zeros(1, dtype)
        if value.dtype == dtype:
            return value
        if value.dtype.itemsize != dtype.itemsize:
            value = value.view(UNSIGNED[value.dtype.itemsize]).astype(UNSIGNED[dtype.itemsize])
        return value.view(dtype)

    def full(self, operand: str, dtype: np.dtype) -> Array:
        """An operand with an element for each thread."""
        return np.broadcast_to(reader(self.program.code, operand, dtype)(self), self.lanes)

    def put(self, name: str, value: Array, mask: Any, undefined: Any = None) -> None:
        """Set a register of the threads in `mask`; `undefined` says which values nobody has written."""
        if name == "_":
            return
        if mask is not None:
            old, was = self.registers.get(name), self.undefined.get(name)
            if old is None:
                old, was = np.zeros(1, value.dtype), _ALL
            value = np.where(mask, value, old.view(value.dtype))
            if undefined is not None or was is not None:
                undefined = np.where(mask, False if undefined is None else undefined, False if was is None else was)
        self.registers[name] = value
        if undefined is not None and undefined.any():
            self.undefined[name] = undefined
        elif self.undefined:
            self.undefined.pop(name, None)

    def put_some(self, name: str, values: Array, mask: Any, undefined: Any = None) -> None:
        """Set a register, given values of the threads in `mask` alone."""
        if mask is not None:
            whole, numbers = np.zeros(self.lanes, values.dtype), np.flatnonzero(mask)
            whole[numbers] = values
            if undefined is not None:
                undefined, part = np.zeros(self.lanes, bool), undefined
                undefined[numbers] = part
            values = whole
        self.put(name, values, mask, undefined)

    def undefined_of(self, names: Sequence[str]) -> Any:
        """Which values that follow from some registers are undefined; None for none."""
        found = None
        for name in names:
            each = self.undefined.get(name)
            if each is not None:
                found = each if found is None else found | each
        return found

    def must_be_defined(self, instruction: Instruction, names: Sequence[str], mask: Any, what: str) -> None:
        """Fault what an instruction does with undefined values."""
        found = self.undefined_of(names) if self.undefined else None
        if found is not None:
            found = np.broadcast_to(found, self.lanes)
            found = found if mask is None else found & mask
            if found.any():
                self.faults.note("undefined value", instruction, f"{what} follows from {self._origin}", found.sum())

    def note_origin(self, what: str) -> None:
        """Remember the first read of what nobody wrote."""
        self._origin = self._origin or f"{what}, which nobody wrote"

    def guarded(self, instruction: Instruction, mask: Any) -> Any:
        """The threads that execute an instruction, None for all."""
        if instruction.guard is None:
            return mask
        predicate = self.get(instruction.guard, KINDS["pred"])
        self.must_be_defined(instruction, [instruction.guard], mask, "a predicate")
        predicate = np.broadcast_to(~predicate if instruction.is_negated else predicate, self.lanes)
        if mask is None:
            return None if predicate.all() else predicate
        return predicate & mask

    # Places in memory.
    def _addresses(self, instruction: Instruction, address: Address, numbers: Array, mask: Any) -> Array:
        self.must_be_defined(instruction, [address.base], mask, "an address")
        kind = KINDS["u64" if self.program.code.kind_of(address.base) == "b64" else "u32"]
        return self.full(address.base, kind)[numbers].astype(np.int64) + address.offset

    def shared_place(self, instruction: Instruction, address: Address, lanes: Lanes, size: int, mask: Any) -> Array:
        """Offsets of accesses of some threads to the shared memory of their blocks."""
        return self.shared.place(instruction, self._addresses(instruction, address, lanes.numbers, mask), size)

    def global_place(self, instruction: Instruction, address: Address, numbers: Array, size: int, mask: Any) -> Array:
        """Offsets of accesses of some threads to global memory."""
        at = self._addresses(instruction, address, numbers, mask)
        return self.memory.place(instruction, at, size, self.faults)

    def lanes_of(self, mask: Any) -> Lanes:
        """The threads in a mask."""
        numbers = np.arange(self.lanes) if mask is None else np.flatnonzero(mask)
        return Lanes(
            numbers, self.blocks[numbers], self.threads[numbers], self.epochs[numbers], self.warp_epochs[numbers]
        )
