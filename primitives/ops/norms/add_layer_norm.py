r"""Layer norm of a residual stream to which a layer's output is added, after dropout; and RMS norm, not `centered`.

    s = residual + x * noise,      y = norm(s)

noise is that of dropout with probability p (see `dropout`), or 1 where `seed` is None; norm is that of `layer_norm`, of
s as it was rounded. s is the residual of the next layer. The sum is linear, so with P, x_hat and the statistics of s

    jvp   s_dot = residual_dot + x_dot * noise,      y_dot = P(s_dot) * weight + x_hat * weight_dot + bias_dot
    vjp   residual_bar = P(y_bar * weight) + s_bar,      x_bar = residual_bar * noise

and weight_bar and bias_bar are those of layer norm. All that is not linear is layer norm's: derivatives of second
order are `layer_norm_double_backward_p` and `layer_norm_bwd_jvp_p` between sums, and the references call layer norm's
primitives. Of x and residual nothing is kept.

Shapes: x, residual, y and s are [*batch, *rest, *norm], all else as in `layer_norm`; seed is [*batch], int64. s has the
dtype of the residual, which may be wider than that of x; y has `y_dtype`, that of x.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive, value_and_jvp
from primitives._core.trees.leaves import map_tensors
from primitives._core.typing import Prefix, PyTree
from primitives.ops import arguments
from primitives.ops.axes import Axes, def_axes
from primitives.ops.dropout.dropout import dropout_p
from primitives.ops.dropout.philox import MAX_SEED
from primitives.ops.norms.layer_norm import (
    NormOptions,
    layer_norm_bwd_jvp_p,
    layer_norm_bwd_p,
    layer_norm_double_backward_p,
    layer_norm_jvp_p,
    layer_norm_p,
    options_of,
    rms_options,
    rows,
)
from primitives.ops.rules import (
    accumulation_dtype,
    bind_family,
    cast_to_float32,
    define,
    empty_output,
    first_order,
    schema_of,
    second_order,
)

add_layer_norm_p = Primitive(
    "add_layer_norm",
    "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, float p, ScalarType y_dtype,"
    f" {schema_of(NormOptions)})"
    " -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)",
    residuals=("s", "weight", "mean", "rstd", "seed"),
    statistics=("mean", "rstd"),
    recomputable=True,
)
add_layer_norm_bwd_p = Primitive(
    "add_layer_norm_bwd",
    "(Tensor y_bar, Tensor? s_bar, Tensor s, Tensor? weight, Tensor mean, Tensor rstd, Tensor? seed, float p,"
    f" {schema_of(NormOptions)}, bool[] output_mask)"
    " -> (Tensor x_bar, Tensor residual_bar, Tensor weight_bar, Tensor bias_bar)",
    residuals=("y_bar", "s", "weight", "mean", "rstd", "seed"),
    cached=("mean", "rstd"),
    decomposable=True,
)
add_layer_norm_jvp_p = Primitive(
    "add_layer_norm_jvp",
    "(Tensor s, Tensor? weight, Tensor mean, Tensor rstd, Tensor? x_dot, Tensor? residual_dot, Tensor? weight_dot,"
    f" Tensor? bias_dot, Tensor? seed, float p, ScalarType y_dtype, {schema_of(NormOptions)})"
    " -> (Tensor y_dot, Tensor s_dot)",
    residuals=("s", "weight", "mean", "rstd", "weight_dot", "bias_dot", "seed", "s_dot"),
    cached=("mean", "rstd"),
    decomposable=True,
)
add_layer_norm_fwd_jvp_p = value_and_jvp(add_layer_norm_p, add_layer_norm_jvp_p)


def _in(dtype: torch.dtype, t: Any) -> Any:
    return None if t is None else t.to(dtype)


def _noisy(v: Tensor, seed: Tensor | None, p: float, batch_ndim: int) -> Tensor:
    return v if seed is None else dropout_p(v, seed, None, p, batch_ndim)


def _added(
    residual: Tensor | None, x: Tensor | None, seed: Tensor | None, p: float, batch_ndim: int, like: Tensor
) -> Tensor:
    """`residual + x * noise`, new and contiguous, in the dtype of `like`; what is None is zero."""
    acc = accumulation_dtype(like.dtype)
    terms = [] if residual is None else [residual.to(acc)]
    if x is not None:
        terms.append(_noisy(x.to(acc), seed, p, batch_ndim))
    if not terms:
        return like.new_zeros(like.shape)
    if len(terms) > 1:
        return (terms[0] + terms[1]).to(like.dtype).contiguous()
    return terms[0].to(like.dtype, copy=True, memory_format=torch.contiguous_format)


def _value(_: tuple, c: Any) -> tuple[Tensor, ...]:
    s, options = _added(c.residual, c.x, c.seed, c.p, c.batch_ndim, c.residual), options_of(c)
    if not c.rounded or s.dtype == c.y_dtype:
        y, mean, rstd = layer_norm_p(s, c.weight, c.bias, *options)
        return y.to(c.y_dtype), s, mean, rstd
    # Layer norm rounds x_hat to the dtype of s.
    norm = rows(s, NormOptions(*options))
    y = norm.scaled(norm.x_hat.to(c.y_dtype).to(norm.dtype), c.weight)
    y = y if c.bias is None else y + norm.param(c.bias)
    return y.to(c.y_dtype), s, norm.statistic(norm.mean), norm.statistic(norm.rstd)


def _cotangents(_: tuple, c: Any) -> tuple[Tensor, ...]:
    want_x, want_residual, *want_params = c.output_mask
    # In the dtype of sums, since what layer norm gives is added to before it is rounded.
    acc = accumulation_dtype(c.s.dtype)
    given = (c.y_bar.to(acc), c.s.to(acc), _in(acc, c.weight), c.mean, c.rstd)
    bar, *param_bars = layer_norm_bwd_p(*given, *options_of(c), (want_x or want_residual, *want_params))
    x_bar = residual_bar = empty_output(c.s)
    if want_residual:
        residual_bar = _added(c.s_bar, bar, None, c.p, c.batch_ndim, c.s)
    if want_x:
        bar = bar if c.s_bar is None else bar + c.s_bar.to(acc)
        x_bar = _added(None, bar, c.seed, c.p, c.batch_ndim, c.y_bar)
    dtype = acc if c.weight is None else c.weight.dtype
    pairs = zip(param_bars, want_params, strict=True)
    return x_bar, residual_bar, *(bar.to(dtype) if want else empty_output(c.s) for bar, want in pairs)


def _tangents(_: tuple, c: Any) -> tuple[Tensor, Tensor]:
    acc = accumulation_dtype(c.s.dtype)
    wide, params = c.s.to(acc), [_in(acc, param) for param in (c.weight, c.weight_dot, c.bias_dot)]
    moves = c.x_dot is not None or c.residual_dot is not None
    # The tangent of y takes that of s before it is rounded.
    dot = _added(c.residual_dot, c.x_dot, c.seed, c.p, c.batch_ndim, wide) if moves else None
    s_dot = c.s.new_zeros(c.s.shape) if dot is None else dot.to(c.s.dtype, copy=True)
    if not (moves or params[1:] != [None, None]):
        return c.s.new_zeros(c.s.shape, dtype=c.y_dtype), s_dot
    y_dot = layer_norm_jvp_p(wide, params[0], c.mean, c.rstd, dot, *params[1:], *options_of(c))
    return y_dot.to(c.y_dtype), s_dot


_of_sum = {add_layer_norm_p: _value, add_layer_norm_bwd_p: _cotangents, add_layer_norm_jvp_p: _tangents}
for _op, _formula in _of_sum.items():
    define(_op, _formula, lambda _: ())

# Triton's kernels; on the CPU those of layer norm and sums.
bind_family("norms.add_layer_norm", "add_layer_norm", *_of_sum, add_layer_norm_fwd_jvp_p)
_AXES = "x y s residual: *batch *rest *norm, weight bias: *batch *norm, mean rstd: *batch *rest, seed: *batch"
# The noise of an element follows from its place in the whole.
def_axes(lambda given: Axes(_AXES, "batch rest" if given["seed"] is None else ""), *_of_sum, add_layer_norm_fwd_jvp_p)
first_order(add_layer_norm_p, add_layer_norm_bwd_p, add_layer_norm_jvp_p)


@add_layer_norm_p.def_vjp
def _add_layer_norm_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor | None]:
    r, c = residuals, cotangents
    if c.y is None:
        return {"x": _noisy(c.s, r.seed, r.p, r.batch_ndim).to(r.y_dtype), "residual": c.s}
    # Without noise the two are one tensor.
    is_shared = output_mask.x and r.seed is None and r.y_dtype == r.s.dtype
    mask = (output_mask.x and not is_shared, output_mask.residual or is_shared, output_mask.weight, output_mask.bias)
    given = (c.y, c.s, r.s, r.weight, r.mean, r.rstd, r.seed, r.p)
    out = dict(zip(output_mask._fields, add_layer_norm_bwd_p(*given, *options_of(r), mask), strict=False))
    found = {**out, "x": out["residual"] if is_shared else out["x"]}
    return {name: bar for name, bar in found.items() if getattr(output_mask, name)}


# Second order. A tangent of s is what layer norm's rules take for one of x, and y_bar has the dtype of s there.


def _gradient(output_mask: Sequence[bool], c: Any) -> tuple[Tensor | None, ...]:
    """Of the pairing <y_bar, y_dot> + <s_bar, s_dot>, in what is named below."""
    want_y_bar, want_s_bar, *want_s, want_x_dot, want_residual_dot = output_mask[:6]
    noise, s_dot, s_dot_bar = (c.seed, c.p, c.batch_ndim), c.s_dot, c.s_bar
    if s_dot is None and (c.x_dot is not None or c.residual_dot is not None):
        s_dot = _added(c.residual_dot, c.x_dot, *noise, c.s)
    moves = want_x_dot or want_residual_dot
    mask = (want_y_bar, *want_s, moves, *output_mask[6:])
    out: list[Any] = [None] * len(mask)
    if c.y_bar is not None and any(mask):
        given = (_in(c.s.dtype, c.y_bar), c.s, c.weight, c.mean, c.rstd, s_dot, c.weight_dot, c.bias_dot)
        out = list(layer_norm_double_backward_p(*given, *options_of(c), mask))
        s_dot_bar = out[3] if s_dot_bar is None or not moves else s_dot_bar + out[3]
    x_dot_bar = None
    if want_x_dot and s_dot_bar is not None:
        x_dot_bar = _noisy(s_dot_bar, *noise).to(c.y_dtype)
    if c.y_bar is not None and want_y_bar:
        out[0] = out[0].to(c.y_bar.dtype)
    return out[0], s_dot if want_s_bar else None, *out[1:3], x_dot_bar, s_dot_bar, *out[4:]


def _bwd_jvp(output_mask: Sequence[bool], c: Any) -> tuple[Tensor, ...]:
    """Tangents of the cotangents of x, residual, weight and bias."""
    want_x, want_residual, *want_params = output_mask
    dots = (_in(c.s.dtype, c.y_bar_dot), c.s_dot, c.weight_dot)
    # The cotangent of s is added: where it alone moves, nothing else of the rows does.
    moves = c.s_bar_dot is None or any(dot is not None for dot in dots)
    mask = ((want_x or want_residual) and moves, *want_params)
    given = (_in(c.s.dtype, c.y_bar), c.s, c.weight, c.mean, c.rstd, *dots)
    bar_dot, *param_dots = layer_norm_bwd_jvp_p(*given, *options_of(c), mask)
    if c.s_bar_dot is not None:
        bar_dot = bar_dot + c.s_bar_dot if mask[0] else c.s_bar_dot
    x_bar_dot = residual_bar_dot = empty_output(c.s)
    if want_x:
        x_bar_dot = _noisy(bar_dot, c.seed, c.p, c.batch_ndim).to(c.y_bar.dtype)
    if want_residual:
        residual_bar_dot = bar_dot
    return x_bar_dot, residual_bar_dot, *param_dots


_EVERY = ("y_bar", "s_bar", "s", "weight", "x_dot", "residual_dot", "weight_dot", "bias_dot")
second_order(add_layer_norm_bwd_p, add_layer_norm_jvp_p, _bwd_jvp, _gradient, _EVERY)


@add_layer_norm_p.def_autocast("cuda")
def _add_layer_norm_autocast(primals: Any) -> Any:
    """As layer norm: all of it in float32."""
    primals = cast_to_float32(primals)
    return primals._replace(y_dtype=primals.x.dtype)


def add_layer_norm(
    input: PyTree,
    residual: Prefix,
    normalized_shape: Sequence[int],
    weight: Prefix | None = None,
    bias: Prefix | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    namespace: str = "",
) -> tuple[PyTree, PyTree]:
    r"""Add `input`, after dropout, to a residual stream, and normalize the sum: a transformer block's way in and out.

    $$ s = r + \operatorname{dropout}(x), \qquad y = \operatorname{LayerNorm}(s) \, w + b $$

    It is `dropout_add_layer_norm` of flash-attention with `prenorm=True`, in one pass over memory each way.

    Args:
        input: Output of a layer, of shape `[*, *normalized_shape]`, float16, bfloat16, float32 or float64, any strides;
            or a pytree of such tensors, which is mapped leaf by leaf.
        residual: The stream `r`, of the shape of `input` and its dtype, or float32 for float16 and bfloat16 `input`.
            For a pytree `input`, a tensor or a tree prefix of it.
        normalized_shape: Sizes of the normalized axes, at least one.
        weight: Scale `w`, shape `normalized_shape`, dtype of `input`, or float32 for float16 and bfloat16 `input`.
            `None` means 1. For a pytree `input`, a tensor or a tree prefix of it.
        bias: Shift `b`, like `weight`, of its dtype. `None` means 0.
        eps: Added to the variance, in the unit of `s` squared.
        dropout_p: Probability with which an element of `input` is dropped; the others are divided by `1 - dropout_p`.
        training: Whether to drop anything.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `(y, s)`: the normalized sum, with the shape, dtype and device of `input`; and the sum, the next layer's
        residual, in the dtype of `residual`. Both are contiguous; for a pytree, each in its structure.

    Raises:
        ShapeError: If `input` does not end in `normalized_shape`, `residual` has not its shape, or `weight` or `bias`
            differs from `normalized_shape`.
        DtypeError: If a dtype is not one of the above.
        DeviceError: If the tensors are on different devices.
        TreeError: If `residual`, `weight` or `bias` is not a prefix of the tree `input`.
        ValueError: If `dropout_p` is not in `[0, 1]`.
        RuntimeError: With dropout under `vmap` with `randomness="error"`, as torch raises it.

    Derivatives:
        Forward and reverse mode, to any order, in `input`, `residual`, `weight` and `bias`. Reverse mode keeps `s`,
        `weight`, two numbers per row and the seed of the noise: neither `input`, nor `residual`, nor a mask.

    Numerics:
        `s` is added up in float32 (float64 for float64 `input`) and rounded once; what is normalized is `s` as it was
        rounded, as by models that add first. Dropout draws as `dropout` does.

    Example:
        >>> import torch, primitives as pr
        >>> x, residual = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 3.0]])
        >>> pr.functional.add_layer_norm(x, residual, (2,), eps=0.0)
        (tensor([[-1.,  1.]]), tensor([[1., 5.]]))

    References:
        Dao et al., "FlashAttention", NeurIPS 2022 (whose repository has the fused operation).
    """
    shape = arguments.normalized_shape("add_layer_norm", normalized_shape)
    arguments.number("add_layer_norm", "eps", eps)
    arguments.probability("add_layer_norm", dropout_p, "dropout_p")

    check = functools.partial(arguments.add_layer_norm, "add_layer_norm", shape=shape)

    def compute(x: Tensor, residual: Tensor, weight: Any, bias: Any) -> tuple[Tensor, Tensor]:
        seed, p = _noise(x, dropout_p, training)
        options = NormOptions(len(shape), eps)
        return add_layer_norm_p(x, residual, weight, bias, seed, p, x.dtype, *options)[:2]

    prefixes = {"residual": residual, "weight": weight, "bias": bias}
    return map_tensors("add_layer_norm", check, compute, input, prefixes, namespace=namespace, num_results=2)


def add_rms_norm(
    input: PyTree,
    residual: Prefix,
    normalized_shape: Sequence[int],
    weight: Prefix | None = None,
    eps: float | None = None,
    *,
    add_one: bool = False,
    cast_first: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
    namespace: str = "",
) -> tuple[PyTree, PyTree]:
    r"""Add `input`, after dropout, to a residual stream, and take the sum's RMS norm.

    $$ s = r + \operatorname{dropout}(x), \qquad y = \frac{s}{\sqrt{\operatorname{mean}(s^2) + \varepsilon}} \, w $$

    It is `fused_add_rms_norm` of vLLM, Liger's `LigerFusedAddRMSNorm`, which return `(y, s)` too.

    Args:
        input: As for `add_layer_norm`.
        residual: Likewise.
        normalized_shape: Sizes of the normalized axes, at least one.
        weight: Scale `w`, as for `add_layer_norm`.
        eps: Added to the mean square, as for `rms_norm`: `None` means `eps` of the dtype that the mean is taken in.
        add_one: Whether the scale is `1 + weight`, as for `rms_norm`.
        cast_first: Whether the normalized sum is rounded to the dtype of `input` before it is multiplied by the weight.
        dropout_p: Probability with which an element of `input` is dropped; the others are divided by `1 - dropout_p`.
        training: Whether to drop anything.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `(y, s)`, as `add_layer_norm` does.

    Raises:
        ShapeError, DtypeError, DeviceError, TreeError, ValueError, RuntimeError: As `add_layer_norm` does.

    Derivatives:
        As for `add_layer_norm`; one number per row is kept. The rounding of `cast_first` is not differentiated.

    Numerics:
        As for `add_layer_norm`.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), (2,))
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))

    References:
        Zhang, Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, 2019.
    """
    shape = arguments.normalized_shape("add_rms_norm", normalized_shape)
    arguments.number("add_rms_norm", "eps", 0.0 if eps is None else eps)
    arguments.probability("add_rms_norm", dropout_p, "dropout_p")

    check = functools.partial(arguments.add_layer_norm, "add_rms_norm", shape=shape)

    def compute(x: Tensor, residual: Tensor, weight: Any) -> tuple[Tensor, Tensor]:
        seed, p = _noise(x, dropout_p, training)
        weight, number, rounded = rms_options(x, weight, eps, add_one, cast_first)
        options = NormOptions(len(shape), number, centered=False, rounded=rounded)
        return add_layer_norm_p(x, residual, weight, None, seed, p, x.dtype, *options)[:2]

    prefixes = {"residual": residual, "weight": weight}
    return map_tensors("add_rms_norm", check, compute, input, prefixes, namespace=namespace, num_results=2)


def _noise(x: Tensor, p: float, training: bool) -> tuple[Tensor | None, float]:
    """A seed for the noise, or None for none, and the probability that goes with it."""
    # Where nothing is left to chance, torch draws nothing either.
    if not training or p == 0.0 or x.numel() == 0:
        return None, 0.0
    if p == 1.0:
        return torch.zeros((), dtype=torch.int64, device=x.device), 1.0
    return torch.randint(MAX_SEED, (), device=x.device), float(p)
