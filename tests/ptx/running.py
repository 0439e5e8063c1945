"""Single instructions on the emulator: threads load an element of each input, and store one result."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from primitives.testing._ptx import instructions, products  # noqa: F401 - registers them
from primitives.testing._ptx.arithmetic import KINDS
from primitives.testing._ptx.machine import Machine, prepared
from primitives.testing._ptx.memory import Fault, Faults, Global

_REGISTERS = ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;"


def run(
    body: str,
    buffers: Sequence[np.ndarray],
    threads: int = 32,
    grid: tuple[int, ...] = (1,),
    shared_bytes: int = 0,
    is_approximate: bool = False,
) -> tuple[list[Fault], Machine]:
    """Run PTX whose registers `%rd0`, `%rd1`, ... have the addresses of buffers, which it may change."""
    names = [f"p{number}" for number in range(len(buffers))]
    loads = " ".join(f"ld.param.b64 %rd{number}, [p{number}];" for number in range(len(buffers)))
    ptx = f""".extern .shared .align 16 .b8 global_smem[];
    .visible .entry kernel({", ".join(f".param .u64 {name}" for name in names)}) .reqntid {threads} {{
    {_REGISTERS} {loads} mov.u32 %r0, %tid.x;
    {body}
    ret; }}"""
    faults, tensors = Faults("kernel"), [torch.tensor(buffer.reshape(-1)) for buffer in buffers]
    memory = Global(zip(names, tensors, strict=True), {}, faults)
    places = [np.array([memory.address(each)], np.uint64) for each in tensors]
    machine = Machine(prepared(ptx, is_approximate), memory, places, shared_bytes, faults)
    machine.run(grid)
    memory.write_back()
    for buffer, each in zip(buffers, tensors, strict=True):
        buffer.reshape(-1)[:] = each.numpy()
    return list(faults.values()), machine


def compute(instruction: str, kinds: str, *inputs: Any, is_approximate: bool = False) -> np.ndarray:
    """The results of `instruction`, written with `{0}` for the result and `{1}`, ... for its operands.

    `kinds` are those of the result and the operands; predicates are made of operands and of results by the text.
    """
    result, *operands = kinds.split()
    arrays = np.broadcast_arrays(*(np.asarray(each, KINDS[kind]) for each, kind in zip(inputs, operands, strict=True)))
    buffers = [np.ascontiguousarray(each.reshape(-1)) for each in arrays]
    out = np.zeros(buffers[0].shape, KINDS[result])
    text, names = "", []
    declared = []
    for number, (kind, buffer) in enumerate(zip([result, *operands], [out, *buffers], strict=True)):
        size = buffer.itemsize
        names.append(f"%x{number}")
        declared.append(f".reg .b{8 * max(size, 2)} %x{number};")
        text += f"mad.wide.u32 %rd{number}, %r0, {size}, %rd{number};"
        if number:
            text += f"ld.global.{'b' if kind in ('bf16', 'bf16x2') else kind[0]}{8 * size} %x{number}, [%rd{number}];"
    text += instruction.format(*names) + f"; st.global.b{8 * out.itemsize} [%rd0], %x0;"
    faults, _ = run(" ".join(declared) + text, [out, *buffers], len(out), is_approximate=is_approximate)
    assert not faults
    return out
