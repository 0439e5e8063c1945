"""Errors: their types next to torch's for the same call, what they name, and that nothing happens before them."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import primitives as pr
from primitives.__main__ import arguments_of, public_functions
from tests.support import TORCH_ERRORS, assert_raises

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
BF16 = torch.bfloat16


def ones(*shape, **options):
    return torch.ones(*shape, **options)


def layer_norm(x=X, shape=(4,), **options):
    return lambda f: f.layer_norm(x, shape, **options)


def softmax(x=X, dim=1, **options):
    return lambda f: f.softmax(x, dim, **options)


def log_softmax(x=X, dim=1, **options):
    return lambda f: f.log_softmax(x, dim, **options)


def batch_norm(x=X, training=True, **options):
    state = {"running_mean": torch.zeros(4), "running_var": ones(4), **options}
    return lambda f: f.batch_norm(x, **state, training=training)


Q, K, V = ones(2, 4, 3, 5), ones(2, 4, 6, 5), ones(2, 4, 6, 7)
SEEN = ones(3, 6, dtype=torch.bool)


def sdpa(q=Q, k=K, v=V, mask=None, **options):
    return lambda f: f.scaled_dot_product_attention(q, k, v, mask, **options)


# Each row: the call, the error, and what its text names: the argument, what is required or what came.
CASES = {
    "layer_norm": {
        "empty shape": (layer_norm(shape=()), pr.ShapeError, ["normalized_shape", "[]"]),
        "weight half": (layer_norm(X.to(BF16), weight=ones(4).half()), pr.DtypeError, ["weight", "bfloat16 or"]),
        "two dtypes": (
            layer_norm(X.to(BF16), weight=ones(4), bias=ones(4, dtype=BF16)), pr.DtypeError, ["weight and bias"],
        ),
    },
    "log_softmax": {
        "dim of a number": (log_softmax(ones(())), pr.AxisError, ["dim", "[-1, 0]", "got 1"]),
        "integer": (log_softmax(X.int()), pr.DtypeError, ["input", "torch.int32", "dtype="]),
        "integer result": (log_softmax(dtype=torch.int64), pr.DtypeError, ["result", "torch.int64"]),
    },
    "batch_norm": {
        "no channel axis": (batch_norm(ones(4)), pr.ShapeError, ["input", "at least 2 axes", "got [4]"]),
        "no statistics": (
            batch_norm(training=False, running_mean=None, running_var=None), pr.ShapeError, ["training=True"],
        ),
        "one value": (batch_norm(ones(1, 4)), pr.ShapeError, ["more than 1 value", "got [1, 4]"]),
        "momentum None": (batch_norm(momentum=None), pr.DtypeError, ["momentum", "NoneType", "modules"]),
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
    "scaled_dot_product_attention": {
        "one axis": (sdpa(ones(5)), pr.ShapeError, ["query", "2 axes", "got [5]"]),
        "width": (sdpa(k=ones(2, 4, 6, 4)), pr.ShapeError, ["key", "as wide as query, 5", "got [2, 4, 6, 4]"]),
        "rows": (sdpa(v=ones(2, 4, 5, 7)), pr.ShapeError, ["value", "6 rows of key", "got [2, 4, 5, 7]"]),
        "heads": (sdpa(k=K[:, :2], v=V[:, :2]), pr.ShapeError, ["heads", "key [2, 2, 6, 5]", "enable_gqa=True"]),
        "heads that do not divide": (
            sdpa(k=K[:, :3], v=V[:, :3], enable_gqa=True), pr.ShapeError, ["divide", "query [2, 4, 3, 5]"],
        ),
        "batch": (sdpa(k=ones(3, 4, 6, 5)), pr.ShapeError, ["before the heads", "key [3, 4, 6, 5]"]),
        "mask axes": (sdpa(mask=ones(1, 2, 4, 3, 6)), pr.ShapeError, ["attn_mask", "got [1, 2, 4, 3, 6]"]),
        "mask of one head": (sdpa(Q[0, 0], K[0, 0], V[0, 0], ones(1, 3, 6)), pr.ShapeError, ["attn_mask", "[3, 6]"]),
        "mask and causal": (sdpa(mask=SEEN, is_causal=True), pr.ShapeError, ["mask", "causal", "tril()"]),
        "causal int": (sdpa(is_causal=1), pr.DtypeError, ["is_causal", "bool", "got int"]),
        "gqa None": (sdpa(enable_gqa=None), pr.DtypeError, ["enable_gqa", "bool", "NoneType"]),
    },
}  # fmt: skip
CHANNEL_TENSORS = ("running_mean", "running_var", "weight", "bias")


@pytest.mark.parametrize("op, case", [(op, case) for op, cases in CASES.items() for case in cases])
def test_errors_are_typed_and_name_what_is_wrong(op, case):
    call, error, words = CASES[op][case]
    assert_raises(error, [f"{op}: ", *words], lambda: call(pr.functional), lambda: call(F))


# torch takes these, and does what is hardly meant.
STRICTER = {
    "an imaginary part is dropped": (log_softmax(X.cfloat(), dtype=torch.float32), pr.DtypeError, ["real"]),
    "nested": (layer_norm(torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)), pr.DtypeError, ["unbind"]),
    "bool for a number": (batch_norm(momentum=True), pr.DtypeError, ["momentum", "bool"]),
    "dropout": (sdpa(dropout_p=1.5), ValueError, ["dropout_p", "[0, 1]", "got 1.5"]),
    "a negative probability": (sdpa(dropout_p=-0.1), ValueError, ["dropout_p", "got -0.1"]),
    "a factor without derivative": (sdpa(scale=ones(())), pr.DtypeError, ["scale", "Tensor", "Multiply the query"]),
    "nested rows": (
        sdpa(torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged), K), pr.DtypeError, ["query", "unbind"],
    ),
}  # fmt: skip


def attention(q=Q, k=K, v=V, **options):
    return lambda f: f.attention(q, k, v, **options)


def norm(name, *args):
    return lambda f: getattr(f, name)(*args)


# Functions and arguments that torch does not have.
STRICTER |= {
    "scale tensor": (softmax(scale=ones(())), pr.DtypeError, ["softmax: scale", "Tensor", "Multiply input"]),
    "mask axes": (softmax(mask=ones(1, 3, 4)), pr.ShapeError, ["mask", "[3, 4]", "got [1, 3, 4]"]),
    "bias bool": (attention(bias=SEEN), pr.DtypeError, ["attention: bias", "torch.float32", "torch.bool"]),
    "mask float": (attention(mask=SEEN.float()), pr.DtypeError, ["attention: mask", "bool", "torch.float32"]),
    "bias shape": (attention(bias=ones(4, 6)), pr.ShapeError, ["bias", "[2, 4, 3, 6]", "got [4, 6]"]),
    "leaf None": (attention({"a": Q, "b": Q}, {"a": K, "b": None}), pr.DtypeError, ["k must be", "NoneType"]),
    "leaf width": (attention({"a": Q, "b": ones(3, 4)}), pr.ShapeError, ["k", "as wide as q['b'], 4"]),
    "tree": (attention({"a": Q}, [K]), pr.TreeError, ["k", "tree prefix of q"]),
    "shared heads": (attention(k=K[:, :3]), pr.ShapeError, ["heads", "divide those of q", "k [2, 3, 6, 5]"]),
    "mask and causal": (attention(mask=SEEN, causal=True), pr.ShapeError, ["mask", "causal"]),
    "causal str": (attention(causal="no"), pr.DtypeError, ["causal", "bool", "got str"]),
    "seed wide": (attention(seed=2**63), ValueError, ["seed", "2**63", str(2**63)]),
    "seed shape": (attention(seed=torch.tensor([1])), pr.DtypeError, ["seed", "shape []", "[1]"]),
    "seed dtype": (attention(seed=ones(())), pr.DtypeError, ["seed", "int64", "torch.float32"]),
    "seed device": (attention(seed=torch.tensor(1, device="meta")), pr.DeviceError, ["seed", "cpu", "meta"]),
    "offset dtype": (attention(seed=1, offset=ones(())), pr.DtypeError, ["offset", "int64", "torch.float32"]),
    "offset alone": (attention(offset=1), pr.ShapeError, ["offset", "seed", "None"]),
    "a number": (norm("ada_layer_norm", ones(()), X, X), pr.ShapeError, ["normalized_shape must name at least one"]),
    "scale width": (norm("ada_layer_norm", X, ones(3, 1), X), pr.ShapeError, ["scale must have", "got [3, 1]"]),
    "scale axes": (norm("ada_layer_norm", X, ones(1, 3, 4), X), pr.ShapeError, ["scale must have", "got [1, 3, 4]"]),
    **{
        f"{name}, {kind}": (norm(name, *args), pr.ShapeError, [f"{name}: {words[0]}", words[1]])
        for name in ("add_layer_norm", "add_rms_norm")
        for kind, args, words in (
            ("shape", (X, X, (3,)), ("input must have shape", "[*, 3]")),
            ("residual shape", (X, X[:1], (4,)), ("residual must have shape [3, 4]", "got [1, 4]")),
        )
    },
    "one axis": (norm("group_norm", ones(4), 2), pr.ShapeError, ["input must have at least 2 axes"]),
    "one value": (norm("group_norm", ones(1, 4), 4), pr.ShapeError, ["input must have more"]),
    "one position": (norm("instance_norm", ones(2, 4, 1, 1)), pr.ShapeError, ["input must have"]),
    "one statistic": (norm("instance_norm", ones(2, 4, 3), ones(4)), pr.ShapeError, ["running_mean and running_var"]),
    "no number": (norm("dropout", X, float("nan")), ValueError, ["p must be a probability"]),
    "ignored": (
        lambda f: f.cross_entropy(X, X.softmax(1), ignore_index=0), pr.DtypeError, ["ignore_index goes"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("call, error, words", STRICTER.values(), ids=STRICTER)
def test_where_torch_is_silent(call, error, words):
    assert_raises(error, words, lambda: call(pr.functional))


OPTIONAL = dict.fromkeys(("weight", "bias", "running_mean", "running_var", "linear_bias"), ones(4)) | dict.fromkeys(
    ("attn_mask", "mask"), ones(4, 4, dtype=torch.bool)
)


def faults(value):
    """Values with one fault each for an argument that `value` would be right for, what they raise, and words of it.

    One of the words is said. A shape of the first argument may be told as one that another argument does not go with.
    """
    if isinstance(value, torch.Tensor):
        others = value.cfloat(), value.double() if value.is_floating_point() else value.float()
        yield from ((other, pr.DtypeError, [str(other.dtype)]) for other in others)
        yield value.to("meta"), pr.DeviceError, ["meta"]
        yield value.to_sparse(), pr.DtypeError, ["to_dense"]
        yield value.new_ones(3, 5), pr.ShapeError, ["5"]
    kinds = pr.PrimitivesError, ValueError
    yield from ((wrong, kinds, [str(wrong), type(wrong).__name__]) for wrong in (-1.5, "wrong", 10**6, True))
    yield from (([1.0], kinds, ["1.0", "float", "list"]), (None, kinds, ["None", "together"]))


def raised(function, given):
    """What a call raises, or None."""
    try:
        _ = function and function(**given)
    except Exception as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", public_functions())
def test_an_error_is_torchs_and_names_the_function_the_argument_and_what_came(name):
    function, count = getattr(pr.functional, name), 0
    # Torch's calls of a matrix and a loss raise others, from release to release.
    theirs = getattr(F, name, None) if name != "linear_cross_entropy" else None
    for argument, parameter in inspect.signature(function).parameters.items():
        # Torch's own code reads these; a flag is whatever Python takes for one.
        if argument in ("size_average", "reduce", "_stacklevel", "namespace") or parameter.default in (True, False):
            continue
        given = arguments_of(name, function, torch.ones(2, 4, 4))
        several = {"running_mean", "running_var"} if "running" in argument else {argument}
        given |= {key: OPTIONAL[key] for key in several & {*OPTIONAL}} | ({"seed": 0} if argument == "offset" else {})
        for wrong, kind, words in faults(given.get(argument)):
            error, torchs = (raised(f, {**given, argument: wrong}) for f in (function, theirs))
            if error is None:
                continue
            count += 1
            assert isinstance(error, kind), (argument, error)
            assert str(error).startswith(f"{name}: ")
            assert argument in str(error) or words == ["5"]
            assert any(word in str(error) for word in words), error
            if isinstance(torchs, TORCH_ERRORS) and "unexpected keyword" not in str(torchs):
                assert isinstance(error, type(torchs)), (error, torchs)
    assert count > 5


@pytest.mark.parametrize("wrong", [*CHANNEL_TENSORS, "momentum", "eps"])
def test_a_call_that_raises_writes_nothing(wrong):
    given = {"running_mean": torch.zeros(4), "running_var": ones(4), "weight": ones(4), "bias": ones(4)}
    kept = [value for name, value in given.items() if name != wrong]
    given[wrong] = "0.1" if wrong in ("momentum", "eps") else ones(3)
    for function in (pr.functional.batch_norm, pr.functional.pure_batch_norm):
        with pytest.raises(TORCH_ERRORS):
            function(X, **given, training=True)
    assert all(value._version == 0 for value in kept)


VMAPS = {"primitives": pr.func.vmap, "repaired": lambda norm: pr.repair_torch()(torch.func.vmap(norm))}


@pytest.mark.parametrize("vmap", VMAPS.values(), ids=VMAPS)
@pytest.mark.parametrize("norm, start", [
    (nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(3)), "vmap: running statistics of BatchNorm1d '1' of Sequential, "),
    (nn.InstanceNorm1d(5, track_running_stats=True), "vmap: running statistics of InstanceNorm1d, "),
    (lambda x: F.batch_norm(x[0], ones(3), ones(3), training=True), "vmap: running statistics of batch_norm, "),
    (nn.Sequential(nn.Flatten(0, 1), pr.nn.BatchNorm1d(3)), "BatchNorm1d: vmap: "),
])  # fmt: skip
def test_vmap_over_a_batch_norm_in_training_names_the_module_and_the_remedies(vmap, norm, start):
    with pytest.raises(pr.MutationError, match=rf"^{start}.*pure_module.*eval\(\).*track_running_stats=False\."):
        vmap(norm)(torch.randn(2, 4, 5, 3))
