"""What the time model expects of the cases of a result, with the bandwidth that the same run measured."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from perf.suite.plan import find
from perf.workloads import Workload

if TYPE_CHECKING:
    from perf.model import Device

# Smaller copies have a part in caches, and of their launches.
LARGE_BYTES = 256e6
# Where what a launch takes is looked up: no run measures it.
DESCRIBED = "h200"


def describe_device(result: dict[str, Any]) -> Device | None:
    """The device of a result as the model takes it; None for a CPU, an unknown chip, or where triton is missing."""
    try:
        from perf import model
        from triton_kernels import launch
    except ImportError:
        return None
    found: dict[str, Any] = result["device"] or {"type": "cpu"}
    chip = "sm_" + found.get("capability", "").replace(".", "")
    if found["type"] != "cuda" or chip not in launch.CHIPS:
        return None
    copies = [(int(size), found["copy_gbps"]) for one in result["calibration"].values() for size, found in one.items()]
    speeds = [speed for size, speed in copies if size >= LARGE_BYTES]
    if not speeds:
        return None
    created = f"measured by `python -m perf run` on {result['created'][:10]}"
    return model.Device(
        found["name"],
        chip,
        model.Value(statistics.median(speeds) * 1e9, True, f"{created}: median of {len(speeds)} large copies"),
        model.read_device(DESCRIBED).launch_seconds,
        model.Value(found["l2_bytes"], True, created),
        model.Value(found["processors"], True, created),
    )


def predictions(result: dict[str, Any], device: Device | None) -> dict[tuple[str, str], float]:
    """Microseconds that the model expects, by workload and mode: what is read again comes from the cache if it fits."""
    if device is None:
        return {}
    from perf import model

    expected: dict[tuple[str, str], float] = {}
    for key, mode in dict.fromkeys((row["workload"], row["mode"]) for row in result["rows"]):
        workload = _workload(key)
        if workload is not None and mode in model.MODES:
            expected[key, mode] = model.predict(workload, mode, device).cached_us
    return expected


def _workload(key: str) -> Workload | None:
    try:
        found = find(key, "cuda")
    except KeyError:
        return None
    return found if isinstance(found, Workload) else None
