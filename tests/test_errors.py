"""Errors: their exact texts, their types next to torch's for the same call."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import primitives as pr

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
bf16, f64, meta = torch.bfloat16, torch.float64, torch.device("meta")
REAL = "float16, bfloat16, float32 or float64"


def ones(*shape, **options):
    return torch.ones(*shape, **options)


def raised_by(call, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is what is being asked for
        call(*args)
    return caught.value


def check(call, error, text):
    """`call(pr.functional)` raises exactly `error` with `text`; whoever catches what torch raises catches it too."""
    ours, theirs = raised_by(call, pr.functional), raised_by(call, F)
    assert type(ours) is error
    assert str(ours) == text
    assert isinstance(ours, type(theirs)), f"torch raises {type(theirs).__name__}: {theirs}"


# Each row: arguments after the input, the input, the error, its text.

LAYER_NORM = {
    "normalized_shape int": (
        X,
        (4,),
        {"normalized_shape": 4},
        pr.DtypeError,
        "normalized_shape must be a sequence of ints, got int.",
    ),
    "normalized_shape iterator": (
        X,
        (4,),
        {"normalized_shape": iter((4,))},
        pr.DtypeError,
        "normalized_shape must be a sequence of ints, got tuple_iterator.",
    ),
    "normalized_shape empty": (
        X,
        (),
        {},
        pr.ShapeError,
        "normalized_shape must name at least one axis, got [].",
    ),
    "input shape": (X, (5,), {}, pr.ShapeError, "input must have shape [*, 5] (normalized_shape=[5]), got [3, 4]."),
    "input axes": (
        X,
        (2, 3, 4),
        {},
        pr.ShapeError,
        "input must have shape [*, 2, 3, 4] (normalized_shape=[2, 3, 4]), got [3, 4].",
    ),
    "input number": (ones(()), (1,), {}, pr.ShapeError, "input must have shape [*, 1] (normalized_shape=[1]), got []."),
    "input int": (X.int(), (4,), {}, pr.DtypeError, f"input must have dtype {REAL}, got torch.int32."),
    "input bool": (X.bool(), (4,), {}, pr.DtypeError, f"input must have dtype {REAL}, got torch.bool."),
    "input complex": (X.cfloat(), (4,), {}, pr.DtypeError, f"input must have dtype {REAL}, got torch.complex64."),
    "weight shape": (
        X,
        (4,),
        {"weight": ones(3)},
        pr.ShapeError,
        "weight must have shape [4] (normalized_shape), got [3].",
    ),
    "weight axes": (
        X,
        (4,),
        {"weight": ones(1, 4)},
        pr.ShapeError,
        "weight must have shape [4] (normalized_shape), got [1, 4].",
    ),
    "bias shape": (
        X,
        (3, 4),
        {"bias": ones(4)},
        pr.ShapeError,
        "bias must have shape [3, 4] (normalized_shape), got [4].",
    ),
    "weight device": (
        X,
        (4,),
        {"weight": ones(4, device=meta)},
        pr.DeviceError,
        "weight must be on the device of input, cpu, got meta.",
    ),
    "bias device": (
        X,
        (4,),
        {"bias": ones(4, device=meta)},
        pr.DeviceError,
        "bias must be on the device of input, cpu, got meta.",
    ),
    "weight float64": (
        X,
        (4,),
        {"weight": ones(4, dtype=f64)},
        pr.DtypeError,
        "weight must have dtype torch.float32 for input of dtype torch.float32, got torch.float64.",
    ),
    "weight float16 for bfloat16": (
        X.to(bf16),
        (4,),
        {"weight": ones(4).half()},
        pr.DtypeError,
        "weight must have dtype torch.bfloat16 or torch.float32 for input of dtype torch.bfloat16, got torch.float16.",
    ),
    "bias float32 for float64": (
        X.double(),
        (4,),
        {"bias": ones(4)},
        pr.DtypeError,
        "bias must have dtype torch.float64 for input of dtype torch.float64, got torch.float32.",
    ),
    "parameters of two dtypes": (
        X.to(bf16),
        (4,),
        {"weight": ones(4), "bias": ones(4, dtype=bf16)},
        pr.DtypeError,
        "weight and bias must have the same dtype, got weight torch.float32, bias torch.bfloat16.",
    ),
    "weight no tensor": (X, (4,), {"weight": 1.0}, pr.DtypeError, "weight must be a tensor, got float."),
    "bias no tensor": (X, (4,), {"bias": 1.0}, pr.DtypeError, "bias must be a tensor, got float."),
}


@pytest.mark.parametrize("case", LAYER_NORM)
def test_layer_norm(case):
    x, shape, options, error, text = LAYER_NORM[case]
    check(lambda f: f.layer_norm(x, **{"normalized_shape": shape, **options}), error, f"layer_norm: {text}")


LOG_SOFTMAX = {
    "dim high": (X, {"dim": 2}, pr.AxisError, "dim must be in [-2, 1] for input of 2 axes, got 2."),
    "dim low": (X, {"dim": -3}, pr.AxisError, "dim must be in [-2, 1] for input of 2 axes, got -3."),
    "dim of a number": (ones(()), {"dim": 1}, pr.AxisError, "dim must be in [-1, 0] for input of 0 axes, got 1."),
    "integer": (
        X.int(),
        {"dim": 1},
        pr.DtypeError,
        f"input must have dtype {REAL}, got torch.int32. Pass dtype= to convert it.",
    ),
    "complex": (
        X.cfloat(),
        {"dim": 1},
        pr.DtypeError,
        f"input must have dtype {REAL}, got torch.complex64. Pass dtype= to convert it.",
    ),
    "integer result": (
        X,
        {"dim": 1, "dtype": torch.int64},
        pr.DtypeError,
        f"the result must have dtype {REAL}, got torch.int64.",
    ),
    "complex result": (
        X,
        {"dim": 1, "dtype": torch.complex64},
        pr.DtypeError,
        f"the result must have dtype {REAL}, got torch.complex64.",
    ),
}


@pytest.mark.parametrize("case", LOG_SOFTMAX)
def test_log_softmax(case):
    x, options, error, text = LOG_SOFTMAX[case]
    check(lambda f: f.log_softmax(x, **options), error, f"log_softmax: {text}")


def test_log_softmax_refuses_to_drop_an_imaginary_part():
    # torch drops it, with a warning.
    error = raised_by(lambda: pr.functional.log_softmax(X.cfloat(), 1, dtype=torch.float32))
    assert type(error) is pr.DtypeError
    assert str(error) == "log_softmax: input must be real, got torch.complex64."


ONE_VALUE = "Use a larger batch, or evaluation mode."
NO_STATISTICS = (
    "running_mean and running_var must be given in evaluation mode, got None. "
    "Pass training=True to normalize by the statistics of the batch."
)
STATISTICS = "running_mean and running_var must both be given or both be None, got {} without {}."
MOMENTUM = (
    "momentum must be a number, got {}. (The cumulative average that momentum=None means is a feature of the BatchNorm "
    "modules, which count the batches.)"
)
TRAIN, EVAL = {"training": True}, {"training": False}
ABSENT = {"running_mean": None, "running_var": None}

BATCH_NORM = {
    "no channel axis": (
        ones(4),
        {**TRAIN, "running_mean": ones(4)},
        pr.ShapeError,
        "input must have 2 to 5 axes, [N, C, *spatial], got [4].",
    ),
    "integer": (X.int(), TRAIN, pr.DtypeError, f"input must have dtype {REAL}, got torch.int32."),
    "complex": (X.cfloat(), {**TRAIN, **ABSENT}, pr.DtypeError, f"input must have dtype {REAL}, got torch.complex64."),
    "no statistics": (X, {**EVAL, **ABSENT}, pr.ShapeError, NO_STATISTICS),
    "mean alone": (X, {**TRAIN, "running_var": None}, pr.ShapeError, STATISTICS.format("running_mean", "running_var")),
    "variance alone": (
        X,
        {**TRAIN, "running_mean": None},
        pr.ShapeError,
        STATISTICS.format("running_var", "running_mean"),
    ),
    "variance alone in evaluation": (
        X,
        {**EVAL, "running_mean": None},
        pr.ShapeError,
        STATISTICS.format("running_var", "running_mean"),
    ),
    "one value": (
        ones(1, 4),
        TRAIN,
        pr.ShapeError,
        f"input must have more than 1 value per channel in training, got [1, 4]. {ONE_VALUE}",
    ),
    "one spatial value": (
        ones(1, 4, 1, 1),
        TRAIN,
        pr.ShapeError,
        f"input must have more than 1 value per channel in training, got [1, 4, 1, 1]. {ONE_VALUE}",
    ),
    "momentum None": (X, {**TRAIN, "momentum": None}, pr.DtypeError, MOMENTUM.format("NoneType")),
    "momentum str": (X, {**TRAIN, "momentum": "0.1"}, pr.DtypeError, MOMENTUM.format("str")),
    "parameters of two dtypes": (
        X.to(bf16),
        {**TRAIN, "weight": ones(4), "bias": ones(4, dtype=bf16)},
        pr.DtypeError,
        "weight and bias must have the same dtype, got weight torch.float32, bias torch.bfloat16.",
    ),
    "statistics of two dtypes": (
        X.to(bf16),
        {**TRAIN, "running_var": ones(4, dtype=bf16)},
        pr.DtypeError,
        (
            "running_mean and running_var must have the same dtype, got running_mean torch.float32, "
            "running_var torch.bfloat16."
        ),
    ),
}


@pytest.mark.parametrize("case", BATCH_NORM)
def test_batch_norm(case):
    x, options, error, text = BATCH_NORM[case]
    options = {"running_mean": torch.zeros(4), "running_var": ones(4), **options}
    check(lambda f: f.batch_norm(x, **options), error, f"batch_norm: {text}")
    pure = raised_by(lambda: pr.functional.pure_batch_norm(x, **options))
    assert (type(pure), str(pure)) == (error, f"batch_norm: {text}")


CHANNEL_TENSORS = ("running_mean", "running_var", "weight", "bias")


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", CHANNEL_TENSORS)
@pytest.mark.parametrize(
    "value, error, text",
    [
        (ones(3), pr.ShapeError, "must have shape [4] (axis 1 of input), got [3]."),
        (ones(4, device=meta), pr.DeviceError, "must be on the device of input, cpu, got meta."),
        (
            ones(4, dtype=f64),
            pr.DtypeError,
            "must have dtype torch.float32 for input of dtype torch.float32, got torch.float64.",
        ),
        (
            ones(4).int(),
            pr.DtypeError,
            "must have dtype torch.float32 for input of dtype torch.float32, got torch.int32.",
        ),
        (1.0, pr.DtypeError, "must be a tensor, got float."),
    ],
    ids=["shape", "device", "float64", "int32", "no tensor"],
)
def test_channel_tensors_of_batch_norm(name, value, error, text, training):
    tensors = {"running_mean": torch.zeros(4), "running_var": ones(4), "weight": ones(4), "bias": ones(4), name: value}
    check(lambda f: f.batch_norm(X, **tensors, training=training), error, f"batch_norm: {name} {text}")


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_running_statistics_that_require_grad_are_refused_by_name(name):
    running = {"running_mean": torch.ones(4), "running_var": torch.ones(4)}
    running[name].requires_grad_()
    error = raised_by(lambda: pr.functional.batch_norm(X, **running, training=True))
    assert type(error) is pr.MutationError
    assert str(error).startswith(f"batch_norm: {name} is written in training and must not require grad.")
    assert all(value.eq(1.0).all() for value in running.values())


def test_layer_norm_of_a_number_has_no_axis_to_normalize():
    error = raised_by(lambda: pr.functional.layer_norm(torch.tensor(1.0), ()))
    assert type(error) is pr.ShapeError


def test_batch_norm_takes_at_most_five_axes():
    # torch takes more; no module of torch.nn does.
    error = raised_by(lambda: pr.functional.batch_norm(ones(2, 4, 1, 1, 1, 1), None, None, training=True))
    assert type(error) is pr.ShapeError
    assert str(error) == "batch_norm: input must have 2 to 5 axes, [N, C, *spatial], got [2, 4, 1, 1, 1, 1]."


# Arguments that are no tensors.


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f.layer_norm(X, (4,), eps="small"),
        lambda f: f.layer_norm(X, (4,), eps=None),
        lambda f: f.layer_norm(X, (4.0,)),
        lambda f: f.layer_norm(X, "4"),
        lambda f: f.log_softmax(X, 1.0),
        lambda f: f.log_softmax(X, "1"),
        lambda f: f.log_softmax(X, 1, dtype="float32"),
        lambda f: f.batch_norm(X, None, None, training=True, eps=None),
        lambda f: f.layer_norm(None, (4,)),
    ],
    ids=[
        "eps str",
        "eps None",
        "float size",
        "str sizes",
        "float dim",
        "str dim",
        "str dtype",
        "batch_norm eps",
        "no input",
    ],
)
def test_arguments_of_a_wrong_type_raise_what_torch_raises(call):
    ours, theirs = raised_by(call, pr.functional), raised_by(call, F)
    assert isinstance(ours, type(theirs)), (
        f"ours {type(ours).__name__}: {ours}; torch {type(theirs).__name__}: {theirs}"
    )
    assert re.match(r"(layer_norm|log_softmax|batch_norm): ", str(ours)), str(ours)


@pytest.mark.parametrize(
    "call", [lambda x: pr.functional.layer_norm(x, (4,)), lambda x: pr.functional.log_softmax(x, 0)]
)
@pytest.mark.parametrize(
    "value, label", [(1.0, "input"), ([1.0], "input[0]"), ({"a": (X, "b")}, "input['a'][1]")], ids=str
)
def test_leaves_that_are_no_tensors(call, value, label):
    with pytest.raises(
        pr.DtypeError, match=rf"^(layer_norm|log_softmax): {re.escape(label)} must be a tensor, got (float|str)\.$"
    ):
        call(value)


# Types.


@pytest.mark.parametrize(
    "error, bases",
    [
        (pr.ShapeError, (ValueError, RuntimeError)),
        (pr.AxisError, (pr.ShapeError, IndexError)),
        (pr.DeviceError, (ValueError, RuntimeError)),
        (pr.DtypeError, (TypeError, NotImplementedError)),
        (pr.MissingRuleError, (NotImplementedError,)),
        (pr.TreeError, (ValueError,)),
        (pr.BackendError, (RuntimeError,)),
    ],
)
def test_error_types(error, bases):
    assert issubclass(error, bases)
    assert all(issubclass(error, base) for base in bases)
    assert error.__module__ == "primitives.core.errors"
    assert error.__doc__
