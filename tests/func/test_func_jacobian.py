"""jacrev, jacfwd, hessian, functional_call: against torch.func on flat functions and against formulas."""

import optree
import pytest
import torch
from func_trees import (
    NAMESPACE,
    Batch,
    Pair,
    assert_leaves,
    assert_tree,
    flat_loss,
    flat_predict,
    leaves,
    loss,
    predict,
    randn,
    structure,
)
from func_trees import params as make_params

import primitives as pr
from primitives import func

JACOBIANS = [func.jacrev, func.jacfwd]


@pytest.fixture(name="params")
def _params():
    torch.manual_seed(4)
    return make_params()


@pytest.mark.parametrize("transform", JACOBIANS)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_jacobian_against_torch(params, transform, chunk_size):
    x = randn(2)

    def function(params, x):
        y = predict(params, x)
        return Pair(y, {"sum": y.sum(), "none": None})

    expected = torch.func.jacrev(lambda *t: (flat_predict(*t), flat_predict(*t).sum()), tuple(range(6)))(
        *leaves(params), x
    )
    options = {"chunk_size": chunk_size, "namespace": NAMESPACE}
    single = transform(function, 0, **options)(params, x)
    both = transform(function, (1, 0), **options)(params, x)
    for of_x, of_params, alone, wanted in (
        (*both.left, single.left, expected[0]),
        (*both.right["sum"], single.right["sum"], expected[1]),
    ):
        assert structure(of_params) == structure(params)
        assert_leaves((of_params, of_x), wanted)
        assert_tree(of_params, alone)
    assert single.right["none"] is None


@pytest.mark.parametrize("transform", JACOBIANS)
def test_aux_keyword_arguments_and_other_tensors(transform):
    x, other = {"x": randn(3)}, torch.arange(3)

    def function(t, index, *, scale):
        return (t["x"][index] * scale) ** 2, {"raw": t["x"], "note": "aux", "index": index}

    jacobian, aux = transform(function, has_aux=True)(x, other, scale=torch.tensor(3.0))
    assert_tree(jacobian, {"x": torch.diag(18 * x["x"])})
    assert_tree(aux, {"raw": x["x"], "note": "aux", "index": other})


@pytest.mark.parametrize("transform", JACOBIANS)
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_empty_inputs_and_outputs(transform, chunk_size):
    assert transform(lambda x: x[:0], chunk_size=chunk_size)(randn(4)).shape == (0, 4)
    assert transform(lambda x: x * 2, chunk_size=chunk_size)(randn(0, 2)).shape == (0, 2, 0, 2)
    constant = transform(
        lambda x: (x.sum() + torch.ones(3).double(), {"x": x, "n": 1}), has_aux=True, chunk_size=chunk_size
    )
    assert_tree(constant(randn(0)), (randn(3, 0), {"x": randn(0), "n": 1}))
    x = {"full": randn(2), "empty": randn(0)}
    jacobian = transform(lambda t: {"y": t["full"] * 2, "none": t["empty"] * 1}, chunk_size=chunk_size)(x)
    assert_tree(jacobian["y"], {"full": 2 * torch.eye(2, dtype=torch.float64), "empty": randn(2, 0)})
    assert jacobian["none"]["full"].shape == (0, 2)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_hessian_against_torch(params, chunk_size):
    batch = Batch(randn(2), randn(3))
    expected = torch.func.hessian(flat_loss, tuple(range(7)))(*leaves(params), *batch)
    options = {"chunk_size": chunk_size, "namespace": NAMESPACE}
    single = func.hessian(loss, **options)(params, batch)
    assert single["affine"].w["pair"].left.shape == (3, 2, 3)
    assert_leaves(single, [block for row in expected[:5] for block in row[:5]])
    both = func.hessian(lambda *args: {"out": [loss(*args)]}, (0, 1), **options)(params, batch)
    assert_leaves(both, [block for row in expected for block in row])
    torch.testing.assert_close(both["out"][0][1].x[0]["affine"].b, expected[5][1])


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class Linear:
    weight: torch.Tensor
    bias: torch.Tensor


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x, *, offset=0.0):
        return self.linear(x) * self.scale + offset


def test_gradient_of_a_functional_call():
    block = Block()
    nested = {"linear": {"weight": block.linear.weight.detach(), "bias": block.linear.bias.detach()}}
    x = torch.randn(5, 2)
    gradient = func.grad(lambda p: func.functional_call(block, p, x).square().sum())(nested)
    block(x).square().sum().backward()
    assert_tree(gradient, {"linear": {"weight": block.linear.weight.grad, "bias": block.linear.bias.grad}})


def test_functional_call_by_flat_nested_and_several_trees():
    block, x = Block(), torch.randn(2)
    weight, bias, scale = torch.randn(3, 2), torch.randn(3), torch.tensor(2.0)
    expected = torch.nn.functional.linear(x, weight, bias) * scale + 1
    for tree in (
        {"linear.weight": weight, "linear.bias": bias, "scale": scale},
        {"linear": Linear(weight, bias), "scale": scale},
        ({"linear": {"weight": weight}}, {"linear.bias": bias, "scale": scale, "unused": None}),
        [{"linear": {"weight": weight, "bias": bias}}, {"scale": scale}],
    ):
        for args in (x, (x,)):
            result = func.functional_call(block, tree, args, {"offset": 1.0}, namespace=NAMESPACE)
            torch.testing.assert_close(result, expected)
    with pytest.raises(RuntimeError, match="Missing key"):
        func.functional_call(block, {"linear": {"weight": weight}}, x, strict=True)
    assert block.scale == 1


def norm_of_buffers():
    """The loss of a norm in training, its parameters, and fresh copies of its buffers, which a call changes."""
    module = torch.nn.BatchNorm1d(2).double()
    params = {name: p.detach() for name, p in module.named_parameters()}

    def loss(p, b, x):
        return (func.functional_call(module, (p, b), x) ** 3).sum()

    return loss, params, lambda: {name: b.clone() for name, b in module.named_buffers()}


# Compiled, each takes seconds; a Hessian is made of the other two.
@pytest.mark.parametrize(
    "transform, compiled",
    [(func.grad, False), (func.jacrev, False), (func.jacfwd, False), (func.grad, True), (func.hessian, True)],
)
def test_buffers_that_are_arguments_are_updated(transform, compiled):
    loss, params, fresh = norm_of_buffers()
    x, ours, theirs, function = randn(4, 2), fresh(), fresh(), transform(loss)
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    result = function(params, ours, x)
    assert_tree(result, getattr(torch.func, transform.__name__)(loss)(params, theirs, x))
    assert_tree(ours, theirs)
    assert ours["num_batches_tracked"] == 1
    with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
        transform(lambda p: loss(p, ours, x))(params)


@pytest.mark.parametrize("compiled", [False, True])
def test_buffers_in_a_hessian_vector_product(compiled):
    loss, params, fresh = norm_of_buffers()
    x, buffers, direction = randn(4, 2), fresh(), {name: randn(2) for name in params}

    def function(p, b, x, v):
        return func.hvp(loss, (p, b, x), (v, None, None))

    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    product = function(params, buffers, x, direction)
    rows = func.hessian(loss)(params, fresh(), x)
    expected = {name: sum(row[other] @ direction[other] for other in row) for name, row in rows.items()}
    assert_tree(product, (expected, None, None))
    assert buffers["num_batches_tracked"] == 1


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("drop", [torch.nn.functional.dropout, pr.functional.dropout])
def test_hessian_through_dropout(drop, chunk_size):
    """One mask for the whole matrix, which an explicit loop over rows with that mask gives."""
    x = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)

    def loss(x):
        return drop(x.sin(), 0.5).pow(3).sum()

    def seeded(function, *args, **options):
        torch.manual_seed(1)
        return function(loss, *args, **options)

    with pytest.raises(RuntimeError, match="randomness error mode"):
        func.hessian(loss, chunk_size=chunk_size)(x)
    found = seeded(lambda loss: func.hessian(loss, randomness="same", chunk_size=chunk_size)(x))
    torch.testing.assert_close(found, seeded(torch.autograd.functional.hessian, x), rtol=1e-12, atol=1e-12)
    assert 0 < (found.diagonal() != 0).sum() < 5
    (product,) = seeded(func.hvp, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(product, found.sum(1), rtol=1e-12, atol=1e-12)


class NoisyBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, y_bar):
        return y_bar * torch.rand((), dtype=y_bar.dtype)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize(
    "transform, noisy", [(func.jacrev, NoisyBackward.apply), (func.jacfwd, lambda x: x * torch.rand(()))]
)
def test_randomness(transform, noisy, chunk_size):
    x = torch.ones(6)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        transform(noisy, chunk_size=chunk_size)(x)
    for randomness, numbers in (("same", 1), ("different", 6)):
        found = transform(noisy, randomness=randomness, chunk_size=chunk_size)(x)
        assert len(found.diagonal().unique()) == numbers
