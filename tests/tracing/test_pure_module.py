"""pure_module: truth is the module itself; checkpoints inside, and its errors."""

import copy
import re

import optree
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import primitives as pr
from primitives._core.errors import LeafError
from primitives.func import grad, vmap
from primitives.tracing import pure_module
from tests.support import data

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def snapshot(model):
    """Everything that a call may not change: the objects that are registered, other attributes, and the values."""
    objects = {
        (name, part): dict(vars(module)[part] if part else vars(module))
        for name, module in model.named_modules(remove_duplicate=False)
        for part in ("", "_parameters", "_buffers")
    }
    return objects, {name: value.clone() for name, value in model.state_dict().items()}


def assert_untouched(model, before):
    after = snapshot(model)
    assert list(after[0]) == list(before[0])
    for place, held in after[0].items():
        assert list(held) == list(before[0][place]), place
        assert all(held[key] is value for key, value in before[0][place].items()), place
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)


def assert_buffers(buffers, model):
    assert list(buffers) == list(dict(model.named_buffers()))
    torch.testing.assert_close(buffers, dict(model.named_buffers()), **CLOSE)


X, IMAGES = data(4, 3), data(2, 3, 4, 4, seed=1)


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
        vars(self).pop("gone", None)
        if fail:
            raise ZeroDivisionError
        return x * self.weight + self.constant


CASES = {
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), IMAGES),
    "SyncBatchNorm momentum None": (lambda: nn.SyncBatchNorm(3, momentum=None), IMAGES),
    "BatchNorm2d in evaluation": (lambda: nn.BatchNorm2d(3).eval(), IMAGES),
    "LSTM": (lambda: nn.LSTM(3, 4), X),
    "MultiheadAttention": (lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0), X),
    "spectral_norm by hook": (lambda: nn.utils.spectral_norm(nn.Linear(3, 4)), X),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), X),
    "GraphModule": (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), X),
    "shared and tied": (Shared, X),
    "written in every way": (Writer, X),
}


@pytest.mark.parametrize("make, x", CASES.values(), ids=CASES)
def test_two_calls_equal_two_calls_of_the_module(make, x):
    """Outputs, buffers and gradients."""
    torch.manual_seed(0)
    model = make().double()
    pure, before = pure_module(model), snapshot(model)
    params, buffers = pure.init()
    given = copy.deepcopy((params, buffers))
    for p in params.values():
        p.requires_grad_()
    reference, state = copy.deepcopy(model), buffers
    for _ in range(2):
        output, state = pure(params, state, x)
        results = (output, params.values()), (reference(x), reference.parameters())
        derived = [torch.autograd.grad(optree.tree_leaves(y)[0].sin().sum(), list(p)) for y, p in results]
        torch.testing.assert_close(output, results[1][0], **CLOSE)
        torch.testing.assert_close(*derived, rtol=1e-9, atol=1e-9)
        assert_buffers(state, reference)
    assert_untouched(model, before)
    torch.testing.assert_close((params, buffers), given, rtol=0, atol=0)


def test_a_call_that_raises():
    model = Writer().double()
    pure, before = pure_module(model), snapshot(model)
    params, buffers = pure.init()
    given = copy.deepcopy(buffers)
    with pytest.raises(ZeroDivisionError):
        pure(params, buffers, X, fail=True)
    assert_untouched(model, before)
    torch.testing.assert_close(buffers, given, rtol=0, atol=0)
    assert torch.overrides._get_current_function_mode() is None
    assert pure(params, {**buffers, "absent": None}, X)[1]["absent"] == X.sum()


def test_strict_false_takes_the_rest_from_the_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    pure = pure_module(model, strict=False)
    # A bias would be rounded by the batch norm.
    zeros = {"0.weight": torch.zeros(3, 3).double(), "0.bias": torch.zeros(3).double()}
    output, buffers = pure({**zeros, "unknown": X}, {}, X)
    assert torch.equal(output, torch.zeros_like(X))
    assert list(buffers) == list(dict(model.named_buffers()))
    assert buffers["1.num_batches_tracked"] == 1
    assert model[1].num_batches_tracked == 0
    params, buffers = pure.init()
    half = ({name: value.bfloat16() for name, value in params.items()}, buffers)
    with pytest.raises(pr.DtypeError):
        pure_module(model)(*half, X)
    first = {name[2:]: value.float() for name, value in params.items() if name.startswith("0.")}
    assert pure_module(model[0], strict=False)(first, {}, X.float())[0].dtype == torch.float32


def test_tied_names():
    model = Shared().double()
    pure = pure_module(model)
    params, buffers = pure.init()
    weight = params.pop("encode.weight") * 2 + 1
    assert "decode.weight" not in params
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference.encode.weight.copy_(weight)
    expected = reference(X), dict(reference.named_buffers())
    for names in (["encode.weight"], ["decode.weight"], ["decode.weight", "encode.weight"]):
        torch.testing.assert_close(pure({**params, **dict.fromkeys(names, weight)}, buffers, X), expected)
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
    pure = pure_module(Parting())
    assert pure(*pure.init())[1] == {"first": 1, "second": 0}


def linear():
    pure = pure_module(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    return pure, *pure.init()


PURE, PARAMS, BUFFERS = linear()


class Acting(nn.Linear):
    """Does something to its weight first."""

    def __init__(self, act):
        super().__init__(3, 3)
        self._act = act

    def forward(self, input):
        with torch.no_grad():
            self._act(self.weight)
        return super().forward(input)


class Reentrant(nn.Linear):
    def forward(self, input):
        return checkpoint(super().forward, input.requires_grad_(), use_reentrant=True)


class Streaming(nn.Linear):
    def forward(self, input):
        yield super().forward(input)


def call(module, *args, transform=lambda f: f):
    pure, before = pure_module(module), snapshot(module)
    params, buffers = pure.init()
    try:
        transform(lambda params: pure(params, buffers, *args)[0].sum())(
            {name: p.requires_grad_() for name, p in params.items()}
        )
    finally:
        assert_untouched(module, before)


def stacked(f):
    return lambda params: vmap(f)({name: torch.stack([p, p]) for name, p in params.items()})


WRITTEN = pr.MutationError, "writes its parameter 'weight' in place"
ERRORS = {
    "no module": (lambda: pure_module(3), TypeError, "got int"),
    "parallel": (lambda: pure_module(nn.DataParallel(nn.Linear(1, 1))), TypeError, "got DataParallel"),
    "no dict": (lambda: PURE([], BUFFERS, X), pr.TreeError, "params must be a dict"),
    "nested": (lambda: PURE({**PARAMS, "0.weight": {}}, BUFFERS, X), LeafError, "params['0.weight']"),
    "kind": (lambda: PURE({**PARAMS, **BUFFERS}, BUFFERS, X), pr.TreeError, "Unexpected in params: '1.running_mean'"),
    "missing": (lambda: PURE(PARAMS, {}, X), pr.TreeError, "Missing in buffers: '1.running_mean'"),
    "shape": (lambda: PURE({**PARAMS, "0.weight": torch.ones(2)}, BUFFERS, X), pr.ShapeError, "params['0.weight']"),
    "dtype": (
        lambda: PURE(PARAMS, {**BUFFERS, "1.running_var": torch.ones(3).double()}, X), pr.DtypeError,
        "buffers['1.running_var']",
    ),
    "max_norm": (lambda: call(nn.Embedding(3, 2, max_norm=0.1), torch.tensor([0])), *WRITTEN),
    "written": (lambda: call(Acting(lambda w: w.detach().add_(1)), torch.ones(3)), *WRITTEN),
    "written in grad": (lambda: call(Acting(lambda w: w.add_(1)), torch.ones(3), transform=grad), *WRITTEN),
    "written in vmap": (
        lambda: call(Acting(lambda w: w.view(-1)[1:].fill_(5)), torch.ones(2, 3), transform=stacked), *WRITTEN,
    ),
    "reentrant": (lambda: call(Reentrant(3, 3).double(), X.clone()), RuntimeError, "use_reentrant=False"),
    "generator": (lambda: call(Streaming(3, 3).double(), X), LeafError, "got generator"),
}  # fmt: skip


@pytest.mark.parametrize("action, error, message", ERRORS.values(), ids=ERRORS)
def test_errors(action, error, message):
    with pytest.raises(error, match=re.escape(message)) as info:
        action()
    assert str(info.value).startswith("pure_module: ")


def test_a_region_sees_attributes_and_buffers_of_its_beginning():
    class Scaled(nn.Module):
        def __init__(self, write):
            super().__init__()
            self.weight, self.factor, self._write = nn.Parameter(torch.ones(3).double()), 1.0, write
            self.register_buffer("mask", torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            self.factor = 3.0
            y = checkpoint(lambda x: (x * self.mask * self.factor * self.weight).sin(), x, use_reentrant=False)
            self.factor = 5.0
            self._write(self)
            return y

    x, weight = data(3).requires_grad_(), {"weight": data(3, seed=1)}
    for write in (
        lambda m: m.mask.zero_(),
        lambda m: m.__setattr__("mask", torch.zeros(3)),
        lambda m: m.mask[:2].zero_(),
    ):
        model = Scaled(write)
        pure, before = pure_module(model), snapshot(model)
        (x_bar,) = torch.autograd.grad(pure(weight, pure.init()[1], x)[0].sum(), x)
        torch.testing.assert_close(x_bar, (3 * x * weight["weight"]).cos() * 3 * weight["weight"])
        assert_untouched(model, before)
