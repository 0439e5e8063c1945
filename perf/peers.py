"""Kernels of peers beside ours under one probe, the time model beside published times, and cycles of our steps.

`python -m perf peers`, in a process of its own (see `perf.peer_launches`). Nothing runs; everything is compiled for
sm_90, and read by what reads the table of machine code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import math
import re
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from perf import model, peer_launches
from perf.machine_code.assembly import Usage, accesses, usage
from perf.machine_code.listing import Region, listings, loop_trips, regions
from perf.machine_code.shares import BYTES_PER_US, CYCLES_PER_US, Launched, Share, share_of
from perf.machine_code.table import Row
from perf.machine_code.work import SCHEDULERS, Work, numbers_of, work_of
from perf.ops.workload import FIRST_ORDER, Workload
from perf.suite.modes import minimum_bytes
from perf.workloads import GPU_WORKLOADS
from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from perf.peer_launches import Launch, Launches

MODES = {"layer_norm": (*FIRST_ORDER, "double_backward"), "batch_norm": FIRST_ORDER[:2], "log_softmax": FIRST_ORDER}
SIDES = ("ours", "Inductor", "Liger")
CHIP = CHIPS["sm_90"]

# Figures of a row in their order on the page, and by how much each must be above a peer's to be worse; None for those
# that are evidence. Of `access`, less is worse.
FIGURES = {
    **{"launches": 1.0, "passes": 1.02, "registers": 1.1, "spills": 1.0, "access": 1.0, "instructions": 1.1},
    **{"barriers": 1.1, "under way": None, "bytes us": None, "issue us": None, "waits us": None},
}
Figures = dict[str, float]

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
        work: Its issues and waits.
        share: The same in microseconds, and what it has under way.
        step: Its last loop, or all of it if it has none.
        uses: Registers and spills.
        moved: Bytes of its loads and stores, as if no cache held anything; at most the tensor's for each.
        cached: As if what it reads again came from a cache: at most the tensor's for all loads together.
        widths: Bytes of each access to a large tensor.
    """

    work: Work
    share: Share
    step: Region
    uses: Usage
    moved: float
    cached: float
    widths: list[int]


def probes(workload: Workload, launches: Launches) -> list[Probe]:
    """The probes of what Triton compiles of launches."""
    found = [_probe(configured, workload.pass_bytes / 8) for configured in launches if configured[0].function]
    return [min(each, key=lambda one: max(one.share.issue_us, one.share.chain_us or 0.0)) for each in found]


def _probe(configured: list[Launch], large_bytes: float) -> list[Probe]:
    args = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in configured[0].args]
    compiled = [one.function.warmup(*args, grid=one.grid, **one.options) for one in configured]
    codes, found = listings(CHIP.name, [each.asm["cubin"] for each in compiled]), []
    for one, each, code in zip(configured, compiled, codes, strict=True):
        named = dict(zip(one.function.arg_names, one.args, strict=False))
        numbers = numbers_of(named, one.grid)
        uses, parts = usage(CHIP.name, each), regions(each, code, has_cycles=True)
        used = (each.metadata.num_warps, uses.registers, each.metadata.shared)
        work = work_of(parts, named, one.grid, used, CHIP)
        text = "; ".join(map(str, parts))
        row = Row(one.function.__name__, "", *used[:2], 0, uses.spills, uses.local_bytes, used[2], "", "", 0, text, "")
        moved, total = 0.0, defaultdict[tuple[str, str], float](float)
        for kind, argument, size in _accessed(each.asm["ttir"], numbers, work.programs):
            moved += min(size, named[argument].nbytes)
            total[kind, argument] += size
        cached = sum(min(size, named[argument].nbytes) for (_, argument), size in total.items())
        tensors = [arg for arg in one.args if isinstance(arg, torch.Tensor)]
        large = {n for n, tensor in enumerate(tensors) if tensor.nbytes >= large_bytes}
        widths = [access.num_bytes for access in accesses(each.asm["llir"]) if access.pointer in large]
        share = share_of(Launched("", one.grid, {"num_splits": 1, **numbers}), row)
        found.append(Probe(work, share, parts[-1], uses, moved, cached, widths))
    return found


_ACCESS = re.compile(r"tt\.(load|store) (%[\w.]+).* : (?:tensor<([\dx]+)x)?!tt\.ptr<[a-z]*?(\d+)>")
_DERIVE = re.compile(r"^(%[\w.]+) = tt\.(?:addptr|splat|broadcast|expand_dims|reshape|bitcast|trans) (%[\w.]+)")


def _accessed(ttir: str, numbers: Mapping[str, int], programs: int) -> Iterator[tuple[str, str, float]]:
    """Loads and stores of Triton's text: kind, argument, and bytes of all lanes in all programs."""
    trips, origins, weights = iter(loop_trips(ttir)), dict[str, str](), [float(programs)]
    for line in (re.sub(r" loc\([^{}]*\)$", "", line.strip()) for line in ttir.splitlines()):
        if line.startswith("}"):
            weights.pop()
        weight = weights[-1]
        if "scf.for " in line:
            weight *= Region(next(trips)).num_trips(numbers)
            origins |= {new: origins.get(old, old) for new, old in re.findall(r"(%[\w.]+) = (%[\w.]+)", line)}
        elif access := _ACCESS.search(line):
            kind, pointer, sizes, bits = access.groups()
            elements = math.prod(map(int, sizes.split("x"))) if sizes else 1
            yield kind, origins.get(pointer, pointer)[1:], weight * elements * int(bits) / 8
        elif derived := _DERIVE.match(line):
            origins[derived.group(1)] = origins.get(derived.group(2), derived.group(2))
        if line.endswith("{"):
            weights.append(weight)


@functools.cache
def _probed(side: str, workload: Workload, mode: str) -> tuple[Launches, list[Probe]]:
    """Launches of a step by a side, and their probes; none of what it does not have."""
    launches = getattr(peer_launches, f"of_{side.lower()}")(workload, mode)
    return launches, probes(workload, launches)


def _figures(workload: Workload, mode: str, launches: Launches, found: list[Probe]) -> Figures:
    """The row of a side, by the names of `FIGURES`."""
    elements = math.prod(workload.shape)
    of_torch = sum(arg.nbytes for configured in launches if not configured[0].function for arg in configured[0].args)
    widths = sorted(width for each in found for width in each.widths)
    warps = sum(each.work.programs * each.work.num_warps * each.work.instructions for each in found)
    # Registers, and what they leave room for, are those of the kernel that moves most.
    main = max(found, key=lambda each: each.moved)
    row = {
        "launches": len(launches),
        "passes": (sum(each.moved for each in found) + of_torch) / (minimum_bytes(workload, mode) or math.nan),
        "registers": main.uses.registers,
        "spills": max(each.uses.spills for each in found),
        "access": widths[len(widths) // 2],
        "instructions": warps * CHIP.warp_size / elements,
        "barriers": 1e3 * sum(each.work.programs * each.work.barriers for each in found) / elements,
        "under way": main.share.under_way / 1024,
        "bytes us": (sum(each.cached for each in found) + of_torch) / BYTES_PER_US,
        "issue us": sum(each.share.issue_us for each in found) / _device().sustained_share.value,
        "waits us": sum(each.share.chain_us or 0.0 for each in found),
    }
    return {name: round(value, 2) for name, value in row.items()}


def _device() -> model.Device:
    return model.read_device("h100")


def microseconds(row: Figures) -> float:
    """Time that the model expects of a row."""
    gaps = 1e6 * _device().launch_seconds.value * row["launches"]
    return max(row["bytes us"], row["issue us"], row["waits us"]) + gaps


# The figures that may make up for a worse one, tried in this order: words, and whether it is true of our row and of the
# peer's. All of it can be read off the page.
REASONS: dict[str, tuple[str, Callable[[str, Figures, Figures], bool]]] = {
    "loads": (
        "the registers hold what is loaded: ours has at least as many bytes under way",
        lambda figure, ours, peer: figure == "registers" and ours["under way"] >= peer["under way"],
    ),
    "hidden": (
        "to move the bytes of ours takes longer than to issue its instructions, and than its waits",
        lambda figure, ours, peer: (
            figure in {"registers", "instructions", "barriers"}
            and ours["bytes us"] >= max(ours["issue us"], ours["waits us"])
        ),
    ),
    "time": (
        "all told, ours takes no longer (within 2 %)",
        lambda figure, ours, peer: microseconds(ours) <= 1.02 * microseconds(peer),
    ),
}
LOSS = "LOSS"
# Why steps lose, by the beginnings of their names.
KNOWN_LOSSES = {
    "batch_norm BatchNorm1d 8192x1024 bf16 forward": (
        "issue binds: sums across threads take as much as six tiles, of which a program has as many"
    ),
}


def judge(ours: Figures, **others: Figures) -> list[str]:
    """Figures in which a peer is better, and the time, each with the reasons why it may be, or `LOSS`."""
    found = list[str]()
    for figure, share in FIGURES.items():
        sign = -1 if figure == "access" else 1
        better = [row for row in others.values() if share and sign * (ours[figure] - share * row[figure]) > 0.01]
        reasons = {
            next((key for key, (_, holds) in REASONS.items() if holds(figure, ours, row)), LOSS) for row in better
        }
        found += [f"{figure} ({', '.join(sorted(reasons))})"] if better else []
    is_slower = not all(REASONS["time"][1]("", ours, row) for row in others.values())
    return [*found, *[f"time ({LOSS})"] * is_slower]


def page() -> str:
    """The page of the docs, in Markdown."""
    peer_launches.pretend_cuda()
    return "\n".join(["# Peers under the same probe, sm_90\n", *_comparison(), *_fit(), *_steps(), ""])


def _table(*heads: str) -> str:
    return f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}"


def _compared() -> list[Workload]:
    chosen = [w for w in GPU_WORKLOADS if (w.quick or w.whole) and w.op in MODES]
    return sorted(chosen, key=lambda workload: list(MODES).index(workload.op))


def key_of_ours() -> str:
    """Hash of all that the machine code of our kernels depends on, as in its tables, and of grids; the page has it."""
    steps = (step for w in _compared() for mode in MODES[w.op] for step in model.steps_of(w, mode, CHIP))
    keys = sorted({f"{launch.key} {launch.grid}" for _, launches in steps for launch in launches})
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:12]


def _comparison() -> Iterator[str]:
    versions = f"torch {torch.__version__.split('+')[0]}, Triton {triton.__version__}"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions += f", Liger {importlib.metadata.version('liger-kernel')}"
    yield f"Written by `python -m perf peers --write` ({versions}); compiled for sm_90, nothing ran."
    yield f"Key of our kernels: {key_of_ours()}."
    yield "[measuring.md](../developers/measuring.md#peers-under-the-same-probe) says what the columns mean. Where a"
    yield "figure of ours is worse, a word says what makes up for that in the same lines:\n"
    yield from (f"- *{key}*: {text};" for key, (text, _) in REASONS.items())
    yield f"- *{LOSS}*: none of these.\n"
    left_out, lost = dict[str, None](), list[str]()
    for workload in _compared():
        yield f"## {workload.key}"
        yield _table("mode", "by", *FIGURES, "where ours is worse")
        for mode in MODES[workload.op]:
            rows: dict[str, Figures] = {}
            for name in SIDES:
                try:
                    launches, found = _probed(name, workload, mode)
                # A peer may be absent, or unable to do a step.
                except (ImportError, RuntimeError) as error:
                    left_out[f"{name}: {error}".splitlines()[0]] = None
                else:
                    rows |= {name: _figures(workload, mode, launches, found)} if launches else {}
            worse = ", ".join(judge(**rows))
            lost += [f"{workload.key} {mode}"] * (LOSS in worse)
            for name, row in rows.items():
                cells = (mode, name, *(f"{value:g}" for value in row.values()), worse * (name == "ours"))
                yield f"| {' | '.join(cells)} |"
        yield ""
    if lost:
        yield "## Where nothing makes up for it\n"
        yield from (f"- {name}: {why}." for name, why in KNOWN_LOSSES.items())
        yield from (f"- {name}: not known." for name in lost if not any(map(name.startswith, KNOWN_LOSSES)))
        yield ""
    yield "Left out: attention, which Inductor leaves to ATen; attorch, which is not in the package index."
    yield from (f"{line.rstrip('.')}." for line in left_out)


def read_rows(text: str) -> Iterator[tuple[str, dict[str, Figures], str]]:
    """Steps of a page by their names, each with its rows by side and with what it says of ours."""
    heading, found = "", dict[str, tuple[dict[str, Figures], list[str]]]()
    for line in text.splitlines():
        heading = line[3:] if line.startswith("## ") else heading
        mode, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if len(cells) == len(FIGURES) + 2 and cells[0] in SIDES:
            side, *numbers, said = cells
            rows, words = found.setdefault(f"{heading} {mode}", ({}, []))
            rows[side] = dict(zip(FIGURES, map(float, numbers), strict=True))
            words += [said] if side == "ours" else []
    return ((name, rows, said) for name, (rows, (said,)) in found.items())


def _fit() -> Iterator[str]:
    """The model with its one free number beside published times."""
    rows, gap = [], 1e6 * _device().launch_seconds.value
    yield "\n## Published times\n"
    for (op, dtype, source), times in PUBLISHED.items():
        for shape, published in times.items():
            workload = Workload(source, "layer_norm", shape, dtype)
            try:
                found = probes(workload, peer_launches.of_liger(workload, "forward", op))
            except ImportError:
                yield "Left out: Liger is not installed."
                return
            name = f"{op} {'x'.join(map(str, shape))} {dtype} ({source})"
            moving = sum(each.moved for each in found) / BYTES_PER_US
            issue, waits = (sum(getattr(each.share, term) for each in found) for term in ("issue_us", "chain_us"))
            rows.append((name, published, moving, issue, waits))

    def ratios(share: float) -> list[float]:
        return [(max(moving, issue / share, waits) + gap) / published for _, published, moving, issue, waits in rows]

    share = min((n / 100 for n in range(20, 101)), key=lambda share: sum(math.log(r) ** 2 for r in ratios(share)))
    off = ratios(share)
    yield "Microseconds, of Liger's forwards on an H100 ([where from](../developers/measuring.md#how-far-off))."
    yield f"Of its issue slots a processor sustains the share {share:.2f}, the one fitted number. The model says"
    yield f"{min(off):.2f} to {max(off):.2f} of the published times, {statistics.median(off):.2f} in the median."
    yield _table("kernel", "published", "bytes", "issue", "waits", "model", "model / published")
    for (name, published, moving, issue, waits), ratio in zip(rows, off, strict=True):
        cells = (published, moving, issue / share, waits, ratio * published)
        yield f"| {name} | {' | '.join(f'{cell:.1f}' for cell in cells)} | {ratio:.2f} |"


def _steps() -> Iterator[str]:
    """Cycles of a step of our main kernels."""
    yield "\n## Cycles of a step\n"
    yield "[measuring.md](../developers/measuring.md#how-far-off) says what the columns mean."
    yield _table("kernel", "of", "warps held", "steps", "instructions", "barriers", "alone", "issue", "bytes")
    seen = set[tuple[str, bool]]()
    for workload, mode in ((w, mode) for w in _compared() for mode in MODES[w.op]):
        for each in _probed("ours", workload, mode)[1]:
            work, share, step = each.work, each.share, each.step
            kind = (share.kernel, share.steps > 1)
            if kind in seen or each.moved < 0.9 * workload.pass_bytes:
                continue
            seen.add(kind)
            held = min(work.resident, math.ceil(share.programs))
            issue = held * work.num_warps * (step.instructions or 0) / SCHEDULERS
            moving = each.moved / work.programs / share.steps * held * CHIP.num_processors / BYTES_PER_US
            cells = (held * work.num_warps, share.steps, step.instructions, step.barriers, step.cycles, issue)
            numbers = " | ".join(f"{cell:.0f}" for cell in (*cells, moving * CYCLES_PER_US))
            yield f"| {share.kernel.removesuffix('_kernel')} | {workload.key} {mode} | {numbers} |"
