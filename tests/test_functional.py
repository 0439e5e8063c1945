"""The functional API against torch.nn.functional: signatures, values, dtypes, layouts, running statistics."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import primitives as pr

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOW_PRECISION = (torch.float16, torch.bfloat16)
# One rounding of the result to a low-precision dtype (inputs are rounded before both sides see them); for float32 and
# float64 a dozen roundings in the statistics of at most 60 values of order 1.
ULPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 16, torch.float64: 16}


def tolerance(dtype):
    size = ULPS[dtype] * torch.finfo(dtype).eps
    return {"rtol": size, "atol": size}


def assert_right(ours, theirs, truth):
    """`ours` has the value of `truth` (float64) and the dtype, shape and strides of torch's result."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.stride() == theirs.stride()
    assert_close(ours.double(), truth.to(ours.dtype).double(), equal_nan=True, **tolerance(ours.dtype))


def seeded(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def doubles(*tensors):
    return [None if t is None else t.to(torch.float64, copy=True) for t in tensors]


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "log_softmax"])
def test_signature_starts_with_that_of_torch(name):
    ours = list(inspect.signature(getattr(pr.functional, name)).parameters.values())
    theirs = list(inspect.signature(getattr(F, name)).parameters.values())
    common = [(p.name, p.default, p.kind) for p in ours[: len(theirs)]]
    assert common == [(p.name, p.default, p.kind) for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_pure_batch_norm_has_the_signature_of_batch_norm():
    pure, plain = inspect.signature(pr.functional.pure_batch_norm), inspect.signature(pr.functional.batch_norm)
    assert list(pure.parameters.values()) == list(plain.parameters.values())


# Layer norm.


@pytest.mark.parametrize("affine", ["none", "weight", "bias", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, norm_ndim", [((4,), 1), ((5, 7), 1), ((3, 1), 1), ((2, 3, 4), 2), ((2, 3, 4), 3), ((2, 2, 3, 5), 1)]
)
def test_layer_norm(shape, norm_ndim, dtype, affine):
    x, norm = seeded(*shape, dtype=dtype), shape[-norm_ndim:]
    weight = seeded(*norm, dtype=dtype, seed=1) if affine in ("weight", "both") else None
    bias = seeded(*norm, dtype=dtype, seed=2) if affine in ("bias", "both") else None
    ours = pr.functional.layer_norm(x, norm, weight, bias, 1e-3)
    x64, weight64, bias64 = doubles(x, weight, bias)
    assert_right(ours, F.layer_norm(x, norm, weight, bias, 1e-3), F.layer_norm(x64, norm, weight64, bias64, 1e-3))


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_layer_norm_takes_float32_parameters_for_low_precision_input(dtype):
    x, weight, bias = seeded(5, 7, dtype=dtype), seeded(7, seed=1), seeded(7, seed=2)
    ours = pr.functional.layer_norm(x, [7], weight, bias)
    assert_right(ours, F.layer_norm(x, [7], weight, bias), F.layer_norm(*doubles(x), [7], *doubles(weight, bias)))


def test_layer_norm_default_eps_is_that_of_torch():
    x = seeded(4, 6, dtype=torch.float64) * 1e-3
    assert_close(pr.functional.layer_norm(x, (6,)), F.layer_norm(x, (6,)), rtol=1e-12, atol=1e-12)


# Layouts, special values and sizes, for all three functions.

CALLS = {
    "layer_norm": lambda f, x: f.layer_norm(x, x.shape[-1:]),
    "log_softmax": lambda f, x: f.log_softmax(x, 1),
    "log_softmax_dtype": lambda f, x: f.log_softmax(x, -1, dtype=torch.float64),
    "batch_norm": lambda f, x: f.batch_norm(x, None, None, training=True),
    "batch_norm_eval": lambda f, x: f.batch_norm(x, seeded(x.shape[1]).to(x), seeded(x.shape[1]).exp().to(x)),
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1, :, :].expand(-1, 5, -1, -1),
    "strided": lambda x: x[::2, ::2, ::2, ::2],
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "channels_last_3d": lambda x: x.unsqueeze(2).contiguous(memory_format=torch.channels_last_3d),
    "cube": lambda x: x[:, :, 0].transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_layout_of_the_result_is_that_of_torch(call, layout):
    x = LAYOUTS[layout](seeded(4, 3, 4, 5))
    assert_right(CALLS[call](pr.functional, x), CALLS[call](F, x), CALLS[call](F, x.double()))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("call", CALLS)
def test_special_values_go_where_torch_sends_them(call, special):
    x = seeded(3, 4, 5)
    x[1, 2, 3] = special
    ours, theirs = CALLS[call](pr.functional, x), CALLS[call](F, x)
    assert theirs.isnan().any() or theirs.isinf().any()
    assert_close(ours, theirs, equal_nan=True, **tolerance(torch.float32))


def test_log_softmax_of_a_row_of_minus_infinity_is_nan():
    x = torch.tensor([[-torch.inf] * 3, [0.0, -torch.inf, 1.0]])
    assert_close(pr.functional.log_softmax(x, 1), F.log_softmax(x, 1), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 4, 2), (3, 4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_empty_input(call, shape):
    x = torch.empty(shape, requires_grad=True)
    ours, theirs = CALLS[call](pr.functional, x), CALLS[call](F, x)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    ours.sum().backward()
    assert x.grad.shape == x.shape


# Log-softmax.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, dim", [((), 0), ((), -1), ((6,), 0), ((5, 7), 0), ((5, 7), -1), ((2, 3, 4), 1)], ids=str
)
def test_log_softmax(shape, dim, dtype):
    x = seeded(*shape, dtype=dtype) * 4
    assert_right(pr.functional.log_softmax(x, dim), F.log_softmax(x, dim), F.log_softmax(x.double(), dim))


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.bool, torch.uint8], ids=str)
def test_log_softmax_dtype_casts_the_input_first(dtype, to):
    x = (seeded(4, 5) * 300).to(dtype)
    theirs = F.log_softmax(x, 1, dtype=to)
    assert_right(pr.functional.log_softmax(x, 1, dtype=to), theirs, F.log_softmax(x.to(to).double(), 1))


def implicit(name, x):
    calls = {
        "tensor": lambda: pr.functional.log_softmax(x),
        "tree": lambda: pr.functional.log_softmax({"a": [x]})["a"][0],
        "module": lambda: pr.nn.LogSoftmax()(x),
        "keyword": lambda: pr.functional.log_softmax(x, dim=None, dtype=torch.float64).float(),
    }
    return calls[name]()


@pytest.mark.parametrize("ndim", range(6))
def test_log_softmax_chooses_the_axis_of_torch_when_none_is_given(ndim):
    x = seeded(*[2, 3, 4, 2, 3][:ndim])
    with pytest.warns(UserWarning, match="^Implicit dimension choice"):
        theirs = F.log_softmax(x)
    with pytest.warns(UserWarning, match=r"^log_softmax: choosing dim implicitly is deprecated; pass dim=\.$"):
        assert_close(implicit("tensor", x), theirs)


@pytest.mark.parametrize("name", ["tensor", "tree", "module", "keyword"])
def test_the_warning_points_at_the_line_of_the_caller(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        implicit(name, seeded(2, 3))
    source, first = inspect.getsourcelines(implicit)
    lines = [first + i for i, line in enumerate(source) if f'"{name}"' in line]
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line) for line in lines]


# Batch norm.


def running(channels, dtype=torch.float32):
    return seeded(channels, dtype=dtype, seed=3), seeded(channels, dtype=dtype, seed=4).exp()


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 1), (7, 3), (4, 3, 5), (1, 2, 3, 4), (3, 2, 2, 1, 2)], ids=str)
def test_batch_norm(shape, dtype, training):
    x, weight, bias = seeded(*shape, dtype=dtype), *running(shape[1], dtype)
    mean, var = running(shape[1], dtype)
    ours_mean, ours_var, their_mean, their_var = mean.clone(), var.clone(), mean.clone(), var.clone()
    ours = pr.functional.batch_norm(x, ours_mean, ours_var, weight, bias, training, 0.3, 1e-3)
    theirs = F.batch_norm(x, their_mean, their_var, weight, bias, training, 0.3, 1e-3)
    mean64, var64 = doubles(mean, var)
    truth = F.batch_norm(x.double(), mean64, var64, *doubles(weight, bias), training, 0.3, 1e-3)
    assert_right(ours, theirs, truth)
    assert_right(ours_mean, their_mean, mean64)
    assert_right(ours_var, their_var, var64)
    assert torch.equal(ours_mean, mean) != training


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_batch_norm_keeps_float32_state_for_low_precision_input(dtype):
    x, weight, bias = seeded(6, 3, 4, dtype=dtype), seeded(3, seed=1), seeded(3, seed=2)
    ours, theirs = running(3), running(3)
    y = pr.functional.batch_norm(x, *ours, weight, bias, training=True)
    expected = F.batch_norm(x, *theirs, weight, bias, training=True)
    assert_close(y, expected, **tolerance(dtype))
    for mine, their in zip(ours, theirs, strict=True):
        assert_close(mine, their, **tolerance(torch.float32))


@pytest.mark.parametrize("momentum", [0, 0.0, 0.25, 1, 1.0])
def test_momentum_is_the_weight_of_the_batch(momentum):
    x, (mean, var) = seeded(9, 2, dtype=torch.float64), running(2, torch.float64)
    expected = [(1 - momentum) * mean + momentum * x.mean(0), (1 - momentum) * var + momentum * x.var(0)]
    pr.functional.batch_norm(x, mean, var, training=True, momentum=momentum)
    assert_close([mean, var], expected, rtol=1e-14, atol=1e-14)


def test_running_statistics_are_written_into_the_same_memory():
    mean, var = running(3)
    pointers = (mean.data_ptr(), var.data_ptr())
    view = mean[1:]
    pr.functional.batch_norm(seeded(5, 3), mean, var, training=True)
    assert (mean.data_ptr(), var.data_ptr()) == pointers
    assert torch.equal(view, mean[1:])


def test_an_empty_batch_leaves_the_running_statistics_as_torch_does():
    ours, theirs = running(3), running(3)
    pr.functional.batch_norm(torch.empty(0, 3), *ours, training=True)
    F.batch_norm(torch.empty(0, 3), *theirs, training=True)
    assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_pure_batch_norm_returns_what_batch_norm_writes(training):
    x, (mean, var), written = seeded(6, 3, 2), running(3), running(3)
    out = pr.functional.pure_batch_norm(x, mean, var, seeded(3), None, training, 0.2)
    y = pr.functional.batch_norm(x, *written, seeded(3), None, training, 0.2)
    assert type(out).__name__ == "BatchNormOutput"
    assert torch.equal(out.output, y)
    assert torch.equal(out.running_mean, written[0])
    assert torch.equal(out.running_var, written[1])
    assert (mean._version, var._version) == (0, 0)
    assert_close((mean, var), running(3), rtol=0, atol=0)


def test_pure_batch_norm_without_running_statistics_returns_none_for_them():
    out = pr.functional.pure_batch_norm(seeded(6, 3), None, None, training=True)
    assert out[1:] == (None, None)
