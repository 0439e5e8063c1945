"""What a compiled function reaches: modules, variables, attributes of objects, constants."""

import copy
import functools
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

import primitives as pr
from tests.compiled.support import data, gradients, mlp, plainly, same

X = data(6, 3)
UNPICKLED = type("Unpickled", (np.random.PCG64,), {})
SHIFT, SCALE, GENERATORS = data(3, seed=2), 1.0, (random.Random(0), np.random.Generator(UNPICKLED(0)))


def test_modules_by_reference():
    plain, own = mlp(nn.BatchNorm1d), mlp(nn.BatchNorm1d)
    model, other = plainly(own), nn.Linear(5, 2).double()
    plainly_held = plainly(lambda x: own.weight_of_loss * own(x).square().sum() + own.shift)

    def both(change):
        change(plain)
        change(model)
        truth = plain(X)
        same(model(X), truth)
        truth.sum().backward()
        model(X).sum().backward()
        plain(X)
        for p, q in zip(plain.parameters(), own.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                same(q.grad, p.grad)

    both(lambda net: None)
    both(nn.Module.eval)
    both(nn.Module.train)
    both(lambda net: net.zero_grad())
    both(lambda net: net[0].weight.requires_grad_(False))
    both(lambda net: net[0].weight.data.mul_(2))
    both(lambda net: net.__setitem__(3, copy.deepcopy(other)))
    both(lambda net: net[3].bias.data.zero_())
    both(lambda net: net[0].register_parameter("weight", nn.Parameter(torch.ones_like(net[0].weight))))
    # What is no parameter: numbers, and tensors that nobody registered.
    both(lambda net: setattr(net[1], "eps", 0.5))
    for change in (2.0, 3.0):
        own.shift = data(1, seed=int(change))
        own.weight_of_loss = change
        same(plainly_held(X), own.weight_of_loss * own(X).square().sum() + own.shift)
    plain.float()
    model.float()
    same(model(X.float()), plain(X.float()), 1e-5)


def test_parameters_are_parameters_and_have_copies():
    net = mlp()
    net[0].weight.decay = 0.5

    def loss(x):
        assert all(isinstance(p, nn.Parameter) for p in net.parameters())
        assert [getattr(p, "decay", None) for p in net[0].parameters()] == [0.5, None]
        fast = copy.deepcopy(net)
        bars = torch.autograd.grad(fast(x).sum(), [*fast.parameters()])
        return net.get_parameter("0.weight").mul(bars[0]).sum() + (net(x) - fast(x) * 2).square().sum()

    same(*(gradients(net, f(X)) for f in (plainly(loss), loss)))


def test_batch_norms_that_average_over_all_batches():
    plain, own, moved = (nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.Tanh()).double() for _ in range(3))
    model, tangent = plainly(own), plainly(lambda x: torch.func.jvp(moved, (x,), (x,))[0])  # torch's jvp raises
    for seed in range(3):
        x = data(6, 3, seed=seed)
        truth = plain(x)
        same([model(x), *own.buffers()], [truth, *plain.buffers()])
        same([tangent(x), *moved.buffers()], [truth, *plain.buffers()])


def test_optimizer_steps_are_seen():
    plain, own = mlp(), mlp()
    step = plainly(lambda x: own(x).square().mean())
    for net, loss in ((plain, lambda x: plain(x).square().mean()), (own, step)):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss(X).backward()
            optimizer.step()
    same(own.parameters(), plain.parameters())
    assert len(step.settings.programs) == 2


def test_a_parameter_that_was_stepped_before_the_backward_pass_is_refused():
    net = mlp()
    loss = plainly(net)(X).square().sum()
    with torch.no_grad():
        net[3].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tied_parameters_and_modules_as_arguments():
    net = mlp()
    net[3] = nn.Linear(5, 5).double()
    net[3].weight = nn.Parameter(torch.eye(5, dtype=torch.float64))
    net[0] = nn.Linear(3, 5).double()
    net.append(nn.Linear(5, 5).double())
    net[4].weight = net[3].weight
    loss = plainly(lambda net, x: net(x).square().sum())
    same(gradients(net, loss(net, X)), gradients(net, net(X).square().sum()))
    other = mlp()
    same(loss(other, X), other(X).square().sum())


def test_variables():
    global SHIFT, SCALE
    w, box = torch.ones(3, dtype=torch.float64, requires_grad=True), [data(3, seed=3)]

    def function(x):
        return (x * w * box[0] * SCALE + SHIFT).sin().sum()

    compiled = plainly(function)

    def check():
        same(compiled(X), function(X))
        same(torch.autograd.grad(compiled(X), w), torch.autograd.grad(function(X), w))

    check()
    box[0] = box[0] * 2
    check()
    box[0].mul_(3)
    SHIFT = SHIFT * 2
    check()
    assert len(compiled.settings.programs) == 2
    SCALE += 1.0
    check()
    held = functools.partial(lambda t, x: (t * x).sum(), box[0])
    compiled, function = plainly(held), held
    same(compiled(X), held(X))
    box[0].add_(1)
    same(compiled(X), held(X))


class Trainer:
    def __init__(self):
        self.net, self.scale, self.held = mlp(), data(1, seed=3), (data(1, seed=4), 2.0)

    def loss(self, x):
        return (self.scale * self.net(x) + self.held[0] * self.held[1]).square().sum()

    __call__ = loss


@pytest.mark.parametrize("way", ["method", "call", "attribute", "list"])
def test_objects(way):
    trainer = Trainer()
    methods = [trainer.loss]
    ways = {"method": trainer.loss, "call": trainer, "attribute": lambda x: trainer.loss(x)}
    step = plainly(ways.get(way, lambda x: methods[0](x)))
    for held in (trainer.held, (data(1, seed=5), 2.0), (data(1, seed=5), 3.0)):
        trainer.scale, trainer.held = trainer.scale * 2, held
        same(gradients(trainer.net, step(X)), gradients(trainer.net, trainer.loss(X)))
    assert trainer.held is held
    assert len(step.settings.programs) == 4, "tensors are arguments, numbers are not"


NUM_CALLS = 0


def _with_defaults(w):
    def scaled(x, w=w, *, k=(w,)):
        return (x * w * k[0]).sum()

    return scaled, scaled


def _by_keyword(w):
    partial = functools.partial(lambda x, w: (x * w * w).sum(), w=w)
    return partial, partial


def _by_place(w):
    partial = functools.partial(lambda w, x: (x * w * w).sum(), w)
    return partial, lambda x: partial(x)


@pytest.mark.parametrize("made", [_with_defaults, _by_keyword, _by_place])
def test_tensors_that_are_defaults_or_arguments_of_partial_functions(made):
    w = data(3, seed=1).requires_grad_()
    holder, fn = made(w)
    compiled = plainly(fn)
    for _ in range(2):
        same(torch.autograd.grad(compiled(X), w), torch.autograd.grad(fn(X), w))
        with torch.no_grad():
            w.mul_(2)
    if made is _with_defaults:
        holder.__defaults__ = (data(3, seed=3),)
        same(compiled(X), fn(X))
    same(pr.func.checkpoint(fn, X), fn(X))


@pytest.mark.parametrize("where", ["object", "module", "global", "closure"])
def test_what_a_function_assigns_is_lost_and_said_once(where, caplog):
    class Counting:
        num = 0

        def loss(self, x):
            self.num += 1
            self.last = x * 2
            return self.last.sum()

    def counted(x):
        global NUM_CALLS
        NUM_CALLS += 1
        return (x * NUM_CALLS).sum()

    num = 0

    def of_closure(x):
        nonlocal num
        num += 1
        return x.sum()

    class Module(Counting, torch.nn.Module):
        forward = Counting.loss

    counting, module = Counting(), Module()
    step = plainly({"object": counting.loss, "module": module.forward, "global": counted, "closure": of_closure}[where])
    for _ in range(3):
        same(torch.func.jvp(step, (X,), (X,))[0], step(X))
    assert len(step.settings.programs) == 2
    assert (NUM_CALLS, num, module.num, vars(counting)) == (0, 0, 0, {})
    assert sum("assigns" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("entry", [lambda y: (1, y), lambda y: {"y": y}, lambda y: lambda: y, lambda y: [1]])
def test_what_a_function_puts_into_containers_is_lost_and_said_once(entry, caplog):
    logs, net = [], mlp()
    net.cache = {"last": 1.0}

    def loss(x):
        y = net(x).square().sum()
        logs.append(entry(y.detach()))
        net.cache["last"] = y
        y.register_hook(lambda y_bar: net.cache.update(last=y_bar))
        return y

    step = plainly(loss)
    for _ in range(2):
        same(gradients(net, step(X)), gradients(net, net(X).square().sum()))
    assert (logs, net.cache, len(step.settings.programs)) == ([], {"last": 1.0}, 2)
    assert sum("assigns an entry of a list" in record.getMessage() for record in caplog.records) == 1


DRAWS = [random.random, np.random.rand, lambda: GENERATORS[0].random(), lambda: GENERATORS[1].random()]


@pytest.mark.parametrize("draw", DRAWS, ids=["Python", "NumPy", "Python's own", "NumPy's own"])
def test_numbers_drawn_outside_of_torch_are_those_of_the_trace_and_it_is_said_once(draw, caplog):
    step, others = plainly(lambda x: x * draw()), plainly(lambda x: x * torch.rand(3))
    same(*(step(X) for _ in range(2)))
    step(X[:2])
    others(X)
    assert sum("generator of Python or NumPy" in record.getMessage() for record in caplog.records) == 1


def test_a_compiled_function_inside_another():
    inner = plainly(lambda x: (x * SHIFT).sin())
    inner(X)
    same(plainly(lambda x: inner(x).sum())(X), (X * SHIFT).sin().sum())


class Constants:
    """Tensors that classes hold are constant."""

    direction, mask = data(6, 3, seed=8), torch.tensor([True, False, True])


# Older functionalization takes no tensor that the tracer does not know.
KNOWS_CONSTANTS = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="functionalization of older versions raises for constants that are watched"
)


def test_constants_that_are_not_found_are_read_where_they_are():
    holder = types.SimpleNamespace(shift0=SHIFT.clone(), shift1=SHIFT + 1)
    step = plainly(lambda x: torch.addcmul(x, *(getattr(holder, f"shift{i}") for i in range(2))))
    for _ in range(2):
        same(step(X), X + holder.shift0 * holder.shift1)
        holder.shift1 *= 2


@KNOWS_CONSTANTS
def test_copies_of_constants_may_be_written_to():
    def doubled(x):
        y = x.clone()
        y.mul_(2 * y.sum())
        return y.square().sum()

    def function(x):
        y, z = Constants.direction.clone(), Constants.direction.view(3, 6) + 0
        y.mul_(x.sum())
        z[0] = x.T[0]
        return (
            torch.func.jvp(doubled, (x,), (Constants.direction,))[1] + (y * z.T).sum() + x[:, Constants.mask].sum(),
            x * 2 if Constants.mask.any() else x,
        )

    same(plainly(function)(X), function(X))


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(1),
        pytest.param(lambda y: y.view(-1)[:2].zero_(), marks=KNOWS_CONSTANTS),
        lambda y: y.__iadd__(1),
        lambda y: y.T.__setitem__(0, 1),
    ],
)
def test_constants_may_not_be_written_to(write):
    before = Constants.direction.clone()
    with pytest.raises(pr.MutationError, match=r"written to.*test_state.py"):
        plainly(lambda x: (write(Constants.direction), x * 2)[1])(X)
    same(Constants.direction, before)


@pytest.mark.parametrize("made", [list, tuple, lambda ps: {"inner": [*ps]}], ids=["list", "tuple", "tree"])
def test_a_variable_that_holds_parameters_of_a_module_holds_those_of_the_call(made):
    net = mlp()
    held = made(net.parameters())

    def loss(x):
        params = held["inner"] if isinstance(held, dict) else held
        gradients = torch.autograd.grad(net(x).square().sum(), params, create_graph=True)
        return sum(g.square().sum() for g in gradients)

    step = plainly(loss)
    same(gradients(net, step(X)), gradients(net, loss(X)))
    # The module has another weight now than the variable: they part ways.
    net[0].weight = nn.Parameter(2 * net[0].weight.detach())
    with pytest.raises(RuntimeError, match="not have been used"):
        step(X)


def test_a_tensor_that_is_reached_twice_is_one():
    """As an argument beside its module, as two arguments, and in two variables; another tensor is another program."""
    net, other = mlp(), data(5, 3, seed=6).requires_grad_()
    held, again = [other], other

    def loss(w, x):
        y = net(x).square().sum() + (held[0].sin() * x[:5]).sum()
        found = torch.autograd.grad(y, [w, again], create_graph=True, materialize_grads=True)
        return sum(g.square().sum() for g in found) + w.sum()

    step = plainly(loss)
    for w in (net[0].weight, other, net[0].weight.detach().requires_grad_(), net[0].weight):
        inputs = [w, other, *net.parameters()]
        found, truth = (torch.autograd.grad(f(w, X), inputs, materialize_grads=True) for f in (step, loss))
        same([step(w, X), *found], [loss(w, X), *truth])
    product = plainly(lambda a, b: torch.autograd.grad((a * b).sum(), a, create_graph=True)[0])
    same(product(other, other), 2 * other)
    same(product(other, 3 * other), 3 * other)


def test_a_buffer_that_is_an_argument_too_is_written_once():
    def run(norm, mean, x):
        return norm(x).square().sum() + (mean * x).sum()

    pairs = [(plainly(run), nn.BatchNorm1d(3).double()), (run, nn.BatchNorm1d(3).double())]
    for _ in range(2):
        same(*(f(norm, norm.running_mean, X) for f, norm in pairs))
        same(*(norm.buffers() for _, norm in pairs))


def test_a_hook_that_the_first_call_registers_runs_once():
    """Models of transformers collect hidden states by such hooks, and mark themselves."""

    class Model(nn.Linear):
        is_hooked = False

        def forward(self, x):
            if not self.is_hooked:
                self.register_forward_hook(lambda module, args, y: 2 * y)
                self.is_hooked = True
            return super().forward(x)

    model = Model(3, 3).double()
    compiled = plainly(lambda x: model(model(x)).sum())
    for x in (X, X[:2]):
        fresh = copy.deepcopy(model)
        same(compiled(x), fresh(fresh(x)).sum())
    assert not model._forward_hooks
