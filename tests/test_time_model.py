"""The time model against figures worked out by hand, and its device files."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from perf import model
from perf.workloads import GPU_WORKLOADS, Workload

if TYPE_CHECKING:
    from pathlib import Path

ROWS = Workload("by hand", "layer_norm", (8192, 4096), affine=False)
LOGITS = Workload("by hand", "log_softmax", (8192, 4096))
CHANNELS = Workload("by hand", "batch_norm", (64, 256, 56, 56), affine=False)
# 67.1 MB and 102.8 MB at 4.3 TB/s.
ROWS_PASS_US, CHANNELS_PASS_US = 15.6, 23.9


@pytest.fixture(scope="module")
def device() -> model.Device:
    """An H200 that launches in no time: what is left are the bytes."""
    return dataclasses.replace(model.read_device("h200"), launch_seconds=model.Value(0.0, False, "by hand"))


@pytest.mark.parametrize(
    "workload, mode, passes",
    [
        (ROWS, "forward", 2),
        (ROWS, "backward", 3),
        (ROWS, "jvp", 2 + 3),
        (ROWS, "double_backward", 3 + 2),
        (ROWS, "hvp", 2 + 3 + 3 + 4),
        (LOGITS, "forward", 2),
        (LOGITS, "backward", 3),
        # A cotangent of y goes on to x through the backward.
        (LOGITS, "double_backward", 3 + 2 + 3),
    ],
    ids=str,
)
def test_rows_in_registers(workload: Workload, mode: str, passes: int, device: model.Device) -> None:
    found = model.predict(workload, mode, device)
    assert found.floor_us == pytest.approx(passes * ROWS_PASS_US, rel=0.005)
    assert found.memory_us == pytest.approx(found.floor_us, rel=0.005)
    assert found.cached_us <= found.memory_us


def test_partial_rows_of_the_backward(device: model.Device) -> None:
    # 264 partial rows of two float32 sums, written and read: 17 MB beside three passes.
    found = model.predict(dataclasses.replace(ROWS, affine=True), "backward", device)
    assert found.memory_us == pytest.approx(3 * ROWS_PASS_US + 2 * 264 * 2 * 4096 * 4 / 4.3e6, rel=0.005)
    assert found.launches == 2


@pytest.mark.parametrize(
    "mode, floor, passes", [("forward", 2, 3), ("backward", 3, 5), ("double_backward", 5, 8)], ids=str
)
def test_channels_take_two_phases(mode: str, floor: int, passes: int, device: model.Device) -> None:
    found = model.predict(CHANNELS, mode, device)
    assert found.floor_us == pytest.approx(floor * CHANNELS_PASS_US, rel=0.005)
    assert found.memory_us == pytest.approx(passes * CHANNELS_PASS_US, rel=0.005)
    # The cache serves one cache full of what is read again.
    assert found.memory_us - found.cached_us == pytest.approx(52428800 / 4.3e6, rel=0.005)
    assert found.launches == 3


def test_long_rows_are_read_again_from_the_cache(device: model.Device) -> None:
    found = model.predict(Workload("by hand", "log_softmax", (4096, 131072)), "forward", device)
    one_pass = 4096 * 131072 * 2 / 4.3e6
    assert found.memory_us == pytest.approx(3 * one_pass, rel=0.01)
    assert found.cached_us == pytest.approx(2 * one_pass, rel=0.01)


def test_launches_cost_time(device: model.Device) -> None:
    slow = dataclasses.replace(device, launch_seconds=model.Value(1e-6, False, "by hand"))
    before, after = (model.predict(CHANNELS, "forward", which) for which in (device, slow))
    assert after.memory_us - before.memory_us == pytest.approx(3.0)
    assert after.floor_us - before.floor_us == pytest.approx(1.0)


def test_every_measured_mode_is_predicted(device: model.Device) -> None:
    found = model.predictions(GPU_WORKLOADS, device)
    assert found.keys() == {(workload.key, mode) for workload in GPU_WORKLOADS for mode in workload.modes}
    for prediction in found.values():
        assert 0 < prediction.floor_us <= prediction.cached_us * 1.001 <= prediction.memory_us * 1.001
    page = model.format_table(found, device)
    assert page.count("\n") > len(found)
    assert "predicted, not measured" in page


def test_device_files(tmp_path: Path, device: model.Device) -> None:
    model.write_device(tmp_path / "copy.json", device)
    assert model.read_device(tmp_path / "copy.json") == device
    description = json.loads((tmp_path / "copy.json").read_text())
    del description["values"]["l2_bytes"]
    (tmp_path / "copy.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="l2_bytes"):
        model.read_device(tmp_path / "copy.json")
    with pytest.raises(ValueError, match="mode must be one of"):
        model.predict(ROWS, "sideways", device)
