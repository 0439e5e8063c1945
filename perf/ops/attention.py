"""Attention.

x are the queries; with `lse` the logarithm of the sum takes part in the output, with `p` there is dropout.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import primitives as pr
from perf.calls import Call, Operands, random, randoms
from perf.ops.dropout import OFFSET, SEED, true_noise
from perf.ops.record import Op
from perf.ops.samples import Sample, sample
from perf.ops.workload import DROPOUT_P, Workload


def _scaled_dot_product_attention(
    functional: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, grouped: bool = False
) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def _attention_shape(sample: Sample, name: str) -> tuple[int, ...]:
    options, (*batch, heads, rows, width) = dict(sample.options), sample.shape
    if name == "bias":
        return tuple(options.get("bias_shape", (*batch, heads, rows, options["keys"])))
    return (*batch, options.get("key_heads", heads), options["keys"], width)


def _seen(x: Tensor, keys: int) -> Tensor:
    """A mask in which the first row sees no key."""
    rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
    return (rows + torch.arange(keys, device=x.device)) % 3 < torch.minimum(rows, torch.tensor(2))


def seen_softmax(scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The softmax and lse of scores, some hidden; a row of such alone is cut out before, as its derivative is NaN."""
    sees_some = (scores != -math.inf).any(dim, keepdim=True)
    scores = scores.masked_fill(~sees_some, 0.0)
    return scores.softmax(dim) * sees_some, scores.logsumexp(dim).where(sees_some.squeeze(dim), -math.inf)


def true_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, causal: bool, scale: float, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """O and lse by the definition."""
    k, v = (t.repeat_interleave(q.shape[-3] // max(t.shape[-3], 1), -3) for t in (k, v))
    scores = scale * q @ k.mT + (0.0 if bias is None else bias)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    weights, lse = seen_softmax(scores if mask is None else scores.masked_fill(~mask, -math.inf), -1)
    if p:
        keys = k.shape[-2]
        weights = weights * true_noise((*q.shape[:-1], -(-keys // 4) * 4), SEED, OFFSET, p).to(q.device)[..., :keys]
    return weights @ v, lse


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, causal: bool, scale: float, p: float) -> Any:
    options: dict[str, Any] = {"bias": bias, "mask": mask, "causal": causal, "scale": scale, "return_lse": True}
    noise = {"dropout_p": p, "seed": SEED, "offset": OFFSET} if p else {}
    return pr.functional.attention(q, k, v, **options, **noise)


def _of_both(
    attend: Callable[..., Any], x: Tensor, k: Tensor, v: Tensor, bias: Any, keys: int, *, lse: bool = True, **given: Any
) -> Tensor:
    """`y` by what has O and lse: O, to which lse is added where it takes part."""
    mask = _seen(x, keys) if given.get("masked") else None
    scale, p = given.get("scale", 0.7), given.get("p", 0.0)
    o, o_lse = attend(x, k, v, bias, mask, given.get("causal", False), scale, p)
    return o + o_lse.clamp(min=-5).unsqueeze(-1).to(o.dtype) if lse else o


def _formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, grouped: bool) -> Tensor:
    return true_attention(q, k, v, None, None, causal, q.shape[-1] ** -0.5)[0]


def _torch_attention(x: Tensor, k: Tensor, v: Tensor, bias: Any, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, k, v, bias, is_causal=options.get("causal", False), scale=0.7)


class Attention(Operands):
    """Operands of attention; of tangents of the results the shape matters alone: None where second order finds them."""

    MODULES: ClassVar = ("attention.attention",)
    DEFAULTS: ClassVar = {
        **dict.fromkeys(("bias", "bias_dot", "mask", "seed", "offset", "o_dot", "lse_dot")),
        **{"causal": False, "dropout_p": 0.0},
    }

    @classmethod
    def draw(
        cls, shape: Sequence[int], keys: int, dtype: torch.dtype = torch.float32, key_heads: int | None = None,
        value_width: int | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Random operands for queries [*batch, heads, rows, width], which lie as [*batch, rows, heads, width]."""
        *batch, heads, rows, width = shape
        of_keys, made = (*batch, keys, key_heads or heads), (*batch, rows, heads)
        widths = {"v": value_width or width, "o": value_width or width, "q": width, "k": width}
        names = ("q", "k", "v", "o_bar", "o_bar_dot", "q_dot", "k_dot", "v_dot")
        matrices = {
            name: random(*(of_keys if name[0] in "kv" else made), widths[name[0]], dtype=dtype, seed=seed).transpose(
                -2, -3
            )
            for seed, name in enumerate(names)
        }
        bars = randoms("lse_bar lse_bar_dot", shape[:-1], torch.promote_types(dtype, torch.float32), len(names))
        # Scores of the size that they have in models: what rounding does to probabilities grows with it.
        return cls(**matrices, **bars, **{"scale": width**-0.5, **options})

    def call(self, mode: str, output_mask: Sequence[bool] | None = None) -> Call:
        """As for all; no kernel has a cotangent of a bias that is absent or broadcast."""
        has_bars = self.bias is not None and self.bias.shape == (*self.q.shape[:-1], self.k.shape[-2])
        can_be = [has_bars or not name.startswith("bias") for name in self.results(mode)]
        output_mask = can_be if output_mask is None else [*map(operator.and_, output_mask, can_be)]
        return super().call(mode, output_mask)

    def choices(self, mode: str) -> Iterator[Call]:
        """As for all; a backward has a cotangent of o or of lse."""
        return (call for call in super().choices(mode) if mode != "bwd" or call.args[:2] != (None, None))

    def derived(self) -> dict[str, Any]:
        """The results of the forward, in the dtypes and the layout in which it gives them, and tangents where given."""
        given = {**vars(self), "bias_dot": None if self.bias is None else self.bias_dot}
        results = self.value("attention", **given)
        dots = self.value("attention_jvp", **{**given, **results})
        return {**results, "bias_dot": given["bias_dot"], **{n: x for n, x in dots.items() if given[n] is not None}}


def _operands(workload: Workload) -> Attention:
    batch, heads, tokens, _ = workload.shape
    options: dict[str, Any] = {"causal": workload.causal, "lse_bar": None, "lse_bar_dot": None}
    if workload.masked:
        bias, seed = random(1, heads, tokens, tokens, dtype=workload.torch_dtype), torch.zeros((), dtype=torch.int64)
        options |= {"bias": bias, "bias_dot": bias, "mask": random(batch, 1, tokens, tokens) > 0}
        options |= {"seed": seed, "offset": seed, "dropout_p": DROPOUT_P}
    drawn = Attention.draw(workload.shape, tokens, workload.torch_dtype, workload.key_heads or heads)
    return drawn.change(o_dot=drawn.o_bar, lse_dot=drawn.lse_bar, **options)


ATTENTION = Op(
    name="attention",
    call=_scaled_dot_product_attention,
    function=functools.partial(_of_both, _attention),
    truth=functools.partial(_of_both, true_attention),
    torch_function=_torch_attention,
    arguments=("x", "k", "v", "bias"),
    parameter_shape=_attention_shape,
    samples=(
        sample((2, 4, 5, 6), ("bias",), keys=7, key_heads=2),
        sample((2, 3, 7, 16), ("bias",), "transposed", keys=7, causal=True, lse=False),
        sample((1, 2, 6, 8), (), "sliced", keys=9, causal=True, bias_shape=(1, 1, 6, 9)),
        sample((2, 2, 5, 4), (), "channels_last", keys=6, masked=True, lse=False),
        sample((2, 2, 3, 4), (), "contiguous", True, keys=5, masked=True, p=0.4, bias_shape=(1, 2, 1, 5)),
        sample((3, 1, 9), (), "expanded", keys=3, bias_shape=(3, 1, 1), p=0.3),
        sample((2, 0, 3, 4), ("bias",), keys=3),
        sample((1, 2, 0, 4), (), keys=3),
        sample((1, 2, 3, 4), ("bias",), keys=0, lse=False),
    ),
    small=sample((1, 2, 3, 2), keys=4, key_heads=1, lse=False),
    tiny=sample((1, 2, 1), keys=2),
    large=(sample((1, 2, 70, 72), ("bias",), keys=300, key_heads=1, causal=True, scale=0.1),),
    not_kept=(),
    rounds_once=False,
    first="q",
    like_first=("k", "v"),
    num_kept=2,
    operands=_operands,
    formula=_formula,
    options=lambda workload: {"causal": workload.causal, "grouped": workload.key_heads > 0},
    passes={},
    products={
        **{"forward": 2, "backward": 7, "jvp": 2 + 5, "forward_backward": 2 + 7},
        **{"hvp": 2 + 5 + 7 + 15, "double_backward": 20, "backward_of_jvp": 7 + 18},
    },
    num_params=2,
)

# Attention by its other options, for the tests in which these can go wrong by themselves.
_MASKED: dict[str, Any] = {"masked": True, "p": 0.4, "key_heads": 1}
MASKED_ATTENTION = dataclasses.replace(
    ATTENTION,
    small=sample((1, 2, 3, 2), keys=4, bias_shape=(1, 1, 1, 4), **_MASKED),
    tiny=sample((2, 2, 1), keys=2, bias_shape=(1, 1, 2), **_MASKED),
)
CAUSAL_ATTENTION = dataclasses.replace(
    ATTENTION,
    small=sample((1, 2, 3, 2), ("bias",), keys=3, key_heads=1, causal=True),
    tiny=sample((2, 2, 1), ("bias",), keys=2, key_heads=1, causal=True),
)
