"""The launch plans: within the limits of each chip, rows split where they are few, clusters where they compile."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from triton_kernels import launch
from triton_kernels.launch import _candidates, _planned

CHIPS = list(launch.CHIPS.values())
COLS = [1, 48, 256, 1000, 4097, 5124, 8192, 16384, 32768, 50257, 65536, 131072, 262144]
ROWS = [1, 7, 500, 8192]
SIZES = list(itertools.product(ROWS, COLS, [2, 4, 8]))
CHANNELS = list(itertools.product([(1, 64, 256, 3136), (2, 1, 3, 1), (1, 1, 64, 200704)], [False, True], [2, 4, 8]))


def requests(chip):
    """Plan functions with arguments that reach their different plans."""
    for rows, cols, itemsize in SIZES:
        for flag in (False, True):
            yield launch.plan_layer_norm_rows, (rows, cols, itemsize, flag, chip)
            yield launch.plan_layer_norm_second, (1, rows, cols, itemsize, flag, chip)
            for tensors in (1, 2, 3):
                arguments = ((1, rows, cols), flag, itemsize, max(itemsize, 4), tensors, chip, tensors)
                yield launch.plan_log_softmax, arguments
        for function in (launch.plan_layer_norm_params, launch.plan_layer_norm_second_columns):
            yield function, (2, rows, cols, itemsize, chip)
        yield launch.plan_param_reduce, (rows, itemsize, chip)
        yield launch.plan_channel_merge, (cols, min(rows, 1024), chip)
    for sizes, inner, itemsize in CHANNELS:
        yield launch.plan_channel_reduction, (sizes, inner, 16, itemsize, chip)
        for name in ("transform", "second_reduction", "second_transform"):
            yield getattr(launch, f"plan_channel_{name}"), (sizes, inner, itemsize, chip)


def numbers(plan):
    """Integers of a plan and of the plans inside it, by name."""
    for name, value in vars(plan).items():
        if dataclasses.is_dataclass(value):
            yield from numbers(value)
        elif not isinstance(value, bool):
            yield name, value


def check_within(plan, chip):
    assert all(number >= 1 for _, number in numbers(plan)), plan
    named = dict(numbers(plan))
    blocks = [number for name, number in named.items() if name.startswith("block_")]
    num_values = 1
    for block in blocks:
        num_values *= block
    assert num_values <= 1 << 20, plan
    for number in (*blocks, named["num_warps"]):
        assert number & (number - 1) == 0, plan
    assert named["num_warps"] * chip.warp_size <= 1024, plan
    assert named["num_warps"] <= chip.max_warps, plan
    assert named.get("num_ctas", 1) <= chip.max_cluster, plan


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_plans_are_within_the_chip(chip):
    for function, arguments in requests(chip):
        plan = function(*arguments)
        check_within(plan, chip)
        # No kernel has run in a cluster.
        assert dict(numbers(plan)).get("num_ctas", 1) == 1


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_candidates_are_within_the_chip_and_differ(chip, monkeypatch):
    asked = []
    monkeypatch.setattr(_candidates, "cluster_limit", lambda chip: chip.max_cluster)
    monkeypatch.setattr(_planned, "_advisor", advisor := type("Advisor", (), {})())
    advisor.advise = lambda request: asked.append(request) or (request.default, False)
    _planned.forget_plans()
    for function, arguments in requests(chip):
        function(*arguments)
    names = set()
    for request in asked:
        others = request.candidates()
        assert len(set(others)) == len(others)
        assert request.default not in others
        for plan in others:
            check_within(plan, chip)
        if others:
            names.add(request.key.function)
    assert names == {function.__name__ for function, _ in requests(chip)}


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("num_cols", [131072, 128256, 262144, 100000])
def test_few_long_rows_are_split(chip, num_cols):
    for num_rows in (1, 8, 50, 2 * chip.num_processors - 1, 2 * chip.num_processors, 8192):
        for plan in (
            launch.plan_layer_norm_rows(num_rows, num_cols, 2, False, chip),
            launch.plan_layer_norm_second(1, num_rows, num_cols, 2, True, chip).rows,
            launch.plan_log_softmax((1, num_rows, num_cols), False, 2, 4, 1, chip),
        ):
            assert plan.looped
            if num_rows >= 2 * chip.num_processors:
                assert plan.col_splits == 1
                continue
            num_tiles = launch.cdiv(num_cols, plan.block_cols)
            per_split = launch.cdiv(num_tiles, plan.col_splits)
            assert (plan.col_splits - 1) * per_split < num_tiles, "a split without columns"
            assert plan.col_splits <= 32
            # About four programs for each processor, or as many splits as there can be of whole tiles.
            most = launch.cdiv(num_tiles, launch.cdiv(num_tiles, min(32, num_tiles)))
            assert num_rows * plan.col_splits >= 2 * chip.num_processors or plan.col_splits == most
            assert num_rows * (plan.col_splits - 1) < 4 * chip.num_processors


def test_segments_count_as_rows():
    chip = launch.CHIPS["sm_90"]
    assert launch.plan_layer_norm_rows(8, 262144, 2, True, chip).col_splits > 1
    assert launch.plan_layer_norm_rows(8, 262144, 2, True, chip, 64).col_splits == 1


def test_threads_follow_the_warps_of_the_chip():
    for chip in CHIPS:
        assert launch.plan_layer_norm_rows(4096, 8192, 2, False, chip).num_warps == 512 // chip.warp_size
        assert launch.plan_param_reduce(64, 4, chip).num_warps == 128 // chip.warp_size
        assert launch.plan_channel_merge(64, 1024, chip).num_warps == 128 // chip.warp_size


def test_number_of_rows_only_adds_programs():
    chip = launch.CHIPS["sm_90"]
    for num_cols in (256, 4096, 65536):
        plans = {launch.plan_layer_norm_rows(num_rows, num_cols, 2, False, chip) for num_rows in (512, 1024, 100000)}
        assert len(plans) == 1


@pytest.mark.parametrize(
    "name, version, expected",
    [
        ("sm_90", "3.6.0", 1), ("sm_90", "3.7.1", 1), ("sm_90", "3.8.0", 1), ("sm_90", "3.9.0", 8),
        ("sm_100", "4.0.0+git1234", 8), ("sm_80", "3.9.0", 1), ("gfx942", "3.9.0", 1),
    ],
)  # fmt: skip
def test_clusters_where_triton_compiles_them(name, version, expected):
    assert launch.cluster_limit(launch.CHIPS[name], version) == expected


def test_plans_are_remembered_until_what_they_depend_on_changes():
    sizes = (4096, 1024, 2, False, torch.device("cpu"))
    first = launch.plan_layer_norm_rows(*sizes)
    assert launch.plan_layer_norm_rows(*sizes) is first
    with launch.use_limits(layer_norm_fwd_bytes=1024):
        assert launch.plan_layer_norm_rows(*sizes).looped
    with launch.use_chip(launch.CHIPS["gfx942"]), launch.use_limits(layer_norm_fwd_bytes=1 << 20, tile_threads=64):
        assert launch.plan_layer_norm_rows(*sizes).num_warps == 1
    assert launch.plan_layer_norm_rows(*sizes) == first


def test_limits_nest():
    chip = launch.CHIPS["sm_80"]
    with launch.use_limits(max_row_splits=3), launch.use_limits(staged_bytes=5):
        limits = launch.limits_of(chip)
        assert (limits.max_row_splits, limits.staged_bytes) == (3, 5)
    assert launch.limits_of(chip) == launch.LIMITS["sm_80"]


def test_traced_sizes_are_fixed_by_a_plan():
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    num_rows = ShapeEnv().create_symintnode(sympy.Integer(4096), hint=4096)
    device = torch.device("cpu")
    plan = launch.plan_log_softmax((1, num_rows, 1024), False, 2, 4, 1, device)
    assert plan == launch.plan_log_softmax((1, 4096, 1024), False, 2, 4, 1, device)


def test_remembered_plans_are_bounded():
    chip = launch.CHIPS["sm_90"]
    for num_rows in range(_planned.MAX_REMEMBERED + 10):
        launch.plan_param_reduce(num_rows + 1, 4, chip)
    assert all(len(plans) <= _planned.MAX_REMEMBERED for plans in _planned._remembered)
    _planned.forget_plans()
