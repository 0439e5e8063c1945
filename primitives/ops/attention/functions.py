"""Attention over tensors of any leading axes, and pytrees of them: `functional.attention`, and torch's own name."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as of_torch

from primitives._core.trees.leaves import map_tensors
from primitives._core.typing import Prefix, PyTree
from primitives._repair.nodes import recorded
from primitives._repair.plain import is_plain_on_cpu
from primitives.ops.attention import checks
from primitives.ops.attention.attention import attention_p
from primitives.ops.dropout.philox import MAX_SEED

MIN_AXES = 3
# Axes of what torch's fused kernel for the CPU takes.
_FLASH_AXES = 4


@overload
def attention(
    q: PyTree, k: Prefix, v: Prefix, *, bias: Prefix | None = None, mask: Prefix | None = None, causal: bool = False,
    scale: float | None = None, dropout_p: float = 0.0, seed: Prefix | int | None = None,
    offset: Prefix | int | None = None, return_lse: Literal[False] = False, namespace: str = "",
) -> PyTree: ...  # fmt: skip


@overload
def attention(
    q: PyTree, k: Prefix, v: Prefix, *, bias: Prefix | None = None, mask: Prefix | None = None, causal: bool = False,
    scale: float | None = None, dropout_p: float = 0.0, seed: Prefix | int | None = None,
    offset: Prefix | int | None = None, return_lse: Literal[True], namespace: str = "",
) -> tuple[PyTree, PyTree]: ...  # fmt: skip


def attention(
    q: PyTree,
    k: Prefix,
    v: Prefix,
    *,
    bias: Prefix | None = None,
    mask: Prefix | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Prefix | int | None = None,
    offset: Prefix | int | None = None,
    return_lse: bool = False,
    namespace: str = "",
) -> PyTree | tuple[PyTree, PyTree]:
    r"""Attention of the rows of `q` to those of `k`, whose weights average the rows of `v`.

    $$ S = s \, q k^T + b, \qquad \operatorname{lse} = \log \sum \exp(S), \qquad
       o = \exp(S - \operatorname{lse}) \, v $$

    The sum runs over the keys. The weights are never stored: memory grows with the number of rows, not with its square,
    in forward mode, in reverse mode, and in their derivatives of every order.

    Args:
        q: Queries, shape `[*batch, H, N, D]` (or `[N, D]`), float16, bfloat16, float32 or float64, any strides; or a
            pytree of such tensors, which is mapped leaf by leaf.
        k: Keys, shape `[*batch, K, M, D]`, where K divides H: head `h` of `q` uses head `h // (H / K)`. Batch axes are
            broadcast. For a pytree `q`, a tensor or a tree prefix of it, as all arguments below that are tensors.
        v: Values, shape `[*batch, K, M, E]`.
        bias: Added to the scores `S`, broadcast to `[*batch, H, N, M]`, in the dtype of `q` or float32. `-inf` hides a
            key. `None` means 0.
        mask: Whether a row sees a key, bool, broadcast likewise. `None` means that every row sees every key.
        causal: Whether row i sees the keys `j <= i` alone.
        scale: The factor `s`. `None` means `D ** -0.5`.
        dropout_p: Probability with which a weight is dropped; the others are divided by `1 - dropout_p`.
        seed: Key of the random stream that dropout draws from: an int, or an int64 tensor of shape `[]` on the device
            of `q`. One for several leaves gives them all the same stream. `None` draws one for each leaf from torch's
            generator of the device, so that `torch.manual_seed`, activation checkpointing and vmap's `randomness`
            mean what they mean for any random operation.
        offset: Block of the stream at which to begin, like `seed`. `None` means 0.
        return_lse: Whether to return `lse` too.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `o`, shape `[*batch, H, N, E]`, in the dtype of `q`, laid out in memory as `[*batch, N, H, E]`; with
        `return_lse` the pair of `o` and `lse`, shape `[*batch, H, N]`, float32, or float64 for float64 `q`. Pytrees for
        a pytree.

    Raises:
        ShapeError: If shapes do not go together, `mask` is given to causal attention, or `offset` without `seed`.
        DtypeError: If a dtype or type is not one of the above, or a tensor is nested or sparse.
        DeviceError: If the tensors are on different devices.
        ValueError: If `dropout_p` is not in `[0, 1]`.
        TreeError: If an argument is not a prefix of the tree `q`.

    Derivatives:
        Forward and reverse mode, to any order, of `o` and `lse`, in `q`, `k`, `v` and `bias`. Reverse mode keeps these,
        `o` and `lse`.

    Numerics:
        Accumulated in float32, in float64 for float64 `q`. A row that sees no key has `o = 0`, `lse = -inf` and
        derivatives of zero.

    Example:
        >>> import torch, primitives as pr
        >>> q = k = torch.zeros(2, 1)
        >>> pr.functional.attention(q, k, torch.tensor([[1.0], [3.0]]), causal=True)
        tensor([[1.],
                [2.]])

    References:
        Vaswani et al., "Attention is all you need", NeurIPS 2017; Dao et al., "FlashAttention", NeurIPS 2022.
    """
    checks.options("attention", mask=mask, causal=("causal", causal), scale=scale, dropout_p=dropout_p)
    checks.stream("attention", seed, offset)
    names = ("k", "v", "bias", "mask")

    check = functools.partial(checks.attention, "attention", names=names, shares_heads=True)

    def compute(
        q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, own_seed: Any, own_offset: Any
    ) -> tuple[Tensor, Tensor]:
        if dropout_p == 0.0:
            own_seed = own_offset = None
        else:
            own_seed = _drawn(q) if own_seed is None and not isinstance(seed, int) else _number(seed, own_seed, q)
            own_offset = _number(offset, own_offset, q)
        return attention_of_tensors(q, k, v, bias, mask, own_seed, own_offset, causal, scale, dropout_p)

    stream = {name: None if isinstance(x, int) else x for name, x in (("seed", seed), ("offset", offset))}
    prefixes = {"k": k, "v": v, "bias": bias, "mask": mask, **stream}
    o, lse = map_tensors("attention", check, compute, q, prefixes, namespace=namespace, num_results=2, root="q")
    return (o, lse) if return_lse else o


def _drawn(like: Tensor) -> Tensor:
    """A seed, from torch's generator of the device of `like`."""
    return torch.randint(MAX_SEED, (), device=like.device)


def _number(given: Any, own: Tensor | None, like: Tensor) -> Tensor | None:
    """`given` where it is an int, on the device of `like`, for which no device waits; else what a leaf has of it."""
    return torch.full((), given, dtype=torch.int64, device=like.device) if isinstance(given, int) else own


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, right at every order of derivative: see `attention`.

    Args:
        query: Shape `[*batch, H, N, D]`.
        key: Shape `[*batch, H, M, D]`; with `enable_gqa`, of fewer heads.
        value: Shape `[*batch, H, M, E]`, of as many heads as `key`.
        attn_mask: Broadcast to `[*batch, H, N, M]`: of dtype bool, true where a row sees a key; else added to the
            scores, in the dtype of `query` or float32.
        dropout_p: Probability with which a weight is dropped. As torch's, it holds in evaluation too.
        is_causal: Whether row i sees the keys `j <= i` alone.
        scale: Factor of the scores; `None` means `D ** -0.5`.
        enable_gqa: Whether heads of `query` share those of `key` and `value`, whose number must divide theirs.

    Returns:
        Shape `[*batch, H, N, E]`, laid out in memory as `[*batch, N, H, E]`; without a batch, as it says.

    Raises:
        ShapeError, DtypeError, DeviceError, ValueError: As `attention` does.

    Derivatives:
        As for `attention`.

    Example:
        >>> import torch, primitives as pr
        >>> x = torch.zeros(1, 2, 3, 4)
        >>> pr.functional.scaled_dot_product_attention(x, x, x, is_causal=True).shape
        torch.Size([1, 2, 3, 4])
    """
    if attn_mask is None and not dropout_p and not enable_gqa and _is_torchs_attention(query, key, value):
        return recorded(of_torch.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale))
    name, labels = "scaled_dot_product_attention", ("key", "value", "attn_mask", "attn_mask")
    if checks.is_causal_bias(attn_mask):
        attn_mask, is_causal = _without_causal_bias(attn_mask, query, key, is_causal)
    is_mask = isinstance(attn_mask, torch.Tensor) and attn_mask.dtype == torch.bool
    bias, mask = (None, attn_mask) if is_mask else (attn_mask, None)
    checks.options(name, mask=attn_mask, causal=("is_causal", is_causal), scale=scale, dropout_p=dropout_p)
    checks.flag(name, "enable_gqa", enable_gqa)
    checks.attention(name, "query", query, key, value, bias, mask, labels, shares_heads=enable_gqa)
    seed = _drawn(query) if dropout_p > 0.0 else None
    return attention_of_tensors(query, key, value, bias, mask, seed, None, is_causal, scale, dropout_p)[0]


def _is_torchs_attention(q: Any, k: Any, v: Any) -> bool:
    """Whether torch's kernel for the CPU computes this, whose node's backward operator is repaired."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return False
    is_alike = q.dim() == k.dim() == v.dim() == _FLASH_AXES and q.dtype == k.dtype == v.dtype
    shapes_fit = is_alike and q.shape[:2] == k.shape[:2] and k.shape == v.shape and q.shape[3] == k.shape[3]
    return shapes_fit and q.numel() > 0 and k.numel() > 0 and is_plain_on_cpu(q, k, v)


def _without_causal_bias(bias: Any, query: Any, key: Any, is_causal: bool) -> tuple[Tensor | None, bool]:
    """A mask and `is_causal` in the place of torch's stand-in for a causal mask, whose elements are never written."""
    rows, keys = bias.seq_len_q, bias.seq_len_kv
    is_lower_right = bias.variant.name == "LOWER_RIGHT"
    if not is_causal and (rows == keys or not is_lower_right) and (rows, keys) == (query.shape[-2], key.shape[-2]):
        return None, True
    seen = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
    return seen.tril(keys - rows if is_lower_right else 0), is_causal


def attention_of_tensors(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, seed: Tensor | None,
    offset: Tensor | None, causal: bool, scale: float | None, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O and lse of tensors that were checked, whose axes before the rows are broadcast; arguments are `attention`'s.

    Batch and heads may be missing, and without a seed nothing is dropped.
    """
    most = max(q.dim(), k.dim(), v.dim())
    num_axes = max(most, MIN_AXES)
    if q.dim() == k.dim() == v.dim() == MIN_AXES and q.shape[0] == k.shape[0] == v.shape[0]:
        # A batch of one head each, whose result is contiguous, as torch's.
        num_axes += 1
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        bias, mask = (x if x is None or x.dim() < MIN_AXES else x.unsqueeze(1) for x in (bias, mask))
    if q.dim() != num_axes or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        q, k, v = _broadcast(q, k, v, num_axes)
    bias, mask = (None if x is None else _with_axes(x, num_axes) for x in (bias, mask))
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    o, lse = attention_p(q, k, v, bias, mask, seed, offset, float(scale), causal, float(dropout_p))
    return (o, lse) if most == num_axes else (o.squeeze(-3), lse.squeeze(-2))


def _broadcast(q: Tensor, k: Tensor, v: Tensor, num_axes: int) -> tuple[Tensor, ...]:
    """Q, k and v with `num_axes` axes, the same batch, and heads of k and v that the heads of q share evenly."""
    q, k, v = (_with_axes(x, num_axes) for x in (q, k, v))
    heads = [x.shape[-3] for x in (q, k, v)]
    if heads[1] != heads[2]:
        most_heads = heads[0] if heads[0] != 1 else torch.broadcast_shapes(heads[1:2], heads[2:])[0]
        k, v = (_with_heads(x, most_heads) for x in (k, v))
    if heads[0] == 1:
        q = _with_heads(q, k.shape[-3])
    if q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        return q, k, v
    lead = torch.broadcast_shapes(*[x.shape[:-3] for x in (q, k, v)])
    return tuple(x.expand(*lead, *x.shape[-3:]) for x in (q, k, v))


def _with_axes(x: Tensor, num_axes: int) -> Tensor:
    """X with first axes of 1 where it has fewer than `num_axes`."""
    return x if x.dim() == num_axes else x.reshape(*[1] * (num_axes - x.dim()), *x.shape)


def _with_heads(x: Tensor, heads: int) -> Tensor:
    """X [*, K, rows, width] with every head as often as it takes to be `heads`."""
    count = x.shape[-3]
    if count == 1:
        return x.expand(*x.shape[:-3], heads, *x.shape[-2:])
    return x if count == heads else x.repeat_interleave(heads // count, -3)
