"""Kernels of peers beside ours under one probe, the time model beside published times, and cycles of our steps.

`python -m perf peers`, in a process of its own (see `perf.peer_launches`). Nothing runs; everything is compiled for
sm_90, and read by what reads the table of machine code.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import re
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from perf import model
from perf.machine_code.assembly import Usage, accesses, usage
from perf.machine_code.listing import Region, listings, loop_trips, regions
from perf.machine_code.work import SCHEDULERS, Work, numbers_of, work_of
from perf.peer_launches import CHIP, of_inductor, of_liger, of_ours, pretend_cuda
from perf.suite.modes import minimum_bytes
from perf.workloads import FIRST_ORDER, GPU_WORKLOADS, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from perf.peer_launches import Launch, Launches

MODES = {"layer_norm": (*FIRST_ORDER, "double_backward"), "batch_norm": FIRST_ORDER[:2], "log_softmax": FIRST_ORDER}
SIDES = {"ours": of_ours, "Inductor": of_inductor, "Liger": of_liger}
# By how much a figure must be larger than a peer's to be worse.
WORSE = {"launches": 1.0, "passes": 1.02, "spills": 1.0, "instructions": 1.1, "barriers": 1.1}
# Why ours is worse, by op and figure.
_PARTS = "partial sums of all programs that run at once, and a small kernel that adds them: they stay in the L2 cache"
_AHEAD = (
    "copies ahead through shared memory take addresses, waits and loads from there; peers wait for each load itself"
)
_LAYOUTS = "one kernel serves all strides and layouts, where Inductor writes sizes and strides into each as constants"
REASONS = {
    ("layer_norm", "launches"): f"long rows have {_PARTS}",
    ("layer_norm", "passes"): f"{_PARTS}; of swept rows the first tile is read once more, from a cache",
    ("layer_norm", "instructions"): _AHEAD,
    ("layer_norm", "barriers"): "squares are summed about the mean, a second reduction; buffers of copies are guarded",
    ("batch_norm", "instructions"): _LAYOUTS,
    ("batch_norm", "barriers"): "buffers of copies ahead are guarded; peers copy nothing ahead",
    (
        "log_softmax",
        "instructions",
    ): "a tile of a row of odd length is masked, and as wide as registers allow; peers take smaller ones",
    ("log_softmax", "barriers"): "maximum and sum of a tile are merged with those before in every step of a sweep",
}

# Published times of Liger's kernels on an H100 of 3.35 TB/s in microseconds, by op, dtype and rows x columns: csv from
# its benchmark/data/all_benchmark_data.csv, QuACK read off the plot of QuACK's benchmarks (bytes over GB/s).
PUBLISHED = {
    ("layer_norm", "float32", "csv"): {(4096, 4096): 51.0, (4096, 16384): 185.0},
    ("rms_norm", "bfloat16", "csv"): {(4096, 1024): 12.2, (4096, 4096): 29.2, (4096, 16384): 95.0},
    ("rms_norm", "bfloat16", "QuACK"): {
        **{(32768, 512): 31.5, (32768, 1024): 51.9, (32768, 2048): 95.4, (32768, 4096): 184.9},
        **{(32768, 8192): 378.6, (32768, 16384): 811.9, (32768, 32768): 1501.7},
    },
    ("softmax", "bfloat16", "QuACK"): {
        **{(32768, 256): 27.3, (32768, 512): 32.5, (32768, 1024): 50.5, (32768, 2048): 96.6, (32768, 4096): 187.1},
        **{(32768, 8192): 366.7, (32768, 16384): 718.7, (32768, 32768): 1521.4},
    },
}


class Probe(NamedTuple):
    """A launch as the compiler makes it, in that configuration which issues and waits least.

    Attributes:
        name: Of the kernel.
        work: What it issues and waits for.
        step: Its last loop, or all of it if it has none.
        trips: How often a program runs that.
        uses: Registers and spills.
        moved: Bytes of its loads and stores, as if no cache held anything; at most the tensor's for each.
        widths: Bytes of each access to a large tensor.
    """

    name: str
    work: Work
    step: Region
    trips: int
    uses: Usage
    moved: float
    widths: list[int]

    @property
    def cycles(self) -> float:
        """That a processor is busy or waits, whichever is more."""
        return max(self.work.issue_cycles(CHIP.num_processors), self.work.latency_cycles(CHIP.num_processors))


def probes(workload: Workload, launches: Launches) -> list[Probe]:
    """The probes of what Triton compiles of launches."""
    found = [_probe(configured, workload.pass_bytes / 8) for configured in launches if configured[0].function]
    return [min(candidates, key=lambda one: one.cycles) for candidates in found]


def _probe(configured: list[Launch], large_bytes: float) -> list[Probe]:
    args = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in configured[0].args]
    compiled = [one.function.warmup(*args, grid=one.grid, **one.options) for one in configured]
    codes, found = listings(CHIP.name, [each.asm["cubin"] for each in compiled]), []
    for one, each, code in zip(configured, compiled, codes, strict=True):
        named = dict(zip(one.function.arg_names, one.args, strict=False))
        uses, parts = usage(CHIP.name, each), regions(each, code, has_cycles=True)
        work = work_of(parts, named, one.grid, (each.metadata.num_warps, uses.registers, each.metadata.shared), CHIP)
        numbers = numbers_of(named, one.grid)
        moved = sum(min(size, named[name].nbytes) for name, size in _accessed(each.asm["ttir"], numbers, work.programs))
        tensors = [arg for arg in one.args if isinstance(arg, torch.Tensor)]
        large = {n for n, tensor in enumerate(tensors) if tensor.nbytes >= large_bytes}
        widths = [access.num_bytes for access in accesses(each.asm["llir"]) if access.pointer in large]
        found.append(Probe(one.function.__name__, work, parts[-1], parts[-1].num_trips(numbers), uses, moved, widths))
    return found


_ACCESS = re.compile(r"tt\.(?:load|store) (%[\w.]+).* : (?:tensor<([\dx]+)x)?!tt\.ptr<[a-z]*?(\d+)>")
_DERIVE = re.compile(r"^(%[\w.]+) = tt\.(?:addptr|splat|broadcast|expand_dims|reshape|bitcast|trans) (%[\w.]+)")


def _accessed(ttir: str, numbers: Mapping[str, int], programs: int) -> Iterator[tuple[str, float]]:
    """Loads and stores of Triton's text: the argument of each, and bytes of all lanes in all programs."""
    trips, origins, weights = iter(loop_trips(ttir)), dict[str, str](), [float(programs)]
    for line in (re.sub(r" loc\([^{}]*\)$", "", line.strip()) for line in ttir.splitlines()):
        if line.startswith("}"):
            weights.pop()
        weight = weights[-1]
        if "scf.for " in line:
            weight *= Region(next(trips)).num_trips(numbers)
            origins |= {new: origins.get(old, old) for new, old in re.findall(r"(%[\w.]+) = (%[\w.]+)", line)}
        elif access := _ACCESS.search(line):
            pointer, sizes, bits = access.groups()
            elements = math.prod(map(int, sizes.split("x"))) if sizes else 1
            yield origins.get(pointer, pointer)[1:], weight * elements * int(bits) / 8
        elif derived := _DERIVE.match(line):
            origins[derived.group(1)] = origins.get(derived.group(2), derived.group(2))
        if line.endswith("{"):
            weights.append(weight)


def page() -> str:
    """The page of the docs, in Markdown."""
    pretend_cuda()
    return "\n".join(["# Peers under the same probe, sm_90\n", *_comparison(), *_fit(), *_steps(), ""])


def _table(*heads: str) -> str:
    return f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}"


def _compared() -> list[Workload]:
    chosen = [w for w in GPU_WORKLOADS if (w.quick or w.whole) and w.op in MODES]
    return sorted(chosen, key=lambda workload: list(MODES).index(workload.op))


def _comparison() -> Iterator[str]:
    versions = f"torch {torch.__version__.split('+')[0]}, Triton {triton.__version__}"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions += f", Liger {importlib.metadata.version('liger-kernel')}"
    yield f"Written by `python -m perf peers --write` ({versions}); compiled for sm_90, nothing ran."
    yield "[performance.md](../performance.md#peers-under-the-same-probe) says what the columns mean."
    figures = ("launches", "passes", "registers", "spills", "access", "instructions", "barriers")
    yield _table("workload", "mode", "of", *figures, "where ours is worse")
    left_out, needed = dict[str, None](), dict[tuple[str, str], None]()
    for workload, mode in ((w, mode) for w in _compared() for mode in MODES[w.op]):
        rows: dict[str, dict[str, float]] = {}
        for name, launches_of in SIDES.items():
            try:
                launches = launches_of(workload, mode)
            # A peer may be absent, or unable to do a step.
            except (ImportError, RuntimeError) as error:
                left_out[f"{name}: {error}".splitlines()[0]] = None
            else:
                rows |= {name: _figures(workload, mode, launches)} if launches else {}
        worse = _worse(**rows)
        needed |= dict.fromkeys((workload.op, figure) for figure in worse)
        for name, row in rows.items():
            cells = [f"{value:.2f}".rstrip("0").rstrip(".") for value in row.values()]
            yield f"| {' | '.join([workload.key, mode, name, *cells, ', '.join(worse) * (name == 'ours')])} |"
    yield "\nReasons:\n"
    yield from (f"- {' '.join(key)}: {REASONS.get(key, 'not known')}." for key in needed)
    yield "\nLeft out: attention, which Inductor leaves to ATen; attorch, which is not in the package index."
    yield from (f"{line.rstrip('.')}." for line in left_out)


def _figures(workload: Workload, mode: str, launches: Launches) -> dict[str, float]:
    found, elements = probes(workload, launches), math.prod(workload.shape)
    of_torch = sum(arg.nbytes for configured in launches if not configured[0].function for arg in configured[0].args)
    widths = sorted(width for each in found for width in each.widths)
    warps = sum(each.work.programs * each.work.num_warps * each.work.instructions for each in found)
    return {
        "launches": len(launches),
        "passes": (sum(each.moved for each in found) + of_torch) / minimum_bytes(workload, mode),
        "registers": max(each.uses.registers for each in found),
        "spills": max(each.uses.spills for each in found),
        "access": widths[len(widths) // 2],
        "instructions": warps * CHIP.warp_size / elements,
        "barriers": 1e3 * sum(each.work.programs * each.work.barriers for each in found) / elements,
    }


def _worse(ours: dict[str, float], **others: dict[str, float]) -> list[str]:
    """Figures in which a peer is better."""
    found = [f for f, share in WORSE.items() if ours[f] > share * min(other[f] for other in others.values()) + 0.01]
    return [*found, *["access"] * (ours["access"] < max(other["access"] for other in others.values()))]


def _fit() -> Iterator[str]:
    """The model with its one free number beside published times."""
    device, rows = model.read_device("h100"), []
    speed, clock = device.copy_bytes_per_second.value, device.clock_hertz.value
    yield "\n## Published times\n"
    for (op, dtype, source), times in PUBLISHED.items():
        for shape, published in times.items():
            workload = Workload(source, "layer_norm", shape, dtype)
            try:
                found = probes(workload, of_liger(workload, "forward", op))
            except ImportError:
                yield "Left out: Liger is not installed."
                return
            name = f"{op} {'x'.join(map(str, shape))} {dtype} ({source})"
            moving = sum(each.moved for each in found) / speed
            issue = sum(each.work.issue_cycles(CHIP.num_processors) for each in found) / clock
            waits = sum(each.work.latency_cycles(CHIP.num_processors) for each in found) / clock
            rows.append((name, published, 1e6 * moving, 1e6 * issue, 1e6 * waits))

    def ratios(share: float) -> list[float]:
        gap = 1e6 * device.launch_seconds.value
        return [(max(moving, issue / share, waits) + gap) / published for _, published, moving, issue, waits in rows]

    share = min((n / 100 for n in range(20, 101)), key=lambda share: sum(math.log(r) ** 2 for r in ratios(share)))
    off = ratios(share)
    yield f"Of its issue slots a processor sustains the share {share:.2f}, the one fitted number. The model says"
    yield f"{min(off):.2f} to {max(off):.2f} of the published times, {statistics.median(off):.2f} in the median."
    yield _table("kernel", "published us", "bytes us", "issue us", "latency us", "model us", "model / published")
    for (name, published, moving, issue, waits), ratio in zip(rows, off, strict=True):
        cells = (published, moving, issue / share, waits, ratio * published)
        yield f"| {name} | {' | '.join(f'{cell:.1f}' for cell in cells)} | {ratio:.2f} |"


def _steps() -> Iterator[str]:
    """Cycles of a step of our main kernels at the quick workloads."""
    yield "\n## Cycles of a step"
    yield _table("kernel", "warps held", "steps", "instructions", "barriers", "alone", "issue", "bytes")
    device, seen = model.read_device("h100"), set()
    for workload, mode in ((w, mode) for w in _compared() if w.quick for mode in MODES[w.op]):
        for each in probes(workload, of_ours(workload, mode)):
            if each.name in seen or each.moved < 0.9 * workload.pass_bytes:
                continue
            seen.add(each.name)
            work, step = each.work, each.step
            held = min(work.resident, math.ceil(work.programs / CHIP.num_processors))
            issue = held * work.num_warps * (step.instructions or 0) / SCHEDULERS
            seconds = (
                each.moved
                / work.programs
                / each.trips
                * held
                * CHIP.num_processors
                / device.copy_bytes_per_second.value
            )
            counts: Sequence[Any] = (held * work.num_warps, each.trips, step.instructions, step.barriers, step.cycles)
            cells = (*counts, issue, seconds * device.clock_hertz.value)
            yield f"| {each.name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |"
