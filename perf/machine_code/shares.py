"""Whether the calls of the table are bound by memory on an H100: what they issue, wait for, and have under way.

The table says what a step of each kernel takes, the launches say how many steps and programs there are. Attention is
bound by its products of matrices and has no part in this.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, NamedTuple

from perf.machine_code.known import Check
from perf.machine_code.stalls import LATENCIES
from perf.machine_code.work import numbers_of, work_of
from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from perf.machine_code.listing import Region
    from perf.machine_code.table import Row

# The chip whose latencies `stalls` knows, its clock, and what memory gives of the 3.35 TB/s of its data sheet.
CHIP = "sm_90"
CYCLES_PER_US = 1755
BYTES_PER_US = 3e6

# Issue slots that a call may take, as a share of those in the time of its bytes: in many of the others, a scheduler
# finds no instruction that can go.
MAX_ISSUE_SHARE = 0.6
# The time of the longest program of a launch, where the time of the bytes of its call is shorter than the first; and of
# one that leaves processors idle, beside a tenth of that time.
MAX_CHAIN_US = 12.0
MAX_SMALL_CHAIN_US = 10.0
# Launches that load more are to fill the processors: with this share of the programs that fit and so many warps, or so
# many bytes under way on each that memory has no pause (a latency of 800 cycles at full speed takes 10 KiB); and at
# least so many.
LARGE_BYTES = 16 << 20
FILLING_SHARE = 0.7
# Three to each scheduler.
FILLING_WARPS = 12
FILLING_BYTES = 24 << 10
LEAST_BYTES = 12 << 10
# Partial rows of sums over rows: two for each processor, or in as many as the kernel has programs a share of the bytes
# of the call, written and read again, that is what two cost a backward of 8,192 rows.
MAX_PARTS = 2
MAX_PART_SHARE = 0.08


# Calls that may issue for a larger share, by the beginning of their names, and why: at most `MARGIN` above what they
# do, and only shapes that need it.
MARGIN = 0.1
_FEW_STEPS = "a program has a tile or two, and half of its work outside of loops"
# By the table's counts: 0.3 to 0.7 of what a program issues is outside of its loop, and the busiest of 132 processors
# have three of 320 programs, where 2.42 would be even.
_ONE_TILE = "a program has a step or two of a row, and 320 of them take 1.24 times an even share"
# Their loops issue 1.4 to 1.9 times as much as those of the same groups, positions adjacent, beside `_ONE_TILE`.
_BY_TWOS = "a group has runs of ten channels, which are addressed, loaded and masked by twos"
# Of 1.46, the first makes a factor of 2.06, the second one of 1.6; three programs of a row (second order), 1.38.
_FEW_ROWS = "64 rows leave half of the processors idle, and of a tile three eighths are empty"
_ONE_BY_ONE = "rows, channels or planes that begin anywhere are loaded and masked one by one"
_EMPTY_TILES = "a third of the columns of a tile are empty"
_SETUP = "sums across threads take as much as six tiles, of which a program has as many"
KNOWN_SHARES = (
    (r"layer_norm 8192x4097 ", 1.05, _ONE_BY_ONE),
    (r"(log_)?softmax \S*x(4097 |50257 bfloat16)", 0.8, _ONE_BY_ONE),
    (r"batch_norm 64x1001x14x14 ", 1.4, _ONE_BY_ONE),
    (r"batch_norm(_relu)? 64x2048x7x7 (bfloat16|float32) (?!channels_last)", 1.25, _ONE_BY_ONE),
    (r"batch_norm 64x1024x14x14 bfloat16 (?!channels_last)", 1.15, "planes of 196 elements are loaded by fours"),
    (r"cross_entropy 16x21x512x512 bfloat16 (forward|jvp)", 0.85, "a tile for 32 classes has 21"),
    (r"cross_entropy 4096x50257 bfloat16 (forward|backward)", 0.95, _ONE_BY_ONE),
    (r"cross_entropy 64x128256 bfloat16 forward", 0.8, _FEW_STEPS),
    (r"cross_entropy 512x512 float64 forward", 0.85, "it writes nothing, and float64's exponential is a polynomial"),
    (r"batch_norm 64x2048x7x7 bfloat16 channels_last (forward|jvp)", 0.9, _SETUP),
    (r"batch_norm 8192x1024 bfloat16 forward", 0.7, _SETUP),
    (r"batch_norm 64x64x56x56 bfloat16 forward", 0.7, _SETUP),
    (r"batch_norm 64x1024x14x14 bfloat16 channels_last forward", 0.7, _SETUP),
    (r"group_norm(_silu)? 2x320x64x64 bfloat16 channels_last ", 2.1, _BY_TWOS),
    (r"group_norm_silu 2x320x64x64 ", 1.35, _ONE_TILE),
    (r"group_norm_silu 2x1280x16x16 ", 2.35, _FEW_ROWS),
    (r"group_norm 2x320x64x64 ", 1.2, _ONE_TILE),
    # Value with tangent, 1.49 before its mean was corrected: it waits for 3.4 us, issues for 2.9, reads for 1.8.
    (r"group_norm 2x1280x16x16 ", 1.7, _FEW_ROWS),
    (r"group_norm 2x320x96x96 ", 0.8, _FEW_STEPS),
    # With two tiles each, half of the programs would wait longer, by estimate, than they issue less: 2.7 for 2.4 us.
    (r"batch_norm(_relu)? 32x64x16x16 float64 forward", 0.85, "256 programs of a tile each divide by subroutine"),
    (r"instance_norm 8x128x64x64 bfloat16 forward", 0.8, "of two tiles, sums across threads that take as much as four"),
    (r"batch_norm(_eval)? 64x256x56x56 bfloat16 channels_last (evaluation|jvp)", 0.7, "eight channels to a thread"),
    (r"layer_norm \S*x(1152|5120) ", 1.0, _EMPTY_TILES),
    (r"(add_)?layer_norm 8192x(1600|5124) ", 1.0, _EMPTY_TILES),
    (r"layer_norm (8192|12608)x768 bfloat16 (backward|hvp|gradient)", 0.8, "a quarter of a tile is empty"),
    (r"layer_norm 32768x256 bfloat16 hvp", 0.75, "sums of rows that share a warp"),
    (r"layer_norm 262144x24 bfloat16 (forward|backward)", 0.7, "a quarter of a tile is empty"),
    (r"add_layer_norm 8192x768 bfloat16 masked (forward|backward)", 0.75, "Philox, and a quarter of a tile is empty"),
    (r"dropout 8192x4096 bfloat16 ", 0.75, "ten rounds of Philox for every four elements: half of what it issues"),
)

# Calls that write more partial rows, by the beginning of their names, with their share of the bytes, and why.
_ISSUE_BOUND = "bound by what it issues: tiles of several rows take a third more, for 8 % of the bytes"
_MORE_ISSUE = "more than a third of a tile is empty: two partial rows take more to issue than these bytes take to move"
KNOWN_PARTS = (
    (r"layer_norm 8192x640 bfloat16 backward", 0.26, _MORE_ISSUE),
    (r"layer_norm 8192x(1152|1280) bfloat16 backward", 0.15, _MORE_ISSUE),
    (r"layer_norm (8192x(768|1000)) bfloat16 (hvp|double|gradient)", 0.12, _ISSUE_BOUND),
    (r"add_layer_norm 8192x768 bfloat16 masked backward", 0.17, _ISSUE_BOUND),
    (r"layer_norm 4096x1000 float32 (hvp|all_results)", 0.12, "eight warps save 5 % of the bytes, spill in one mode"),
)

# Calls whose programs are fewer than fit, or have fewer bytes under way, and why.
_LATE = "elements begin anywhere, and the compiler loads some of them behind others"
KNOWN_FEW = (
    (r"batch_norm 64x1001x14x14 ", "channels that begin anywhere are loaded two bytes at a time"),
    (r"layer_norm 1024x4096 bfloat16 backward", "twice as many, of four rows each, would move a quarter more bytes"),
    (r"batch_norm_relu 64x2048x7x7 bfloat16 jvp: batch_norm_train_fwd_jvp", _LATE),
    (r"cross_entropy 4096x50257 bfloat16 backward", _LATE),
    (r"log_softmax 4096x50257 bfloat16 hvp", _LATE),
    (r"layer_norm 8192x8192 bfloat16 (all_results|backward_of_jvp)", "partial rows, added in 7 of the call's 232 us"),
)


class Launched(NamedTuple):
    """A launch: the key of its row, its grid, and its integers by name."""

    key: str
    grid: tuple[int, ...]
    values: dict[str, int]


class Called(NamedTuple):
    """A call of a case, named by both.

    Attributes:
        name: Names of the case and of the launcher.
        bytes_moved: Bytes that it moves.
        launches: Its launches.
        part_bytes: Of its partial rows.
        swept_bytes: That a program reads a second time, of rows that it sweeps twice.
    """

    name: str
    bytes_moved: int
    launches: tuple[Launched, ...]
    part_bytes: int = 0
    swept_bytes: int = 0


class Share(NamedTuple):
    """Issue time, waits and processors that a launch takes of an H100.

    Attributes:
        kernel: Its name.
        issue_us: Time in which all processors do nothing but issue its instructions.
        chain_us: Time that the longest program takes alone, and those that follow it in its place; None if not known.
        programs: Programs on each processor, of which `resident` fit at once.
        warps: Of those that a processor holds at once.
        steps: Steps of its longest loop.
        is_persistent: Whether rows go by turns to `num_splits` programs, each of which keeps sums over its own.
        loaded: Bytes that it loads from global memory in the loop that loads most, or outside of loops.
        under_way: Bytes that are being loaded on each processor while a step waits.
        sweeps: Loops that load.
    """

    kernel: str
    issue_us: float
    chain_us: float | None
    programs: float
    resident: int
    warps: float
    steps: int
    is_persistent: bool
    loaded: float
    under_way: float
    sweeps: int


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
        None if work.cycles is None else work.latency_cycles(chip.num_processors) / CYCLES_PER_US,
        programs,
        work.resident,
        min(programs, work.resident) * row.num_warps,
        max(trips[1:], default=1),
        any(region.trips.endswith(":num_splits") and numbers["num_splits"] > 1 for region in regions),
        work.programs * loaded,
        min(programs, work.resident) * step * _share_under_way(longest),
        sum(bool(region.loaded) for region in regions[1:]),
    )


def _share_under_way(region: Region) -> float:
    """Of what a step loads, the share that is under way while it waits."""
    if region.ahead is not None:
        # A loop that waits for what it has just asked for has it under way half of the time.
        return 1.0 if region.ahead else 0.5
    # Beyond its instructions a step takes a latency for each load behind which the next one goes.
    return min(1.0, LATENCIES["LDG"] / max((region.cycles or 0) - (region.instructions or 0), 1))


def _shares(called: Called, rows: Mapping[str, Row]) -> tuple[list[Share], float]:
    """Those of its launches, and the issue slots that they take, as a share of those in the time of its bytes."""
    shares = [share_of(launched, rows[launched.key]) for launched in called.launches if launched.key in rows]
    return shares, sum(share.issue_us for share in shares) * BYTES_PER_US / called.bytes_moved


def _broken(called: Called, shares: Sequence[Share], issue: float) -> list[str]:
    memory_us = called.bytes_moved / BYTES_PER_US
    # The time of attention is that of its products.
    is_free = called.name.startswith("attention ")
    most_issue = math.inf if is_free else next(_known(KNOWN_SHARES, called), MAX_ISSUE_SHARE)
    problems = [f"issues for {issue:.2f} of the time of its bytes"] if issue > most_issue else []
    problems += [f"of {share.kernel} the table has no cycles" for share in shares if share.chain_us is None]
    for share in shares if most_issue < math.inf else []:
        is_small = share.programs < 1
        # A call that is allowed to issue for longer than its bytes take waits as long.
        busy_us = memory_us * max(most_issue, 1.0)
        most = max(MAX_SMALL_CHAIN_US, busy_us / 10) if is_small else max(MAX_CHAIN_US, busy_us)
        used = min(share.programs / share.resident, 1)
        chain_us = share.chain_us or 0.0
        waits = f"{share.kernel} waits {chain_us:.1f} us in {share.steps} steps of "
        waits += f"{share.programs:.2f} programs per processor, {most:.1f} allowed"
        under_way = f"{share.kernel} has {share.under_way / 1024:.0f} KiB under way on a processor"
        by_turns = f"{share.kernel} has {share.programs:.2f} programs per processor, of which {share.resident} fit"
        together, row_bytes = min(share.programs, share.resident), CHIPS[CHIP].num_processors * called.swept_bytes
        swept = f"{share.kernel} has {together * row_bytes / (1 << 20):.0f} MiB of rows under way, more than the cache"
        is_large = share.loaded > LARGE_BYTES and not any(re.match(pattern, called.name) for pattern, _ in KNOWN_FEW)
        fills = (used >= FILLING_SHARE and share.warps >= FILLING_WARPS) or share.under_way >= FILLING_BYTES
        broken = {
            waits: chain_us > most,
            under_way: is_large and share.under_way < LEAST_BYTES,
            f"{under_way}, {share.warps:.0f} warps and {used:.2f} of the programs that fit": is_large
            and share.steps > 1
            and not fills,
            by_turns: share.is_persistent and share.steps > 1 and share.programs > share.resident,
            swept: share.sweeps > 1 and together > 1 and together * row_bytes > CHIPS[CHIP].l2_bytes,
        }
        problems += [text for text, is_broken in broken.items() if is_broken]
    parts, part_share = _parts(called), 2 * called.part_bytes / called.bytes_moved
    if parts > MAX_PARTS and part_share > next(_known(KNOWN_PARTS, called), MAX_PART_SHARE):
        problems.append(f"writes {parts:.1f} partial rows per processor, {part_share:.2f} of its bytes")
    return [f"{CHIP} {called.name}: {problem}" for problem in problems]


def _known(entries: Sequence[tuple[str, float, str]], called: Called) -> Iterator[float]:
    return (share for pattern, share, _ in entries if re.match(pattern, called.name))


def _parts(called: Called) -> float:
    """Partial rows for each processor: of what a launch adds up."""
    found = [0.0]
    for _, grid, values in called.launches:
        if "BLOCK_PARTS" in values:
            num_groups = grid[0] // math.ceil(values["num_cols"] / values["BLOCK_COLS"])
            found.append(values["num_parts"] * num_groups / CHIPS[CHIP].num_processors)
    return max(found)


def checks(calls: Sequence[Called], rows: Sequence[Row]) -> Iterator[Check]:
    """The calls, one by one. Launches without a row are left out."""
    by_key = {row.key: row for row in rows}
    for called in calls:
        shape = called.name.partition(":")[0].rpartition(" ")[0]
        yield Check(called.name, shape, functools.partial(_broken, called, *_shares(called, by_key)))


def broken_shares(calls: Sequence[Called], rows: Sequence[Row]) -> list[str]:
    """Problems of calls, in words; empty if there is none."""
    return sorted({problem for check in checks(calls, rows) for problem in check.problems()})
