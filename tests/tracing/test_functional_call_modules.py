"""functional_call on modules with buffers, ties, hooks and attributes of every kind, and what it refuses."""

import copy
import re

import pytest
import torch
from pure_modules import CLOSE, assert_buffers, assert_untouched, data, snapshot
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import primitives as pr
from primitives.core.errors import LeafError
from primitives.tracing import functional_call

X, IMAGES = data(0, 4, 3), data(1, 2, 3, 4, 4)


class Shared(nn.Module):
    """One batch norm under two names, called twice, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(3, momentum=None)
        self.encode, self.decode = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.second(self.decode(self.first(self.encode(x))))


class Writer(nn.Module):
    """Buffers written in every way, and attributes that come and go."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        for name in ("in_place", "unseen", "assigned", "constant"):
            self.register_buffer(name, torch.zeros(3))
        self.register_buffer("transient", torch.zeros(3), persistent=False)
        self.register_buffer("absent", None)
        self.calls, self.gone = 0, "here"

    def forward(self, x, fail=False):
        self.in_place.mul_(0.9).add_(x.detach().mean(0))
        self.unseen.data.add_(1)
        self.transient += 2
        self.assigned = self.assigned + x.detach().sum(0)
        self.absent = x.detach().sum() if self.absent is None else self.absent + 1
        self.calls += 1
        self.last = x
        del self.gone
        if fail:
            raise ZeroDivisionError
        return x * self.weight + self.constant


CASES = {
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), IMAGES),
    "SyncBatchNorm momentum None": (lambda: nn.SyncBatchNorm(3, momentum=None), IMAGES),
    "BatchNorm2d momentum None": (lambda: nn.BatchNorm2d(3, momentum=None), IMAGES),
    "BatchNorm2d of primitives": (lambda: pr.nn.BatchNorm2d(3), IMAGES),
    "BatchNorm2d in evaluation": (lambda: nn.BatchNorm2d(3).eval(), IMAGES),
    "LSTM": (lambda: nn.LSTM(3, 4), X),
    "MultiheadAttention": (lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0), X),
    "spectral_norm by hook": (lambda: nn.utils.spectral_norm(nn.Linear(3, 4)), X),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), X),
    "GraphModule": (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), X),
    "shared and tied": (Shared, X),
}


@pytest.mark.parametrize("case", CASES)
def test_two_calls_equal_two_calls_of_the_module(case):
    make, x = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    pure, before = functional_call(model), snapshot(model)
    params, buffers = pure.init()
    given = copy.deepcopy((params, buffers))
    reference, state = copy.deepcopy(model), buffers
    for _ in range(2):
        output, state = pure(params, state, x)
        torch.testing.assert_close(output, reference(x), **CLOSE)
        assert_buffers(state, reference)
    assert_untouched(model, before)
    torch.testing.assert_close((params, buffers), given, rtol=0, atol=0)


def test_buffers_written_in_every_way():
    model = Writer().double()
    before = snapshot(model)
    pure = functional_call(model)
    params, buffers = pure.init()
    given = {name: value.clone() for name, value in buffers.items()}
    output, once = pure(params, buffers, X)
    assert torch.equal(output, X)
    assert list(once) == ["in_place", "unseen", "assigned", "constant", "transient", "absent"]
    assert torch.equal(once["in_place"], X.mean(0))
    assert torch.equal(once["assigned"], X.sum(0))
    assert [once[name].tolist() for name in ("unseen", "constant", "transient")] == [[1] * 3, [0] * 3, [2] * 3]
    _, twice = pure(params, once, X)
    assert twice["absent"] == X.sum() + 1
    assert pure(params, {**once, "absent": None}, X)[1]["absent"] == X.sum()
    assert torch.equal(twice["in_place"], 0.9 * X.mean(0) + X.mean(0))
    assert_untouched(model, before)
    with pytest.raises(ZeroDivisionError):
        pure(params, buffers, X, fail=True)
    assert_untouched(model, before)
    assert all(torch.equal(buffers[name], value) for name, value in given.items())
    assert torch.overrides._get_current_function_mode() is None


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x, in_place):
        self.mean = self.mean.add_(x.mean()) if in_place else self.mean + x.mean()
        return x - self.mean


def test_shared_buffers_under_vmap():
    pure, stacked = functional_call(Mean()), {"mean": torch.zeros(4, dtype=torch.float64)}
    params, buffers = pure.init()
    for given, axis, in_place in ((buffers, None, False), (stacked, 0, True)):
        new_buffers = pr.func.vmap(pure, in_dims=(None, axis, 0, None))(params, given, X, in_place)[1]
        torch.testing.assert_close(new_buffers, {"mean": X.mean(1)})
    with pytest.raises(RuntimeError, match="broadcast shape"):
        pr.func.vmap(pure, in_dims=(None, None, 0, None))(params, buffers, X, True)
    assert buffers["mean"] == 0


def test_strict_false_takes_the_rest_from_the_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    pure = functional_call(model, strict=False)
    output, buffers = pure({"0.weight": torch.zeros(3, 3).double(), "unknown": X}, {}, X)
    assert torch.equal(output, torch.zeros_like(X))
    assert list(buffers) == list(dict(model.named_buffers()))
    assert buffers["1.num_batches_tracked"] == 1
    assert model[1].num_batches_tracked == 0
    params, buffers = pure.init()
    half = ({name: value.bfloat16() for name, value in params.items()}, buffers)
    with pytest.raises(pr.DtypeError):
        functional_call(model)(*half, X)
    first = {name[2:]: value.float() for name, value in params.items() if name.startswith("0.")}
    assert functional_call(model[0], strict=False)(first, {}, X.float())[0].dtype == torch.float32


def test_tied_names():
    model = Shared().double()
    pure = functional_call(model)
    params, buffers = pure.init()
    weight = params.pop("encode.weight") * 2 + 1
    assert "decode.weight" not in params
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference.encode.weight.copy_(weight)
    expected = reference(X), dict(reference.named_buffers())
    torch.testing.assert_close(pure({**params, "encode.weight": weight}, buffers, X), expected)
    torch.testing.assert_close(pure({**params, "decode.weight": weight}, buffers, X), expected)
    torch.testing.assert_close(pure({**params, "decode.weight": weight, "encode.weight": weight}, buffers, X), expected)
    both = {**params, "decode.weight": weight, "encode.weight": weight + 1}
    with pytest.raises(pr.TreeError, match=re.escape("params['decode.weight'] is tied to others")):
        pure(both, buffers, X)
    renamed = {name.replace("first", "second"): value for name, value in buffers.items()}
    new_buffers = pure({**params, "encode.weight": weight}, renamed, X)[1]
    assert new_buffers.keys() == renamed.keys()
    assert new_buffers["second.num_batches_tracked"] == 2


class Parting(nn.Module):
    """One buffer in two places, of which a call changes one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(()))
        self.register_buffer("second", self.first)

    def forward(self):
        self.first = self.first + 1


def test_a_tie_that_a_call_breaks():
    pure = functional_call(Parting())
    assert pure(*pure.init())[1] == {"first": 1, "second": 0}


def linear():
    pure = functional_call(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    return pure, *pure.init()


PURE, PARAMS, BUFFERS = linear()


class Reentrant(nn.Linear):
    def forward(self, input):
        return checkpoint(super().forward, input.requires_grad_(), use_reentrant=True)


class Streaming(nn.Linear):
    def forward(self, input):
        yield super().forward(input)


def call(module, *args):
    pure = functional_call(module)
    params, buffers = pure.init()
    return pure({name: p.requires_grad_() for name, p in params.items()}, buffers, *args)


ERRORS = {
    "no module": (lambda: functional_call(3), TypeError, "got int"),
    "parallel": (lambda: functional_call(nn.DataParallel(nn.Linear(1, 1))), TypeError, "got DataParallel"),
    "no dict": (lambda: PURE([], BUFFERS, X), pr.TreeError, "params must be a dict"),
    "nested": (lambda: PURE({**PARAMS, "0.weight": {}}, BUFFERS, X), LeafError, "params['0.weight']"),
    "kind": (lambda: PURE({**PARAMS, **BUFFERS}, BUFFERS, X), pr.TreeError, "Unexpected in params: '1.running_mean'"),
    "missing": (lambda: PURE(PARAMS, {}, X), pr.TreeError, "Missing in buffers: '1.running_mean'"),
    "shape": (lambda: PURE({**PARAMS, "0.weight": torch.ones(2)}, BUFFERS, X), pr.ShapeError, "params['0.weight']"),
    "dtype": (
        lambda: PURE(PARAMS, {**BUFFERS, "1.running_var": torch.ones(3).double()}, X), pr.DtypeError,
        "buffers['1.running_var']",
    ),
    "max_norm": (
        lambda: call(nn.Embedding(3, 2, max_norm=0.1), torch.tensor([0])), pr.MutationError, "parameter 'weight'",
    ),
    "reentrant": (lambda: call(Reentrant(3, 3).double(), X.clone()), RuntimeError, "use_reentrant=False"),
    "generator": (lambda: call(Streaming(3, 3).double(), X), LeafError, "got generator"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    action, error, message = ERRORS[case]
    with pytest.raises(error, match=re.escape(message)) as info:
        action()
    assert str(info.value).startswith("functional_call: ")


def test_the_other_form():
    model = nn.Linear(3, 3).double()
    params, _ = functional_call(model).init()
    assert torch.equal(functional_call(model, params, X), model(X))


class Acting(nn.Linear):
    """Does something to its weight first."""

    def __init__(self, act):
        super().__init__(3, 3)
        self._act = act

    def forward(self, x):
        with torch.no_grad():
            self._act(self.weight)
        return super().forward(x)


WRITES = {
    "itself": lambda weight: weight.add_(1),
    "detach": lambda weight: weight.detach().add_(1),
    "view": lambda weight: weight.view(-1)[1:].fill_(5),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_parameter_that_is_written(name):
    module, x = Acting(WRITES[name]), torch.ones(3)
    pure, before = functional_call(module), snapshot(module)
    params, buffers = pure.init()
    stacked = {name: torch.stack([value, value]) for name, value in params.items()}
    for run in (
        lambda: pure(params, buffers, x),
        lambda: pr.func.grad(lambda params: pure(params, buffers, x)[0].sum())(params),
        lambda: pr.func.vmap(pure, in_dims=(0, None, None))(stacked, buffers, x),
    ):
        with pytest.raises(pr.MutationError, match="writes its parameter 'weight' in place"):
            run()
    assert_untouched(module, before)
