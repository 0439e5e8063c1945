"""The functional API: torch.nn.functional's signatures, layouts, dtypes and running statistics, and pytrees."""

import functools
from contextlib import nullcontext

import optree
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import primitives as pr
from tests.func.func_trees import assert_tree
from tests.support import data

functional = pr.functional


seeded = functools.partial(data, dtype=torch.float32)


CALLS = {
    "layer_norm": lambda f, x: f.layer_norm(x, x.shape[-1:]),
    "log_softmax": lambda f, x: f.log_softmax(x, 1),
    "log_softmax_dtype": lambda f, x: f.log_softmax(x, -1, dtype=torch.float64),
    "softmax": lambda f, x: f.softmax(x, 1),
    "group_norm": lambda f, x: f.group_norm(x, 1, seeded(x.shape[1]).to(x)),
    "instance_norm": lambda f, x: f.instance_norm(x, None, None, None, seeded(x.shape[1]).to(x)),
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
    "axis of size 1": lambda x: x[:1, :3, :2, :1].contiguous().permute(0, 2, 1, 3),
    "empty": lambda x: x[:0].clone(memory_format=torch.channels_last),
    "empty_3d": lambda x: x[:0, :, None].repeat(1, 1, 2, 1, 1).clone(memory_format=torch.channels_last_3d),
}


# Torch's group norm takes these for channels_last.
OTHERS = ("group_norm", "transposed"), ("group_norm", "axis of size 1")


@pytest.mark.parametrize(
    "call, layout",
    [(c, y) for c in CALLS for y in LAYOUTS if ("batch_norm" in c or "empty" not in y) and (c, y) not in OTHERS],
)
def test_results_and_gradients_lie_as_torchs_and_may_be_written(call, layout):
    results = []
    for space in (functional, F):
        x = LAYOUTS[layout](seeded(4, 3, 4, 5)).detach().requires_grad_()
        y = CALLS[call](space, x).mul_(2)
        # The cotangent has the layout of y, which the gradient of torch follows where nothing is computed.
        results.append([y, *torch.autograd.grad(y, x, torch.ones_like(y))] if "batch_norm" in call else [y])
    assert_close(*results, rtol=2e-6, atol=2e-6)
    strides = [[t.stride() for t in result] for result in results]
    assert strides[0] == strides[1]
    with FakeTensorMode():
        # A compiler is told the same.
        x = torch.empty_strided(x.shape, x.stride())
        assert CALLS[call](functional, x).stride() == strides[0][0]


IMPLICIT = {"tree": lambda x: functional.log_softmax({"a": [x]})["a"][0], "module": lambda x: pr.nn.LogSoftmax()(x)}


@pytest.mark.parametrize("name", IMPLICIT)
def test_log_softmax_chooses_the_axis_of_torch_when_none_is_given(name):
    for x in (seeded(*[2, 3, 4, 2, 3][:ndim]) for ndim in range(6)):
        with pytest.warns(UserWarning, match="^Implicit dimension choice"):
            theirs = F.log_softmax(x)
        with pytest.warns(UserWarning, match="^log_softmax: .*dim=") as caught:
            assert_close(IMPLICIT[name](x), theirs)
        # The line of the caller.
        assert [(w.filename, w.lineno) for w in caught] == [(__file__, IMPLICIT[name].__code__.co_firstlineno)]


# The running statistics that have a batch axis, and whether the input has one.
BATCHED = [((), False), (("mean",), False), (("var",), False), (("mean", "var"), False), (("mean", "var"), True)]


@pytest.mark.parametrize("names, input_too", BATCHED)
def test_vmap_writes_each_running_statistic(names, input_too):
    x, weights = seeded(6, 5, 3, dtype=torch.float64), seeded(6, 3, dtype=torch.float64)
    x = x if input_too else x[0]
    state = [seeded(*[6] * (name in names), 3, dtype=torch.float64).exp() for name in ("mean", "var")]
    axes = (0 if input_too else None, *[0 if name in names else None for name in ("mean", "var")], 0)
    rows = [
        [(t if axis is None else t[i]).clone() for t, axis in zip((x, *state, weights), axes, strict=True)]
        for i in range(6)
    ]
    y = vmap(lambda *args: functional.batch_norm(*args, training=True), in_dims=axes)(x, *state, weights)
    for i, row in enumerate(rows):
        assert_close(y[i], F.batch_norm(*row, training=True))
        assert_close([t if axis is None else t[i] for t, axis in zip(state, axes[1:3], strict=True)], row[1:3])


RUNNING = torch.zeros(8), torch.ones(8)
BIAS_ONLY = {
    "layer_norm": lambda x, bias: functional.layer_norm(x, (8,), None, bias),
    "batch_norm": lambda x, bias: functional.batch_norm(x, None, None, None, bias, training=True),
    "batch_norm_eval": lambda x, bias: functional.batch_norm(x, *RUNNING, None, bias),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BIAS_ONLY)
def test_the_sum_for_a_wide_bias_is_not_rounded_to_a_narrow_input(name, dtype):
    torch.manual_seed(0)
    x, bias = torch.randn(2048, 8).to(dtype), torch.zeros(8, requires_grad=True)
    (bias_bar,) = torch.autograd.grad(BIAS_ONLY[name](x, bias), bias, torch.full_like(x, 64.0))
    # Beyond the largest float16, and more digits than bfloat16 has.
    assert bias_bar.tolist() == [64.0 * 2048] * 8
    narrow = bias.detach().to(dtype)
    assert grad(lambda b: BIAS_ONLY[name](x, b).float().sum())(narrow).dtype == dtype


def sdpa(space, *args, **options):
    """Torch's by its plain formula, which takes all that any of its kernels takes."""
    with sdpa_kernel(SDPBackend.MATH):
        return space.scaled_dot_product_attention(*args, **options)


def attention_inputs(q, k, v=None):
    """Shapes before rows and width, which are 4 or 6 rows of 5, values 7 wide."""
    return [
        seeded(*lead, *last) for lead, last in zip((q, k, k if v is None else v), ((4, 5), (6, 5), (6, 7)), strict=True)
    ]


# Shapes of query, key and value before their rows, and what else is asked for.
SDPA = {
    "two axes": ((), (), (), [(6,), (4, 1), (4, 6)], {}),
    "three axes": ((3,), (3,), (3,), [(), (1, 6), (3, 4, 6), (1, 4, 6)], {}),
    "batch and heads": ((2, 3), (2, 3), (2, 3), [(4, 6), (2, 1, 1, 6), (3, 4, 6), (1, 1, 4, 6)], {"scale": -0.5}),
    "five axes": ((2, 2, 3), (2, 1, 3), (1, 2, 3), [(2, 1, 1, 1, 6)], {}),
    "broadcast": ((2, 1), (3,), (1, 3), [(2, 3, 1, 6)], {"scale": 0.0}),
    "values alone have heads": ((2, 1), (2, 1), (2, 3), [(4, 6)], {}),
    "fewer axes": ((), (2, 3), (3,), [(4, 6)], {}),
    "shared heads": ((2, 4), (2, 2), (2, 2), [(4, 4, 6)], {"enable_gqa": True}),
    "other heads of values": ((2, 4), (1, 2), (2, 4), [(4, 6)], {"enable_gqa": True}),
    "no batch": ((0, 3), (0, 3), (0, 3), [(4, 6)], {}),
}


@pytest.mark.parametrize("q, k, v, masks, options", SDPA.values(), ids=SDPA)
def test_attention_takes_the_shapes_and_masks_of_torch(q, k, v, masks, options):
    x = attention_inputs(q, k, v)
    for extra in ({}, {"is_causal": True}):
        found = sdpa(functional, *x, **options, **extra)
        assert_close(found, sdpa(F, *x, **options, **extra))
        assert found.is_contiguous() or found.transpose(-2, -3).is_contiguous()
        assert found.is_contiguous() or found.dim() > 3, "some call view of it, as torch's allows"
    for shape in masks:
        bias = seeded(*shape).to(x[0])
        for mask in (bias, bias > -0.7):
            assert_close(sdpa(functional, *x, mask, **options), sdpa(F, *x, mask, **options))


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("context", [nullcontext, pr.repair_torch])
def test_attention_takes_the_causal_bias_of_torch(make, rows, context):
    """Its elements are never written: whoever reads them computes with what lies in memory."""
    q, k, v = (x[..., :rows, :] if i == 0 else x[..., :4, :] for i, x in enumerate(attention_inputs((2, 3), (2, 3))))
    bias, space = make(rows, 4), functional if context is nullcontext else F
    mask = torch.ones(rows, 4, dtype=torch.bool).tril(4 - rows if make is causal_lower_right else 0)
    with context():
        found = torch.func.jvp(lambda q: space.scaled_dot_product_attention(q, k, v, bias), (q,), (q,))
    assert_close(found, torch.func.jvp(lambda q: sdpa(F, q, k, v, mask), (q,), (q,)))


def test_the_result_of_attention_can_be_written():
    q, k, v = attention_inputs((2, 3), (2, 3))
    for values in (v, k):
        functional.scaled_dot_product_attention(q.requires_grad_(), k, values).mul_(2)


def test_the_stream_of_attention():
    """An int and a tensor are one seed, torch's generator draws others, and offsets move along the stream."""
    q, k, v = attention_inputs((2, 3), (2, 3))

    def dropped(q=q, **options):
        return functional.attention(q, k, v, dropout_p=0.5, **options)

    assert_close(dropped(seed=7), dropped(seed=torch.tensor(7), offset=0), rtol=0, atol=0)
    assert not torch.equal(dropped(seed=7), dropped(seed=8))
    assert not torch.equal(dropped(seed=7), dropped(seed=7, offset=4))
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append([*dropped({"a": q, "b": q}).values(), sdpa(functional, q, k, v, None, 0.5)])
    assert_close(*drawn, rtol=0, atol=0)
    assert not torch.equal(*drawn[0][:2]), "each leaf has numbers of its own"
    assert not torch.equal(drawn[0][2], sdpa(functional, q, k, v, None, 0.5)), "and each call"
    assert torch.equal(*dropped({"a": q, "b": q}, seed=7).values())
    x, gradients = q.clone().requires_grad_(), []
    for call in (dropped, lambda x: checkpoint(dropped, x, use_reentrant=False)):
        torch.manual_seed(0)
        y, _ = call(x), torch.rand(3)
        gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert_close(*gradients, rtol=0, atol=0)
    for randomness in ("same", "different"):
        first, second = vmap(dropped, randomness=randomness)(q.expand(2, *q.shape))
        assert torch.equal(first, second) == (randomness == "same")
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(dropped)(q.expand(2, *q.shape))


def assert_same(ours, theirs):
    assert_tree(ours, theirs, rtol=0, atol=0)


def test_prefix_trees_of_parameters():
    x = {"a": data(5, 3, seed=0), "b": [data(5, 3, seed=1), data(5, 3, seed=2)], "c": (data(5, 3, seed=3), None)}
    shared = data(5, 3, seed=4)[0].requires_grad_()
    weight = {"a": torch.full((3,), 2.0).double(), "b": shared, "c": None}
    bias = {"a": None, "b": [data(5, 3, seed=5)[0], None], "c": (data(5, 3, seed=6)[0], data(5, 3, seed=7)[0])}
    ours = pr.functional.layer_norm(x, (3,), weight, bias)

    def single(leaf, w, b):
        return pr.functional.layer_norm(leaf, (3,), w, b)

    of_shared = [single(x["b"][0], shared, bias["b"][0]), single(x["b"][1], shared, None)]
    expected = {
        "a": single(x["a"], weight["a"], None), "b": of_shared, "c": (single(x["c"][0], None, bias["c"][0]), None),
    }  # fmt: skip
    assert_same(ours, expected)
    assert_close(*[torch.autograd.grad(sum(y.square().sum() for y in ys), shared) for ys in (ours["b"], of_shared)])


@pytest.mark.parametrize(
    "weight, path",
    [
        (lambda w: {"a": w}, "weight tree root"),
        (lambda w: {"a": w, "b": {"c": w, "d": [w]}}, "weight['b']['d']"),
        (lambda w: {"a": {"x": w}, "b": w}, "weight['a']"),
    ],
    ids=["missing", "children", "leaf"],
)
def test_a_wrong_prefix_is_named_with_its_key_path(weight, path):
    x = {"a": data(5, 3, seed=0), "b": {"c": data(5, 3, seed=1), "d": [data(5, 3, seed=2), data(5, 3, seed=3)]}}
    weight = weight(data(5, 3, seed=4)[0])
    with pytest.raises(
        pr.TreeError, match=r"^layer_norm: weight must be one value or a tree prefix of input"
    ) as caught:
        pr.functional.layer_norm(x, (3,), weight)
    # Where, and both structures.
    for part in (path, *[str(optree.tree_structure(tree, none_is_leaf=True)) for tree in (weight, x)]):
        assert part in str(caught.value)


def batch_norm_state():
    return torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize("bad", [data(5, 4, seed=1), data(5, 3, seed=1).int(), data(1, 3, seed=1), 1.0])
def test_one_bad_leaf_leaves_the_running_statistics_unwritten(bad):
    state = batch_norm_state()
    with pytest.raises((pr.ShapeError, pr.DtypeError)):
        pr.functional.batch_norm([data(5, 3, seed=0), bad], *state, training=True)
    assert [value._version for value in state] == [0, 0]
