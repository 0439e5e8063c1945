"""One record per op. Every generic test runs over `CASES`: a new op gets all of them by adding its record here.

Names and order tie a record to its primitives: the outputs of the backward primitive are the cotangents of the
differentiable arguments in their order, and the jvp primitive takes the tangent of an argument `x` as `x_dot`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import primitives as pr
from primitives.ops.dropout import dropout_p
from tests.op_case import OpCase, Sample
from tests.op_case import make_options as _options
from tests.op_case import make_samples as _samples
from tests.philox_truth import true_noise

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-5
MOMENTUM = 0.3


# Layer norm.


def _layer_norm(functional: Any, x: Tensor, weight: Any, bias: Any, norm_ndim: int) -> Tensor:
    return functional.layer_norm(x, x.shape[x.dim() - norm_ndim :], weight, bias, EPS)


def _true_layer_norm(x: Tensor, weight: Any, bias: Any, norm_ndim: int) -> Tensor:
    axes = tuple(range(-norm_ndim, 0))
    centered = x - x.mean(axes, keepdim=True)
    y = centered / (centered.square().mean(axes, keepdim=True) + EPS).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


_ONE_AXIS = _options(norm_ndim=1)
LAYER_NORM = OpCase(
    name="layer_norm",
    function=functools.partial(_layer_norm, pr.functional),
    truth=_true_layer_norm,
    torch_function=functools.partial(_layer_norm, F),
    arguments=("x", "weight", "bias"),
    differentiable=("x", "weight", "bias"),
    parameter_shape=lambda sample, name: sample.shape[-dict(sample.options)["norm_ndim"] :],
    samples=_samples(
        shapes=[
            ((13, 31), _ONE_AXIS),
            ((0, 5), _ONE_AXIS),
            ((1, 1), _ONE_AXIS),
            ((3, 257), _ONE_AXIS),
            ((2, 2, 5, 4), _options(norm_ndim=2)),
            ((2, 7), _options(norm_ndim=2)),
            ((9,), _ONE_AXIS),
        ],
        absent=[(), ("bias",), ("weight",), ("weight", "bias")],
        layouts=["contiguous", "transposed", "sliced", "expanded"],
        constant_when_expanded=lambda shape: len(shape) == 1,
    ),
    small=Sample((2, 3, 4), _ONE_AXIS),
    tiny=Sample((1, 3), _ONE_AXIS),
    large=(Sample((3, 8195), _ONE_AXIS), Sample((17_000, 9), _ONE_AXIS), Sample((5, 16_500), _ONE_AXIS)),
    not_kept=("bias", "y"),
)


# Batch norm in training.


def _batch_norm(x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any) -> tuple:
    return pr.functional.pure_batch_norm(x, running_mean, running_var, weight, bias, True, MOMENTUM, EPS)


def _per_channel(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(1, -1, *[1] * (x.dim() - 2))


def _true_batch_norm(x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any) -> tuple:
    axes = (0, *range(2, x.dim()))
    mean = x.mean(axes)
    centered = x - _per_channel(mean, x)
    variance = centered.square().mean(axes)
    y = centered / _per_channel((variance + EPS).sqrt(), x)
    y = y if weight is None else y * _per_channel(weight, x)
    y = y if bias is None else y + _per_channel(bias, x)
    if running_mean is None:
        return (y,)
    count = x.numel() // max(x.shape[1], 1)
    if count == 0:
        return y, running_mean, running_var
    unbiased = variance * count / (count - 1)
    mixed = ((1 - MOMENTUM) * old + MOMENTUM * new for old, new in ((running_mean, mean), (running_var, unbiased)))
    return y, *mixed


def _written_batch_norm(
    functional: Any, training: bool, x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any
) -> Tensor:
    running = [None if value is None else value.clone() for value in (running_mean, running_var)]
    return functional.batch_norm(x, *running, weight, bias, training, MOMENTUM, EPS)


_CHANNEL_ABSENT = [(), ("bias",), ("weight",), ("weight", "bias")]
_CHANNEL_LAYOUTS = ["contiguous", "channels_last", "transposed", "sliced", "expanded"]
_CHANNEL_SHAPES = [
    ((3, 2, 3, 5), ()),
    ((0, 3, 2), ()),
    ((2, 1, 1, 2), ()),
    ((13, 5), ()),
    ((2, 3, 131), ()),
    ((2, 3, 2, 2, 3), ()),
]


# Of each channel more values than any kernel adds up at once, in each layout.
_LARGE_CHANNELS = (
    Sample((2, 3, 17_000)),
    Sample((33_000, 5)),
    Sample((3, 9, 64, 90), layout="channels_last"),
)
_NO_RUNNING = ("running_mean", "running_var")
BATCH_NORM = OpCase(
    name="batch_norm",
    function=_batch_norm,
    truth=_true_batch_norm,
    torch_function=functools.partial(_written_batch_norm, F, True),
    arguments=("x", "weight", "bias", "running_mean", "running_var"),
    differentiable=("x", "weight", "bias"),
    parameter_shape=lambda sample, name: (sample.shape[1],),
    samples=_samples(
        _CHANNEL_SHAPES,
        [*_CHANNEL_ABSENT, _NO_RUNNING, ("bias", *_NO_RUNNING)],
        _CHANNEL_LAYOUTS,
        constant_when_expanded=lambda shape: len(shape) == 2,
    ),
    small=Sample((3, 2, 2)),
    tiny=Sample((3, 1), absent=_NO_RUNNING),
    large=_LARGE_CHANNELS,
    not_kept=("bias", "y", "running_mean", "running_var"),
    positive=("running_var",),
)


# Batch norm in evaluation.


def _true_batch_norm_eval(x: Tensor, weight: Any, bias: Any, running_mean: Tensor, running_var: Tensor) -> Tensor:
    y = (x - _per_channel(running_mean, x)) / _per_channel((running_var + EPS).sqrt(), x)
    y = y if weight is None else y * _per_channel(weight, x)
    return y if bias is None else y + _per_channel(bias, x)


BATCH_NORM_EVAL = OpCase(
    name="batch_norm_eval",
    function=functools.partial(_written_batch_norm, pr.functional, False),
    truth=_true_batch_norm_eval,
    torch_function=functools.partial(_written_batch_norm, F, False),
    arguments=("x", "weight", "bias", "running_mean", "running_var"),
    differentiable=("x", "weight", "bias", "running_mean", "running_var"),
    parameter_shape=lambda sample, name: (sample.shape[1],),
    samples=_samples([*_CHANNEL_SHAPES, ((1, 1), ())], _CHANNEL_ABSENT, _CHANNEL_LAYOUTS),
    small=Sample((2, 2, 2)),
    tiny=Sample((2, 1)),
    large=_LARGE_CHANNELS,
    not_kept=("bias", "y"),
    positive=("running_var",),
)


# Log-softmax.


def _true_log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    # dtype= means a cast before the operation: a narrower one rounds x.
    x = x if dtype is None else x.to(dtype).double()
    return x - x.exp().sum(dim, keepdim=True).log()


LOG_SOFTMAX = OpCase(
    name="log_softmax",
    function=pr.functional.log_softmax,
    truth=_true_log_softmax,
    torch_function=F.log_softmax,
    arguments=("x",),
    differentiable=("x",),
    parameter_shape=lambda sample, name: (),
    samples=_samples(
        shapes=[
            ((13, 31), _options(dim=0)),
            ((0, 5), _options(dim=1)),
            ((5, 0), _options(dim=0)),
            ((), _options(dim=0)),
            ((1, 1), _options(dim=-1)),
            ((3, 257), _options(dim=1)),
            ((2, 5, 3, 4), _options(dim=1)),
            ((2, 7), _options(dim=-1, dtype=torch.float32)),
            ((7, 2), _options(dim=0, dtype=torch.float16)),
            ((4, 3), _options(dim=0, dtype=torch.float64)),
            ((9,), _options(dim=0)),
        ],
        absent=[()],
        layouts=["contiguous", "transposed", "sliced", "expanded"],
    ),
    small=Sample((2, 3, 2), _options(dim=1)),
    tiny=Sample((1, 3), _options(dim=1)),
    large=(
        Sample((3, 8195), _options(dim=1)),
        Sample((3, 66_000), _options(dim=1)),
        Sample((8200, 17), _options(dim=0)),
    ),
    not_kept=("x",),
    rounds_between=True,
)

# Dropout, for a seed and an offset with more than 32 bits each.

_SEED, _OFFSET = -(2**40) + 12345, 2**33 + 7


def _dropout(x: Tensor, p: float) -> Tensor:
    return dropout_p(x, torch.tensor(_SEED, device=x.device), torch.tensor(_OFFSET, device=x.device), p, 0)


def _true_dropout(x: Tensor, p: float) -> Tensor:
    return x * true_noise(tuple(x.shape), _SEED, _OFFSET, p).to(x.device, x.dtype)


DROPOUT = OpCase(
    name="dropout",
    is_linear=True,
    num_kept=0,
    function=_dropout,
    truth=_true_dropout,
    torch_function=_true_dropout,
    arguments=("x",),
    differentiable=("x",),
    parameter_shape=lambda sample, name: (),
    samples=_samples(
        shapes=[
            ((5, 13), _options(p=0.1)),
            ((0, 5), _options(p=0.5)),
            ((), _options(p=0.3)),
            ((2, 8, 3, 4), _options(p=0.9)),
            ((9,), _options(p=1.0)),
        ],
        absent=[()],
        layouts=["contiguous", "transposed", "expanded", "channels_last"],
    ),
    small=Sample((2, 3, 4), _options(p=0.4)),
    tiny=Sample((1, 3), _options(p=0.4)),
    large=(Sample((3, 4099), _options(p=0.4)),),
    not_kept=("x", "y"),
)

# Attention. x are the queries; with `lse` the logarithm of the sum takes part in the output, with `p` there is dropout.


def _attention_shape(sample: Sample, name: str) -> tuple[int, ...]:
    options, (*batch, heads, rows, width) = dict(sample.options), sample.shape
    if name == "bias":
        return tuple(options.get("bias_shape", (*batch, heads, rows, options["keys"])))
    return (*batch, options.get("key_heads", heads), options["keys"], width)


def _seen(x: Tensor, keys: int, masked: bool) -> Tensor | None:
    """A mask in which the first row sees no key."""
    if not masked:
        return None
    rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
    return (rows + torch.arange(keys, device=x.device)) % 3 < torch.minimum(rows, torch.tensor(2))


def _attention(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    keys: int,
    causal: bool = False,
    masked: bool = False,
    p: float = 0.0,
    lse: bool = True,
    scale: float = 0.7,
    **shape: Any,
) -> Tensor:
    noise = {"dropout_p": p, "seed": _SEED, "offset": _OFFSET} if p else {}
    mask = _seen(x, keys, masked)
    o, o_lse = pr.functional.attention(
        x, k, v, bias=bias, mask=mask, causal=causal, scale=scale, return_lse=True, **noise
    )
    return o + o_lse.clamp(min=-5).unsqueeze(-1).to(o.dtype) if lse else o


def _true_attention(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    keys: int,
    causal: bool = False,
    masked: bool = False,
    p: float = 0.0,
    lse: bool = True,
    scale: float = 0.7,
    **shape: Any,
) -> Tensor:
    group, rows = x.shape[-3] // max(k.shape[-3], 1), x.shape[-2]
    k, v = (t.repeat_interleave(group, -3) for t in (k, v))
    scores = scale * x @ k.mT if bias is None else scale * x @ k.mT + bias
    seen = torch.ones(rows, keys, dtype=torch.bool, device=x.device)
    seen = seen.tril() if causal else _seen(x, keys, masked) if masked else seen
    # A row that sees nothing is cut out before the softmax, whose derivative there is NaN.
    sees_some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & sees_some, -math.inf)
    weights = scores.softmax(-1) * sees_some
    if p:
        blocks = -(-keys // 4) * 4
        noise = true_noise((*x.shape[:-1], blocks), _SEED, _OFFSET, p).to(x.device)[..., :keys]
        weights = weights * noise
    o, o_lse = weights @ v, scores.logsumexp(-1, keepdim=True).where(sees_some, -math.inf)
    return o + o_lse.clamp(min=-5) if lse else o


def _torch_attention(x: Tensor, k: Tensor, v: Tensor, bias: Any, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, k, v, bias, is_causal=options.get("causal", False), scale=0.7)


ATTENTION = OpCase(
    name="attention",
    function=_attention,
    truth=_true_attention,
    torch_function=_torch_attention,
    arguments=("x", "k", "v", "bias"),
    differentiable=("x", "k", "v", "bias"),
    parameter_shape=_attention_shape,
    samples=(
        Sample((2, 4, 5, 6), _options(keys=7, key_heads=2), ("bias",)),
        Sample((2, 3, 7, 16), _options(keys=7, causal=True, lse=False), ("bias",), "transposed"),
        Sample((1, 2, 6, 8), _options(keys=9, causal=True, bias_shape=(1, 1, 6, 9)), (), "sliced"),
        Sample((2, 2, 5, 4), _options(keys=6, masked=True, lse=False), (), "channels_last"),
        Sample((2, 2, 3, 4), _options(keys=5, masked=True, p=0.4, bias_shape=(1, 2, 1, 5)), (), "contiguous", True),
        Sample((3, 1, 9), _options(keys=3, bias_shape=(3, 1, 1), p=0.3), (), "expanded"),
        Sample((2, 0, 3, 4), _options(keys=3), ("bias",)),
        Sample((1, 2, 0, 4), _options(keys=3), ()),
        Sample((1, 2, 3, 4), _options(keys=0, lse=False), ("bias",)),
    ),
    small=Sample((1, 2, 3, 2), _options(keys=4, key_heads=1, lse=False)),
    tiny=Sample((1, 2, 1), _options(keys=2)),
    large=(Sample((1, 2, 70, 72), _options(keys=300, key_heads=1, causal=True, scale=0.1), ("bias",)),),
    not_kept=(),
    rounds_once=False,
    first="q",
    like_first=("k", "v"),
    num_kept=2,
)

# Attention by its other options, for the tests in which these can go wrong by themselves.
_MASKED = {"masked": True, "p": 0.4, "key_heads": 1}
MASKED_ATTENTION = dataclasses.replace(
    ATTENTION,
    small=Sample((1, 2, 3, 2), _options(keys=4, bias_shape=(1, 1, 1, 4), **_MASKED)),
    tiny=Sample((2, 2, 1), _options(keys=2, bias_shape=(1, 1, 2), **_MASKED)),
)
CAUSAL_ATTENTION = dataclasses.replace(
    ATTENTION,
    small=Sample((1, 2, 3, 2), _options(keys=3, key_heads=1, causal=True), ("bias",)),
    tiny=Sample((2, 2, 1), _options(keys=2, key_heads=1, causal=True), ("bias",)),
)

CASES = (LAYER_NORM, BATCH_NORM, BATCH_NORM_EVAL, LOG_SOFTMAX, DROPOUT, ATTENTION)
