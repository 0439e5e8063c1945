"""Issue slots and waits of a launch: the regions of its machine code times their trips, for all its programs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perf.machine_code.listing import Region
    from triton_kernels.launch.chips import Chip

# Of a processor of NVIDIA: each issues one instruction of one warp in a cycle, for a quarter of its warps.
SCHEDULERS = 4
MAX_RESIDENT_WARPS = 64
# Shared memory of a block that the system takes.
RESERVED_SHARED_BYTES = 1024


class Work(NamedTuple):
    """Of one launch.

    Attributes:
        programs: How many there are.
        num_warps: Of each.
        resident: Programs that a processor can hold at once.
        instructions: That one warp of the longest program issues.
        barriers: At which its block waits.
        cycles: That the warp would take alone, waiting for memory included; None where that is not known.
    """

    programs: int
    num_warps: int
    resident: int
    instructions: float
    barriers: float
    cycles: float | None

    def issue_cycles(self, num_processors: int) -> float:
        """Cycles in which a processor does nothing but issue."""
        return math.ceil(self.programs / num_processors) * self.num_warps * self.instructions / SCHEDULERS

    def latency_cycles(self, num_processors: int) -> float:
        """Cycles of one program behind the other, where each place on a processor has its own row of them."""
        return max(self.programs / num_processors / self.resident, 1.0) * (self.cycles or 0.0)


def work_of(
    regions: Sequence[Region], values: Mapping[str, Any], grid: Sequence[int], used: tuple[int, int, int], chip: Chip
) -> Work:
    """The work of a launch.

    Args:
        regions: Of its machine code.
        values: Its arguments by name.
        grid: Programs along each axis.
        used: Warps of a block, registers of a thread, bytes of shared memory of a block.
        chip: The chip that it is launched on.
    """
    numbers = numbers_of(values, grid)
    trips = [region.num_trips(numbers) for region in regions]

    def total(name: str) -> float:
        return sum(count * (getattr(region, name) or 0) for count, region in zip(trips, regions, strict=True))

    cycles = None if any(region.cycles is None for region in regions) else total("cycles")
    resident = resident_programs(*used, chip)
    return Work(math.prod(grid), used[0], resident, total("instructions"), total("barriers"), cycles)


def numbers_of(values: Mapping[str, Any], grid: Sequence[int]) -> dict[str, int]:
    """Integers of a launch, and the sizes of its grid, by the names that `Region.trips` has for them."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int)}
    return numbers | {f"programs_{axis}": count for axis, count in zip("xyz", (*grid, 1, 1), strict=False)}


def resident_programs(num_warps: int, registers: int, shared_bytes: int, chip: Chip) -> int:
    """Programs that one processor of NVIDIA holds at once."""
    # Registers are dealt out to whole warps, 256 at a time, by each of the four parts of a processor for its own.
    warps = chip.registers // SCHEDULERS // (math.ceil(registers * chip.warp_size / 256) * 256) * SCHEDULERS
    fits = chip.processor_shared_bytes // (shared_bytes + RESERVED_SHARED_BYTES)
    return max(1, min(warps // num_warps, MAX_RESIDENT_WARPS // num_warps, fits, 32))
