"""Second-order layer normalization: launchers of the derivatives of its backward and of its JVP.

The double backward is the gradient of `L = <y_bar, y_dot>`, the jvp of the backward that of `L + <y_bar_dot, y>` in the
inputs of the forward; `_layer_norm_second_kernels` has the formulas of both, which the same kernels compute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from ..rows.launch import NO_SUMS, Operands, RowSums, launch_row_sums, launch_rows, num_row_parts, sums_scratch
from ..rows.tiles import ParamLayout
from ..runtime.views import device_guard
from ..tuning import tunable
from ._launch import Norm, Planes
from ._layer_norm_second_kernels import ROWS, SUMS, layer_norm_second_planes_kernel
from ._plan import plan_layer_norm_second_rows, plan_layer_norm_second_sums

_FULL_SIZE = ("x_dot", "y_bar", "x", "y_bar_dot")
_PARAMS = ("weight", "weight_dot", "bias_dot")
_ROW_RESULTS = ("y_bar_bar", "x_bar", "x_dot_bar")
# In the order in which the kernel sums over rows; no call has both of the last two.
_SUMS = ("weight_bar", "weight_dot_bar", "bias_bar", "bias_dot_bar")
_PARTS: tuple[str, ...] = ("weight_part", "weight_dot_part", "bias_part")
_X_DOT_SUMS = ("x_dot_sum", "x_dot_x_hat_sum")
# The terms of the derivatives of L + <y_bar_dot, y>: a factor that is a tangent, without which a term is not there, and
# what else it takes.
_TERMS: Mapping[str, Sequence[tuple[str | None, Sequence[str]]]] = {
    "y_bar_bar": [("x_dot", ("x", "weight")), ("weight_dot", ("x",)), ("bias_dot", ())],
    "x_bar": [("y_bar_dot", ("x", "weight")), ("x_dot", ("y_bar", "x", "weight")), ("weight_dot", ("y_bar", "x"))],
    "x_dot_bar": [(None, ("y_bar", "x", "weight"))],
    "weight_bar": [("y_bar_dot", ("x",)), ("x_dot", ("y_bar", "x"))],
    "weight_dot_bar": [(None, ("y_bar", "x"))],
    "bias_bar": [("y_bar_dot", ())],
    "bias_dot_bar": [(None, ("y_bar",))],
}


@tunable
def layer_norm_double_backward(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None,
    norm_ndim: int, batch_ndim: int, output_mask: Sequence[bool], centered: bool = True, grouped: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradient of `<y_bar, y_dot>`; results of parameters are in the dtype of the weight, or of `x` without one."""
    names = ("y_bar_bar", "x_bar", "weight_bar", "x_dot_bar", "weight_dot_bar", "bias_dot_bar")
    given = {"x_dot": x_dot, "y_bar": y_bar, "x": x, "y_bar_dot": None}
    given |= {"weight": weight, "weight_dot": weight_dot, "bias_dot": bias_dot}
    norm = Norm(norm_ndim, batch_ndim, centered, ParamLayout(grouped))
    return _differentiate(names, output_mask, x, given, norm.statistics(mean, rstd), norm)


@tunable
def layer_norm_bwd_jvp(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    y_bar_dot: Tensor | None, x_dot: Tensor | None, weight_dot: Tensor | None,
    norm_ndim: int, batch_ndim: int, output_mask: Sequence[bool], centered: bool = True, grouped: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Tangents of what `layer_norm_bwd` computes, in dtypes as above; zero where no tangent moves it."""
    names = ("x_bar", "weight_bar", "bias_bar")
    given = {"x_dot": x_dot, "y_bar": y_bar, "x": x, "y_bar_dot": y_bar_dot}
    given |= {"weight": weight, "weight_dot": weight_dot, "bias_dot": None}
    norm = Norm(norm_ndim, batch_ndim, centered, ParamLayout(grouped))
    return _differentiate(names, output_mask, x, given, norm.statistics(mean, rstd), norm)


def _differentiate(
    names: Sequence[str], output_mask: Sequence[bool], x: Tensor, given: Mapping[str, Tensor | None],
    statistics: Mapping[str, Tensor | None], norm: Norm,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The derivatives `names`: those that are wanted, and zero where no given operand moves them."""
    weight = given["weight"]
    param_shape = norm.param_shape(x)
    param_dtype = x.dtype if weight is None else weight.dtype
    outputs, results = [], {}
    for name, want in zip(names, output_mask, strict=True):
        if not want:
            outputs.append(x.new_empty(0))
            continue
        is_row = name in _ROW_RESULTS
        outputs.append(norm.empty_like(x) if is_row else x.new_empty(param_shape, dtype=param_dtype))
        if x.numel() and any(factor is None or given[factor] is not None for factor, _ in _TERMS[name]):
            results[name] = outputs[-1]
        else:
            outputs[-1].zero_()
    if results:
        with device_guard(x):
            _launch(x, given, results, statistics, norm)
    return tuple(outputs)


def _launch(
    x: Tensor, given: Mapping[str, Tensor | None], results: Mapping[str, Tensor],
    statistics: Mapping[str, Tensor | None], norm: Norm,
) -> None:  # fmt: skip
    """Launch what writes the results: rows, the sums over them in the same kernel or behind it, and partial rows."""
    of_rows, totals = {name: results.get(name) for name in _ROW_RESULTS}, [results.get(name) for name in _SUMS]
    # No call has both sums of the bias.
    totals[2:] = [totals[2] if totals[3] is None else totals[3]]
    of_sums = set(results).intersection(_SUMS)
    taken = _taken(results, given)
    full_size = {name: given[name] if name in taken or name == "x" else None for name in _FULL_SIZE}
    params = {name: given[name] if name in taken else None for name in _PARAMS}
    has_planes = bool(of_sums) and norm.layout != ParamLayout.PER_COLUMN
    has_sums = bool(of_sums) and not has_planes
    operands = norm.operands(full_size, params, statistics, has_sums)
    view, num_groups = operands.view, math.prod(x.shape[: norm.batch_ndim])
    sizes, is_aligned = (*operands.sizes(), x.element_size()), operands.is_aligned(x.element_size())
    plan = None
    if has_sums:
        num_tiles = (len(taken.intersection(_FULL_SIZE)), len(of_sums), len(taken.intersection(_PARAMS)))
        plan = plan_layer_norm_second_sums(*sizes, *num_tiles, x.device, is_aligned)
    is_apart = plan is None or plan.looped
    rows_take, sums_take = _taken(set(results) - of_sums, given), _taken(of_sums, given) if is_apart else taken
    # The kernel over rows finds the sums of x_dot that the one over columns takes.
    leaves_sums = is_apart and "x_dot" in sums_take
    rows, row_plan, row_sums, swept_size = operands, None, NO_SUMS, 0
    if is_apart and (rows_take or leaves_sums):
        rows = operands.only({*rows_take, "x", "x_dot"} if leaves_sums else rows_take)
        num_operands = len(rows.given().intersection(_FULL_SIZE))
        row_plan = plan_layer_norm_second_rows(*sizes, num_operands, x.device, is_aligned)
        rows = rows._replace(outputs=of_rows)
        row_sums = _row_sums(rows)
        swept_size = num_row_parts(rows, row_plan, row_sums)
    num_stats = view.num_segments * view.num_rows * leaves_sums
    # A norm that is not centered takes no mean of x_dot.
    planes = Planes.of(operands.only(sums_take), totals, norm.batch_ndim) if has_planes else None
    plane_size, partial = (0, operands.partial_rows(plan)) if planes is None else planes.scratch()
    sizes = (num_stats * norm.centered, num_stats, swept_size, plane_size)
    like = statistics["rstd"]
    assert like is not None  # noqa: S101 - for the type
    parts, (*stats, swept_parts, plane_parts) = sums_scratch(like, *partial, totals, num_groups, *sizes)
    x_dot_sums: dict[str, Tensor | None] = dict(zip(_X_DOT_SUMS, stats, strict=True))
    if row_plan is not None:
        rows = rows._replace(row_outputs=x_dot_sums)
        launch_rows(ROWS[row_sums.num_anchors], rows, row_plan, row_sums, rows_take, swept_parts)
    named = dict(zip(_PARTS, totals, strict=True))
    if planes is not None:
        share = 1.0 / (planes.operands.view.num_cols * planes.operands.planes)
        kernel, scratch = layer_norm_second_planes_kernel, (plane_parts, x_dot_sums)
        planes.launch(kernel, named, parts, num_groups, *scratch, NUMBER_0=share)
    if plan is not None:
        operands = operands.only(sums_take)
        outputs = dict.fromkeys(_ROW_RESULTS) if is_apart else of_rows
        operands = operands._replace(outputs=outputs, statistics={**operands.statistics, **x_dot_sums})
        sums = RowSums(7, (), 0) if is_apart else _row_sums(operands)
        launch_row_sums(SUMS[sums.num_anchors], operands, plan, named, parts, num_groups, sums)


def _taken(results: Collection[str], given: Mapping[str, Tensor | None]) -> set[str]:
    """Names of the operands that the results take."""
    terms = [term for name in results for term in _TERMS[name] if term[0] is None or given[term[0]] is not None]
    return {name for factor, others in terms for name in (factor, *others) if name and given[name] is not None}


def _row_sums(operands: Operands) -> RowSums:
    """Sums of a row that a kernel takes which reads these operands and writes these outputs."""
    given = operands.given()
    written = {name for name, tensor in operands.outputs.items() if tensor is not None}
    has_h, want_x = "x_dot" in given, "x_bar" in written
    has_g = "x_dot_bar" in written or (want_x and has_h)
    has_k = want_x and bool(given & {"weight_dot", "y_bar_dot"})
    bits = 0b11 * has_h + 0b1100 * has_g + 0b110000 * has_k + 0b1000000 * (want_x and has_h)
    is_centered = operands.statistics["mean"] is not None
    reads = {"x"} if bits else set()
    reads |= {"x_dot"} if has_h else set()
    reads |= {"y_bar", "weight"} if has_g else set()
    reads |= {"y_bar_dot", "weight_dot", "weight"} if has_k else set()
    reads |= {"y_bar"} if has_k and "weight_dot" in given else set()
    return RowSums(7, reads, bits if is_centered else bits & 0b1101010, is_centered and bits >> 6)
