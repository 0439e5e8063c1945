"""Drawn arguments of the public functions, each by the name of its function."""

import dataclasses
import functools
import math

import hypothesis.strategies as st
import torch

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

    def made(self, *, is_strided, noise):
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
    """What the calls below are made of.

    A strict one is held to the definition, and has options of which torch knows nothing. Of others one choice in sixty
    is not what the function asks for.
    """

    def __init__(self, draw, *, is_strict):
        self.draw, self.is_strict = draw, is_strict
        self.dtype = self.one(*(ODD_DTYPES if self.is_odd() else DTYPES))
        # Of parameters and what else may be wider than the input.
        self.wide = self.one(self.dtype, torch.float32) if self.dtype in LOW_PRECISION else self.dtype

    def one(self, *choices):
        return self.draw(st.sampled_from(choices))

    def is_odd(self):
        return not self.is_strict and self.draw(st.integers(0, 59)) == 59

    def shape(self, least, most):
        bounds = (0, 6) if self.is_odd() else (least, most)
        shape = self.draw(st.lists(SIZES, min_size=bounds[0], max_size=bounds[1]))
        return tuple(shape if math.prod(shape) < MOST else [min(n, 2) for n in shape])

    def tensor(self, shape, dtype=None, **options):
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

    def maybe(self, shape, dtype=None, **options):
        return self.tensor(shape, dtype, **options) if self.draw(st.booleans()) else None

    def special(self, shape, count=5, dtype=None):
        return self.tensor(shape, dtype, special=self.one(*SPECIAL[:count], *[None] * 45))

    def input(self, least, most):
        shape = self.shape(least, most)
        return shape, self.special(shape)


def layer_norm(d):
    shape, x = d.input(1, 4)
    last = shape[len(shape) - d.one(1, 1, 1, *range(d.is_strict, min(len(shape), 3) + 1)) :]
    eps = d.one(1, None, "x") if d.is_odd() else d.one(*EPS)
    params = {"weight": d.maybe(last, d.wide), "bias": d.maybe(last, d.wide)}
    return {"input": x, "normalized_shape": d.one(list, tuple)(last), **params, "eps": eps}


def rms_norm(d):
    call = layer_norm(d)
    del call["bias"]
    own = {"add_one": d.one(False, True), "cast_first": d.one(False, True)} if d.is_strict else {}
    return _without_slope({**call, "eps": d.one(*EPS, None), **own})


def _without_slope(call):
    """A number over its own size has the slope that eps leaves of it: roundings."""
    if math.prod(call["normalized_shape"]) > 1 or "bias" in call:
        return call
    rows = [name for name in ("input", "residual") if isinstance(call.get(name), Given)]
    return {**call, **{name: dataclasses.replace(call[name], has_grad=False) for name in rows}}


def _residual(norm, d):
    call = norm(d)
    x = call.pop("input")
    noise = {"dropout_p": d.one(0.0, 0.3, 1.0), "training": d.one(True, True, False)}
    return _without_slope({"input": x, "residual": d.tensor(x.shape, d.wide), **call, **noise})


add_layer_norm, add_rms_norm = (functools.partial(_residual, norm) for norm in (layer_norm, rms_norm))


def ada_layer_norm(d):
    shape, x = d.input(1, 4)
    norm_ndim = d.draw(st.integers(1, len(shape)))
    lead = d.draw(st.integers(0, len(shape) - norm_ndim))
    ones = [1] * d.draw(st.integers(0, len(shape) - norm_ndim - lead))
    last = shape[len(shape) - norm_ndim :]
    each = {name: d.tensor((*shape[:lead], *ones, *last), d.wide) for name in ("scale", "shift")}
    return {"input": x, **each, "normalized_shape": list(last), "eps": d.one(*EPS)}


def group_norm(d):
    shape, x = d.input(2, 5)
    channels = shape[1:2]
    groups = d.one(1, 2, 3, channels[0] if channels else 1, 0)
    params = {"weight": d.maybe(channels), "bias": d.maybe(channels)}
    own = {"activation": "silu"} if d.is_strict else {}
    return {"input": x, "num_groups": groups, **params, "eps": d.one(*EPS), **own}


def batch_norm(d):
    shape, x = d.input(2, 6)
    mean = d.maybe(shape[1:2], d.wide, kind="state")
    var = d.tensor(shape[1:2], d.wide, kind="positive") if mean or d.is_odd() else None
    params = {"weight": d.maybe(shape[1:2], d.wide), "bias": d.maybe(shape[1:2], d.wide)}
    numbers = {"training": d.one(True, False), "momentum": d.one(0.1, 0.0, 1), "eps": d.one(*EPS)}
    return {"input": x, "running_mean": mean, "running_var": var, **params, **numbers}


def batch_norm_relu(d):
    call = batch_norm(d)
    shape = call["input"].shape
    # Without a bias a constant channel stands at the kink.
    call["bias"] = d.tensor(shape[1:2], (call["weight"] or call["bias"] or call["input"]).dtype)
    call["training"] |= call["running_mean"] is None
    return {**call, "residual": (d.one(False, True) and d.special(shape)) or None}


def instance_norm(d):
    return {"use_input_stats" if name == "training" else name: value for name, value in batch_norm(d).items()}


def softmin(d):
    shape, x = d.input(1, 4)
    dim = d.draw(st.integers(-4, 4)) if d.is_odd() else d.one(-1, 0, min(1, len(shape) - d.is_strict))
    dtype = d.one(*(DTYPES if d.is_strict else ODD_DTYPES)) if d.draw(st.integers(0, 4)) == 4 else None
    kind, rows = d.one(torch.bool, d.dtype, d.wide), shape[d.draw(st.integers(0, len(shape))) :]
    return {"input": x, "dim": dim, "dtype": dtype, **({"mask": d.special(rows, 3, kind)} if d.is_strict else {})}


def softmax(d):
    call = softmin(d)
    return {**call, "scale": d.one(0.7, -1.5, 0, 1.0)} if d.is_strict else call


log_softmax = softmin


def _loss(d, shape, has_probabilities):
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


def nll_loss(d):
    shape, x = d.input(1, 4)
    return {"input": x, **_loss(d, shape, has_probabilities=False)}


def cross_entropy(d):
    shape = d.shape(1, 4)
    # Without classes the definition divides by their number.
    shape = tuple(max(n, int(d.is_strict)) for n in shape)
    loss = _loss(d, shape, d.one(False, True))
    smoothing = 1.5 if d.is_odd() else d.one(0.0, 0.1, 1.0)
    own = {"z_loss": d.one(2.0, 0.3)} if d.is_strict else {}
    return {"input": d.special(shape), **loss, "label_smoothing": smoothing, **own}


def linear_cross_entropy(d):
    is_soft, width, classes = d.one(False, True), d.draw(SIZES), d.one(1, 2, 5, 17)
    rows = d.shape(0, 2 - is_soft)
    x, matrix, bias = d.tensor((*rows, width)), d.tensor((classes, width)), d.maybe((classes,))
    # The classes of the logits of a loss are in dim 1.
    loss = _loss(d, (math.prod(rows), classes) if len(rows) > 1 else (*rows, classes), is_soft)
    if len(rows) > 1:
        loss["target"].shape = rows
    options = {"label_smoothing": d.one(0.0, 0.1), "z_loss": d.one(0.0, 0.3), "softcap": d.one(None, 0.7)}
    options |= {"shift": bool(rows) and not is_soft and d.one(False, True), "chunk_rows": d.one(None, 1, 2)}
    options |= {"ignore_index": None} if is_soft else {}
    linear = {"linear_weight": matrix, "target": loss.pop("target"), "linear_bias": bias}
    return {"input": x, **linear, **loss, **options}


def dropout(d):
    p, training = d.one((0.0, True), (1.0, True), (0.3, False), (1.5, True), (-0.5, False))
    return {"input": d.input(0, 4)[1], "p": p, "training": training}


def _attention(d, heads, key_heads):
    batch = d.one((), (2,))
    rows, keys = d.one(3, 17, 4, 2, 1, 0), d.one(4, 3, 17, 2, 1, 0)
    width, width_v = d.draw(SIZES), d.draw(SIZES)
    of_keys = (*batch, key_heads, keys)
    rows_of = {"query": (*batch, heads, rows, width), "key": (*of_keys, width), "value": (*of_keys, width_v)}
    # A huge score is all rounding, and the order of products decides which gradients beside an infinite one are NaN.
    tensors = {name: d.tensor(shape) if d.is_strict else d.special(shape, 4) for name, shape in rows_of.items()}
    return tensors, (*batch, heads, rows, keys)


def _over_pairs(d, pairs):
    return d.one(pairs, pairs[-2:], (1, pairs[-1]), (pairs[-2], 1), (pairs[-3], 1, pairs[-1]))


def scaled_dot_product_attention(d):
    heads, key_heads = d.one((1, 1), (3, 3), (4, 2))
    tensors, pairs = _attention(d, heads, key_heads)
    mask = d.tensor(_over_pairs(d, pairs), d.one(torch.bool, d.dtype)) if d.one(True, True, False) else None
    is_causal = d.one(False, True) if mask is None or d.is_odd() else False
    options = {"dropout_p": -1.0 if d.is_odd() else 0.0, "is_causal": is_causal, "scale": d.one(None, 0.5)}
    # Torch divides by the heads of key before it looks at them: without any, the process ends.
    has_heads = all(x.shape[-3:-2] != (0,) for x in tensors.values() if isinstance(x, Given))
    return {**tensors, "attn_mask": mask, **options, "enable_gqa": heads != key_heads and has_heads}


def attention(d):
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
