"""override_torch: what it serves equals torch's at first order and is right beyond; what it does not is torch's."""

import threading
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import primitives as pr
from primitives.core.overrides import overrides
from tests.support import TORCH_ERRORS


def data(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, IMAGES, W, B = data(0, 4, 3), data(1, 2, 3, 2, 2), data(2, 3).exp(), data(3, 3)
TARGET = torch.tensor([0, 2, -100, 1])


class Seen(TorchDispatchMode):
    """The operators of this package that run."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "primitives":
            self.ops.add(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def run(call, *args, override=True):
    """What a call returns, and the operators of this package that it ran."""
    with Seen() as seen:
        if override:
            with pr.override_torch():
                result = call(*args)
        else:
            result = call(*args)
    return result, seen.ops


def running():
    return data(5, 3), data(6, 3).exp()


def flat(outputs):
    """Outputs in one; torch has no derivatives of the statistics among them."""
    return torch.cat([outputs[0].flatten(), *[o.detach().flatten() for o in outputs[1:]]])


SERVED = {
    "F.layer_norm": (lambda x: F.layer_norm(x, (3,), W, B, 1e-3), X, "layer_norm"),
    "torch.layer_norm": (lambda x: torch.layer_norm(x, (3,), W, eps=1e-3), X, "layer_norm"),
    "torch.layer_norm cudnn": (lambda x: torch.layer_norm(x, (3,), W, B, 1e-3, False), X, "layer_norm"),
    "nn.LayerNorm": (lambda x: nn.LayerNorm(3, dtype=x.dtype)(x), X, "layer_norm"),
    "F.batch_norm": (lambda x: F.batch_norm(x, *running(), W, B, True), X, "batch_norm"),
    "F.batch_norm without statistics": (lambda x: F.batch_norm(x, None, None, training=True), IMAGES, "batch_norm"),
    "F.batch_norm evaluation": (lambda x: F.batch_norm(x, *running(), W, B), X, "batch_norm_eval"),
    "torch.batch_norm": (
        lambda x: torch.batch_norm(x, W, B, *running(), True, 0.1, 1e-5, True), IMAGES, "batch_norm",
    ),
    "F.instance_norm": (lambda x: F.instance_norm(x, weight=W, bias=B, eps=1e-3), IMAGES, "batch_norm"),
    "F.instance_norm evaluation": (
        lambda x: F.instance_norm(x, *running(), W, use_input_stats=False), IMAGES, "batch_norm_eval",
    ),
    "torch.instance_norm": (
        lambda x: torch.instance_norm(x, W, B, *running(), True, 0.1, 1e-5, True), IMAGES, "batch_norm",
    ),
    "F.log_softmax": (lambda x: F.log_softmax(x, -1), X, "log_softmax"),
    "torch.log_softmax": (lambda x: torch.log_softmax(x, dim=0), X, "log_softmax"),
    "Tensor.log_softmax": (lambda x: x.log_softmax(1), X, "log_softmax"),
    "torch.special.log_softmax": (lambda x: torch.special.log_softmax(x, 1, dtype=x.dtype), X, "log_softmax"),
    "F.cross_entropy": (lambda x: F.cross_entropy(x, TARGET, W), X, "log_softmax"),
    "F.cross_entropy sum": (
        lambda x: F.cross_entropy(x, torch.tensor([[[0, 1], [2, 0]]] * 2), reduction="sum", ignore_index=1), IMAGES,
        "log_softmax",
    ),
    "F.cross_entropy of one": (lambda x: F.cross_entropy(x[0], torch.tensor(1)), X, "log_softmax"),
    "F.dropout evaluation": (lambda x: F.dropout(x, 0.5, False), X, None),
    "F.dropout all": (lambda x: F.dropout(x, 1.0), X, "dropout"),
    "torch.dropout all": (lambda x: torch.dropout(x, 1.0, True), X, "dropout"),
    "torch.native_layer_norm": (lambda x: flat(torch.native_layer_norm(x, (3,), W, B, 1e-3)), X, None),
    "torch.native_batch_norm": (
        lambda x: flat(torch.native_batch_norm(x, W, B, *running(), True, 0.1, 1e-5)), X, "write_back",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED)
def test_first_order_is_that_of_torch(case):
    call, x, op = SERVED[case]
    expected, none = run(call, x, override=False)
    actual, ops = run(call, x)
    assert not none
    assert op is None or op in ops
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    cotangent = data(7, *expected.shape)

    def gradient(x):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad((call(leaf) * cotangent).sum(), leaf)[0]

    torch.testing.assert_close(run(gradient, x)[0], gradient(x), rtol=1e-12, atol=1e-12)


def test_every_stand_in_has_a_case():
    class Called(TorchFunctionMode):
        functions: ClassVar = set()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.functions.add(func)
            return func(*args, **(kwargs or {}))

    for call, x, _ in SERVED.values():
        with Called():
            call(x)
    assert set(overrides) <= Called.functions


NOT_SERVED = {
    "out=": lambda: torch.log_softmax(X, 1, out=torch.empty_like(X)),
    "size_average": lambda: F.cross_entropy(X, TARGET, size_average=False),
    "label_smoothing": lambda: F.cross_entropy(X, TARGET, label_smoothing=0.1),
    "probabilities": lambda: F.cross_entropy(X, X.softmax(1)),
    "dtypes of parameters": lambda: F.instance_norm(IMAGES.bfloat16(), weight=W.float(), bias=B.float()),
    "no dim": lambda: F.log_softmax(X),
    "wrapper subclass": lambda: F.layer_norm(TwoTensor(X, X), (3,)).a,
    "nested": lambda: F.layer_norm(torch.nested.nested_tensor([X, X[:2]]), (3,), W, B).to_padded_tensor(0.0),
    "softmax": lambda: F.softmax(X, 1),
    "composed by torch": lambda: F.gumbel_softmax(torch.full((1, 1), 5.0), hard=True),
}


@pytest.mark.parametrize("case", NOT_SERVED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_served_is_torchs(case):
    expected, _ = run(NOT_SERVED[case], override=False)
    actual, ops = run(NOT_SERVED[case])
    assert not ops
    assert torch.equal(actual, expected)


WRONG = {
    "shape": lambda: F.layer_norm(X, (4,)),
    "no tensor": lambda: F.layer_norm([X], (3,)),
    "weight": lambda: F.batch_norm(X, None, None, data(0, 4), training=True),
    "one value": lambda: F.batch_norm(X[:1], None, None, training=True),
    "no statistics": lambda: F.batch_norm(X, None, None),
    "axis": lambda: F.log_softmax(X, 5),
    "integers": lambda: torch.log_softmax(torch.arange(3), 0),
    "target": lambda: F.cross_entropy(X, TARGET[:2]),
    "spatial": lambda: F.instance_norm(X[:, :, None]),
    "probability": lambda: F.dropout(X, 1.5),
    "unknown argument": lambda: torch.layer_norm(X, (3,), axis=1),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_torchs(case):
    with pytest.raises(TORCH_ERRORS) as theirs:
        WRONG[case]()
    with pytest.raises(theirs.type) as ours, pr.override_torch():
        WRONG[case]()
    assert case == "probability" or str(ours.value) == str(theirs.value)


MODULES = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), X),
    "BatchNorm2d momentum None": (lambda: nn.BatchNorm2d(3, momentum=None), IMAGES),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, track_running_stats=True), IMAGES),
}


@pytest.mark.parametrize("case", MODULES)
def test_running_statistics_are_written(case):
    make, x = MODULES[case]
    theirs, ours, transformed = (make().double() for _ in range(3))
    for scale in (1, 3):
        expected = theirs(scale * x)
        torch.testing.assert_close(run(ours, scale * x)[0], expected, rtol=1e-12, atol=1e-12)
    for name, value in theirs.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], value, rtol=1e-12, atol=1e-12)
    state = dict(transformed.named_buffers())
    with pr.override_torch():
        torch.func.grad(lambda x, state: torch.func.functional_call(transformed, state, x).sum())(x, state)
    once = make().double()
    once(x)
    for name, value in once.named_buffers():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def plain_norm(x, axes):
    centered = x - x.mean(axes, keepdim=True)
    return centered / (centered.square().mean(axes, keepdim=True) + 1e-2).sqrt()


BEYOND = {
    "layer_norm": (lambda x: F.layer_norm(x, (3,), eps=1e-2), lambda x: plain_norm(x, -1), X),
    "native_layer_norm": (
        lambda x: torch.native_layer_norm(x, (3,), None, None, 1e-2)[0], lambda x: plain_norm(x, -1), X,
    ),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True, eps=1e-2), lambda x: plain_norm(x, 0), X),
    "native_batch_norm": (
        lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-2)[0], lambda x: plain_norm(x, 0), X,
    ),
    "instance_norm": (lambda x: F.instance_norm(x, eps=1e-2), lambda x: plain_norm(x, (2, 3)), IMAGES),
}  # fmt: skip
# Functions without a primitive, which torch differentiates rightly.
TORCHS = {
    "group_norm": (lambda x: F.group_norm(x, 1, eps=1e-2), lambda x: plain_norm(x, 1), X),
    "rms_norm": (lambda x: F.rms_norm(x, (3,), eps=1e-2), lambda x: x / (x.square().mean(1, True) + 1e-2).sqrt(), X),
    "softmax": (lambda x: F.softmax(x, 1), lambda x: x.exp() / x.exp().sum(1, keepdim=True), X),
    "logsigmoid": (F.logsigmoid, lambda x: -((-x).exp() + 1).log(), X),
}


def nested(call, x):
    v = data(9, *x.shape)

    def first(f):
        return lambda x: torch.func.jvp(f, (x,), (v,))[1]

    def pairing(f):
        return torch.func.grad(lambda x: (f(x) * v).sum())

    return torch.stack([first(first(call))(x), pairing(first(call))(x), first(pairing(call))(x)])


@pytest.mark.parametrize("case", [*BEYOND, *TORCHS])
def test_second_order(case):
    call, plain, x = {**BEYOND, **TORCHS}[case]
    expected = nested(plain, x)
    torch.testing.assert_close(run(lambda: nested(call, x))[0], expected, rtol=1e-10, atol=1e-10)
    if case in BEYOND:
        assert not torch.allclose(nested(call, x), expected, atol=1e-2), "torch is right: is the override still needed?"


def test_under_vmap():
    batched = data(4, 5, 4, 3)

    def cubes(x):
        return F.layer_norm(F.batch_norm(x, None, None, training=True), (3,)).pow(3).sum()

    gradient = torch.func.grad(cubes)
    expected = torch.stack([gradient(x) for x in batched])
    torch.testing.assert_close(run(torch.func.vmap(gradient), batched)[0], expected)


def served():
    return bool(run(lambda: F.layer_norm(X, (3,)), override=False)[1])


def test_the_context_nests_and_ends():
    assert not served()
    with pr.override_torch():
        with pytest.raises(ZeroDivisionError), pr.override_torch():
            _ = 1 / (not served())
        assert served()
        results = []
        thread = threading.Thread(target=lambda: results.append(served()))
        thread.start()
        thread.join()
        assert results == [False]
    assert not served()


def test_decorator():
    @pr.override_torch()
    def decorated(depth: int) -> bool:
        """Recursive, as a context entered twice."""
        return served() and (depth == 0 or decorated(depth - 1))

    assert decorated.__doc__.startswith("Recursive")
    assert decorated(2)
    assert not served()


def test_dropout_draws_with_the_probability():
    ones = torch.ones(20000, dtype=torch.float64)
    y, ops = run(lambda: nn.Dropout(0.25)(ones))
    assert "dropout" in ops
    assert set(y.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs((y == 0).double().mean().item() - 0.25) < 0.02


@pytest.mark.parametrize("around", [False, True])
def test_compiled(around):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3)).double()

    @pr.override_torch()
    def inside(x):
        return model(x)

    compiled = torch.compile(model if around else inside, fullgraph=True, backend="eager")
    expected, _ = run(model, X)
    if around:
        with pr.override_torch():
            actual = compiled(X)
    else:
        actual = compiled(X)
    torch.testing.assert_close(actual, expected)
    assert "Native" not in actual.grad_fn.name()
    assert model[1].num_batches_tracked == 2


DROPOUTS = (
    (nn.Dropout1d, data(8, 4, 5)),
    (nn.Dropout2d, data(8, 3, 4, 2, 2)),
    (nn.Dropout3d, data(8, 3, 4, 2, 2, 2)),
    (nn.AlphaDropout, data(8, 4, 5)),
    (nn.FeatureAlphaDropout, data(8, 3, 4, 5)),
)


@pytest.mark.parametrize("kind, x", DROPOUTS)
def test_dropout_of_channels_stays_torchs(kind, x):
    """Neither the override nor `convert` takes these for dropout of single elements."""
    model = nn.Sequential(kind(0.4))

    def seeded():
        torch.manual_seed(0)
        return model(x)

    expected, ops = run(seeded)
    assert torch.equal(expected, seeded())
    assert ops == set()
    pr.nn.convert(model)
    assert type(model[0]) is kind
    assert torch.equal(seeded(), expected)


@pytest.mark.parametrize("weight", [None, W.bfloat16()])
def test_cross_entropy_under_autocast_on_the_cpu(weight):
    """Torch computes all of it in float32 there, and `log_softmax` by itself as it comes."""
    x = (10 * X).bfloat16().requires_grad_()
    expected, actual = [], []
    for results, override in ((expected, False), (actual, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, _ = run(F.cross_entropy, x, TARGET, weight, override=override)
            assert run(F.log_softmax, x, 1, override=override)[0].dtype == torch.bfloat16
        results += [loss, *torch.autograd.grad(loss, x)]
    assert actual[0].dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    assert run(F.cross_entropy, x, TARGET, weight)[0].dtype == torch.bfloat16
