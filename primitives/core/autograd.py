"""The one kernel on the Autograd key that differentiates every primitive, in both modes, at every level.

PyTorch stacks differentiation levels: eager autograd and `forward_ad` at the bottom, one more for each
`torch.func` transform. Whatever the stack, the dispatcher calls the Autograd-key kernel of an operator once per level,
with arguments that belong to that level. So one kernel serves them all, and tracers see one opaque operator.

Four points decide whether nesting is right:

- `_SingleLevelFunction` is used, not `autograd.Function`: the level has been entered already, and the public
  class would start again at the top of the stack.
- The forward pass and the jvp rule run with differentiation switched on: torch switches it off around them, which
  would lose the tangents of the levels *outside* this one.
- The jvp rule sees the primal part of what was saved. Otherwise this level's tangent would be counted twice.
- A tangent or cotangent that is absent is `None` and stays `None`: rules compute what is wanted, nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import _C
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.autograd import forward_ad

from primitives.core.errors import DtypeError, ShapeError
from primitives.core.statistics import refuse_cotangent, refused_tangent

if TYPE_CHECKING:
    from collections.abc import Callable

    from primitives.core.primitive import Primitive
    from primitives.core.residuals import ResidualLayout

__all__ = ["autograd_kernel"]


def _unpack_dual(value: Any) -> tuple[Any, Any]:
    """Primal and tangent of `value` at this level; anything but a tensor has no tangent."""
    return torch._VF._unpack_dual(value, level=0) if isinstance(value, torch.Tensor) else (value, None)  # type: ignore[attr-defined]


def _tangents_possible() -> bool:
    """Whether a tensor could carry a tangent here: cheap, and never wrongly false.

    Eager `forward_ad` counts its level in Python. Transforms, and graphs that a compiler runs while it traces, enter
    the level in C++ alone; those have a functorch layer or a dispatch mode on their stack.
    """
    return (
        forward_ad._current_level >= 0
        or _functorch.peek_interpreter_stack() is not None
        or _C._len_torch_dispatch_stack() > 0
    )


def _check_tangents(op: Primitive, args: tuple) -> bool:
    """Whether any argument carries a tangent at this level.

    Raises:
        DtypeError: If a tangent's dtype is not its primal's, which torch itself lets pass.
    """
    dual = False
    for name, value in zip(op.argument_names, args, strict=True):
        primal, tangent = _unpack_dual(value)
        if tangent is None:
            continue
        dual = True
        if tangent.dtype != primal.dtype:
            raise DtypeError(
                f"{op.name}: the tangent of {name} must have the dtype of its primal, {primal.dtype}, "
                f"got {tangent.dtype}."
            )
    return dual


def _by_output(op: Primitive, rule: str, result: Any) -> tuple:
    """What a jvp rule returned, as one tangent per differentiable output."""
    tangents = result if isinstance(result, tuple) else (result,)
    if len(tangents) != len(op.differentiable_outputs):
        raise ShapeError(
            f"{op.name}: the {rule} rule must return one tangent for each of "
            f"{', '.join(op.differentiable_outputs)}, got {len(tangents)}."
        )
    return tangents


def _redispatcher(op: Primitive) -> Callable:
    """`(keyset, args) -> outputs`: run the implementation below this level."""
    redispatch = op.overload._handle.redispatch_boxed
    below_autograd, after_autograd = _C._AutoDispatchBelowAutograd, _C._after_autograd_keyset
    peek = _functorch.peek_interpreter_stack

    def run(keyset: Any, args: tuple) -> Any:
        with below_autograd():
            if peek() is None:
                return redispatch(keyset & after_autograd, *args)
            # Levels outside this one still differentiate.
            with forward_ad._set_fwd_grad_enabled(True), torch.enable_grad():
                return redispatch(keyset & after_autograd, *args)

    return run


def _rules_class(op: Primitive, layout: ResidualLayout, vjp: str) -> type:  # noqa: C901 - short methods, one closure
    """Build the autograd function of `op` that keeps `layout` and has the vjp rule of kind `vjp`.

    This is the only place in the package that builds one.
    """
    redispatch, argument_names = _redispatcher(op), op.argument_names
    num_outputs = len(op.output_names)
    indices = {name: i for i, name in enumerate(op.output_names)}
    statistics = [(indices[name], name) for name in op.statistics]
    state = [indices[name] for name in op.state]
    differentiable = [indices[name] for name in op.differentiable_outputs]
    every_output = len(differentiable) == num_outputs
    cotangents_type, wanted_type, unpack = op.Cotangents, op.Wanted, layout.unpack

    class Rules(torch.autograd.function._SingleLevelFunction):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
            output = redispatch(keyset, args)
            outputs = output if num_outputs > 1 else (output,)
            tensors, ctx.static = layout.pack(args, outputs)
            ctx.save_for_backward(*tensors)
            if _tangents_possible():
                ctx.save_for_forward(*tensors)
            ctx.set_materialize_grads(False)
            if state:
                ctx.mark_non_differentiable(*[outputs[i] for i in state])
            return output

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> tuple:
            for i, name in statistics:
                if cotangents[i] is not None:
                    refuse_cotangent(op.name, name)
            wanted = ctx.needs_input_grad[1:]
            by_name = cotangents_type(*(cotangents if every_output else [cotangents[i] for i in differentiable]))
            for cotangent in by_name:
                if cotangent is not None:
                    break
            else:
                return (None,) * (1 + len(wanted))
            result = op.rule(vjp)(unpack(ctx.saved_tensors, ctx.static), by_name, wanted_type(*wanted))
            op.check_vjp_result(result)
            return (None, *map(result.get, argument_names))

        @staticmethod
        def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:  # type: ignore[override]
            with forward_ad._set_fwd_grad_enabled(True):
                saved = [_unpack_dual(value)[0] for value in ctx.saved_tensors]
                residuals = unpack(saved, ctx.static)
                computed = _by_output(op, "jvp", op.rule("jvp")(residuals, op.Tangents(*tangents)))
                out: list[Any] = [None] * num_outputs
                for i, tangent in zip(differentiable, computed, strict=True):
                    out[i] = tangent
                for i, name in statistics:
                    out[i] = refused_tangent(op.name, name, getattr(residuals, name))
            return tuple(out) if num_outputs > 1 else out[0]

    Rules.__name__ = Rules.__qualname__ = "".join(part.title() for part in op.name.split("_"))
    return Rules


def autograd_kernel(op: Primitive) -> Callable:
    """Kernel for the Autograd key of `op`: `(keyset, *args) -> outputs`.

    A call that nothing differentiates goes straight to the implementation. Where a rule is missing, the decomposition
    of `op` is differentiated: at once in forward mode, when the backward pass comes in reverse mode. Without a
    decomposition the call raises `MissingRuleError`.
    """
    rules = _rules_class(op, op.residuals, "vjp")
    # Without a vjp rule the value still comes from the kernel, and the decomposition runs when its derivative is asked
    # for. torch.func.grad always prepares for that, and mostly nobody asks.
    late_rules = _rules_class(op, op.every_argument, "decomposed_vjp")
    redispatch = op.overload._handle.redispatch_boxed
    any_requires_grad, is_grad_enabled = _C._any_requires_grad, torch.is_grad_enabled
    below_autograd, after_autograd = _C._AutoDispatchBelowAutograd, _C._after_autograd_keyset

    def kernel(keyset: Any, *args: Any) -> Any:
        reverse = is_grad_enabled() and any_requires_grad(*args)
        forward = _tangents_possible() and _check_tangents(op, args)
        if not (reverse or forward):
            with below_autograd():
                return redispatch(keyset & after_autograd, *args)
        if forward and not op.has_rule("jvp"):
            return op.decompose("jvp", args)
        late = reverse and not op.has_rule("vjp")
        if late:
            op.require_decomposition("vjp")
        previous = _functorch.get_single_level_autograd_function_allowed()
        _functorch.set_single_level_autograd_function_allowed(True)
        try:
            return (late_rules if late else rules).apply(keyset, *args)
        finally:
            _functorch.set_single_level_autograd_function_allowed(previous)

    return kernel
