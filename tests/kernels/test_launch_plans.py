"""The launch plans: within the limits of each chip. The table of machine code has those of the bench."""

import dataclasses
import inspect
import itertools
import math
import types

import pytest
import torch

from primitives.kernels.attention._plan import plan_attention
from primitives.kernels.batch_norm._plan import (
    channel_programs,
    plan_channel_merge,
    plan_channel_sums,
    plan_channel_transform,
)
from primitives.kernels.dropout._plan import plan_dropout, plan_philox
from primitives.kernels.norms._plan import (
    plan_layer_norm_params,
    plan_layer_norm_rows,
    plan_layer_norm_second_rows,
    plan_layer_norm_second_sums,
)
from primitives.kernels.rows.plan import plan_log_softmax, plan_param_reduce
from primitives.kernels.runtime import planned as _planned
from primitives.kernels.runtime.arithmetic import cdiv, next_power_of_2
from primitives.kernels.runtime.chips import CHIPS, chip_from_properties, limits_of, use_chip, use_limits

CPU = torch.device("cpu")

# Devices as torch describes them, from their data sheets and programming guides; of AMD's no registers.
FIELDS = ("major", "minor", "multi_processor_count", "shared_memory_per_block_optin",
          "shared_memory_per_multiprocessor", "L2_cache_size")  # fmt: skip
AMD_FIELDS = ("gcnArchName", "warp_size", "multi_processor_count", "L2_cache_size")
TOLD = {
    "A100": (8, 0, 108, 166912, 167936, 40 << 20),
    "RTX 4090": (8, 9, 128, 101376, 102400, 72 << 20),
    "H200": (9, 0, 132, 232448, 233472, 60 << 20),
    "B300": (10, 3, 148, 232448, 233472, 126 << 20),
    "RTX 5090": (12, 0, 170, 101376, 102400, 96 << 20),
    "V100": (7, 0, 80, 98304, 98304, 6 << 20),
    "MI300X": ("gfx942:sramecc+:xnack-", 64, 304, 4 << 20),
    "RX 7900": ("gfx1100", 32, 48, 6 << 20),
}
UNTOLD = ("shared_memory_per_block_optin", "shared_memory_per_multiprocessor", "regs_per_multiprocessor", "warp_size")


def chip_named(name, without=()):
    """The chip that the planner sees in a device, of whose properties torch does not tell some."""
    is_amd = len(TOLD[name]) == len(AMD_FIELDS)
    found = {"shared_memory_per_block": 49152, "warp_size": 32, "regs_per_multiprocessor": 65536}
    if is_amd:
        found = {"shared_memory_per_block": 65536, "shared_memory_per_multiprocessor": 65536}
    found |= zip(AMD_FIELDS if is_amd else FIELDS, TOLD[name], strict=True)
    properties = types.SimpleNamespace(**{key: value for key, value in found.items() if key not in without})
    return chip_from_properties(properties, is_amd)


# Those of a table are what torch says of them; the others have limits of their own.
DEVICES = {
    **{table: chip_named(name) for table, name in (("sm_80", "A100"), ("sm_90", "H200"), ("gfx942", "MI300X"))},
    **{name: chip_named(name) for name in ("RTX 4090", "B300", "RTX 5090", "V100", "RX 7900")},
    "of an older torch": chip_named("RTX 4090", UNTOLD),
}


COLS = [1, 48, 256, 1000, 4097, 5124, 8192, 16384, 32768, 50257, 65536, 131072, 262144]
ROWS = [1, 7, 500, 8192]
SIZES = list(itertools.product(ROWS, COLS, [2, 4, 8]))
CHANNELS = list(itertools.product([(1, 64, 256, 3136), (2, 1, 3, 1), (1, 1, 64, 200704)], [False, True], [2, 4, 8]))
KERNELS = ("fwd", "jvp", "first_rows", "first_keys", "second_rows", "second_keys")
ATTENTION = list(itertools.product(KERNELS, [1, 100, 16384], [64, 72, 256], [2, 4, 8]))


def requests(chip):
    """Plan functions with arguments that reach their different plans."""
    for kernel, tokens, width, itemsize in ATTENTION:
        yield plan_attention, (kernel, tokens, 2 * tokens, width, itemsize, chip)
    for rows, cols, itemsize in SIZES:
        for flag in (False, True):
            yield plan_layer_norm_rows, (2, rows, cols, itemsize, 1 + flag, 1 + 2 * flag, 2 + 2 * flag, chip)
            yield plan_layer_norm_second_rows, (1, rows, cols, itemsize, 3 + flag, chip)
            yield plan_layer_norm_second_sums, (2, rows, cols, itemsize, 3 + flag, 1, 1, chip)
            for tensors in (1, 2, 3):
                arguments = ((1, rows, cols), flag, itemsize, max(itemsize, 4), tensors, chip, tensors, tensors)
                yield plan_log_softmax, arguments
        yield plan_layer_norm_params, (2, rows, cols, itemsize, chip)
        for rows_adjacent in (False, True):
            yield plan_dropout, (rows, cols, rows_adjacent, itemsize, chip)
        yield plan_philox, (rows * cols, chip)
        yield plan_param_reduce, (2, rows, cols, itemsize, chip)
        yield plan_channel_merge, (cols, min(rows, 1024), chip)
    for sizes, inner, itemsize in CHANNELS:
        for align in (1, 16):
            for num_tensors in (1, 2, 4):
                yield plan_channel_sums, (sizes, inner, align, itemsize, chip, num_tensors)
                yield plan_channel_transform, (sizes, inner, align, itemsize, chip, num_tensors)


def numbers(plan):
    """Integers of a plan and of the plans inside it, by name."""
    for name, value in vars(plan).items():
        if dataclasses.is_dataclass(value):
            yield from numbers(value)
        elif not isinstance(value, bool):
            yield name, value


def staged_bytes(function, arguments, plan):
    """Shared memory for the steps in flight of a loop, all its tensors; 0 where nothing is loaded ahead."""
    named, given = dict(numbers(plan)), inspect.signature(function).bind(*arguments).arguments
    # The newest copies are still to come when the buffer of the oldest ones is read.
    steps = max(named.get("loop_stages", 1), named.get("num_stages", 1)) - 1
    tensors = next((given[name] for name in ("num_summed", "num_operands", "num_inputs") if name in given), 2)
    num_values = math.prod(number for name, number in named.items() if name.startswith("block_"))
    if function is plan_attention:
        kernel, steps = given["kernel"], steps and steps + 1
        tensors = 2 if kernel == "fwd" or kernel.startswith("first") else 4
        swept = plan.block_rows if kernel.endswith("keys") else plan.block_keys
        num_values = swept * next_power_of_2(given["width"])
    return tensors * num_values * given.get("itemsize", 0) * steps


def check_within(plan, chip):
    assert all(number >= (name != "resident") for name, number in numbers(plan)), plan
    named = dict(numbers(plan))
    blocks = [number for name, number in named.items() if name.startswith("block_")]
    assert math.prod(blocks) <= 1 << 20, plan
    for number in (*blocks, named["num_warps"]):
        assert number & (number - 1) == 0, plan
    assert named["num_warps"] * chip.warp_size <= 1024, plan
    assert named["num_warps"] <= chip.max_warps, plan


@pytest.mark.parametrize("chip", DEVICES.values(), ids=DEVICES)
def test_plans_are_within_the_chip(chip):
    for function, arguments in requests(chip):
        plan = function(*arguments)
        check_within(plan, chip)
        assert staged_bytes(function, arguments, plan) <= chip.shared_bytes, (function.__name__, arguments, plan)


def test_devices_have_their_own_limits():
    assert all(DEVICES[name] == CHIPS[name] for name in ("sm_80", "sm_90", "gfx942"))
    found = {name: (chip.name, chip.shared_bytes) for name, chip in DEVICES.items()}
    assert found["RTX 4090"] == ("sm_80", 101376)
    assert found["B300"] == ("sm_100", 232448)
    assert found["RTX 5090"] == ("sm_100", 101376)
    assert found["V100"] == ("sm_80", 98304)
    # Shared memory that every block of NVIDIA's can have unasked.
    assert found["of an older torch"] == ("sm_80", 49152)
    # Of a chip with half the wave of gfx942, no more registers are taken for granted than NVIDIA's have.
    chip = DEVICES["RX 7900"]
    assert (chip.name, chip.warp_size, chip.max_warps, chip.l2_bytes) == ("gfx942", 32, 32, 6 << 20)
    assert (chip.registers, limits_of(chip).resident_threads) == (65536, 256)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_candidates_are_within_the_chip_and_differ(chip, monkeypatch):
    asked = []
    monkeypatch.setattr(_planned, "_advisor", lambda request: asked.append(request) or (request.default, False))
    _planned.forget_plans()
    for function, arguments in requests(chip):
        function(*arguments)
    names, stages = set(), set()
    for request in asked:
        others = request.candidates()
        assert len(set(others)) == len(others)
        assert request.default not in others
        for plan in others:
            check_within(plan, chip)
            # A sweep may have more stages of its own (see `cached_stages`), which candidates keep.
            stages |= {number for name, number in {*numbers(plan)} - {*numbers(request.default)} if "stages" in name}
        if others:
            names.add(request.key.function)
    assert names == {function.__name__ for function, _ in requests(chip)}
    # On NVIDIA two stages fetch nothing ahead, three fetch a step.
    assert stages == set(range(1, 4 if chip.name == "gfx942" else 5))


# How many programs share a row or a sum is an argument of kernels, which no table of machine code has.


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("num_cols", [131072, 128256, 262144, 100000])
def test_few_long_rows_are_split(chip, num_cols):
    # Segments count as rows.
    assert plan_layer_norm_rows(160, 8, num_cols, 2, 2, 2, 2, chip).col_splits == 1
    for num_rows in (1, 8, 50, 2 * chip.num_processors - 1, 2 * chip.num_processors, 8192):
        for plan in (
            plan_layer_norm_rows(1, num_rows, num_cols, 2, 1, 1, 2, chip),
            plan_layer_norm_second_rows(1, num_rows, num_cols, 2, 4, chip),
            plan_log_softmax((1, num_rows, num_cols), False, 2, 4, 1, chip),
        ):
            assert plan.looped
            if num_rows >= 2 * chip.num_processors:
                assert plan.col_splits == 1
                continue
            num_tiles = cdiv(num_cols, plan.block_cols)
            per_split = cdiv(num_tiles, plan.col_splits)
            assert (plan.col_splits - 1) * per_split < num_tiles, "a split without columns"
            assert plan.col_splits <= 32
            # About four programs for each processor, or as many splits as there can be of whole tiles.
            most = cdiv(num_tiles, cdiv(num_tiles, min(32, num_tiles)))
            assert num_rows * plan.col_splits >= 2 * chip.num_processors or plan.col_splits == most
            assert num_rows * (plan.col_splits - 1) < 4 * chip.num_processors


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("spatial_inner, num_inputs", [(True, 1), (True, 2), (False, 1), (False, 2), (True, 4)])
def test_programs_of_a_reduction_fill_their_slots(chip, spatial_inner, num_inputs):
    for num_channels, align, itemsize in itertools.product((64, 100, 256, 1000), (1, 16), (2, 4, 8)):
        sizes = (1, 64, num_channels, 56 * 56) if spatial_inner else (1, 1, num_channels, 64 * 56 * 56)
        plan = plan_channel_sums(sizes, spatial_inner, align, itemsize, chip, num_inputs, num_inputs == 1)
        slots = channel_programs(spatial_inner, num_inputs, num_inputs == 1, itemsize, chip) * chip.num_processors
        # As many as the registers of the table of machine code leave room for: `test_machine_code` writes them out.
        waves = cdiv(plan.num_blocks * plan.num_splits, plan.num_resident)
        steps = waves * cdiv(plan.num_tiles, plan.num_splits)
        # Shared memory may have room for fewer.
        assert slots / 2 <= plan.num_resident <= slots
        programs, tiles = plan.num_blocks * plan.num_splits, plan.num_blocks * plan.num_tiles
        assert tiles >= 0.75 * steps * min(programs, plan.num_resident), (num_channels, align, itemsize)
        # Fewer than fit only where each would have a few tiles.
        assert programs >= 0.75 * plan.num_resident or tiles < 6 * plan.num_resident, (num_channels, align, itemsize)
        assert plan.num_warps * chip.warp_size <= 256


@pytest.mark.parametrize(
    "num_cols, most",
    [(cols, 2) for cols in (24, 256, 512, 768, 1024, 1600, 2048, 4096, 8192)] + [(640, 8), (1152, 4), (1280, 4)],
)
def test_partial_rows_are_two_for_each_processor_where_tiles_are_filled(num_cols, most):
    for chip, num_rows in itertools.product(CHIPS.values(), (8192 * 32, 8192 * 256)):
        plan = plan_layer_norm_params(1, num_rows, num_cols, 2, chip)
        threads = plan.num_splits / chip.num_processors * plan.num_warps * chip.warp_size
        # That of AMD has threads for half as many more, and warps of twice as many.
        assert threads <= limits_of(chip).resident_threads
        assert plan.num_splits <= (3 if chip.name == "gfx942" else 1) * most * chip.num_processors


def test_plans_follow_the_limits_and_the_chip_in_force():
    sizes = (1, 4096, 1024, 2, 1, 1, 2, CPU)
    first = plan_layer_norm_rows(*sizes)
    with use_limits(layer_norm_fwd_bytes=1024):
        assert plan_layer_norm_rows(*sizes).looped
    with use_chip(CHIPS["gfx942"]), use_limits(layer_norm_fwd_bytes=1 << 20, tile_threads=64):
        assert plan_layer_norm_rows(*sizes).num_warps == 1
    assert plan_layer_norm_rows(*sizes) == first
    with use_limits(max_row_splits=3), use_limits(staged_bytes=5):
        limits = limits_of(CHIPS["sm_80"])
        assert (limits.max_row_splits, limits.staged_bytes) == (3, 5)


def test_traced_sizes_are_fixed_by_a_plan():
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    num_rows = ShapeEnv().create_symintnode(sympy.Integer(4096), hint=4096)
    plan = plan_log_softmax((1, num_rows, 1024), False, 2, 4, 1, CPU)
    assert plan == plan_log_softmax((1, 4096, 1024), False, 2, 4, 1, CPU)
