"""The time model: what a call of the kernels should take on a device, from bytes, products, launches and peak speeds.

    time = max(bytes moved / copy bandwidth, operations / peak of tensor cores) + launches * time of a launch

Bytes, and operations of products of matrices, are those of `triton_kernels.costs` under the plan that the device's chip
gets; only attention has such products. Three times bracket a call:

    floor     every operand read once, every result written once, by one launch: no implementation can be faster, but
              for one of attention with fewer products; these of pairs of tokens that see each other alone
    cached    what the plan reads again comes from the L2 cache as far as that can hold it, and costs nothing
    memory    what the plan reads again comes from memory

The last two multiply whole tiles, whose widths are powers of 2. No kernel reaches the peak of tensor cores.
`docs/gates.md` says what is assumed of the cache.

A device is described by a JSON file in which each value has its source and says whether it was measured.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from perf.workloads import CHANNEL_OPS, DROPOUT_P, EPS, GPU_WORKLOADS, MATMUL_OPS
from triton_kernels import costs, launch

if TYPE_CHECKING:
    from perf.workloads import Workload
    from triton_kernels.costs import Cost

DEVICES = Path(__file__).parent / "devices"

# The launchers that a step of each mode calls: forward mode and Hessian-vector products compute the values beside the
# tangents. The suite's Hessian-vector products are those of a loss that is linear in y, so y_bar has no tangent.
_LAUNCHERS = {
    "forward": ("fwd",),
    "backward": ("bwd",),
    "forward_backward": ("fwd", "bwd"),
    "jvp": ("fwd", "jvp"),
    "hvp": ("fwd", "jvp", "bwd", "bwd_jvp"),
    "double_backward": ("pairing",),
    "backward_of_jvp": ("bwd", "jvp_bwd"),
}
MODES = tuple(_LAUNCHERS)

# Programs of a sweep over long rows that run at once on a processor: the compiler reports 37 to 64 registers for most
# sweeps of 512 threads, and the register file has room for two or three times that (docs/perf/machine_code). Kernels
# with more registers run one, and have twice as much cache for each row.
SWEEPING_PROGRAMS = 2


class Value(NamedTuple):
    """A property of a device, whether it was measured on one, and where it comes from."""

    value: float
    measured: bool
    source: str


@dataclass(frozen=True)
class Device:
    """What the model knows of a device: its name, a key of `launch.CHIPS` whose plans it gets, and values.

    Attributes:
        copy_bytes_per_second: Bytes read plus bytes written per second by a large copy.
        matmul_flops_per_second: Peak of tensor cores for products of bfloat16 and float16.
        launch_seconds: Time between the ends of two kernels beyond what their bytes take.
        l2_bytes: Size of the last cache before memory.
    """

    name: str
    chip: str
    copy_bytes_per_second: Value
    matmul_flops_per_second: Value
    launch_seconds: Value
    l2_bytes: Value
    num_processors: Value


def read_device(name: str) -> Device:
    """The device of a JSON file: name of one of `perf/devices` (`"h200"`), or a path."""
    path = Path(name) if name.endswith(".json") else DEVICES / f"{name}.json"
    description = json.loads(path.read_text())
    values = {name: Value(**value) for name, value in description["values"].items()}
    return Device(description["name"], description["chip"], **values)


class Prediction(NamedTuple):
    """Times in microseconds that a call should take on a device, and what they follow from."""

    floor_us: float
    cached_us: float
    memory_us: float
    cost: Cost


def predict(workload: Workload, mode: str, device: Device) -> Prediction:
    """What one step of a mode of the suite should take on the device, apart from what the host does."""
    chip = dataclasses.replace(launch.CHIPS[device.chip], num_processors=int(device.num_processors.value))
    with launch.use_chip(chip):
        calls = calls_of(workload, mode)

    def microseconds(num_bytes: float, launches: int, flops: float) -> float:
        moving = num_bytes / device.copy_bytes_per_second.value
        multiplying = flops / device.matmul_flops_per_second.value
        return 1e6 * (max(moving, multiplying) + launches * device.launch_seconds.value)

    def of_call(call: Cost) -> tuple[float, ...]:
        seen = call.matmuls * workload.matmul_flops if call.matmuls else 0
        return (
            microseconds(call.minimum_bytes, 1, seen),
            microseconds(call.bytes_moved - _reused_bytes(call, device), call.launches, call.flops),
            microseconds(call.bytes_moved, call.launches, call.flops),
        )

    times = zip(*map(of_call, calls), strict=True)
    return Prediction(*map(sum, times), cost=reduce(add, calls))


def _reused_bytes(call: Cost, device: Device) -> float:
    """What of the further reads of a call the last cache can serve."""
    cache = device.l2_bytes.value
    at_once = SWEEPING_PROGRAMS * device.num_processors.value
    swept = sum(sweep.num_bytes for sweep in call.sweeps)
    # Programs come in as many waves as it takes, and each wave finds a cache full of its own rows.
    served = sum(min(sweep.num_bytes, cache * max(sweep.num_programs / at_once, 1.0)) for sweep in call.sweeps)
    return served + min(call.bytes_moved - call.minimum_bytes - swept, cache)


def calls_of(workload: Workload, mode: str) -> list[Cost]:
    """Costs of the launchers that one step of a mode, of `MODES`, calls, planned for the chip in force."""
    calls = _CALLS[workload.op](workload)
    names = _LAUNCHERS[mode]
    if workload.op == "log_softmax" and mode == "double_backward":
        # It keeps y and not x: the cotangent of y goes on to x.
        names = (*names, "bwd")
    return [calls[name] for name in names]


def _operands(workload: Workload) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The input, its weight, and a vector of statistics."""
    layout = torch.channels_last if workload.channels_last else torch.contiguous_format
    x = torch.empty(workload.shape, dtype=workload.torch_dtype, device="meta", memory_format=layout)
    weight = x.new_empty((workload.num_params,), dtype=workload.param_dtype) if workload.num_params else None
    statistics = workload.shape[1:2] if workload.op in CHANNEL_OPS else workload.shape[:-1]
    return x, weight, x.new_empty(statistics, dtype=torch.float32)


def _layer_norm_calls(workload: Workload) -> dict[str, Cost]:
    x, weight, stat = _operands(workload)
    wanted = (True, weight is not None, weight is not None)
    operands = (x, x, weight, stat, stat)
    return {
        "fwd": costs.layer_norm_fwd(x, weight, weight, 1, 0, EPS),
        "bwd": costs.layer_norm_bwd(*operands, 1, 0, wanted),
        "jvp": costs.layer_norm_jvp(x, weight, stat, stat, x, weight, weight, 1, 0),
        "bwd_jvp": costs.layer_norm_bwd_jvp(*operands, None, x, weight, 1, 0, wanted),
        "pairing": costs.layer_norm_pairing(*operands, x, None, None, 1, 0, (True, *wanted[:2], False, False, False)),
    }


def _log_softmax_calls(workload: Workload) -> dict[str, Cost]:
    x, *_ = _operands(workload)
    dim = workload.dim % x.dim()
    return {
        "fwd": costs.log_softmax_fwd(x, dim, None),
        "bwd": costs.log_softmax_bwd(x, x, dim, x.dtype),
        "jvp": costs.log_softmax_jvp(x, x, dim),
        "bwd_jvp": costs.log_softmax_bwd_jvp(x, x, None, x, dim, x.dtype),
        "pairing": costs.log_softmax_pairing(x, x, x, dim, (True, True, False)),
    }


def _batch_norm_calls(workload: Workload) -> dict[str, Cost]:
    x, weight, stat = _operands(workload)
    wanted = (True, weight is not None, weight is not None)
    operands = (x, x, weight, stat, stat)
    return {
        "fwd": costs.batch_norm_train_fwd(x, weight, weight, None, None, 0, 0.1, EPS),
        "bwd": costs.batch_norm_train_bwd(*operands, 0, wanted),
        "jvp": costs.batch_norm_train_jvp(x, weight, stat, stat, x, weight, weight, 0),
        "bwd_jvp": costs.batch_norm_bwd_jvp(*operands, None, x, weight, 0, wanted),
        "pairing": costs.batch_norm_pairing(*operands, x, None, None, 0, (True, True, True, False, False, False)),
    }


def _batch_norm_eval_calls(workload: Workload) -> dict[str, Cost]:
    x, weight, stat = _operands(workload)
    wanted = (True, weight is not None, weight is not None, False, False)
    return {
        "fwd": costs.batch_norm_eval_fwd(x, weight, weight, stat, stat, 0, EPS),
        "bwd": costs.batch_norm_eval_bwd(x, x, weight, stat, stat, 0, EPS, wanted),
        "jvp": costs.batch_norm_eval_jvp(x, weight, stat, stat, x, weight, weight, None, None, 0, EPS),
    }


def _dropout_calls(workload: Workload) -> dict[str, Cost]:
    # It is linear: each of its derivatives is itself.
    seed = torch.empty((), dtype=torch.int64, device="meta")
    call = costs.dropout_fwd(_operands(workload)[0], seed, None, DROPOUT_P, 0)
    return dict.fromkeys(("fwd", "bwd", "jvp"), call)


def _attention_calls(workload: Workload) -> dict[str, Cost]:
    # o is like q, and so is every tangent and cotangent like what it belongs to.
    q, _, lse = _operands(workload)
    k = q.new_empty(workload.key_shape)
    dots, options = (q, k, k, None), (None, None, None, 1.0, workload.causal, 0.0)
    operands, all_three, none = (*dots, q, lse), (True, True, True, False), (False,) * 4

    def pairing(*wanted: bool, moved: Any = (None, None)) -> Cost:
        args: Any = (q, None, None, None, *operands, *dots, *moved, *options, wanted)
        return costs.attention_pairing(*args)

    return {
        "fwd": costs.attention_fwd(*dots, *options),
        "bwd": costs.attention_bwd(q, None, *operands, *options, all_three),
        "jvp": costs.attention_jvp(*operands, *dots, *options),
        "bwd_jvp": pairing(False, False, *all_three, *none, moved=(q, lse)),
        "pairing": pairing(True, False, *all_three, *none),
        "jvp_bwd": pairing(False, False, *all_three, *all_three, moved=(q, lse)),
    }


_CALLS = {
    "layer_norm": _layer_norm_calls,
    "log_softmax": _log_softmax_calls,
    "batch_norm": _batch_norm_calls,
    "batch_norm_eval": _batch_norm_eval_calls,
    "dropout": _dropout_calls,
    "attention": _attention_calls,
}


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
            " memory us |",
            f"|---|---|{'---:|' * (6 + has_products)}",
        ]
        for workload, mode in ((w, mode) for w in GPU_WORKLOADS for mode in w.modes):
            if (workload.op in MATMUL_OPS) == has_products:
                *times, cost = predict(workload, mode, device)
                flops = [cost.flops / 1e9] * has_products
                figures = (cost.minimum_bytes / 1e6, cost.bytes_moved / 1e6, *flops, *times)
                cells = [workload.key, mode, str(cost.launches), *(f"{figure:.1f}" for figure in figures)]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
