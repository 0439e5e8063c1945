"""The derivatives of a map along rows, of first and second order, as operators made from formulas.

A map `y = f(x)` keeps one tensor k for its derivatives, its output y or its input x, and perhaps statistics of x beside
it. Both derivatives are linear,

    vjp   x_bar = bwd(y_bar, k)          jvp   y_dot = jvp(x_dot, k)

and partial derivatives of one scalar, the pairing `L = <y_bar, jvp(x_dot, k)>`, so the vjp of either one is the
gradient of L: `y_bar_bar = jvp(x_dot, k)`, `x_dot_bar = bwd(y_bar, k)`, and a third part for k, which leads on to x.
Forward over reverse is `x_bar_dot = bwd(y_bar_dot, k)` and what the tangent of k adds. Third and higher orders
differentiate the references of these.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primitives._core import Primitive, triton_kernels_module, value_and_jvp
from primitives._core.trees.leaves import map_tensors
from primitives.ops import arguments
from primitives.ops.axes import Axes, def_axes
from primitives.ops.rules import accumulation_dtype, bind_family, called, define, empty_output, second_order

# Of contiguous tensors in the dtype of sums, and of the options.
Formula = Callable[..., Tensor]


class _Formulas(NamedTuple):
    bwd: Formula
    jvp: Formula
    along_k: Any
    of_k_dot: Any


class RowMap:
    """The primitives of all derivatives of a map, with kernels bound to all of them, and with their rules.

    If x is the only tensor that the map takes, `value` gets its vjp and jvp rules too.

    Args:
        value: The primitive of the map; what it declares as statistics is handed to the kernels of the derivatives.
        kept: `"y"` or `"x"`, what formulas take for k. Beside y, the vjp is told the dtype of x.
        options: Arguments of all derivatives that are not tensors, as the schema of `value` has them.
        bwd: `(y_bar, k, *options) -> x_bar`.
        jvp: `(x_dot, k, *options) -> y_dot`; None where the derivative is symmetric, so that it is `bwd`.
        second_order: Where second order has kernels: `(y_bar, k, x_dot, *options)`, the part of the gradient of L for
            k, and `(y_bar, k, k_dot, *options)`, what the tangent of k adds to that of x_bar.
        by_aten: `bwd` by one call of ATen, of which the kernels for the CPU are made.
        launchers: Returns what has the launchers as attributes; `kernels.softmax` has a module of them for its maps.

    Attributes:
        launchers: As given.
        ops: The primitives by what follows the name of `value` in theirs: `fwd` the value itself, `bwd`, `jvp`,
            `fwd_jvp` and, of second order, `double_backward` and `bwd_jvp`. The launchers are named so.
    """

    def __init__(
        self, value: Primitive, kept: str, options: str, bwd: Formula, jvp: Formula | None = None,
        second_order: tuple[Formula, Formula] | None = None, *, by_aten: Formula | None = None,
        launchers: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        self.ops = {"fwd": value}
        self._kept, self._options = kept, [option.split()[-1] for option in options.split(", ")]
        self._of_k, self._dtype = [kept, *value.spec.statistics], ["x_dtype"] * (kept == "y")
        along_k, of_k_dot = second_order or (None, None)
        self._formulas, self._on_cpu = _Formulas(bwd, jvp or bwd, along_k, of_k_dot), None
        if by_aten is not None:
            self._on_cpu = _Formulas(by_aten, jvp or by_aten, along_k, of_k_dot)
        tensors = ", ".join(f"Tensor {tensor}" for tensor in self._of_k)
        of_vjp = ", ".join([options, *(f"ScalarType {name}" for name in self._dtype)])
        self._make("bwd", f"(Tensor y_bar, {tensors}, {of_vjp}) -> Tensor x_bar", self._run_bwd, "y_bar")
        self._make("jvp", f"(Tensor x_dot, {tensors}, {options}) -> Tensor y_dot", self._run_jvp, "x_dot")
        self.ops["fwd_jvp"] = value_and_jvp(value, self.ops["jvp"])
        if value.spec.tensors == ("x",):
            self._define_first_order()
        if second_order is not None:
            bars = f"(Tensor y_bar_bar, Tensor {'output' if kept == 'y' else 'x'}_bar, Tensor x_dot_bar)"
            schema = f"(Tensor y_bar, {tensors}, Tensor x_dot, {options}, bool[] output_mask) -> {bars}"
            self._make("double_backward", schema, self._run_double_backward)
            dots = f"Tensor? y_bar_dot, Tensor? {kept}_dot"
            schema = f"(Tensor y_bar, {tensors}, {dots}, {of_vjp}) -> Tensor x_bar_dot"
            self._make("bwd_jvp", schema, self._run_bwd_jvp)
            self._define_second_order(is_symmetric=jvp is None)
        self.launchers = launchers or functools.partial(triton_kernels_module, f"softmax.{value.name}")
        bind_family(self.launchers, value.name, *self.ops.values())
        # A call may be cut along every axis but that of the map.
        statistics = "".join(f", {name}: *before *after" for name in value.spec.statistics)
        of = f"x y output mask: *before row *after{statistics}"
        def_axes(Axes(of, "before after", can_compose=True), *self.ops.values())

    def _make(self, suffix: str, schema: str, run: Callable[[_Formulas, dict[str, Any]], Any], *first: str) -> None:
        op = Primitive(
            f"{self.ops['fwd'].name}_{suffix}",
            schema,
            residuals=(*first, *self._of_k) if first else (),
            cached=self._of_k[1:],
            decomposable=True,
            namespace=self.ops["fwd"].spec.namespace,
        )
        on_cpu = self._on_cpu
        define(
            op,
            lambda by, call: run(by, vars(call)),
            lambda _: self._formulas,
            None if on_cpu is None else lambda _: on_cpu,
        )
        self.ops[suffix] = op

    # References, of arguments by name. Statistics are values of x, which formulas take from k again.

    def _run(self, formula: Formula, given: dict[str, Any], *names: str) -> Tensor:
        dtype = accumulation_dtype(given[self._kept].dtype)
        tensors = [given[name].contiguous().to(dtype) for name in names]
        return formula(*tensors, *[given[name] for name in self._options])

    def _run_bwd(self, by: _Formulas, given: dict[str, Any]) -> Tensor:
        return self._run(by.bwd, given, "y_bar", self._kept).to(given.get("x_dtype", given[self._kept].dtype))

    def _run_jvp(self, by: _Formulas, given: dict[str, Any]) -> Tensor:
        return self._run(by.jvp, given, "x_dot", self._kept).to(given[self._kept].dtype)

    def _run_double_backward(self, by: _Formulas, given: dict[str, Any]) -> tuple[Tensor, ...]:
        k = self._kept
        formulas = (by.jvp, "x_dot", k), (by.along_k, "y_bar", k, "x_dot"), (by.bwd, "y_bar", k)
        return tuple(
            self._run(formula, given, *names).to(given[like].dtype) if want else empty_output(given[k])
            for like, (formula, *names), want in zip(("y_bar", k, "x_dot"), formulas, given["output_mask"], strict=True)
        )

    def _run_bwd_jvp(self, by: _Formulas, given: dict[str, Any]) -> Tensor:
        k, terms = self._kept, []
        if given["y_bar_dot"] is not None:
            terms.append(self._run(by.bwd, given, "y_bar_dot", k))
        if given[f"{k}_dot"] is not None:
            terms.append(self._run(by.of_k_dot, given, "y_bar", k, f"{k}_dot"))
        return sum(terms[1:], terms[0]).to(given.get("x_dtype", given[k].dtype))

    def _define_first_order(self) -> None:
        value, bwd, jvp = self.ops["fwd"], self.ops["bwd"], self.ops["jvp"]
        for_jvp = attrgetter(*self._of_k, *self._options)
        for_bwd = attrgetter(*self._of_k, *self._options, *self._dtype)
        value.def_vjp(lambda residuals, cotangents, output_mask: {"x": bwd(cotangents.y, *for_bwd(residuals))})
        value.def_jvp(lambda residuals, tangents: jvp(tangents.x, *for_jvp(residuals)))

    def _define_second_order(self, *, is_symmetric: bool) -> None:
        bwd, jvp, bwd_jvp = self.ops["bwd"], self.ops["jvp"], self.ops["bwd_jvp"]
        second_order(bwd, jvp, bwd_jvp, self.ops["double_backward"])
        if is_symmetric:
            # It is linear in x_dot, as the backward is in y_bar.
            jvp.def_jvp(
                lambda r, t: called(
                    bwd_jvp,
                    r,
                    y_bar=r.x_dot,
                    y_bar_dot=t.x_dot,
                    **{f"{self._kept}_dot": getattr(t, self._kept)},
                    **({"x_dtype": r.y.dtype} if self._dtype else {}),
                )
            )


def over_axis(
    name: str, of_rows: Callable[[Tensor, Any, int], Tensor], input: Any, dim: int | None, *, namespace: str,
    like_torch: bool = False, dtype: torch.dtype | None = None, mask: Any = None, stacklevel: int = 3,
) -> Any:  # fmt: skip
    """What `of_rows` makes of every tensor of `input`, with a mask of its shape, and of the axis, from 0 on.

    Functions `like_torch` take `dtype`, which tensors that are not floating point become first, and no `dim`, for which
    torch's rule chooses one.
    """
    check = functools.partial(arguments.softmax, name, dim=dim, dtype=dtype, like_torch=like_torch)

    def compute(x: Tensor, mask: Tensor | None) -> Tensor:
        # The axis that torch chooses when none is given.
        axis = int(x.dim() not in (0, 1, 3)) if dim is None else dim
        if not x.is_floating_point():
            x = x.to(dtype)
        # A number has one axis to torch's softmax; the primitive wants it spelled out.
        rows = x if x.dim() > 0 else x.reshape(1)
        y = of_rows(rows, None if mask is None else mask.expand(rows.shape), axis % rows.dim())
        return y if x.dim() > 0 else y.reshape(())

    if dim is None:
        message = f"{name}: choosing dim implicitly is deprecated; pass dim=."
        warnings.warn(message, UserWarning, stacklevel=stacklevel)
    return map_tensors(name, check, compute, input, {"mask": mask}, namespace=namespace)
