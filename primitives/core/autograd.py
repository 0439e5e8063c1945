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

import contextlib
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import _C
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch.autograd import forward_ad

from primitives.core.errors import DtypeError, ShapeError
from primitives.core.lists import Lengths, flatten, regroup
from primitives.core.statistics import refuse_cotangent, refused_tangent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from primitives.core.primitive import Primitive
    from primitives.core.residuals import Residuals

__all__ = [
    "autograd_kernel",
    "below_this_level",
    "direct_call",
    "has_derivatives",
    "is_transforming",
    "plain_keys",
    "tangents_possible",
]


class _Call(NamedTuple):
    """What the autograd function is told about a call.

    Attributes:
        reverse: Whether reverse mode records it.
        tangents: Whether a tensor could carry a tangent.
        lengths: The lists among its arguments.
        args: The arguments, with their lists.
    """

    reverse: bool
    tangents: bool
    lengths: Lengths | None
    args: tuple


def _unpack_dual(value: Any) -> tuple[Any, Any]:
    """Primal and tangent of `value` at this level; anything but a tensor has no tangent."""
    return torch._VF._unpack_dual(value, level=0) if isinstance(value, torch.Tensor) else (value, None)  # type: ignore[attr-defined] - no stub


def tangents_possible() -> bool:
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
    for name, entry in zip(op.argument_names, args, strict=True):
        values = entry if isinstance(entry, list) else (entry,)
        for i, value in enumerate(values):
            primal, tangent = _unpack_dual(value)
            if tangent is None:
                continue
            dual = True
            if tangent.dtype != primal.dtype:
                raise DtypeError(
                    f"{op.name}: the tangent of {op.label(name, i, args)} must have the dtype of its primal, "
                    f"{primal.dtype}, got {tangent.dtype}."
                )
    return dual


def _by_output(op: Primitive, result: Any) -> tuple:
    """What a jvp rule returned, as one tangent (or list of them) per differentiable output."""
    tangents = result if isinstance(result, tuple) else (result,)
    if len(tangents) != len(op.differentiable_outputs):
        raise ShapeError(
            f"{op.name}: the jvp rule must return one tangent for each of "
            f"{', '.join(op.differentiable_outputs)}, got {len(tangents)}."
        )
    return tangents


@contextlib.contextmanager
def below_this_level() -> Iterator[None]:
    """Run operations as the forward pass of a level does: not recorded by it, and differentiated by those outside."""
    with _C._AutoDispatchBelowAutograd():
        if _functorch.peek_interpreter_stack() is None:
            yield
        else:
            with forward_ad._set_fwd_grad_enabled(True), torch.enable_grad():
                yield


# Keys below autograd that do nothing for an operator that has a tensor argument and writes into none.
_IDLE_KEYS = _C.DispatchKeySet(_C.DispatchKey.BackendSelect) | _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
_ACTIVE_KEYS = _C._after_autograd_keyset - _IDLE_KEYS
_CPU, _CUDA = (_C.DispatchKeySet(key).raw_repr() for key in (_C.DispatchKey.CPU, _C.DispatchKey.CUDA))


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is running."""
    return _functorch.peek_interpreter_stack() is not None


def _redispatch(op: Primitive) -> Callable:
    """`(keyset, *args) -> outputs`: the next kernel below the Autograd key.

    Where that is the implementation for a device, it is called here and now: the dispatcher would take the arguments
    apart and put them together again, which for lists takes as long as the rest.
    """
    redispatch = op.overload._handle.redispatch_boxed
    after_autograd, implementations = _C._after_autograd_keyset, {_CPU: op._cpu, _CUDA: op._cuda}

    def run(keyset: Any, *args: Any) -> Any:
        implementation = implementations.get((keyset & _ACTIVE_KEYS).raw_repr())
        if implementation is None:
            return redispatch(keyset & after_autograd, *args)
        return implementation(*args)

    return run


def _redispatcher(op: Primitive) -> Callable:
    """`(keyset, args) -> outputs`: run the implementation below this level."""
    redispatch, below_autograd, peek = _redispatch(op), _C._AutoDispatchBelowAutograd, _functorch.peek_interpreter_stack

    def run(keyset: Any, args: Sequence[Any]) -> Any:
        # `below_this_level` spelled out: a context manager written in Python costs as much as the rest of a call.
        with below_autograd():
            if peek() is None:
                return redispatch(keyset, *args)
            # Levels outside this one still differentiate.
            with forward_ad._set_fwd_grad_enabled(True), torch.enable_grad():
                return redispatch(keyset, *args)

    return run


def has_derivatives(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be differentiated."""
    return dtype.is_floating_point or dtype.is_complex


def _rules_class(op: Primitive, layout: Residuals, jvp_layout: Residuals, vjp: str) -> type:  # noqa: C901 - one closure
    """Build the autograd function of `op` that has the vjp rule of kind `vjp` and keeps `layout` for it.

    This is the only place in the package that builds one. What it is applied to is flat: lists of tensors are replaced
    by their elements, because torch differentiates no lists.
    """
    redispatch, tangents_type = _redispatcher(op), op.Tangents
    num_outputs, has_lists, returns_list = len(op.output_names), bool(op.list_arguments), op.returns_list
    indices = {name: i for i, name in enumerate(op.output_names)}
    statistics = [(indices[name], name) for name in op.statistics]
    differentiable = [indices[name] for name in op.differentiable_outputs]
    has_constants = bool(op.state) or returns_list

    class Rules(torch.autograd.function._SingleLevelFunction):  # type: ignore[name-defined] - no stub
        @staticmethod
        def forward(ctx: Any, keyset: Any, call: _Call, *flat: Any) -> Any:
            reverse, tangents, lengths, args = call
            output = redispatch(keyset, args)
            outputs = output if num_outputs > 1 else (output,)
            ctx.lengths = lengths
            tensors: list[Any] = []
            if reverse:
                tensors, ctx.static = layout.pack(args, outputs)
                ctx.save_for_backward(*tensors)
            if tangents:
                if layout is not jvp_layout or not reverse:
                    tensors, ctx.jvp_static = jvp_layout.pack(args, outputs)
                else:
                    ctx.jvp_static = ctx.static
                ctx.save_for_forward(*tensors)
            ctx.set_materialize_grads(False)
            flat_outputs = tuple(output) if returns_list else outputs
            if has_constants:
                constants = op.constant_outputs(args)
                for i, x in enumerate(flat_outputs):
                    # Torch knows by itself that integers have no gradient, and not that they have no tangent.
                    dtype = x.dtype
                    if not (dtype.is_floating_point or dtype.is_complex):
                        constants = {*constants, i}
                ctx.constants = constants
                if constants:
                    ctx.mark_non_differentiable(*[flat_outputs[i] for i in constants])
            return flat_outputs if returns_list or num_outputs > 1 else output

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> tuple:
            for i, name in statistics:
                if cotangents[i] is not None:
                    refuse_cotangent(op.name, name)
            for cotangent in cotangents:
                if cotangent is not None:
                    break
            else:
                return (None,) * len(ctx.needs_input_grad)
            residuals = layout.unpack(ctx.saved_tensors, ctx.static)
            bars = op.flat_vjp(vjp, residuals, cotangents, ctx.lengths, ctx.needs_input_grad[2:])
            return (None, None, *bars)

        @staticmethod
        def jvp(ctx: Any, _keyset: Any, _call: Any, *tangents: Any) -> Any:  # type: ignore[override] - names for what is *args there
            with forward_ad._set_fwd_grad_enabled(True):
                saved = [_unpack_dual(value)[0] for value in ctx.saved_tensors]
                residuals = jvp_layout.unpack(saved, ctx.jvp_static)
                by_argument = regroup(tangents, ctx.lengths) if has_lists else tangents
                computed = _by_output(op, op.rule("jvp")(residuals, tangents_type(*by_argument)))
                if returns_list:
                    return tuple(None if i in ctx.constants else dot for i, dot in enumerate(computed[0]))
                out: list[Any] = [None] * num_outputs
                for i, tangent in zip(differentiable, computed, strict=True):
                    out[i] = tangent
                for i, name in statistics:
                    out[i] = refused_tangent(op.name, name, getattr(residuals, name))
            return tuple(out) if num_outputs > 1 else out[0]

    # A subclass, because torch names the node of the graph when a class is made.
    return type("".join(part.title() for part in op.name.split("_")), (Rules,), {})


def autograd_kernel(op: Primitive) -> Callable:
    """Kernel for the Autograd key of `op`: `(keyset, *args) -> outputs`.

    A call that nothing differentiates goes straight to the implementation. Where a rule is missing, the decomposition
    of `op` is differentiated: at once in forward mode, when the backward pass comes in reverse mode. Without a
    decomposition the call raises `MissingRuleError`. A rule of kind `"autograd"` takes the place of all this.
    """
    rules = _rules_class(op, op.residuals, op.jvp_residuals, "vjp")
    # Without a vjp rule the value still comes from the kernel, and the decomposition runs when its derivative is asked
    # for. torch.func.grad always prepares for that, and mostly nobody asks.
    late_rules = _rules_class(op, op.every_argument, op.jvp_residuals, "decomposed_vjp")
    redispatch, below_autograd = _redispatch(op), _C._AutoDispatchBelowAutograd
    any_requires_grad, is_grad_enabled = _C._any_requires_grad, torch.is_grad_enabled
    lists, rule_kinds = op.list_arguments, op.rule_kinds

    def kernel(keyset: Any, *args: Any) -> Any:
        if "autograd" in rule_kinds:
            return op.rule("autograd")(*args)
        reverse = is_grad_enabled() and any_requires_grad(*args)
        tangents = tangents_possible()
        forward = tangents and _check_tangents(op, args)
        if not (reverse or forward):
            with below_autograd():
                return redispatch(keyset, *args)
        if forward and not op.has_rule("jvp"):
            return op.decompose("jvp", args)
        late = reverse and not op.has_rule("vjp")
        if late and op.is_decomposed_at_once(args):
            return op.decompose("vjp", args)
        if late:
            op.require_decomposition("vjp")
        flat, lengths = flatten(args, lists) if lists else (args, None)
        previous = _functorch.get_single_level_autograd_function_allowed()
        _functorch.set_single_level_autograd_function_allowed(True)
        try:
            output = (late_rules if late else rules).apply(keyset, _Call(reverse, tangents, lengths, args), *flat)
        finally:
            _functorch.set_single_level_autograd_function_allowed(previous)
        return list(output) if op.returns_list else output

    return kernel


# What a plain eager call finds: nothing that changes where calls go, and these keys on its tensors.
_INCLUDED, _EXCLUDED = _C._dispatch_tls_local_include_set, _C._dispatch_tls_local_exclude_set


def _state() -> tuple[int, int]:
    return _INCLUDED().raw_repr(), _EXCLUDED().raw_repr()


def state_of_new_threads() -> tuple[int, int]:
    """What a thread begins with: this one may be inside autocast, or another mode, when this module is imported."""
    found: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: found.append(_state()))
    thread.start()
    thread.join()
    return found[0]


_PLAIN_STATE = state_of_new_threads()
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _plain_keys() -> dict[int, Any]:
    """For each device, the keys of a plain tensor, and those of them that an operator sees."""
    keys = {}
    for device in ("CPU", "CUDA"):
        names = (device, f"Autograd{device}", "ADInplaceOrView", f"Autocast{device}")
        backend, autograd, idle, autocast = (_C.DispatchKeySet(getattr(_C.DispatchKey, name)) for name in names)
        keys[(backend | autograd | idle | autocast).raw_repr()] = backend | autograd
    return keys


_PLAIN_KEYS = _plain_keys()


_num_function_modes, _is_profiling = _C._len_torch_function_stack, torch.autograd._profiler_enabled


def plain_keys(tensors: Sequence[Tensor]) -> Any:
    """The keys with which the dispatcher would call an operator of `tensors`, one at least, in plain eager code.

    `None` where anything unusual takes part that the dispatcher has to see: a mode, a transform, a profiler, a
    subclass, tensors of several kinds.
    """
    if _state() != _PLAIN_STATE or _num_function_modes() or _is_profiling():
        return None
    first = _C._dispatch_keys(tensors[0]).raw_repr()
    for x in tensors:
        if type(x) not in _PLAIN_TYPES or _C._dispatch_keys(x).raw_repr() != first:
            return None
    return _PLAIN_KEYS.get(first)


def direct_call(op: Primitive) -> Callable[[list[Tensor], int], list[Tensor]]:
    """`(tensors, number) -> outputs` for an operator of one list of tensors and a number, in eager code.

    In plain code the dispatcher would take the list apart, put it together again and call the Autograd kernel, which
    costs a quarter of a call. It is called here and now then.
    """
    overload, kernel = op.overload._op, op.autograd_kernel

    def call(tensors: list[Tensor], number: int) -> list[Tensor]:
        keyset = plain_keys(tensors)
        return overload(tensors, number) if keyset is None else kernel(keyset, tensors, number)

    return call
