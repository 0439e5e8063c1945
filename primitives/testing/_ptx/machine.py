"""Registers and the order of execution: all threads of some blocks go through the code together.

The threads with the lowest program counter go first, so that those that part meet again; those of a warp wait for each
other where an instruction is one of the warp. Who executes something is a mask of all threads that run, `ALL` for all.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from primitives.testing._ptx.arithmetic import KINDS, UNSIGNED, operation
from primitives.testing._ptx.code import Address, Code, Instruction, UnsupportedInstructionError, parse
from primitives.testing._ptx.memory import BASE, Faults, Global, Lanes, Memory, Shared

Array = Any
Step = Callable[["Machine", Any], None]

# Threads that are executed at once: as many as keep NumPy's own time above that of its calls.
MAX_THREADS = 1 << 14
ALL = slice(None)
_DONE = 1 << 30
# What is said of registers all of whose values somebody has written.
DEFINED = np.zeros(1, bool)
_BOOL = KINDS["pred"]
_NUMBER = re.compile(r"-?\d+U?$|-?0x[\da-fA-F]+U?$")
_HANDLERS: dict[str, Any] = {}
# Threads that execute an instruction together.
_TOGETHER = {**dict.fromkeys(("shfl", "ldmatrix", "stmatrix", "mma"), 32), "wgmma": 128}


class Program(NamedTuple):
    """Code whose instructions are steps, None for those of control; so many threads side by side must come to each."""

    code: Code
    steps: tuple[Step | None, ...]
    together: tuple[int, ...]
    targets: frozenset[int]


def executes(*ops: str) -> Callable[[Any], Any]:
    """Decorator: a function of the machine, an instruction and the threads that execute it."""

    def register(handler: Any) -> Any:
        _HANDLERS.update(dict.fromkeys(ops, handler))
        return handler

    return register


@functools.lru_cache(maxsize=512)
def prepared(ptx: str, is_approximate: bool = False) -> Program:
    """The steps of a kernel; raises `UnsupportedInstructionError` for what is not known."""
    code = parse(ptx)
    steps, together = zip(*(_step(code, each, is_approximate) for each in code.instructions), strict=True)
    return Program(code, steps, together, frozenset(code.labels.values()))


def _step(code: Code, instruction: Instruction, is_approximate: bool) -> tuple[Step | None, int]:
    """What an instruction does, None for one of control; and how many threads do it together."""
    if instruction.op in ("bra", "ret", "exit"):
        return None, 1
    together, kind = _TOGETHER.get(instruction.op, 1), "divergence"
    if instruction.op in ("bar", "barrier"):
        together, kind = (32, kind) if "warp" in instruction.qualifiers else (code.threads, "barrier divergence")
    handler = _HANDLERS.get(instruction.op)
    if handler is None or (instruction.op == "mov" and all(isinstance(each, str) for each in instruction.operands)):
        handler = _computing(code, instruction, is_approximate)

    def step(machine: Machine, mask: Any) -> None:
        mask = machine.guarded(instruction, mask) if instruction.guard else mask
        if mask is not ALL and together > 1:
            groups = mask.reshape(-1, together)
            some = groups.any(1)
            machine.faults.note(kind, instruction, some & ~groups.all(1), f"not all of {together} threads come here")
            mask = np.repeat(some, together)
        if mask is ALL or mask.any():
            handler(machine, instruction, mask)

    return step, together


def _computing(code: Code, instruction: Instruction, is_approximate: bool) -> Any:
    target, *sources = instruction.operands or ("",)
    found = operation(instruction.op, instruction.qualifiers, len(sources), is_approximate)
    has_halves = instruction.op == "setp" and instruction.qualifiers[-1].endswith("x2")
    if found is None or not all(isinstance(each, str) for each in instruction.operands):
        raise instruction.unsupported()
    targets = target.split("|")
    if len(targets) != 1 + has_halves:
        raise instruction.unsupported()
    function, dtype, kinds = found
    operands = [*zip(sources, kinds, strict=True)]
    kind = instruction.qualifiers[-2 if instruction.op == "cvt" else -1]
    stored = wider(code, target, kind, dtype)

    def compute(machine: Machine, instruction: Instruction, mask: Any) -> None:
        value = function(*[machine.get(*each, mask) for each in operands])
        undefined = machine.undefined_of(sources, mask)
        if has_halves:
            for each, half in zip(targets, value, strict=True):
                machine.put(each, half, mask, undefined)
            return
        if value.dtype != stored:
            value = value.astype(dtype).astype(stored)
        if undefined is not DEFINED and instruction.op == "selp":
            # It takes one of two.
            first, second, choice = (machine.undefined_of([each], mask) for each in sources)
            undefined = np.where(machine.get(sources[2], _BOOL, mask), first, second) | choice
        machine.put(target, value, mask, undefined)

    return compute


def wider(code: Code, register: str, kind: str, dtype: np.dtype) -> np.dtype:
    """The type that values of a kind take in a register, which may have more bits."""
    declared = code.kind_of(register)
    size = 1 if declared in (None, "pred") else KINDS[declared].itemsize
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{size}") if size > dtype.itemsize else dtype


@functools.cache
def _constant(text: str, dtype: np.dtype) -> Array:
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return np.array([int(text[2:], 16)], f"u{(len(text) - 2) // 2}").view(dtype)
    if not _NUMBER.match(text):
        raise UnsupportedInstructionError(f"The emulator does not know the operand `{text}`.")
    number = int(text.rstrip("U"), 0)
    if dtype == _BOOL:
        return np.array([number != 0])
    return np.array([number & (1 << 8 * dtype.itemsize) - 1], UNSIGNED[dtype.itemsize]).view(dtype)


class UnderWay:
    """What threads have begun, closed groups of, and wait for: copies of `cp.async`, or products of `wgmma`."""

    def __init__(self, num_threads: int) -> None:
        self._closed = np.zeros(num_threads, np.int32)
        self._begun: list[tuple[Array, Array, Callable[[Array], None]]] = []

    def begin(self, numbers: Array, finish: Callable[[Array], None]) -> None:
        """Threads begin something; `finish` takes a mask of them."""
        self._begun.append((numbers, self._closed[numbers], finish))

    def close(self, mask: Any) -> None:
        """Close a group of each thread."""
        self._closed[mask] += 1

    def wait(self, mask: Any, left: int = -1) -> None:
        """Finish all but the last `left` groups of threads; without a number also what is in no group yet."""
        is_waiting, begun, self._begun = np.zeros(len(self._closed), bool), self._begun, []
        is_waiting[mask] = True
        for numbers, groups, finish in begun:
            done = is_waiting[numbers] & (groups < self._closed[numbers] - left)
            if done.any():
                finish(done)
            groups[done] = _DONE
            if (groups != _DONE).any():
                self._begun.append((numbers, groups, finish))


class Machine:
    """One launch of a program."""

    def __init__(
        self, program: Program, memory: Global, parameters: Sequence[Array], shared_bytes: int, faults: Faults
    ) -> None:
        self.program, self.memory, self.faults, self._shared_bytes = program, memory, faults, shared_bytes
        self._fixed: dict[str, Array] = dict(zip(program.code.parameters, parameters, strict=True))
        self._fixed |= dict.fromkeys(program.code.symbols, np.zeros(1, np.uint32))
        # Instructions of threads and warps, barriers, and conflicts of banks.
        self.counts: Counter[str] = Counter()
        # Which values of registers follow from memory that nobody has written.
        self.undefined: dict[str, Array] = {}

    def run(self, grid: Sequence[int]) -> None:
        """Run all blocks, and compare what they touch."""
        grid = (*grid, 1, 1)[:3]
        total, step = math.prod(grid), max(1, MAX_THREADS // self.program.code.threads)
        with np.errstate(all="ignore"):
            for first in range(0, total, step):
                self._run_blocks(np.arange(first, min(first + step, total)), grid)
        self.memory.check_blocks(self.program.code.threads)

    def _run_blocks(self, numbers: Array, grid: Sequence[int]) -> None:
        threads, count = self.program.code.threads, len(numbers)
        self.lanes = threads * count
        self.threads, self.blocks = np.tile(np.arange(threads), count), np.repeat(np.arange(count), threads)
        in_grid = numbers if count == 1 else numbers[self.blocks]
        self._in_grid = in_grid * threads + self.threads
        places = (in_grid % grid[0], in_grid // grid[0] % grid[1], in_grid // (grid[0] * grid[1]))
        axes = {"tid": (self.threads, 0, 0), "ntid": (threads, 1, 1), "ctaid": places, "nctaid": grid}
        special = {
            f"%{name}.{axis}": value for name, each in axes.items() for axis, value in zip("xyz", each, strict=True)
        }
        special |= {"%laneid": self.threads % 32, "%warpid": self.threads // 32}
        # Values of all threads that run, of one element where all have the same.
        self.registers = self._fixed | {name: np.atleast_1d(v).astype(np.uint32) for name, v in special.items()}
        self.undefined.clear()
        self.shared = Shared(count, self._shared_bytes, self.program.code, self.faults, self.counts)
        self.epochs, self.warp_epochs = np.zeros((2, self.lanes), np.int32)
        self.copies, self.products = UnderWay(self.lanes), UnderWay(self.lanes)
        # By warpgroup and accumulators, whether the last product that is under way there is undefined.
        self.accumulators: dict[tuple[int, tuple[str, ...]], Any] = {}
        counters = np.zeros(self.lanes, np.int64)
        while (chosen := self._choose(counters)) is not None:
            start, mask = chosen
            counters[mask] = end = self._straight(start, mask)
            warps = self.lanes // 32 if mask is ALL else int(mask.reshape(-1, 32).any(1).sum())
            count = len(self.threads[mask])
            self.counts.update(warp_instructions=(end - start) * warps, instructions=(end - start) * count)
            if self.program.steps[end] is None:
                instruction = self.program.code.instructions[end]
                taken = self.guarded(instruction, mask) if instruction.guard else mask
                counters[mask] += 1
                counters[taken] = (
                    self.program.code.labels[instruction.operands[0]] if instruction.op == "bra" else _DONE
                )

    def _choose(self, counters: Array) -> tuple[int, Any] | None:
        """The instruction to go on with, and the threads that do; None where all have ended."""
        if (counters == counters[0]).all():
            return None if counters[0] == _DONE else (int(counters[0]), ALL)
        active = counters != _DONE
        numbers = np.unique(counters[active]).tolist()
        for counter in numbers:
            mask, size = counters == counter, self.program.together[counter]
            mask &= np.repeat((mask | ~active).reshape(-1, size).all(1), size)
            if mask.any():
                return counter, mask
        # Threads wait for each other: what comes first goes on, and reports it.
        return numbers[0], counters == numbers[0]

    def _straight(self, start: int, mask: Any) -> int:
        """Execute up to the next control instruction, or where others may join in."""
        steps, at = self.program.steps, start
        while (step := steps[at]) is not None:
            if mask is not ALL and at > start and (at in self.program.targets or self.program.together[at] > 1):
                break
            step(self, mask)
            at += 1
        return at

    # Registers.
    def get(self, operand: Any, dtype: np.dtype, mask: Any = ALL) -> Array:
        """An operand of threads, of which narrower types take the low bits; what nobody has written is undefined."""
        value = self.registers.get(operand)
        if value is None:
            if operand[0] != "%" or operand not in self.program.code.written:
                return _constant("-1" if self.program.code.kind_of(operand) else operand, dtype)
            self.faults.origin = self.faults.origin or f"the register {operand}"
            self.undefined[operand], value = ~DEFINED, np.zeros(1, dtype)
        if mask is not ALL and value.size > 1:
            value = value[mask]
        if value.dtype == dtype:
            return value
        if dtype == _BOOL:
            return value != 0
        if value.dtype.itemsize != dtype.itemsize:
            value = value.view(UNSIGNED[value.dtype.itemsize]).astype(UNSIGNED[dtype.itemsize])
        return value.view(dtype)

    def full(self, operand: Any, dtype: np.dtype, mask: Any = ALL) -> Array:
        """An operand with an element for each thread."""
        value = self.get(operand, dtype, mask)
        return value if value.size > 1 else np.broadcast_to(value, len(self.threads[mask]))

    def put(self, name: str, value: Array, mask: Any, undefined: Array = DEFINED) -> None:
        """Set a register of threads; `undefined` says which values nobody has written."""
        if name == "_":
            return
        if mask is not ALL:
            old, was = self.registers.get(name), self.undefined.get(name, DEFINED)
            if old is None:
                old, was = np.zeros(1, value.dtype), ~DEFINED
            value = self._merged(old.view(value.dtype), value, mask)
            undefined = self._merged(was, undefined, mask) if was is not undefined else undefined
        self.registers[name] = value
        if undefined is not DEFINED and undefined.any():
            self.undefined[name] = undefined
        elif self.undefined:
            self.undefined.pop(name, None)

    def put_each(self, names: Sequence[str], values: Array, mask: Any, undefined: Array) -> None:
        """Set registers to the columns of `[lane, register]`; what is undefined may be the same for all."""
        undefined = np.broadcast_to(undefined.reshape(len(undefined), -1), values.shape)
        for name, value, each in zip(names, np.ascontiguousarray(values.T), undefined.T, strict=True):
            self.put(name, value, mask, each)

    def _merged(self, old: Array, new: Array, mask: Any) -> Array:
        merged = np.full(self.lanes, old)
        merged[mask] = new
        return merged

    def undefined_of(self, names: Sequence[str], mask: Any = ALL) -> Array:
        """Which values that follow from some registers are undefined; the same `DEFINED` where none is."""
        found = DEFINED
        if self.undefined:
            for name in names:
                if (each := self.undefined.get(name)) is not None:
                    found = found | (each if each.size == 1 else each[mask])
        return found

    def must_be_defined(self, instruction: Instruction, names: Sequence[str], mask: Any, what: str) -> None:
        """Fault what an instruction does with undefined values."""
        found = self.undefined_of(names, mask)
        if found is not DEFINED:
            what = f"{what} follows from {self.faults.origin}, which nobody wrote"
            self.faults.note("undefined value", instruction, found, what)

    def guarded(self, instruction: Instruction, mask: Any) -> Any:
        """The threads for which the guard of an instruction holds."""
        self.must_be_defined(instruction, [str(instruction.guard)], mask, "a predicate")
        predicate = self.get(instruction.guard, _BOOL, mask) ^ instruction.is_negated
        return mask if predicate.all() else self._merged(DEFINED, predicate, mask)

    # Memory.
    def lanes_of(self, mask: Any) -> Lanes:
        """The threads in a mask, or of some numbers."""
        columns = (np.arange(self.lanes), self._in_grid, self.blocks, self.threads, self.epochs, self.warp_epochs)
        return Lanes(*(each[mask] for each in columns))

    def reach(self, instruction: Instruction, address: Address, mask: Any, memory: Memory) -> tuple[Lanes, Array]:
        """Threads, and where their accesses go in the data of a memory."""
        self.must_be_defined(instruction, [address.base], mask, "an address")
        kind, lanes = KINDS["u64" if self.program.code.kind_of(address.base) == "b64" else "u32"], self.lanes_of(mask)
        at = self.full(address.base, kind, mask).astype(np.int64) + address.offset
        return lanes, at - BASE if memory is self.memory else self.shared.find(lanes, at)

    def space(self, instruction: Instruction) -> Memory:
        """The memory that an instruction is about."""
        for name, memory in (("shared", self.shared), ("global", self.memory)):
            if name in instruction.qualifiers:
                return memory
        raise instruction.unsupported()
