"""The kernels for CPU tensors and the reference are one and the same: values, layouts, and who serves which call."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import primitives as pr
from primitives.core import registered_primitives
from primitives.ops import _cpu, _cpu_batch_norm, _cpu_channels, _cpu_layer_norm, _cpu_log_softmax
from tests.op_cases import BATCH_NORM, BATCH_NORM_EVAL, CASES, LAYER_NORM, LOG_SOFTMAX, Sample
from tests.properties import layout_of, recorded_calls
from tests.second_order import second_order_calls
from tests.support import DTYPES, LAYOUTS, arranged, assert_close, coarsest, dtype_id, normal

KERNELS = {p.overload: p for p in registered_primitives().values() if "cpu" in p.rules.kernels}
SERVED = [case for case in CASES if case.forward.overload in KERNELS]
EPS = 1e-5
LARGE_OFFSET = 1e4


@pytest.fixture(autouse=True)
def on_the_cpu(device):
    """These kernels exist for CPU tensors alone."""
    if device.type != "cpu":
        pytest.skip("kernels for CPU tensors")


@pytest.fixture
def small_blocks(monkeypatch):
    """Limits so small that a few rows are many blocks, and a long sum."""
    _set_limits(monkeypatch)


def _set_limits(monkeypatch):
    monkeypatch.setattr(_cpu, "BLOCK_ELEMENTS", 24)
    monkeypatch.setattr(_cpu_channels, "LANES", 1)
    for module, name in (
        (_cpu_channels, "LONGEST_SUM"),
        (_cpu_batch_norm, "LONGEST_AT_ONCE"),
        (_cpu_batch_norm, "LONGEST_BACKWARD"),
        (_cpu_batch_norm, "LONGEST_IMAGE"),
        (_cpu_layer_norm, "LONGEST_SUM"),
        (_cpu_layer_norm, "LONGEST_BLOCK"),
        (_cpu_layer_norm, "LONGEST_ROW"),
        (_cpu_log_softmax, "LONGEST_SUM"),
        (_cpu_log_softmax, "LONGEST_ROW"),
    ):
        monkeypatch.setattr(module, name, 4)


def every_call(case, sample, dtype):
    """Calls of all orders, for single arguments and all of them."""
    inputs = case.inputs(sample, dtype, torch.device("cpu"))
    calls = recorded_calls(case, sample, inputs)
    if case.second_order:
        calls += second_order_calls(case, sample, inputs, case.perturbable(sample))
    return [call for call in calls if call.overload in KERNELS]


def is_served(call):
    """Whether the kernel itself, not the reference in its place, returns the outputs."""
    return KERNELS[call.overload].rules.kernels["cpu"](*call.args) is not None


def check_against_reference(call, order=1):
    """Outputs of kernel and reference have one layout and, in a unit in the last place or some, one value."""
    with pr.use_backend("auto"):
        actual = call.outputs()
    with pr.use_backend("reference"):
        expected = call.outputs()
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert layout_of(got) == layout_of(want), f"{call}, output {i}"
        precision = coarsest(want.dtype, *(call.args[i].dtype for i in call.tensors))
        assert_close(got, want, precision=precision, order=order, what=f"{call}, output {i}")


@pytest.mark.parametrize("part, dtype", list(enumerate(DTYPES)), ids=[*map(dtype_id, DTYPES)])
@pytest.mark.parametrize("limits", ["at once", "small blocks"])
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_kernel_and_reference_agree(case, limits, part, dtype, monkeypatch):
    if limits == "small blocks":
        _set_limits(monkeypatch)
    for sample in case.samples[part :: len(DTYPES)]:
        for call in every_call(case, sample, dtype):
            check_against_reference(call, order=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_kernels_serve_every_layout(case, dtype):
    for layout in LAYOUTS:
        sample = dataclasses.replace(case.small, shape=(6, *case.small.shape[1:]), layout=layout)
        if layout == "expanded" and case is BATCH_NORM:
            sample = dataclasses.replace(sample, shape=(6, 2, 5))
        for call in every_call(case, sample, dtype):
            assert is_served(call), f"{call}, {layout}"


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_statistics_of_low_precision_without_parameters(case):
    sample = dataclasses.replace(case.small, absent=tuple(n for n in ("weight", "bias") if n in case.arguments))
    for call in every_call(case, sample, torch.bfloat16):
        assert is_served(call), str(call)
        check_against_reference(call, order=2)


def test_every_family_has_kernels_of_all_orders():
    families = [case for case in CASES if case.forward.overload in KERNELS]
    assert {case.name for case in families} >= {"layer_norm", "batch_norm", "batch_norm_eval", "log_softmax"}
    for case in families:
        for primitive in (case.forward, case.bwd, case.jvp, *case.second_order):
            assert primitive.rules.has_kernel_for("cpu"), primitive.name
            with pr.use_backend("reference"):
                assert not primitive.rules.has_kernel_for("cpu")


# What the reference serves.


def norm_calls(case, shape, offset, options=(("norm_ndim", 1),)):
    """First-order calls in float32, x being `offset` away from zero."""
    sample = Sample(shape, options if case is LAYER_NORM else (), case.arguments[3:])
    inputs = case.inputs(sample, torch.float32, torch.device("cpu"))
    inputs["x"] = inputs["x"] + offset
    return recorded_calls(case, sample, inputs)


@pytest.mark.parametrize("case", [LAYER_NORM, BATCH_NORM], ids=lambda case: case.name)
@pytest.mark.parametrize("value", [LARGE_OFFSET, float("nan"), float("inf")])
def test_what_atens_formulas_lose_is_left_to_the_reference(case, value):
    """Constant and nearly constant rows, and NaN: the same bits as the reference's."""
    for call in norm_calls(case, (40, 8), value):
        assert not is_served(call) or call.overload is BATCH_NORM.bwd.overload, str(call)
    (call, *_) = norm_calls(case, (40, 8), value)
    with pr.use_backend("reference"):
        expected = call.outputs()
    for got, want in zip(call.outputs(), expected, strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_samples_with_parameters_of_their_own_are_left_to_the_reference():
    x, weight = normal((3, 5, 4), 0), normal((3, 4), 1)
    layer_norm_p, batch_norm_p = LAYER_NORM.forward, BATCH_NORM.forward
    assert layer_norm_p.rules.kernels["cpu"](x, weight, None, 1, 1, EPS) is None
    assert layer_norm_p.rules.kernels["cpu"](x, None, None, 1, 1, EPS) is not None
    bwd, (_, mean, rstd) = LAYER_NORM.bwd.rules.kernels["cpu"], layer_norm_p(x, None, None, 1, 1, EPS)
    assert bwd(x, x, weight, mean, rstd, 1, 1, EPS, (True, False, False)) is None
    assert bwd(x, x, None, mean, rstd, 1, 1, EPS, (True, True, False)) is None
    assert bwd(x, x, None, mean, rstd, 1, 1, EPS, (True, False, False)) is not None
    assert batch_norm_p.rules.kernels["cpu"](x, weight, None, None, None, 1, 0.1, EPS) is None


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
def test_special_values_of_log_softmax(special):
    x = normal((3, 5), 0).float()
    x[0, 1], x[1] = special, special
    for call in recorded_calls(LOG_SOFTMAX, Sample((3, 5), (("dim", 1),)), {"x": x}):
        check_against_reference(call)


def test_a_single_value_per_channel():
    """torch refuses it in training; the primitive does not, and leaves the running variance finite."""
    x, running = torch.zeros(1, 3), torch.full((3,), 2.0)
    out = BATCH_NORM.forward(x, None, None, running, running, 0, 0.5, EPS)
    assert out[4].tolist() == [1.0] * 3
    assert running.tolist() == [2.0] * 3


# Long sums, held to float64: ATen's own lose more in them.


def test_long_sums_of_batch_norm_in_channels_last():
    shape = (33, 3, 63, 65)
    x, y_bar = (arranged(normal(shape, i, 0.5).float(), "channels_last") for i in range(2))
    assert x.numel() // 3 > _cpu_channels.LONGEST_BACKWARD
    with torch.no_grad():
        out = BATCH_NORM.forward(x, None, None, None, None, 0, 0.1, EPS)
        with pr.use_backend("reference"):
            true = BATCH_NORM.forward(x.double(), None, None, None, None, 0, 0.1, EPS)
        for got, want in zip(out[:3], true[:3], strict=True):
            assert_close(got, want, dtype=torch.float32)
        mask = [True, False, True]
        for weight in (None, torch.ones(3)):
            got = BATCH_NORM.bwd(y_bar, x, weight, out[1], out[2], 0, EPS, mask)
            with pr.use_backend("reference"):
                want = BATCH_NORM.bwd(y_bar.double(), x.double(), None, true[1], true[2], 0, EPS, mask)
            for i in (0, 2):
                assert_close(got[i], want[i], dtype=torch.float32)


@pytest.mark.parametrize("offset", [0.0, 3.0, 7.5, 15.0, 60.0])
@pytest.mark.parametrize(
    "shape, layout",
    [((8, 4, 56, 56), "contiguous"), ((8, 4, 56, 56), "channels_last"), ((2048, 32), "contiguous")],
    ids=["planar", "channels_last", "rows"],
)
def test_statistics_of_batch_norm_far_from_zero(shape, layout, offset):
    """Whichever of ATen's sums the offset leaves accurate enough: outputs and running statistics, held to float64."""
    x = arranged(normal(shape, 0, offset).float(), layout)
    running = normal(shape[1:2], 1).float(), normal(shape[1:2], 2).float().square()
    out = BATCH_NORM.forward(x, None, None, *running, 0, 0.1, EPS)
    with pr.use_backend("reference"):
        true = BATCH_NORM.forward(x.double(), None, None, *(r.double() for r in running), 0, 0.1, EPS)
    for i, (got, want) in enumerate(zip(out, true, strict=True)):
        assert_close(got, want, dtype=torch.float32, what=f"output {i}")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("mean, std, eps", [(1.0, 1e-3, 0.1), (0.1, 1e-4, 1e-3), (0.0, 0.0, 1e-5), (3.0, 0.0, 1e-5)])
def test_running_variance_where_eps_is_larger(mean, std, eps, layout):
    x = arranged((mean + std * normal((8, 4, 28, 28), 0)).float(), layout)
    zero = torch.zeros(4)
    out = BATCH_NORM.forward(x, None, None, zero, zero, 0, 1.0, eps)
    true = x.double().transpose(0, 1).reshape(4, -1)
    torch.testing.assert_close(out[3].double(), true.mean(1), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(out[4].double(), true.var(1), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("spatial", [(1, 100_000), (100_000, 1), (500, 200)])
def test_long_sums_of_lines_of_any_shape(spatial):
    """Channels last: no shape has an axis along which a sum is left long."""
    x = arranged(normal((2, 2, *spatial), 0, 15.0).float(), "channels_last")
    out = BATCH_NORM.forward(x, None, None, None, None, 0, 0.1, EPS)
    with pr.use_backend("reference"):
        true = BATCH_NORM.forward(x.double(), None, None, None, None, 0, 0.1, EPS)
    for i, (got, want) in enumerate(zip(out[:3], true[:3], strict=True)):
        assert_close(got, want, dtype=torch.float32, what=f"output {i}")


def test_long_sums_of_layer_norm():
    x, y_bar = (normal((131_101, 4), i, 2.0 * i).float() for i in range(2))
    _, mean, rstd = LAYER_NORM.forward(x, None, None, 1, 0, EPS)
    got = LAYER_NORM.bwd(y_bar, x, None, mean, rstd, 1, 0, EPS, [True] * 3)
    with pr.use_backend("reference"):
        _, mean, rstd = LAYER_NORM.forward(x.double(), None, None, 1, 0, EPS)
        want = LAYER_NORM.bwd(y_bar.double(), x.double(), None, mean, rstd, 1, 0, EPS, [True] * 3)
    for actual, expected in zip(got, want, strict=True):
        assert_close(actual, expected, dtype=torch.float32)


def test_low_precision_parameter_cotangents_are_rounded_once():
    """ATen adds them up in bfloat16: ten times the error."""
    x, y_bar, weight = (normal(shape, i, 0.5).bfloat16() for i, shape in enumerate([(999, 16), (999, 16), (16,)]))
    for case in (LAYER_NORM, BATCH_NORM):
        options = (1, 0, EPS) if case is LAYER_NORM else (0, EPS)
        call = [x, weight, None, *options] if case is LAYER_NORM else [x, weight, None, None, None, 0, 0.1, EPS]
        _, mean, rstd, *_ = case.forward(*call)
        got = case.bwd(y_bar, x, weight, mean, rstd, *options, [True] * 3)
        with pr.use_backend("reference"):
            wide = (t.double() for t in (y_bar, x, weight, mean, rstd))
            want = case.bwd(*wide, *options, [True] * 3)
        for actual, expected in zip(got, want, strict=True):
            assert_close(actual, expected, dtype=torch.bfloat16)


def test_long_sums_of_log_softmax():
    """Over the first axis, where one element has all the weight."""
    x, y_bar = normal((300_000, 4), 0).float(), normal((300_000, 4), 1, 1.0).float()
    x[0] = 30.0
    y = torch.log_softmax(x.double(), 0).float()
    got = LOG_SOFTMAX.bwd(y_bar, y, 0, torch.float32)
    with pr.use_backend("reference"):
        want = LOG_SOFTMAX.bwd(y_bar.double(), y.double(), 0, torch.float64)
    assert_close(got, want, dtype=torch.float32)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_log_softmax_over_a_long_first_axis(backend):
    """Each element is rounded away in a running sum of those before it: ATen's own is wrong by more than 1e-3 here."""
    x = torch.zeros(2**20, 2)
    x[0] = 0.3
    with pr.use_backend(backend):
        got = LOG_SOFTMAX.forward(x, 0, None)
    assert_close(got, torch.log_softmax(x.double(), 0), dtype=torch.float32)


@pytest.mark.parametrize("shape", [(9, 4), (8, 4, 5), (3, 4, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_batch_norm_takes_strided_values_per_channel_and_one_running_statistic(shape, dtype):
    x, y_bar = (normal(shape, seed).to(dtype).contiguous(memory_format=_format(shape)) for seed in (0, 1))
    weight = normal((8,), 2).to(dtype)[::2]
    for running in ([None, torch.ones(4)], [torch.zeros(4), None], [torch.zeros(8)[::2], torch.ones(8)[::2]]):
        args = (x, weight, None, *running, 0, 0.1, EPS)
        got = BATCH_NORM.forward(*args)
        with pr.use_backend("reference"):
            want = BATCH_NORM.forward(*args)
        for a, b in zip(got, want, strict=True):
            assert layout_of(a) == layout_of(b)
            assert_close(a, b, precision=coarsest(b.dtype, dtype), order=2)
    for scale in (weight, None):
        _check_strided_statistics(BATCH_NORM.bwd, (y_bar, x, scale), want[1:3], (0, EPS, (True, True, True)))


def test_layer_norm_takes_strided_statistics():
    x, y_bar, weight = (normal(shape, seed).float() for seed, shape in enumerate([(6, 5), (6, 5), (5,)]))
    statistics = LAYER_NORM.forward(x, weight, None, 1, 0, EPS)[1:]
    for mask in ((True, True, True), (True, False, False)):
        _check_strided_statistics(LAYER_NORM.bwd, (y_bar, x, weight), statistics, (1, 0, EPS, mask))


def _check_strided_statistics(bwd, tensors, statistics, rest):
    mean, rstd = (torch.stack([value, value + 1], 1)[:, 0] for value in statistics)
    got = bwd(*tensors, mean, rstd, *rest)
    with pr.use_backend("reference"):
        want = bwd(*tensors, mean, rstd, *rest)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, precision=coarsest(b.dtype, tensors[1].dtype), order=2)


def _format(shape):
    return torch.channels_last if len(shape) == 4 else torch.contiguous_format


@pytest.mark.parametrize("training", [True, False])
def test_layout_of_a_single_image_whose_channels_lie_side_by_side(training):
    """Strides that fit both formats: the kernels choose the layout that tracers are told of."""
    x = torch.randn(3, 4, 5).permute(2, 0, 1)[None].requires_grad_()
    running = torch.zeros(5), torch.ones(5)

    def step(x):
        return pr.functional.batch_norm(x, *running, torch.ones(5), None, training)

    y = step(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert y.stride() == step(mode.from_tensor(x.detach())).stride()
    (x_bar,) = torch.autograd.grad(y.square().sum(), x)
    with pr.use_backend("reference"):
        (want,) = torch.autograd.grad(step(x).square().sum(), x)
    assert x_bar.stride() == want.stride()
    for case in (BATCH_NORM, BATCH_NORM_EVAL):
        sample = Sample(tuple(x.shape), (), ("weight",))
        inputs = {**case.inputs(sample, torch.float32, torch.device("cpu")), "x": x.detach()}
        for call in recorded_calls(case, sample, inputs):
            check_against_reference(call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=dtype_id)
def test_statistics_of_layer_norm_do_not_follow_the_default_dtype(dtype):
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        out = LAYER_NORM.forward(normal((3, 4), 0).bfloat16(), None, None, 1, 0, EPS)
    finally:
        torch.set_default_dtype(default)
    assert [value.dtype for value in out] == [torch.bfloat16, torch.float32, torch.float32]


def test_arguments_are_not_written_into():
    for case in SERVED:
        for call in every_call(case, case.small, torch.float32):
            before = [a.clone() if isinstance(a, torch.Tensor) else a for a in call.args]
            outputs = call.outputs()
            for a, b in zip(call.args, before, strict=True):
                assert not isinstance(a, torch.Tensor) or torch.equal(a, b), str(call)
            storages = {a.untyped_storage().data_ptr() for a in call.args if isinstance(a, torch.Tensor)}
            assert not any(o.numel() and o.untyped_storage().data_ptr() in storages for o in outputs), str(call)
