"""The time model against figures worked out by hand, and its device files."""

from __future__ import annotations

import dataclasses

import pytest

from perf import model
from perf.__main__ import DOCS, main
from perf.workloads import Workload
from triton_kernels.launch.chips import CHIPS

ROWS = Workload("by hand", "layer_norm", (8192, 4096), affine=False)
LOGITS = Workload("by hand", "log_softmax", (8192, 4096))
CHANNELS = Workload("by hand", "batch_norm", (64, 256, 56, 56), affine=False)
# Microseconds of a pass at 4.3 TB/s: of 67.1 MB and 102.8 MB.
ROWS_PASS_US, CHANNELS_PASS_US = 15.6, 23.9
L2_BYTES = 62914560


@pytest.fixture(scope="module")
def device():
    """An H200 that launches in no time: what is left are the bytes."""
    return dataclasses.replace(model.read_device("h200"), launch_seconds=model.Value(0.0, False, "by hand"))


@pytest.mark.parametrize(
    "workload, mode, passes",
    [
        (ROWS, "forward", 2),
        (ROWS, "jvp", 2 + 3),
        (ROWS, "double_backward", 3 + 2),
        (ROWS, "hvp", 2 + 3 + 3 + 4),
        (LOGITS, "backward", 3),
        # A cotangent of y goes on to x through the backward.
        (LOGITS, "double_backward", 3 + 2 + 3),
    ],
    ids=str,
)
def test_rows_in_registers(workload, mode, passes, device):
    found = model.predict(workload, mode, device)
    assert found.floor_us == pytest.approx(passes * ROWS_PASS_US, rel=0.005)
    assert found.memory_us == pytest.approx(found.floor_us, rel=0.005)


def test_partial_rows_of_the_backward(device):
    # 264 partial rows of two float32 sums, written and read: 17 MB beside three passes.
    found = model.predict(dataclasses.replace(ROWS, affine=True), "backward", device)
    assert found.memory_us == pytest.approx(3 * ROWS_PASS_US + 2 * 264 * 2 * 4096 * 4 / 4.3e6, rel=0.005)


@pytest.mark.parametrize("mode, floor, passes", [("forward", 2, 3), ("backward", 3, 5), ("double_backward", 5, 8)])
def test_channels_take_two_phases(mode, floor, passes, device):
    found = model.predict(CHANNELS, mode, device)
    assert found.floor_us == pytest.approx(floor * CHANNELS_PASS_US, rel=0.005)
    assert found.memory_us == pytest.approx(passes * CHANNELS_PASS_US, rel=0.005)
    # The cache serves one cache full of what is read again.
    assert found.memory_us - found.cached_us == pytest.approx(L2_BYTES / 4.3e6, rel=0.005)
    slow = dataclasses.replace(device, launch_seconds=model.Value(1e-6, False, "by hand"))
    launched = model.predict(CHANNELS, mode, slow)
    assert launched.memory_us - found.memory_us == pytest.approx(3.0)
    assert launched.floor_us - found.floor_us == pytest.approx(1.0)


@pytest.mark.parametrize(
    "shape, served",
    [
        # 264 rows of 100 KB at a time are 27 MB, which the cache holds; of 264 rows of 256 KiB it holds 62.9 of 69 MB.
        ((4096, 50257), 1.0),
        ((4096, 131072), L2_BYTES / (264 * 131072 * 2)),
        # Few rows are all under way.
        ((270, 131072), L2_BYTES / (264 * 131072 * 2)),
        # Rows that programs share are read again by a second launch, behind all of the first.
        ((200, 262144), L2_BYTES / (200 * 262144 * 2)),
        ((16, 262144), 1.0),
    ],
    ids=str,
)
def test_the_cache_serves_what_it_holds_of_long_rows(shape, served, device):
    found = model.predict(Workload("by hand", "log_softmax", shape), "forward", device)
    one_pass = shape[0] * shape[1] * 2 / 4.3e6
    assert found.memory_us - found.cached_us == pytest.approx(served * one_pass, rel=0.01)


def test_the_page_of_predictions_is_what_the_model_says(capsys):
    assert main(["predict"]) == 0
    page = capsys.readouterr().out
    assert (DOCS / "predictions_h200.md").read_text() == page, "run `python -m perf predict --write`"


def test_values_of_devices_are_those_of_their_documents():
    device = model.read_device("h200")
    # No copy beats the data sheet's 4.8 TB/s, or is useful to plan with below four fifths of it.
    assert 0.8 * 4.8e12 <= device.copy_bytes_per_second.value <= 4.8e12
    # The planner and the model speak of one device.
    chip = CHIPS[device.chip]
    assert (device.l2_bytes.value, device.num_processors.value) == (chip.l2_bytes, chip.num_processors)
