"""override_torch: what it serves equals torch's at first order and is right beyond; what it does not is torch's."""

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import primitives as pr
from tests.call_properties import CallRecorder
from tests.support import along, data

X, IMAGES, W, B = data(4, 3), data(2, 3, 2, 2, seed=1), data(3, seed=2).exp(), data(3, seed=3)
TARGET = torch.tensor([0, 2, -100, 1])
# Of torch 2.13, whose derivatives by chunks end at the first order.
CHUNKS = {"options": nn.LinearCrossEntropyOptions(batch_chunk_size=3)} if hasattr(F, "linear_cross_entropy") else {}


def run(call, *args, override=True):
    """The result of a call, and the operators of this package that it ran."""
    with CallRecorder() as recorder, pr.override_torch() if override else nullcontext():
        return call(*args), recorder.names


def running():
    """New ones: a training step writes them."""
    return data(3, seed=5), data(3, seed=6).exp()


def flat(outputs):
    """Outputs in one; torch has no derivatives of the statistics among them."""
    return torch.cat([outputs[0].flatten(), *[o.detach().flatten() for o in outputs[1:]]])


def by_formula(*args):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args)


def nested(*rows):
    return torch.nested.nested_tensor([data(3, n, 2, seed=i) for i, n in enumerate(rows)])


SERVED = {
    "F.layer_norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b, 1e-3), X, "layer_norm"),
    "torch.layer_norm": (lambda x, w, b: torch.layer_norm(x, (3,), w, b, 1e-3, False), X, "layer_norm"),
    "F.rms_norm": (lambda x, w, b: F.rms_norm(x, (3,), w, 1e-3), X, "layer_norm"),
    "torch.rms_norm": (lambda x, w, b: torch.rms_norm(x, (3,), w), X, "layer_norm"),
    "F.batch_norm": (lambda x, w, b: F.batch_norm(x, *running(), w, b, True), X, "batch_norm"),
    "F.batch_norm evaluation": (lambda x, w, b: F.batch_norm(x, *running(), w, b), X, "batch_norm_eval"),
    "torch.batch_norm": (
        lambda x, w, b: torch.batch_norm(x, w, b, *running(), True, 0.1, 1e-5, True), IMAGES, "batch_norm",
    ),
    "F.instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=1e-3), IMAGES, "batch_norm"),
    "F.instance_norm evaluation": (
        lambda x, w, b: F.instance_norm(x, *running(), w, use_input_stats=False), IMAGES, "batch_norm_eval",
    ),
    "torch.instance_norm": (
        lambda x, w, b: torch.instance_norm(x, w, b, *running(), True, 0.1, 1e-5, True), IMAGES, "batch_norm",
    ),
    "F.group_norm": (lambda x, w, b: F.group_norm(x, 3, w, b, 1e-3), IMAGES, "layer_norm"),
    "torch.group_norm": (lambda x, w, b: torch.group_norm(x, 1, w, b, 1e-3, False), IMAGES, "layer_norm"),
    "F.log_softmax": (lambda x, w, b: F.log_softmax(x, -1), X, "log_softmax"),
    "torch.log_softmax": (lambda x, w, b: torch.log_softmax(x, dim=0), X, "log_softmax"),
    "Tensor.log_softmax": (lambda x, w, b: x.log_softmax(1), X, "log_softmax"),
    "torch.special.log_softmax": (lambda x, w, b: torch.special.log_softmax(x, 1, dtype=x.dtype), X, "log_softmax"),
    "F.softmax": (lambda x, w, b: F.softmax(x, -1), X, "softmax"),
    "F.softmin": (lambda x, w, b: F.softmin(x, -1), X, "softmax"),
    "torch.softmax": (lambda x, w, b: torch.softmax(x, dim=0), X, "softmax"),
    "Tensor.softmax": (lambda x, w, b: x.softmax(1), X, "softmax"),
    "torch.special.softmax": (lambda x, w, b: torch.special.softmax(x, 1, dtype=x.dtype), X, "softmax"),
    "F.cross_entropy": (lambda x, w, b: F.cross_entropy(x, TARGET, W), X, "cross_entropy"),
    "F.cross_entropy of probabilities": (
        lambda x, w, b: F.cross_entropy(x, x.softmax(1), b, label_smoothing=0.1), X, "cross_entropy",
    ),
    "F.nll_loss": (lambda x, w, b: F.nll_loss(F.log_softmax(x, 1), TARGET), X, "log_softmax"),
    "F.cross_entropy sum": (
        lambda x, w, b: F.cross_entropy(x, torch.tensor([[[0, 1], [2, 0]]] * 2), reduction="sum", ignore_index=1),
        IMAGES, "cross_entropy",
    ),
    "F.linear_cross_entropy": (
        lambda x, w, b: F.linear_cross_entropy(x, torch.outer(b, w), TARGET, linear_bias=b, **CHUNKS), X,
        "linear_cross_entropy",
    ),
    "F.dropout all": (lambda x, w, b: F.dropout(x, 1.0), X, "dropout"),
    "torch.dropout all": (lambda x, w, b: torch.dropout(x, 1.0, True), X, "dropout"),
    "F.scaled_dot_product_attention": (
        lambda x, w, b: F.scaled_dot_product_attention(x * w.view(3, 1, 1), x, x + b.view(3, 1, 1), is_causal=True),
        IMAGES, "attention",
    ),
    "torch.ops.aten": (
        lambda x, w, b: torch.ops.aten.scaled_dot_product_attention(x * w.view(3, 1, 1), x, x, b.view(3, 1, 1) * x),
        IMAGES, "attention",
    ),
    "a chosen kernel": (lambda x, w, b: by_formula(x * w.view(3, 1, 1), x, x + b.view(3, 1, 1)), IMAGES, "attention"),
    "F.multi_head_attention_forward": (
        lambda x, w, b: F.multi_head_attention_forward(
            *[x.unsqueeze(1)] * 3, 3, 3, torch.outer(B.repeat(3), w), b.repeat(3), None, None, False, 0.0,
            torch.outer(w, b), None, need_weights=False,
        )[0],
        X, "attention",
    ),
    "torch.native_layer_norm": (lambda x, w, b: flat(torch.native_layer_norm(x, (3,), w, b, 1e-3)), X, None),
    "torch.native_batch_norm": (
        lambda x, w, b: flat(torch.native_batch_norm(x, w, b, *running(), True, 0.1, 1e-5)), X, "write_back",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [case for case in SERVED if CHUNKS or "linear" not in case])
def test_first_order_is_that_of_torch(case):
    """The value, and the gradient of every argument."""
    call, x, op = SERVED[case]
    expected, none = run(call, x, W, B, override=False)
    actual, ops = run(call, x, W, B)
    assert not none
    assert op is None or op in ops
    assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    cotangent = data(*expected.shape, seed=7)

    def gradients(*tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        return torch.autograd.grad((call(*leaves) * cotangent).sum(), leaves, allow_unused=True)

    assert_close(run(gradients, x, W, B)[0], gradients(x, W, B), rtol=1e-12, atol=1e-12)


NOT_SERVED = {
    "out=": lambda: torch.log_softmax(X, 1, out=torch.empty_like(X)),
    "size_average": lambda: F.cross_entropy(X, TARGET, size_average=False),
    "dtypes of parameters": lambda: F.instance_norm(IMAGES.bfloat16(), weight=W.float(), bias=B.float()),
    "no dim": lambda: F.log_softmax(X),
    "wrapper subclass": lambda: F.layer_norm(TwoTensor(X, X), (3,)).a,
    "nested rows": lambda: F.scaled_dot_product_attention(*[nested(4, 2)] * 3).to_padded_tensor(0.0),
    "a tensor for a number": lambda: F.scaled_dot_product_attention(*[IMAGES] * 3, scale=torch.tensor(0.5)),
    "nested": lambda: F.layer_norm(torch.nested.nested_tensor([X, X[:2]]), (3,), W, B).to_padded_tensor(0.0),
    "composed by torch": lambda: F.gumbel_softmax(torch.full((1, 1), 5.0), hard=True),
}


@pytest.mark.parametrize("case", NOT_SERVED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_not_served_is_torchs(case):
    expected, _ = run(NOT_SERVED[case], override=False)
    actual, ops = run(NOT_SERVED[case])
    assert not ops
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.channels_last_3d])
def test_group_norm_of_channels_beside_one_another_has_a_jvp(layout):
    shape = (2, 4, 3, 2) if layout is torch.channels_last else (2, 4, 3, 2, 2)
    x, v, scale = data(*shape, seed=8), data(*shape, seed=9), data(4, seed=10)

    def norm(x):
        return F.group_norm(x, 2, scale, scale.sin(), 1e-2)

    expected = norm(x), along(norm, v)(x), along(along(norm, v), v)(x)
    x, v = (t.contiguous(memory_format=layout) for t in (x, v))
    with pr.override_torch():
        actual = norm(x), along(norm, v)(x), along(along(norm, v), v)(x)
    assert_close(actual, expected)
    assert all(y.is_contiguous(memory_format=layout) for y in actual)


def test_group_norm_has_a_jvp_in_compiled_code():
    norm = nn.GroupNorm(3, IMAGES.shape[1]).double()

    with pr.override_torch():
        compiled = torch.compile(along(norm), fullgraph=True, backend="aot_eager")(IMAGES)
    assert_close(compiled, along(norm)(IMAGES))


def test_running_statistics_are_written_under_transforms():
    theirs, ours = (nn.BatchNorm2d(3, momentum=None).double() for _ in range(2))
    with pr.override_torch():
        state = dict(ours.named_buffers())
        torch.func.grad(lambda x, state: torch.func.functional_call(ours, state, x).sum())(IMAGES, state)
        ours(2 * IMAGES)
    theirs(IMAGES), theirs(2 * IMAGES)
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-12)


def test_batches_are_counted_inside_of_transforms():
    """Torch counts in place, which `torch.func` refuses for a counter from outside of it."""
    norm = nn.BatchNorm2d(3).double()
    with pytest.raises(RuntimeError, match="in-place"):
        torch.func.grad(lambda x: norm(x).sum())(IMAGES)
    with pr.override_torch():
        found = along(along(torch.func.grad(lambda x: norm(x).pow(3).sum())))(IMAGES)
    assert norm.num_batches_tracked == 1
    bare = nn.BatchNorm2d(3, track_running_stats=False).double()
    with pr.override_torch():
        assert_close(found, along(along(torch.func.grad(lambda x: bare(x).pow(3).sum())))(IMAGES))


def in_block(model):
    def inside(x):
        with pr.override_torch():
            return model(x)

    return inside


def served():
    return bool(run(lambda: F.layer_norm(X, (3,)), override=False)[1])


def test_the_context_nests_and_ends():
    @pr.override_torch()
    def decorated(depth: int) -> bool:
        """Recursive, as a context entered twice."""
        return served() and (depth == 0 or decorated(depth - 1))

    assert decorated.__doc__.startswith("Recursive")
    assert decorated(2)
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


@pytest.mark.parametrize("make, context", [(in_block, nullcontext), (lambda model: model, pr.override_torch)])
def test_compiled(make, context):
    # Dynamo cannot trace the method of torch that Unflatten calls inside a mode.
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LayerNorm(3), nn.Unflatten(1, (3, 1))).double()
    compiled = torch.compile(make(model), fullgraph=True, backend="aot_eager")
    expected, _ = run(model, X)
    with context():
        actual = compiled(X)
    assert_close(actual, expected)
    assert model[1].num_batches_tracked == 2
    weight = model[0].weight
    assert_close(*[torch.autograd.grad(y.sin().sum(), weight)[0] for y in (actual, expected)])


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
    assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    assert run(F.cross_entropy, x, TARGET, weight)[0].dtype == torch.bfloat16
