"""The batch norm launchers of first and second order, in Triton's interpreter, against float64 formulas.

Each of their kernels and layouts of plans meets its truth in `test_every_launcher`; here is what it does not vary.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.calls import DTYPES, BatchNorm, far_apart, pairwise, positive, random
from tests.kernels.interpreting import watched
from tests.kernels.truth import EPS, MOMENTUM, Exact, assert_close, check_values, expected
from triton_kernels import _batch_norm_steps, launch
from triton_kernels._channels import MIN_SPATIAL_RUN, readable, view_channels
from triton_kernels.batch_norm import batch_norm_eval_fwd, batch_norm_train_fwd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kernels.interpreting import Accesses, Launch

CPU = torch.device("cpu")
FULL_SIZE = ("x", "y_bar", "x_dot", "y_bar_dot")
# The interpreter computes in numpy, which mentions what a GPU does silently: 0 / 0 and inf - inf.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def channels_last(*shape: int, **options) -> torch.Tensor:
    return as_channels_last(random(*shape, **options))


def as_channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


LAYOUTS = {
    "features_sliced": lambda seed: random(19, 11, seed=seed)[::2, 1:8:2],
    "sequence_short": lambda seed: random(9, 5, 3, seed=seed),
    "sequence_transposed": lambda seed: random(4, 33, 3, seed=seed).transpose(1, 2),
    "image_one_sample": lambda seed: random(1, 3, 8, 8, seed=seed),
    "image_one_channel": lambda seed: random(3, 1, 6, 7, seed=seed),
    "image_one_pixel": lambda seed: random(19, 5, 1, 1, seed=seed),
    "image_many_channels_last": lambda seed: channels_last(2, 37, 2, 3, seed=seed),
    "image_sliced_channels_last": lambda seed: channels_last(3, 10, 6, 7, seed=seed)[:, 2:5],
    "image_cropped": lambda seed: random(3, 3, 8, 9, seed=seed)[:, :, 1:7, 1:8],
    "image_expanded_pixels": lambda seed: random(4, 3, 1, 1, seed=seed).expand(-1, -1, 3, 4),
    "image_channels_between": lambda seed: random(3, 6, 3, 7, seed=seed).transpose(1, 2),
    "volume_channels_last": lambda seed: channels_last(2, 3, 4, 3, 5, seed=seed),
}
# No channel view: the kernels get a copy.
COPIED = {"image_cropped", "image_channels_between"}


def in_layout(name: str) -> BatchNorm:
    """All operands of full size in a layout."""
    full_size = {operand: LAYOUTS[name](seed) for seed, operand in enumerate(FULL_SIZE)}
    return BatchNorm.draw(full_size["x"].shape).change(**full_size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    images = in_layout(layout)
    assert (readable(images.x, 0) is images.x) == (layout not in COPIED)
    strides = F.batch_norm(images.x, None, None, training=True).stride()
    # Evaluation has the transforms of training.
    modes = BatchNorm.MODES if layout.endswith("channels_last") else ("train_fwd", "train_bwd", "pairing", "bwd_jvp")
    for call in images.calls(*modes):
        for result in check_values(call):
            if result.shape == images.x.shape:
                assert result.stride() == strides


@pytest.mark.parametrize(
    "layout", ["features_sliced", "sequence_transposed", "image_sliced_channels_last", "image_cropped"]
)
def test_directions_of_another_layout(layout: str) -> None:
    images = in_layout(layout)
    shape, is_last = images.x.shape, images.x.dim() == 4 and images.x.stride(1) != 1
    images = images.change(x=channels_last(*shape, seed=9) if is_last else random(*shape, seed=9))
    modes = ("train_jvp", "train_bwd", "eval_jvp", "eval_bwd", "pairing", "bwd_jvp")
    for call in images.calls(*modes):
        check_values(call)
    # Of one operand alone.
    for call in images.change(y_bar=images.x, y_bar_dot=images.x).calls("pairing", "bwd_jvp"):
        check_values(call)


def test_more_than_one_tile() -> None:
    images = BatchNorm.draw((500, 3, 7))
    view = view_channels([images.x], 0)
    assert launch.plan_channel_reduction(view.sizes, view.spatial_inner, view.align, 4, CPU).num_splits > 1
    for call in images.calls("train_fwd", "train_bwd"):
        check_values(call)


# Parameters narrower and wider than the arithmetic.
@pytest.mark.parametrize(
    "dtype, param_dtype", [*zip(DTYPES, (torch.bfloat16, torch.float64) * 2, strict=True)], ids=str
)
def test_dtypes(dtype: torch.dtype, param_dtype: torch.dtype) -> None:
    shape = (6, 2, 4, 5) if param_dtype == torch.bfloat16 else (11, 5)
    for call in BatchNorm.draw(shape, dtype, param_dtype).calls():
        check_values(call)


def test_what_is_given_and_wanted() -> None:
    """Any two of the operands that may be absent and the results meet in all four ways."""
    images = BatchNorm.draw((3, 3, 9))

    for choice in pairwise(10):
        check_values(images.given(choice[:4], "weight", "x_dot", "weight_dot", "bias_dot").call("pairing", choice[4:]))
    for choice in pairwise(7):
        check_values(images.given(choice[:4], "weight", "y_bar_dot", "x_dot", "weight_dot").call("bwd_jvp", choice[4:]))
    for choice in pairwise(6):
        check_values(images.given(choice[:1], "weight").call("eval_bwd", choice[1:]))
        names = ("weight", "x_dot", "weight_dot", "bias_dot", "running_mean_dot", "running_var_dot")
        check_values(images.given(choice, *names).call("eval_jvp"))
    for choice in pairwise(4):
        check_values(images.given(choice[:1], "weight").call("train_bwd", choice[1:]))
        check_values(images.given(choice, "weight", "x_dot", "weight_dot", "bias_dot").call("train_jvp"))
        check_values(images.given(choice, "weight", "bias", "running_mean", "running_var").call("train_fwd"))
        check_values(images.given(choice[:2], "weight", "bias").call("eval_fwd"))


@pytest.mark.parametrize(
    "batch, rest, expanded",
    [((3,), (6, 3), "params"), ((2, 2), (3, 2, 3, 5), "stats"), ((3,), (6, 3), "x"), ((2, 2), (3, 2, 3, 5), "none")],
)
def test_groups(batch: tuple[int, ...], rest: tuple[int, ...], expanded: str) -> None:
    images = BatchNorm.draw((*batch, *rest), batch_ndim=len(batch))
    # Of the parameters, some stay batched, so that their groups are strided where those of the others are not.
    names = {"params": ("bias", "weight_dot", "running_var"), "stats": ("running_mean", "running_var"), "x": ("x",)}
    first = (0,) * len(batch)
    chosen = {name: getattr(images, name) for name in names.get(expanded, ())}
    images = images.change(**{name: value[first].expand(value.shape) for name, value in chosen.items()})
    for call in images.calls():
        check_values(call)


def test_groups_of_channels_last_images() -> None:
    stacked = torch.stack([channels_last(3, 5, 6, 7, seed=seed) for seed in range(2)])
    for x in (stacked, channels_last(6, 5, 6, 7).unflatten(0, (2, 3))):
        for call in BatchNorm.draw(x.shape, batch_ndim=1).change(x=x).calls("train_fwd", "train_bwd", "pairing"):
            check_values(call)


@NUMPY_WARNS
@pytest.mark.parametrize("make", [lambda: random(8, 3, 12, 12), lambda: channels_last(8, 3, 12, 12)])
def test_variance_survives_a_large_offset(make: Callable[[], torch.Tensor]) -> None:
    x = make() + 1e4
    var = x.double().var((0, 2, 3), correction=0)
    _, mean, rstd, _, new_running_var = batch_norm_train_fwd(x, None, None, None, torch.zeros(3), 0, 1.0, 0.0)
    torch.testing.assert_close(rstd.double() ** -2, var, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(new_running_var.double(), var * 1152 / 1151, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(mean.double(), x.double().mean((0, 2, 3)), rtol=2e-7, atol=0.0)


def test_variance_of_values_that_drift(use_limits: Callable[..., None]) -> None:
    use_limits(channel_tile_bytes=256)
    x = random(64, 2, 20) + 100 * torch.arange(64).view(-1, 1, 1)
    _, _, rstd, *_ = batch_norm_train_fwd(x, None, None, None, None, 0, MOMENTUM, 0.0)
    torch.testing.assert_close(rstd.double() ** -2, x.double().var((0, 2), correction=0), rtol=1e-6, atol=0.0)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom.*")
@pytest.mark.parametrize("shape", [(0, 5), (0, 5, 4, 4), (3, 5, 0), (3, 0, 4)])
def test_no_elements(shape: tuple[int, ...]) -> None:
    images = BatchNorm.draw(shape)
    y, mean, rstd, *new_running = images.call("train_fwd").results()
    zeros = torch.zeros(shape[1])
    assert y.shape == shape
    assert torch.equal(mean, zeros)
    assert torch.equal(rstd, zeros)
    for new, old in zip(new_running, (images.running_mean, images.running_var), strict=True):
        assert torch.equal(new, old)
        assert new.data_ptr() != old.data_ptr() or not shape[1]
    for call in images.calls(*list(BatchNorm.MODES)[1:]):
        for result in call.results():
            assert result.shape == shape or torch.equal(result, zeros)


@NUMPY_WARNS
def test_one_element_per_channel() -> None:
    features = BatchNorm.draw((1, 5))
    y, mean, _, running_mean, running_var = features.call("train_fwd").results()
    assert torch.equal(y, features.bias[None])
    assert torch.equal(mean, features.x[0])
    exact = (1 - MOMENTUM) * features.running_mean.double() + MOMENTUM * features.x[0].double()
    assert_close(running_mean, Exact(exact, torch.float32), torch.float32)
    # 0 / 0, as in torch below its check.
    assert running_var.isnan().all()
    for call in BatchNorm.draw((1, 1)).calls(*list(BatchNorm.MODES)[1:]):
        check_values(call)


def test_infinite_operands_without_a_factor_do_not_spread() -> None:
    images = BatchNorm.draw((4, 3, 5)).change(x_dot=None, weight_dot=None, y_bar=torch.full((4, 3, 5), torch.inf))
    y_bar_bar, x_bar, *_ = images.call("pairing", (True, True, False, False, False, False)).results()
    assert torch.equal(x_bar, torch.zeros(4, 3, 5))
    assert torch.equal(y_bar_bar, images.bias_dot.view(3, 1).expand(4, 3, 5))
    assert images.call("bwd_jvp").results()[1].isfinite().all()


@NUMPY_WARNS
@pytest.mark.parametrize("make", [lambda: random(6, 4, 5, 5), lambda: random(30, 4)])
def test_nan_and_inf_propagate_as_in_torch(make: Callable[[], torch.Tensor]) -> None:
    x, stats = make(), (random(4), positive(4))
    x[0, 0], x[1, 1], x[2, 2] = torch.inf, torch.nan, -torch.inf
    ours = batch_norm_train_fwd(x, None, None, *stats, 0, MOMENTUM, EPS)[0]
    evaluated = batch_norm_eval_fwd(x, None, None, *stats, 0, EPS)
    for y, training in ((ours, True), (evaluated, False)):
        theirs = F.batch_norm(x, *(stat.clone() for stat in stats), training=training, momentum=MOMENTUM, eps=EPS)
        torch.testing.assert_close(y, theirs, equal_nan=True)


FAR_STRIDES = {
    "groups": (2**31, 8 * 3 * 20, 20, 1),
    "samples": (320, 2**31 // 3 + 1, 20, 1),
    "channels": (320, 20, 2**30 + 5, 1),
    "spatial": (8, 24, 1, 2**31 // 19 + 3),
}


@pytest.mark.parametrize("far", FAR_STRIDES)
def test_offsets_past_two_to_the_31(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = BatchNorm.draw((2, 4, 3, 20), torch.float16, batch_ndim=1)
    images = images.change(**{name: far_apart(getattr(images, name), FAR_STRIDES[far]) for name in FULL_SIZE})
    assert readable(images.x, 1) is images.x
    for call in images.calls("train_bwd", "eval_jvp", "pairing", "bwd_jvp"):
        check_values(call)
    # Results are dense and so cannot be far apart within the memory of a test; these are made to be.
    for mode in ("train_fwd", "eval_fwd"):
        call = images.call(mode)
        exact, y = expected(call)[0], far_apart(torch.empty_like(images.x), FAR_STRIDES[far])
        monkeypatch.setattr(_batch_norm_steps, "new_output", lambda like, batch_ndim, y=y: y)
        assert_close(call.results()[0], exact, torch.float32)


# Plans.


def test_tiles_are_mostly_filled() -> None:
    for num_samples, num_spatial in itertools.product((1, 3, 64), (1, 2, 7, 49, 196, 784, 3136, 12544, 1000003)):
        plan = launch.plan_channel_reduction((1, num_samples, 64, num_spatial), True, 1, 4, CPU)
        samples = launch.cdiv(num_samples, plan.block_samples) * plan.block_samples
        spatial = launch.cdiv(num_spatial, plan.block_spatial) * plan.block_spatial
        assert samples * spatial < 2 * launch.next_power_of_2(num_samples) * num_spatial


def test_short_spatial_runs_take_tiles_across_channels() -> None:
    assert not view_channels([random(9, 5, MIN_SPATIAL_RUN - 1)], 0).spatial_inner
    assert view_channels([random(9, 5, MIN_SPATIAL_RUN)], 0).spatial_inner


# Of the operands, that much is in a cache when a reduction ends: what it has read last.
CACHE_SHARE = 1 / 3
LINE_BYTES = 128


def lines_by_program(launch: Launch, tensors: list[torch.Tensor]) -> list[list[list[tuple[int, int]]]]:
    """The lines of `tensors` that each load touches, for each program, in the order in which programs start."""
    programs: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
    for load in launch.loads:
        # As if each tensor began where a line does, as it would on a GPU.
        lines = {line for number, tensor in enumerate(tensors) for line in _lines(load, tensor, number)}
        # One element of each channel says where its sums begin; a load of a whole tile is longer.
        if len(lines) > 1:
            programs.setdefault(load.program[1::-1], []).append(sorted(lines))
    return [programs[number] for number in sorted(programs)]


def _lines(load: Accesses, tensor: torch.Tensor, number: int) -> list[tuple[int, int]]:
    start = tensor.data_ptr()
    addresses = load.within(start, start + tensor.nbytes).addresses
    return [(number, line) for line in ((addresses - start) // LINE_BYTES).tolist()]


@pytest.mark.parametrize("mode, is_last", [("train_fwd", False), ("train_bwd", True), ("pairing", False)])
def test_transform_begins_in_the_cache(
    mode: str, is_last: bool, use_limits: Callable[..., None], use_processors: Callable[[int], None]
) -> None:
    """It reads first what the reduction before it, whose programs all run at once, has read last."""
    use_limits(channel_tile_bytes=1024, channel_transform_programs=1)
    use_processors(2)
    images = BatchNorm.draw((8, 16, 8, 8), arrange=as_channels_last) if is_last else BatchNorm.draw((8, 4, 16, 16))
    with watched() as launches:
        images.call(mode).results()
    tensors = [images.x, images.y_bar, images.x_dot]
    reduction, transform = (lines_by_program(one, tensors) for one in (launches[0], launches[2]))
    at_once = [load or [] for step in itertools.zip_longest(*reduction) for load in step]
    in_turn = [load for program in transform for load in program]
    # Without repetitions, by the last and by the first time.
    before = list(dict.fromkeys(line for load in at_once[::-1] for line in load))
    after = list(dict.fromkeys(line for load in in_turn for line in load))
    num_kept = int(len(before) * CACHE_SHARE)
    kept = set(before[:num_kept])
    assert len(kept & set(after[:num_kept])) > 0.75 * num_kept
    assert len(kept & set(after[-num_kept:])) < 0.25 * num_kept
