"""Whether the calls of the table are bound by memory on an H100: what they issue, wait for, and have under way.

The table says what a step of each kernel takes, the launches say how many steps and programs there are. Attention is
bound by its products of matrices and has no part in this.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from perf.machine_code.work import numbers_of, work_of
from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perf.machine_code.table import Row

# The chip whose latencies `stalls` knows, its clock, and what memory gives of the 3.35 TB/s of its data sheet.
CHIP = "sm_90"
CYCLES_PER_US = 1755
BYTES_PER_US = 3e6

# Issue slots that a call may take, as a share of those in the time of its bytes: in many of the others, a scheduler
# finds no instruction that can go.
MAX_ISSUE_SHARE = 0.6
# What the longest program of a launch may take, where the time of the bytes of its call is shorter than the first; and
# of one that leaves processors idle, beside a tenth of that time.
MAX_CHAIN_US = 12.0
MAX_SMALL_CHAIN_US = 10.0
# Launches that load more are to fill the processors: with this share of the programs that fit, or so many bytes under
# way on each that memory has no pause (a latency of 800 cycles at full speed takes 10 KiB); and at least so many.
LARGE_BYTES = 16 << 20
FILLING_SHARE = 0.7
FILLING_BYTES = 24 << 10
LEAST_BYTES = 12 << 10


# Calls that may issue for a larger share, by the beginning of their names, and why. Where that is all of the time and
# more, nothing else is asked of them.
KNOWN_SHARES = (
    (r"(layer_norm|log_softmax) \S*x(4097|50257) ", 1.1, "rows that begin anywhere are loaded and masked one by one"),
    (r"batch_norm 64x1001x14x14 ", 1.2, "channels that begin anywhere are loaded and masked one by one"),
    (r"batch_norm 64x2048x7x7 ", 2.2, "planes of 49 elements are loaded and masked one by one"),
    (r"batch_norm 64x1024x14x14 ", 1.15, "planes of 196 elements of 2 bytes are loaded by fours"),
    (r"log_softmax 16x21x512x512 ", 1.6, "a tile has room for 32 classes, of which there are 21"),
    (r"batch_norm\S* .*(forward|jvp|evaluation)", 0.8, "a program has few steps, and half of its work outside of them"),
    (r"(layer_norm|log_softmax) \S*x(1152|1600|5120|5124) ", 0.95, "a third of the columns of a tile are empty"),
    (r"layer_norm \S+ bfloat16 (hvp|x_only|double_|gradient_|backward_of_jvp)", 0.95, "five operands in float32"),
    (r"dropout ", 0.9, "ten rounds of 64-bit products for every four elements"),
    (r"layer_norm 512x512 float64 ", 0.9, "a wave of programs that begins and ends at once"),
)


class Launched(NamedTuple):
    """A launch: the key of its row, its grid, and its integers by name."""

    key: str
    grid: tuple[int, ...]
    values: dict[str, int]


class Called(NamedTuple):
    """A call of a case, named by both, the bytes that it moves, and its launches."""

    name: str
    bytes_moved: int
    launches: tuple[Launched, ...]


class Share(NamedTuple):
    """Issue time, waits and processors that a launch takes of an H100.

    Attributes:
        kernel: Its name.
        issue_us: Time in which all processors do nothing but issue its instructions.
        chain_us: Time that the longest program takes alone, and those that follow it in its place.
        programs: Programs on each processor, of which `resident` fit at once.
        steps: Steps of its longest loop.
        loaded: Bytes that it loads from global memory in the loop that loads most, or outside of loops.
        under_way: Bytes that are being loaded on each processor while others are worked on.
    """

    kernel: str
    issue_us: float
    chain_us: float
    programs: float
    resident: int
    steps: int
    loaded: float
    under_way: float


def share_of(launched: Launched, row: Row) -> Share:
    """Shares of a launch, by the row of its kernel."""
    chip, regions = CHIPS[CHIP], row.parsed_regions()
    used = (row.num_warps, row.registers, row.shared_bytes)
    work = work_of(regions, launched.values, launched.grid, used, chip)
    numbers = numbers_of(launched.values, launched.grid)
    trips = [region.num_trips(numbers) for region in regions]
    programs = work.programs / chip.num_processors
    step_bytes = [row.num_warps * chip.warp_size * (region.loaded or 0) for region in regions]
    loaded, step, longest = max(
        ((count * size, size, region) for count, size, region in zip(trips, step_bytes, regions, strict=True)),
        key=lambda each: each[0],
    )
    return Share(
        row.kernel,
        work.issue_cycles(chip.num_processors) / CYCLES_PER_US,
        work.latency_cycles(chip.num_processors) / CYCLES_PER_US,
        programs,
        work.resident,
        max(trips[1:], default=1),
        work.programs * loaded,
        # A loop that waits for what it has just asked for has it under way half of the time.
        min(programs, work.resident) * step * (0.5 if longest.ahead == 0 else 1.0),
    )


def _broken(called: Called, rows: Mapping[str, Row]) -> list[str]:
    shares = [share_of(launched, rows[launched.key]) for launched in called.launches if launched.key in rows]
    memory_us = called.bytes_moved / BYTES_PER_US
    issue = sum(share.issue_us for share in shares) / memory_us
    known = (share for pattern, share, _ in KNOWN_SHARES if re.match(pattern, called.name))
    most_issue = next(known, MAX_ISSUE_SHARE)
    problems = [f"issues for {issue:.2f} of the time of its bytes"] if issue > most_issue else []
    for share in shares if most_issue < 1 else []:
        is_small = share.programs < 1
        most = max(MAX_SMALL_CHAIN_US, memory_us / 10) if is_small else max(MAX_CHAIN_US, memory_us)
        used = min(share.programs / share.resident, 1)
        waits = f"{share.kernel} waits {share.chain_us:.1f} us in {share.steps} steps of "
        waits += f"{share.programs:.2f} programs per processor, {most:.1f} allowed"
        under_way = f"{share.kernel} has {share.under_way / 1024:.0f} KiB under way on a processor"
        is_large, fills = share.loaded > LARGE_BYTES, used >= FILLING_SHARE or share.under_way >= FILLING_BYTES
        broken = {
            waits: share.chain_us > most,
            under_way: is_large and share.under_way < LEAST_BYTES,
            f"{under_way} and {used:.2f} of the programs that fit": is_large and share.steps > 1 and not fills,
        }
        problems += [text for text, is_broken in broken.items() if is_broken]
    return [f"{CHIP} {called.name}: {problem}" for problem in problems]


def broken_shares(calls: Sequence[Called], rows: Sequence[Row]) -> list[str]:
    """Problems of calls, in words; empty if there is none. Launches without a row are left out, and attention."""
    by_key = {row.key: row for row in rows}
    others = (called for called in calls if not called.name.startswith("attention "))
    return sorted({problem for called in others for problem in _broken(called, by_key)})
