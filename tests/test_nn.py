"""Modules against those of torch.nn: results, gradients, state, switches, and the transforms that torch's refuse."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close

import primitives as pr

NAMES = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm", "LogSoftmax")
BATCH_NORMS = {"BatchNorm1d": (6, 3), "BatchNorm2d": (4, 3, 2, 5), "BatchNorm3d": (2, 3, 2, 3, 2)}
BATCH_NORM_OPTIONS = (
    {},
    {"momentum": 0.3, "eps": 1e-2},
    {"momentum": None},
    {"momentum": 0.0},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False, "momentum": None},
)
CASES = [
    *[(name, (3,), options, shape) for name, shape in BATCH_NORMS.items() for options in BATCH_NORM_OPTIONS],
    ("BatchNorm1d", (3,), {}, (6, 3, 4)),
    *[
        ("LayerNorm", (norm,), options, (4, 2, 5))
        for norm in (5, (2, 5), [4, 2, 5], torch.Size([5]))
        for options in ({}, {"bias": False}, {"elementwise_affine": False}, {"eps": 0.1})
    ],
    *[("LogSoftmax", (dim,), {}, (4, 2, 5)) for dim in (0, 1, -1)],
]


def data(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pair(name, args, options, dtype=torch.float64):
    """One module of each kind with the same random parameters and buffers."""
    ours, theirs = (getattr(space, name)(*args, **options).to(dtype) for space in (pr.nn, torch.nn))
    with torch.no_grad():
        for i, value in enumerate(theirs.state_dict().values()):
            if value.is_floating_point():
                value.copy_(data(*value.shape, seed=i).abs() + 0.5)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def assert_same_state(ours, theirs, **tolerance):
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        mine = ours.state_dict()[name]
        assert (mine.dtype, mine.shape) == (value.dtype, value.shape)
        assert_close(mine, value, **tolerance)


def ids(case):
    return str(case) if not isinstance(case, dict) else ",".join(f"{k}={v}" for k, v in case.items()) or "default"


@pytest.mark.parametrize("name, args, options, shape", CASES, ids=ids)
def test_steps_and_gradients_are_those_of_torch(name, args, options, shape):
    ours, theirs = pair(name, args, options)
    for step, training in enumerate([True, True, False, True, False]):
        ours.train(training), theirs.train(training)
        x = data(*shape, seed=step)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        results = [module(value) for module, value in zip((ours, theirs), inputs, strict=True)]
        assert_close(*results)
        assert results[0].stride() == results[1].stride()
        for result in results:
            result.sin().sum().backward()
        assert_close(inputs[0].grad, inputs[1].grad)
        for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(mine.grad, their.grad)
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("name, args, options, shape", CASES, ids=ids)
def test_construction_is_that_of_torch(name, args, options, shape):
    ours, theirs = (getattr(space, name)(*args, **options) for space in (pr.nn, torch.nn))
    assert isinstance(ours, getattr(torch.nn, name))
    assert type(ours).__name__ == name
    assert repr(ours) == repr(theirs)
    assert_same_state(ours, theirs, rtol=0, atol=0)
    assert [n for n, p in ours.named_parameters() if p.requires_grad] == [n for n, _ in theirs.named_parameters()]
    assert vars(ours).keys() == vars(theirs).keys()


def test_names():
    assert sorted(pr.nn.__all__) == sorted([*NAMES, "Dropout", "convert", "revert"])


def test_factory_arguments_reach_the_parameters():
    for module in (pr.nn.LayerNorm(3, dtype=torch.bfloat16), pr.nn.BatchNorm2d(3, device="meta", dtype=torch.float64)):
        reference = getattr(torch.nn, type(module).__name__)(3, device=module.weight.device, dtype=module.weight.dtype)
        assert [(p.dtype, p.device) for p in module.parameters()] == [
            (p.dtype, p.device) for p in reference.parameters()
        ]


@pytest.mark.parametrize("name, args, options, shape", CASES, ids=ids)
def test_state_dict_goes_both_ways(name, args, options, shape):
    ours, _theirs = pair(name, args, options)
    x = data(*shape)
    ours(x)
    fresh = getattr(torch.nn, name)(*args, **options).double()
    assert str(fresh.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"
    assert_same_state(ours, fresh, rtol=0, atol=0)
    again = getattr(pr.nn, name)(*args, **options).double()
    again.load_state_dict(fresh.state_dict())
    assert torch.equal(again.eval()(x), ours.eval()(x))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("name", NAMES)
def test_copies_are_independent(name, duplicate):
    args = (1,) if name == "LogSoftmax" else (3,)
    ours, _ = pair(name, args, {})
    twin = duplicate(ours)
    assert type(twin) is type(ours)
    assert_same_state(twin, ours, rtol=0, atol=0)
    before = copy.deepcopy(ours.state_dict())
    x = data(*BATCH_NORMS.get(name, (4, 3)))
    assert torch.equal(twin(x), copy.deepcopy(ours)(x))
    for key, value in ours.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    "name, layout", [("BatchNorm2d", torch.channels_last), ("BatchNorm3d", torch.channels_last_3d)]
)
@pytest.mark.parametrize("training", [True, False])
def test_channels_last_is_kept(name, layout, training):
    ours, theirs = (module.train(training) for module in pair(name, (3,), {}))
    x = data(*BATCH_NORMS[name]).to(memory_format=layout).requires_grad_()
    y = ours(x)
    assert y.is_contiguous(memory_format=layout)
    assert_close(y, theirs(x))
    y.square().sum().backward()
    assert x.grad.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["BatchNorm2d", "LayerNorm"])
def test_low_precision_input_with_float32_parameters(name, dtype):
    ours, theirs = pair(name, (3,) if name == "BatchNorm2d" else (5,), {}, torch.float32)
    x = data(4, 3, 2, 5, dtype=dtype)
    mine, their = ours(x), theirs(x)
    assert mine.dtype == their.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert_close(mine, their, rtol=eps, atol=eps)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("name", [*BATCH_NORMS, "LayerNorm"])
def test_a_tree_goes_through_the_stateless_modules_only(name):
    if name == "LayerNorm":
        module, x = pr.nn.LayerNorm(3).double(), data(4, 3)
        out = module({"a": x, "b": [x, None]})
        assert torch.equal(out["b"][0], module(x))
        assert out["b"][1] is None
    else:
        with pytest.raises(AttributeError, match="'list' object has no attribute 'dim'"):
            getattr(pr.nn, name)(3).double()([data(*BATCH_NORMS[name])])


# Transforms with running statistics, in training.


def expected_step(name, x, momentum):
    theirs = getattr(torch.nn, name)(3, momentum=momentum).double()
    y = theirs(x)
    return theirs, y


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", BATCH_NORMS)
def test_func_grad_updates_the_buffers_once(name, momentum):
    ours, x = getattr(pr.nn, name)(3, momentum=momentum).double(), data(*BATCH_NORMS[name])
    parameters = {key: p.detach() for key, p in ours.named_parameters()}

    def loss(parameters, x):
        return functional_call(ours, parameters, (x,)).sin().sum()

    gradients, x_bar = grad(loss, argnums=(0, 1))(parameters, x)
    theirs, y = expected_step(name, x.requires_grad_(), momentum)
    expected = torch.autograd.grad(y.sin().sum(), (*theirs.parameters(), x))
    assert_close((gradients["weight"], gradients["bias"], x_bar), expected)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_buffers_handed_to_functional_call_are_the_ones_that_move(name):
    ours, x = getattr(pr.nn, name)(3).double(), data(*BATCH_NORMS[name])
    handed = {key: value.clone() for key, value in ours.state_dict().items()}
    untouched = {key: value.clone() for key, value in ours.state_dict().items()}

    def loss(x):
        return functional_call(ours, handed, (x,)).sin().sum()

    grad(loss)(x)
    theirs, _ = expected_step(name, x, 0.1)
    for key, value in theirs.state_dict().items():
        assert_close(handed[key], value)
        assert torch.equal(ours.state_dict()[key], untouched[key])


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_jvp_in_training(name):
    ours, x, x_dot = getattr(pr.nn, name)(3).double(), data(*BATCH_NORMS[name]), data(*BATCH_NORMS[name], seed=1)
    y, y_dot = jvp(ours, (x,), (x_dot,))
    theirs, expected = expected_step(name, x, 0.1)
    assert_close(y, expected)
    assert_same_state(ours, theirs)
    step = 1e-5
    plus, minus = (expected_step(name, x + sign * step * x_dot, 0.1)[1] for sign in (1, -1))
    assert_close(y_dot, (plus - minus) / (2 * step), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_vmap_over_models_updates_each_ones_buffers(name):
    ours, x = getattr(pr.nn, name)(3).double(), torch.stack([data(*BATCH_NORMS[name], seed=i) for i in range(4)])
    state = {key: torch.stack([value + i for i in range(4)]) for key, value in ours.state_dict().items()}
    initial = {key: value.clone() for key, value in state.items()}
    y = vmap(lambda state, x: functional_call(ours, state, (x,)))(state, x)
    for i in range(4):
        theirs = getattr(torch.nn, name)(3).double()
        theirs.load_state_dict({key: value[i] for key, value in initial.items()})
        assert_close(y[i], theirs(x[i]))
        for key, value in theirs.state_dict().items():
            assert_close(state[key][i], value)


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_vmap_with_shared_running_statistics_raises_and_writes_nothing(name):
    ours, x = getattr(pr.nn, name)(3).double(), torch.stack([data(*BATCH_NORMS[name], seed=i) for i in range(2)])
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(RuntimeError, match=r"^vmap: .*no batch axis\. Use the pure form"):
        vmap(ours)(x)
    for key, value in ours.state_dict().items():
        assert torch.equal(value, before[key])
    assert_close(vmap(ours.eval())(x), torch.stack([ours(sample) for sample in x]))


def test_vmap_without_tracking_works():
    ours, x = pr.nn.BatchNorm2d(3, track_running_stats=False).double(), data(5, 4, 3, 2, 2)
    assert_close(vmap(ours)(x), torch.stack([ours(sample) for sample in x]))


@pytest.mark.parametrize("name", ["BatchNorm1d", "LayerNorm", "LogSoftmax"])
def test_compiled_training_step(name):
    args, shape = ((-1,), (4, 5)) if name == "LogSoftmax" else ((3,), BATCH_NORMS.get(name, (4, 3)))
    ours, theirs = pair(name, args, {})
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for step in range(3):
        inputs = [data(*shape, seed=step).requires_grad_() for _ in range(2)]
        results = [module(x) for module, x in zip((compiled, theirs), inputs, strict=True)]
        assert_close(*results)
        for result in results:
            result.sin().sum().backward()
        assert_close(inputs[0].grad, inputs[1].grad)
        for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(mine.grad, their.grad)
    assert_same_state(ours, theirs)


def test_a_model_trains_like_that_of_torch():
    def model(space):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), space.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(1),
            space.LayerNorm(64), torch.nn.Linear(64, 3), space.LogSoftmax(1),
        ).double()  # fmt: skip

    losses = []
    for space in (pr.nn, torch.nn):
        net = model(space)
        optimizer, curve = torch.optim.Adam(net.parameters(), 1e-2), []
        for step in range(5):
            loss = torch.nn.functional.nll_loss(net(data(8, 1, 6, 6, seed=step)), torch.arange(8) % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.detach())
        losses.append(torch.stack(curve))
    assert_close(*losses, rtol=1e-10, atol=1e-10)
