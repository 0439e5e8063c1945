"""Layer norm on CPU tensors: ATen's kernels for value and vjp, and built from these, block by block, all the rest.

Notation as in `layer_norm.py`. ATen's backward without a weight is the map P, which is symmetric, so one fused call
gives a jvp as well as a vjp:

    y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot

ATen has no kernel of a norm that is not centered; its backward gives the sums over rows, with a mean of 0. Group norm
has its own value and vjp in ATen; its jvp is that of layer norm's rows without parameters, and a product per channel.
Tensors in channels_last are copied: ATen's kernels of that take the variance from a sum of squares, which loses more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from primitives.ops.cpu import cast, is_well_conditioned, ready, row_blocks, served
from primitives.ops.rules import LOW_PRECISION, accumulation_dtype, empty_output, with_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


# ATen adds up in running sums of float32, of which n numbers of one sign lose up to n * 2**-26: additions of numbers
# that are alike are all rounded to the same side. For parameter cotangents it has one per column, over all rows. At the
# limit they lose 3e-5. Beyond, blocks of fewer rows lose 8e-6, but the backward takes up to twice as long.
LONGEST_SUM = 2**11
LONGEST_BLOCK = 2**9
# Along a row ATen has one running sum for each lane of a vector, eight in AVX2: at this length P loses 3e-5 of a v of
# one sign. Beyond, P from sums apart makes a jvp take 1.3 times and a backward 2.3 times as long.
LONGEST_ROW = 2**14
ALL = slice(None)


class Rows(NamedTuple):
    """Contiguous x [rows, cols] with its statistics [rows, 1] and the dtype of sums, ready for ATen.

    A norm that is not centered has a mean of 0. Group norm's rows are the groups of a sample after each other, of which
    `channels` is the shape, [groups, channels, positions], and parameters are those of a channel.
    """

    x: Tensor
    mean: Tensor
    rstd: Tensor
    acc: torch.dtype
    centered: bool
    channels: torch.Size | None = None

    def like_x(self, t: Tensor | None) -> Any:
        """`t`, shaped as x was, as [rows, cols]."""
        return None if t is None else t.contiguous().view(self.x.shape)

    def param(self, p: Tensor | None) -> Any:
        """A parameter in the dtype of sums, as [cols], or [groups, channels, 1]."""
        if p is None:
            return None
        return p.to(self.acc).reshape(-1) if self.channels is None else p.to(self.acc).unsqueeze(-1)

    def beside_param(self, v: Tensor) -> Tensor:
        """Whole rows (samples), as a view against which a `param` broadcasts."""
        return v if self.channels is None else v.view(-1, *self.channels)

    def scaled(self, v: Tensor, param: Tensor | None) -> Tensor:
        """The product of rows and a `param`."""
        return v if param is None else (self.beside_param(v) * param).view(v.shape)

    def sums(self, v: Tensor) -> Tensor:
        """For each value of a parameter, what belongs to it in all rows, as one axis."""
        return v.sum(0) if self.channels is None else self.beside_param(v).sum((0, 3)).flatten()

    def sums_with_x_hat(self, v: Tensor, x: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """`sums` of v * x_hat and of v."""
        if self.channels is None:
            return self.project(v, x, rows, None, (False, True, True))[1:]
        return self.sums(self.x_hat(x, rows).mul_(v)), self.sums(v)

    def zeros(self) -> Tensor:
        """The start of a sum over blocks of rows: there are many blocks, of which a running sum would lose too."""
        count = self.x.shape[1] if self.channels is None else self.channels[:2].numel()
        return self.x.new_zeros(count, dtype=torch.float64)

    def blocks(self, most: int | None = None) -> Iterator[slice]:
        """Blocks of at most `most` rows, or of whole samples."""
        rows, cols = self.x.shape
        count = 1 if self.channels is None else self.channels[0]
        for block in row_blocks(rows // count, count * cols, most):
            yield slice(block.start * count, block.stop * count)

    def project(
        self, v: Tensor, x: Tensor, rows: slice, weight: Tensor | None, mask: Sequence[bool] = (True, False, False)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """P(v * weight), sum(v * x_hat) and sum(v) of some rows, as far as `mask` says: mostly ATen's backward."""
        if mask[0] and (x.shape[1] > LONGEST_ROW or not self.centered):
            sums = self.project(v, x, rows, None, (False, *mask[1:]))[1:] if any(mask[1:]) else (v, v)
            return self._project_in_blocks(v, x, rows, weight), *sums
        if weight is None and (mask[1] or mask[2]):
            weight = x.new_ones(x.shape[1])
        cols = [x.shape[1]]
        return torch.ops.aten.native_layer_norm_backward.default(
            v, x, cols, self.mean[rows], self.rstd[rows], weight, weight, mask
        )

    def x_hat(self, x: Tensor, rows: slice, block: slice = ALL) -> Tensor:
        """x_hat of a block of some rows, in new memory."""
        rstd = self.rstd[rows][block]
        return (x - self.mean[rows][block]).mul_(rstd) if self.centered else x * rstd

    def _project_in_blocks(self, v: Tensor, x: Tensor, rows: slice, weight: Tensor | None) -> Tensor:
        """P(v * weight) from sums of sums."""
        out, rstd = torch.empty_like(x), self.rstd[rows]
        for block in row_blocks(*x.shape):
            x_hat = self.x_hat(x[block].to(self.acc), rows, block)
            g = v[block].to(self.acc) if weight is None else v[block] * weight
            product = g * x_hat
            slope = product.mean(1, keepdim=True)
            rest = torch.sub(g, g.mean(1, keepdim=True), out=product) if self.centered else g
            y = out[block] if out.dtype == self.acc else product
            torch.addcmul(rest, x_hat, slope, value=-1, out=y).mul_(rstd[block])
            if y is product:
                out[block] = y
        return out


def rows_of(
    x: Tensor,
    params: Sequence[Tensor | None],
    mean: Tensor,
    rstd: Tensor,
    norm_ndim: int,
    batch_ndim: int,
    centered: bool,
    grouped: int,
    *,
    has_sums: bool,
) -> Rows | None:
    """The rows of x; `None` if samples have parameters or sums of their own, or ATen would lose accuracy."""
    if batch_ndim and (has_sums or _present(*params)):
        return None
    if not served(x, *params) or (centered and not is_well_conditioned(mean, rstd)):
        return None
    rows = _rows(x, mean, rstd, x.shape[x.dim() - norm_ndim :], centered)
    return rows._replace(channels=x.shape[-3:]) if grouped else rows


def _rows(x: Tensor, mean: Tensor, rstd: Tensor, shape: torch.Size, centered: bool) -> Rows:
    mean, rstd = (each.contiguous().view(-1, 1) for each in (mean if centered else torch.zeros_like(rstd), rstd))
    return Rows(x.contiguous().view(-1, shape.numel()), mean, rstd, accumulation_dtype(x.dtype), centered)


def _present(*values: Tensor | None) -> bool:
    return any(value is not None for value in values)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool,
    rounded: bool,
    grouped: int,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """y, mean and rstd: by one call of ATen, or in blocks if not centered."""
    params = ready(x, weight, bias)
    if (
        params is None
        or (batch_ndim and _present(weight, bias))
        or (centered and rounded)
        or (grouped and not centered)
    ):
        return None
    if not centered:
        return _forward_in_blocks(x, weight, bias, norm_ndim, eps, rounded)
    weight, bias = params
    if grouped:
        return _forward_of_groups(x, weight, bias, eps, grouped)
    rest_ndim = x.dim() - norm_ndim
    shape = x.shape[rest_ndim:]
    if weight is None and x.dtype in LOW_PRECISION:
        # Without parameters in float32, ATen rounds the statistics to the dtype of x.
        weight = torch.ones(shape, dtype=torch.float32)
    y, mean, rstd = torch.native_layer_norm(x.contiguous(), shape, weight, bias, eps)
    if not is_well_conditioned(mean, rstd):
        return None
    # Torch reads a number several times as fast as a shape.
    rest: Any = -1 if rest_ndim == 1 else x.shape[:rest_ndim]
    return y, mean.view(rest), rstd.view(rest)


def _by_channel(x: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """The groups of x as [samples, channels, positions], and its sizes as ATen takes them."""
    groups, channels, positions = x.shape[-3:]
    # Of three axes: of four ATen takes some for channels_last.
    x = x.contiguous().view(-1, groups * channels, positions)
    return x, (x.shape[0], groups * channels, positions, groups)


def _forward_of_groups(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, grouped: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """y, mean and rstd of group norm, by one call of ATen."""
    flat, sizes = _by_channel(x)
    if weight is None and x.dtype in LOW_PRECISION:
        weight = torch.ones(sizes[1], dtype=torch.float32)
    weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
    y, mean, rstd = torch.native_group_norm(flat, weight, bias, *sizes, eps)
    if not is_well_conditioned(mean, rstd):
        return None
    rest = x.shape[:-2]
    if mean.shape != rest:
        mean, rstd = mean.view(rest), rstd.view(rest)
    return with_layout(y.view_as(x), grouped), mean, rstd


def _forward_in_blocks(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, norm_ndim: int, eps: float, rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of a norm that is not centered."""
    rest, cols = x.shape[: x.dim() - norm_ndim], x.shape[x.dim() - norm_ndim :].numel()
    acc = accumulation_dtype(x.dtype)
    rstd = torch.empty(rest, dtype=acc)
    rows = _rows(x, empty_output(x), rstd, x.shape[len(rest) :], centered=False)
    weight, bias = rows.param(weight), rows.param(bias)
    out = torch.empty_like(rows.x)
    # Results in the dtype of sums are written where it belongs.
    is_direct = out.dtype == acc and not rounded
    for block in row_blocks(*rows.x.shape):
        x_block, y = rows.x[block].to(acc), out[block] if is_direct else None
        total = torch.linalg.vector_norm(x_block, dim=1, keepdim=True).square_()
        torch.rsqrt(total.div_(cols).add_(eps), out=rows.rstd[block])
        y = torch.mul(x_block, rows.rstd[block], out=y)
        if rounded:
            y = y.to(x.dtype).to(acc)
        y = y if weight is None else y.mul_(weight)
        y = y if bias is None else y.add_(bias)
        if not is_direct:
            out[block] = y
    return out.view(x.shape), empty_output(rstd), rstd


def bwd(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool,
    grouped: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """x_bar, weight_bar and bias_bar: by one call of ATen, in blocks where that would be inaccurate."""
    has_sums = wanted[1] or wanted[2]
    params = ready(x, weight)
    if params is None or (batch_ndim and (has_sums or weight is not None)):
        return None
    if centered and not is_well_conditioned(mean, rstd):
        return None
    if grouped:
        return _bwd_of_groups(y_bar, x, weight, mean, rstd, centered, grouped, wanted)
    shape = x.shape[x.dim() - norm_ndim :]
    is_long = shape.numel() > LONGEST_ROW or (has_sums and mean.numel() > LONGEST_SUM)
    if is_long or x.dtype in LOW_PRECISION or not centered:
        rows = _rows(x, mean, rstd, shape, centered)
        dtype = rows.acc if weight is None else weight.dtype
        x_bar, *sums = _bwd_of_rows(rows, rows.like_x(y_bar), rows.param(weight), wanted)
        bars: Any = (x_bar.view(x.shape) if wanted[0] else None, *[total.view(shape).to(dtype) for total in sums])
    else:
        (scale,) = params
        if scale is None and has_sums:
            scale = x.new_ones(shape)
        bars = torch.ops.aten.native_layer_norm_backward.default(
            y_bar.contiguous(), x.contiguous(), shape, mean.contiguous(), rstd.contiguous(), scale, scale, wanted
        )
    if all(wanted):
        return bars
    x_bar, weight_bar, bias_bar = [bar if want else empty_output(x) for bar, want in zip(bars, wanted, strict=True)]
    return x_bar, weight_bar, bias_bar


def _bwd_of_groups(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
    grouped: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The cotangents of group norm, by one call of ATen where its sums are short enough."""
    acc = accumulation_dtype(x.dtype)
    flat, sizes = _by_channel(cast(x, acc))
    if not centered or sizes[2] > LONGEST_ROW or sizes[0] > LONGEST_SUM:
        return None
    scale = x.new_ones(sizes[1], dtype=acc) if weight is None else cast(weight, acc).flatten().contiguous()
    given = (_by_channel(cast(y_bar, acc))[0], flat, mean.contiguous(), rstd.contiguous())
    x_bar, *sums = torch.ops.aten.native_group_norm_backward.default(*given, scale, *sizes, wanted)
    dtype, shape = acc if weight is None else weight.dtype, (sizes[3], sizes[1] // sizes[3])
    weight_bar, bias_bar = [
        cast(bar.view(shape), dtype) if want else empty_output(x) for bar, want in zip(sums, wanted[1:], strict=True)
    ]
    x_bar = with_layout(cast(x_bar, x.dtype).view_as(x), grouped) if wanted[0] else empty_output(x)
    return x_bar, weight_bar, bias_bar


def _bwd_of_rows(rows: Rows, y_bar: Tensor, weight: Tensor | None, wanted: Sequence[bool]) -> tuple:
    x, (want_x, *want_sums) = rows.x, wanted
    weight_bar, bias_bar, x_bar = rows.zeros(), rows.zeros(), empty_output(x)
    if want_x:
        if x.dtype != rows.acc and weight is None:
            # ATen takes statistics in float32 beside a low-precision x where the weight is in float32 too.
            weight = x.new_ones(x.shape[1], dtype=rows.acc)
        x_bar = rows.project(y_bar, x, ALL, weight)[0]
    # ATen adds low-precision parameter cotangents up in low precision: its blocks get float32, from the cache.
    cols = x.shape[1] if x.dtype in LOW_PRECISION else 1
    for block in row_blocks(len(x), cols, most=LONGEST_BLOCK) if any(want_sums) else ():
        out = rows.project(y_bar[block].to(rows.acc), x[block].to(rows.acc), block, None, (False, *want_sums))
        weight_bar += out[1] if want_sums[0] else 0.0
        bias_bar += out[2] if want_sums[1] else 0.0
    return x_bar, weight_bar, bias_bar


def jvp(x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, *args: Any) -> Tensor | None:
    """y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot."""
    x_dot, weight_dot, bias_dot, norm_ndim, batch_ndim, eps, centered, grouped = args
    params = (weight, weight_dot, bias_dot)
    rows = rows_of(x, params, mean, rstd, norm_ndim, batch_ndim, centered, grouped, has_sums=False)
    if rows is None:
        return None
    weight, weight_dot, bias_dot = map(rows.param, params)
    x_dot = rows.like_x(x_dot)
    if x_dot is None and not _present(weight_dot, bias_dot):
        return with_layout(x.new_zeros(x.shape), grouped)
    out = torch.empty_like(rows.x)
    for block in rows.blocks():
        x_block = rows.x[block].to(rows.acc)
        y_dot: Any = bias_dot
        if weight_dot is not None and (grouped or not centered):
            y_dot = rows.beside_param(rows.x_hat(x_block, block)).mul_(weight_dot)
            y_dot = y_dot if bias_dot is None else y_dot.add_(bias_dot)
        elif weight_dot is not None:
            y_dot = torch.native_layer_norm(x_block, weight_dot.shape, weight_dot, bias_dot, eps)[0]
        if x_dot is not None:
            projected = rows.beside_param(rows.project(x_dot[block].to(rows.acc), x_block, block, None)[0])
            if weight is not None:
                y_dot = projected.mul_(weight) if y_dot is None else torch.addcmul(y_dot, projected, weight)
            else:
                y_dot = projected if y_dot is None else projected.add_(y_dot)
        rows.beside_param(out[block]).copy_(y_dot)
    return with_layout(out.view(x.shape), grouped)
