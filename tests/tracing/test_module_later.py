"""What a module runs after its pure call: hooks, custom functions, and regions that are checkpointed."""

import gc
import re
import weakref

import pytest
import torch
from pure_modules import assert_untouched, data, snapshot
from torch import nn
from torch.utils.checkpoint import checkpoint

import primitives as pr
from primitives.tracing import PhiloxState, functional_call, functionalize_rng, trace_joint

GIVEN = torch.tensor([5.0], dtype=torch.float64)


class Scaled(nn.Module):
    """The identity, whose backward pass multiplies by the module's own weight, buffer and attribute."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))
        self.factor = torch.zeros(1, dtype=torch.float64)

    def scale(self, y_bar):
        return y_bar * self.weight * self.count * self.factor

    def forward(self, x):
        self.count += 1
        self.factor = torch.full_like(self.factor, 3.0)
        return self.identity(x * 1)

    def identity(self, x):
        x.register_hook(self.scale)
        return x


class Contextual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, y_bar):
        return ctx.module.scale(y_bar), None


class Separate(torch.autograd.Function):
    @staticmethod
    def forward(x, module):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.module = inputs[1]

    backward = Contextual.backward


class ByOldFunction(Scaled):
    def identity(self, x):
        return {"y": Contextual.apply(x, self)}["y"] + 0


class ByFunction(Scaled):
    def identity(self, x):
        return Separate.apply(x, self)


class ByModuleHook(Scaled):
    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(lambda module, x_bar, y_bar: (module.scale(x_bar[0]),))

    def identity(self, x):
        return x


class ByPostHook(Scaled):
    """A hook on what is given, after its gradient is there."""

    def identity(self, x):
        self.weight.register_post_accumulate_grad_hook(self.raise_to_scale)
        return x * self.weight

    def raise_to_scale(self, weight):
        weight.grad.mul_(self.count * self.factor)


KINDS = (Scaled, ByOldFunction, ByFunction, ByModuleHook)
SCALE = 5.0 * 1.0 * 3.0


def called(kind, weight=GIVEN):
    model = kind()
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    pure, before = functional_call(model), snapshot(model)
    output, buffers = pure({"weight": weight}, {"count": torch.zeros(1, dtype=torch.float64)}, x)
    return model, x, output, buffers, before


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_pass_finds_what_was_given(kind):
    model, x, output, buffers, before = called(kind)
    for _ in range(2):
        (x_bar,) = torch.autograd.grad(output, x, retain_graph=True)
        assert x_bar == SCALE
        assert_untouched(model, before)
    assert buffers["count"] == 1


@pytest.mark.parametrize("kind", [Scaled, ByFunction])
def test_it_does_under_transforms(kind):
    pure = functional_call(kind())
    buffers = {"count": torch.zeros(1, dtype=torch.float64)}

    def loss(x, weight):
        return pure({"weight": weight}, buffers, x)[0].sum()

    x = torch.ones(1, dtype=torch.float64)
    assert pr.func.grad(loss)(x, GIVEN) == SCALE
    assert pr.func.grad(lambda w: pr.func.grad(loss)(x, w).sum())(GIVEN) == 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_in_a_joint_graph_and_at_second_order(kind):
    pure = functional_call(kind())
    buffers = {"count": torch.zeros(1, dtype=torch.float64)}
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    graph = trace_joint(lambda x, w: pure({"weight": w}, buffers, x)[0].sum(), x, GIVEN, no_tangents=True)
    assert graph((x, 2 * GIVEN))[1][0] == 2 * SCALE
    weight = GIVEN.clone().requires_grad_()
    _, x, output, _, _ = called(kind, weight)
    (x_bar,) = torch.autograd.grad(output, x, create_graph=True)
    assert torch.autograd.grad(x_bar, weight)[0] == 3.0


def test_a_hook_on_a_parameter():
    weight = GIVEN.clone().requires_grad_()
    _, _, output, _, _ = called(ByPostHook, weight)
    output.backward()
    assert weight.grad == 3.0


def test_pure_calls_inside_of_pure_calls():
    class Outer(Scaled):
        def __init__(self):
            super().__init__()
            self.inner = ByOldFunction()

        def identity(self, x):
            params = {"weight": self.weight + 1}
            x = functional_call(self.inner)(params, {"count": self.count * 0}, x)[0]
            return Contextual.apply(x, self)

    pure = functional_call(Outer())
    params, buffers = pure.init()
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    output, _ = pure({**params, "weight": GIVEN}, buffers, x)
    assert torch.autograd.grad(output, x)[0] == SCALE * (6.0 * 3.0)


def test_an_error_in_the_backward_pass_leaves_nothing_behind():
    class Failing(Scaled):
        def scale(self, y_bar):
            raise ZeroDivisionError

    for kind in (Failing, type("FailingFunction", (Failing, ByOldFunction), {})):
        model, x, output, _, before = called(kind)
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(output, x)
        assert_untouched(model, before)
        assert torch.overrides._get_current_function_mode() is None


def test_what_a_hook_assigns_stays_and_what_it_writes_is_refused():
    class Seeing(Scaled):
        def scale(self, y_bar):
            self.seen = y_bar
            return y_bar

    model, x, output, _, _ = called(Seeing)
    torch.autograd.grad(output, x)
    assert model.seen == 1
    assert model.factor == 0

    class InPlace(Scaled):
        def scale(self, y_bar):
            self.count += 1
            return y_bar

    class Assigning(Scaled):
        def scale(self, y_bar):
            self.count = self.count + 1
            return y_bar

    for kind, verb in ((InPlace, "writes its buffer 'count'"), (Assigning, "assigns 'count'")):
        model, x, output, _, before = called(kind)
        with pytest.raises(pr.MutationError, match=verb):
            torch.autograd.grad(output, x)
        assert_untouched(model, before)


def test_graphs_are_freed():
    class Keeping(ByOldFunction):
        def identity(self, x):
            self.kept = Contextual.apply(x, self) + 0
            return self.kept

    _, x, output, _, _ = called(Keeping)
    # Python sees no cycle that runs through an operation of torch's own.
    alive = weakref.ref(output.grad_fn.next_functions[0][0])
    torch.autograd.grad(output, x)
    del output
    gc.collect()
    assert alive() is None


class Block(nn.Module):
    """Buffers of every kind, read and written in a region that may be checkpointed."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        for name in ("in_place", "assigned"):
            self.register_buffer(name, torch.zeros(4))

    def body(self, x):
        self.in_place.add_(1)
        self.assigned = self.assigned + 1
        return self.dropout(self.norm(self.linear(x)).tanh()) * self.in_place.clone() * self.assigned

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.kind else self.body(x)


class Blocks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.second = kind, Block(kind), Block(kind)

    def forward(self, x):
        x = self.second(self.first(x))

        def again(x):
            return self.first(self.second(x))

        return checkpoint(again, x, use_reentrant=False) if self.kind == "nested" else again(x)


def eager(pure, params, buffers, x):
    torch.manual_seed(3)
    output, buffers = pure(params, buffers, x)
    return output, buffers, torch.autograd.grad(output.sum(), list(params.values()))


def stated(pure, params, buffers, x):
    (output, buffers), _ = functionalize_rng(pure)(PhiloxState.from_seed(3), params, buffers, x)
    return output, buffers, torch.autograd.grad(output.sum(), list(params.values()))


def joint(pure, params, buffers, x):
    def loss(params, buffers, x):
        output, buffers = pure(params, buffers, x)
        return output.sum(), (output.detach(), buffers)

    graph = trace_joint(loss, params, buffers, x, no_tangents=True, functionalize_rng=True)
    rng = PhiloxState.from_seed(3), PhiloxState.from_seed(4)
    (_, (output, buffers)), grads, _ = graph((params, buffers, x), rng=rng)
    return output, buffers, list(grads[0].values())


@pytest.mark.parametrize("kind", ["flat", "nested"])
@pytest.mark.parametrize("run", [eager, stated, joint])
def test_checkpoints_inside_give_the_same_bits(run, kind):
    results = []
    for each in ("", kind):
        torch.manual_seed(0)
        model = Blocks(each).double()
        pure, before = functional_call(model), snapshot(model)
        params, buffers = pure.init()
        params = {name: (p + 1).requires_grad_() for name, p in params.items()}
        results.append(run(pure, params, buffers, data(0, 5, 4)))
        assert_untouched(model, before)
    (output, buffers, grads), (*actual, actual_grads) = results
    assert torch.equal(actual[0], output)
    assert actual[1].keys() == buffers.keys()
    assert all(torch.equal(actual[1][name], value) for name, value in buffers.items())
    assert all(torch.equal(a, e) for a, e in zip(actual_grads, grads, strict=True))


def test_a_write_that_python_does_not_see_is_not_computed_again():
    class Unseen(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            y = checkpoint(lambda x: (x * self.mask).sin(), x, use_reentrant=False)
            with torch._C.DisableTorchFunction():
                self.mask.zero_()
            return y

    pure = functional_call(Unseen())
    x = data(0, 3).requires_grad_()
    output, _ = pure(*pure.init(), x)
    with pytest.raises(pr.MutationError, match=re.escape("after a checkpointed region had begun")):
        output.sum().backward()
