"""Records of maps along one dim that have no parameters: what all of them are tested and compiled on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from perf.calls import Operands, randoms
from perf.ops.record import Op
from perf.ops.samples import Sample, make_options, make_samples
from perf.ops.workload import Workload
from primitives._core import registered_primitives


class RowMapOperands(Operands):
    """Operands of a map along `dim`; its derivatives take its output `y`, or x and the statistics of x."""

    @classmethod
    def draw(cls, shape: Sequence[int], dim: int, dtype: torch.dtype = torch.float32) -> Any:
        """Random operands."""
        drawn = randoms("x y y_bar x_dot y_bar_dot y_dot", shape, torch.float64)
        made = cls(**drawn, dim=dim)
        drawn["y"] = cls.value(cls.op(), **{**vars(made), "x": made.y})["y"]
        return made.change(**{name: x.to(dtype) for name, x in drawn.items()})

    @classmethod
    def of(cls, workload: Workload) -> Any:
        """Operands of a workload."""
        return cls.draw(workload.shape, workload.dim % len(workload.shape), workload.torch_dtype)

    def derived(self) -> dict[str, Any]:
        """The dtype of x, and its statistics."""
        return {**super().derived(), "x_dtype": self.x.dtype}


def row_map(
    name: str,
    operands: type[RowMapOperands],
    shapes: Sequence[tuple] = (),
    **parts: Any,
) -> Op:
    """The record of a map along the option `dim`, whose `call` and `truth` are given, with what else it has of its own.

    Args:
        name: As of `Op`.
        operands: Of the launchers.
        shapes: Of more samples, and their options.
        **parts: As of `Op`.
    """
    keeps_x = "x" in registered_primitives()[f"primitives::{name}_bwd"].spec.arguments
    all_shapes = [
        ((13, 31), make_options(dim=0)),
        ((0, 5), make_options(dim=1)),
        ((1, 1), make_options(dim=-1)),
        ((3, 257), make_options(dim=1)),
        ((2, 5, 3, 4), make_options(dim=1)),
        ((9,), make_options(dim=0)),
        *shapes,
    ]
    given: dict[str, Any] = {
        "arguments": ("x",),
        "differentiable": ("x",),
        "samples": make_samples(all_shapes),
        "small": Sample((2, 3, 2), make_options(dim=1)),
        "tiny": Sample((1, 3), make_options(dim=1)),
        "large": (
            Sample((3, 8195), make_options(dim=1)),
            Sample((3, 66_000), make_options(dim=1)),
            Sample((8200, 17), make_options(dim=0)),
        ),
        "not_kept": ("y" if keeps_x else "x",),
        "operands": operands.of,
        "options": lambda workload: {"dim": workload.dim},
    }
    return Op(name, **{**given, **parts})
