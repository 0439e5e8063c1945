"""What the second-order derivatives of layer norm read and write, and which operands the wanted results take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Operands", "Results", "needed_operands", "num_row_means"]


class Operands(NamedTuple):
    """What a derivative is computed from, besides mean and rstd; absent tensors are None."""

    y_bar: Tensor | None
    x: Tensor | None
    y_bar_dot: Tensor | None
    x_dot: Tensor | None
    weight: Tensor | None
    weight_dot: Tensor | None
    bias_dot: Tensor | None


class Results(NamedTuple):
    """The tensors to write; None where a derivative is not wanted."""

    y_bar_bar: Tensor | None = None
    x_bar: Tensor | None = None
    x_dot_bar: Tensor | None = None
    weight_bar: Tensor | None = None
    weight_dot_bar: Tensor | None = None
    bias_bar: Tensor | None = None

    def of_rows(self) -> Results:
        """Those of full size alone."""
        return Results(*self[:3])

    def of_columns(self) -> Results:
        """The sums over rows alone."""
        return Results(None, None, None, *self[3:])


def needed_operands(operands: Operands, results: Results) -> Operands:
    """The operands that the results take, None in the place of the others.

    One that is given but multiplies nothing that is wanted would be read for nothing.
    """
    want_y_bar, want_x, want_x_dot, want_weight, want_weight_dot, want_bias = (tensor is not None for tensor in results)
    x_dot = operands.x_dot if want_y_bar or want_x or want_weight else None
    y_bar_dot = operands.y_bar_dot if want_x or want_weight or want_bias else None
    weight_dot = operands.weight_dot if want_y_bar or want_x else None
    has_x_dot, has_y_bar_dot, has_weight_dot = (tensor is not None for tensor in (x_dot, y_bar_dot, weight_dot))
    project_g = want_x_dot or (want_x and has_x_dot)
    reads_weight = project_g or (want_y_bar and has_x_dot) or (want_x and has_y_bar_dot)
    reads_x = has_x_dot or (want_y_bar and has_weight_dot) or want_x or want_x_dot or want_weight or want_weight_dot
    reads_y_bar = (
        project_g
        or want_weight_dot
        or (want_x and has_weight_dot)
        or (want_weight and has_x_dot)
        or (want_bias and not has_y_bar_dot)
    )
    return Operands(
        operands.y_bar if reads_y_bar else None,
        operands.x if reads_x else None,
        y_bar_dot,
        x_dot,
        operands.weight if reads_weight else None,
        weight_dot,
        operands.bias_dot if want_y_bar else None,
    )


def num_row_means(needed: Operands, results: Results) -> int:
    """Means that the kernel which sweeps rows has room for, or 0 where no result takes one."""
    want_k = results.x_bar is not None and (needed.weight_dot is not None or needed.y_bar_dot is not None)
    return 7 if needed.x_dot is not None or results.x_dot_bar is not None or want_k else 0
