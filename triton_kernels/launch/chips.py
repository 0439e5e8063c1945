"""What the planner knows of a chip: the limits that its numbers are chosen by."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton

from triton_kernels.launch._planned import forget_plans

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Chip:
    """Limits of a GPU.

    Attributes:
        name: Architecture whose plans it takes: `"sm_80"`, `"sm_90"`, `"sm_100"` or `"gfx942"`.
        warp_size: Threads of a warp (a wavefront on AMD).
        num_processors: Streaming multiprocessors (compute units on AMD).
        shared_bytes: Shared memory (LDS on AMD) that one block can have.
        l2_bytes: Size of the last cache before memory; of the infinity cache on AMD.
        max_warps: Warps of a block at most.
        max_cluster: Blocks that can reduce together through each other's shared memory; 1 for none.
    """

    name: str
    warp_size: int
    num_processors: int
    shared_bytes: int
    l2_bytes: int
    max_warps: int
    max_cluster: int


# Data sheets of A100, H200, B200 and MI300X. AMD allows 16 wavefronts of 64 threads in a block.
CHIPS = {
    "sm_80": Chip("sm_80", 32, 108, 166912, 40 << 20, 32, 1),
    "sm_90": Chip("sm_90", 32, 132, 232448, 50 << 20, 32, 8),
    "sm_100": Chip("sm_100", 32, 148, 232448, 126 << 20, 32, 8),
    "gfx942": Chip("gfx942", 64, 304, 65536, 256 << 20, 16, 1),
}

# A CPU run (the interpreter) plans as if for this many processors: enough to exercise splits and persistent loops,
# few enough to stay fast.
INTERPRETER_PROCESSORS = 4
INTERPRETER = replace(CHIPS["sm_90"], num_processors=INTERPRETER_PROCESSORS, max_cluster=1)

# Before this version of Triton, reducing a tile of rows and columns across a cluster does not compile: 3.6 and 3.7
# refuse any reduction there, 3.8 those along one of two axes.
CLUSTERS_SINCE = (3, 9)

_chosen: Chip | None = None


@functools.cache
def _cuda_chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name = "gfx942"
    else:
        # Minor versions share the plans of their major one; an unknown one those of its nearest elder.
        name = {8: "sm_80", 9: "sm_90"}.get(properties.major, "sm_100" if properties.major >= 10 else "sm_80")
    return replace(CHIPS[name], num_processors=properties.multi_processor_count, l2_bytes=properties.L2_cache_size)


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
    """What tells devices with different speeds apart that share a chip's plans."""
    if _chosen is None and not isinstance(device, Chip) and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"stand-in of {chip_of(device).num_processors} processors"


def cluster_limit(chip: Chip, version: str = triton.__version__) -> int:
    """Blocks of a cluster at most, for kernels that reduce tiles of rows and columns.

    Args:
        chip: The chip that is planned for.
        version: Version of Triton.
    """
    major, minor = map(int, version.split(".")[:2])
    return chip.max_cluster if (major, minor) >= CLUSTERS_SINCE else 1


@contextlib.contextmanager
def use_chip(chip: Chip) -> Iterator[None]:
    """Plan for `chip`, whatever the device: to compile for a chip that is not there."""
    global _chosen  # noqa: PLW0603 - the setting is the module's
    previous, _chosen = _chosen, chip
    forget_plans()
    try:
        yield
    finally:
        _chosen = previous
        forget_plans()
