"""Drawn arguments of the public functions, and definitions in float64 of those that torch lacks."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import hypothesis.strategies as st
import torch
import torch.nn.functional as F

from perf.ops.philox_truth import true_noise
from perf.ops.samples import DTYPES, LAYOUTS, LOW_PRECISION, arranged, normal

MOST = 2000
SIZES = st.sampled_from((2, 3, 4, 1, 0, 17))
ODD_DTYPES = (*DTYPES, torch.int64, torch.bool, torch.complex64)
# Gradients of two values are 0, of terms as large as 1 / sqrt(eps).
EPS = (1e-2, 0.5)
SPECIAL = (math.inf, -math.inf, math.nan, 1e4, -1e15)


@dataclasses.dataclass
class Given:
    """A tensor to be made: twice, as each function may write into its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    seed: int
    kind: str = "normal"
    least: int = -1
    top: int = 1
    special: float | None = None
    has_grad: bool = False

    def made(self, *, is_strided: bool, noise: float | None) -> torch.Tensor:
        """The tensor, or with noise one in float64, each of whose elements is moved by about so much of it."""
        if self.kind == "labels":
            generator = torch.Generator().manual_seed(self.seed)
            x = torch.randint(self.least, self.top, self.shape, generator=generator)
        else:
            x = normal(self.shape, self.seed)
            x = x.abs() + 0.5 if self.kind in ("positive", "probability") else x
            if self.special is not None and x.numel():
                x.view(-1)[0] = self.special
            x = x > 0 if self.dtype == torch.bool else x
        x = arranged(x.to(self.dtype), self.layout)
        if noise is not None and self.dtype.is_floating_point:
            x = x.double() * (1 + noise * normal(self.shape, self.seed + 1))
        # Torch's gradients beside strided parameters are wrong or errors.
        return (x if is_strided else x.contiguous()).requires_grad_(self.has_grad)


class Draw:
    """What the calls below are made of; unless it is strict, one choice in ten is not what the function asks for."""

    def __init__(self, draw: Any, *, is_strict: bool) -> None:
        self.draw, self.is_strict = draw, is_strict
        self.dtype = self.one(*(ODD_DTYPES if self.is_odd() else DTYPES))
        # Of parameters and what else may be wider than the input.
        self.wide = self.one(self.dtype, torch.float32) if self.dtype in LOW_PRECISION else self.dtype

    def one(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def is_odd(self) -> bool:
        return not self.is_strict and self.draw(st.integers(0, 29)) == 29

    def shape(self, least: int, most: int) -> tuple[int, ...]:
        bounds = (0, 6) if self.is_odd() else (least, most)
        shape = self.draw(st.lists(SIZES, min_size=bounds[0], max_size=bounds[1]))
        return tuple(shape if math.prod(shape) < MOST else [min(n, 2) for n in shape])

    def tensor(self, shape: tuple[int, ...], dtype: Any = None, **options: Any) -> Any:
        dtype = dtype or self.dtype
        if self.is_odd():
            return self.one(None, 1.0, "x", 2, True)
        if self.is_odd():
            shape = self.shape(0, 4)
        if self.is_odd():
            dtype = self.one(*ODD_DTYPES)
        kind = options.get("kind", "normal")
        # What is written repeats nothing, and integers have no NaN to lie between.
        left_out = "sliced" if not dtype.is_floating_point else "expanded" if kind in ("state", "positive") else ""
        layout = self.one(*[layout for layout in LAYOUTS if layout != left_out])
        has_grad = dtype.is_floating_point and kind in ("normal", "probability") and self.draw(st.booleans())
        return Given(tuple(shape), dtype, layout, self.draw(st.integers(0, 99)), has_grad=has_grad, **options)

    def maybe(self, shape: tuple[int, ...], dtype: Any = None, **options: Any) -> Given | None:
        return self.tensor(shape, dtype, **options) if self.draw(st.booleans()) else None

    def special(self, shape: tuple[int, ...], count: int = len(SPECIAL)) -> Any:
        return self.tensor(shape, special=self.one(*SPECIAL[:count], *[None] * 45))

    def input(self, least: int, most: int) -> tuple[tuple[int, ...], Any]:
        shape = self.shape(least, most)
        return shape, self.special(shape)


def layer_norm(d: Draw) -> dict:
    shape, x = d.input(1, 4)
    last = shape[len(shape) - d.one(1, 1, 1, *range(d.is_strict, min(len(shape), 3) + 1)) :]
    eps = d.one(1, None, "x") if d.is_odd() else d.one(*EPS)
    params = {"weight": d.maybe(last, d.wide), "bias": d.maybe(last, d.wide)}
    return {"input": x, "normalized_shape": d.one(list, tuple)(last), **params, "eps": eps}


def rms_norm(d: Draw) -> dict:
    call = layer_norm(d)
    del call["bias"]
    return {**call, "eps": d.one(*EPS, None)}


def _residual(d: Draw, call: dict) -> dict:
    (_, x), *others = call.items()
    noise = {"dropout_p": d.one(0.0, 1.0), "training": d.one(True, False)}
    return {"input": x, "residual": d.tensor(x.shape, d.wide), **dict(others), **noise}


def add_layer_norm(d: Draw) -> dict:
    return _residual(d, layer_norm(d))


def add_rms_norm(d: Draw) -> dict:
    return {**_residual(d, rms_norm(d)), "add_one": d.one(False, True), "cast_first": d.one(False, True)}


def ada_layer_norm(d: Draw) -> dict:
    (shape, x), norm_ndim = d.input(1, 4), 1
    norm_ndim = d.draw(st.integers(1, len(shape)))
    lead = d.draw(st.integers(0, len(shape) - norm_ndim))
    ones = [1] * d.draw(st.integers(0, len(shape) - norm_ndim - lead))
    of_samples = (*shape[:lead], *ones, *shape[len(shape) - norm_ndim :])
    each = {name: d.tensor(of_samples, d.wide) for name in ("scale", "shift")}
    return {"input": x, **each, "normalized_shape": list(shape[len(shape) - norm_ndim :]), "eps": d.one(*EPS)}


def group_norm(d: Draw) -> dict:
    shape, x = d.input(2, 5)
    channels = shape[1:2]
    groups = d.one(1, 2, 3, channels[0] if channels else 1, 0)
    params = {"weight": d.maybe(channels), "bias": d.maybe(channels)}
    return {"input": x, "num_groups": groups, **params, "eps": d.one(*EPS)}


def batch_norm(d: Draw) -> dict:
    shape, x = d.input(2, 6)
    mean = d.maybe(shape[1:2], d.wide, kind="state")
    var = d.tensor(shape[1:2], d.wide, kind="positive") if mean or d.is_odd() else None
    params = {"weight": d.maybe(shape[1:2], d.wide), "bias": d.maybe(shape[1:2], d.wide)}
    numbers = {"training": d.one(True, False), "momentum": d.one(0.1, 0.0, 1), "eps": d.one(*EPS)}
    return {"input": x, "running_mean": mean, "running_var": var, **params, **numbers}


def batch_norm_relu(d: Draw) -> dict:
    call = batch_norm(d)
    shape = call["input"].shape
    # Without a bias a constant channel stands at the kink.
    call["bias"] = d.tensor(shape[1:2], (call["weight"] or call["bias"] or call["input"]).dtype)
    call["training"] |= call["running_mean"] is None
    return {**call, "residual": (d.one(False, True) and d.special(shape)) or None}


def instance_norm(d: Draw) -> dict:
    return {"use_input_stats" if name == "training" else name: value for name, value in batch_norm(d).items()}


def softmax(d: Draw) -> dict:
    dim = d.draw(st.integers(-4, 4)) if d.is_odd() else d.one(-1, 0, 1)
    dtype = d.one(*ODD_DTYPES) if d.draw(st.integers(0, 4)) == 4 else None
    return {"input": d.input(1, 4)[1], "dim": dim, "dtype": dtype}


def _loss(d: Draw, shape: tuple[int, ...], has_probabilities: bool) -> dict:
    axis = min(len(shape) - 1, 1)
    classes = shape[axis] if shape else 1
    rows = shape[:axis] + shape[axis + 1 :] if shape else ()
    ignored = d.one(-1, -1, 0, -100)
    range_of = {"least": -1 if ignored == -1 or d.is_odd() else 0, "top": max(classes + d.is_odd(), 1)}
    labels = d.tensor(rows, torch.int64, kind="labels", **range_of)
    return {
        "target": d.tensor(shape, d.one(d.dtype, d.wide), kind="probability") if has_probabilities else labels,
        "weight": d.maybe((classes,), d.wide if has_probabilities or d.is_strict else None),
        "ignore_index": -100 if has_probabilities else ignored,
        "reduction": d.one("mean", "sum", "none", *["avg"] * d.is_odd()),
    }


def nll_loss(d: Draw) -> dict:
    shape, x = d.input(1, 4)
    return {"input": x, **_loss(d, shape, has_probabilities=False)}


def cross_entropy(d: Draw) -> dict:
    shape, x = d.input(1, 4)
    return {
        "input": x,
        **_loss(d, shape, d.one(False, True)),
        "label_smoothing": 1.5 if d.is_odd() else d.one(0.0, 0.1, 1.0),
    }


def linear_cross_entropy(d: Draw) -> dict:
    rows, width, classes = d.shape(0, 1), d.draw(SIZES), d.one(1, 2, 5, 17)
    x, matrix, bias = d.tensor((*rows, width)), d.tensor((classes, width)), d.maybe((classes,))
    loss = _loss(d, (*rows, classes), d.one(False, True))
    target, weight, ignored, reduction = loss.values()
    options = {"label_smoothing": d.one(0.0, 0.1), "z_loss": d.one(0.0, 0.3), "softcap": d.one(None, 0.7)}
    options = {"ignore_index": ignored if target.kind == "labels" else None, **options, "chunk_rows": d.one(None, 1, 2)}
    linear = {"linear_weight": matrix, "target": target, "linear_bias": bias}
    return {"input": x, **linear, "weight": weight, "reduction": reduction, **options}


def dropout(d: Draw) -> dict:
    p, training = d.one((0.0, True), (1.0, True), (0.3, False), (1.5, True), (-0.5, False))
    return {"input": d.input(0, 4)[1], "p": p, "training": training}


def _attention(d: Draw, heads: int, key_heads: int) -> tuple[dict, tuple[int, ...]]:
    batch = d.one((), (2,))
    rows, keys = d.one(3, 17, 4, 2, 1, 0), d.one(4, 3, 17, 2, 1, 0)
    width, width_v = d.draw(SIZES), d.draw(SIZES)
    of_keys = (*batch, key_heads, keys)
    rows_of = {"query": (*batch, heads, rows, width), "key": (*of_keys, width), "value": (*of_keys, width_v)}
    # A huge score is all rounding, and the order of products decides which gradients beside an infinite one are NaN.
    tensors = {name: d.tensor(shape) if d.is_strict else d.special(shape, 4) for name, shape in rows_of.items()}
    return tensors, (*batch, heads, rows, keys)


def _over_pairs(d: Draw, pairs: tuple[int, ...]) -> tuple[int, ...]:
    return d.one(pairs, pairs[-2:], (1, pairs[-1]), (pairs[-2], 1), (pairs[-3], 1, pairs[-1]))


def scaled_dot_product_attention(d: Draw) -> dict:
    heads, key_heads = d.one((1, 1), (3, 3), (4, 2))
    tensors, pairs = _attention(d, heads, key_heads)
    mask = d.tensor(_over_pairs(d, pairs), d.one(torch.bool, d.dtype)) if d.one(True, True, False) else None
    is_causal = d.one(False, True) if mask is None or d.is_odd() else False
    options = {"dropout_p": -1.0 if d.is_odd() else 0.0, "is_causal": is_causal, "scale": d.one(None, 0.5)}
    return {**tensors, "attn_mask": mask, **options, "enable_gqa": heads != key_heads}


def attention(d: Draw) -> dict:
    tensors, pairs = _attention(d, *d.one((1, 1), (3, 3), (4, 2), (6, 1)))
    hidden, p = d.one("causal", "mask", "causal", "mask", ""), d.one(0.0, 0.0, 0.3, 1.0)
    return {
        **dict(zip("qkv", tensors.values(), strict=True)),
        "bias": d.tensor(_over_pairs(d, pairs), d.wide) if d.one(False, True) else None,
        "mask": d.tensor(_over_pairs(d, pairs), torch.bool) if hidden == "mask" else None,
        "causal": hidden == "causal",
        **{"scale": d.one(None, -0.5, 2), "dropout_p": p, "return_lse": d.one(False, True)},
        **({"seed": d.one(0, 5), "offset": d.one(None, 3)} if p else {}),
    }


def _doubles(*tensors: Any) -> list:
    return [None if x is None else x.double() for x in tensors]


def _true_added(input: Any, residual: Any, normalized_shape: Any, weight: Any, bias: Any = None, **options: Any) -> Any:
    dropped = options["training"] and options["dropout_p"] == 1.0
    s = (residual.double() + input.double() * (not dropped)).to(residual.dtype)
    wide, (w, b) = s.double(), _doubles(weight, bias)
    if "add_one" not in options:
        return F.layer_norm(wide, normalized_shape, w, b, options["eps"]).to(input.dtype), s
    eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps if options["eps"] is None else options["eps"]
    y = F.rms_norm(wide, normalized_shape, None, eps)
    if w is not None:
        y = (y.to(input.dtype).double() if options["cast_first"] else y) * (w + options["add_one"])
    return y.to(input.dtype), s


def _true_ada(input: Any, scale: Any, shift: Any, normalized_shape: Any, eps: float) -> Any:
    lead, last = scale.shape[: scale.dim() - len(normalized_shape)], list(normalized_shape)
    ones = [1] * (input.dim() - len(lead) - len(last))
    w, b = (x.reshape(*lead, *ones, *last) for x in _doubles(scale, shift))
    return (F.layer_norm(input.double(), last, eps=eps) * (1 + w) + b).to(input.dtype)


def _true_batch_norm_relu(input: Any, residual: Any, **options: Any) -> Any:
    wide: dict[str, Any] = {
        name: x.double().clone() if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }
    y = F.batch_norm(input.double(), **wide)
    for name in ("running_mean", "running_var"):
        if options[name] is not None:
            options[name].copy_(wide[name])
    return F.relu(y if residual is None else y + residual.double()).to(input.dtype)


def _true_linear(input: Any, linear_weight: Any, target: Any, linear_bias: Any, weight: Any, **options: Any) -> Any:
    x, matrix, bias, w = _doubles(input, linear_weight, linear_bias, weight)
    logits = F.linear(x, matrix, bias).to(input.dtype).double()
    cap, smoothing, ignored = options["softcap"], options["label_smoothing"], options["ignore_index"]
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    classes, lse, is_soft = logits.shape[-1], logits.logsumexp(-1), target.is_floating_point()
    kept = (
        torch.full_like(lse, fill_value=True, dtype=torch.bool)
        if is_soft
        else target != (-100 if ignored is None else ignored)
    )
    hit = target.double() if is_soft else F.one_hot(target.clamp(min=0), classes).double()
    w = logits.new_ones(classes) if w is None else w
    rows = (((1 - smoothing) * hit + smoothing / classes) * w * (lse.unsqueeze(-1) - logits)).sum(-1)
    rows = (rows + options["z_loss"] * lse.square() if options["z_loss"] else rows).where(kept, 0.0)
    total = rows.numel() if is_soft else (hit * w).sum(-1).where(kept, 0.0).sum()
    dtypes = [x.dtype for x in (input, target, weight) if is_soft and x is not None]
    dtype = functools.reduce(torch.promote_types, dtypes, input.dtype)
    return (
        rows if options["reduction"] == "none" else rows.sum() / (total if options["reduction"] == "mean" else 1)
    ).to(dtype)


def _true_attention(q: Any, k: Any, v: Any, bias: Any, mask: Any, **options: Any) -> Any:
    wide, *others = _doubles(q, k, v)
    wide_k, wide_v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in others)
    scale = (q.shape[-1] or 1) ** -0.5 if options["scale"] is None else options["scale"]
    scores = scale * wide @ wide_k.mT + (0.0 if bias is None else bias.double())
    seen = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    seen = seen.tril() if options["causal"] else seen
    # A row that sees nothing is cut out before the softmax, whose derivative there is NaN.
    sees_some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & sees_some, -math.inf)
    weights, lse = scores.softmax(-1) * sees_some, scores.logsumexp(-1).where(sees_some.squeeze(-1), -math.inf)
    if options["dropout_p"]:
        columns = -(-k.shape[-2] // 4) * 4
        noise = true_noise((*q.shape[:-1], columns), options["seed"], options["offset"] or 0, options["dropout_p"])
        weights = weights * noise[..., : k.shape[-2]]
    o = (weights @ wide_v).to(q.dtype)
    return (o, lse.to(torch.promote_types(q.dtype, torch.float32))) if options["return_lse"] else o


# What torch has no function for, or another one, in float64, with results in the dtypes that are documented.
DEFINITIONS = {
    **{"add_layer_norm": _true_added, "add_rms_norm": _true_added, "ada_layer_norm": _true_ada},
    **{"batch_norm_relu": _true_batch_norm_relu, "linear_cross_entropy": _true_linear, "attention": _true_attention},
}
CALLS = {
    **{f.__name__: f for f in (layer_norm, rms_norm, group_norm, batch_norm, instance_norm, nll_loss, cross_entropy)},
    **{f.__name__: f for f in (dropout, scaled_dot_product_attention, add_layer_norm, add_rms_norm, ada_layer_norm)},
    **{f.__name__: f for f in (batch_norm_relu, linear_cross_entropy, attention)},
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), softmax),
}
