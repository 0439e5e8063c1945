"""The batch norm launchers, run in Triton's interpreter, against formulas in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.batch_norm_truth import (
    EPS,
    MOMENTUM,
    Truth,
    assert_matches,
    check_all,
    check_eval,
    check_train,
    positive,
    random,
)
from triton_kernels import _batch_norm_steps, launch
from triton_kernels._channels import MIN_SPATIAL_RUN, readable, view_channels
from triton_kernels.batch_norm import (
    batch_norm_eval_bwd,
    batch_norm_eval_fwd,
    batch_norm_eval_jvp,
    batch_norm_train_bwd,
    batch_norm_train_fwd,
    batch_norm_train_jvp,
)

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# The interpreter computes in numpy, which mentions what a GPU does silently: 0 / 0 and inf - inf.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def subsets_of(count: int) -> list[tuple[bool, ...]]:
    return list(itertools.product([False, True], repeat=count))


def channels_last(*shape: int, **options) -> torch.Tensor:
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return random(*shape, **options).contiguous(memory_format=memory_format)


# Name, maker, whether the strides collapse to the channel view, so that no copy is made.
LAYOUTS = [
    ("features", lambda: random(19, 5), True),
    ("features_transposed", lambda: random(5, 19).t(), True),
    ("features_sliced", lambda: random(19, 11)[::2, 1:8:2], True),
    ("one_feature", lambda: random(19, 1), True),
    ("sequence", lambda: random(4, 3, 33), True),
    ("sequence_short", lambda: random(9, 5, 3), True),
    ("sequence_transposed", lambda: random(4, 33, 3).transpose(1, 2), True),
    ("image", lambda: random(3, 3, 6, 7), True),
    ("image_one_sample", lambda: random(1, 3, 8, 8), True),
    ("image_one_channel", lambda: random(3, 1, 6, 7), True),
    ("image_one_pixel", lambda: random(19, 5, 1, 1), True),
    ("image_channels_last", lambda: channels_last(3, 3, 6, 7), True),
    ("image_many_channels_last", lambda: channels_last(2, 37, 2, 3), True),
    ("image_sliced_samples", lambda: random(6, 7, 6, 7)[::2, 1:4], True),
    ("image_sliced_channels_last", lambda: channels_last(3, 10, 6, 7)[:, 2:5], True),
    ("image_cropped", lambda: random(3, 3, 8, 9)[:, :, 1:7, 1:8], False),
    ("image_expanded_samples", lambda: random(1, 3, 6, 7).expand(3, -1, -1, -1), True),
    ("image_expanded_pixels", lambda: random(4, 3, 1, 1).expand(-1, -1, 6, 7), True),
    ("image_expanded_channels", lambda: random(4, 1, 6, 7).expand(-1, 3, -1, -1), True),
    ("image_channels_between", lambda: random(3, 6, 3, 7).transpose(1, 2), False),
    ("volume", lambda: random(2, 3, 4, 3, 5), True),
    ("volume_channels_last", lambda: channels_last(2, 3, 4, 3, 5), True),
]
LAYOUT_IDS = [name for name, _, _ in LAYOUTS]


@pytest.mark.parametrize("make, collapses", [layout[1:] for layout in LAYOUTS], ids=LAYOUT_IDS)
def test_layouts(make, collapses):
    x = make()
    assert (readable(x, 0) is x) == collapses
    expected = torch.nn.functional.batch_norm(x, None, None, training=True).stride()
    for output in check_all(x):
        assert output.stride() == expected


@pytest.mark.parametrize("make", [layout[1] for layout in LAYOUTS[3::5]], ids=LAYOUT_IDS[3::5])
def test_many_tiles_and_splits(use_limits, use_processors, make):
    # Fewer programs than tiles, so that each loops; more than one, so that there is something to merge.
    use_limits(channel_tile_bytes=512)
    use_processors(2)
    check_all(make())


@pytest.mark.parametrize("shape", [(8, 2, 40, 40), (3000, 3), (500, 3, 7)])
def test_more_than_one_tile(shape):
    x = random(*shape)
    view = view_channels([x], 0)
    plan = launch.plan_channel_reduction(view.sizes, view.spatial_inner, view.align, 4, CPU)
    assert plan.num_splits > 1
    check_all(x)


@pytest.mark.parametrize("other", LAYOUT_IDS[1::2])
def test_directions_of_other_layout(other):
    other_x = next(make for name, make, _ in LAYOUTS if name == other)()
    shape = other_x.shape
    x = channels_last(*shape, seed=1) if len(shape) == 4 and other_x.stride(1) != 1 else random(*shape, seed=1)
    check_all(x, y_bar=other_x, x_dot=other_x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 2, 4, 5), (11, 5)])
def test_dtypes(dtype, shape):
    for output in check_all(random(*shape, dtype=dtype)):
        assert output.dtype == dtype


@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mixed_dtypes(dtype, param_dtype):
    x = random(6, 5, 7, dtype=dtype)
    weight, bias, running_mean = (random(5, dtype=param_dtype, seed=seed) for seed in (1, 2, 3))
    params = (weight, bias, running_mean, positive(5, dtype=torch.float32))
    check_train(x, *params)
    check_eval(x, *params)


@pytest.mark.parametrize("present", subsets_of(4))
def test_absent_parameters(present):
    x = random(7, 5, 9)
    params = (random(5, seed=1), random(5, seed=2), random(5, seed=3), positive(5, seed=4))
    weight, bias, running_mean, running_var = (p if there else None for p, there in zip(params, present, strict=True))
    check_train(x, weight, bias, running_mean, running_var)
    check_eval(x, weight, bias, params[2], params[3])


@pytest.mark.parametrize("wanted", subsets_of(3))
def test_train_bwd_computes_what_is_wanted(wanted):
    x, y_bar, weight = random(7, 5, 9), random(7, 5, 9, seed=1), random(5)
    truth = Truth(x, weight)
    bars = batch_norm_train_bwd(y_bar, x, weight, *truth.stats(), 0, wanted)
    for bar, expected, is_wanted in zip(bars, truth.bars(y_bar), wanted, strict=True):
        assert_matches(bar, expected if is_wanted else torch.empty(0), torch.float32)


@pytest.mark.parametrize("wanted", subsets_of(5))
def test_eval_bwd_computes_what_is_wanted(wanted):
    x, y_bar, weight = random(7, 5, 9), random(7, 5, 9, seed=1), random(5)
    stats = (random(5, seed=2), positive(5))
    bars = batch_norm_eval_bwd(y_bar, x, weight, *stats, 0, EPS, wanted)
    for bar, expected, is_wanted in zip(bars, Truth(x, weight, 0, *stats).bars(y_bar), wanted, strict=True):
        assert_matches(bar, expected if is_wanted else torch.empty(0), torch.float32)


@pytest.mark.parametrize("present", subsets_of(3))
def test_train_jvp_of_absent_tangents(present):
    x, weight = random(7, 5, 9), random(5)
    truth = Truth(x, weight)
    dots = (random(7, 5, 9, seed=1), random(5, seed=2), random(5, seed=3))
    dots = [dot if there else None for dot, there in zip(dots, present, strict=True)]
    assert_matches(batch_norm_train_jvp(x, weight, *truth.stats(), *dots, 0), truth.y_dot(*dots), x.dtype)


@pytest.mark.parametrize("present", subsets_of(5))
def test_eval_jvp_of_absent_tangents(present):
    x, weight, stats = random(7, 5, 9), random(5), (random(5, seed=2), positive(5))
    dots = (random(7, 5, 9, seed=1), *(random(5, seed=seed) for seed in (2, 3, 4, 5)))
    dots = [dot if there else None for dot, there in zip(dots, present, strict=True)]
    y_dot = batch_norm_eval_jvp(x, weight, *stats, *dots, 0, EPS)
    assert_matches(y_dot, Truth(x, weight, 0, *stats).y_dot(*dots), x.dtype)


@pytest.mark.parametrize("batch, rest", [((3,), (6, 3)), ((3,), (3, 3, 5)), ((2, 2), (3, 2, 4, 5))])
@pytest.mark.parametrize("expanded", ["none", "params", "stats", "x", "first_dim"])
def test_batch_dims(batch, rest, expanded):
    batch_ndim, channels = len(batch), rest[1]

    def params(kind, seed, make=random):
        if expanded == kind:
            return make(channels, seed=seed).expand(*batch, channels)
        if expanded == "first_dim":
            return make(*batch[1:], channels, seed=seed).expand(*batch, channels)
        return make(*batch, channels, seed=seed)

    x = random(*rest).expand(*batch, *rest) if expanded == "x" else random(*batch, *rest)
    # The weight stays batched in one case: its groups are then strided where those of the bias are not.
    weight, bias = params("none" if expanded == "stats" else "params", 1), params("params", 2)
    running_mean, running_var = params("stats", 3), params("params", 4, positive)
    check_train(x, weight, bias, running_mean, running_var, batch_ndim)
    check_eval(x, weight, bias, running_mean, running_var, batch_ndim)


def test_batch_of_channels_last_images():
    x = torch.stack([channels_last(3, 5, 6, 7, seed=seed) for seed in range(2)])
    assert x.stride(2) == 1 or x.is_contiguous()
    check_all(x, 1)
    check_all(channels_last(6, 5, 6, 7).unflatten(0, (2, 3)), 1)


@NUMPY_WARNS
@pytest.mark.parametrize("make", [lambda: random(8, 3, 12, 12), lambda: channels_last(8, 3, 12, 12)])
def test_variance_survives_a_large_offset(make):
    x = make() + 1e4
    expected = x.double().var((0, 2, 3), correction=0)
    _, mean, rstd, _, new_running_var = batch_norm_train_fwd(x, None, None, None, torch.zeros(3), 0, 1.0, 0.0)
    torch.testing.assert_close(rstd.double() ** -2, expected, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(new_running_var.double(), expected * 1152 / 1151, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(mean.double(), x.double().mean((0, 2, 3)), rtol=2e-7, atol=0.0)


def test_variance_of_values_that_drift(use_limits):
    use_limits(channel_tile_bytes=256)
    x = random(64, 2, 20) + 100 * torch.arange(64).view(-1, 1, 1)
    _, _, rstd, *_ = batch_norm_train_fwd(x, None, None, None, None, 0, MOMENTUM, 0.0)
    torch.testing.assert_close(rstd.double() ** -2, x.double().var((0, 2), correction=0), rtol=1e-6, atol=0.0)


def test_runs_are_bitwise_equal():
    x, y_bar, weight = random(30, 2, 16, 16), random(30, 2, 16, 16, seed=1), random(2)

    def run():
        y, mean, rstd, *_ = batch_norm_train_fwd(x, weight, None, None, None, 0, MOMENTUM, EPS)
        return y, mean, rstd, *batch_norm_train_bwd(y_bar, x, weight, mean, rstd, 0, (True,) * 3)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("shape", [(0, 5), (0, 5, 4, 4), (3, 5, 0), (3, 0, 4)])
def test_no_elements(shape):
    x, channels = torch.empty(shape), shape[1]
    weight, running = torch.ones(channels), (random(channels), positive(channels))
    y, mean, rstd, *new_running = batch_norm_train_fwd(x, weight, weight, *running, 0, MOMENTUM, EPS)
    assert y.shape == x.shape
    assert torch.equal(mean, torch.zeros(channels))
    assert torch.equal(rstd, torch.zeros(channels))
    for new, old in zip(new_running, running, strict=True):
        assert torch.equal(new, old)
        assert new.data_ptr() != old.data_ptr() or not channels
    zeros = torch.zeros(channels)
    for x_bar, *bars in (
        batch_norm_train_bwd(x, x, weight, mean, rstd, 0, (True,) * 3),
        batch_norm_eval_bwd(x, x, weight, *running, 0, EPS, (True,) * 5),
    ):
        assert x_bar.shape == x.shape
        assert all(torch.equal(bar, zeros) for bar in bars)
    assert batch_norm_train_jvp(x, weight, mean, rstd, x, weight, weight, 0).shape == x.shape
    assert batch_norm_eval_fwd(x, weight, weight, *running, 0, EPS).shape == x.shape
    assert batch_norm_eval_jvp(x, weight, *running, x, weight, weight, weight, weight, 0, EPS).shape == x.shape


@NUMPY_WARNS
def test_one_element_per_channel():
    x, bias = random(1, 5), random(5, seed=1)
    y, mean, _, running_mean, running_var = batch_norm_train_fwd(
        x, None, bias, torch.zeros(5), torch.ones(5), 0, MOMENTUM, EPS
    )
    assert torch.equal(y, bias[None])
    assert torch.equal(mean, x[0])
    assert_matches(running_mean, MOMENTUM * x[0].double(), torch.float32)
    # 0 / 0, as in torch below its check.
    assert running_var.isnan().all()
    check_eval(random(1, 1), random(1), random(1), random(1), positive(1))


@NUMPY_WARNS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [lambda: random(6, 4, 5, 5), lambda: random(30, 4)])
def test_nan_and_inf_propagate_as_in_torch(make, training):
    x = make()
    x[0, 0], x[1, 1], x[2, 2] = torch.inf, torch.nan, -torch.inf
    stats = (random(4), positive(4))
    ours = batch_norm_train_fwd(x, None, None, *stats, 0, MOMENTUM, EPS)[0]
    if not training:
        ours = batch_norm_eval_fwd(x, None, None, *stats, 0, EPS)
    theirs = F.batch_norm(x, *(stat.clone() for stat in stats), training=training, momentum=MOMENTUM, eps=EPS)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("make", [lambda: random(6, 4, 5, 5), lambda: channels_last(6, 4, 5, 5), lambda: random(30, 4)])
def test_training_agrees_with_torch(make):
    x, weight, bias = make(), random(4, seed=1), random(4, seed=2)
    running_mean, running_var = random(4, seed=3), positive(4)
    y, _, _, *ours = batch_norm_train_fwd(x, weight, bias, running_mean, running_var, 0, 0.3, 1e-5)
    theirs = (running_mean.clone(), running_var.clone())
    expected = F.batch_norm(x, *theirs, weight, bias, training=True, momentum=0.3, eps=1e-5)
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(tuple(ours), theirs)


@pytest.fixture
def huge() -> torch.Tensor:
    """More than 2**31 elements of which only those that are written take memory."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    return torch.empty(2**31 + 2**12, dtype=torch.float16)


FAR_STRIDES = {
    "groups": (2**31, 8 * 3 * 20, 20, 1),
    "samples": (320, 2**31 // 3 + 1, 20, 1),
    "channels": (320, 20, 2**30 + 5, 1),
    "spatial": (8, 24, 1, 2**31 // 19 + 3),
}


@pytest.mark.parametrize("far", FAR_STRIDES)
def test_offsets_past_the_range_of_int32(monkeypatch, huge, far):
    shape = (2, 4, 3, 20)
    x = huge.as_strided(shape, FAR_STRIDES[far])
    assert sum((size - 1) * stride for size, stride in zip(shape, x.stride(), strict=True)) >= 2**31
    values = random(*shape, dtype=torch.float16)
    x.copy_(values)
    assert readable(x, 1) is x
    check_all(x, 1, y_bar=x, x_dot=x)

    # Outputs are dense and so cannot be far apart within the memory of a test; this one is made to be.
    monkeypatch.setattr(_batch_norm_steps, "new_output", lambda like, batch_ndim: x)
    stats = (random(2, 3), positive(2, 3))
    expected = Truth(values, None, 1, *stats).y()
    assert_matches(batch_norm_eval_fwd(values, None, None, *stats, 1, EPS), expected, torch.float16)


def test_plans_fill_the_processors(use_processors):
    use_processors(132)
    for sizes, inner, align in (((1, 64, 64, 56 * 56), True, 16), ((1, 1, 64, 64 * 56 * 56), False, 16)):
        plan = launch.plan_channel_reduction(sizes, inner, align, 2, CPU)
        programs = launch.cdiv(64, plan.block_channels) * plan.num_splits
        # All of them run at once: four on a processor, or three that span channels.
        most = (4 if inner else 3) * 132
        assert 0.8 * most < programs <= most
    few = launch.plan_channel_reduction((1, 2, 64, 49), True, 1, 4, CPU)
    assert few.num_splits == 1


@pytest.mark.parametrize("num_spatial", [1, 2, 7, 49, 196, 784, 3136, 12544, 1000003])
@pytest.mark.parametrize("num_samples", [1, 3, 64])
def test_tiles_are_mostly_filled(num_spatial, num_samples):
    plan = launch.plan_channel_reduction((1, num_samples, 64, num_spatial), True, 1, 4, CPU)
    samples = launch.cdiv(num_samples, plan.block_samples) * plan.block_samples
    spatial = launch.cdiv(num_spatial, plan.block_spatial) * plan.block_spatial
    assert samples * spatial < 2 * launch.next_power_of_2(num_samples) * num_spatial


def test_short_spatial_runs_take_tiles_across_channels():
    assert not view_channels([random(9, 5, MIN_SPATIAL_RUN - 1)], 0).spatial_inner
    assert view_channels([random(9, 5, MIN_SPATIAL_RUN)], 0).spatial_inner
