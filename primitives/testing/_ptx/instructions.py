"""Instructions that move data: between registers, threads and memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from primitives.testing._ptx.arithmetic import KINDS, UNSIGNED
from primitives.testing._ptx.code import Instruction
from primitives.testing._ptx.machine import DEFINED, Machine, executes, wider

Array = Any

_U32, _U64 = KINDS["u32"], KINDS["u64"]
_ATOMIC: dict[str, Any] = {
    **{"add": np.add, "min": np.minimum, "max": np.maximum, "exch": lambda old, new: new},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    "cas": lambda old, expected, new: new if old == expected else old,
}


@executes("mov")
def move(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Words put together, or taken apart."""
    (target, source), kind = instruction.operands, KINDS[instruction.qualifiers[-1]]
    if isinstance(target, tuple):
        parts = np.ascontiguousarray(machine.full(source, kind, mask)).view(UNSIGNED[kind.itemsize // len(target)])
        machine.put_each(target, parts.reshape(-1, len(target)), mask, machine.undefined_of([source], mask))
    else:
        parts = np.stack([machine.full(each, UNSIGNED[kind.itemsize // len(source)], mask) for each in source], 1)
        machine.put(target, parts.view(kind)[:, 0], mask, machine.undefined_of(source, mask))


@executes("fence", "membar", "createpolicy")
def hint(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Instructions take effect in their order, and caches change no value."""
    for target in instruction.operands[:1]:
        machine.put(target, np.zeros(1, _U64), mask)


@executes("bar", "barrier")
def synchronize(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """What the threads of a block, or of a warp, did before comes before what they do now."""
    machine.warp_epochs[mask] += 1
    if "warp" in instruction.qualifiers:
        return
    if "sync" not in instruction.qualifiers or instruction.operands != ("0",):
        raise instruction.unsupported()
    machine.epochs[mask] += 1
    machine.counts["barriers"] += len(np.unique(machine.blocks[mask]))


@executes("shfl")
def shuffle(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """A register of another thread of the warp; where the number leaves the segment, the own one."""
    target, source, by, clamp, _ = instruction.operands
    mode = instruction.qualifiers[1]
    if "|" in target or mode not in ("bfly", "idx", "up", "down"):
        raise instruction.unsupported()
    lanes, number = machine.lanes_of(mask), machine.get(by, KINDS["s32"], mask).astype(np.int64)
    lane, bounds = lanes.threads % 32, machine.get(clamp, _U32, mask).astype(np.int64)
    segment, last = bounds >> 8 & 31, bounds & 31
    low = lane & segment
    high = low | last & ~segment
    other = {"bfly": lane ^ number, "up": lane - number, "down": lane + number, "idx": low | number & ~segment}[mode]
    stays = other < low if mode == "up" else other > high
    index = lanes.numbers + np.where(stays, lane, other) - lane
    undefined = machine.undefined_of([source])
    undefined = undefined if undefined.size == 1 else undefined[index]
    machine.put(target, machine.full(source, _U32)[index], mask, undefined)


# Memory.
def _vector(instruction: Instruction, operand: Any) -> tuple[tuple[str, ...], np.dtype]:
    """The registers of a load or store, and what each holds of memory."""
    dtype = KINDS.get(instruction.qualifiers[-1])
    if dtype is None:
        raise instruction.unsupported()
    return (operand if isinstance(operand, tuple) else (operand,)), dtype


@executes("ld")
def load(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Of parameters, shared or global memory."""
    (names, dtype), address = _vector(instruction, instruction.operands[0]), instruction.operands[1]
    widened = wider(machine.program.code, names[0], instruction.qualifiers[-1], dtype)
    if "param" in instruction.qualifiers:
        machine.put(names[0], machine.get(address.base, dtype).astype(widened), mask)
        return
    memory = machine.space(instruction)
    lanes, at = machine.reach(instruction, address, mask, memory)
    values, undefined = memory.load(instruction, lanes, at, len(names), dtype)
    machine.put_each(names, values.astype(widened), mask, undefined)


@executes("st")
def store(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """To shared or global memory."""
    (names, dtype), address = _vector(instruction, instruction.operands[1]), instruction.operands[0]
    memory = machine.space(instruction)
    lanes, at = machine.reach(instruction, address, mask, memory)
    values = np.stack([machine.full(each, UNSIGNED[dtype.itemsize], mask) for each in names], 1)
    if memory is machine.memory:
        machine.must_be_defined(instruction, names, mask, "what is stored")
        undefined = DEFINED
    else:
        undefined = machine.undefined_of(names, mask)
    memory.store(instruction, lanes, at, values, undefined[:, None])


@executes("atom", "red")
def update(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Atomic operations on global memory, of one thread after another."""
    target, address, *operands = instruction.operands if instruction.op == "atom" else ("_", *instruction.operands)
    form = [each for each in instruction.qualifiers if each in _ATOMIC]
    (*_, dtype), memory = _vector(instruction, operands), machine.memory
    if len(form) != 1 or isinstance(operands[0], tuple) or machine.space(instruction) is not memory:
        raise instruction.unsupported()
    machine.must_be_defined(instruction, operands, mask, "what is stored")
    at = memory.place(instruction, machine.reach(instruction, address, mask, memory)[1], dtype.itemsize)
    view, values = memory.data.view(dtype), [machine.full(each, dtype, mask) for each in operands]
    old = np.zeros(len(at), dtype)
    for number, index in enumerate(at // dtype.itemsize):
        old[number] = view[index]
        view[index] = _ATOMIC[form[0]](old[number], *(each[number] for each in values))
    machine.put(target, old, mask)


@executes("cp")
def copy(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """`cp.async` from global to shared memory: its groups, and the waits for them."""
    form = instruction.qualifiers[1]
    if form == "commit_group":
        machine.copies.close(mask)
    elif form in ("wait_group", "wait_all"):
        machine.copies.wait(mask, *map(int, instruction.operands))
    elif form in ("ca", "cg"):
        _begin_copy(machine, instruction, mask)
    else:
        raise instruction.unsupported()


def _begin_copy(machine: Machine, instruction: Instruction, mask: Any) -> None:
    to, source, text, *rest = instruction.operands
    size, numbers = int(text, 0), machine.lanes_of(mask).numbers
    # A number of bytes, behind which zeros follow, and a policy of caches.
    rest = rest[: len(rest) - any("cache_hint" in each for each in instruction.qualifiers)]
    used = machine.full(rest[0] if rest else text, _U32, mask)
    if not ((used == 0) | (used == size)).all():
        raise instruction.unsupported()
    data, undefined = np.zeros((2, len(used), size), np.uint8)
    if (reading := used > 0).any():
        lanes, at = machine.reach(instruction, source, numbers[reading], machine.memory)
        data[reading], undefined[reading] = machine.memory.load(instruction, lanes, at, size, KINDS["u8"])
    to = machine.shared.begin_copy(instruction, *machine.reach(instruction, to, mask, machine.shared), size)

    def land(done: Any) -> None:
        machine.shared.land(machine.lanes_of(numbers[done]), to[done], data[done], undefined[done])

    machine.copies.begin(numbers, land)
