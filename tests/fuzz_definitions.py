"""What torch has no function for, or another one: in float64, with results in the dtypes that are documented."""

import functools

import torch
import torch.nn.functional as F

import primitives as pr
from perf.ops.attention import true_attention


def _doubles(*values):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values]


def _of_the_reference(name):
    """What the reference of this package computes in float64, which the records hold to the definition."""

    def compute(input, **options):
        wide = dict(zip(options, _doubles(*options.values()), strict=True))
        # The input is rounded to the dtype that is asked for, and so is the result.
        dtype = wide.pop("dtype", None) or input.dtype
        if options.get("eps", 1) is None:
            wide["eps"] = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        with pr.use_backend("reference"):
            y = getattr(pr.functional, name)(input.to(dtype).double(), **wide)
        for key, x in options.items():
            if key.startswith("running") and x is not wide[key]:
                x.copy_(wide[key])
        return (y[0].to(dtype), y[1].to(options["residual"].dtype)) if isinstance(y, tuple) else y.to(dtype)

    return compute


ada_layer_norm, add_layer_norm, add_rms_norm = map(
    _of_the_reference, ("ada_layer_norm", "add_layer_norm", "add_rms_norm")
)
batch_norm_relu, group_norm, softmax = map(_of_the_reference, ("batch_norm_relu", "group_norm", "softmax"))
softmin = _of_the_reference("softmin")


def rms_norm(input, normalized_shape, weight, eps, add_one, cast_first):
    eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps if eps is None else eps
    y = F.rms_norm(input.double(), normalized_shape, None, eps)
    y = y.to(input.dtype).double() if cast_first and weight is not None else y
    return (y if weight is None else y * (weight.double() + add_one)).to(input.dtype)


def attention(q, k, v, bias, mask, **options):
    scale = (q.shape[-1] or 1) ** -0.5 if options["scale"] is None else options["scale"]
    noise = (options[name] or 0 for name in ("dropout_p", "seed", "offset"))
    o, lse = true_attention(*_doubles(q, k, v, bias), mask, options["causal"], scale, *noise)
    o = o.to(q.dtype)
    return (o, lse.to(torch.promote_types(q.dtype, torch.float32))) if options["return_lse"] else o


def scaled_dot_product_attention(query, key, value, attn_mask, **options):
    is_bias = attn_mask is not None and attn_mask.is_floating_point()
    masks = {"bias": attn_mask if is_bias else None, "mask": None if is_bias else attn_mask}
    rest = {"causal": options["is_causal"], "scale": options["scale"], "return_lse": False}
    rest |= {"dropout_p": 0.0, "seed": None, "offset": None}
    return attention(query, key, value, **masks, **rest)


def _loss(input, logits, target, weight, ignore_index, reduction, **options):
    """Of float64 logits with the classes in their last axis."""
    classes, lse, is_soft = logits.shape[-1], logits.logsumexp(-1), target.is_floating_point()
    kept = torch.ones_like(lse, dtype=torch.bool) if is_soft else target != ignore_index
    w = logits.new_ones(classes) if weight is None else weight.double()
    labels = None if is_soft else target.clamp(min=0)
    hit = target.double() if labels is None else F.one_hot(labels, classes).double()
    smoothing = options["label_smoothing"]
    share = (1 - smoothing) * hit + smoothing / classes
    rows = -(share * w * logits.log_softmax(-1).masked_fill((share == 0.0) | ~kept.unsqueeze(-1), 0.0)).sum(-1)
    rows = (rows + options["z_loss"] * lse.square() if options["z_loss"] else rows).where(kept, 0.0)
    total = rows.numel() if labels is None else w[labels].where(kept, 0.0).sum()
    dtypes = [x.dtype for x in (target, weight) if is_soft and x is not None]
    y = rows if reduction == "none" else rows.sum() / (total if reduction == "mean" else 1)
    return y.to(functools.reduce(torch.promote_types, dtypes, input.dtype))


def cross_entropy(input, target, **options):
    axis = min(input.dim() - 1, 1)
    target = target.movedim(axis, -1) if target.is_floating_point() else target
    return _loss(input, input.double().movedim(axis, -1), target, **options)


def linear_cross_entropy(input, linear_weight, target, linear_bias, **options):
    ignored = options["ignore_index"] = -100 if options["ignore_index"] is None else options["ignore_index"]
    if options["shift"]:
        target = torch.cat([target[..., 1:], torch.full_like(target[..., :1], ignored)], -1)
    logits, cap = F.linear(*_doubles(input, linear_weight, linear_bias)).to(input.dtype).double(), options["softcap"]
    return _loss(input, logits if cap is None else cap * torch.tanh(logits / cap), target, **options)
