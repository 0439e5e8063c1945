"""Losses with derivatives in them: the whole compiled, and the model alone with derivatives outside of it."""

import contextlib
import functools
import re

import pytest
import torch
from torch import nn

import primitives as pr
from primitives._audit.nestings import nested, nested_by_autograd, nestings
from tests.compiled.support import data, gradients, mlp, plainly, same
from tests.nested_losses import LOSSES, NESTINGS, Net, biharmonic, penalty, plain

X, V = data(6, 3), data(6, 3, seed=1)


# By night those whose outer derivatives others take, and the longer half of each grid below: seconds each.
def nightly(*values):
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss is not biharmonic] + nightly(biharmonic))
def test_whole(loss):
    net = mlp()
    step, truth = plainly(functools.partial(loss, net)), gradients(net, loss(net, X))
    for _ in range(2):
        same(gradients(net, step(X)), truth)
    assert len(step.settings.programs) == 2, "forward and backward pass"


@pytest.fixture(scope="module")
def model():
    return plainly(pr.nn.convert(Net(norm=nn.LayerNorm, depth=1)))


LONG = {f"backward of {name}" for name in ("second_tangent", "third", "laplacian", "biharmonic")} | {"jacrev of jacrev"}


@pytest.mark.parametrize("name", [*(n for n in NESTINGS if n not in LONG), *nightly(*LONG)])
def test_model(name, model):
    """One model has the programs of them all."""
    truth = NESTINGS[name](pr.nn.convert(Net(norm=nn.LayerNorm, depth=1)))
    for _ in range(2):
        torch.testing.assert_close(NESTINGS[name](model), truth, rtol=1e-10, atol=1e-10)


SOLVERS = {
    "solve": lambda a: torch.linalg.solve(a, V[0]),
    "inv": torch.linalg.inv,
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0],
    "tensorsolve": lambda a: torch.linalg.tensorsolve(a, V[0]),
}


CHECKS_ARE_DROPPED = "graphs of torch before 2.13 lose these checks, as the page of compile says"


@pytest.mark.skipif(torch.__version__ < (2, 13), reason=CHECKS_ARE_DROPPED)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["solve", *nightly("cholesky", "inv", "lu_factor", "tensorsolve")])
def test_solvers_raise_for_singular_matrices(name):
    solver = SOLVERS[name]

    def first(a):
        return torch.func.jvp(lambda a: solver(a).square().sum(), (a,), (V[:3],))[1]

    def second(a):
        return torch.autograd.grad(first(a), a, create_graph=True)[0].square().sum()

    well, singular = (a.requires_grad_() for a in (data(3, 3) + 4 * torch.eye(3), torch.zeros(3, 3, dtype=X.dtype)))
    for loss in (first, second):
        step = plainly(loss)
        with pr.repair_torch():
            same(torch.autograd.grad(step(well), well), torch.autograd.grad(loss(well), well))
        with pytest.raises(RuntimeError) as found:
            step(singular)
        with pytest.raises(type(found.value), match=re.escape(str(found.value))):
            loss(singular)
    with pytest.raises(RuntimeError, match="Batch element 1"):
        torch.func.vmap(torch.func.grad(step))(torch.stack([well, singular]).detach())


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_kept_has_the_strides_that_a_compiler_or_a_hook_gives_it(dynamic):
    def axes(x):
        return sorted(range(x.dim()), key=x.stride().__getitem__) if isinstance(x, torch.Tensor) else []

    def is_dense(x):
        return not isinstance(x, torch.Tensor) or torch._prims_common.is_non_overlapping_and_dense_or_false(x)

    def transposing(module, fakes):
        def run(*values):
            assert [*map(axes, values)] == [*map(axes, fakes)], "a compiler reads the memory in these strides"
            assert [*map(is_dense, values)] == [*map(is_dense, fakes)], "a compiler reads the memory in these strides"
            return [y.mT.contiguous().mT if len(axes(y)) == 2 else y for y in module(*values)]

        return run

    w = data(3, 3).requires_grad_()

    def loss(x):
        y = (x @ w).sin()
        corner, strided = y[:2, :2], y.as_strided((2, 2), (1, 2))
        return y.square().sum() + (corner * corner.mT).sum() + (strided * strided.mT).sum()

    step = pr.compile(loss, backend=transposing, dynamic=dynamic)
    (truth,) = torch.autograd.grad(loss(X), w)
    apart = torch.autograd.graph.saved_tensors_hooks(lambda x: torch.stack([x, -x], -1), lambda x: x[..., 0])
    for context in (contextlib.nullcontext(), torch.autograd.graph.save_on_cpu(), apart):
        with context:
            same(torch.autograd.grad(step(X), w), truth)


@pytest.mark.parametrize("value", [lambda a: torch.linalg.det(a.sin()), lambda a: torch.linalg.slogdet(a.sin())[1]])
def test_factors_of_determinants_are_those_of_the_trace_in_a_batch_of_other_strides(value):
    a = data(3, 3, 5)
    truth = torch.stack([torch.func.grad(value)(each) for each in a.movedim(2, 0).contiguous()])
    same(torch.func.vmap(torch.func.grad(plainly(value)), 2)(a), truth)


def test_quantiles_in_forward_mode():
    for function in (lambda x: torch.quantile(x, 0.3), lambda x: x.sin().lerp_(x, 0.3)):
        found, truth = (torch.func.jvp(f, (X,), (V,)) for f in (plainly(function), function))
        same(found, truth)


@pytest.mark.nightly
def test_inductor_writes_a_diagonal_into_a_matrix_of_a_batch():
    @pr.compile
    def function(x):
        return torch.diagonal_scatter(x.new_zeros(3, 3).expand(6, 3, 3), x.sin(), 0, 1, 2)

    same(function(X), torch.diag_embed(X.sin()))


@pytest.mark.nightly
@pytest.mark.parametrize("pool, sizes", [(nn.AvgPool2d, (1, 6, 5)), (nn.AvgPool3d, (1, 4, 3, 6))])
def test_inductor_divides_by_what_of_a_window_is_inside(pool, sizes):
    def function(x):
        return pool(3, 2, 1, ceil_mode=True)(x.sin()).square().sum()

    x = data(*sizes).requires_grad_()
    same(*(torch.autograd.grad(f(x), x) for f in (pr.compile(function), function)))


@pytest.mark.nightly
def test_inductor_reads_behind_a_scatter():
    def function(x):
        values = x.cummax(-1)[0].tanh(), x.quantile(0.3, -1), x.kthvalue(2)[0], x.amax(0), x.logcumsumexp(1)
        return sum(y.sum() for y in values)

    x = data(6, 4).requires_grad_()
    same(*(torch.autograd.grad(f(x), x) for f in (pr.compile(function), function)))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_inductor_reads_behind_a_scatter_of_complex_numbers():
    def moved(function):
        return lambda x: torch.func.jvp(function, (x,), (x.cos(),))[1]

    function = moved(moved(torch.func.grad(lambda x: torch.fft.rfft(x).abs().square().sum())))
    same(pr.compile(function)(X[:4, 0]), function(X[:4, 0]))


@pytest.mark.nightly
def test_inductor_reads_a_scatter_in_a_loop_with_a_sum():
    """As an average of torch's own that is differentiated twice does, in ConvNeXt; `torch.compile` raises for it."""

    def function(x, y):
        written = x.new_zeros(2, 16).scatter(1, torch.arange(16).expand(2, 16), x.sin())
        return (y.sum(1, keepdim=True) * x + written * x) @ y.mT

    x, y = data(2, 16), data(2, 16, seed=1)
    same(pr.compile(function)(x, y), function(x, y))


def test_a_cotangent_is_no_constant_where_all_places_are():
    step = pr.compile(lambda x: x.index_put((torch.arange(3) % 2,), x[:1].sin().expand(3, 3), accumulate=True))
    x = X.clone().requires_grad_()
    truth = torch.ones_like(X)
    truth[0] += 3 * X[0].cos()
    same(torch.autograd.grad(step(x).sum(), x)[0], truth)


@pytest.mark.nightly
@pytest.mark.skipif(torch.__version__ < (2, 13), reason=CHECKS_ARE_DROPPED)
def test_inductor_keeps_the_checks_of_solvers():
    solve = pr.compile(lambda a: torch.linalg.solve(a, V[:3]))
    with torch.no_grad():
        same(solve(2 * torch.eye(3, dtype=X.dtype)), V[:3] / 2)
        with pytest.raises(RuntimeError, match="singular"):
            solve(torch.zeros(3, 3, dtype=X.dtype))


def test_inductor():
    net = mlp()
    step = pr.compile(functools.partial(penalty, net))
    same(gradients(net, step(X)), gradients(net, penalty(net, X)))


@pytest.mark.nightly
@pytest.mark.parametrize("is_mixed", [False, True])
def test_bfloat16_by_inductor(is_mixed):
    """No further from float64 than torch is, with weights in bfloat16 or, under autocast, in float32."""
    net = mlp(width=64)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(p.bfloat16())
    x = data(64, 3).bfloat16()
    truth, used = gradients(net, penalty(net, x.double())), net.to(torch.float32 if is_mixed else torch.bfloat16)

    def error(loss):
        with torch.autocast("cpu", enabled=is_mixed):
            value = loss(x.float() if is_mixed else x)
        pairs = zip(gradients(used, value), truth, strict=True)
        return torch.stack([(bar - exact).norm() / exact.norm() for bar, exact in pairs]).square().mean().sqrt()

    loss = functools.partial(penalty, used)
    assert 1e-4 < error(pr.compile(loss)) < error(loss) < 2e-2


@pytest.mark.nightly
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_backends(loss, compiler):
    net = mlp()
    step, model = pr.compile(functools.partial(loss, net), backend=compiler), pr.compile(net, backend=compiler)
    for found in (step(X), loss(model, X)):
        same(gradients(net, found), gradients(net, loss(net, X)))


@pytest.mark.parametrize("loss", [plain, penalty])
def test_batch_norm(loss):
    """Statistics are written once a call, also where the backward pass is recorded."""
    plain_net, whole_net, inner_net = (mlp(nn.BatchNorm1d) for _ in range(3))
    step, model = plainly(functools.partial(loss, whole_net)), plainly(inner_net)
    for _ in range(2):
        truth = gradients(plain_net, loss(plain_net, X))
        same(gradients(whole_net, step(X)), truth)
        same(gradients(inner_net, loss(model, X)), truth)
        same(whole_net.buffers(), plain_net.buffers())
        same(inner_net.buffers(), plain_net.buffers())


# Every order of forward and reverse mode.


def of_layer_norm(x):
    return pr.functional.layer_norm(x * x, (3,)).sin().sum()


def of_batch_norm(x):
    return pr.functional.batch_norm(torch.outer(x, x) + x, None, None, training=True).sin().sum()


def of_attention(x):
    q = torch.outer(x, x).sin()[None, None]
    return pr.functional.scaled_dot_product_attention(q, q * q, q).sin().sum()


NET = mlp()


def of_mlp(x):
    return NET(x).sin().sum()


FUNCTIONS = (of_layer_norm, of_batch_norm, of_attention, of_mlp)
BY_DAY = (of_batch_norm, "fr"), (of_attention, "rf")
OTHERS = [(f, kinds) for f in FUNCTIONS for order in (2, 3, 4) for kinds in nestings(order) if (f, kinds) not in BY_DAY]


@pytest.mark.parametrize("f, kinds", [*BY_DAY, *(pytest.param(*each, marks=pytest.mark.nightly) for each in OTHERS)])
def test_every_nesting(f, kinds):
    along = V[:1]
    truth = nested(f, along, kinds)(X[0])
    for outer in range(len(kinds) + 1):
        step = plainly(nested(f, along, kinds[outer:]))
        same(nested(step, along, kinds[:outer])(X[0]), truth)


# Torch runs its attention of the CPU once for each sample.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_batch_whose_operators_return_other_strides():
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True).double()
    params, x = {name: p.detach() for name, p in layer.named_parameters()}, data(3, 5, 4)

    def per_sample(model):
        def loss(p, x):
            return torch.func.functional_call(model, p, (x[None],)).sin().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)

    with pr.repair_torch():
        same(per_sample(plainly(layer)).values(), per_sample(layer).values())


def of_products(x):
    """Torch's backward pass asks for values where it is recorded."""
    return x.new_ones(2).scatter_reduce(0, torch.tensor([0, 1, 1]), x.sin(), "prod").sin().sum()


PLACES = torch.tensor([0, 0])


def of_filled(x):
    """Torch's backward pass asks which places differ."""
    y = x.sin().clone().index_fill_(0, PLACES, x[1].exp())
    return y.index_fill(0, PLACES + 1, value=x[0] * x[2]).square().sum()


@pytest.mark.parametrize("f", [of_layer_norm, of_attention, of_products, of_filled, *nightly(of_batch_norm, of_mlp)])
@pytest.mark.parametrize("order", [2, *nightly(3)])
def test_recorded_backward_passes(f, order):
    found, truth = (nested_by_autograd(each, V[:1], "r" * order)(X[0]) for each in (plainly(f), f))
    same(found, truth)


@pytest.mark.parametrize("kind", ["torch", "primitives"])
def test_attention_whose_output_is_read_linearly(kind):
    """The second backward pass has no cotangent for the output: torch's operator makes none of none."""
    attention = {"torch": nn.functional, "primitives": pr.functional}[kind].scaled_dot_product_attention
    layer, x = nn.Linear(4, 12).double(), data(2, 5, 4)

    def loss(x):
        x = x.detach().requires_grad_()
        q, k, v = layer(x)[:, None].chunk(3, -1)
        bars = torch.autograd.grad(attention(q, k, v).sum(), x, create_graph=True)
        return bars[0].square().sum()

    with pr.repair_torch():
        found, expected = (torch.autograd.grad(f(x), layer.weight) for f in (plainly(loss), loss))
    same(found, expected)


def test_a_module_that_returns_energy_and_forces_is_differentiated_by_the_forces_alone():
    """The last bias moves the energy alone: its gradient is zero, and the backward half cannot be cut for it."""

    class Potential(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            energy = self.net(x).sum()
            return energy, -torch.autograd.grad(energy, x, create_graph=self.training)[0]

    net = Potential()
    forces = [model(X.clone().requires_grad_())[1] for model in (plainly(net), net)]
    same(*(gradients(net, y.square().sum()) for y in forces))
    # Torch frees the energy's graph.
    net.eval()
    same(*(model(X.clone().requires_grad_()) for model in (plainly(net), net)))


def test_a_parametrization_that_is_cached_keeps_nothing_of_the_trace():
    net = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with nn.utils.parametrize.cached():
        same(plainly(net)(torch.ones(2, 2)), net(torch.ones(2, 2)), 1e-6)


def test_what_does_not_move_is_not_computed():
    """A tangent of weights is zero: torch makes one wherever a sum of products has another term, and multiplies it."""
    w, b, other = (
        data(3, 3, seed=2).requires_grad_(),
        data(3, seed=3).requires_grad_(),
        data(6, 3, seed=4).requires_grad_(),
    )

    def parts(x):
        moved = nn.functional.linear(x, w, b)
        return moved, w - x[:3], x[:3] - w, (b - x).sin(), x[0] + w, w * x[:3], x + other, torch.cat([w @ w, moved])

    def tangents(x, v):
        return torch.func.jvp(parts, (x,), (v,))[1]

    def total(function):
        return sum(y.square().sum() * (k + 1) for k, y in enumerate(function(X, V)))

    compiled = plainly(tangents)
    same(compiled(X, V), tangents(X, V))
    same(*(torch.autograd.grad(total(f), (w, b, other), materialize_grads=True) for f in (compiled, tangents)))
    targets = [node.target for node in compiled.graphs["value"].graph.nodes if "backward" not in str(node.meta)]
    assert targets.count(torch.ops.aten.mm.default) == 1
    memory = {y.untyped_storage().data_ptr() for y in (*compiled(X, V), V)}
    assert len(memory) == 9
