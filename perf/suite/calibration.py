"""Memory bandwidth of the device at a given number of bytes: copied, only read, and two reads for one write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from perf.suite.results import write_json
from perf.suite.timers import Prepared, calls_per_sample, interleave, quantiles, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from perf.suite.timers import Step, Timer

CALIBRATION_SECONDS = 0.05
WARM_UP_SECONDS = 0.02
FLOAT_BYTES = 4


def calibrate(timer: Timer, total_bytes: int, directory: Path) -> dict[str, float]:
    """Bandwidths in GB/s of moving `total_bytes`, reads and writes together; measured once for each run and size.

    Args:
        timer: Of the device.
        total_bytes: Size.
        directory: Where the bandwidths of this device in this run are kept: another GPU has others.
    """
    path = directory / f"{total_bytes}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    sets = timer.num_sets(total_bytes)
    samplers = {}
    for name, make in _KINDS.items():
        steps = [make(total_bytes, timer.device) for _ in range(sets)]
        # Any bandwidth of this order sizes the samples well enough.
        samplers[name] = sampler(timer, timer.prepare(steps, total_bytes / 4e12))
    warm_up(samplers, WARM_UP_SECONDS)
    samples = interleave(samplers, CALIBRATION_SECONDS, max_rounds=timer.max_rounds)
    found = {name: total_bytes / quantiles(values).median / 1e9 for name, values in samples.items()}
    write_json(path, found)
    return found


def sampler(timer: Timer, prepared: Prepared) -> Callable[[], float]:
    """What takes a sample of the time that memory traffic shows in: of the device, or on a CPU of the call.

    Raises:
        RuntimeError: If a copy cannot be captured; a fraction of its speed would mean nothing then.
    """
    if prepared.obstacle is not None:
        raise RuntimeError(f"calibration: no copy can be captured: {prepared.obstacle}.")
    if timer.has_device_time:
        return lambda: timer.device_seconds(prepared)
    seconds = timer.call_seconds(prepared, 1)
    calls = calls_per_sample(seconds, timer.sample_seconds)
    return lambda: timer.call_seconds(prepared, calls)


def _tensors(total_bytes: int, parts: int, device: torch.device) -> list[torch.Tensor]:
    size = max(total_bytes // parts // FLOAT_BYTES, 1)
    return [torch.ones(size, device=device) for _ in range(parts)]


def _copy(total_bytes: int, device: torch.device) -> Step:
    source, target = _tensors(total_bytes, 2, device)
    return lambda: target.copy_(source)


def _read(total_bytes: int, device: torch.device) -> Step:
    (source,) = _tensors(total_bytes, 1, device)
    return source.sum


def _two_reads_one_write(total_bytes: int, device: torch.device) -> Step:
    first, second, target = _tensors(total_bytes, 3, device)
    return lambda: torch.add(first, second, out=target)


_KINDS = {"copy_gbps": _copy, "read_gbps": _read, "two_reads_one_write_gbps": _two_reads_one_write}
