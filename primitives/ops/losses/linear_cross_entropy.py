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
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primitives._core import BatchInfo, Primitive, vmap_by_loop
from primitives.ops.axes import Axes, def_axes, fold_batch, output_axes
from primitives.ops.losses.cross_entropy import (
    cross_entropy_bwd_jvp_p,
    cross_entropy_bwd_p,
    cross_entropy_jvp_p,
    cross_entropy_p,
)
from primitives.ops.rules import define, derivatives, empty_output, second_order

# Records, and the gates that follow from them, are of ops with kernels of their own: these are composed, and held to
# the formula in every nesting by tests/ops/losses/test_linear_cross_entropy.py.
NAMESPACE = "primitives_composed"
_OPTIONS, _NAMES = "float softcap, float smoothing, int chunk_rows", "x weight bias target"

linear_cross_entropy_p = Primitive(
    "linear_cross_entropy",
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor target, {_OPTIONS}) -> (Tensor loss, Tensor lse)",
    residuals=(*_NAMES.split(), "lse"),
    namespace=NAMESPACE,
)
linear_cross_entropy_bwd_p, linear_cross_entropy_jvp_p, linear_cross_entropy_bwd_jvp_p = derivatives(
    linear_cross_entropy_p, f"{_NAMES} lse", _NAMES, _OPTIONS, second=_NAMES
)


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


def _logits(x: Tensor, c: Any, order: int = 0) -> _Logits:
    """Logits of rows of a call, with derivatives up to `order`."""
    h = _product(x, c.weight)
    h = h if c.bias is None else h + c.bias
    if not c.softcap:
        return _Logits(h, None, None)
    t = torch.tanh(h / c.softcap)
    slope = 1.0 - t * t if order else None
    return _Logits(c.softcap * t, slope, -2.0 / c.softcap * t * slope if slope is not None and order > 1 else None)


def _of_chunks(of_chunk: Callable[..., tuple[Tensor, Tensor]], c: Any, *names: str) -> tuple[Tensor, Tensor]:
    """What a function gives for the rows of each chunk, of x and of the named tensors; without rows there is one chunk.

    A last row that would be alone joins the chunk before it: a BLAS adds up a product of one row term by term, and
    loses three digits over 262,144 classes. The tensors of a chunk end with its call, before the next one makes more.
    """
    num_rows, tensors = c.x.shape[0], [getattr(c, name) for name in ("x", *names)]
    starts = [start for start in range(0, max(num_rows, 1), c.chunk_rows) if start == 0 or start != num_rows - 1]
    spans = zip(starts, [*starts[1:], num_rows], strict=True)
    parts = [of_chunk(*(None if t is None else t[start:stop] for t in tensors)) for start, stop in spans]
    columns: Any = zip(*parts, strict=True)
    first, second = (torch.cat(each) if len(each) > 1 else each[0].clone() for each in columns)
    return first, second


class _Sums:
    """Sums over the rows of all chunks, of the wanted parameters; in place where nothing is differentiated."""

    def __init__(self, c: Any, *, in_place: bool) -> None:
        self._in_place, self._c = in_place, c
        # A product is added in the dtype of the weight: the sum of more than that would be the largest tensor of all.
        self.weight = torch.zeros_like(c.weight.flatten(0, -2)) if c.output_mask[1] else None
        self.bias = None
        if c.output_mask[2] and c.bias is not None:
            self.bias = torch.zeros_like(c.bias, dtype=torch.promote_types(c.bias.dtype, torch.float32))

    def add(self, h_bar: Tensor, x: Tensor, *, to_bias: bool = True) -> None:
        """Add what the cotangent of the logits of a chunk brings."""
        if self.weight is not None:
            rows = h_bar.flatten(1).mT
            add = self.weight.addmm_ if self._in_place else functools.partial(torch.addmm, self.weight)
            self.weight = add(rows, x)
        if self.bias is not None and to_bias:
            self.bias = self.bias + h_bar.sum(0, dtype=self.bias.dtype)

    def results(self) -> tuple[Tensor, Tensor]:
        """The sums, in the shapes and dtypes of the parameters."""
        c = self._c
        return (
            empty_output(c.x) if self.weight is None else self.weight.reshape(c.weight.shape),
            empty_output(c.x) if self.bias is None else self.bias.to(c.bias.dtype, copy=True),
        )


# Reference, and what runs on every device: formulas of a call, whose fields are the arguments by name.


def _forward(_: bool, c: Any) -> tuple[Tensor, Tensor]:
    def of_chunk(rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy_p(_logits(rows, c).z, labels, 1, c.smoothing)

    return _of_chunks(of_chunk, c, "target")


def _bwd(in_place: bool, c: Any) -> tuple[Tensor, ...]:
    sums, mask = _Sums(c, in_place=in_place), (any(c.output_mask[:3]), c.output_mask[3])

    def of_chunk(rows: Tensor, labels: Tensor, u: Any, v: Any, row_lse: Tensor) -> tuple[Tensor, Tensor]:
        logits = _logits(rows, c, 1)
        z_bar, target_bar = cross_entropy_bwd_p(u, v, logits.z, labels, row_lse, 1, c.smoothing, mask)
        if not mask[0]:
            return empty_output(c.x), target_bar
        h_bar = logits.scaled(z_bar)
        sums.add(h_bar, rows)
        return h_bar.flatten(1) @ c.weight.flatten(0, -2) if c.output_mask[0] else empty_output(c.x), target_bar

    x_bar, target_bar = _of_chunks(of_chunk, c, "target", "loss_bar", "lse_bar", "lse")
    return x_bar, *sums.results(), target_bar


def _jvp(_: bool, c: Any) -> tuple[Tensor, Tensor]:
    def of_chunk(rows: Tensor, labels: Tensor, row_lse: Tensor, rows_dot: Any, labels_dot: Any) -> Any:
        logits = _logits(rows, c, 1)
        h_dot = _h_dot(rows, rows_dot, c, logits.z)
        z_dot = None if h_dot is None else logits.scaled(h_dot)
        return cross_entropy_jvp_p(logits.z, labels, row_lse, z_dot, labels_dot, 1, c.smoothing)

    return _of_chunks(of_chunk, c, "target", "lse", "x_dot", "target_dot")


def _h_dot(x: Tensor, x_dot: Tensor | None, c: Any, z: Tensor) -> Tensor | None:
    """The tangent of h for those of the arguments."""
    h_dot = None if x_dot is None else _product(x_dot, c.weight)
    if c.weight_dot is not None and h_dot is not None:
        h_dot = torch.addmm(h_dot.flatten(1), x, c.weight_dot.flatten(0, -2).mT).view(h_dot.shape)
    elif c.weight_dot is not None:
        h_dot = _product(x, c.weight_dot)
    if c.bias_dot is None:
        return h_dot
    return c.bias_dot.expand(z.shape) if h_dot is None else h_dot + c.bias_dot


def _bwd_jvp(in_place: bool, c: Any) -> tuple[Tensor, ...]:
    sums, mask = _Sums(c, in_place=in_place), (any(c.output_mask[:3]), c.output_mask[3])

    def of_chunk(rows: Tensor, labels: Tensor, row_lse: Tensor, *chunk: Any) -> tuple[Tensor, Tensor]:
        u, v, u_dot, v_dot, rows_dot, labels_dot = chunk
        logits = _logits(rows, c, 2)
        h_dot = _h_dot(rows, rows_dot, c, logits.z)
        dots = (u_dot, v_dot, None if h_dot is None else logits.scaled(h_dot), labels_dot)
        given = (logits.z, labels, row_lse)
        z_bar_dot, target_bar_dot = cross_entropy_bwd_jvp_p(u, v, *given, *dots, 1, c.smoothing, mask)
        if not mask[0]:
            return empty_output(c.x), target_bar_dot
        h_bar_dot, h_bar = logits.scaled(z_bar_dot), None
        if h_dot is not None and not (u is None and v is None):
            z_bar = cross_entropy_bwd_p(u, v, *given, 1, c.smoothing, (True, False))[0]
            h_bar = logits.scaled(z_bar)
            if logits.curvature is not None:
                h_bar_dot = h_bar_dot + logits.curvature * h_dot * z_bar
        sums.add(h_bar_dot, rows)
        if h_bar is not None and rows_dot is not None:
            sums.add(h_bar, rows_dot, to_bias=False)
        if not c.output_mask[0]:
            return empty_output(c.x), target_bar_dot
        x_bar_dot = h_bar_dot.flatten(1) @ c.weight.flatten(0, -2)
        if h_bar is not None and c.weight_dot is not None:
            x_bar_dot = x_bar_dot + h_bar.flatten(1) @ c.weight_dot.flatten(0, -2)
        return x_bar_dot, target_bar_dot

    names = ("target", "lse", "loss_bar", "lse_bar", "loss_bar_dot", "lse_bar_dot", "x_dot", "target_dot")
    x_bar_dot, target_bar_dot = _of_chunks(of_chunk, c, *names)
    return x_bar_dot, *sums.results(), target_bar_dot


# Batching: the batch is more rows, unless each sample has parameters, or sums over its rows, of its own.


_AXES = Axes(
    "x: rows features, weight: classes *more features, bias: classes *more, target: rows classes? *more,"
    " loss lse: rows *more",
    "rows",
)


def _batched(op: Primitive) -> None:
    def_axes(_AXES, op)
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


define(linear_cross_entropy_p, _forward, lambda _: False)
define(linear_cross_entropy_jvp_p, _jvp, lambda _: False)
for _op, _formula in ((linear_cross_entropy_bwd_p, _bwd), (linear_cross_entropy_bwd_jvp_p, _bwd_jvp)):
    # Values are summed in place.
    define(_op, _formula, lambda _: False, lambda _: True)
    _op.def_kernel("cuda")(_op.rules.kernels["cpu"])
for _op in (linear_cross_entropy_p, linear_cross_entropy_bwd_p, linear_cross_entropy_jvp_p):
    _batched(_op)
_batched(linear_cross_entropy_bwd_jvp_p)
second_order(linear_cross_entropy_bwd_p, linear_cross_entropy_jvp_p, linear_cross_entropy_bwd_jvp_p)
