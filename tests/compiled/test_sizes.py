"""Compiled functions of sizes that are symbols, and of strides that a compiler chooses."""

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import primitives as pr
from tests.compiled.support import data, mlp, plainly, same

X = data(6, 3)


def test_dynamic_sizes():
    net = mlp()

    def function(x):
        # Every language model of transformers shifts its labels by a pad.
        return net(x).square().sum(), nn.functional.pad(net(x), (0, 0, 0, 1))[1:]

    compiled = plainly(function, dynamic=True)
    for n in (6, 4, 9):
        x = data(n, 3).requires_grad_()
        found, truth = compiled(x), function(x)
        same(found, truth)
        same(torch.autograd.grad(found[0], x), torch.autograd.grad(truth[0], x))
    assert len(compiled.settings.programs) == 2
    same(compiled(data(1, 3)), function(data(1, 3)))


def shapes(values):
    return [x.shape for x in values if isinstance(x, torch.Tensor)]


def test_sizes_that_a_compiler_takes_for_numbers():
    made = []

    def numbering(module, fakes):
        """Take sizes of backward passes for numbers, as Inductor does, whose cache looks at symbols alone."""
        symbols = {str(n) for shape in shapes(fakes) for n in shape if str(n)[0] == "s"}
        assert symbols <= {str(n) for n in fakes if isinstance(n, torch.SymInt)}
        made.append(module)
        known = [torch.Size(map(int, shape)) for shape in shapes(fakes) if len(made) > 1]

        def run(*values):
            assert known in ([], shapes(values))
            return module(*values)

        return run

    net, longer = mlp(), data(9, 3)
    compiled = pr.compile(lambda x: net(x).square().sum(), backend=numbering, dynamic=True)
    compiled(X.clone().requires_grad_())
    for x in (longer, X, longer, X[:4]):
        x = x.clone().requires_grad_()
        same(*(torch.autograd.grad(f(x), x) for f in (compiled, compiled.__wrapped__)))


@pytest.mark.nightly
def test_inductor_keeps_apart_what_it_made_for_other_sizes():
    compiled = pr.compile(lambda x, w: F.conv2d(x, w).tanh().mean(), dynamic=True)
    with fresh_cache():
        for sizes in ((1, 1, 8, 8), (1, 1, 12, 10), (1, 1, 6, 14)):
            x, w = data(*sizes).requires_grad_(), data(1, 1, 3, 3).requires_grad_()
            same(*(torch.autograd.grad(f(x, w), (x, w)) for f in (compiled, compiled.__wrapped__)))


@pytest.mark.nightly
def test_inductor_takes_remainders_of_sizes_that_are_known():
    def loss(x):
        parts = x.prod(1), x.amax((0, 1)), x.aminmax(dim=1).max, torch.linalg.vector_norm(x, 3, 0)
        return sum(y.square().sum() for y in parts)

    compiled = pr.compile(loss, dynamic=True)
    for x in (data(4, 6), data(5, 6)):
        same(*(torch.func.jvp(torch.func.grad(f), (x,), (x,))[1] for f in (compiled, loss)))


def test_per_sample_gradients_of_any_number_and_size():
    net = nn.Linear(3, 1).double()
    compiled = plainly(lambda x: net(x).sin().mean(0).sum(), dynamic=True)
    for sizes in ((2, 4, 3), (2, 6, 3), (5, 4, 3)):
        same(*(torch.func.vmap(torch.func.grad(f))(data(*sizes)) for f in (compiled, compiled.__wrapped__)))


def test_tangents_of_other_strides_than_their_primals():
    """Torch lays a tangent out anew by the number of elements in the primal's memory, which symbols do not have."""

    def curvatures(x, vs):
        return torch.func.vmap(lambda v: torch.func.jvp(lambda x: (x.sin() * x).sum(), (x,), (v,))[1])(vs)

    curved = plainly(lambda x: x.sin().square().sum(), dynamic=True)
    batched = plainly(curvatures, dynamic=True)
    for n in (4, 6):
        x, vs = data(3, n).mT, data(3, n, 2).mT
        same(*(torch.func.jvp(torch.func.grad(f), (x,), (vs[..., 0, :].mT,)) for f in (curved, curved.__wrapped__)))
        same(batched(x, vs.permute(1, 2, 0)), curvatures(x, vs.permute(1, 2, 0)))


def test_an_operator_without_symbols_for_sizes():
    labels = torch.tensor([0, 2, 1, 0, 2])
    compiled = plainly(lambda x, y: F.multi_margin_loss(x.sin(), y), dynamic=True)
    for n in (4, 5, 4):
        x, y = data(n, 3).requires_grad_(), labels[:n]
        same(*(torch.autograd.grad(f(x, y), x) for f in (compiled, compiled.__wrapped__)))
    assert len(compiled.settings.programs) == 4


def test_dropout_of_any_size():
    net = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5)).double()
    loss = plainly(lambda x: net(x).square().sum(), dynamic=True)
    for n in (6, 4, 9):
        x = data(n, 3).requires_grad_()
        torch.manual_seed(n)
        (x_bar,) = torch.autograd.grad(loss(x), x)
        torch.manual_seed(n)
        same(torch.func.jvp(loss, (x.detach(),), (data(n, 3, seed=1),))[1], (x_bar * data(n, 3, seed=1)).sum())
    assert sum("jvp" not in program.name for program in loss.settings.programs) == 2


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_of_batches(randomness):
    dropped = plainly(lambda x: F.dropout(x, 0.5), dynamic=True)
    for n in (5, 7):
        kept = torch.func.vmap(dropped, randomness=randomness)(torch.ones(40, n))
        assert set(kept.unique().tolist()) == {0.0, 2.0}
        assert (kept == kept[0]).all() == (randomness == "same")


def test_programs_that_draw_do_not_grow_with_sizes():
    counts = []
    for n in (12, 10**6):
        dropped = plainly(lambda x: F.dropout(x, 0.5).sum())
        dropped(torch.ones(n))
        counts.append(dropped.settings.programs[0].num_nodes)
    assert counts[0] == counts[1]


def test_what_depends_on_an_argument_for_some_sizes_alone():
    w = data(3).requires_grad_()
    compiled = plainly(lambda x: ((x * w).sin() if len(x) > 4 else x.sin() + w).sum(), dynamic=True)
    for x in (X, X[:3], X):
        x, found = x.clone().requires_grad_(), []
        for f in (compiled, compiled.__wrapped__):
            (g,) = torch.autograd.grad(f(x), x, create_graph=True)
            found.append(torch.autograd.grad(g.square().sum(), [w, x], materialize_grads=True, allow_unused=True))
        same(*found)


def test_results_that_depend_on_sizes_other_than_by_tensors():
    function = plainly(lambda x: (x.chunk(3), x.shape[0], x.numel() * 0.5, len(x) > 4), dynamic=True)
    spread = plainly(lambda x: torch.distributions.Normal(x, x.exp()), dynamic=True)
    for n in (6, 4, 9, 1, 6):
        parts, *numbers = function(data(n, 3))
        same(parts, data(n, 3).chunk(3))
        assert [type(y) for y in numbers] == [int, float, bool]
        assert numbers == [n, n * 1.5, n > 4]
        assert [type(k) for k in spread(data(n, 3)).batch_shape] == [int, int]
        assert spread(data(n, 3)).batch_shape == (n, 3)


def of_a_conjugate(x):
    y, z = (torch.complex(u, u.sin()) for u in (x, x.mT.contiguous()))
    return (y.mT * z * 1j).real


def not_in_2_11(reason):
    return pytest.mark.skipif(torch.__version__ < (2, 12), reason=f"Inductor of torch 2.11 {reason}")


def of_one_column(x):
    y = torch.complex(x, x.sin())
    return (torch.where(x > 0, y, 0j) + y).abs()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize(
    "function, x",
    [
        pytest.param(of_a_conjugate, X, marks=not_in_2_11("takes no complex numbers of Python")),
        (of_one_column, X[:, :1]),
    ],
)
def test_inductor_reads_complex_numbers_of_any_strides(function, x):
    def twice(f, x):
        (gradient,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        return gradient, *torch.autograd.grad(gradient.square().sum(), x)

    x = x.clone().requires_grad_()
    same(twice(pr.compile(function), x), twice(function, x))


@not_in_2_11("raises as it simplifies strides that hold comparisons, and has no stride_at to mend")
@pytest.mark.nightly
def test_inductor_takes_masks_of_any_size():
    def weighted(x):
        n = x.shape[0]
        is_later = torch.arange(n)[:, None] < torch.arange(n)
        y = (x @ x.mT).masked_fill(is_later, float("-inf")).softmax(-1) @ x
        return y * n + x.cumsum(0).flip(0) + torch.cat([x[1:], x[:1]]).roll(1, 0) / (n + 1)

    def loss(x):
        z = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(weighted(z).square().sum(), z, create_graph=True)
        return gradient.square().sum() + weighted(x).mean()

    def twice(function):
        (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
        return gradient, *torch.autograd.grad(gradient.square().sum(), x)

    compiled = pr.compile(loss, dynamic=True)
    with fresh_cache():
        for n in (3, 6):
            x = data(n, 4).mul_(0.3).requires_grad_()
            same(twice(compiled), twice(loss))
