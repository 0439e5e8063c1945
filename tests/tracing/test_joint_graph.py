"""`trace_joint` gives bitwise what eager autograd gives, whole or in two parts, and so does `create_joint`."""

import re

import optree
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import primitives as pr
from primitives._core.errors import DtypeError, LeafError, ShapeError, TreeError
from primitives.tracing import PhiloxState, create_joint, functionalize_rng, trace_joint


def leaf(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def rich(w, batch):
    """Outputs of every kind: differentiable, constant, integer, an alias of an input, none at all."""
    hidden = pr.functional.layer_norm(batch["x"], (4,), w, None)
    return {
        "y": hidden.sin().sum(-1),
        "constant": batch["x"].detach().cos(),
        "index": hidden.argmax(-1),
        "alias": batch["x"].view(-1),
        "none": None,
        "number": batch["k"],
    }


ONES = torch.ones(3, dtype=torch.float64)
COTANGENTS = {"constant": None, "index": None, "alias": None, "none": None, "number": None}


def same(actual, expected):
    assert optree.tree_structure(actual) == optree.tree_structure(expected)
    for a, e in zip(optree.tree_leaves(actual), optree.tree_leaves(expected), strict=True):
        assert torch.equal(a, e) if isinstance(a, torch.Tensor) else a == e


def operations(graph):
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


def check(fn, primals, cotangents=None, *, graph=None, **options):
    """The graph, its parts and `create_joint` agree bitwise."""
    graph = graph or trace_joint(fn, primals, **options)
    given = (primals,) if cotangents is None else (primals, cotangents)
    expected = create_joint(fn, no_cotangents=cotangents is None)(*given)
    same(graph(primals, cotangents), expected)
    for min_cut in (True, False):
        outs, saved = graph.forward_graph(min_cut=min_cut)(primals)
        same((outs, graph.backward_graph(min_cut=min_cut)(saved, cotangents)), expected)
    return graph


def test_names_nodes_and_structure():
    primals = leaf(4), {"x": leaf(3, 4, seed=1), "k": 3}
    graph = check(rich, primals, {"y": leaf(3, seed=2).detach(), **COTANGENTS})
    assert graph.primal_names == ("w", "batch['x']")
    assert graph.cotangent_names == ("cotangents['y']",)
    assert graph.output_names == ("outs['alias']", "outs['constant']", "outs['index']", "outs['y']")
    assert graph.gradient_names == ("w_bar", "batch['x']_bar")
    assert [n.name for n in graph.graph.find_nodes(op="placeholder")] == ["w", "batch_x", "cotangents_y"]
    names = operations(graph)
    assert names.count("primitives.layer_norm.default") == names.count("primitives.layer_norm_bwd.default") == 1
    # The user's, which stops a derivative, and none of autograd's.
    assert names.count("aten.detach.default") == 1
    (backward,) = (n for n in graph.graph.nodes if str(n.target) == "primitives.layer_norm_bwd.default")
    assert "hidden = pr.functional.layer_norm" in backward.stack_trace
    assert "layer_norm_bwd" in str(graph)
    assert "test_joint_graph.py" in str(graph)
    assert "batch_x" in graph.code


def test_key_paths_that_make_one_name():
    primals = {"b": leaf(3)}, leaf(3, seed=1)
    graph = check(lambda a, a_b: (a["b"].sin() * a_b).sum(), primals, no_cotangents=True)
    assert graph.primal_names == ("a['b']", "a_b")
    assert graph.code


def test_saved_values_and_their_bytes():
    x, w = leaf(8, 8), leaf(8, 8, seed=1)

    def fn(x, w):
        return (x @ w).sin().cos().sin().sum()

    graph = check(fn, (x, w), no_cotangents=True)
    forward, everything = graph.forward_graph(), graph.forward_graph(min_cut=False)
    matrix = 8 * 8 * 8
    assert forward.saved_bytes == matrix
    assert f"{matrix} bytes" in str(forward)
    assert everything.saved_bytes >= 3 * matrix
    # A view of a primal takes no memory in addition.
    assert [entry.shape for entry in forward.saved if entry.is_input] == [(8, 8), (8, 8)]
    assert forward.saved[0].name in graph.backward_graph().input_names
    # Nor does a view of another saved value: both the exponential and its transpose are saved.
    turned = trace_joint(lambda x, w: (x.exp().t() @ w).sum(), (x, w), no_cotangents=True).forward_graph(min_cut=False)
    assert [entry.num_bytes for entry in turned.saved if not entry.is_input] == [matrix, 0]


def test_a_check_that_raises_is_made_once():
    graph = trace_joint(torch.linalg.inv, (torch.eye(3).requires_grad_(),))
    for min_cut in (True, False):
        parts = graph.forward_graph(min_cut=min_cut), graph.backward_graph(min_cut=min_cut)
        assert ["_linalg_check_errors" in repr(part) for part in parts] == [torch.__version__ >= (2, 13), False]


def test_several_batch_sizes():
    def fn(w, x, labels):
        hidden = pr.functional.layer_norm(x @ w, (3,), w[0])
        return torch.nn.functional.nll_loss(pr.functional.log_softmax(hidden, -1), labels)

    def primals(batch):
        return leaf(4, 3), leaf(batch, 4, seed=batch).detach(), torch.arange(batch) % 3

    graph = trace_joint(fn, primals(5), no_cotangents=True, dynamic=(None, 0, 0))
    for batch in (5, 2, 7):
        check(fn, primals(batch), graph=graph)
    w, x, labels = primals(4)
    with pytest.raises(ShapeError, match=re.escape("x must have shape [4, 4], got [3, 4]")):
        graph((w, x[:3], labels))
    with pytest.raises(ShapeError, match=re.escape("x must have shape [4, 4], got [4, 2]")):
        graph((w, x[:, :2], labels))
    # The function fixes an axis that might be dynamic.
    fixed = trace_joint(
        lambda w, x: (x.reshape(5, 4) @ w).sum(), (w, primals(5)[1]), no_cotangents=True, dynamic=(None, 0)
    )
    with pytest.raises(ShapeError, match=re.escape("x must have shape [5, 4], got [4, 4]")):
        fixed((w, x))


def test_the_backward_pass_draws_from_its_own_state():
    def fn(x):
        y = x * 1
        y.register_hook(lambda bar: bar * torch.rand_like(bar))
        return y + torch.rand(8, dtype=x.dtype)

    x, states = leaf(8), (PhiloxState.from_seed(3), PhiloxState.from_seed(4))
    graph = trace_joint(fn, (x,), functionalize_rng=True)
    _, (bar,), (_, state) = graph((x,), torch.ones(8, dtype=x.dtype), rng=states)
    same((bar, state), functionalize_rng(lambda: torch.rand(8, dtype=x.dtype))(states[1]))
    assert not any("rand" in name for name in operations(graph))
    with pytest.raises(TypeError, match="pair of PhiloxState"):
        graph((x,), bar)


def test_inputs_without_memory():
    huge = 1 << 40
    with FakeTensorMode():
        fake = torch.empty(huge, 4, requires_grad=True)
    meta = torch.empty(4, device="meta", requires_grad=True)
    graph = trace_joint(lambda x, w: (x * w).sum(), (fake, meta), no_cotangents=True, device="cpu")
    assert graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape == (huge, 4)


def test_decompositions():
    x = leaf(3, 4)

    def fn(x):
        return torch.nn.functional.silu(x).sum()

    by_list = check(fn, (x,), no_cotangents=True)
    assert "aten.silu_backward.default" in operations(by_list)
    without = trace_joint(fn, (x,), no_cotangents=True, decompose=[torch.ops.aten.silu_backward.default])
    assert "aten.silu_backward.default" not in operations(without)
    torch.testing.assert_close(without((x,)), by_list((x,)))


def test_layout_of_what_is_given():
    turned = leaf(4, 2, 3).detach().permute(1, 2, 0).requires_grad_()
    # A view for the input that is traced, and for none that is laid out in another way.
    graph = trace_joint(lambda x: x.permute(2, 0, 1).reshape(-1).sin(), (turned,))
    assert "view" in graph.code
    given, y_bar = leaf(2, 3, 4), torch.ones(24, dtype=turned.dtype)
    y, (x_bar,) = graph((given,), y_bar)
    assert torch.equal(y, given.detach().permute(2, 0, 1).reshape(-1).sin())
    assert torch.equal(x_bar, given.detach().cos())


WRONG = {
    "w must be a tensor, got list": (LeafError, ([ONES], 2), ONES, {}),
    "primals": (TreeError, (ONES,), ONES, {}),
    "k must be the traced constant 2, got 3": (TreeError, (ONES, 3), ONES, {}),
    "w must have dtype": (DtypeError, (ONES.float(), 2), ONES, {}),
    "w must have shape": (ShapeError, (torch.ones(4, dtype=torch.float64), 2), ONES, {}),
    "cotangents must be a tensor": (LeafError, (ONES, 2), None, {}),
    "cotangents must be tensors or None, got 0": (LeafError, (ONES, 2), 0, {}),
    "takes no rng": (TypeError, (ONES, 2), ONES, {"rng": ()}),
}


def test_wrong_calls():
    graph = trace_joint(lambda w, k: w.sin() * k, (leaf(3), 2))
    for text, (error, primals, cotangents, options) in WRONG.items():
        with pytest.raises(error, match=text):
            graph(primals, cotangents, **options)


LSTM = torch.nn.LSTM(4, 5, num_layers=2, bidirectional=True)


def recurrent(params, x):
    return torch.func.functional_call(LSTM, params, (x,))[0].sin().sum()


def under_autocast(w, x):
    with torch.autocast("cpu", torch.bfloat16):
        hidden = checkpoint(lambda x: (x @ w).relu(), x, use_reentrant=False)
    return hidden.float().sum()


SINGLE = {"dtype": torch.float32}
AGREEING = {
    # Under `no_grad`, torch's forward on the CPU leaves out the workspace that its backward reads.
    "recurrent": (
        recurrent,
        ({k: p.detach().requires_grad_() for k, p in LSTM.named_parameters()}, torch.ones(3, 2, 4)),
    ),
    "autocast and checkpoint": (under_autocast, (leaf(4, 4, **SINGLE), leaf(3, 4, seed=1, **SINGLE))),
    "complex": (lambda z: (z * z.real).abs().sum(), (leaf(3, dtype=torch.complex128),)),
}


@pytest.mark.parametrize("fn, primals", AGREEING.values(), ids=AGREEING)
def test_graphs_agree_with_eager(fn, primals):
    graph = check(fn, primals, no_cotangents=True)
    with torch.no_grad():
        assert not graph(primals)[0].requires_grad
    dtypes = {n.meta["val"].dtype for n in graph.graph.nodes if "mm" in str(n.target)}
    assert dtypes == ({torch.bfloat16} if fn is under_autocast else set())


def test_what_calls_a_graph_may_be_compiled():
    def fn(params, x, scale):
        hidden = pr.functional.layer_norm(x * params["w"] * scale, (3,))
        return {"loss": hidden.sin().sum(), "scale": scale}

    primals = {"w": leaf(3, dtype=torch.float32), "none": None}, leaf(5, 3, dtype=torch.float32).detach(), 2.0
    graph = trace_joint(fn, primals, no_cotangents=True, dynamic=(None, 0, None))
    forward, backward = graph.forward_graph(), graph.backward_graph()

    def all_of_it(*primals):
        outs, saved = forward(primals)
        return graph(primals), (outs, backward(saved))

    compiled = torch.compile(all_of_it, backend="eager", fullgraph=True)
    for size in (5, 7):
        given = primals[0], leaf(size, 3, dtype=torch.float32, seed=size).detach(), 2.0
        for results in compiled(*given):
            same(results, graph(given))
            # A history would be one of operators that have no derivative themselves.
            assert not any(y.requires_grad for y in optree.tree_leaves(results) if isinstance(y, torch.Tensor))


MISTAKES = {
    "structure": ((TreeError, LeafError), {"y": [ONES], **COTANGENTS}, "cotangents['y']"),
    "key": (TreeError, {"z": ONES, **COTANGENTS}, "cotangents"),
    "shape": (ShapeError, {"y": torch.ones(4, dtype=torch.float64), **COTANGENTS}, "cotangents['y'] must have shape"),
    "strides": (
        ShapeError,
        {"y": torch.ones((), dtype=torch.float64).expand(3, 1, 2), **COTANGENTS},
        "cotangents['y']",
    ),
    "dtype": (DtypeError, {"y": ONES.float(), **COTANGENTS}, "cotangents['y'] must have dtype"),
    "constant": (LeafError, {"y": ONES, **COTANGENTS, "constant": ONES}, "cotangents['constant'] must be None"),
    "alias": (LeafError, {"y": ONES, **COTANGENTS, "alias": ONES}, "cotangents['alias'] must be None"),
}


def test_wrong_calls_of_create_joint():
    for error, cotangents, text in MISTAKES.values():
        with pytest.raises(error, match=re.escape(text)):
            create_joint(rich)((leaf(4), {"x": leaf(3, 4), "k": 3}), cotangents)
    joint = create_joint(torch.sin)
    with pytest.raises(TypeError, match="a tuple of arguments"):
        joint(leaf(3), ONES)
    for call in (lambda: joint((torch.ones(3),), ONES), lambda: trace_joint(torch.sin, (torch.ones(3),))):
        with pytest.raises(LeafError, match=r"Call requires_grad_\(\)"):
            call()
    for args in ((), (torch.ones(2, 3),)):
        with pytest.raises(LeafError, match=r"pure_module\(module\)"):
            trace_joint(torch.nn.Linear(3, 3), args)
    with pytest.raises(LeafError, match=re.escape("one element that requires grad, got [3]")):
        create_joint(torch.sin, no_cotangents=True)((leaf(3),))
