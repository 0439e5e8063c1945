"""Instructions that move data: between registers, threads and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from primitives.testing._ptx.arithmetic import KINDS, UNSIGNED
from primitives.testing._ptx.machine import Machine, executes, reader, wider
from primitives.testing._ptx.memory import Access

if TYPE_CHECKING:
    from primitives.testing._ptx.code import Instruction

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
        parts = np.ascontiguousarray(machine.full(source, kind)).view(UNSIGNED[kind.itemsize // len(target)])
        for number, name in enumerate(target):
            machine.put(name, parts[number :: len(target)].copy(), mask, machine.undefined_of([source]))
    else:
        parts = np.stack([machine.full(each, UNSIGNED[kind.itemsize // len(source)]) for each in source], 1)
        machine.put(target, parts.view(kind)[:, 0], mask, machine.undefined_of(source))


@executes("cvta")
def convert_address(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Addresses are the same in every space."""
    target, source = instruction.operands
    machine.put(target, reader(machine.program.code, source, _U64)(machine), mask, machine.undefined_of([source]))


@executes("createpolicy")
def create_policy(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Caches change no value."""
    machine.put(instruction.operands[0], np.zeros(1, _U64), mask)


@executes("fence", "membar")
def fence(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Instructions take effect in their order."""


@executes("bar")
def synchronize_warp(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """`bar.warp.sync`: what the threads of a warp did before comes before what they do now."""
    machine.warp_epochs += 1 if mask is None else mask


@executes("shfl")
def shuffle(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """A register of another thread of the warp; where the number leaves the segment, the own one."""
    target, source, by, clamp, _ = instruction.operands
    mode = instruction.qualifiers[1]
    if "|" in target or mode not in ("bfly", "idx", "up", "down"):
        raise instruction.unsupported()
    lane, number = machine.threads % 32, machine.full(by, KINDS["s32"]).astype(np.int64)
    bounds = machine.full(clamp, _U32).astype(np.int64)
    segment, last = bounds >> 8 & 31, bounds & 31
    low = lane & segment
    high = low | last & ~segment
    other = {"bfly": lane ^ number, "up": lane - number, "down": lane + number, "idx": low | number & ~segment}[mode]
    stays = other < low if mode == "up" else other > high
    index = np.arange(machine.lanes) + np.where(stays, lane, other) - lane
    if mask is not None and not mask[index][mask].all():
        machine.faults.note("divergence", instruction, "a thread reads of one that does not take part")
    undefined = machine.undefined_of([source])
    undefined = None if undefined is None else np.broadcast_to(undefined, machine.lanes)[index]
    machine.put(target, machine.full(source, _U32)[index], mask, undefined)


# Memory.
def _vector(instruction: Instruction, operand: Any) -> tuple[tuple[str, ...], np.dtype]:
    """The registers of a load or store, and what each holds of memory."""
    dtype = KINDS.get(instruction.qualifiers[-1])
    if dtype is None or not {"global", "shared", "param"} & {*instruction.qualifiers}:
        raise instruction.unsupported()
    return (operand if isinstance(operand, tuple) else (operand,)), dtype


@executes("ld")
def load(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Of parameters, shared or global memory."""
    targets, dtype = _vector(instruction, instruction.operands[0])
    address, count = instruction.operands[1], len(targets)
    widened = wider(machine.program.code, targets[0], instruction.qualifiers[-1], dtype) or dtype
    if "param" in instruction.qualifiers:
        value = machine.parameters[address.base]
        value = value.view(dtype) if value.dtype.itemsize == dtype.itemsize else value.astype(dtype)
        machine.put(targets[0], value.astype(widened), mask)
        return
    lanes, size = machine.lanes_of(mask), count * dtype.itemsize
    is_shared = "shared" in instruction.qualifiers
    if is_shared:
        at = machine.shared_place(instruction, address, lanes, size, mask)
        values, defined = machine.shared.load(instruction, lanes, at, count, dtype)
    else:
        at = machine.global_place(instruction, address, lanes.numbers, size, mask)
        index = at[:, None] // dtype.itemsize + np.arange(count)
        values = machine.memory.data.view(dtype)[index]
        defined = machine.memory.undefined.view(UNSIGNED[dtype.itemsize])[index] == 0
        machine.memory.accesses.append(Access(False, instruction, size, at, machine.numbers[lanes.numbers]))
    is_defined = defined.all()
    if not is_defined:
        first = int(at[~defined.all(1)][0])
        machine.note_origin(f"byte {first} of shared memory" if is_shared else machine.memory.where(first))
    for number, name in enumerate(targets):
        value = values[:, number].astype(widened)
        machine.put_some(name, value, mask, None if is_defined else ~defined[:, number])


@executes("st")
def store(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """To shared or global memory."""
    sources, dtype = _vector(instruction, instruction.operands[1])
    address, lanes, bits = instruction.operands[0], machine.lanes_of(mask), UNSIGNED[dtype.itemsize]
    values = np.stack([machine.full(each, bits)[lanes.numbers] for each in sources], 1)
    size = len(sources) * dtype.itemsize
    if "shared" in instruction.qualifiers:
        at = machine.shared_place(instruction, address, lanes, size, mask)
        undefined = machine.undefined_of(sources)
        undefined = None if undefined is None else np.broadcast_to(undefined, machine.lanes)[lanes.numbers]
        machine.shared.store(instruction, lanes, at, values, undefined)
        return
    machine.must_be_defined(instruction, sources, mask, "what is stored")
    at = machine.global_place(instruction, address, lanes.numbers, size, mask)
    index, view = at[:, None] // dtype.itemsize + np.arange(len(sources)), machine.memory.data.view(bits)
    changed = (view[index] != values).any(1)
    view[index] = values
    lost = view[index] != values
    if lost.any():
        machine.faults.note("block race", instruction, "threads store different values at one place", lost.sum())
    machine.memory.undefined.view(bits)[index] = 0
    machine.memory.accesses.append(Access(True, instruction, size, at, machine.numbers[lanes.numbers], changed))


@executes("atom", "red")
def update(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """Atomic operations on global memory, of one thread after another."""
    target, address, *operands = instruction.operands if instruction.op == "atom" else ("_", *instruction.operands)
    form = [each for each in instruction.qualifiers if each in _ATOMIC]
    if len(form) != 1 or isinstance(operands[0], tuple) or "global" not in instruction.qualifiers:
        raise instruction.unsupported()
    (_,), dtype = _vector(instruction, operands[0])
    numbers = machine.lanes_of(mask).numbers
    machine.must_be_defined(instruction, operands, mask, "what is stored")
    at = machine.global_place(instruction, address, numbers, dtype.itemsize, mask)
    view, values = machine.memory.data.view(dtype), [machine.full(each, dtype)[numbers] for each in operands]
    old = np.zeros(len(at), dtype)
    for number, index in enumerate(at // dtype.itemsize):
        old[number] = view[index]
        view[index] = _ATOMIC[form[0]](old[number], *(each[number] for each in values))
    machine.put_some(target, old, mask)


@executes("cp")
def copy(machine: Machine, instruction: Instruction, mask: Any) -> None:
    """`cp.async` from global to shared memory: its groups, and the waits for them."""
    form = instruction.qualifiers[1]
    if form == "commit_group":
        machine.copy_groups += 1 if mask is None else mask
        return
    if form in ("wait_group", "wait_all"):
        left = int(instruction.operands[0]) if instruction.operands else 0
        groups = machine.copy_groups if instruction.operands else machine.copy_groups + 1
        machine.shared.finish_copies(machine.lanes_of(mask), groups, left)
        return
    if form not in ("ca", "cg"):
        raise instruction.unsupported()
    to, source, text, *rest = instruction.operands
    size, lanes = int(text, 0), machine.lanes_of(mask)
    # A number of bytes, behind which zeros follow, and a policy of caches.
    rest = rest[: len(rest) - any("cache_hint" in each for each in instruction.qualifiers)]
    used = machine.full(rest[0] if rest else text, _U32)[lanes.numbers]
    if not ((used == 0) | (used == size)).all():
        raise instruction.unsupported()
    data, undefined = np.zeros((len(used), size), np.uint8), np.zeros(len(used), bool)
    reading = lanes.numbers[used > 0]
    if reading.size:
        is_reading = np.zeros(machine.lanes, bool)
        is_reading[reading] = True
        at = machine.global_place(instruction, source, reading, size, is_reading)
        index = at[:, None] + np.arange(size)
        data[used > 0], undefined[used > 0] = machine.memory.data[index], machine.memory.undefined[index].any(1)
        machine.memory.accesses.append(Access(False, instruction, size, at, machine.numbers[reading]))
    at = machine.shared_place(instruction, to, lanes, size, mask)
    machine.shared.copy(instruction, lanes, machine.copy_groups[lanes.numbers], at, data, undefined)
