"""Writes to inputs as outputs: values, metadata, aliases, derivatives, graphs and errors."""

from collections import OrderedDict

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from primitives._core.errors import MissingRuleError, MutationError
from primitives.tracing import create_joint, functionalize_mutations, trace_joint
from tests.support import data


def ops(graph):
    return [node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")]


def assert_pure(graph):
    assert not [name for name in ops(graph) if name.endswith("_") or name == "primitives::write_back"], graph.code


def add_into(x, y):
    torch.add(y, 1, out=x)


def made_inside(x, y):
    made = torch.zeros(2, dtype=x.dtype)
    made.add_(torch.tensor([1.0, 2.0]))
    made[0] = torch.tensor(3.0).mul_(2)
    x.add_(made)


# Writes to two matrices that no random program has, and the labels of the written ones.
PROGRAMS = {
    "out": (add_into, "x"),
    "foreach": (lambda x, y: torch._foreach_add_([x, y], 1.0), "xy"),
    "masked": (lambda x, y: x.__setitem__(x > 0, 0.0), "x"),
    "back again": (lambda x, y: x.t_().t_(), ""),
    "native norm": (lambda x, y: torch.native_batch_norm(x, None, None, y[0], y[1], True, 0.1, 1e-5), "y"),
    "made inside": (made_inside, "x"),
    "write_back": (lambda x, y: torch.ops.primitives.write_back([x], [y]), "x"),
}


@pytest.mark.parametrize("program, labels", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("tracing_mode", [None, "symbolic"])
def test_new_values(program, labels, tracing_mode):
    x, y = data(2, 2), data(2, 2, seed=1)
    expected = x.clone(), y.clone()
    program(*expected)
    before = x.clone(), y.clone(), x._version, y._version
    pure = functionalize_mutations(lambda x, y: [program(x, y)][1:])
    in_place, given = pure.in_place, (x.clone(), y.clone())
    if tracing_mode:
        in_place = make_fx(in_place, tracing_mode=tracing_mode)(x.clone(), y.clone())
        assert {n for n in ops(in_place) if n.endswith("_")} <= {"aten::copy_", "aten::as_strided_"}
        pure = make_fx(pure, tracing_mode=tracing_mode)(x, y)
        assert_pure(pure)
    in_place(*given)
    assert all(a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    _, mutated = pure(x, y)
    keys = {"x": "args[0]", "y": "args[1]"}
    assert list(mutated) == [keys[label] for label in labels]
    for key, value in mutated.items():
        wanted = expected[int(key[5])]
        assert (value.shape, value.stride(), value.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert torch.equal(value, wanted)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert (x._version, y._version) == before[2:]
    assert x.shape == y.shape == (2, 2)


BASE, OUTSIDE, MATRIX = data(6), data(2), data(2, 2)
COMPLEX = torch.zeros(2, dtype=torch.complex64)
REFUSED = {
    "overlap": (lambda a, b: a.mul_(2), (BASE[:4], BASE[2:]), r"share memory, and args\[0\] is written"),
    "complex": (lambda a, b: a.zero_(), (COMPLEX, torch.view_as_real(COMPLEX)), "share memory"),
    "captured": (lambda x: OUTSIDE.add_(x), (MATRIX[0],), r"not an input.*test_mutations.py:\d+: "),
    "view": (lambda x: OUTSIDE[0].zero_(), (MATRIX[0],), r"not an input.*test_mutations.py:\d+: "),
    "resize_": (lambda x: x.resize_(1, 2), (MATRIX,), r"args\[0\] is given other memory"),
    "set_": (lambda x: x.set_(x.sin()), (MATRIX,), r"args\[0\] is given other memory"),
}


@pytest.mark.parametrize("program, args, text", REFUSED.values(), ids=REFUSED)
def test_writes_that_cannot_be_pure(program, args, text):
    given = [x.clone() for x in (BASE, OUTSIDE, MATRIX)]
    pure, calls = functionalize_mutations(program), []
    for call in (pure, functionalize_mutations(lambda *args: pure(*args)[0])):
        calls += [call, make_fx(call, tracing_mode="fake" if len(args) == 2 else "real")]
    for call in calls:
        with pytest.raises(MutationError, match=text):
            call(*args)
    assert all(map(torch.equal, (BASE, OUTSIDE, MATRIX), given))


def test_outputs_that_are_views_of_inputs_stay_so():
    x = data(3, 3).t()[1:]
    pure = functionalize_mutations(lambda x: (x, x[1], x.detach()[1]))
    for call in (pure, make_fx(pure, tracing_mode="fake")(x)):
        for y, wanted in zip(call(x)[0], (x, x[1], x[1]), strict=True):
            assert (y.data_ptr(), y.stride()) == (wanted.data_ptr(), wanted.stride())


def test_inputs_that_overlap_are_read():
    pure = functionalize_mutations(lambda a, b: (a.mul_(2), b.sum())[1])
    assert functionalize_mutations(lambda a, b: a * b[:4])(BASE[:4], BASE[2:])[1] == {}
    # Inputs that share a storage and no element, and one tensor in two places, are nothing special.
    assert list(pure(BASE[:2], BASE[2:])[1]) == ["args[0]"]
    assert torch.equal(pure(BASE, BASE)[0], 2 * BASE.sum())
    with pytest.raises(MissingRuleError, match="pre_dispatch"):
        make_fx(functionalize_mutations(torch.sin), pre_dispatch=True)(data(2))


def program(x, w):
    x.mul_(w)
    x[0].add_(x[1])
    with torch.no_grad():
        (x * 1).add_(1)
    return (x * x * x).sum()


def by_hand(x, w):
    x = x * w
    x = torch.cat([(x[0] + x[1])[None], x[1:]])
    return (x * x * x).sum()


TRANSFORMS = {
    "per sample": lambda f, x, w: vmap(grad(f), (0, None))(torch.stack([x, x + 1]), w),
    "jvp": lambda f, x, w: jvp(f, (x, w), (w, x)),
    "hessian": lambda f, x, w: hessian(f)(x, w),
    "vmap": lambda f, x, w: vmap(f)(torch.stack([x, x + 1]), torch.stack([w, w + 1])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives(name):
    results = [
        TRANSFORMS[name](f, data(3), data(3, seed=1))
        for f in (lambda x, w: functionalize_mutations(program)(x, w)[0], by_hand)
    ]
    torch.testing.assert_close(*results)
    # The pure form of a derivative has a graph without writes, and so has the pure form inside it, given that.
    transform, inner = TRANSFORMS[name], functionalize_mutations(program)
    outer = functionalize_mutations(lambda x, w: transform(lambda x, w: inner(x, w)[0], x.clone(), w.clone()))
    graph = make_fx(outer, tracing_mode="fake")(data(3), data(3, seed=1))
    assert_pure(graph)
    torch.testing.assert_close(graph(data(3), data(3, seed=1))[0], results[1])


# Writes that autograd sees, or does not: under no_grad, through .data and detach(), by functions that mark them.


def without_grad(w, state):
    y = (w * state).sum().square()
    with torch.no_grad():
        w.clamp_(-0.1, 0.1)
    w.data.add_(1)
    w.detach().mul_(2)
    return y + (w * state).exp()


class Doubled(torch.autograd.Function):
    """Writes in place and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, bar):
        return 2 * bar


# Whether autograd sees the write to `w`.
WRITING = {
    "no_grad": (without_grad, False),
    "data": (lambda w, state: w.data.mul_(2) + w.sin(), False),
    "detach": (lambda w, state: w.detach().mul_(2) + w.sin(), False),
    "both": (lambda w, state: (state.add_(w.detach().sum()), w.mul_(2) * state)[1].sin(), True),
    "marked": (lambda w, state: (Doubled.apply(w), w * w.sin())[1], True),
    "view": (lambda w, state: (Doubled.apply(w[1:]), Doubled.apply(w), w * w.sin())[2], True),
}


@pytest.mark.parametrize("fn, is_seen", WRITING.values(), ids=WRITING)
def test_writes_under_autograd(fn, is_seen):
    """Output, gradient and new values are those of eager autograd; a write that it does not see has no derivative."""
    pure, ones = functionalize_mutations(fn), torch.ones(3, dtype=torch.float64)

    def inputs():
        return data(3).requires_grad_(), data(3, seed=1)

    def run(call, leaf=False):
        w, state = inputs()
        y, new_w, new_state = call(w if leaf else w * 1, state)
        return y, torch.autograd.grad(y.sum() + (new_w.sum() if is_seen else 0), w)[0], new_w, new_state

    def called(w, state):
        y, mutated = pure(w, state)
        assert mutated["args[0]"].requires_grad == is_seen
        return y, mutated["args[0]"], mutated.get("args[1]", state)

    expected = run(lambda w, state: (fn(w, state), w, state))
    found = [run(called), run(called, leaf=True), run(lambda w, state: (pure.in_place(w, state), w, state))]
    w, state = inputs()
    graph = trace_joint(fn, (w, state))
    assert graph.cotangent_names == ("cotangents[0]", "cotangents[1]['w']")[: 1 + is_seen]
    w_bar = ones if is_seen else None

    def joined(*given):
        return make_fx(create_joint(pure))(*given)(*given)

    for call, names in ((graph, ("w", "state")), (joined, ("args[0]", "args[1]"))):
        mutated_bars = zip(names[: len(graph.mutated_names)], (w_bar, None), strict=False)
        (y, mutated), grads = call((w, state), (ones, OrderedDict(mutated_bars)))
        found.append((y, grads[0], mutated[names[0]], mutated.get(names[1], state)))
        assert all(map(torch.equal, (w, state), inputs()))
    # The joint function itself writes to its inputs.
    if is_seen:
        with pytest.raises(RuntimeError, match="leaf"):
            pure.in_place(w, state)
        for given in (w, w * 1):
            with pytest.raises(MutationError, match=r"create_joint: .*written to in place"):
                create_joint(fn)((given, state), ones)
    else:
        y, grads = create_joint(fn)((w, state), ones)
        found.append((y, grads[0], w, state))
    for values in found:
        assert all(map(torch.equal, values, expected))


def test_a_graph_has_the_gradient_in_every_input():
    pure = functionalize_mutations(lambda x, w: (x * 1).mul_(w).sin())
    x, w = data(3).requires_grad_(), data(3, seed=1).requires_grad_()

    def slopes(x, w):
        return torch.autograd.grad(pure(x, w)[0].sum(), (x, w))

    expected = torch.autograd.grad((x * w).sin().sum(), (x, w))
    torch.testing.assert_close(make_fx(slopes)(x, w)(x, w), expected)


def test_an_optimizer_finds_the_gradient_of_what_it_writes_to():
    w = data(3).requires_grad_()
    w.grad = data(3, seed=1)
    mutated = functionalize_mutations(lambda w: torch.optim.SGD([w], 0.1).step())(w)[1]
    torch.testing.assert_close(mutated["args[0]"], w.detach() - 0.1 * w.grad)
    assert torch.equal(w, data(3))
