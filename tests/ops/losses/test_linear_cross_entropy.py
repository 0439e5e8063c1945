"""Cross-entropy of logits that are made by chunks: against the formula that makes all of them, and its memory."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import primitives as pr
from perf.measuring import peak
from primitives.testing import check_rule
from tests.call_properties import CallRecorder
from tests.ops.losses.test_cross_entropy import truth
from tests.support import normal, right_nestings

N, D, C = 5, 3, 7
LABELS = torch.tensor([[2, -100, 6, 0, 6], [1, 3, 3, -100, 5]])
OPTIONS = {
    "labels": {},
    "next tokens, capped": {"softcap": 2.0, "shift": True, "z_loss": 0.3},
    "smoothed and weighted": {"label_smoothing": 0.2, "weight": normal((C,), 8).abs() + 0.5},
}
SHAPES = {"x": (2, N, D), "weight": (C, D), "bias": (C,)}


def arguments():
    return torch.cat([normal(shape, i).flatten() for i, shape in enumerate(SHAPES.values())])


def split(vector):
    parts = vector.split([torch.Size(shape).numel() for shape in SHAPES.values()])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES.values(), strict=True)]


def ours(vector, **options):
    x, weight, bias = split(vector)
    return pr.functional.linear_cross_entropy(x, weight, LABELS, linear_bias=bias, chunk_rows=4, **options)


def true(vector, softcap=None, shift=False, z_loss=0.0, label_smoothing=0.0, weight=None):
    x, linear_weight, bias = split(vector)
    h, labels = x @ linear_weight.mT + bias, LABELS
    h = h if softcap is None else softcap * torch.tanh(h / softcap)
    h, labels = (h[:, :-1], labels[:, 1:]) if shift else (h, labels)
    return truth(h.reshape(-1, C), labels.reshape(-1), weight, "mean", label_smoothing, z_loss)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_nesting_to_order_three_is_right(name):
    ours_of, true_of = (functools.partial(function, **OPTIONS[name]) for function in (ours, true))
    z = arguments()
    assert_close(ours_of(z), true_of(z))
    assert len([*right_nestings(ours_of, [z], [torch.linspace(-1, 1, z.numel(), dtype=torch.float64)])]) == 14


def test_labels_of_one_token_each_are_not_probabilities_of_one_class():
    x, weight, labels = normal((2, 1, D), 0), normal((1, D), 1), torch.tensor([[-100], [0]])
    loss = pr.functional.linear_cross_entropy(x, weight, labels, z_loss=1.0, reduction="sum", ignore_index=-100)
    assert_close(loss, (x[1] @ weight.mT).square().squeeze())


def loss_of(x, weight, bias, labels):
    return pr.functional.linear_cross_entropy(x, weight, labels, linear_bias=bias, chunk_rows=4, softcap=2.0).sin()


@pytest.mark.parametrize("property", ["vmap against loop", "derivatives under vmap"])
@pytest.mark.parametrize("function", [loss_of, grad(loss_of, (0, 1, 2))], ids=["loss", "gradients"])
def test_batches(function, property):
    """Samples of one model, models on one sample, and of both."""
    check_rule(function, property, (normal((N, D), 0), normal((C, D), 1), normal((C,), 2), torch.arange(N) % C))


def test_a_batch_of_rows_is_one_call():
    x, labels = normal((6, N, D), 0), torch.arange(6 * N).reshape(6, N) % C
    with CallRecorder() as recorder:
        vmap(grad(loss_of), (0, None, None, 0))(x, normal((C, D), 1), normal((C,), 2), labels)
    assert sum("linear_cross_entropy" in str(call) for call in recorder.calls) == 2


def test_a_vocabulary_that_is_longer_than_a_chunk():
    """Two rows a chunk: value, gradients and a Hessian-vector product against float64 logits of all rows.

    How much a product over all classes loses depends on the processor, so the formula of the same chunks in float32
    says what is allowed: 5e-4 of the largest element on an AMD EPYC, and less than 2e-6 on others.
    """
    classes = 262_144
    x, weight = normal((4, 2), 0).float(), normal((classes, 2), 1).float()
    labels = torch.tensor([classes - 1, 5, -100, 0])

    def plain(x, weight):
        chunks = zip(x.split(2), labels.split(2), strict=True)
        return sum(F.cross_entropy(rows @ weight.mT, of_rows, reduction="sum") for rows, of_rows in chunks) / 3

    def derivatives(loss, *args):
        return tree_leaves((loss(*args), jvp(grad(loss, (0, 1)), args, tuple(a.cos() for a in args))))

    found = derivatives(lambda x, w: pr.functional.linear_cross_entropy(x, w, labels, chunk_rows=2), x, weight)
    truth = derivatives(lambda x, w: F.cross_entropy(x @ w.mT, labels), x.double(), weight.double())
    for got, torchs, want in zip(found, derivatives(plain, x, weight), truth, strict=True):
        lost = (torchs.double() - want).abs().max().item()
        assert_close(got.double(), want, rtol=0.0, atol=2e-6 * want.abs().max().item() + 4 * lost)


def test_no_more_than_a_few_chunks_of_logits_are_in_memory():
    """Full logits take 8 MB, and so does each tensor of their size; a chunk takes half a MB.

    The weight and what belongs to it, 2 MB each, are in every mode: four times in second order.
    """
    point, target = (torch.randn(256, 64), torch.randn(8192, 64)), torch.randint(8192, (256,))

    def loss(x, weight):
        return pr.functional.linear_cross_entropy(x, weight, target, chunk_rows=16)

    gradients = torch.func.grad(loss, (0, 1))
    modes = {
        4: lambda: loss(*point),
        6: lambda: gradients(*point),
        4.5: lambda: torch.func.jvp(loss, point, point),
        9.2: lambda: torch.func.jvp(gradients, point, point),
    }
    arguments = 4 * 64 * (256 + 8192)
    for most, run in modes.items():
        assert 2e6 < peak(run) + arguments <= most * 1e6
    full = torch.func.grad(lambda x, weight: F.cross_entropy(F.linear(x, weight), target), (0, 1))
    assert peak(lambda: full(*point)) > 20e6
