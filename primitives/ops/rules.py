"""Small pieces that the references and rules of several families use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, get_type_hints

import torch
from torch import Tensor

from primitives._core import Primitive, triton_kernels_module
from primitives._core.sequences import tuple_getter
from primitives.ops.arguments import LOW_PRECISION


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums and statistics: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_output(x: Tensor) -> Tensor:
    """Stands for an output that was not asked for: no elements, the dtype and device of `x`."""
    return x.new_empty(0)


# `grouped` of x whose channels are adjacent in memory.
CHANNELS_LAST = 2


def with_layout(v: Tensor, grouped: int) -> Tensor:
    """`v`, of the shape of x `[..., groups, channels, positions]` where x is `grouped`, in the order of its memory."""
    return v.movedim(-1, -3).contiguous().movedim(-3, -1) if grouped == CHANNELS_LAST else v.contiguous()


def weight_beside(bias: Tensor | None, weight: Tensor | None, x: Tensor) -> Tensor | None:
    """`weight`, or ones where a bias without one has another dtype than `x`.

    Norms sum the derivatives of parameters in the dtype of the weight, and without one in that of `x`.
    """
    if weight is None and bias is not None and bias.dtype != x.dtype:
        return torch.ones_like(bias)
    return weight


def computed(cotangents: Sequence[Tensor | None], output_mask: Sequence[bool]) -> list[Tensor | None]:
    """The cotangents of the outputs that were computed: those of stand-ins (`empty_output`) mean nothing."""
    return [bar if want else None for bar, want in zip(cotangents, output_mask, strict=True)]


def masked(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The logits scale * x + mask, and -inf where a position takes no part."""
    u = x if scale == 1.0 else scale * x
    if mask is None:
        return u
    if mask.dtype == torch.bool:
        return u.masked_fill(~mask, -torch.inf)
    return (u + mask.to(x.dtype)).masked_fill(mask == -torch.inf, -torch.inf)


def bind_family(
    module: str | Callable[[], Any], prefix: str, value: Primitive, *ops: Primitive, **constants: bool | int
) -> None:
    """`bind_kernels` of operators named after `value`: `<prefix>_fwd` for that, `<prefix>_bwd` for its `_bwd`."""
    for op in (value, *ops):
        bind_kernels(op, module, f"{prefix}{op.name.removeprefix(value.name) or '_fwd'}", **constants)


def bind_kernels(op: Primitive, module: str | Callable[[], Any], name: str, **constants: bool | int) -> None:
    """Make the launcher `name` of `kernels.<module>`, or of what a function returns, the CUDA kernel of `op`.

    The launcher gets the arguments of `op`, and the `constants`, that its own parameters are named after, and its
    defaults for others; the module is imported at the first call.
    """

    @functools.cache
    def loaded() -> tuple[Any, Callable[[Sequence[Any]], tuple], tuple]:
        launchers = triton_kernels_module(module) if isinstance(module, str) else module()
        parameters = inspect.signature(getattr(launchers, name)).parameters
        # By position, which launch recipes ask for.
        others = {key: parameter.default for key, parameter in parameters.items()} | constants
        places = [*op.spec.arguments, *others]
        return launchers, tuple_getter([places.index(parameter) for parameter in parameters]), tuple(others.values())

    @op.def_kernel("cuda")
    def kernel(*args: Any) -> Any:
        launchers, pick, others = loaded()
        # Looked up at each call: tests and tuning may put another launcher in its place.
        return getattr(launchers, name)(*pick((*args, *others)))


def define(
    op: Primitive, formula: Callable[..., Any], pieces: Callable[[Any], Any], on_cpu: Callable[[Any], Any] | None = None
) -> None:
    """Define `op`, and its kernel for the CPU, by one formula.

    Args:
        op: The operator.
        formula: `(pieces, call) -> outputs`, where the fields of `call` are the arguments by name.
        pieces: `call -> pieces`, functions that derivatives go through.
        on_cpu: `call -> pieces` as values, or None for a call that is left to the reference.
    """

    def by(make: Callable[[Any], Any]) -> Callable[..., Any]:
        def implementation(*args: Any) -> Any:
            call = SimpleNamespace(**dict(zip(op.spec.arguments, args, strict=True)))
            made = make(call)
            return None if made is None else formula(made, call)

        return implementation

    op.def_reference(by(pieces))
    if on_cpu is not None:
        op.def_kernel("cpu")(by(on_cpu))


def cast_to_float32(primals: Any) -> Any:
    """Autocast rule of the operations that torch runs in float32: low-precision tensors are cast up."""
    return primals._make(
        value.float() if isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION else value
        for value in primals
    )


def output_in_float32(primals: Any) -> Any:
    """Autocast rule of the softmaxes, which torch runs in float32 unless a dtype was asked for."""
    if primals.output_dtype is None and primals.x.dtype in LOW_PRECISION:
        return primals._replace(output_dtype=torch.float32)
    return primals


def schema_of(options: type) -> str:
    """The fields of a named tuple as arguments of a schema."""
    return ", ".join(f"{kind.__name__} {name}" for name, kind in get_type_hints(options).items())


def derivatives(
    value: Primitive, kept: str, wrt: str, options: str, *, second: str = "", keeps: str = "", linear: str = ""
) -> list[Primitive]:
    """The operators `<value>_bwd` and `<value>_jvp`, by which `value` gets its rules, and perhaps `<value>_bwd_jvp`.

    With bars and dots that are named after results and arguments,

        bwd       (y_bar, *kept, *options, bool[] output_mask) -> x_bar of each argument
        jvp       (*kept, x_dot of each argument, *options) -> y_dot
        bwd_jvp   (y_bar, *kept, y_bar_dot, *dots, *options, bool[] output_mask) -> x_bar_dot of each argument

    Args:
        value: The operator.
        kept: The arguments and results of `value` that all three take.
        wrt: The arguments that derivatives are taken of.
        options: Other arguments, as in a schema.
        second: The arguments whose tangents `bwd_jvp` takes; none where it is not asked for.
        keeps: What bwd and jvp keep beside tensors that are named here, for their own derivatives.
        linear: The arguments that the results are linear in, whose tangents no other derivative needs.
    """
    spec, own, args = value.spec, kept.split(), wrt.split()
    types = {text.split()[1]: text.split()[0] for text in spec.schema.split(") -> ")[0][1:].split(", ")}
    results = spec.differentiable_outputs
    maybe, parens = ("Tensor?", "({})") if len(results) > 1 else ("Tensor", "{}")

    def listed(kind: str, names: Sequence[str], end: str) -> str:
        return ", ".join(f"{kind} {name}{end}" for name in names)

    bars, dots = listed(maybe, results, "_bar"), listed("Tensor?", args, "_dot")
    of = ", ".join(f"{types.get(name, 'Tensor')} {name}" for name in own)
    schemas = {
        "bwd": f"({bars}, {of}, {options}, bool[] output_mask) -> ({listed('Tensor', args, '_bar')})",
        "jvp": f"({of}, {dots}, {options}) -> {parens.format(listed('Tensor', results, '_dot'))}",
    }
    if second:
        moved = f"{listed('Tensor?', results, '_bar_dot')}, {listed('Tensor?', second.split(), '_dot')}"
        bars_dot = listed("Tensor", args, "_bar_dot")
        schemas["bwd_jvp"] = f"({bars}, {of}, {moved}, {options}, bool[] output_mask) -> ({bars_dot})"
    kept_dots = [f"{name}_dot" for name in args if name not in linear.split()]
    residuals = {"bwd": [*(f"{name}_bar" for name in results), *own], "jvp": [*own, *kept_dots]}
    ops = []
    for suffix, schema in schemas.items():
        more = [name for name in keeps.split() if f" {name}" in schema]
        saved, cached = [*residuals[suffix], *more] if suffix in residuals else [], set(own) & {*spec.outputs}
        name, namespace = f"{value.name}_{suffix}", spec.namespace
        ops.append(Primitive(name, schema, residuals=saved, cached=[*cached], decomposable=True, namespace=namespace))
    first_order(value, *ops[:2])
    return ops


def first_order(value: Primitive, bwd: Primitive, jvp: Primitive) -> None:
    """Give `value` the rules that `bwd` and `jvp` compute.

    Their `y_bar` is the cotangent of y, `x_dot` the tangent of x, and all else a residual; `bwd` returns
    `x_bar` for x.
    """
    bars = [name.removesuffix("_bar") for name in bwd.spec.arguments if name.endswith("_bar")]
    kept, perturbable = bwd.spec.arguments[len(bars) : -1], [bar.removesuffix("_bar") for bar in bwd.spec.outputs]
    for_bwd, mask_of = attrgetter(*kept), attrgetter(*perturbable)

    @value.def_vjp
    def value_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor | None]:
        mask = mask_of(output_mask)
        out = bwd(*[getattr(cotangents, name) for name in bars], *for_bwd(residuals), mask)
        return dict(compress(zip(perturbable, out, strict=True), mask))

    is_dot = [name.endswith("_dot") for name in jvp.spec.arguments]
    before, after = is_dot.index(True), is_dot.index(True) + sum(is_dot)
    first, last = attrgetter(*jvp.spec.arguments[:before]), attrgetter(*jvp.spec.arguments[after:])
    dots_of = attrgetter(*[name.removesuffix("_dot") for name in jvp.spec.arguments[before:after]])

    @value.def_jvp
    def value_jvp(residuals: Any, tangents: Any) -> Any:
        dots = dots_of(tangents)
        if all(dot is None for dot in dots):
            # Only running statistics move, and in training the output does not depend on them.
            return torch.zeros_like(residuals.x)
        return jvp(*first(residuals), *dots, *last(residuals))


class _Call(SimpleNamespace):
    """Values by name; of what is not there None."""

    def __getattr__(self, name: str) -> None:
        return None


def called(op: Callable[..., Any], residuals: Any, output_mask: Sequence[bool] | None = None, **given: Any) -> Any:
    """A primitive of what is given by name, else of residuals; what neither has is absent.

    A function gets `output_mask`, and these values as attributes.
    """
    call = _Call(**{**residuals._asdict(), **given})
    if not isinstance(op, Primitive):
        return op(output_mask, call)
    args = [getattr(call, name) for name in op.spec.arguments]
    return op(*args) if output_mask is None else op(*args[:-1], output_mask)


def second_order(
    bwd: Primitive, jvp: Primitive, bwd_jvp: Callable[..., Any], double_backward: Callable[..., Any] | None = None,
    every: Sequence[str] = (),
) -> None:  # fmt: skip
    """Give the first-order operators of a function their rules.

    Both are partial derivatives of one scalar, the pairing L of cotangents with tangents of the results:

        dL/d(x_dot) = x_bar,        dL/d(y_bar) = y_dot,        dL/dx = the derivative of x_bar along x_dot

    where the last holds since L is the derivative of <y_bar, y> along x_dot, and second derivatives are symmetric.
    Arguments and results say by their names which they are, as for `first_order`.

    Args:
        bwd: The backward.
        jvp: The jvp.
        bwd_jvp: The tangents of the results of `bwd`: a primitive, or a function as `called` takes it.
        double_backward: All derivatives of L, where a primitive or a function makes them at once; without it the three
            others do.
        every: What a function differentiates L in; of a primitive its results say it.
    """
    bars = [name for name in bwd.spec.arguments if name.endswith("_bar")]
    primals = [bar.removesuffix("_bar") for bar in bwd.spec.outputs]
    dots = [f"{name}_dot" for name in primals]
    if isinstance(double_backward, Primitive):
        # A map that keeps its result y is differentiated in y as if it were an argument.
        every = ["y" if bar == "output_bar" else bar.removesuffix("_bar") for bar in double_backward.spec.outputs]

    def gradient(residuals: Any, output_mask: Any, given: dict[str, Any]) -> dict[str, Tensor]:
        def asked(op: Callable[..., Any], names: Sequence[str], *, takes_mask: bool = True) -> dict[str, Tensor]:
            mask = tuple([getattr(output_mask, name, False) for name in names])
            if not any(mask):
                return {}
            out = called(op, residuals, mask if takes_mask else None, **given)
            return dict(compress(zip(names, out if isinstance(out, tuple) else (out,), strict=True), mask))

        if double_backward is not None:
            return asked(double_backward, every)
        return asked(jvp, bars, takes_mask=False) | asked(bwd, dots) | asked(bwd_jvp, primals)

    @bwd.def_vjp
    def bwd_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor]:
        tangents = computed(cotangents, getattr(residuals, "output_mask", [True]))
        return gradient(residuals, output_mask, dict(zip(dots, tangents, strict=True)))

    @jvp.def_vjp
    def jvp_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor]:
        names = [dot.removesuffix("_dot") for dot in jvp.spec.outputs]
        return gradient(residuals, output_mask, {f"{name}_bar": getattr(cotangents, f"{name}_dot") for name in names})

    @bwd.def_jvp
    def bwd_tangents(residuals: Any, tangents: Any) -> Any:
        # Where only a statistic has a tangent, which is none, the operator returns zeros.
        given = {f"{name}_dot": dot for name, dot in tangents._asdict().items()}
        return called(bwd_jvp, residuals, getattr(residuals, "output_mask", None), **given)
