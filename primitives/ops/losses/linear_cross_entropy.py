r"""Cross-entropy of the logits `x weight^T + bias`, which are made, and made again, by chunks of rows.

    h = x weight^T + bias,      z = softcap * tanh(h / softcap),      (loss, lse) = cross_entropy(z, target)

The logits of one chunk are all that is ever in memory of them: reverse mode keeps the arguments and lse, and each
derivative goes over the chunks anew. With `slope` and `curvature` the derivatives of z in h,

    jvp   h_dot = x_dot weight^T + x weight_dot^T + bias_dot,      z_dot = slope * h_dot
    vjp   h_bar = slope * z_bar,      x_bar = h_bar weight,      weight_bar = h_bar^T x,      bias_bar = sum(h_bar)

    jvp of the vjp   h_bar_dot = slope * z_bar_dot + curvature * h_dot * z_bar
                     x_bar_dot = h_bar_dot weight + h_bar weight_dot
                     weight_bar_dot = h_bar_dot^T x + h_bar^T x_dot

where z_bar and z_bar_dot are those of cross-entropy. As there, the jvp of the vjp without tangents of the cotangents is
what the vjps of both first-order operators lack. Orders past the second differentiate these, and hold all chunks.

Shapes: x `[N, D]`, weight `[C, *, D]`, bias `[C, *]`, target `[N, *]` for labels or `[N, C, *]`; loss and lse `[N, *]`.
The operators are composed of products of matrices and of the primitives of cross-entropy, on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primitives._core import BatchInfo, Primitive, vmap_by_loop
from primitives.ops.losses.cross_entropy import cross_entropy_bwd_p, cross_entropy_jvp_p, cross_entropy_p
from primitives.ops.losses.cross_entropy_second_order import cross_entropy_bwd_jvp_p
from primitives.ops.rules import empty_output, first_order, fold_batch, output_axes, second_order

_OPTIONS = "float softcap, float smoothing, int chunk_rows"
_ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, Tensor target"
_DOTS = "Tensor? x_dot, Tensor? weight_dot, Tensor? bias_dot, Tensor? target_dot"
_BARS = "Tensor x_bar, Tensor weight_bar, Tensor bias_bar, Tensor target_bar"
_NAMES = ("x", "weight", "bias", "target")
# Records, and the gates that follow from them, are of ops with kernels of their own: these are composed, and held to
# the formula in every nesting by tests/ops/losses/test_linear_cross_entropy.py.
NAMESPACE = "primitives_composed"

linear_cross_entropy_p = Primitive(
    "linear_cross_entropy",
    f"({_ARGUMENTS}, {_OPTIONS}) -> (Tensor loss, Tensor lse)",
    residuals=(*_NAMES, "lse"),
    namespace=NAMESPACE,
)
linear_cross_entropy_bwd_p = Primitive(
    "linear_cross_entropy_bwd",
    f"(Tensor? loss_bar, Tensor? lse_bar, {_ARGUMENTS}, Tensor lse, {_OPTIONS}, bool[] output_mask) -> ({_BARS})",
    residuals=("loss_bar", "lse_bar", *_NAMES, "lse"),
    cached=("lse",),
    decomposable=True,
    namespace=NAMESPACE,
)
linear_cross_entropy_jvp_p = Primitive(
    "linear_cross_entropy_jvp",
    f"({_ARGUMENTS}, Tensor lse, {_DOTS}, {_OPTIONS}) -> (Tensor loss_dot, Tensor lse_dot)",
    residuals=(*_NAMES, "lse", *(f"{name}_dot" for name in _NAMES)),
    cached=("lse",),
    decomposable=True,
    namespace=NAMESPACE,
)
linear_cross_entropy_bwd_jvp_p = Primitive(
    "linear_cross_entropy_bwd_jvp",
    f"(Tensor? loss_bar, Tensor? lse_bar, {_ARGUMENTS}, Tensor lse, Tensor? loss_bar_dot, Tensor? lse_bar_dot, {_DOTS},"
    f" {_OPTIONS}, bool[] output_mask) -> ({_BARS.replace('_bar', '_bar_dot')})",
    cached=("lse",),
    decomposable=True,
    namespace=NAMESPACE,
)


# Chunks of rows.


class _Logits(NamedTuple):
    """Logits z of a chunk, and where they are capped the derivatives of z in h."""

    z: Tensor
    slope: Tensor | None
    curvature: Tensor | None

    def scaled(self, value: Tensor) -> Tensor:
        """The product of `value` and the slope."""
        return value if self.slope is None else value * self.slope


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """The products of the rows of x with those of the weight, `[N, C, *]`."""
    return (x @ weight.flatten(0, -2).mT).unflatten(1, weight.shape[:-1])


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, softcap: float, order: int = 0) -> _Logits:
    """Logits, with derivatives up to `order`."""
    h = _product(x, weight)
    h = h if bias is None else h + bias
    if not softcap:
        return _Logits(h, None, None)
    t = torch.tanh(h / softcap)
    slope = 1.0 - t * t if order else None
    return _Logits(softcap * t, slope, -2.0 / softcap * t * slope if slope is not None and order > 1 else None)


def _chunks(x: Tensor, chunk_rows: int, *tensors: Tensor | None) -> Iterator[list[Any]]:
    """The rows of each chunk, of x and of other tensors; without rows there is one chunk.

    A last row that would be alone joins the chunk before it: a BLAS adds up a product of one row term by term, and
    loses three digits over 262,144 classes.
    """
    num_rows = x.shape[0]
    starts = [start for start in range(0, max(num_rows, 1), chunk_rows) if start == 0 or start != num_rows - 1]
    for start, stop in zip(starts, [*starts[1:], num_rows], strict=True):
        yield [None if t is None else t[start:stop] for t in (x, *tensors)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0].clone()


class _Sums:
    """Sums over the rows of all chunks, of the wanted parameters; in place where nothing is differentiated."""

    def __init__(self, weight: Tensor, bias: Tensor | None, output_mask: Sequence[bool], *, in_place: bool) -> None:
        self._in_place = in_place
        # A product is added in the dtype of the weight: the sum of more than that would be the largest tensor of all.
        self.weight = torch.zeros_like(weight.flatten(0, -2)) if output_mask[1] else None
        self.bias = None
        if output_mask[2] and bias is not None:
            self.bias = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))

    def add(self, h_bar: Tensor, x: Tensor, *, to_bias: bool = True) -> None:
        """Add what the cotangent of the logits of a chunk brings."""
        if self.weight is not None:
            rows = h_bar.flatten(1).mT
            add = self.weight.addmm_ if self._in_place else functools.partial(torch.addmm, self.weight)
            self.weight = add(rows, x)
        if self.bias is not None and to_bias:
            self.bias = self.bias + h_bar.sum(0, dtype=self.bias.dtype)

    def results(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sums, in the shapes and dtypes of the parameters."""
        return (
            empty_output(x) if self.weight is None else self.weight.reshape(weight.shape),
            empty_output(x) if self.bias is None or bias is None else self.bias.to(bias.dtype, copy=True),
        )


# Reference, and what runs on every device.


@linear_cross_entropy_p.def_reference
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    softcap: float,
    smoothing: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    parts = [
        cross_entropy_p(_logits(rows, weight, bias, softcap).z, labels, 1, smoothing)
        for rows, labels in _chunks(x, chunk_rows, target)
    ]
    loss, lse = (_joined(column) for column in zip(*parts, strict=True))
    return loss, lse


def _bwd(
    loss_bar: Tensor | None,
    lse_bar: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    softcap: float,
    smoothing: float,
    chunk_rows: int,
    output_mask: list[bool],
    *,
    in_place: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = _Sums(weight, bias, output_mask, in_place=in_place)
    mask = (any(output_mask[:3]), output_mask[3])

    def of_chunk(rows: Tensor, labels: Tensor, u: Any, v: Any, row_lse: Tensor) -> tuple[Tensor, Tensor]:
        logits = _logits(rows, weight, bias, softcap, 1)
        z_bar, target_bar = cross_entropy_bwd_p(u, v, logits.z, labels, row_lse, 1, smoothing, mask)
        if not mask[0]:
            return empty_output(x), target_bar
        h_bar = logits.scaled(z_bar)
        sums.add(h_bar, rows)
        return h_bar.flatten(1) @ weight.flatten(0, -2) if output_mask[0] else empty_output(x), target_bar

    # The tensors of a chunk end with its call, before the next one makes its own.
    parts = [of_chunk(*chunk) for chunk in _chunks(x, chunk_rows, target, loss_bar, lse_bar, lse)]
    x_bar, target_bar = (_joined(column) for column in zip(*parts, strict=True))
    return x_bar, *sums.results(weight, bias, x), target_bar


def _jvp(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    target_dot: Tensor | None,
    softcap: float,
    smoothing: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    def of_chunk(rows: Tensor, labels: Tensor, row_lse: Tensor, rows_dot: Any, labels_dot: Any) -> Any:
        logits = _logits(rows, weight, bias, softcap, 1)
        h_dot = _h_dot(rows, weight, rows_dot, weight_dot, bias_dot, logits.z)
        z_dot = None if h_dot is None else logits.scaled(h_dot)
        return cross_entropy_jvp_p(logits.z, labels, row_lse, z_dot, labels_dot, 1, smoothing)

    parts = [of_chunk(*chunk) for chunk in _chunks(x, chunk_rows, target, lse, x_dot, target_dot)]
    loss_dot, lse_dot = (_joined(column) for column in zip(*parts, strict=True))
    return loss_dot, lse_dot


def _h_dot(
    x: Tensor, weight: Tensor, x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None, z: Tensor
) -> Tensor | None:
    """The tangent of h for those of the arguments."""
    h_dot = None if x_dot is None else _product(x_dot, weight)
    if weight_dot is not None and h_dot is not None:
        h_dot = torch.addmm(h_dot.flatten(1), x, weight_dot.flatten(0, -2).mT).view(h_dot.shape)
    elif weight_dot is not None:
        h_dot = _product(x, weight_dot)
    if bias_dot is None:
        return h_dot
    return bias_dot.expand(z.shape) if h_dot is None else h_dot + bias_dot


def _bwd_jvp(
    loss_bar: Tensor | None,
    lse_bar: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    loss_bar_dot: Tensor | None,
    lse_bar_dot: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    target_dot: Tensor | None,
    softcap: float,
    smoothing: float,
    chunk_rows: int,
    output_mask: list[bool],
    *,
    in_place: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = _Sums(weight, bias, output_mask, in_place=in_place)
    mask = (any(output_mask[:3]), output_mask[3])

    def of_chunk(rows: Tensor, labels: Tensor, row_lse: Tensor, *chunk: Any) -> tuple[Tensor, Tensor]:
        u, v, u_dot, v_dot, rows_dot, labels_dot = chunk
        logits = _logits(rows, weight, bias, softcap, 2)
        h_dot = _h_dot(rows, weight, rows_dot, weight_dot, bias_dot, logits.z)
        z_dot = None if h_dot is None else logits.scaled(h_dot)
        dots = (u_dot, v_dot, z_dot, labels_dot)
        z_bar_dot, target_bar_dot = cross_entropy_bwd_jvp_p(u, v, logits.z, labels, row_lse, *dots, 1, smoothing, mask)
        if not mask[0]:
            return empty_output(x), target_bar_dot
        h_bar_dot, h_bar = logits.scaled(z_bar_dot), None
        if h_dot is not None and not (u is None and v is None):
            z_bar = cross_entropy_bwd_p(u, v, logits.z, labels, row_lse, 1, smoothing, (True, False))[0]
            h_bar = logits.scaled(z_bar)
            if logits.curvature is not None:
                h_bar_dot = h_bar_dot + logits.curvature * h_dot * z_bar
        sums.add(h_bar_dot, rows)
        if h_bar is not None and rows_dot is not None:
            sums.add(h_bar, rows_dot, to_bias=False)
        if not output_mask[0]:
            return empty_output(x), target_bar_dot
        x_bar_dot = h_bar_dot.flatten(1) @ weight.flatten(0, -2)
        if h_bar is not None and weight_dot is not None:
            x_bar_dot = x_bar_dot + h_bar.flatten(1) @ weight_dot.flatten(0, -2)
        return x_bar_dot, target_bar_dot

    tensors = (target, lse, loss_bar, lse_bar, loss_bar_dot, lse_bar_dot, x_dot, target_dot)
    parts = [of_chunk(*chunk) for chunk in _chunks(x, chunk_rows, *tensors)]
    x_bar_dot, target_bar_dot = (_joined(column) for column in zip(*parts, strict=True))
    return x_bar_dot, *sums.results(weight, bias, x), target_bar_dot


@linear_cross_entropy_bwd_p.def_reference
def _bwd_reference(*args: Any) -> tuple[Tensor, ...]:
    return _bwd(*args, in_place=False)


@linear_cross_entropy_bwd_jvp_p.def_reference
def _bwd_jvp_reference(*args: Any) -> tuple[Tensor, ...]:
    return _bwd_jvp(*args, in_place=False)


linear_cross_entropy_jvp_p.def_reference(_jvp)
for _device in ("cpu", "cuda"):
    linear_cross_entropy_bwd_p.def_kernel(_device)(_bwd)
    linear_cross_entropy_bwd_jvp_p.def_kernel(_device)(_bwd_jvp)


first_order(linear_cross_entropy_p, linear_cross_entropy_bwd_p, linear_cross_entropy_jvp_p)
second_order(linear_cross_entropy_bwd_p, linear_cross_entropy_jvp_p, linear_cross_entropy_bwd_jvp_p)


# Batching: the batch is more rows, unless each sample has parameters, or sums over its rows, of its own.


def _batched(op: Primitive) -> None:
    params = [name for name in op.spec.tensors if name.startswith(("weight", "bias"))]
    rows = [name for name in op.spec.tensors if name not in params]

    @op.def_vmap
    def rule(batch: BatchInfo, primals: Any) -> tuple[Any, Any]:
        output_mask = getattr(primals, "output_mask", (True, False, False, True))
        if batch.is_batched(*params) or any(output_mask[1:3]) or not batch.size:
            # The products of a sample fill a device, or their sum is as large as the weight.
            return vmap_by_loop(op.spec, batch.size, "different", batch.axes, primals)
        folded, sizes = fold_batch(batch, primals, rows), (batch.size, -1)
        given = {name: value for name in rows if (value := getattr(folded, name)) is not None}
        outputs = op(*folded._replace(**{name: value.flatten(0, 1) for name, value in given.items()}))
        axes = output_axes(op, primals)
        return tuple(y if axis is None else y.unflatten(0, sizes) for y, axis in zip(outputs, axes, strict=True)), axes


for _op in (linear_cross_entropy_p, linear_cross_entropy_bwd_p, linear_cross_entropy_jvp_p):
    _batched(_op)
_batched(linear_cross_entropy_bwd_jvp_p)
