"""The planner's view of a chip: the limits that its numbers are chosen by."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .planned import forget_plans


@dataclass(frozen=True)
class Chip:
    """Limits of a GPU.

    Attributes:
        name: Architecture whose plans it takes: `"sm_80"`, `"sm_90"`, `"sm_100"` or `"gfx942"`.
        warp_size: Threads of a warp (a wavefront on AMD).
        num_processors: Streaming multiprocessors (compute units on AMD).
        shared_bytes: Shared memory (LDS on AMD) that one block can have.
        processor_shared_bytes: Shared memory of a processor, for all of its blocks.
        registers: 32-bit registers of a processor.
        l2_bytes: Size of the last cache before memory; of the infinity cache on AMD, where that is known.
        max_warps: Warps of a block at most.
    """

    name: str
    warp_size: int
    num_processors: int
    shared_bytes: int
    processor_shared_bytes: int
    registers: int
    l2_bytes: int
    max_warps: int


# Data sheets of A100, H200, B200 and MI300X. AMD allows 16 wavefronts of 64 threads in a block. No data sheet names the
# H200's cache: the GH100 die has 60 MiB beside twelve memory controllers, and six stacks of memory use all twelve.
CHIPS = {
    "sm_80": Chip("sm_80", 32, 108, 166912, 167936, 65536, 40 << 20, 32),
    "sm_90": Chip("sm_90", 32, 132, 232448, 233472, 65536, 60 << 20, 32),
    "sm_100": Chip("sm_100", 32, 148, 232448, 233472, 65536, 126 << 20, 32),
    "gfx942": Chip("gfx942", 64, 304, 65536, 65536, 131072, 256 << 20, 16),
}

# Threads of a block at most, on every chip that Triton compiles for.
MAX_BLOCK_THREADS = 1024

# A CPU run (the interpreter) plans as if for this many processors: enough to exercise splits and persistent loops,
# few enough to stay fast.
INTERPRETER_PROCESSORS = 4
INTERPRETER = replace(CHIPS["sm_90"], num_processors=INTERPRETER_PROCESSORS)

_chosen: Chip | None = None


def chip_from_properties(properties: Any, is_amd: bool) -> Chip:
    """The chip that torch describes: the plans of the nearest table, and the limits of the device itself.

    A chip of NVIDIA takes the table of its compute capability's major number, or else of the nearest lower one that has
    a table (`sm_80` if there is none); all chips of AMD take that of gfx942. Where the device has less than the chip of
    the table, or warps of another size, the plans keep to what the device has (see `limits.limits_of`).

    Args:
        properties: Those of `torch.cuda.get_device_properties`. A value that torch does not tell is taken as on
            the chip of the table; but of shared memory a block then has only what it can have unasked, and an AMD
            chip with warps of 32 threads only as many registers as one of NVIDIA.
        is_amd: Whether the chip is AMD's.
    """
    if is_amd:
        base = CHIPS["gfx942"]
    else:
        base = CHIPS["sm_80" if properties.major < 9 else "sm_90" if properties.major < 10 else "sm_100"]
    has_infinity_cache = is_amd and str(getattr(properties, "gcnArchName", "")).split(":")[0] == base.name

    def told(name: str, otherwise: int) -> int:
        return int(getattr(properties, name, 0) or otherwise)

    warp_size = told("warp_size", base.warp_size)
    registers = base.registers if warp_size == base.warp_size else min(chip.registers for chip in CHIPS.values())
    # AMD has no more for blocks that ask for it.
    shared_bytes = told("shared_memory_per_block_optin", told("shared_memory_per_block", base.shared_bytes))
    return Chip(
        name=base.name,
        warp_size=warp_size,
        num_processors=told("multi_processor_count", base.num_processors),
        shared_bytes=shared_bytes,
        processor_shared_bytes=told("shared_memory_per_multiprocessor", max(shared_bytes, base.processor_shared_bytes)),
        registers=told("regs_per_multiprocessor", registers),
        # ROCm calls L2 a smaller cache in front of the infinity cache, which it does not tell of.
        l2_bytes=base.l2_bytes if has_infinity_cache else told("L2_cache_size", base.l2_bytes),
        max_warps=told("max_threads_per_block", MAX_BLOCK_THREADS) // warp_size,
    )


@functools.cache
def _cuda_chip(index: int) -> Chip:
    return chip_from_properties(torch.cuda.get_device_properties(index), bool(torch.version.hip))


def chip_of(device: torch.device | Chip) -> Chip:
    """The chip behind `device`; a small stand-in where there is none, which is where the interpreter runs."""
    if _chosen is not None:
        return _chosen
    if isinstance(device, Chip):
        return device
    if device.type == "cuda":
        return _cuda_chip(device.index if device.index is not None else torch.cuda.current_device())
    return INTERPRETER


def device_name(device: torch.device | Chip) -> str:
    """The key that tells devices with different speeds apart that share a chip's plans."""
    if _chosen is None and not isinstance(device, Chip) and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"stand-in of {chip_of(device).num_processors} processors"


@contextlib.contextmanager
def use_chip(chip: Chip) -> Iterator[None]:
    """Plan for `chip`, whatever the device: to compile for a chip that is not there."""
    global _chosen
    previous, _chosen = _chosen, chip
    forget_plans()
    try:
        yield
    finally:
        _chosen = previous
        forget_plans()
