"""The time model: what a call of the kernels should take on a device, from bytes, instructions, waits and launches.

    time = max(bytes, issue, latency) + launches * time of a launch

    bytes     bytes moved / copy bandwidth; of attention operations / peak of tensor cores, where that is longer
    issue     instructions of all warps of a processor / what its four schedulers issue, of which they sustain a share
    latency   cycles that a program takes alone, waiting for memory included, times the programs that follow one
              another in one place of a processor

The longest is what binds. Bytes, and operations of products of matrices, are those of `triton_kernels.costs` under the
plan that the device's chip gets. Instructions and cycles are those of the committed tables of machine code, in which
each launch finds its kernel; one that is not there leaves the step to its bytes. Attention, whose products bind, has
neither. Three times bracket the bytes of a call:

    floor     every operand read once, every result written once, by one launch: no implementation can be faster, but
              for one of attention with fewer products; these of pairs of tokens that see each other alone
    cached    what the plan reads again comes from the L2 cache as far as that can hold it, and costs nothing; this
              enters the maximum
    memory    what the plan reads again comes from memory

The last two multiply whole tiles, whose widths are powers of 2. No kernel reaches the peak of tensor cores.
`docs/developers/gates.md` says what is assumed of the cache.

A device is described by a JSON file in which each value has its source and says whether it was measured.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import defaultdict
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from perf.machine_code import cases
from perf.machine_code.compiling import watch_launches
from perf.machine_code.table import read_table
from perf.machine_code.work import work_of
from perf.ops.record import STEPS
from perf.workloads import GPU_WORKLOADS
from triton_kernels import launch

if TYPE_CHECKING:
    from perf.calls import Call
    from perf.machine_code.compiling import Launch
    from perf.machine_code.work import Work
    from perf.ops.workload import Workload
    from triton_kernels.costs import Cost

DEVICES = Path(__file__).parent / "devices"

MODES = tuple(STEPS)


class Value(NamedTuple):
    """A property of a device, whether it was measured on one, and where it comes from."""

    value: float
    measured: bool
    source: str


@dataclass(frozen=True)
class Device:
    """The model's view of a device: its name, a key of `launch.CHIPS` whose plans it gets, and values.

    Attributes:
        copy_bytes_per_second: Bytes read plus bytes written per second by a large copy.
        matmul_flops_per_second: Peak of tensor cores for products of bfloat16 and float16.
        launch_seconds: Time between the ends of two kernels beyond what their bytes take.
        l2_bytes: Size of the last cache before memory.
        clock_hertz: Cycles of a processor per second under load.
        sustained_share: Of the cycles in which a scheduler issues an instruction; fitted to published times.
    """

    name: str
    chip: str
    copy_bytes_per_second: Value
    matmul_flops_per_second: Value
    launch_seconds: Value
    l2_bytes: Value
    num_processors: Value
    clock_hertz: Value
    sustained_share: Value


def read_device(name: str) -> Device:
    """The device of a JSON file: name of one of `perf/devices` (`"h200"`), or a path."""
    path = Path(name) if name.endswith(".json") else DEVICES / f"{name}.json"
    description = json.loads(path.read_text())
    values = {name: Value(**value) for name, value in description["values"].items()}
    return Device(description["name"], description["chip"], **values)


def read_devices() -> list[Device]:
    """All devices that are described."""
    return [read_device(str(path)) for path in sorted(DEVICES.glob("*.json"))]


class Prediction(NamedTuple):
    """Times in microseconds that a call should take on a device, and what they follow from.

    The first three are of bytes and products, `issue_us` and `latency_us` of machine code, None where it is not known;
    launches are counted in the first three and in `predicted_us`. `binds` names the term that most of it is due to.
    """

    floor_us: float
    cached_us: float
    memory_us: float
    issue_us: float | None
    latency_us: float | None
    predicted_us: float
    binds: str
    cost: Cost


def predict(workload: Workload, mode: str, device: Device) -> Prediction:
    """The time that one step of a mode of the suite should take on the device, apart from what the host does."""
    chip = dataclasses.replace(launch.CHIPS[device.chip], num_processors=int(device.num_processors.value))
    times, bound = defaultdict[str, float](float), defaultdict[str, float](float)
    known, steps = True, steps_of(workload, mode, chip)
    for cost, launches in steps:
        seen = cost.matmuls * workload.matmul_flops if cost.matmuls else 0
        gaps = cost.launches * device.launch_seconds.value
        work = _work(launches, device)
        cached = _seconds(cost.bytes_moved - _reused(cost, work or [], device), cost.flops, device)
        times["floor"] += _seconds(cost.minimum_bytes, seen, device) + device.launch_seconds.value
        times["cached"] += cached + gaps
        times["memory"] += _seconds(cost.bytes_moved, cost.flops, device) + gaps
        busy = _busy(work, device) if work else None
        known = known and busy is not None
        terms = {"products" if cost.flops else "bytes": cached, **(busy or {})}
        for name, seconds in (busy or {}).items():
            times[name] += seconds
        binds = max(terms, key=terms.__getitem__)
        bound[binds] += terms[binds] + gaps
    return Prediction(
        floor_us=1e6 * times["floor"],
        cached_us=1e6 * times["cached"],
        memory_us=1e6 * times["memory"],
        issue_us=1e6 * times["issue"] if known else None,
        latency_us=1e6 * times["latency"] if known else None,
        predicted_us=1e6 * sum(bound.values()),
        binds=max(bound, key=bound.__getitem__),
        cost=functools.reduce(add, (cost for cost, _ in steps)),
    )


def calls_of(workload: Workload, mode: str) -> list[Call]:
    """The calls of launchers that one step of a mode, of `MODES`, makes, on meta tensors."""
    steps = workload.record.steps[mode]
    with torch.device("meta"):
        calls = [cases.calls_of(workload, step)[0] for step in steps]
    # One call gives value and tangent at once, where there is a launcher for it.
    at_once = steps[:2] == ("forward", "jvp") and calls[1].launcher.__name__.endswith("_fwd_jvp")
    return calls[at_once:]


def steps_of(workload: Workload, mode: str, chip: launch.Chip) -> list[tuple[Cost, list[Launch]]]:
    """Of each of these calls its cost and its launches, planned for a chip."""
    found: list[tuple[Cost, list[Launch]]] = []
    launches: list[Launch] = []
    with watch_launches(chip.name, [workload], launches.append), launch.use_chip(chip):
        for call in calls_of(workload, mode):
            # Products bind attention, whatever is issued beside them.
            if not workload.record.products:
                call.results()
            found.append((call.cost(), launches.copy()))
            launches.clear()
    return found


def _seconds(num_bytes: float, flops: float, device: Device) -> float:
    return max(num_bytes / device.copy_bytes_per_second.value, flops / device.matmul_flops_per_second.value)


def _work(launches: list[Launch], device: Device) -> list[tuple[Work, bool]] | None:
    """Of each launch its work, and whether it sweeps rows twice; None where the machine code of one is not known."""
    rows, found = _machine_code(device.chip), []
    for one in launches:
        if one.key not in rows:
            return None
        row, regions = rows[one.key], rows[one.key].parsed_regions()
        values = dict(zip(one.kernel.argument_names, one.args, strict=False))
        used = (row.num_warps, row.registers, row.shared_bytes)
        work = work_of(regions, values, one.grid, used, launch.CHIPS[device.chip])
        found.append((work, sum(bool(region.loaded) for region in regions[1:]) > 1))
    return found


def _busy(work: list[tuple[Work, bool]], device: Device) -> dict[str, float]:
    """Seconds that launches issue, and those that they wait."""
    clock, processors = device.clock_hertz.value, int(device.num_processors.value)
    issue = sum(one.issue_cycles(processors) for one, _ in work)
    latency = sum(one.latency_cycles(processors) for one, _ in work)
    return {"issue": issue / clock / device.sustained_share.value, "latency": latency / clock}


@functools.cache
def _machine_code(chip_name: str) -> dict[str, Any]:
    return {row.key: row for row in read_table(chip_name)}


def _reused(call: Cost, work: list[tuple[Work, bool]], device: Device) -> float:
    """The part of the further reads of a call that the last cache can serve."""
    cache = device.l2_bytes.value
    at_once = device.num_processors.value * max((one.resident for one, sweeps in work if sweeps), default=1)
    swept = sum(sweep.num_bytes for sweep in call.sweeps)
    # Programs come in as many waves as it takes, and each wave finds a cache full of its own rows.
    served = sum(min(sweep.num_bytes, cache * max(sweep.num_programs / at_once, 1.0)) for sweep in call.sweeps)
    return served + min(call.bytes_moved - call.minimum_bytes - swept, cache)


def page(device: Device) -> str:
    """Markdown page with the predictions for every workload and mode, and the values behind them."""
    values = {field.name: getattr(device, field.name) for field in dataclasses.fields(device)[2:]}
    lines = [
        f"# Predicted times on {device.name}",
        "",
        "Written by `python -m perf predict`: predicted, not measured. `perf/model.py` says what the columns mean.",
        "",
        "| value of the device | | measured | source |",
        "|---|---:|---|---|",
    ]
    for name, (value, measured, source) in values.items():
        lines.append(f"| {name.replace('_', ' ')} | {value:g} | {'yes' if measured else 'no'} | {source} |")
    for has_products in (False, True):
        lines += [
            "",
            f"| workload | mode | launches | minimum MB | moved MB |{' GFLOP |' * has_products} floor us | cached us |"
            " memory us | issue us | latency us | predicted us | binds |",
            f"|---|---|{'---:|' * (9 + has_products)}---|",
        ]
        for workload, mode in ((w, mode) for w in GPU_WORKLOADS for mode in w.modes):
            if bool(workload.record.products) == has_products:
                *times, binds, cost = predict(workload, mode, device)
                flops = [cost.flops / 1e9] * has_products
                figures = (cost.minimum_bytes / 1e6, cost.bytes_moved / 1e6, *flops, *times)
                texts = ("" if figure is None else f"{figure:.1f}" for figure in figures)
                lines.append(f"| {' | '.join([workload.key, mode, str(cost.launches), *texts, binds])} |")
    return "\n".join(lines) + "\n"
