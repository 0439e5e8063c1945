"""Cross-entropy around its primitives: weights, reductions, smoothing and z-loss, held to the formula in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import primitives as pr
from perf.ops.samples import normal, pairwise

CALLS = pairwise(
    shape=[(5, 7), (7,), (2, 7, 3), (0, 7)],
    kind=["labels", "probabilities"],
    reduction=["mean", "sum", "none"],
    is_weighted=[True, False],
    label_smoothing=[0.0, 0.2, 1.0],
    z_loss=[0.0, 0.3],
    dtype=[torch.float64, torch.float32, torch.bfloat16],
)


def truth(x, target, weight, reduction, label_smoothing, z_loss):
    """By the formula; a label has its own weight in the mean, probabilities count as rows."""
    axis, is_hard = min(x.dim() - 1, 1), not target.is_floating_point()
    hit = F.one_hot(target.clamp(min=0), 7).movedim(-1, axis).to(x.dtype) if is_hard else target
    kept = target >= 0 if is_hard else torch.ones_like(x.sum(axis), dtype=torch.bool)
    w = (
        (torch.ones(7) if weight is None else weight)
        .to(x.dtype)
        .reshape([-1 if i == axis else 1 for i in range(x.dim())])
    )
    share = (1 - label_smoothing) * hit + label_smoothing / 7
    rows = -(share * w * x.log_softmax(axis)).sum(axis) + z_loss * x.logsumexp(axis).square()
    rows, weights = rows * kept, (hit * w).sum(axis) * kept if is_hard else torch.ones_like(rows)
    return rows if reduction == "none" else rows.sum() / (weights.sum() if reduction == "mean" else 1)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values_and_derivatives(call):
    shape, dtype, is_hard = call["shape"], call["dtype"], call["kind"] == "labels"
    x, weight = normal(shape, 0).to(dtype), normal((7,), 1).abs().add(0.5).to(dtype)
    target = normal(shape, 2).softmax(min(len(shape) - 1, 1)).to(dtype)
    if is_hard:
        rows = target.select(min(len(shape) - 1, 1), 0)
        target = torch.where(torch.arange(rows.numel()).reshape(rows.shape) % 4 == 1, -100, (rows * 40).long() % 7)
    options = {name: call[name] for name in ("reduction", "label_smoothing", "z_loss")}
    differentiated = [x] + [weight] * call["is_weighted"] + [target] * (not is_hard)

    def derivatives(loss, *values):
        def of(*values):
            rest = list(values[1:])
            given = {"weight": rest.pop(0) if call["is_weighted"] else None, "target": rest[0] if rest else target}
            return loss(values[0], **given, **options)

        y, pull = torch.func.vjp(of, *values)
        return y, pull(torch.ones_like(y)), torch.func.jvp(of, values, tuple(v.sin() for v in values))[1]

    found = derivatives(pr.functional.cross_entropy, *differentiated)
    expected = derivatives(truth, *[v.double() for v in differentiated])
    bound = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    assert_close(found, expected, rtol=bound, atol=bound, check_dtype=False, equal_nan=True)
    assert found[0].dtype == found[1][0].dtype == dtype
