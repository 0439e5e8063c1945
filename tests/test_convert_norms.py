"""Norms that others wrote: `convert` finds out what they compute, and leaves alone what computes something else."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import primitives as pr
from primitives._audit.nestings import InFloat64
from tests.call_properties import CallRecorder
from tests.support import along, normal
from tests.test_convert_others import wrapped

SIZE = 6
LOW = (torch.bfloat16, torch.float16)


class Norm(nn.Module):
    """With a scale, as most are."""

    def __init__(self, size=SIZE, eps=1e-2):
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.5 * normal((size,), 1).float())
        self.variance_epsilon = eps

    def scaled(self, x, axis=-1):
        return x * torch.rsqrt(x.pow(2).mean(axis, keepdim=True) + self.variance_epsilon)


class CastFirst(Norm):
    """As Llama."""

    def forward(self, hidden_states):
        return self.weight * self.scaled(hidden_states.to(torch.float32)).to(hidden_states.dtype)


class OnePlus(Norm):
    """As Gemma."""

    def forward(self, x):
        return (self.scaled(x.float()) * (1.0 + self.weight.float())).type_as(x)


class CastToWeight(Norm):
    """As T5."""

    def forward(self, x):
        x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype in LOW else x)


class Weightless(Norm):
    def __init__(self):
        super().__init__()
        self.weight = None

    def forward(self, x):
        return self.scaled(x.float()).type_as(x)


class OverChannels(Norm):
    """As timm's, with what follows it."""

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act((self.scaled(x.float(), 1) * self.weight.float()[:, None, None]).type_as(x))


class Centered(Norm):
    """Names of its own; the shift is registered before the scale."""

    def __init__(self):
        super().__init__()
        del self.weight, self.variance_epsilon
        self.beta, self.gamma = (nn.Parameter(normal((SIZE,), seed).float()) for seed in (2, 3))
        self.eps, self.eps_of_another = 1e-2, 1e-3

    def forward(self, x):
        centered = x - x.mean(-1, keepdim=True)
        return centered / torch.sqrt(centered.square().mean(-1, keepdim=True) + self.eps) * self.gamma + self.beta


class BiasedLast(nn.LayerNorm):
    """Calls torch's as a function, over the channels of images."""

    def forward(self, x):
        x = nn.functional.layer_norm(x.movedim(1, -1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.movedim(-1, 1)


class BatchNormAct(nn.BatchNorm2d):
    def __init__(self, size, act=nn.SiLU):
        super().__init__(size)
        self.act = act()

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        args = (self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.act(nn.functional.batch_norm(x, *args))


class OlmoNorm(nn.Module):
    """Nothing but its name, its sizes and its call."""

    normalized_shape = (SIZE,)

    def forward(self, x):
        return nn.functional.layer_norm(x.float(), (SIZE,), eps=1e-2).to(x.dtype)


ROWS, IMAGES = (5, 7, SIZE), (5, SIZE, 3, 4)
NORMS = {
    "cast first": (CastFirst, ROWS),
    "one plus": (OnePlus, ROWS),
    "cast to weight": (CastToWeight, ROWS),
    "weightless": (Weightless, ROWS),
    "channels": (OverChannels, IMAGES),
    "centered": (Centered, ROWS),
    "layer norm": (lambda: BiasedLast(SIZE), IMAGES),
    "batch norm": (lambda: BatchNormAct(SIZE), IMAGES),
    "batch norm, ReLU": (lambda: BatchNormAct(SIZE, nn.ReLU), IMAGES),
    "no eps": (OlmoNorm, ROWS),
}
each = pytest.mark.parametrize("name", NORMS)


def made(name):
    make, shape = NORMS[name]
    model = make()
    return model, pr.nn.convert(copy.deepcopy(model)), shape


def run(module, x):
    """Output and gradients, and the operators of this package that ran."""
    x = x.clone().requires_grad_()
    with CallRecorder() as recorder:
        y = module(x)
    return y, torch.autograd.grad(y.double().sin().sum(), [x, *module.parameters()]), recorder.names


@each
def test_a_norm_of_others_computes_by_this_package(name):
    """In float64, with derivatives of the second order; state, copies and the way back are those of any conversion."""
    theirs, ours, shape = made(name)
    x = normal(shape, 4)
    assert list(pr.nn.converted(ours)) == [""]
    assert repr(ours).startswith(f"primitives.{type(theirs).__name__}(")
    assert isinstance(ours, type(theirs))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs, ours = theirs.double(), ours.double()
    with InFloat64():
        expected = run(copy.deepcopy(theirs), x)[:2]
        for module in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            *found, ops = run(module, x)
            assert {"layer_norm", "batch_norm", "batch_norm_relu"} & {*ops}
            assert pr.nn.converted(module)
            assert_close(found, list(expected), rtol=1e-10, atol=1e-10)

    def curvature(module):
        return along(torch.func.grad(lambda x: module(x).pow(3).sum()))(x)

    # Torch counts batches, and differentiates twice, in evaluation alone.
    with InFloat64():
        assert_close(curvature(ours.eval()), curvature(theirs.eval()), rtol=1e-9, atol=1e-9)
    assert type(pr.nn.revert(ours)) is type(theirs)
    assert vars(ours).keys() == vars(theirs).keys()


@each
@pytest.mark.parametrize("parameters", ["as input", "float32"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_it_rounds_as_it_did(name, dtype, parameters, autocast):
    theirs, ours, shape = made(name)
    if parameters == "as input":
        theirs, ours = theirs.to(dtype), ours.to(dtype)
    x = normal((64, *shape[1:]), 5).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        try:
            want = theirs(x)
        except RuntimeError as error:
            with pytest.raises(type(error)):
                ours(x)
            return
        y = ours(x)
    assert y.dtype == want.dtype
    if name not in ("batch norm", "batch norm, ReLU", "layer norm", "no eps"):
        # Sums of another order tip one in thousands.
        near = (y - want).abs() <= (0.0 if y.dtype in LOW else 1e-5)
        assert near.float().mean() > 0.99
    assert_close(y, want, rtol=2e-2, atol=2e-2)


class ByProduct(Norm):
    """Autocast rounds products of matrices."""

    def forward(self, x):
        squares = x.square() @ x.new_full((SIZE, 1), 1 / SIZE)
        return self.weight * (x * torch.rsqrt(squares + self.variance_epsilon))


def test_what_takes_part_in_autocast_does_so_after_it():
    theirs, x = ByProduct(), normal((64, SIZE), 5).float()
    ours = pr.nn.convert(copy.deepcopy(theirs))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(x), theirs(x))
    assert_close(ours(x), theirs(x))


class EpsOutside(Norm):
    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class FixedEps(Norm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2)


class Unbiased(Norm):
    def forward(self, x):
        return (
            self.weight * (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + self.variance_epsilon)
        )


class Detached(Norm):
    """The value of a norm, and other gradients."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).detach()


class InTraining(Norm):
    def forward(self, x):
        return self.weight * self.scaled(x) * (2.0 if self.training else 1.0)


class OverRows(Norm):
    def forward(self, x):
        return self.weight * self.scaled(x, (1, 2) if x.dim() == 3 else -1)


class Gated(Norm):
    def forward(self, x, gate=None):
        return self.weight * self.scaled(x if gate is None else x * gate)


class Halved(Norm):
    def forward(self, x):
        return nn.functional.dropout(self.weight * self.scaled(x), 0.5, self.training)


class Clamped(Norm):
    def forward(self, x):
        return self.weight * self.scaled(x.clamp(-100, 100))


class Counted(Norm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.weight * self.scaled(x)


class Failing(Norm):
    def forward(self, x):
        raise RuntimeError("of its own")


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized():
    module = CastFirst()
    parametrize.register_parametrization(module, "weight", Doubled())
    return module


def with_weight(value):
    module = CastFirst()
    module.weight = nn.Parameter(value, requires_grad=False)
    return module


LEFT = {
    **{cls.__name__: (cls, "no norm") for cls in (EpsOutside, FixedEps, Unbiased, Detached, InTraining, OverRows)},
    "more": (Gated, "more than the input"),
    "clamped": (Clamped, "calls clamp"),
    "counted": (Counted, "writes to its calls"),
    "random": (Halved, "no norm"),
    "failing": (Failing, "no norm"),
    "parametrized": (parametrized, "parametrized"),
    "subclass": (lambda: with_weight(TwoTensor(torch.ones(SIZE), torch.ones(SIZE))), "TwoTensor"),
    "integers": (lambda: with_weight(torch.ones(SIZE, dtype=torch.int8)), "int8"),
    "axes": (lambda: with_weight(torch.ones(2, SIZE)), "more than one axis"),
    "replaced": (lambda: wrapped(CastFirst()), "replaced"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_runs_as_it_is_written(case):
    make, reason = LEFT[case]
    model = nn.Sequential(make())
    with pytest.warns(pr.nn.ConversionWarning, match=reason) as caught:
        pr.nn.convert(model)
    assert [left.path for left in caught[0].message.left] == ["0"]
    assert not pr.nn.converted(model)
    assert parametrize.type_before_parametrizations(pr.nn.revert(model)[0]) is parametrize.type_before_parametrizations(
        make()
    )
    if case not in ("failing", "subclass", "random"):
        x = normal((2, SIZE), 6).float()
        assert torch.equal(model(x), make()(x))


def test_the_check_touches_nothing():
    calls = []

    class Watched(CastFirst):
        instances = 0

        def __init__(self):
            Watched.instances += 1
            super().__init__()

    class Counting(BatchNormAct):
        pass

    model = nn.Sequential(Watched(), Counting(SIZE), nn.Dropout(0.5))
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append("hook"))
        module.register_forward_pre_hook(lambda *args: calls.append("hook"))
    model[0].eval()
    model[0].weight.grad = torch.ones(SIZE)
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu"):
        pr.nn.convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert (calls, Watched.instances) == ([], 1)
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    assert_close(model[0].weight.grad, torch.ones(SIZE))
    assert len(pr.nn.converted(model)) == 2


def test_one_check_for_each_class_and_configuration():
    runs = []

    class Counted(CastFirst):
        def forward(self, hidden_states):
            runs.append(self)
            return super().forward(hidden_states)

    pr.nn.convert(Counted())
    once = len(runs)
    model = pr.nn.convert(nn.Sequential(*[Counted() for _ in range(50)], Counted(eps=1e-3)))
    assert len(runs) == 3 * once
    assert len(pr.nn.converted(model)) == 51
    assert len({type(module) for module in model}) == 1


def test_a_model_without_memory_is_converted():
    model = pr.nn.convert(nn.Sequential(CastFirst(), BatchNormAct(SIZE)).to("meta"))
    assert list(pr.nn.converted(model)) == ["0", "1"]
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}
    model = model.to_empty(device="cpu")
    nn.init.ones_(model[0].weight)
    assert_close(model[0](normal(ROWS, 1).float()), CastFirst.forward(model[0], normal(ROWS, 1).float()))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_converted_norm_is_traced_for_any_batch():
    model, x = pr.nn.convert(CastFirst()), normal(ROWS, 1).float()
    assert_close(torch.jit.trace(model, x)(x[:2]), model(x[:2]))


def test_a_converted_norm_compiles_into_one_graph():
    model, x = pr.nn.convert(nn.Sequential(nn.Linear(SIZE, SIZE), CastFirst()).double()), normal((3, SIZE), 1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(*[torch.autograd.grad(f(x).sin().sum(), model[0].weight) for f in (compiled, model)])
