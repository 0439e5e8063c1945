"""functional_call on a small convolutional net: truth is the module itself, in loops, and a net written by hand."""

import copy

import pytest
import torch
from pure_modules import CLOSE, assert_buffers, assert_untouched, data, snapshot
from torch import nn

import primitives as pr
from primitives.func import functional_call, grad, hessian, jacrev, jvp, vmap

KINDS, MOMENTA = ("torch", "primitives"), (0.1, None)


def net(kind="torch", momentum=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, momentum=momentum), nn.Tanh(),
        nn.Conv2d(2, 2, 2), nn.BatchNorm2d(2, momentum=momentum), nn.Flatten(), nn.Linear(8, 3),
    ).double()  # fmt: skip
    if kind == "primitives":
        pr.nn.convert(model)
    return model


X, Y = data(1, 4, 1, 5, 5), torch.tensor([0, 2, 1, 2])


def with_state(model, params, buffers):
    copied = copy.deepcopy(model)
    copied.load_state_dict({**params, **buffers})
    return copied


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("kind", KINDS)
def test_two_training_steps_equal_those_of_the_module_bitwise(kind, momentum):
    model, rate, decay = net(kind, momentum), 0.1, 0.9
    pure = functional_call(model)
    params, buffers = pure.init()
    velocity = {name: torch.zeros_like(value) for name, value in params.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=decay)

    def loss(params, buffers, x):
        output, buffers = pure(params, buffers, x)
        return nn.functional.cross_entropy(output, Y), buffers

    for seed in range(2):
        x = data(seed, 4, 1, 5, 5)
        gradient, buffers = grad(loss, has_aux=True)(params, buffers, x)
        for name, p in params.items():
            velocity[name] = gradient[name] if seed == 0 else velocity[name] * decay + gradient[name]
            params[name] = torch.add(p, velocity[name], alpha=-rate)
        optimizer.zero_grad()
        # A torch module takes the same primitives then; a converted one takes them by itself.
        with pr.override_torch():
            output = model(x)
        nn.functional.cross_entropy(output, Y).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(params[name], p), name
    assert_buffers(buffers, model, exact=True)


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_models(kind, momentum):
    model = net(kind, momentum)
    states = []
    for shift in range(3):
        params, buffers = functional_call(model).init()
        # Each model has seen another number of batches.
        states.append(({n: p + 0.1 * shift for n, p in params.items()}, {n: b + shift for n, b in buffers.items()}))
    params, buffers = ({n: torch.stack([s[i][n] for s in states]) for n in states[0][i]} for i in range(2))
    outputs, new_buffers = vmap(functional_call(model), in_dims=(0, 0, None))(params, buffers, X)
    for i, state in enumerate(states):
        one = with_state(net("torch", momentum), *state)
        torch.testing.assert_close(outputs[i], one(X), **CLOSE)
        assert_buffers({name: value[i] for name, value in new_buffers.items()}, one)


def losses(output):
    return nn.functional.cross_entropy(output, Y, reduction="none")


def by_hand(params, x):
    """The net in training, of operations whose derivatives torch has right at every order."""

    def norm(x, weight, bias):
        centered = x - x.mean((0, 2, 3), keepdim=True)
        scaled = centered / (centered.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
        return scaled * weight[:, None, None] + bias[:, None, None]

    x = norm(nn.functional.conv2d(x, params["0.weight"], params["0.bias"]), params["1.weight"], params["1.bias"]).tanh()
    x = norm(nn.functional.conv2d(x, params["3.weight"], params["3.bias"]), params["4.weight"], params["4.bias"])
    return nn.functional.linear(x.flatten(1), params["6.weight"], params["6.bias"])


def moved(transform):
    return lambda run, p: transform(
        lambda p: run(p, X), (p,), ({name: data(i, *x.shape) for i, (name, x) in enumerate(p.items())},)
    )[1]


def of_norms(run, params):
    some = {name: params[name] for name in ("1.weight", "3.bias", "4.weight")}
    return hessian(lambda some: losses(run({**params, **some}, X)).mean())(some)


TRANSFORMS = {
    "gradients per sample": lambda run, p: vmap(grad(lambda p, x: run(p, x[None]).square().sum()), in_dims=(None, 0))(
        p, X
    ),
    "gradients of losses": lambda run, p: jacrev(lambda p: losses(run(p, X)))(p),
    "jvp": moved(jvp),
    "hessian": of_norms,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_in_training(kind, name):
    pure = functional_call(net(kind))
    params, buffers = pure.init()
    found = TRANSFORMS[name](lambda p, x: pure(p, buffers, x)[0], params)
    torch.testing.assert_close(found, TRANSFORMS[name](by_hand, params), rtol=1e-9, atol=1e-9)


def test_compiled_training_step():
    # As little as a compiler needs to see.
    model = net("torch", momentum=None)[:2].append(nn.Flatten()).append(nn.Linear(18, 3).double())
    pure, before = functional_call(model), snapshot(model)
    params, buffers = pure.init()

    def loss(params, buffers, x):
        output, buffers = pure(params, buffers, x)
        return losses(output).mean(), buffers

    step = torch.func.grad(loss, has_aux=True)
    expected, compiled = buffers, torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = data(seed, 4, 1, 5, 5)
        gradient, buffers = compiled(params, buffers, x)
        expected_gradient, expected = step(params, expected, x)
        torch.testing.assert_close((gradient, buffers), (expected_gradient, expected), **CLOSE)
    assert buffers["1.num_batches_tracked"] == 2
    assert_untouched(model, before)
