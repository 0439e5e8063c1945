"""Numbers that cost digits or are not finite, on every plan; and the order in which kernels sweep what they read."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import primitives as pr
from perf.calls import Call, random
from perf.ops import CASES
from perf.ops.batch_norm import BatchNorm
from perf.ops.layer_norm import LayerNorm
from perf.ops.log_softmax import LogSoftmax
from primitives.kernels.batch_norm.batch_norm import batch_norm_train_fwd
from primitives.kernels.norms.layer_norm import layer_norm_fwd
from primitives.kernels.softmax.log_softmax import log_softmax_bwd, log_softmax_fwd, log_softmax_jvp
from tests.kernels.calls import ROW_PLANS
from tests.kernels.interpreting import watched
from tests.kernels.truth import EPS, check_values, expected
from tests.properties import check_not_finite

INF, NAN, TINY = math.inf, math.nan, torch.finfo(torch.float32).tiny
# The interpreter computes in numpy, which mentions what a GPU does silently: 0 / 0 and inf - inf.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.usefixtures("on_device"),
]


@pytest.fixture(params=ROW_PLANS)
def plan(request: pytest.FixtureRequest, use_limits: Callable[..., None]) -> str:
    """Rows of more than 16 columns are those of each of the plans."""
    use_limits(**ROW_PLANS[request.param])
    return request.param


@pytest.fixture(
    params=[(0, "in registers"), (1, "in registers"), (0, "swept"), (1, "swept"), (0, "shared"), (1, "shared")]
)
def dim(request: pytest.FixtureRequest, use_limits: Callable[..., None]) -> int:
    """Either dim of a matrix, whose rows are those of each of the plans of log-softmax."""
    use_limits(**ROW_PLANS[request.param[1]])
    return request.param[0]


def test_nan_and_inf_stay_in_their_row(plan):
    """Each operand has one, in a row of its own, in the last column of the last tile."""
    rows = LayerNorm.draw((5, 33))
    for number, name in enumerate(("x", "y_bar", "x_dot", "y_bar_dot")):
        getattr(rows, name)[number, 32] = NAN if number % 2 else INF
    for call in rows.calls():
        for result, exact in zip(call.results(), expected(call), strict=True):
            assert torch.equal(result.isfinite(), exact.value.isfinite())


@pytest.mark.parametrize("mode", ["fwd", "fwd_jvp"])
def test_large_common_offset_costs_no_digits(plan, mode):
    rows = LayerNorm.draw((2, 150)).change(weight=None, bias=None, weight_dot=None, bias_dot=None)
    call = rows.change(x=rows.x + 1e4, x_dot=rows.x_dot + 1).call(mode)
    # The mean is rounded once, to 2**-10 here, of split rows that of each slice too; a variance from a difference of
    # squares would have no digit right.
    for result, (exact, _), atol in zip(call.results(), expected(call), (6e-4, 5e-4, 5e-5, 2e-4), strict=False):
        torch.testing.assert_close(result.double(), exact, rtol=0.0, atol=atol)


@pytest.mark.parametrize("mode", ["fwd", "fwd_jvp"])
def test_constant_rows_are_normalized_to_zero(plan, mode):
    x = torch.linspace(-9, 1000.1, 16).unsqueeze(1).expand(16, 75).contiguous()
    call = LayerNorm.draw(x.shape).change(x=x, weight=None, bias=None).call(mode)
    # As small as models have it: a mean that is off in its last place would be off by most of a standard deviation.
    y, mean, *_ = call.launcher(*(1e-12 if arg is EPS else arg for arg in call.args))
    assert torch.equal(y, torch.zeros_like(x))
    assert torch.equal(mean, x[:, 0])


def test_large_means_of_cotangent_and_tangent_cost_no_digits_of_their_product(plan):
    rows = LayerNorm.draw((1, 80), torch.float64).change(weight=None, weight_dot=None, bias_dot=None)
    moved = rows.change(y_bar=rows.y_bar + 1e4, x_dot=rows.x_dot + 1e4)
    # Constants do not matter to the derivative for x; without them, autograd does not lose digits either.
    rows = rows.change(y_bar=moved.y_bar - 1e4, x_dot=moved.x_dot - 1e4)
    # A rounding error of 2**-53 of 1e4 is allowed, one of 2**-53 of the product of two such means (1e-8) is not.
    results = [each.call("double_backward").results()[1] for each in (moved, rows)]
    torch.testing.assert_close(*results, rtol=0.0, atol=2e-11)


def test_idle_lanes_of_huge_constant_rows(plan):
    # mean * rstd overflows, and 21 columns leave idle lanes, where x_hat must not become infinite.
    zero = LayerNorm.draw((1, 21)).change(x=torch.zeros(1, 21))
    statistics = {"mean": torch.tensor([2.0**126]), "rstd": torch.tensor([EPS**-0.5])}
    huge = zero.change(x=torch.full((1, 21), 2.0**126), **statistics)
    for mode in ("jvp", "bwd", "double_backward", "bwd_jvp"):
        for result, plain in zip(huge.call(mode).results(), zero.call(mode).results(), strict=True):
            torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("interpreter")
def test_rstd_from_a_coarse_root_that_flushes_subnormal_numbers(monkeypatch):
    """As the approximation of GPUs does, whose last two bits are wrong."""
    root = InterpreterBuilder.create_rsqrt

    def coarse(builder: InterpreterBuilder, x: TensorHandle) -> TensorHandle:
        handle = root(builder, TensorHandle(np.where(x.data < TINY, 0, x.data), x.dtype))
        return TensorHandle(np.where(handle.data < TINY, 0, handle.data * (1 + 2.0**-22)).astype(np.float32), x.dtype)

    monkeypatch.setattr(InterpreterBuilder, "create_rsqrt", coarse)
    # Rows of two values that lie as far from their mean; the last one's squares overflow.
    deviation = torch.tensor([0.0, 2.0**-70, 2.0**-62, 2.0**63, 2.0**64, *random(40).abs()])
    _, _, rstd = layer_norm_fwd(torch.stack([deviation, -deviation], 1), None, None, 1, 0, 0.0)
    exact = torch.where(deviation == 2.0**64, 0.0, deviation.double().reciprocal())
    exact[:2] = INF
    torch.testing.assert_close(rstd.double(), exact, rtol=2.0**-23, atol=0.0)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", ["create_fdiv", "create_sqrt"])
def test_statistics_of_channels_take_no_approximation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/` and `sqrt` of GPUs are wrong in the last bits; here they are so in more."""
    exact = getattr(InterpreterBuilder, name)

    def coarse(builder: InterpreterBuilder, *values: TensorHandle) -> TensorHandle:
        handle = exact(builder, *values)
        return TensorHandle((handle.data * (1 + 2.0**-10)).astype(handle.data.dtype), handle.dtype)

    monkeypatch.setattr(InterpreterBuilder, name, coarse)
    for call in BatchNorm.draw((40, 5)).calls():
        check_values(call)


# Images first and last channels, and features.
SHAPES = {"first": (8, 4, 12, 12), "last": (8, 4, 12, 12), "features": (300, 4)}


@pytest.mark.parametrize("layout", SHAPES)
def test_variance_survives_a_large_offset_and_a_drift(layout, use_limits):
    x = random(*SHAPES[layout])
    x = x.contiguous(memory_format=torch.channels_last) if layout == "last" else x
    dims = tuple(axis for axis in range(x.dim()) if axis != 1)
    drifting = x + 100 * torch.arange(len(x)).view(-1, *[1] * (x.dim() - 1))
    for moved, limits, rtol in ((x + 1e4, {}, 1e-5), (drifting, {"channel_tile_bytes": 256}, 1e-6)):
        use_limits(**limits)
        var, count = moved.double().var(dims, correction=0), x.numel() // 4
        _, mean, rstd, _, running_var = batch_norm_train_fwd(moved, None, None, None, torch.zeros(4), 0, 1.0, 0.0)
        torch.testing.assert_close(rstd.double() ** -2, var, rtol=rtol, atol=0.0)
        torch.testing.assert_close(running_var.double(), var * count / (count - 1), rtol=rtol, atol=0.0)
        torch.testing.assert_close(mean.double(), moved.double().mean(dims), rtol=2e-7, atol=0.0)


def far_from_its_beginning(num_rows: int, num_cols: int) -> Tensor:
    """Rows whose first columns, about which sweeps sum, lie far from the mean, and both far from zero.

    Integers with an integer for a mean: no digit of it is lost.
    """
    x = (8 * random(num_rows, num_cols)).round()
    x[:, :16] += 64
    x[:, -1] -= x.sum(1) % num_cols
    return x + 2**16


def test_value_and_tangent_of_rows_far_from_their_anchor(plan):
    """A tangent with a large mean asks most of its product with x."""
    x, x_dot = far_from_its_beginning(3, 80), random(3, 80, seed=1) + 100
    check_values(LayerNorm.draw((3, 80)).change(x=x, x_dot=x_dot).call("fwd_jvp"))


@pytest.mark.parametrize("processors", [1, 4])
def test_value_and_tangent_of_channels_far_from_their_anchor(processors, use_limits, use_processors):
    use_limits(channel_tile_bytes=256)
    use_processors(processors)
    # Of one program, or of four: each has a mean that is an integer.
    x, x_dot = far_from_its_beginning(12, 80).view(3, 320).T, random(320, 3, seed=1) + 100
    features = BatchNorm.draw((320, 3)).change(x=x, x_dot=x_dot, running_mean=None, running_var=None)
    check_values(features.call("train_fwd_jvp"))


def test_one_element_per_channel():
    features = BatchNorm.draw((1, 5))
    y, mean, _, _, running_var = features.call("train_fwd").results()
    assert torch.equal(y, features.bias[None])
    assert torch.equal(mean, features.x[0])
    # 0 / 0, as in torch below its check.
    assert running_var.isnan().all()
    check_values(features.change(running_var=None).call("train_fwd_jvp"))
    for call in features.calls(*(mode for mode in BatchNorm.modes() if not mode.startswith("train_fwd"))):
        check_values(call)


def test_infinite_operands_without_a_factor_do_not_spread():
    images = BatchNorm.draw((4, 3, 5)).change(x_dot=None, weight_dot=None, y_bar=torch.full((4, 3, 5), INF))
    y_bar_bar, x_bar, *_ = images.call("double_backward", (True, True, False, False, False, False)).results()
    assert torch.equal(x_bar, torch.zeros(4, 3, 5))
    assert torch.equal(y_bar_bar, images.bias_dot.view(3, 1).expand(4, 3, 5))
    assert images.call("bwd_jvp").results()[1].isfinite().all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_nan_and_infinity_propagate_as_in_torch(case, value, device):
    with pr.use_backend("triton"):
        check_not_finite(case, value, device)


def test_large_offsets_cost_log_softmax_no_digits(dim):
    x = random(*((33, 3) if dim == 0 else (3, 33)), seed=1) + 1e4
    # In ascending order every tile moves the running maximum, in descending order only the first does.
    for ordered in (x.sort(dim).values, x.sort(dim, descending=True).values):
        check_values(Call(log_softmax_fwd, (ordered, dim, None)))


# Numpy, by which the interpreter finds the maximum of a group of columns, says where all of them are NaN.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_infinities_and_nans_of_log_softmax_as_in_torch(dim):
    rows = torch.zeros(9, 37)
    # Whole tiles of -inf at either end, a row of them, and what else is not finite in one tile or two.
    rows[1, :], rows[2, 5:], rows[3, :30], rows[4, 33], rows[5, 7] = -INF, -INF, -INF, INF, NAN
    rows[6, :3], rows[6, 3:36] = NAN, -INF
    rows[7, 0], rows[7, 36] = INF, -INF
    rows[8, :] = INF
    x = rows if dim == 1 else rows.T.contiguous()
    y = torch.log_softmax(x, dim)
    torch.testing.assert_close(log_softmax_fwd(x, dim, None), y, equal_nan=True)
    v = random(*x.shape)
    v.select(1 - dim, 0)[3] = NAN
    v.select(1 - dim, 2)[4] = INF
    # A row some of whose probabilities are zero, and an infinity among its cotangents.
    v.select(1 - dim, 3)[36] = -INF
    theirs = torch._log_softmax_backward_data(v, y, dim, x.dtype)
    torch.testing.assert_close(log_softmax_bwd(v, y, dim, x.dtype), theirs, equal_nan=True)
    formula = v.double() - (y.double().exp() * v.double()).sum(dim, keepdim=True)
    torch.testing.assert_close(log_softmax_jvp(v, y, dim), formula.float(), equal_nan=True)


def test_infinities_and_nans_of_log_softmax_as_in_the_formula(dim):
    rows = LogSoftmax.draw((8, 37), 1)
    rows.y[0], rows.y[1, 7] = NAN, -INF
    rows.y_bar[1, 7], rows.y_bar[2, 36] = INF, NAN
    rows.x_dot[3, 5], rows.x_dot[4, 33], rows.x_dot[1, 7] = INF, NAN, -INF
    rows.y_dot[5, 0], rows.y_dot[6, 35] = -INF, NAN
    if dim == 0:
        fields = {name: value.T.contiguous() for name, value in vars(rows).items() if hasattr(value, "T")}
        rows = rows.change(**fields, dim=0)
    for call in rows.calls("double_backward", "bwd_jvp"):
        check_values(call)


def test_classes_of_probability_zero(dim):
    x = random(3, 37, dtype=torch.float64)
    x[0, 3:], x[1, :34], x[2, 35] = -INF, -INF, -INF
    y = torch.log_softmax(x, 1).float()
    y = y if dim == 1 else y.T.contiguous()
    rows, zero = LogSoftmax.draw(y.shape, dim).change(y=y), y == -INF
    y_bar_bar, output_bar, x_dot_bar = check_values(rows.call("double_backward"))
    assert (output_bar[zero] == 0).all()
    assert torch.equal(x_dot_bar[zero], rows.y_bar[zero])
    assert y_bar_bar.isfinite().all()
    (x_bar_dot,) = check_values(rows.change(y_bar_dot=None).call("bwd_jvp"))
    # A masked class of a loss has no gradient at all.
    (x_bar,) = rows.change(y_bar=rows.y_bar.masked_fill(zero, 0.0)).call("bwd").results()
    assert (x_bar_dot[zero] == 0).all()
    assert (x_bar[zero] == 0).all()


# The order of sweeps: what was read last is in a cache.


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("plan", ["swept", "shared"])
@pytest.mark.parametrize("mode", [LayerNorm.draw((2, 48)).call("fwd"), LogSoftmax.draw((2, 48), 1).call("fwd")])
def test_the_second_sweep_of_rows_goes_back(plan, mode, use_limits):
    use_limits(**ROW_PLANS[plan])
    with watched() as launches:
        mode.results()
    x = mode.args[0]
    loads = [load.within(x.data_ptr(), x.data_ptr() + x.nbytes) for one in launches for load in one.loads]
    tiles = [int(load[0] - x.data_ptr()) // (16 * x.itemsize) for load in loads if load.size]
    # One program makes both sweeps of its row, several that share rows make the first one of all rows before.
    assert [one.num_programs for one in launches] == ([2] if plan == "swept" else [6, 6])
    # The tile at either turn is read twice.
    sweeps = [{0, 1, 2}, {3, 4, 5}] if plan == "swept" else [{0, 1, 2, 3, 4, 5}]
    ups = [sorted(sweep.intersection(tiles)) for sweep in sweeps]
    assert all(len(up) > 1 for up in ups)
    assert [tile for tile, _ in itertools.groupby(tiles)] == [tile for up in ups for tile in (*up, *up[-2::-1])]


@pytest.mark.usefixtures("interpreter")
# Three or four programs for each of two processors run at once.
@pytest.mark.parametrize(
    "mode, is_last, resident", [("train_fwd", False, 6), ("train_bwd", True, 6), ("double_backward", False, 8)]
)
def test_transform_of_images_begins_in_the_cache(mode, is_last, resident, use_limits, use_processors):
    """It reads first the third that the reduction before it, whose programs run in waves, has read last."""
    use_limits(channel_tile_bytes=1024, channel_transform_programs=1)
    use_processors(2)
    images = BatchNorm.draw((16, 16, 8, 8) if is_last else (16, 4, 16, 16))
    x = images.x.contiguous(memory_format=torch.channels_last) if is_last else images.x
    with watched() as launches:
        images.change(x=x, y_bar=torch.zeros_like(x), x_dot=torch.zeros_like(x)).call(mode).results()

    def lines(launch: int) -> list[list[list[int]]]:
        """Lines of a cache that each load of x touches, for each program in the order in which programs start."""
        programs: dict[tuple[int, ...], list[list[int]]] = {}
        for load in launches[launch].loads:
            offsets = load.within(x.data_ptr(), x.data_ptr() + x.nbytes) - x.data_ptr()
            # One element of each channel says where its sums begin; a load of a whole tile is longer.
            if len(touched := sorted(set(offsets // 128))) > 1:
                programs.setdefault(load.program[1::-1], []).append(touched)
        return [programs[number] for number in sorted(programs)]

    reduction = lines(0)
    waves = [reduction[start : start + resident] for start in range(0, len(reduction), resident)]
    steps = [step for wave in waves for step in itertools.zip_longest(*wave, fillvalue=())]
    at_once = [line for step in steps for load in step for line in load]
    in_turn = [line for program in lines(2) for load in program for line in load]
    before, after = list(dict.fromkeys(at_once[::-1])), list(dict.fromkeys(in_turn))
    third = len(before) // 3
    kept = set(before[:third])
    assert len(kept & set(after[:third])) > 0.75 * third
    assert len(kept & set(after[-third:])) < 0.25 * third
