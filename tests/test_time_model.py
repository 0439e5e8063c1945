"""The time model against figures worked out by hand, and its device files."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from perf import model
from perf.workloads import GPU_WORKLOADS, Workload
from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from pathlib import Path

ROWS = Workload("by hand", "layer_norm", (8192, 4096), affine=False)
LOGITS = Workload("by hand", "log_softmax", (8192, 4096))
CHANNELS = Workload("by hand", "batch_norm", (64, 256, 56, 56), affine=False)
# 67.1 MB and 102.8 MB at 4.3 TB/s.
ROWS_PASS_US, CHANNELS_PASS_US = 15.6, 23.9
L2_BYTES = 62914560


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
    assert found.memory_us - found.cached_us == pytest.approx(L2_BYTES / 4.3e6, rel=0.005)
    assert found.launches == 3


@pytest.mark.parametrize(
    "op, shape, mode, swept, served",
    [
        # 264 rows of 100 KB at a time are 27 MB, which the cache holds.
        ("log_softmax", (4096, 50257), "forward", 1, 1.0),
        # 264 rows of 256 KiB are 69 MB, of which it holds 62.9.
        ("log_softmax", (4096, 131072), "forward", 1, L2_BYTES / (264 * 131072 * 2)),
        ("log_softmax", (4096, 262144), "forward", 1, L2_BYTES / (264 * 262144 * 2)),
        # Both of the operands of a row are read again.
        ("layer_norm", (4096, 131072), "jvp", 2, L2_BYTES / (264 * 2 * 131072 * 2)),
        # Few rows are all under way.
        ("log_softmax", (270, 131072), "forward", 1, L2_BYTES / (264 * 131072 * 2)),
        # Rows that programs share are read again by a second launch, behind all of the first.
        ("log_softmax", (200, 262144), "forward", 1, L2_BYTES / (200 * 262144 * 2)),
        ("log_softmax", (16, 262144), "forward", 1, 1.0),
    ],
    ids=str,
)
def test_the_cache_serves_what_it_holds_of_long_rows(
    op: str, shape: tuple[int, int], mode: str, swept: int, served: float, device: model.Device
) -> None:
    workload = Workload("by hand", op, shape, affine=False)
    found = model.predict(workload, mode, device)
    if mode == "jvp":
        # Beside the forward, of which the row is shorter by one operand.
        forward = model.predict(workload, "forward", device)
        found = found._replace(
            cached_us=found.cached_us - forward.cached_us, memory_us=found.memory_us - forward.memory_us
        )
    one_pass = shape[0] * shape[1] * 2 / 4.3e6
    assert found.memory_us - found.cached_us == pytest.approx(served * swept * one_pass, rel=0.01)
    assert served <= 1.0


def test_launches_cost_time(device: model.Device) -> None:
    slow = dataclasses.replace(device, launch_seconds=model.Value(1e-6, False, "by hand"))
    before, after = (model.predict(CHANNELS, "forward", which) for which in (device, slow))
    assert after.memory_us - before.memory_us == pytest.approx(3.0)
    assert after.floor_us - before.floor_us == pytest.approx(1.0)


def test_the_page_of_predictions_is_what_the_model_says() -> None:
    device = model.read_device("h200")
    found = model.predictions(GPU_WORKLOADS, device)
    page = model.format_table(found, device)
    assert (model.OUTPUT / "predictions_h200.md").read_text() == page, "run `python -m perf predict --write`"
    assert found.keys() == {(workload.key, mode) for workload in GPU_WORKLOADS for mode in workload.modes}
    for prediction in found.values():
        assert 0 < prediction.floor_us <= prediction.cached_us * 1.001 <= prediction.memory_us * 1.001


def test_values_of_devices_are_those_of_their_documents() -> None:
    device = model.read_device("h200")
    # No copy beats the data sheet's 4.8 TB/s, or is useful to plan with below four fifths of it.
    assert 0.8 * 4.8e12 <= device.copy_bytes_per_second.value <= 4.8e12
    # A kernel takes 2 to 3 microseconds to launch, fill and drain.
    assert 2e-6 <= device.launch_seconds.value <= 3e-6
    # The planner and the model speak of one device.
    chip = CHIPS[device.chip]
    assert (device.l2_bytes.value, device.num_processors.value) == (chip.l2_bytes, chip.num_processors)


def test_a_device_file_that_lacks_a_value_is_refused(tmp_path: Path, device: model.Device) -> None:
    description = json.loads((model.DEVICES / "h200.json").read_text())
    del description["values"]["l2_bytes"]
    (tmp_path / "copy.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="l2_bytes"):
        model.read_device(tmp_path / "copy.json")
    with pytest.raises(ValueError, match="mode must be one of"):
        model.predict(ROWS, "sideways", device)
