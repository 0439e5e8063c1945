"""Kernels of ATen's on the CPU, and the formulas beyond what these add up well: how much long sums may lose.

That they compute what the reference does is for the records to show (`test_records`). Numbers that are alike are all
rounded to the same side, so n of them lose up to n * 2**-26 of their sum; numbers of both signs, of which records are
made, lose next to nothing. Each length up to which ATen adds up by itself is tested at itself, where the error is the
one that is stated beside it, and one beyond.
"""

import dataclasses
import itertools
from typing import NamedTuple

import pytest
import torch

import primitives as pr
from perf.ops.batch_norm import BATCH_NORM, BATCH_NORM_EVAL
from perf.ops.layer_norm import LAYER_NORM
from perf.ops.log_softmax import LOG_SOFTMAX
from perf.ops.samples import LAYOUTS, Sample, arranged, normal
from perf.ops.softmax import SOFTMAX
from primitives._core import registered_primitives
from primitives.ops.norms.channels import ChannelOptions
from primitives.ops.norms.layer_norm import NormOptions
from tests.call_properties import check_call
from tests.properties import recorded_calls, second_order
from tests.support import assert_close

CPU = torch.device("cpu")
# Of 512 numbers: all that a sum beyond a limit may lose.
SHORT = 8e-6
# Vectors of other processors have half the lanes of AVX2, so sums along a line are twice as long there.
OF_LANES = 1 if torch.backends.cpu.get_cpu_capability().startswith("AVX") else 2
CHANNELS = 8
EPS = 1e-5
# Sums of some numbers are rounded worse than those of others.
CONSTANTS = 1 + torch.rand(CHANNELS, generator=torch.Generator().manual_seed(1))
every_kind = pytest.mark.parametrize("kind", ["one sign", "x_hat"])


@pytest.fixture(autouse=True)
def on_the_cpu(device):
    """These kernels exist for CPU tensors alone."""
    if device.type != "cpu":
        pytest.skip("kernels for CPU tensors")


def is_served(primitive, args):
    """Whether the kernel itself, not the reference in its place, returns the outputs."""
    return primitive.rules.kernels["cpu"](*args) is not None


def calls(case, sample, dtype):
    """Calls of all orders, with the primitives that they are of; value and tangent come from the kernels of two."""
    primitives = {p.overload: p for p in registered_primitives().values()}
    made = second_order(case, sample, dtype, CPU, case.perturbable(sample))[1]
    return [(p, call) for call in made if (p := primitives.get(call.overload)) not in (case.fwd_jvp, None)]


@pytest.mark.parametrize("case", [LAYER_NORM, BATCH_NORM, LOG_SOFTMAX, SOFTMAX], ids=lambda case: case.name)
def test_kernels_serve_every_layout(case):
    """Calls of all orders, with and without parameters; dtypes take turns."""
    dtypes = itertools.cycle([torch.bfloat16, torch.float32, torch.float32, torch.bfloat16])
    for layout in LAYOUTS:
        shape = (6, 2, 5) if layout == "expanded" and case is BATCH_NORM else (6, *case.small.shape[1:])
        for absent in ((), tuple(name for name in ("weight", "bias") if name in case.arguments)):
            sample = dataclasses.replace(case.small, shape=shape, layout=layout, absent=absent)
            for primitive, call in calls(case, sample, next(dtypes)):
                assert is_served(primitive, call.args), f"{call}, {layout}"


@pytest.mark.parametrize("case", [LAYER_NORM, BATCH_NORM], ids=lambda case: case.name)
@pytest.mark.parametrize("value", [1e4, float("nan"), float("inf")])
@pytest.mark.usefixtures("watched")
def test_what_atens_formulas_lose_is_left_to_the_reference(case, value):
    """Constant and nearly constant rows, and NaN: the same bits as the reference's."""
    sample = dataclasses.replace(case.samples[0], shape=(40, 8), absent=case.arguments[3:])
    inputs = case.inputs(sample, torch.float32, CPU)
    inputs["x"] = inputs["x"] + value
    for call in recorded_calls(case, sample, inputs):
        primitive = next(p for p in case.first_order if p.overload is call.overload)
        assert not is_served(primitive, call.args), str(call)
    y = case.outputs(inputs, sample)[0]
    with pr.use_backend("reference"):
        assert torch.equal(y.nan_to_num(7.0), case.outputs(inputs, sample)[0].nan_to_num(7.0))


# Arguments that no record has.


@pytest.mark.usefixtures("backend")
def test_a_single_value_per_channel_and_one_running_statistic():
    """torch refuses one value in training; the primitive does not, and leaves the running variance finite."""
    x, running = torch.zeros(1, 3), torch.full((3,), 2.0)
    for statistics in ((running, running), (None, running)):
        out = BATCH_NORM.forward(x, None, None, *statistics, 0.5, *ChannelOptions(EPS))
        assert out[4].tolist() == [1.0] * 3
        assert running.tolist() == [2.0] * 3


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", [BATCH_NORM, BATCH_NORM_EVAL], ids=lambda case: case.name)
def test_layout_of_a_single_image_whose_channels_lie_side_by_side(case):
    """Strides that fit both formats: the kernels choose the layout that tracers are told of."""
    for _, call in calls(case, Sample((1, 5, 3, 4), (), ("weight",), "channels_last"), torch.float32):
        check_call(call)


def in_float64(primitive, *args):
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    with pr.use_backend("reference"):
        out = primitive(*(torch.float64 if isinstance(a, torch.dtype) else a for a in wide))
    return [out] if isinstance(out, torch.Tensor) else out


def check_lost(primitive, args, sizes, bound):
    """Errors are at most `bound` of `sizes`, the size of a sum's summands all together or of a value's terms."""
    out = primitive(*args)
    out = [out] if isinstance(out, torch.Tensor) else out
    for i, (got, want, size) in enumerate(zip(out, in_float64(primitive, *args), sizes, strict=True)):
        error = ((got.double() - want).abs().max() / size).item() if size else 0.0
        assert error <= bound, f"output {i}: lost {error:.1e} of the sum, {bound:.1e} allowed"


def alternating(*shape):
    """0.7 and -0.7 in turns, in every axis."""
    index = sum(torch.arange(n).view(-1, *[1] * (len(shape) - i - 1)) for i, n in enumerate(shape))
    return 0.7 * (1.0 - 2.0 * (index % 2))


class Summed(NamedTuple):
    """x of two values with its statistics, a cotangent or tangent v whose sums are long, and sizes of what is added."""

    x: torch.Tensor
    v: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor
    value: float
    total: float


def summed(shape, kind, axes, of_each, layout="contiguous"):
    """In float32, with the statistics over `axes` in float64; v differs along the axis `of_each` alone."""
    x, spread = arranged(alternating(*shape), layout), [-1 if i == of_each else 1 for i in range(len(shape))]
    mean, variance = x.double().mean(axes, keepdim=True), x.double().var(axes, correction=0, keepdim=True)
    rstd = (variance + EPS).rsqrt()
    alike = torch.ones(()) if kind == "one sign" else (x - mean) * rstd
    v = (alike * CONSTANTS[: shape[of_each]].view(spread)).float().expand(shape)
    v, size = v if kind == "one sign" else arranged(v, layout), v.abs().max().item()
    count = x.numel() // shape[of_each]
    return Summed(x, v, *(s.flatten().float() for s in (mean, rstd)), 2 * size * rstd.max().item(), size * count)


def channelwise(shape, layout, kind):
    return summed(shape, kind, [0, *range(2, len(shape))], 1, layout)


every_limit = pytest.mark.parametrize(
    "shape, layout, bound",
    [
        ((2**15, CHANNELS), "contiguous", 5e-4),
        ((2**15 + 1, CHANNELS), "contiguous", SHORT),
        ((2, CHANNELS, 1, 2**14), "channels_last", 5e-4),
        ((11, CHANNELS, 56, 57), "channels_last", SHORT),
        ((1, CHANNELS, 128, 128), "contiguous", 3.1e-5 * OF_LANES),
        ((1, CHANNELS, 129, 128), "contiguous", SHORT * OF_LANES),
        # The length is a prime number.
        ((1, CHANNELS, 16411), "contiguous", SHORT * OF_LANES),
    ],
    ids=["rows", "longer rows", "channels_last", "longer channels_last", "image", "larger image", "larger line"],
)


@every_kind
@every_limit
def test_backwards_of_batch_norm(shape, layout, kind, bound):
    x, v, mean, rstd, value, total = channelwise(shape, layout, kind)
    of_x = (v, x, torch.ones(CHANNELS), mean)
    check_lost(BATCH_NORM.bwd, (*of_x, rstd, *ChannelOptions(EPS), (True,) * 3), (value, total, total), bound)
    variance, x_hat = rstd.double().pow(-2).sub(EPS).float(), ((x.abs().max() + mean.abs().max()) * rstd.max()).item()
    sizes = value / 2, total * x_hat, total, total * rstd.max(), 0.5 * total * x_hat * rstd.max() ** 2
    check_lost(BATCH_NORM_EVAL.bwd, (*of_x, variance, *ChannelOptions(EPS), (True,) * 5), sizes, bound)


@pytest.mark.parametrize("count, bound", [(2**15, 5e-4), (2**15 + 1, SHORT)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_statistics_of_values_that_are_alike(layout, count, bound):
    """Means lose what sums of one sign do, and deviations as much of the mean."""
    shape = (count, CHANNELS) if layout == "contiguous" else (1, CHANNELS, 1, count)
    x = arranged((alternating(*shape) + 1) * CONSTANTS.view(1, -1, *[1] * (len(shape) - 2)), layout)
    args = (x, None, None, None, None, 0.1, *ChannelOptions(EPS))
    out, true = BATCH_NORM.forward(*args), in_float64(BATCH_NORM.forward, *args)
    sizes = (true[1].max(), true[1].max() * true[2].max() ** 2)
    for got, want, size in zip(out[1:3], true[1:3], sizes, strict=True):
        assert (got.double() - want).abs().max() / size <= bound


@pytest.mark.parametrize("offset", [0.0, 3.0, 7.5, 15.0, 60.0])
@pytest.mark.parametrize(
    "shape, layout",
    [
        ((8, 4, 56, 56), "contiguous"),
        ((8, 4, 56, 56), "channels_last"),
        ((2048, 32), "contiguous"),
        ((2, 2, 1, 100_000), "channels_last"),
        ((2, 2, 100_000, 1), "channels_last"),
    ],
    ids=["planar", "channels_last", "rows", "lines", "columns"],
)
def test_statistics_of_batch_norm_far_from_zero(shape, layout, offset):
    """Whichever of ATen's sums the offset leaves accurate enough: outputs and running statistics, held to float64."""
    x = arranged(normal(shape, 0, offset).float(), layout)
    running = normal(shape[1:2], 1).float(), normal(shape[1:2], 2).float().square()
    args = (x, None, None, *running, 0.1, *ChannelOptions(EPS))
    for i, (got, want) in enumerate(zip(BATCH_NORM.forward(*args), in_float64(BATCH_NORM.forward, *args), strict=True)):
        assert_close(got, want, dtype=torch.float32, what=f"output {i}")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("mean, std, eps", [(1.0, 1e-3, 0.1), (0.0, 0.0, 1e-5), (3.0, 0.0, 1e-5)])
def test_running_variance_where_eps_is_larger(mean, std, eps, layout):
    x, zero = arranged((mean + std * normal((8, 4, 28, 28), 0)).float(), layout), torch.zeros(4)
    new_mean, new_var = BATCH_NORM.forward(x, None, None, zero, zero, 1.0, *ChannelOptions(eps))[3:]
    true = x.double().transpose(0, 1).reshape(4, -1)
    torch.testing.assert_close(new_mean.double(), true.mean(1), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(new_var.double(), true.var(1), rtol=1e-4, atol=1e-12)


@every_kind
@pytest.mark.parametrize("rows, bound", [(2**11, 3.1e-5), (2**11 + 1, SHORT), (100_000, SHORT)])
def test_parameter_cotangents_of_layer_norm(rows, bound, kind):
    x, v, mean, rstd, _, total = summed((rows, CHANNELS), kind, [1], 1)
    sums = (False, True, True)
    for weight in (torch.ones(CHANNELS), None):
        check_lost(LAYER_NORM.bwd, (v, x, weight, mean, rstd, *NormOptions(1, EPS), sums), (0, total, total), bound)


@every_kind
@pytest.mark.parametrize("cols, bound", [(2**14, 3.1e-5 * OF_LANES), (2**14 + 1, SHORT)])
def test_rows_of_layer_norm(cols, bound, kind):
    x, v, mean, rstd, size, _ = summed((4, cols), kind, [1], 0)
    args = (v.contiguous(), x, None, mean, rstd, *NormOptions(1, EPS), (True, False, False))
    check_lost(LAYER_NORM.bwd, args, (size / 2, 0, 0), bound)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("value", [1000.1, -3333.3])
def test_values_that_are_all_one_become_zero(value):
    functional = pr.functional
    for shape in ((4, 15), (4, 768), (2, 8, 7, 7)):
        x = torch.full(shape, value)
        y = [functional.layer_norm(x, shape[1:]), functional.batch_norm(x, None, None, training=True)]
        y += [functional.group_norm(x, 4), functional.instance_norm(x)] if len(shape) > 2 else []
        compiled = torch.compile(functional.layer_norm, backend="aot_eager")(x, shape[1:])
        assert [each.abs().max().item() for each in (*y, compiled)] == [0.0] * (len(y) + 1)


@pytest.mark.parametrize(
    "length, dim, bound",
    [(2**16, 1, 1.25e-4 * OF_LANES), (2**16 + 1, 1, 1e-6), (2**11, 0, 3.1e-5), (2**11 + 1, 0, 1e-6)],
)
def test_log_softmax(length, dim, bound):
    """A cotangent of one sign where one element has all the weight, and a forward of one sign, all alike but one."""
    alike = CONSTANTS[:4, None].repeat(1, length)
    y = torch.full((4, length), -40.0)
    y[:, 0] = 0.0
    alike, y = (t if dim else t.t().contiguous() for t in (alike, y))
    check_lost(LOG_SOFTMAX.bwd, (alike, y, dim, torch.float32), (alike.max() * length,), bound)
    x = -alike / 2
    x.select(dim, 0).zero_()
    largest = torch.log_softmax(x.double(), dim).abs().max().item()
    bound = bound + torch.finfo(torch.float32).eps * largest
    got, (want,) = LOG_SOFTMAX.forward(x, dim, None), in_float64(LOG_SOFTMAX.forward, x, dim, None)
    assert (got.double() - want).abs().max() <= bound
    # Softmax adds up the same exponentials, and products of y with a cotangent of one sign.
    ours, (want,) = SOFTMAX.forward(x, None, dim, 1.0, None), in_float64(SOFTMAX.forward, x, None, dim, 1.0, None)
    assert ((ours.double() - want).abs() <= (bound + torch.finfo(torch.float32).eps * largest) * want).all()
    even = torch.full_like(x, 1 / length)
    check_lost(SOFTMAX.bwd, (alike, even, dim, 1.0, torch.float32), (alike.max() / length,), bound)
