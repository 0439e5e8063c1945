"""Errors: their types next to torch's for the same call, what they name, and that nothing happens before them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import primitives as pr
from tests.support import TORCH_ERRORS, assert_raises

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
BF16, F64 = torch.bfloat16, torch.float64


def ones(*shape, **options):
    return torch.ones(*shape, **options)


def layer_norm(x=X, shape=(4,), **options):
    return lambda f: f.layer_norm(x, shape, **options)


def log_softmax(x=X, dim=1, **options):
    return lambda f: f.log_softmax(x, dim, **options)


def batch_norm(x=X, training=True, **options):
    state = {"running_mean": torch.zeros(4), "running_var": ones(4), **options}
    return lambda f: f.batch_norm(x, **state, training=training)


# Each row: the call, the error, and what its text names: the argument, what is required or what came.
CASES = {
    "layer_norm": {
        "int shape": (layer_norm(shape=4), pr.DtypeError, ["normalized_shape", "sequence", "got int"]),
        "float size": (layer_norm(shape=(4.0,)), pr.DtypeError, ["normalized_shape", "float"]),
        "empty shape": (layer_norm(shape=()), pr.ShapeError, ["normalized_shape", "[]"]),
        "input shape": (layer_norm(shape=(5,)), pr.ShapeError, ["input", "[*, 5]", "got [3, 4]"]),
        "input None": (layer_norm(None), pr.DtypeError, ["input", "NoneType"]),
        "input int": (layer_norm(X.int()), pr.DtypeError, ["input", "float16", "torch.int32"]),
        "weight shape": (layer_norm(weight=ones(3)), pr.ShapeError, ["weight", "[4]", "got [3]"]),
        "bias shape": (layer_norm(shape=(3, 4), bias=ones(4)), pr.ShapeError, ["bias", "[3, 4]", "got [4]"]),
        "weight device": (layer_norm(weight=ones(4, device="meta")), pr.DeviceError, ["weight", "cpu", "meta"]),
        "weight float64": (layer_norm(weight=ones(4, dtype=F64)), pr.DtypeError, ["weight", "float32", "float64"]),
        "weight half": (layer_norm(X.to(BF16), weight=ones(4).half()), pr.DtypeError, ["weight", "bfloat16 or"]),
        "two dtypes": (
            layer_norm(X.to(BF16), weight=ones(4), bias=ones(4, dtype=BF16)), pr.DtypeError, ["weight and bias"],
        ),
        "weight number": (layer_norm(weight=1.0), pr.DtypeError, ["weight", "tensor", "float"]),
        "weight list": (layer_norm(weight=[1.0] * 4), pr.TreeError, ["weight", "tree prefix"]),
        "eps None": (layer_norm(eps=None), pr.DtypeError, ["eps", "NoneType"]),
    },
    "log_softmax": {
        "dim high": (log_softmax(dim=2), pr.AxisError, ["dim", "[-2, 1]", "got 2"]),
        "dim bool": (log_softmax(dim=True), pr.DtypeError, ["dim", "int", "got bool"]),
        "dim of a number": (log_softmax(ones(())), pr.AxisError, ["dim", "[-1, 0]", "got 1"]),
        "integer": (log_softmax(X.int()), pr.DtypeError, ["input", "torch.int32", "dtype="]),
        "integer result": (log_softmax(dtype=torch.int64), pr.DtypeError, ["result", "torch.int64"]),
        "dtype str": (log_softmax(dtype="float32"), pr.DtypeError, ["float32"]),
    },
    "batch_norm": {
        "no channel axis": (batch_norm(ones(4)), pr.ShapeError, ["input", "2 to 5 axes", "got [4]"]),
        "integer": (batch_norm(X.int()), pr.DtypeError, ["input", "torch.int32"]),
        "no statistics": (
            batch_norm(training=False, running_mean=None, running_var=None), pr.ShapeError, ["training=True"],
        ),
        "mean alone": (batch_norm(running_var=None), pr.ShapeError, ["running_mean without running_var"]),
        "variance alone": (
            batch_norm(running_mean=None, training=False), pr.ShapeError, ["running_var without running_mean"],
        ),
        "one value": (batch_norm(ones(1, 4)), pr.ShapeError, ["more than 1 value", "got [1, 4]"]),
        "momentum None": (batch_norm(momentum=None), pr.DtypeError, ["momentum", "NoneType", "modules"]),
        "eps None": (batch_norm(eps=None), pr.DtypeError, ["eps", "NoneType"]),
        "eps zero": (batch_norm(eps=0.0), ValueError, ["eps", "positive", "got 0.0"]),
        "parameters": (
            batch_norm(X.to(BF16), weight=ones(4), bias=ones(4, dtype=BF16)), pr.DtypeError, ["weight and bias"],
        ),
        "statistics": (
            batch_norm(X.to(BF16), running_var=ones(4, dtype=BF16)), pr.DtypeError, ["running_mean and running_var"],
        ),
        "mean that requires grad": (
            batch_norm(running_mean=ones(4).requires_grad_()), pr.MutationError, ["running_mean", "pure_batch_norm"],
        ),
    },
}  # fmt: skip
CHANNEL_TENSORS = ("running_mean", "running_var", "weight", "bias")
WRONG_CHANNELS = {
    "shape": (lambda: ones(3), pr.ShapeError, ["[4]", "got [3]"]),
    "device": (lambda: ones(4, device="meta"), pr.DeviceError, ["cpu", "meta"]),
    "float64": (lambda: ones(4, dtype=F64), pr.DtypeError, ["torch.float32", "torch.float64"]),
    "int32": (lambda: ones(4).int(), pr.DtypeError, ["torch.float32", "torch.int32"]),
    "number": (lambda: 1.0, pr.DtypeError, ["tensor", "float"]),
}
for name in CHANNEL_TENSORS:
    for wrong, (make, error, words) in WRONG_CHANNELS.items():
        CASES["batch_norm"][f"{name} {wrong}"] = (batch_norm(**{name: make()}), error, [name, *words])


@pytest.mark.parametrize("op, case", [(op, case) for op, cases in CASES.items() for case in cases])
def test_errors_are_typed_and_name_what_is_wrong(op, case):
    call, error, words = CASES[op][case]
    assert_raises(error, [f"{op}: ", *words], lambda: call(pr.functional), lambda: call(F))


# torch takes these, and does what is hardly meant.
STRICTER = {
    "an imaginary part is dropped": (log_softmax(X.cfloat(), dtype=torch.float32), pr.DtypeError, ["real"]),
    "nested": (layer_norm(torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)), pr.DtypeError, ["unbind"]),
    "six axes": (batch_norm(ones(2, 4, 1, 1, 1, 1)), pr.ShapeError, ["2 to 5 axes"]),
    "bool for a number": (batch_norm(momentum=True), pr.DtypeError, ["momentum", "bool"]),
}


@pytest.mark.parametrize("case", STRICTER)
def test_where_torch_is_silent(case):
    call, error, words = STRICTER[case]
    assert_raises(error, words, lambda: call(pr.functional))


@pytest.mark.parametrize("wrong", [*CHANNEL_TENSORS, "momentum", "eps"])
def test_a_call_that_raises_writes_nothing(wrong):
    given = {"running_mean": torch.zeros(4), "running_var": ones(4), "weight": ones(4), "bias": ones(4)}
    kept = [value for name, value in given.items() if name != wrong]
    given[wrong] = "0.1" if wrong in ("momentum", "eps") else ones(3)
    for function in (pr.functional.batch_norm, pr.functional.pure_batch_norm):
        with pytest.raises(TORCH_ERRORS):
            function(X, **given, training=True)
    assert all(value._version == 0 for value in kept)


def test_error_types():
    assert issubclass(pr.MissingRuleError, NotImplementedError)
    assert issubclass(pr.BackendError, RuntimeError)
    assert issubclass(pr.DtypeError, NotImplementedError)
