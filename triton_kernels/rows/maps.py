"""Kernels and launches of the derivatives of a map along rows, from a few device functions and a table of each.

A map without parameters keeps one tensor k for its derivatives, its output y or its input x, and perhaps numbers of its
rows. The gradient of `L = <y_bar, jvp(x_dot, k)>` has the vjp and the jvp among its results, and forward over reverse
adds what the tangents of y_bar and k make. The module of a map has four device functions, as `rows` describes `TERMS`
and `EMIT`, for operands x and numbers r of a row, which end with the scale if there is one:

    double_backward_terms(x, p, r, mask), double_backward_emit(x, p, r, s, mask, num_cols)
        x are y_bar, k and x_dot; the tiles that are written are those of y_bar_bar, k_bar and x_dot_bar
    bwd_jvp_terms(x, p, r, mask), bwd_jvp_emit(x, p, r, s, mask, num_cols)
        x are y_bar, k, y_bar_dot and k_dot; the one tile that is written is that of x_bar_dot
    fwd_terms(x, p, r, mask), fwd_emit(x, p, r, s, mask, num_cols)
        if the map needs no more than plain sums: x are x and x_dot, for y and y_dot; the first sums are its numbers

`RowMapKernels` makes the kernels of them, and, of what each result takes, the launchers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.kernel import Kernel
from ..runtime.numbers import accumulation_dtype, float64_bits
from ..runtime.views import device_guard
from ..tuning import tunable
from .launch import Operands, RowSums, launch_rows
from .plan import plan_log_softmax
from .template import row_kernel
from .view import reduction_view


class Part(NamedTuple):
    """What a result takes, or what a tangent adds to one.

    Attributes:
        sums: Places of the sums over a row, of the terms that are returned there; plans are made for three.
        summed: Operands of these terms.
        written: Operands that are read (again) to write.
    """

    sums: tuple[int, ...]
    summed: tuple[str, ...]
    written: tuple[str, ...]


@dataclass
class RowMapKernels:
    """The kernels of a map, and what their results take.

    Attributes:
        module: Name of the module of its launchers, which ends in that of the map.
        functions: Its device functions by name, among others perhaps.
        kept: Name of k, `"y"` or `"x"`.
        double_backward: By result, y_bar_bar, k_bar and x_dot_bar.
        bwd_jvp: By tangent, y_bar_dot and that of k.
        numbers: Names of the numbers of the rows.
        options: Of the map: the reduced dim, and perhaps the scale.
        forward: What y and y_dot take, of x and x_dot, or a function that makes both from what a launcher is given.
        inputs: Of the value.
        num_constants: With how many constants the numbers of a row end (see `NUMBERS` in `rows.kernel`).
        constants: Makes them of the options.
        num_results: For how many outputs to plan at least, where formulas take the registers of more than there are.
    """

    module: str
    functions: Mapping[str, Any]
    kept: str
    double_backward: tuple[Part, Part, Part]
    bwd_jvp: tuple[Part, Part]
    numbers: tuple[str, ...] = ()
    options: tuple[str, ...] = ("dim",)
    forward: tuple[Part, Part] | Callable[[Mapping[str, Any]], list[Tensor]] | None = None
    inputs: tuple[str, ...] = ("x",)
    num_constants: int = 0
    constants: Callable[[Mapping[str, Any]], Sequence[float]] = lambda given: ()
    num_results: int = 0

    def __post_init__(self) -> None:
        """Make the kernels, by what follows the name of the map in theirs.

        Raises:
            TypeError: If a device function is missing.
        """
        k, self.kernels = self.kept, dict[str, Kernel]()
        tables: dict[str, dict[str, Any]] = {
            "double_backward": {"x": ("y_bar", k, "x_dot"), "r": self.numbers, "out": self._bars()},
            "bwd_jvp": {"x": ("y_bar", k, "y_bar_dot", f"{k}_dot"), "r": self.numbers, "out": ("x_bar_dot",)},
        }
        if isinstance(self.forward, tuple):
            tables["fwd"] = {"x": ("x", "x_dot"), "out": ("y", "y_dot"), "s": self.numbers}
        for role, table in tables.items():
            slots: dict[str, Any] = {slot: self.functions.get(f"{role}_{slot}") for slot in ("terms", "emit")}
            name = f"{self.module.rpartition('.')[2]}_{role}_kernel"
            table |= {"numbers": self.num_constants, "scaled": "scale" in self.options, "any_strides": True}
            self.kernels[role] = row_kernel(name, **table, **slots)

    def _bars(self) -> tuple[str, str, str]:
        return "y_bar_bar", "output_bar" if self.kept == "y" else "x_bar", "x_dot_bar"

    def launchers(self) -> list[Callable[..., Any]]:
        """`<op>_jvp`, `_bwd`, `_double_backward` and `_bwd_jvp`, by position, of the arguments of the op's primitives.

        Behind them come `_fwd` and `_fwd_jvp` if there is a `forward`, of results in the dtype of x, or where a
        function makes them in `output_dtype`.

        Only what the wanted results take is read. Those of the double backward have the dtypes of y_bar, k and x_dot,
        and no elements where they are not wanted; tangents may be None for zero.
        """
        of_k = (self.kept, *self.numbers)
        of_vjp = (*self.options, *["x_dtype"] * (self.kept == "y"))
        names = {
            "jvp": ("x_dot", *of_k, *self.options),
            "bwd": ("y_bar", *of_k, *of_vjp),
            "double_backward": ("y_bar", *of_k, "x_dot", *self.options, "output_mask"),
            "bwd_jvp": ("y_bar", *of_k, "y_bar_dot", f"{self.kept}_dot", *of_vjp),
        }
        if self.forward is not None:
            of_value = (*self.options, *["output_dtype"] * callable(self.forward))
            names |= {"fwd": (*self.inputs, *of_value), "fwd_jvp": (*self.inputs, "x_dot", *of_value)}
        return [self._launcher(role, of_role) for role, of_role in names.items()]

    def _launcher(self, role: str, names: Sequence[str]) -> Callable[..., Any]:
        def launcher(*args: Any) -> Any:
            return getattr(self, f"_{role}")(dict(zip(names, args, strict=True)))

        launcher.__name__, launcher.__module__ = f"{self.module.rpartition('.')[2]}_{role}", self.module
        absent = ("y_bar_dot", f"{self.kept}_dot") if role == "bwd_jvp" else ("mask",)
        launcher.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, annotation="Tensor | None")
                if name in absent
                else inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
                for name in names
            ]
        )
        return tunable(launcher)

    def _fwd(self, given: Mapping[str, Any]) -> Any:
        results = self._fwd_jvp(given)
        return tuple(results) if len(results) > 1 else results[0]

    def _fwd_jvp(self, given: Mapping[str, Any]) -> list[Tensor]:
        if callable(self.forward):
            return self.forward(given)
        assert self.forward is not None  # noqa: S101 - else it has no launcher
        x, inputs = given["x"], {"x": given["x"], "x_dot": given.get("x_dot")}
        names = ("y", "y_dot")[: 1 + ("x_dot" in given)]
        outputs = {name: torch.empty(x.shape, dtype=x.dtype, device=x.device) for name in names}
        shape = [size for dim, size in enumerate(x.shape) if dim != given["dim"]]
        # No kernel sums up rows without columns.
        make = x.new_empty if x.numel() else x.new_zeros
        numbers = {name: make(shape, dtype=accumulation_dtype(x.dtype)) for name in self.numbers}
        parts = self.forward[: len(names)]
        self._launch("fwd", inputs, {"y_dot": None, **outputs}, self.forward, parts, given, row_outputs=numbers)
        y, *dots = outputs.values()
        return [y, *numbers.values(), *dots]

    def _jvp(self, given: Mapping[str, Any]) -> Tensor:
        return self._gradients(given, (True, False, False))[0]

    def _bwd(self, given: Mapping[str, Any]) -> Tensor:
        return self._gradients(given, (False, False, True))[2]

    def _double_backward(self, given: Mapping[str, Any]) -> tuple[Tensor, ...]:
        k = given[self.kept]
        return tuple([k.new_empty(0) if out is None else out for out in self._gradients(given, given["output_mask"])])

    def _gradients(self, given: Mapping[str, Any], output_mask: Sequence[bool]) -> list[Any]:
        k = given[self.kept]
        inputs = {name: given.get(name) for name in ("y_bar", self.kept, "x_dot")}
        dtypes = [(k if like is None else like).dtype for like in inputs.values()]
        dtypes[2] = given.get("x_dtype", dtypes[2])
        outputs = {
            name: torch.empty(k.shape, dtype=dtype, device=k.device) if want else None
            for name, dtype, want in zip(self._bars(), dtypes, output_mask, strict=True)
        }
        parts = [part for part, want in zip(self.double_backward, output_mask, strict=True) if want]
        self._launch("double_backward", inputs, outputs, self.double_backward, parts, given)
        return [*outputs.values()]

    def _bwd_jvp(self, given: Mapping[str, Any]) -> Tensor:
        k, dots = given[self.kept], ("y_bar_dot", f"{self.kept}_dot")
        parts = [part for part, dot in zip(self.bwd_jvp, dots, strict=True) if given[dot] is not None]
        make = torch.empty if parts else torch.zeros
        x_bar_dot = make(k.shape, dtype=given.get("x_dtype", k.dtype), device=k.device)
        if parts:
            inputs = {name: given[name] for name in ("y_bar", self.kept, *dots)}
            # More than two operands of sums take as many registers as two results.
            num_results = 1 + (len({name for part in parts for name in part.summed}) > 2)
            self._launch("bwd_jvp", inputs, {"x_bar_dot": x_bar_dot}, self.bwd_jvp, parts, given, num_results)
        return x_bar_dot

    def _launch(
        self, role: str, inputs: Mapping[str, Tensor | None], outputs: Mapping[str, Tensor | None],
        every: Sequence[Part], parts: Sequence[Part], given: Mapping[str, Any], num_results: int = 0,
        row_outputs: Mapping[str, Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        sums = {place for part in parts for place in part.sums}
        summed = [name for name in inputs if any(name in part.summed for part in parts)]
        writes = [name for name in inputs if any(name in part.written for part in parts)]
        launch_map(
            self.kernels[role],
            {name: x if name in (self.kept, *summed, *writes) else None for name, x in inputs.items()},
            outputs,
            given["dim"],
            RowSums(1 + max(place for part in every for place in part.sums), summed, sum(1 << place for place in sums)),
            writes,
            statistics={name: given[name] for name in self.numbers if name in given},
            row_outputs=row_outputs,
            num_results=max(num_results, self.num_results),
            **{f"NUMBER_{place}": number for place, number in enumerate(self.constants(given))},
            **scale_bits(given.get("scale")),
        )


def scale_bits(scale: float | None) -> dict[str, Any]:
    """A factor as the kernels take it; None for none, and for 1."""
    low, high = (None, None) if scale in (None, 1.0) else float64_bits(scale)
    return {"scale_low": low, "scale_high": high}


def launch_map(
    kernel: Kernel, inputs: Mapping[str, Tensor | None], outputs: Mapping[str, Tensor | None], dim: int, sums: RowSums,
    writes: Collection[str] | None = None, dtypes: Sequence[torch.dtype] = (),
    statistics: Mapping[str, Tensor | None] | None = None, row_outputs: Mapping[str, Tensor | None] | None = None,
    num_results: int = 0, **constants: Any,
) -> None:  # fmt: skip
    """Launch a kernel over rows along `dim`, unless there is nothing to write.

    Args:
        kernel: The kernel.
        inputs: Operands by name; None for one that is absent.
        outputs: Results by name; None for one that is not wanted.
        dim: Reduced dim.
        sums: The terms that are summed over a row.
        writes: Inputs that are read again to write a row that is swept; None for all.
        dtypes: Dtypes whose numbers the arithmetic has to hold; those of the inputs if empty.
        statistics: Numbers of the rows that are read, by name.
        row_outputs: Numbers of the rows that are written, by name; None for one that is not wanted.
        num_results: For how many outputs to plan, if it takes the registers of more than there are.
        **constants: Further constants of the kernel.
    """
    numbers = {name: None if one is None else one.contiguous() for name, one in (statistics or {}).items()}
    row_outputs = row_outputs or {}
    there = [tensor for tensor in outputs.values() if tensor is not None]
    first = next(tensor for tensor in (*there, *inputs.values()) if tensor is not None)
    if not (there or row_outputs) or not first.numel():
        return
    view = reduction_view([*inputs.values()], first, dim, may_repeat="mask" in inputs)
    dtypes = dtypes or [tensor.dtype for tensor in inputs.values() if tensor is not None]
    dtype = accumulation_dtype(functools.reduce(torch.promote_types, dtypes))
    operands = Operands(view, tuple(inputs), {}, numbers, outputs, row_outputs, dtype, first.device)
    itemsizes = [tensor.element_size() for tensor in view.tensors if tensor is not None]
    plan = plan_log_softmax(
        (view.num_segments, view.num_rows, view.num_cols),
        view.along_rows,
        max(itemsizes),
        dtype.itemsize,
        len(itemsizes),
        operands.device,
        max(len(there), num_results),
        len(sums.reads),
        sums.num_taken,
        view.is_aligned(min(itemsizes)),
    )
    if "mask" in inputs:
        constants["mask_repeats"] = view.repeats
    with device_guard(first):
        launch_rows(kernel, operands, plan, sums, writes, **constants)
