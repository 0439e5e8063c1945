"""Random programs that view, alias, write and draw: their pure form against themselves; compiled, with derivatives."""

import functools
import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import primitives as pr
from primitives.tracing import PhiloxState, functionalize_mutations, functionalize_rng, trace_joint

# Views of a tensor, or something new; the tensor itself where it has no such view.
VIEWS = {
    "view": lambda x, k: x.view(-1) if x.is_contiguous() else x,
    "flip": lambda x, k: x.flip(0) if x.dim() else x.flip(()),
    "cos": lambda x, k: x.cos(),
    "detach": lambda x, k: x.detach(),
    "as_strided": lambda x, k: x.as_strided((2,), (1,)) if x.numel() > 1 and x.is_contiguous() else x,
    "expand": lambda x, k: x.expand(2, *x.shape) if x.dim() < 3 else x,
    "transpose": lambda x, k: x.transpose(0, -1) if x.dim() else x,
    "diagonal": lambda x, k: x.diagonal() if x.dim() == 2 else x,
    "slice": lambda x, k: x[k % len(x) :] if x.dim() and len(x) else x,
    "step": lambda x, k: x[::2] if x.dim() else x,
    "unbind": lambda x, k: x.unbind(0)[k % len(x)] if x.dim() and len(x) else x,
    "chunk": lambda x, k: x.chunk(2)[-1] if x.dim() and len(x) else x,
}


def indexed(x, value):
    if x.dim() and x.shape[0]:
        x.index_put_((torch.tensor([0]),), value)


WRITES = {
    **{name: lambda x, value, name=name: getattr(x, name)(value) for name in ("add_", "mul_", "copy_")},
    "index_put_": indexed,
    "setitem": lambda x, value: x.__setitem__(..., value),
    "zero_": lambda x, value: x.zero_(),
    "sin_": lambda x, value: x.sin_(),
}
METADATA = {
    "t_": lambda x: x.t_() if x.dim() <= 2 else x,
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.squeeze_(),
}
# Something random like a tensor, or the tensor with something random in it.
RANDOM = {
    "bernoulli_": lambda x: x if 0 in x.stride() else x.bernoulli_(0.5),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "rand_like": torch.rand_like,
}
NUM_PROGRAMS = {"eager": 60, "in_place": 50, "traced": 16, "joint": 13, "joint, random": 13}
# By day; by night.
NUM_COMPILED, MANY_COMPILED = {"eager": 2}, {"eager": 300, "aot_eager": 60, "inductor": 15}


def programs(kind, number):
    """How the second input lies in the memory of the first, and instructions."""
    choose, is_joint = random.Random(7), kind.startswith("joint") or kind == "compiled"
    # Beside live views, torch's functionalization cannot always follow a change of shape in place: it raises.
    kinds = [*WRITES, *WRITES, *VIEWS, *([] if is_joint or kind == "traced" else METADATA)]
    kinds += RANDOM if kind == "joint, random" else []
    if kind == "compiled":
        kinds.remove("as_strided")  # which torch does not write through where it functionalizes
    for _ in range(number):
        instructions = [(choose.choice(kinds), *choose.choices(range(6), k=2)) for _ in range(choose.randint(2, 7))]
        yield "apart" if is_joint else choose.choice(("apart", "same", "disjoint")), instructions


def overlaps_itself(x):
    return any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))


def run(instructions, a, b, w):
    values = [a, b]
    for kind, i, k in instructions:
        x, y = values[i % len(values)], values[k % len(values)]
        if kind in WRITES and not overlaps_itself(x):
            WRITES[kind](x, w.sum() * y.mean() if y.numel() else w.sum())
        elif kind in METADATA:
            METADATA[kind](x)
        elif kind not in WRITES:
            values.append(RANDOM[kind](x) if kind in RANDOM else VIEWS[kind](x, k))
    return [*values[2:], a, b, sum(((v * v).sum() for v in values), start=w.sum())]


def inputs(overlap):
    """Two inputs and a parameter; the first input is a base, the second overlaps it or not."""
    a = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64)[3:].clone().reshape(3, 3)
    b = torch.linspace(2.0, 3.0, 4, dtype=torch.float64).reshape(2, 2) if overlap == "apart" else a
    if overlap == "disjoint":
        a, b = a[:1], a[1:]
    return a, b, torch.tensor([0.5, -1.5], dtype=torch.float64, requires_grad=True)


def geometry(x):
    return tuple(x.shape), tuple(x.stride()), x.dtype, x.requires_grad


def aliases(values):
    """Which values share memory, and which are one object."""
    numbers = [x.untyped_storage()._cdata for x in values]
    return [[numbers.index(n) for n in numbers], [[x is y for x in values].index(True) for y in values]]


def assert_same(values, expected):
    assert len(values) == len(expected)
    for x, y in zip(values, expected, strict=True):
        assert geometry(x) == geometry(y)
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def eager(instructions, overlap):
    """Outputs, final inputs and the gradient of the program; `None` if torch refuses to run it."""
    a, b, w = inputs(overlap)
    if overlap == "disjoint":
        # Inputs without a common element count as unrelated; torch's autograd takes views of one base together.
        a, b = a.clone(), b.clone()
    try:
        outputs = run(instructions, a, b, w)
        (grad,) = torch.autograd.grad(outputs[-1], w, retain_graph=True, allow_unused=True)
    except RuntimeError:
        return None
    return outputs, [a, b], grad


def compared(kind, overlap, instructions):
    """Whether torch runs the program; its pure form gives the same."""
    expected = eager(instructions, overlap)
    if expected is None:
        return False
    outputs, final, grad = expected
    a, b, w = inputs(overlap)
    before = [(x.clone(), geometry(x), x._version) for x in (a, b)]
    pure = functionalize_mutations(lambda a, b, w: run(instructions, a, b, w))
    if kind == "in_place":
        # A write through a detached alias has a history that the input lacks: no tensor is an alias and has it.
        if overlap == "disjoint" or any(name == "detach" for name, _, _ in instructions):
            return False
        results = pure.in_place(a, b, w)
        assert_same([*results, a, b], [*outputs, *final])
        assert aliases([*results[:-1], a, b]) == aliases([*outputs[:-1], *final])
        return True
    results, mutated = pure(a, b, w)
    after = [mutated.get(f"args[{i}]", x) for i, x in enumerate((a, b))]
    assert_same([*results, *([after[0]] * 2 if a is b else after)], [*outputs, *final])
    if overlap != "disjoint":
        assert aliases(results[:-1]) == aliases(outputs[:-1])
    torch.testing.assert_close(torch.autograd.grad(results[-1], w, retain_graph=True, allow_unused=True)[0], grad)
    if kind == "traced":
        graph = make_fx(pure, tracing_mode="fake")(a, b, w)
        names = [node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")]
        assert not [name for name in names if name.endswith("_")], graph.code
        graph_results, graph_mutated = graph(a, b, w)
        assert list(graph_mutated) == list(mutated)
        for x, y in zip([*graph_results, *graph_mutated.values()], [*results, *mutated.values()], strict=True):
            assert geometry(x)[:-1] == geometry(y)[:-1]
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    for x, (value, metadata, version) in zip((a, b), before, strict=True):
        assert torch.equal(x, value)
        assert (geometry(x), x._version) == (metadata, version)
    return True


def compared_joint(kind, overlap, instructions):
    """Whether torch runs the program; its joint graph gives its outputs, new values of the inputs, and gradients."""
    states, is_random = (PhiloxState.from_seed(5), PhiloxState.from_seed(6)), kind == "joint, random"

    def function(a, b, w):
        *values, loss = run(instructions, a, b, w)
        return [loss, *values]

    a, b, w = inputs(overlap)
    try:
        outputs, end = functionalize_rng(function)(states[0], a, b, w)
        (grad,) = torch.autograd.grad(outputs[0], w, allow_unused=True)
    except RuntimeError:
        return False
    primals = inputs(overlap)
    graph = trace_joint(function, primals, no_cotangents=True, functionalize_rng=is_random)
    outs, grads, *after = graph(primals, **({"rng": states} if is_random else {}))
    values, mutated = outs if graph.mutated_names else (outs, {})
    final = [mutated.get(name, x) for name, x in zip("ab", primals[:2], strict=True)]
    assert all(map(torch.equal, [*values, *primals, *final], [*outputs, *inputs(overlap), a, b]))
    # Gradients through views are added up in another order.
    torch.testing.assert_close(grads[2], grad, rtol=1e-12, atol=1e-12)
    if is_random:
        assert (after[0][0].offset, after[0][1].offset) == (end.offset, 0)
    return True


DIRECTIONS = [torch.linspace(-1.0, 1.0, x.numel(), dtype=x.dtype).reshape(x.shape) for x in inputs("apart")]


def along(gradients):
    return sum((g * v).sum() for g, v in zip(gradients, DIRECTIONS, strict=True) if g is not None)


MODES = {
    "forward": lambda f: lambda *xs: torch.func.jvp(f, xs, (*DIRECTIONS,))[1],
    "reverse": lambda f: lambda *xs: along(torch.func.grad(f, (0, 1, 2))(*xs)),
    "recorded": lambda f: lambda *xs: along(torch.autograd.grad(f(*xs), xs, create_graph=True, allow_unused=True)),
}


def with_derivatives(instructions, wrap):
    """Results of a program, and two derivatives of its last in drawn modes, wrapped before one of them is taken."""
    choose = random.Random(str(instructions))
    modes, place = choose.choices([*MODES.values()], k=2), choose.randrange(3)
    xs = [x.requires_grad_() for x in inputs("apart")]

    def function(a, b, w):
        return run(instructions, a.clone(), b.clone(), w)

    results = wrap(function)(*xs)
    derivative = lambda *xs: function(*xs)[-1].sin()  # noqa: E731
    for mode in [*modes, None]:
        derivative = wrap(derivative) if place == 0 else derivative
        results.append(derivative(*xs))
        derivative, place = mode and mode(derivative), place - 1
    return [*results, *torch.autograd.grad(results[-1], xs, materialize_grads=True)]


def compared_compiled(compiler, overlap, instructions):
    """Whether torch runs the program and its derivatives; compiled, they are the same."""
    try:
        expected = with_derivatives(instructions, lambda f: f)
    except RuntimeError:
        return False
    found = with_derivatives(instructions, functools.partial(pr.compile, backend=compiler))
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype, x.requires_grad) == (y.shape, y.dtype, y.requires_grad)
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    return True


@pytest.mark.parametrize(
    "compiler, number",
    [*NUM_COMPILED.items(), *(pytest.param(*each, marks=pytest.mark.nightly) for each in MANY_COMPILED.items())],
)
def test_random_programs_compiled(compiler, number):
    num_compared = sum(compared_compiled(compiler, *program) for program in programs("compiled", number))
    assert num_compared > number // 3


@pytest.mark.parametrize("kind", NUM_PROGRAMS)
def test_random_programs(kind):
    compare = compared_joint if kind.startswith("joint") else compared
    num_compared = sum(compare(kind, *program) for program in programs(kind, NUM_PROGRAMS[kind]))
    assert num_compared > NUM_PROGRAMS[kind] // 3
