"""Kernels and launches of the derivatives of a map along rows, from a few device functions and a table of each.

A map without parameters keeps one tensor k for its derivatives, its output y or its input x, and perhaps numbers of its
rows. The gradient of `L = <y_bar, jvp(x_dot, k)>` has the vjp and the jvp among its results, and forward over reverse
adds what the tangents of y_bar and k make. The module of a map has four device functions, as `rows` describes `TERMS`
and `EMIT`, for operands x and numbers r of a row, which end with the scale if there is one:

    pairing_terms(x, p, r, mask), pairing_emit(x, p, r, s, mask, num_cols)
        x are y_bar, k and x_dot; the tiles that are written are those of y_bar_bar, k_bar and x_dot_bar
    bwd_jvp_terms(x, p, r, mask), bwd_jvp_emit(x, p, r, s, mask, num_cols)
        x are y_bar, k, y_bar_dot and k_dot; the one tile that is written is that of x_bar_dot

The forward of a map that keeps no numbers is made likewise of two functions that are named `pairing_terms` and
`pairing_emit` too: k is x, and the tiles that are written are those of y and y_dot.

`derivative_kernel` makes its kernel of them, and `RowMapKernels`, of what each result takes, its launchers.
"""

# Pyright takes device functions for Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from triton_kernels.rows.kernel import row_op
from triton_kernels.rows.launch import Operands, RowSums, launch_rows
from triton_kernels.rows.map_plan import plan_log_softmax
from triton_kernels.rows.view import reduction_view
from triton_kernels.runtime.kernel import stride_independent_jit
from triton_kernels.runtime.numbers import accumulation_dtype, float64_bits
from triton_kernels.runtime.views import device_guard
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from triton_kernels.runtime.kernel import Kernel


@triton.jit
def pairing_terms(x, p, r, mask):
    """A map has its own."""
    return ()


@triton.jit
def pairing_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    """A map has its own."""
    return ()


@triton.jit
def bwd_jvp_terms(x, p, r, mask):
    """A map has its own."""
    return ()


@triton.jit
def bwd_jvp_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    """A map has its own."""
    return ()


def row_map_kernel(
    y_bar_ptr, y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride, k_ptr, k_segment_stride, k_row_stride,
    k_col_stride, dot_ptr, dot_segment_stride, dot_row_stride, dot_col_stride,
    k_dot_ptr, k_dot_segment_stride, k_dot_row_stride, k_dot_col_stride, number_0_ptr, number_1_ptr,
    scale_low, scale_high, out_0_ptr, out_1_ptr, out_2_ptr, out_segment_stride, out_row_stride, out_col_stride,
    parts_ptr, num_splits, num_rows, num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr,
    TWO_LEVEL: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, MODE: tl.constexpr, SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_SPLITS: tl.constexpr, SUMS: tl.constexpr, WANTED: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The results for which there is memory: of the pairing, or (`SECOND`) the tangent of x_bar."""
    row_op(
        (y_bar_ptr, k_ptr, dot_ptr, k_dot_ptr),
        ((y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride), (k_segment_stride, k_row_stride, k_col_stride),
         (dot_segment_stride, dot_row_stride, dot_col_stride),
         (k_dot_segment_stride, k_dot_row_stride, k_dot_col_stride)),
        (), (), (number_0_ptr, number_1_ptr), (0 if number_0_ptr is None else 1) + (0 if number_1_ptr is None else 1),
        (out_0_ptr, out_1_ptr, out_2_ptr), (out_segment_stride, out_row_stride, out_col_stride),
        (None, None, None), parts_ptr, num_splits, num_rows, bwd_jvp_emit if SECOND else pairing_emit,
        (0.0, 0.0) if SUMS == 2 else (0.0, 0.0, 0.0), num_cols, DTYPE, AXES, TWO_LEVEL, ALIGN, ROW_ALIGN, BLOCK_ROWS,
        BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS,
        TERMS=bwd_jvp_terms if SECOND else pairing_terms, WANTED=WANTED, scale_low=scale_low, scale_high=scale_high,
    )  # fmt: skip


def derivative_kernel(functions: Mapping[str, Any]) -> Kernel:
    """`row_map_kernel` with the device functions of a map that are named as those of this module.

    Inductor writes the sources of a kernel out, where a function goes by its own name.
    """
    names = [name for name in globals() if name.startswith(("pairing_", "bwd_jvp_"))]
    own = {getattr(function, "__name__", None): function for function in functions.values()}
    known = {**globals(), **{name: own[name] for name in names if name in own}}
    kernel = FunctionType(row_map_kernel.__code__, known, row_map_kernel.__name__)
    return stride_independent_jit(functools.update_wrapper(kernel, row_map_kernel, updated=()))


class Part(NamedTuple):
    """What a result takes, or what a tangent adds to one.

    Attributes:
        sums: Places of the sums over a row, 0 to 2, of the terms that are returned there.
        summed: Operands of these terms.
        written: Operands that are read (again) to write.
    """

    sums: tuple[int, ...]
    summed: tuple[str, ...]
    written: tuple[str, ...]


class RowMapKernels(NamedTuple):
    """The kernel of a map, and what its results take.

    Attributes:
        kernel: From `derivative_kernel`.
        kept: Name of k, `"y"` or `"x"`.
        pairing: By result, y_bar_bar, k_bar and x_dot_bar.
        bwd_jvp: By tangent, y_bar_dot and that of k.
        numbers: Names of the numbers of the rows.
        options: Of the map: the reduced dim, and perhaps the scale.
        forward: Its kernel, and what y and y_dot take, of x and x_dot; None where the module has launchers of its own.
    """

    kernel: Kernel
    kept: str
    pairing: tuple[Part, Part, Part]
    bwd_jvp: tuple[Part, Part]
    numbers: tuple[str, ...] = ()
    options: tuple[str, ...] = ("dim",)
    forward: tuple[Kernel, Part, Part] | None = None

    def launchers(self, module: str) -> list[Callable[..., Any]]:
        """`<op>_jvp`, `_bwd`, `_pairing` and `_bwd_jvp` of the op of `module`, by position, of primitives' arguments.

        Behind them come `_fwd` and `_fwd_jvp`, of results in the dtype of x, if there is a `forward`.

        Only what the wanted results take is read. Those of the pairing have the dtypes of y_bar, k and x_dot, and no
        elements where they are not wanted; tangents may be None for zero.
        """
        of_k = (self.kept, *self.numbers)
        of_vjp = (*self.options, *["x_dtype"] * (self.kept == "y"))
        names = {
            "jvp": ("x_dot", *of_k, *self.options),
            "bwd": ("y_bar", *of_k, *of_vjp),
            "pairing": ("y_bar", *of_k, "x_dot", *self.options, "wanted"),
            "bwd_jvp": ("y_bar", *of_k, "y_bar_dot", f"{self.kept}_dot", *of_vjp),
        }
        if self.forward is not None:
            names |= {"fwd": ("x", *self.options), "fwd_jvp": ("x", "x_dot", *self.options)}
        return [self._launcher(module, role, of_role) for role, of_role in names.items()]

    def _launcher(self, module: str, role: str, names: Sequence[str]) -> Callable[..., Any]:
        run = getattr(self, f"_{role}")

        def launcher(*args: Any) -> Any:
            return run(dict(zip(names, args, strict=True)))

        launcher.__name__, launcher.__module__ = f"{module.rpartition('.')[2]}_{role}", module
        absent = ("y_bar_dot", f"{self.kept}_dot") if role == "bwd_jvp" else ()
        launcher.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, annotation="Tensor | None")
                if name in absent
                else inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
                for name in names
            ]
        )
        return tunable(launcher)

    def _fwd(self, given: Mapping[str, Any]) -> Tensor:
        return self._values(given, 1)[0]

    def _fwd_jvp(self, given: Mapping[str, Any]) -> list[Tensor]:
        return self._values(given, 2)

    def _values(self, given: Mapping[str, Any], count: int) -> list[Tensor]:
        assert self.forward is not None  # noqa: S101 - else it has no launcher
        x, (kernel, *parts) = given["x"], self.forward
        inputs = {"y_bar": None, "x": x, "x_dot": given.get("x_dot"), "k_dot": None}
        outputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(count)]
        self._launch(kernel, inputs, [*outputs, None, None][:3], parts, parts[:count], given, SECOND=False)
        return outputs

    def _jvp(self, given: Mapping[str, Any]) -> Tensor:
        return self._gradients(given, (True, False, False))[0]

    def _bwd(self, given: Mapping[str, Any]) -> Tensor:
        return self._gradients(given, (False, False, True))[2]

    def _pairing(self, given: Mapping[str, Any]) -> tuple[Tensor, ...]:
        k = given[self.kept]
        return tuple([k.new_empty(0) if out is None else out for out in self._gradients(given, given["wanted"])])

    def _gradients(self, given: Mapping[str, Any], wanted: Sequence[bool]) -> list[Any]:
        k = given[self.kept]
        inputs = {name: given.get(name) for name in ("y_bar", self.kept, "x_dot", "k_dot")}
        dtypes = [(k if like is None else like).dtype for like in [*inputs.values()][:3]]
        dtypes[2] = given.get("x_dtype", dtypes[2])
        outputs = [
            torch.empty(k.shape, dtype=dtype, device=k.device) if want else None
            for dtype, want in zip(dtypes, wanted, strict=True)
        ]
        parts = [part for part, want in zip(self.pairing, wanted, strict=True) if want]
        self._launch(self.kernel, inputs, outputs, (*self.pairing, *self.bwd_jvp), parts, given, SECOND=False)
        return outputs

    def _bwd_jvp(self, given: Mapping[str, Any]) -> Tensor:
        k, dots = given[self.kept], ("y_bar_dot", f"{self.kept}_dot")
        parts = [part for part, dot in zip(self.bwd_jvp, dots, strict=True) if given[dot] is not None]
        make = torch.empty if parts else torch.zeros
        x_bar_dot = make(k.shape, dtype=given.get("x_dtype", k.dtype), device=k.device)
        if parts:
            inputs = {name: given[name] for name in ("y_bar", self.kept, *dots)}
            # More than two operands of sums take as many registers as two results.
            num_results = 1 + (len({name for part in parts for name in part.summed}) > 2)
            every, outputs = (*self.pairing, *self.bwd_jvp), [x_bar_dot, None, None]
            self._launch(self.kernel, inputs, outputs, every, parts, given, num_results, SECOND=True)
        return x_bar_dot

    def _launch(
        self,
        kernel: Kernel,
        inputs: Mapping[str, Tensor | None],
        outputs: Sequence[Tensor | None],
        every: Sequence[Part],
        parts: Sequence[Part],
        given: Mapping[str, Any],
        num_results: int = 0,
        **constants: bool,
    ) -> None:
        sums = {place for part in parts for place in part.sums}
        num_places = max(2, *(1 + place for part in every for place in part.sums))
        summed = [name for name in inputs if any(name in part.summed for part in parts)]
        writes = [name for name in inputs if any(name in part.written for part in parts)]
        taken = {name: x if name in (self.kept, *summed, *writes) else None for name, x in inputs.items()}
        names = (*inputs, *self.numbers)
        slots = dict(zip(names, ("y_bar", "k", "dot", "k_dot", "number_0", "number_1"), strict=False))
        rows = {name: given.get(name) for name in (*self.numbers, *("number_0", "number_1")[len(self.numbers) :])}
        launch_map(
            kernel,
            taken,
            {f"out_{place}": out for place, out in enumerate(outputs)},
            given["dim"],
            RowSums(num_places, summed, len(sums)),
            writes,
            statistics=rows,
            num_results=num_results,
            slots=slots,
            SUMS=num_places,
            WANTED=sum(1 << place for place in sums),
            **scale_bits(given.get("scale")),
            **constants,
        )


def scale_bits(scale: float | None) -> dict[str, int | None]:
    """A factor as the kernels take it; None for none, and for 1."""
    low, high = (None, None) if scale in (None, 1.0) else float64_bits(scale)
    return {"scale_low": low, "scale_high": high}


def launch_map(
    kernel: Kernel,
    inputs: Mapping[str, Tensor | None],
    outputs: Mapping[str, Tensor | None],
    dim: int,
    sums: RowSums,
    writes: Collection[str] | None = None,
    dtypes: Sequence[torch.dtype] = (),
    statistics: Mapping[str, Tensor | None] | None = None,
    row_outputs: Mapping[str, Tensor | None] | None = None,
    num_results: int = 0,
    slots: Mapping[str, str] | None = None,
    **constants: Any,
) -> None:
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
        slots: The kernel's names of inputs and statistics, where these are others.
        **constants: Further constants of the kernel.
    """
    numbers = {name: None if one is None else one.contiguous() for name, one in (statistics or {}).items()}
    row_outputs = row_outputs or {}
    wanted = [tensor for tensor in outputs.values() if tensor is not None]
    first = next(tensor for tensor in (*wanted, *inputs.values()) if tensor is not None)
    if not (wanted or row_outputs) or not first.numel():
        return
    view = reduction_view([*inputs.values()], first, dim, may_repeat="mask" in inputs)
    dtypes = dtypes or [tensor.dtype for tensor in inputs.values() if tensor is not None]
    dtype = accumulation_dtype(functools.reduce(torch.promote_types, dtypes))
    operands = Operands(view, tuple(inputs), {}, numbers, outputs, row_outputs, dtype, first.device, slots=slots or {})
    itemsizes = [tensor.element_size() for tensor in view.tensors if tensor is not None]
    plan = plan_log_softmax(
        (view.num_segments, view.num_rows, view.num_cols),
        view.along_rows,
        max(itemsizes),
        dtype.itemsize,
        len(itemsizes),
        operands.device,
        max(len(wanted), num_results),
        len(sums.reads),
        sums.places if sums.wanted is None else sums.wanted,
        view.is_aligned(min(itemsizes)),
    )
    if "mask" in inputs:
        constants["mask_repeats"] = view.repeats
    with device_guard(first):
        launch_rows(kernel, operands, plan, sums, writes, **constants)
