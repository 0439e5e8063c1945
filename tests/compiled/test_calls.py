"""Calls of compiled functions: trees, sizes, outputs, random numbers, modes, transforms."""

import argparse
import collections
import dataclasses
import types

import numpy as np
import optree
import pytest
import torch
from torch import nn

import primitives as pr
from tests.compiled.support import data, gradients, mlp, plainly, same

X, SHIFT = data(6, 3), data(3, seed=2)


def test_sizes_dtypes_layouts_and_constants():
    compiled = plainly(lambda x, k, *, keep=False: (x * k).sum(0) if keep else (x.exp() * k).sum())
    for x in (X, X[:2], X.float(), X.T.contiguous().T, X[:, None]):
        for options in ({"k": 2}, {"k": 2.0}, {"k": 3, "keep": True}):
            same(compiled(x, **options), compiled.__wrapped__(x, **options), 1e-6)
            assert compiled(x, **options).dtype == compiled.__wrapped__(x, **options).dtype


def test_what_depends_on_sizes_or_on_an_order_is_that_of_each_call():
    def function(x, named, **more):
        rows = {f"row {i}": row.sum() for i, row in enumerate(x)}
        return rows, len(x), str(x.dtype), x.sum() if x.requires_grad else None, [*named.values()], [*more.values()]

    compiled, first, second = plainly(function), {"q": X, "p": SHIFT}, {"p": SHIFT, "q": X}
    for x in (X, X[:2], X.float(), X.clone().requires_grad_(), X):
        for named in (first, second):
            found, truth = (optree.tree_flatten(f(x, named, **named)) for f in (compiled, function))
            assert found[1] == truth[1]
            for y, wanted in zip(found[0], truth[0], strict=True):
                assert torch.equal(y, wanted) if isinstance(y, torch.Tensor) else y == wanted

    net = nn.BatchNorm1d(3).double()
    compiled = plainly(lambda x: net(x).sum() if len(x) > 3 else x.sum())
    for x in (X[:2], X, X):
        compiled(x)
    assert net.num_batches_tracked == 2


def test_what_no_backward_pass_reads_may_be_written_before_it():
    """The averaged weights of a target network, for instance."""
    net, target = mlp(), mlp().requires_grad_(False)
    loss = plainly(lambda x: (net(x) - target(x)).square().sum())
    truth = gradients(net, (net(X) - target(X)).square().sum())
    for recorded in (False, True):
        value = loss(X)
        with torch.no_grad():
            target[0].weight.lerp_(net[0].weight, 0.5)
        if recorded:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(value, list(net.parameters()), create_graph=True)
        else:
            same(gradients(net, value), truth)


def test_flags_of_tensors_are_read():
    """Compiled code reads memory: of a negative or conjugate view, and of a zero tensor, which has none."""

    def reading(module, fakes):
        def run(*values):
            assert not any(x.is_neg() or x.is_conj() or x._is_zerotensor() for x in values)
            assert all(x.data_ptr() for x in values)
            return module(*values)

        return run

    compiled, z = pr.compile(torch.sin, backend=reading), torch.complex(X, X).requires_grad_()
    same(compiled(X), X.sin())
    for view in (z.conj().imag, z.conj().imag[:1].expand(2, -1, -1)):
        same(compiled(view), view.sin())
        same(*(torch.autograd.grad(f(view).square().sum(), z) for f in (compiled, torch.sin)))
    x = X.clone().requires_grad_()
    zeros = torch._efficientzerotensor(X.shape, dtype=X.dtype)
    same(torch.autograd.grad(compiled(x), x, zeros), torch.zeros_like(x))
    # What a cache was filled with in a transform is a tensor of that, which has ended.
    kept = []
    torch.func.grad(lambda x: (kept.append(torch.ones(3)), x.sum())[1])(X)
    product = pr.compile(lambda x: x * kept[0], backend=reading)
    same(torch.autograd.grad(product(x).sum(), x), torch.ones_like(x))


class Scaled:
    factor = torch.tensor(2.0)

    @plainly
    def __call__(self, x):
        return self.factor * x


def test_methods_and_modules_that_are_compiled_twice():
    same(Scaled()(X), 2 * X)
    net = mlp()
    for compiled in (plainly(net), torch.compile(net, backend="eager")):
        same(gradients(net, plainly(compiled)(X).square().sum()), gradients(net, net(X).square().sum()))
    # A slice is made by the class.
    same(plainly(net)[:1](X), net[:1](X))


def test_a_decorator_with_options():
    @pr.compile(backend="eager")
    def function(x):
        return x.sin()

    same(function(X), X.sin())
    assert function.settings.backend == "eager"
    assert function.__name__ == "function"


def test_a_forward_that_was_set_on_a_module():
    """As accelerate and PEFT do: what is there is compiled, and what comes later runs around that."""
    net, plain = mlp(), mlp()
    net.forward = lambda x, forward=net.forward: 2 * forward(x)
    model = plainly(net)
    same(gradients(net, model(X).sum()), gradients(plain, 2 * plain(X).sum()))
    model.forward = lambda x, forward=model.forward: 3 * forward(x)
    same(model(X), 6 * plain(X))
    # Forward, backward, and forward anew: another `forward` might be what the module calls.
    assert sum(each.num_calls for each in model.compiled.settings.programs) == 3


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    others: list = dataclasses.field(default_factory=list)
    power: int = 2

    def __post_init__(self):
        self.num = len(self.x)


@dataclasses.dataclass(frozen=True)
class Pair:
    batch: Batch
    name: str


def test_dataclasses():
    def function(pair):
        loss = (pair.batch.x**pair.batch.power).sum() * pair.batch.num + pair.batch.others[0].sum()
        return Pair(Batch(loss[None], [pair.batch.x]), pair.name)

    compiled, x = plainly(function), X.clone().requires_grad_()
    for power in (2, 3, 2):
        given = Pair(Batch(x, [SHIFT * power], power), "mine")
        found, truth = compiled(given), function(given)
        assert (found.name, found.batch.num) == ("mine", 1)
        same([found.batch.x, *found.batch.others], [truth.batch.x, *truth.batch.others])
        same(torch.autograd.grad(found.batch.x, x), torch.autograd.grad(truth.batch.x, x))
    assert len(compiled.settings.programs) == 4
    with pytest.raises(pr.LeafError, match=r"pair.others.*must be a tensor, a hashable constant"):
        compiled(Batch(x, np.ones(2)))
    for kind in (types.SimpleNamespace, argparse.Namespace):
        records = plainly(lambda batch, kind=kind: kind(y=batch.x * batch.power))
        same(records(kind(x=X, power=2)).y, X * 2)
    same(plainly(lambda batch: batch["x"].sin())(collections.UserDict(x=X)), X.sin())


def test_sizes_stay_sizes():
    compiled = plainly(lambda size, x: (x.shape, x.expand(size).sum() * size.numel()))
    for num in (2, 3):
        size, y = compiled(torch.Size([num, 3]), torch.ones(3))
        assert isinstance(size, torch.Size)
        same(y, torch.tensor(9.0 * num**2))


def test_objects_that_hold_results():
    """Libraries return their own: distributions, caches, what they have registered with torch."""
    loc = SHIFT.clone().requires_grad_()

    def function(x):
        made = torch.distributions.Normal(loc * x, x.exp())
        return torch.return_types.max((made.loc, x)), {"made": [made]}

    for run in (plainly(function), lambda x: pr.func.checkpoint(function, x)):
        found, truth = run(X)[1]["made"][0], function(X)[1]["made"][0]
        same(found.log_prob(X), truth.log_prob(X))
        same(torch.autograd.grad(found.log_prob(X).sum(), loc), torch.autograd.grad(truth.log_prob(X).sum(), loc))


def test_outputs_that_share_memory():
    compiled = plainly(lambda x: {"same": x, "view": x.T, "twice": [x * 2] * 2, "none": None, "number": 3})
    x = X.clone().requires_grad_()
    out = compiled(x)
    assert (out["none"], out["number"]) == (None, 3)
    loss = out["same"].sum() + out["view"].square().sum() + out["twice"][0].sum() + out["twice"][1].sum()
    same(torch.autograd.grad(loss, x), 2 * X + 5)


def test_strides_of_outputs_and_cotangents():
    function = plainly(lambda x: x.T.sin())
    x, y_bar = X.clone().requires_grad_(), data(3, 6, seed=7)
    for given in (y_bar, data(6, 3, seed=7).T, y_bar[:, :1].expand(3, 6)):
        same(torch.autograd.grad(function(x), x, given), given.T * X.cos())
        found = torch.func.vmap(lambda b: torch.func.vjp(function, X)[1](b)[0])(
            torch.stack([given, y_bar], -1).movedim(-1, 0)
        )
        same(found, torch.stack([given.T * X.cos(), y_bar.T * X.cos()]))


def test_sums_of_which_one_term_is_left_have_other_strides():
    w, y = data(6, 6).requires_grad_(), data(5, 6)

    def loss(w):
        def exponential(y):
            return torch.linalg.matrix_exp((y @ w)[:, :4].reshape(-1, 2, 2) * 0.3).square().sum()

        return torch.func.jvp(torch.func.grad(exponential), (y,), (y,))[1].square().sum()

    same(torch.autograd.grad(plainly(loss)(w), w), torch.autograd.grad(loss(w), w))


def test_what_a_recorded_gradient_does_not_depend_on_gets_none():
    net = mlp(nn.Identity)
    for model in (net, plainly(net)):
        net.zero_grad()
        x = X.clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum().backward()
        assert [p.grad is None for p in net.parameters()] == [False, False, False, True]


@pytest.mark.parametrize("is_jvp", [False, True])
def test_what_a_given_cotangent_does_not_lead_to_gets_none(is_jvp):
    """As an optimizer moves a parameter, by its decay, whose gradient is zero."""
    heads = nn.ModuleList([mlp(nn.Identity), nn.Linear(3, 2).double()])
    function = plainly(lambda x: [head(x) for head in heads])
    if is_jvp:
        torch.func.jvp(function, (X,), (X,))[1][0].square().sum().backward()
    else:
        function(X)[0].sum().backward()
    assert [p.grad is None for p in heads.parameters()] == [False, False, False, is_jvp, True, True]


def test_anomalies_are_looked_for_in_calls_and_not_in_traces():
    net = mlp()
    with torch.autograd.set_detect_anomaly(True):
        same(gradients(net, plainly(net)(X).square().sum()), gradients(net, net(X).square().sum()))
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        with pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError, match="nan"):
            plainly(lambda x: (x.sqrt() * 0).sum())(x).backward()


def test_a_constant_of_one_number_beside_what_moves():
    def function(x):
        return 2 * x, x.new_ones(()).expand(2, 3)

    same(*(torch.func.jvp(f, (X,), (X,)) for f in (plainly(function), function)))


def test_some_outputs_and_some_gradients():
    compiled = plainly(lambda x, y: (x.sin() * y, y.cos(), (x * y).detach()))
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    a, b, c = compiled(x, y)
    assert not c.requires_grad
    same(torch.autograd.grad(b.sum(), y, retain_graph=True), -X.sin())
    same(torch.autograd.grad(a.sum(), x), X.cos() * X)
    z = plainly(lambda x: (x * x).sum())
    same(torch.autograd.grad(z(x), x), 2 * X)
    loss = z(x)
    loss.backward(retain_graph=True)
    loss.backward()
    same(x.grad, 4 * X)


def test_outputs_that_get_no_cotangent():
    """Their derivatives take no part: here they are infinite. The last two share a cotangent."""
    function = plainly(lambda x: (x.sqrt(), x * 2, torch.cat([x.exp(), x]), *x.exp().split([1, 2])))
    for k, truth in ((1, [2, 2, 2]), (2, [2, 2, 2]), (3, [1, 0, 0]), (4, [0, 1, 1])):
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        (x_bar,) = torch.autograd.grad(function(x)[k].sum(), x)
        same(x_bar, torch.tensor(truth, dtype=torch.float64))
    assert not any("vjp" in program.name for program in function.settings.programs)


def test_dropout():
    net = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5)).double()
    model = plainly(net)
    torch.manual_seed(1)
    first, second = model(X), model(X)
    torch.manual_seed(1)
    assert torch.equal(model(X), first)
    assert not torch.equal(first, second)
    x = X.clone().requires_grad_()
    y = model(x)
    mask = 2 * (y != 0).double()
    (x_bar,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    same(x_bar, mask @ net[0].weight)
    # Of the second order, by recomputation.
    truth = torch.autograd.grad((mask @ net[0].weight).square().sum(), net[0].weight)
    same(torch.autograd.grad(x_bar.square().sum(), net[0].weight), truth)
    for randomness, is_one in (("same", True), ("different", False)):
        found = torch.func.vmap(model, randomness=randomness)(X.expand(2, 6, 3))
        assert torch.equal(found[0], found[1]) == is_one
    per_sample = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()), randomness="different")
    found = per_sample(torch.ones(2, 3, dtype=torch.float64))
    assert not torch.equal(found[0], found[1])
    before = torch.get_rng_state()
    plainly(lambda x: x * 2)(X)
    assert torch.equal(torch.get_rng_state(), before), "nothing random, nothing drawn"


def test_inductor_draws_the_numbers_of_the_seed_in_a_tensor_too_small_for_vectors():
    """In C++ a product that overflows may be any number, and each program, of another order, would draw others."""
    truth, found = plainly(torch.rand_like), pr.compile(torch.rand_like)
    for seed in range(3):
        drawn = [torch.manual_seed(seed) and draw(X[0, :1]) for draw in (truth, found)]
        assert torch.equal(*drawn)


@pytest.mark.parametrize("dynamic", [False, True])
def test_constants_at_their_places(dynamic):
    difference = plainly(lambda x, y: x - y, dynamic=dynamic)
    for args in ((X, 3.0), (3.0, X), (X, 3), (X, 2 * X)):
        same(difference(*args), args[0] - args[1])
    product = plainly(lambda x, k: x * k, dynamic=dynamic)
    for k in (0.0, -0.0, torch.nan, torch.nan):
        assert torch.equal(product(X, k).signbit(), (X * k).signbit())
    assert len(product.settings.programs) == 3


def test_modes():
    net = mlp()
    model = plainly(net)
    assert model(X).requires_grad
    with torch.no_grad():
        assert not model(X).requires_grad
    with torch.inference_mode():
        assert model(X).is_inference()
    linear = nn.Linear(3, 4)
    model, x = plainly(linear), X.float()
    with torch.autocast("cpu"):
        y = model(x)
        assert y.dtype == torch.bfloat16
        same(y, linear(x), 1e-2)
    with torch.autocast("cpu"):
        y.sum().backward()
        exact = plainly(lambda x: torch.autocast("cpu", enabled=False)(linear)(x))(x)
    assert exact.dtype == torch.float32
    assert linear.weight.grad.dtype == model(x).dtype == torch.float32
    # Libraries ask for values where nothing compiles: transformers for those of masks.
    same(plainly(lambda x: x if torch.compiler.is_compiling() else x.sum().item() * x)(X), X)
    makes = plainly(lambda x: x + torch.zeros(3).dtype.itemsize)
    same(makes(X), X + 4)
    torch.set_default_dtype(torch.float64)
    try:
        same(makes(X), X + 8)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_graph_that_reads_a_constant_is_mapped_after_it_has_run():
    function = Scaled()
    gradient = torch.func.grad(lambda x: function(x).sum())
    same(gradient(X[0]), torch.full_like(X[0], 2))
    same(torch.func.vmap(gradient)(X), torch.full_like(X, 2))


def test_values_of_first_backward_passes_come_from_what_was_saved():
    net = mlp()
    model = plainly(net)
    x = X.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)
    torch.func.vjp(model, X)[1](torch.ones(6, 1, dtype=torch.float64))
    names = [program.name for program in model.compiled.settings.programs]
    assert not any("vjp" in name for name in names), names
    assert names.count("value, backward") == 2


def test_an_lstm_in_single_precision():
    net = torch.nn.LSTM(3, 4)
    step, x = plainly(lambda x: net(x)[0].square().sum()), data(2, 5, 3).float()
    for _ in range(2):
        same(gradients(net, step(x)), gradients(net, step.__wrapped__(x)), 1e-4)
