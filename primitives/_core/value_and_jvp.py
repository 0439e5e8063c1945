"""Value and tangent of an operator by one call of another, which reads once what both are computed from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core.autograd import below_this_level, tangents_possible, unpack_dual
from primitives._core.primitive import Primitive
from primitives._core.rules import handled
from primitives._core.sequences import tuple_getter


def value_and_jvp(value: Primitive, jvp: Primitive) -> Primitive:
    """The operator `<value>_fwd_jvp`: the outputs of `value`, then those of `jvp`, for the arguments of both.

    Forward mode calls it instead of `value` and `jvp` where it is outermost (see `autograd_kernel`), so it becomes the
    rule `value_and_jvp` of `value`. It is defined by the two: its reference and kernels are theirs, one after the
    other, until it gets its own. Reverse mode records the two, of which either may be dropped; forward mode calls them.

    Args:
        value: Operator with a jvp rule that is one call of `jvp`.
        jvp: Operator whose arguments are arguments or outputs of `value`, and tangents: all others. Where an argument
            has a tangent that is not among them, the two are called one after the other.
    """
    of_value, of_jvp = value.spec, jvp.spec
    count = len(of_value.outputs)
    dots = [name for name in of_jvp.arguments if name not in (*of_value.arguments, *of_value.outputs)]
    fused = Primitive(
        f"{of_value.name}_fwd_jvp",
        _schema_of_both(of_value.schema, of_jvp.schema, dots),
        statistics=of_value.statistics,
        state=of_value.state,
        decomposable=True,
        namespace=of_value.namespace,
    )
    get_value_args = tuple_getter([fused.spec.arguments.index(name) for name in of_value.arguments])
    places = (*fused.spec.arguments, *of_value.outputs)
    get_jvp_args = tuple_getter([places.index(name) for name in of_jvp.arguments])

    def one_after_the_other(run_value: Callable[..., Any], run_jvp: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> tuple[Tensor, ...]:
            outputs = _as_tuple(run_value(*get_value_args(args)))
            return *outputs, *_as_tuple(run_jvp(*get_jvp_args((*args, *outputs))))

        return run

    apart = fused.def_reference(one_after_the_other(value, jvp))
    fused.def_kernel("cpu")(one_after_the_other(value.rules.cpu, jvp.rules.cpu))
    fused.def_kernel("cuda")(one_after_the_other(value.rules.cuda, jvp.rules.cuda))

    def record(op: Primitive, args: tuple, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not torch._C._any_requires_grad(*args):
            return outputs
        ready = (outputs if len(outputs) > 1 else outputs[0], None)
        return _as_tuple(op.autograd_kernel(None, *args, ready=ready))

    def recorded(*args: Any) -> tuple[Tensor, ...]:
        if tangents_possible() and any(unpack_dual(x)[1] is not None for x in args):
            return apart(*args)
        with below_this_level():
            outputs = fused.overload(*args)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return outputs
        values = record(value, get_value_args(args), outputs[:count])
        return *values, *record(jvp, get_jvp_args((*args, *values)), outputs[count:])

    fused.rules.define("autograd", recorded)
    pushed = [name.removesuffix("_dot") for name in dots]
    get_dots = tuple_getter([of_value.tensors.index(name) for name in pushed])
    others = [of_value.tensors.index(name) for name in of_value.tensors if name not in pushed]

    def at_once(args: Sequence[Any], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...] | None:
        # A tangent of another argument, such as a mask or a running statistic, is for the jvp rule to see.
        if any(tangents[i] is not None for i in others):
            return None
        given = (*args, *get_dots(tangents))
        outputs = handled(fused.rules, given)
        return fused(*given) if outputs is NotImplemented else outputs

    value.rules.define("value_and_jvp", at_once)
    return fused


def _schema_of_both(of_value: str, of_jvp: str, dots: list[str]) -> str:
    (arguments, outputs), (more_arguments, more_outputs) = (text[1:].split(") -> ") for text in (of_value, of_jvp))
    tangents = [text for text in more_arguments.split(", ") if text.split()[-1] in dots]
    return f"({', '.join([arguments, *tangents])}) -> ({outputs.strip('()')}, {more_outputs.strip('()')})"


def _as_tuple(outputs: Any) -> tuple:
    return outputs if isinstance(outputs, tuple) else (outputs,)
