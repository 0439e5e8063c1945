"""jacrev, jacfwd, hessian, functional_call: against torch.func on flat functions and against formulas."""

import optree
import pytest
import torch
from func_trees import (
    NAMESPACE,
    Batch,
    Pair,
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
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 100])
def test_jacobian_against_torch(params, transform, chunk_size):
    x = randn(2)

    def function(params, x):
        y = predict(params, x)
        return Pair(y, {"sum": y.sum(), "none": None})

    expected = torch.func.jacrev(lambda *t: (flat_predict(*t), flat_predict(*t).sum()), tuple(range(6)))(
        *leaves(params), x
    )
    options = {"chunk_size": chunk_size, "namespace": NAMESPACE}
    by_params, by_x = (transform(function, i, **options)(params, x) for i in (0, 1))
    both = transform(function, (0, 1), **options)(params, x)
    for row, wanted in zip(("left", "right"), expected, strict=True):
        get = (lambda tree: tree.left) if row == "left" else (lambda tree: tree.right["sum"])
        assert structure(get(by_params)) == structure(params)
        torch.testing.assert_close(tuple(leaves(get(by_params))), tuple(wanted[:5]))
        torch.testing.assert_close(get(by_x), wanted[5])
        assert_tree(get(both), (get(by_params), get(by_x)))
    assert by_params.right["none"] is None


@pytest.mark.parametrize("transform", JACOBIANS)
def test_aux_keyword_arguments_and_other_tensors(transform):
    x, other = {"x": randn(3)}, torch.arange(3)

    def function(t, index, *, scale):
        return (t["x"][index] * scale) ** 2, {"raw": t["x"], "note": "aux", "index": index}

    jacobian, aux = transform(function, has_aux=True)(x, other, scale=torch.tensor(3.0))
    assert_tree(jacobian, {"x": torch.diag(18 * x["x"])})
    assert_tree(aux, {"raw": x["x"], "note": "aux", "index": other})


def test_jacfwd_randomness():
    def noisy(x):
        return x["x"] * torch.rand(())

    x = {"x": torch.ones(64)}
    with pytest.raises(RuntimeError, match="randomness error mode"):
        func.jacfwd(noisy)(x)
    for chunk_size in (None, 16):
        same = func.jacfwd(noisy, randomness="same", chunk_size=chunk_size)(x)["x"].diagonal()
        assert len(same.unique()) == 1
        different = func.jacfwd(noisy, randomness="different", chunk_size=chunk_size)(x)["x"].diagonal()
        assert len(different.unique()) > 32


@pytest.mark.parametrize("transform", JACOBIANS)
def test_empty_outputs_and_inputs(transform):
    x = {"full": randn(2), "empty": randn(0)}
    jacobian = transform(lambda t: {"y": t["full"] * 2, "none": t["empty"] * 1})(x)
    assert_tree(jacobian["y"], {"full": 2 * torch.eye(2, dtype=torch.float64), "empty": randn(2, 0)})
    assert jacobian["none"]["full"].shape == (0, 2)


@pytest.mark.parametrize("transform", JACOBIANS)
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_nothing_but_empty(transform, chunk_size):
    assert transform(lambda x: x[:0], chunk_size=chunk_size)(randn(4)).shape == (0, 4)
    assert transform(lambda x: x * 2, chunk_size=chunk_size)(randn(0, 2)).shape == (0, 2, 0, 2)
    constant = transform(lambda x: (x.sum() + torch.ones(3), {"x": x, "n": 1}), has_aux=True, chunk_size=chunk_size)
    jacobian, aux = constant(randn(0))
    assert jacobian.shape == (3, 0)
    assert_tree(aux, {"x": randn(0), "n": 1})


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_hessian_against_torch(params, chunk_size):
    batch = Batch(randn(2), randn(3))
    expected = torch.func.hessian(flat_loss, tuple(range(7)))(*leaves(params), *batch)
    options = {"chunk_size": chunk_size, "namespace": NAMESPACE}
    single = func.hessian(loss, **options)(params, batch)
    assert single["affine"].w["pair"].left.shape == (3, 2, 3)
    torch.testing.assert_close(leaves(single), [block for row in expected[:5] for block in row[:5]])
    both = func.hessian(loss, (0, 1), **options)(params, batch)
    torch.testing.assert_close(leaves(both), [block for row in expected for block in row])
    torch.testing.assert_close(both[1].x[0]["affine"].b, expected[5][1])


def test_hessian_of_a_tree_of_outputs():
    x = randn(3)
    hessian = func.hessian(lambda t: {"cube": t["x"] ** 3, "sum": t["x"].sum() ** 2})({"x": x})
    expected = torch.zeros(3, 3, 3, dtype=torch.float64)
    for i in range(3):
        expected[i, i, i] = 6 * x[i]
    torch.testing.assert_close(hessian["cube"]["x"]["x"], expected)
    torch.testing.assert_close(hessian["sum"]["x"]["x"], torch.full((3, 3), 2.0, dtype=torch.float64))


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


def test_functional_call_by_flat_nested_and_several_trees():
    block = Block()
    weight, bias, scale, x = torch.randn(3, 2), torch.randn(3), torch.tensor(2.0), torch.randn(2)
    expected = torch.func.functional_call(
        block, {"linear.weight": weight, "linear.bias": bias, "scale": scale}, x, {"offset": 1.0}
    )
    trees = [
        {"linear.weight": weight, "linear.bias": bias, "scale": scale},
        {"linear": {"weight": weight, "bias": bias}, "scale": scale},
        ({"linear": {"weight": weight}}, {"linear.bias": bias, "scale": scale, "unused": None}),
        [dict(zip(("linear.weight", "linear.bias"), (weight, bias), strict=True)), {"scale": scale}],
    ]
    for tree in trees:
        torch.testing.assert_close(func.functional_call(block, tree, x, {"offset": 1.0}), expected)
        torch.testing.assert_close(func.functional_call(block, tree, (x,), {"offset": 1.0}), expected)
    dataclass = {"linear": Linear(weight, bias), "scale": scale}
    result = func.functional_call(block, dataclass, x, {"offset": 1.0}, namespace=NAMESPACE)
    torch.testing.assert_close(result, expected)
    with pytest.raises(RuntimeError, match="Missing key"):
        func.functional_call(block, {"linear": {"weight": weight}}, x, strict=True)
    assert block.scale == 1


def test_gradient_of_a_functional_call():
    block = Block()
    nested = {"linear": {"weight": block.linear.weight.detach(), "bias": block.linear.bias.detach()}}
    x = torch.randn(5, 2)
    gradient = func.grad(lambda p: func.functional_call(block, p, x).square().sum())(nested)
    block(x).square().sum().backward()
    assert_tree(gradient, {"linear": {"weight": block.linear.weight.grad, "bias": block.linear.bias.grad}})


def norm_of_buffers():
    """A norm in training, its parameters, and fresh copies of its buffers, which a call changes."""
    module = torch.nn.BatchNorm1d(2)
    params = {name: p.detach() for name, p in module.named_parameters()}
    return module, params, lambda: {name: b.clone() for name, b in module.named_buffers()}


def norm_loss(module):
    return lambda p, b, x: (func.functional_call(module, (p, b), x) ** 3).sum()


@pytest.mark.parametrize(
    "transform, compiled",
    [
        (func.grad, False),
        (func.jacrev, False),
        (func.jacfwd, False),
        (func.hessian, False),
        # Compiled, each takes seconds; a Hessian is made of the other two.
        (func.grad, True),
        (func.hessian, True),
    ],
)
def test_buffers_that_are_arguments_are_updated(transform, compiled):
    module, params, fresh = norm_of_buffers()
    x = torch.randn(4, 2)
    ours, theirs = fresh(), fresh()
    function = transform(norm_loss(module))
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    result = function(params, ours, x)
    assert_tree(result, getattr(torch.func, transform.__name__)(norm_loss(module))(params, theirs, x))
    assert_tree(ours, theirs)
    assert ours["num_batches_tracked"] == 1
    with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
        transform(lambda p: norm_loss(module)(p, ours, x))(params)


@pytest.mark.parametrize("compiled", [False, True])
def test_buffers_in_a_hessian_vector_product(compiled):
    module, params, fresh = norm_of_buffers()
    x, buffers, direction = torch.randn(4, 2), fresh(), {name: torch.randn(2) for name in params}

    def function(p, b, x, v):
        return func.hvp(norm_loss(module), (p, b, x), (v, None, None))

    if compiled:
        torch._dynamo.reset()
        product = torch.compile(function, fullgraph=True, backend="aot_eager")(params, buffers, x, direction)
    else:
        product = function(params, buffers, x, direction)
    rows = func.hessian(norm_loss(module))(params, fresh(), x)
    expected = {name: sum(row[other] @ direction[other] for other in row) for name, row in rows.items()}
    assert_tree(product, (expected, None, None), rtol=1e-4, atol=1e-4)
    assert buffers["num_batches_tracked"] == 1


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("drop", [torch.nn.functional.dropout, pr.functional.dropout])
def test_hessian_through_dropout(drop, chunk_size):
    """One mask for the whole matrix, which an explicit loop over rows with that mask gives."""
    x = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)

    def loss(x):
        return drop(x.sin(), 0.5).pow(3).sum()

    with pytest.raises(RuntimeError, match="randomness error mode"):
        func.hessian(loss, chunk_size=chunk_size)(x)
    torch.manual_seed(1)
    found = func.hessian(loss, randomness="same", chunk_size=chunk_size)(x)
    torch.manual_seed(1)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(loss, x), rtol=1e-12, atol=1e-12)
    assert 0 < (found.diagonal() != 0).sum() < 5
    torch.manual_seed(1)
    (product,) = func.hvp(loss, (x,), (torch.ones_like(x),))
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
def test_jacrev_randomness(chunk_size):
    """Of a backward pass that draws."""
    x = torch.ones(6)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        func.jacrev(NoisyBackward.apply, chunk_size=chunk_size)(x)
    same = func.jacrev(NoisyBackward.apply, randomness="same", chunk_size=chunk_size)(x).diagonal()
    assert torch.equal(same, same[:1].expand(6))
    different = func.jacrev(NoisyBackward.apply, randomness="different", chunk_size=chunk_size)(x).diagonal()
    assert len(different.unique()) == 6
