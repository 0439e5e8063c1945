"""Random operations as functions of an explicit Philox state: values, errors, graphs, transforms, checkpoints."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import primitives as pr
from primitives.tracing import PhiloxState, functionalize_rng

MANY = 20_000
X = torch.linspace(-2.0, 2.0, 24, dtype=torch.float64).reshape(4, 6)
STATE = PhiloxState.from_seed(3)


@pytest.fixture(autouse=True)
def untouched_generator():
    """Torch's own generator is neither read nor changed."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def empty(dtype=torch.float32):
    return torch.empty(7, dtype=dtype)


# One call of each random operation that is covered, and of functions that are composed of them.
CALLS = {
    "rand": lambda: torch.rand(5),
    "rand complex": lambda: torch.rand(5, dtype=torch.complex64),
    "rand out": lambda: torch.rand(3, out=torch.empty(3)),
    "rand_like": lambda: torch.rand_like(X.T, dtype=torch.float32),
    "randn": lambda: torch.randn(5),
    "randn complex": lambda: torch.randn(5, dtype=torch.complex128),
    "randn_like": lambda: torch.randn_like(X.T),
    "randint": lambda: torch.randint(9, (5,)),
    "randint from": lambda: torch.randint(-3, 9, (5,), dtype=torch.int32),
    "randint_like": lambda: torch.randint_like(X, 4),
    "randint_like from": lambda: torch.randint_like(X, 2, 4),
    "randperm": lambda: torch.randperm(9),
    "bernoulli": lambda: torch.bernoulli(X.sigmoid()),
    "bernoulli p": lambda: X.bernoulli(p=0.2),
    "bernoulli_": lambda: empty().bernoulli_(0.3),
    "bernoulli_ tensor": lambda: empty().bernoulli_(torch.full((7,), 0.5)),
    "multinomial": lambda: torch.multinomial(X.exp(), 3),
    "multinomial replaced": lambda: torch.multinomial(X.exp(), 9, replacement=True),
    "uniform_": lambda: empty().uniform_(2, 3),
    "normal_": lambda: empty().normal_(2, 3),
    "exponential_": lambda: empty().exponential_(2),
    "geometric_": lambda: empty().geometric_(0.2),
    "cauchy_": lambda: empty().cauchy_(1, 2),
    "log_normal_": lambda: empty().log_normal_(),
    "random_": lambda: empty(torch.int64).random_(),
    "random_ to": lambda: empty(torch.uint8).random_(7),
    "random_ from": lambda: empty().random_(-3, 7),
    "random_ bool": lambda: empty(torch.bool).random_(),
    "normal": lambda: torch.normal(1.0, 2.0, (3, 4)),
    "normal of mean": lambda: torch.normal(X, 2.0),
    "normal of std": lambda: torch.normal(1.0, X.abs()),
    "normal of both": lambda: torch.normal(X, X.abs()[:1]),
    "native_dropout": lambda: torch.native_dropout(X, 0.3, True),
    "rrelu": lambda: F.rrelu(X, training=True),
    "dropout": lambda: F.dropout(X, 0.5),
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.5, True),
    "primitives dropout": lambda: pr.functional.dropout(X, 0.3),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "attention": lambda: F.scaled_dot_product_attention(*[X.view(1, 1, 4, 6)] * 3, dropout_p=0.3),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_operation_is_a_function_of_the_state(name):
    """Two calls agree bitwise, another seed and the advanced state do not, and results look like torch's own."""
    pure = functionalize_rng(CALLS[name])

    def run(state):
        out, new_state = pure(state)
        return (out if isinstance(out, tuple) else (out,)), new_state

    first, new_state = run(STATE)
    assert all(map(torch.equal, first, run(STATE)[0]))
    assert new_state.offset > STATE.offset
    assert new_state.seed == STATE.seed
    others = [run(new_state)[0], *(run(PhiloxState.from_seed(seed))[0] for seed in (4, -5, 2**40))]
    assert any(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    with torch.random.fork_rng():
        theirs = CALLS[name]()
    for ours, expected in zip(first, theirs if isinstance(theirs, tuple) else (theirs,), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (expected.shape, expected.dtype, expected.stride())


def draw(fn):
    return functionalize_rng(fn)(PhiloxState.from_seed(11))[0].double()


# Draws, and mean and standard deviation of their distribution.
MOMENTS = {
    "uniform": (lambda: torch.rand(MANY), 0.5, 12**-0.5),
    "uniform float64": (lambda: torch.rand(MANY, dtype=torch.float64), 0.5, 12**-0.5),
    "normal": (lambda: torch.empty(MANY).normal_(2, 3), 2.0, 3.0),
    "normal float64": (lambda: torch.randn(MANY, dtype=torch.float64), 0.0, 1.0),
    "normal float16": (lambda: torch.randn(MANY, dtype=torch.float16), 0.0, 1.0),
    "exponential": (lambda: torch.empty(MANY).exponential_(2), 0.5, 0.5),
    "geometric": (lambda: torch.empty(MANY).geometric_(0.25), 4.0, 12**0.5),
    "log normal": (lambda: torch.empty(MANY).log_normal_(0.0, 1.0).log(), 0.0, 1.0),
    "cauchy": (lambda: torch.empty(MANY).cauchy_(1, 2).sub(1).div(2).atan(), 0.0, torch.pi / 12**0.5),
    "integers": (lambda: torch.randint(-2, 3, (MANY,)), 0.0, 2**0.5),
    "wide integers": (lambda: torch.empty(MANY, dtype=torch.int64).random_() / 2**63, 0.5, 12**-0.5),
    "signed integers": (lambda: torch.empty(MANY).random_(-(2**20), 2**20) / 2**20, 0.0, 3**-0.5),
    "bernoulli": (lambda: torch.empty(MANY).bernoulli_(0.2), 0.2, 0.4),
    "dropout": (lambda: torch.native_dropout(torch.ones(MANY), 0.2, True)[0], 1.0, 0.5),
    "complex": (lambda: torch.randn(MANY // 2, dtype=torch.complex64).abs() ** 2, 1.0, 1.0),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), MANY, replacement=True), 1.5, 0.75**0.5,
    ),
    "one of three": (
        lambda: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]).expand(MANY, 3), 1), 1.5, 0.75**0.5,
    ),
    "permutation": (lambda: torch.randperm(MANY)[: MANY // 2] / MANY, 0.5, 12**-0.5),
}  # fmt: skip


@pytest.mark.parametrize("fn, mean, std", MOMENTS.values(), ids=MOMENTS)
def test_distributions_have_the_moments_they_should(fn, mean, std):
    """To within five standard errors; neighbors are uncorrelated to within as many."""
    values = draw(fn).flatten()
    error = 5 / values.numel() ** 0.5
    assert abs(values.mean() - mean) < error * std
    # Distributions with heavy tails: the error of their variance is as large as their fourth moment says.
    standardized = (values - mean) / std
    spread = ((standardized**4).mean() - 1).clamp_min(1).sqrt()
    assert abs(standardized.square().mean() - 1) < error * spread
    assert abs((standardized[1:] * standardized[:-1]).mean()) < error * spread


ERRORS = {
    "aten.poisson": (lambda: torch.poisson(X.abs()), pr.MissingRuleError),
    "_standard_gamma": (lambda: torch._standard_gamma(X.abs()), pr.MissingRuleError),
    "generator": (lambda: torch.rand(3, generator=torch.Generator()), pr.MissingRuleError),
    # Parameters out of range raise as in torch.
    "randint": (lambda: torch.randint(3, 3, (2,)), RuntimeError),
    "uniform": (lambda: empty().uniform_(3, 2), RuntimeError),
    "normal": (lambda: empty().normal_(0, -1), RuntimeError),
    "exponential": (lambda: empty().exponential_(0), RuntimeError),
    "geometric": (lambda: empty().geometric_(0), RuntimeError),
    "bernoulli": (lambda: empty().bernoulli_(2), RuntimeError),
    "cauchy": (lambda: empty().cauchy_(0, 0), RuntimeError),
    "multinomial": (lambda: torch.multinomial(torch.ones(2), 3), RuntimeError),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text):
    function, error = ERRORS[text]
    with pytest.raises(error, match=text):
        functionalize_rng(function)(STATE)
    for state in (3, (torch.tensor(3.0), STATE.offset), (torch.zeros(2, dtype=torch.int64), STATE.offset)):
        with pytest.raises((pr.DtypeError, pr.ShapeError), match="functionalize_rng: state"):
            functionalize_rng(function)(state)


def test_ends_of_ranges_and_what_draws_nothing():
    half = draw(lambda: torch.rand(MANY, dtype=torch.bfloat16))
    assert (half.min(), half.max()) == (0, 1 - 2**-8)
    assert draw(lambda: torch.empty(MANY, dtype=torch.float16).exponential_()).min() > 0
    assert draw(lambda: torch.empty(MANY).geometric_(0.9)).min() == 1
    assert draw(lambda: torch.randint(3, 7, (MANY,))).unique().tolist() == [3, 4, 5, 6]
    rows = draw(lambda: torch.multinomial(torch.ones(50, 4), 4)).sort(-1).values
    assert torch.equal(rows, torch.arange(4.0).double().expand(50, 4))
    flat = X.view(1, 1, 4, 6)
    for quiet in (
        lambda: F.dropout(X, 0.5, False),
        lambda: F.rrelu(X),
        lambda: F.scaled_dot_product_attention(*[flat] * 3),
    ):
        assert functionalize_rng(quiet)(STATE)[1].offset == 0


# Graphs.


def quiet(x):
    h = pr.functional.dropout(torch.tanh(x), 0.3) + torch.rand_like(x)
    return (h * torch.randn(6, dtype=x.dtype)).square().sum()


def noisy(x):
    return (F.dropout(x, 0.5) * torch.rand_like(x)).exp().sum() + quiet(x)


# Inside torch.func.grad, torch's own dropout takes no symbolic sizes.
@pytest.mark.parametrize("fn, tracing_mode", [(noisy, "real"), (quiet, "symbolic")])
def test_graphs_take_the_state_as_inputs_and_hold_nothing_random(fn, tracing_mode):
    def step(state, x):
        return functionalize_rng(torch.func.grad_and_value(fn))(state, x)

    graph = make_fx(step, tracing_mode=tracing_mode)(STATE, X)
    tags = [t for n in graph.graph.nodes for t in getattr(n.target, "tags", ())]
    assert torch.Tag.nondeterministic_seeded not in tags
    shapes = (X, torch.cat([X, X])[:7]) if tracing_mode == "symbolic" else (X,)
    for x in shapes:
        for state in (STATE, PhiloxState.from_seed(-1), functionalize_rng(torch.rand)(STATE, 99)[1]):
            (grad, value), new_state = step(state, x)
            (graph_grad, graph_value), graph_state = graph(state, x)
            assert torch.equal(grad, graph_grad)
            assert torch.equal(value, graph_value)
            assert all(map(torch.equal, new_state, graph_state))


# Transforms.


def sample(state, x):
    """Draws of an element, of a batch inside, and of the package's own dropout."""

    def fn(x):
        inner = torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(x.view(2, 3)).flatten()
        return pr.functional.dropout(x, 0.4) + torch.rand(6).exp() + inner + torch.empty_like(x).normal_()

    return functionalize_rng(fn)(state, x)


@pytest.mark.parametrize("batched", [(True, True), (True, False), (False, True)])
def test_vmap_over_states_equals_the_loop(batched):
    seeds, offsets = torch.tensor([3, -4, 2**50, 9]), torch.tensor([0, 5, 2**34, 1])
    states = PhiloxState(seeds if batched[0] else seeds[0], offsets if batched[1] else offsets[0])
    axes = PhiloxState(*[0 if b else None for b in batched])
    outs, new_states = torch.vmap(sample, in_dims=(axes, 0), randomness="different")(states, X)
    for i, (out, x) in enumerate(zip(outs, X, strict=True)):
        state = PhiloxState(*[value[i] if b else value for value, b in zip(states, batched, strict=True)])
        expected, new_state = sample(state, x)
        assert torch.equal(out, expected)
        assert new_states.offset[i] == new_state.offset


def test_one_state_for_all_samples():
    """With randomness="same", vmap does what a loop does: every sample has the numbers of the state."""

    def alone(state, x):
        return functionalize_rng(lambda x: F.dropout(x, 0.4) + torch.rand(6))(state, x)

    outs, new_state = torch.vmap(alone, in_dims=(None, 0), out_dims=(0, None), randomness="same")(STATE, X)
    for out, x in zip(outs, X, strict=True):
        assert torch.equal(out, alone(STATE, x)[0])
    assert new_state.offset == alone(STATE, X[0])[1].offset
    states = PhiloxState(torch.arange(4), torch.arange(4))
    for randomness in ("same", "error"):
        with pytest.raises(RuntimeError, match='must have randomness="different"'):
            torch.vmap(sample, randomness=randomness)(states, X)
    with pytest.raises(pr.MissingRuleError, match="randperm"):
        torch.vmap(functionalize_rng(lambda: torch.randperm(3)), randomness="different")(states)
