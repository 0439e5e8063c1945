"""Records of maps along one dim that have no parameters: what all of them are tested and compiled on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from perf.calls import Call, Operands, Step, randoms
from perf.ops.record import Op
from perf.ops.samples import Sample, make_samples, sample, shaped
from perf.ops.workload import Workload
from primitives._core import registered_primitives
from primitives.ops.row_maps import RowMap


class RowMapOperands(Operands):
    """Operands of a map along `dim`; its derivatives take its output `y`, or x and the statistic of x."""

    # One by a statistic, which has its launchers.
    MAP: ClassVar[RowMap | None] = None

    @classmethod
    def launchers(cls) -> dict[str, Any]:
        """The launchers, of a map by a statistic too."""
        return super().launchers() if cls.MAP is None else vars(cls.MAP.launchers())

    def _step(self, step: Step) -> Call:
        kept = "y" if self.MAP is None else "x"
        return super()._step(step._replace(results=[kept if name == "y" else name for name in step.results]))

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


def map_by_statistic(of: RowMap, options: dict[str, float], **parts: Any) -> Op:
    """The record of a map by a statistic, with the plans and workloads of log-softmax, and these numbers as options.

    Args:
        of: The map.
        options: What kernels are compiled and executed with.
        **parts: As of `row_map`.
    """
    name = of.ops["fwd"].name
    operands: Any = type(name, (RowMapOperands,), {"MODULES": (name,), "MAP": of, "DEFAULTS": options})
    return row_map(name, operands, like="log_softmax", **parts)


def row_map(
    name: str,
    operands: type[RowMapOperands],
    more: Sequence[Sample] = (),
    **parts: Any,
) -> Op:
    """The record of a map along the option `dim`, whose `call` and `truth` are given, with what else it has of its own.

    Args:
        name: As of `Op`.
        operands: Of the launchers.
        more: Samples of its own.
        **parts: As of `Op`.
    """
    keeps_x = "x" in registered_primitives()[f"primitives::{name}_bwd"].spec.arguments
    of_rows, of_columns = shaped((0, 5), (3, 257), (2, 5, 3, 4), dim=1), shaped((13, 31), (9,), dim=0)
    given: dict[str, Any] = {
        "arguments": ("x",),
        "differentiable": ("x",),
        "samples": make_samples([*of_columns, *of_rows, sample((1, 1), dim=-1), *more]),
        "small": sample((2, 3, 2), dim=1),
        "tiny": sample((1, 3), dim=1),
        "large": (*shaped((3, 8195), (3, 66_000), dim=1), sample((8200, 17), dim=0)),
        "not_kept": ("y" if keeps_x else "x",),
        "operands": operands.of,
        "options": lambda workload: {"dim": workload.dim},
    }
    return Op(name, **{**given, **parts})
