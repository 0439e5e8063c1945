"""The one kernel on the Autograd key that differentiates every primitive, in both modes, at every level.

PyTorch stacks differentiation levels: eager autograd and `forward_ad` at the bottom, one more for each
`torch.func` transform. Whatever the stack, the dispatcher calls the Autograd-key kernel of an operator once per level,
with arguments that belong to that level. So one kernel serves them all, and tracers see one opaque operator.

Four points decide whether nesting is right:

- `_SingleLevelFunction` is used, not the public class: the level has been entered already, and the public
  class would start again at the top of the stack.
- The forward pass and the jvp rule run with differentiation switched on: torch switches it off around them, which
  would lose the tangents of the levels *outside* this one.
- The jvp rule sees the primal part of what was saved. Otherwise this level's tangent would be counted twice.
- A tangent or cotangent that is absent is `None` and stays `None`: rules compute what is wanted, nothing else.
"""

from __future__ import annotations

import contextlib
import functools
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import _C
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from primitives._core.contexts import run_as_written
from primitives._core.dtypes import has_derivatives
from primitives._core.errors import ShapeError
from primitives._core.fast_path import FAST_PATH_CPU
from primitives._core.rules import RuleTable, handled
from primitives._core.sequences import Lengths, flatten, regroup, tuple_getter, tuple_maker
from primitives._core.statistics import refuse_cotangent, refused_tangent


def unpack_dual(value: Any) -> tuple[Any, Any]:
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


def _with_tangents(rules: RuleTable, args: tuple, tensors: Sequence[Any]) -> tuple[bool, tuple]:
    """Whether any argument carries a tangent at this level, and the arguments, with tangents of their own dtypes."""
    dual, mended = False, list(args)
    for name, entry in zip(rules.spec.tensors, tensors, strict=True):
        values = entry if isinstance(entry, list) else (entry,)
        for i, value in enumerate(values):
            primal, tangent = unpack_dual(value)
            if tangent is None:
                continue
            dual = True
            if tangent.dtype != primal.dtype:
                # Torch makes a float64 tangent of a loss times a number, and hands it down to what the loss is of.
                # It makes a dual of no expanded tensor.
                pair = primal.contiguous(), tangent.to(primal.dtype).contiguous()
                exact = torch._VF._make_dual(*pair, level=0)  # type: ignore[attr-defined] - no stub
                at = rules.spec.arguments.index(name)
                mended[at] = [*mended[at][:i], exact, *mended[at][i + 1 :]] if isinstance(entry, list) else exact
    return dual, tuple(mended)


@contextlib.contextmanager
def below_this_level() -> Iterator[None]:
    """Run operations as the forward pass of a level does: not recorded by it, and differentiated by those outside."""
    with _C._AutoDispatchBelowAutograd():
        if _functorch.peek_interpreter_stack() is None:
            yield
        else:
            with forward_ad._set_fwd_grad_enabled(True), torch.enable_grad():
                yield


def _value_and_jvp(rules: RuleTable, args: tuple, tensors: Sequence[Any]) -> _Ready:
    """Outputs and their tangents by one call, where nothing is recorded at this level and forward mode is outermost.

    Nothing where the value takes part in less than the tangent does, and one call would do more than two: in a batch of
    tangents, in a tangent of further out, and where `torch.func.linearize` computes once what depends on primals alone.
    Reverse mode may be further out: it records both.
    """
    levels = _functorch.get_interpreter_stack() or ()
    for level in levels[:-1]:
        if level.key() != _functorch.TransformType.Grad:
            return _NOTHING
    # It traces real tensors; a compiler's are fake.
    if _C._len_torch_dispatch_stack() and get_proxy_mode() is not None and detect_fake_mode() is None:
        return _NOTHING
    duals = [unpack_dual(x) for x in tensors]
    for primal, tangent in duals:
        # Batches of torch's older vmap are not levels.
        if tangent is not None and _C._dispatch_keys(tangent) != _C._dispatch_keys(primal):
            return _NOTHING
    tangents = [tangent for _, tangent in duals]
    if torch.is_grad_enabled() and _C._any_requires_grad(*tangents):
        return _NOTHING
    with below_this_level():
        both = rules.rule("value_and_jvp")(args, tangents)
    if both is None:
        return _NOTHING
    count = len(rules.spec.outputs)
    return both[:count] if count > 1 else both[0], both[count:]


# Keys below autograd that do nothing for an operator that has a tensor argument and writes into none.
_IDLE_KEYS = _C.DispatchKeySet(_C.DispatchKey.BackendSelect) | _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
_ACTIVE_KEYS = _C._after_autograd_keyset - _IDLE_KEYS
_CPU, _CUDA = (_C.DispatchKeySet(key).raw_repr() for key in (_C.DispatchKey.CPU, _C.DispatchKey.CUDA))


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is running."""
    return _functorch.peek_interpreter_stack() is not None


def _redispatch(rules: RuleTable) -> Callable:
    """`(keyset, *args) -> outputs`: the next kernel below the Autograd key.

    Where that is the implementation for a device, it is called here and now: the dispatcher would take the arguments
    apart and put them together again, which for lists takes as long as the rest.
    """
    redispatch = rules.spec.overload._handle.redispatch_boxed
    after_autograd, implementations = _C._after_autograd_keyset, {_CPU: rules.cpu, _CUDA: rules.cuda}

    def run(keyset: Any, *args: Any) -> Any:
        implementation = implementations.get((keyset & _ACTIVE_KEYS).raw_repr())
        if implementation is None:
            outputs = handled(rules, args)
            return redispatch(keyset & after_autograd, *args) if outputs is NotImplemented else outputs
        return implementation(*args)

    return run


def function_class(name: str, **methods: Callable) -> Any:
    """An autograd function of these static methods, for the level of the call: the only place that builds one."""
    # A subclass, because torch names the node of the graph when a class is made.
    base = type("Function", (torch.autograd.function._SingleLevelFunction,), {})  # type: ignore[attr-defined] - no stub
    # By what compiled autograd tells one function from another; torch gives it to the public class alone.
    methods = {"_compiled_autograd_key": lambda ctx: (ctx._autograd_function_id,), **methods}
    return type(name, (base,), {key: staticmethod(method) for key, method in methods.items()})


def apply_linear(forward: Callable[..., Any], transpose: Callable[..., Sequence[Any]], *tensors: Any) -> Any:
    """A linear map of tensors that cannot be an operator, since an operator would not see its arguments as they are.

    `forward(*tensors)` returns an output or a tuple, `transpose(*cotangents)` the cotangents of them. Reverse mode
    differentiates it to every order; forward mode and transforms of `torch.func` raise. Integers are constants.
    """
    return _Linear.apply(forward, transpose, *tensors)  # type: ignore[attr-defined] - of every autograd function


def _linear_forward(ctx: Any, forward: Callable, transpose: Callable, *tensors: Any) -> Any:
    ctx.transpose = transpose
    output = forward(*tensors)
    outputs = output if isinstance(output, tuple) else (output,)
    ctx.mark_non_differentiable(*[y for y in outputs if not has_derivatives(y.dtype)])
    return output


def _linear_backward(ctx: Any, *cotangents: Any) -> tuple:
    return (None, None, *ctx.transpose(*cotangents))


_Linear = function_class("LinearMap", forward=_linear_forward, backward=_linear_backward)


# The arguments of an autograd function before the tensors: the keys that it was dispatched with, whether
# reverse mode records it, whether a tensor could carry a tangent, the lists among its tensors, its arguments, and what
# has been computed already.
_Call = tuple[Any, bool, bool, Lengths | None, tuple, "_Ready"]
# The results of a call and their tangents, or `None`s.
_Ready = tuple[Any, "tuple | None"]
_NOTHING: _Ready = (None, None)


def _rules_class(rules: RuleTable, layout: Any, flat_vjp: Callable) -> type:  # noqa: C901 - one closure
    """Build the autograd function of an operator that is differentiated by `flat_vjp` and keeps `layout` for it.

    It is applied to a `_Call`, and to the tensors of the call one by one: torch differentiates no lists, and looks at
    what is not a tensor for longer than at a tensor.
    """
    spec, jvp_layout = rules.spec, rules.layouts[1]
    redispatch, make_tangents = _redispatch(rules), tuple_maker(namedtuple("Tangents", spec.tensors))
    below_autograd, on_cpu, peek = _C._AutoDispatchBelowAutograd, rules.cpu, _functorch.peek_interpreter_stack
    num_outputs, has_lists, returns_list = len(spec.outputs), bool(spec.list_arguments), spec.returns_list
    statistics = [(spec.outputs.index(name), name) for name in spec.statistics]
    differentiable = [spec.outputs.index(name) for name in spec.differentiable_outputs]
    has_constants = bool(spec.state) or returns_list

    def run(keyset: Any, args: tuple) -> Any:
        # `below_this_level` spelled out: a context manager written in Python costs as much as the rest of a call.
        with below_autograd():
            if keyset is FAST_PATH_CPU:
                return on_cpu(*args)
            if peek() is None:
                return redispatch(keyset, *args)
            # Levels outside this one still differentiate.
            with forward_ad._set_fwd_grad_enabled(True), torch.enable_grad():
                return redispatch(keyset, *args)

    @run_as_written
    def forward(ctx: Any, call: _Call, *_tensors: Any) -> Any:
        keyset, reverse, tangents, lengths, args, (output, dots) = call
        output = run(keyset, args) if output is None else output
        outputs = output if num_outputs > 1 else (output,)
        if has_lists:
            ctx.lengths = lengths
        tensors: Sequence[Any] = ()
        # Attributes of `ctx` are written here, as its methods would: a call in Python for each takes longer.
        if reverse:
            tensors, ctx.static = layout.pack(args, outputs)
            ctx.to_save = tuple(tensors)
        if tangents:
            if layout is not jvp_layout or not reverse:
                tensors, ctx.jvp_static = jvp_layout.pack(args, outputs)
            else:
                ctx.jvp_static = ctx.static
            ctx.save_for_forward(*tensors)
            ctx.dots = dots
            ctx.sizes = [(y.shape, y.dtype, y.device) for y in (output if returns_list else outputs)]
        ctx.materialize_grads = False
        flat_outputs = tuple(output) if returns_list else outputs
        if has_constants:
            constants = rules.constant_outputs(args)
            if tangents:
                # Torch knows by itself that integers have no gradient, and not that they have no tangent.
                constants = {*constants, *[i for i, y in enumerate(flat_outputs) if not has_derivatives(y.dtype)]}
                ctx.constants = constants
            if constants:
                ctx.non_differentiable = tuple([flat_outputs[i] for i in constants])
        return flat_outputs if returns_list or num_outputs > 1 else output

    @run_as_written
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        for i, name in statistics:
            if cotangents[i] is not None:
                refuse_cotangent(spec.name, name)
        for cotangent in cotangents:
            if cotangent is not None:
                break
        else:
            return (None,) * len(ctx.needs_input_grad)
        residuals = layout.unpack(ctx.saved_tensors, ctx.static)
        lengths = ctx.lengths if has_lists else None
        return (None, *flat_vjp(residuals, cotangents, lengths, ctx.needs_input_grad[1:]))

    @run_as_written
    def jvp(ctx: Any, _call: None, *tangents: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [unpack_dual(value)[0] for value in ctx.saved_tensors]
            residuals = jvp_layout.unpack(saved, ctx.jvp_static)
            by_name = regroup(tangents, ctx.lengths) if has_lists else tangents
            result = ctx.dots or rules.rule("jvp")(residuals, make_tangents(by_name))
            computed = result if isinstance(result, tuple) else (result,)
            if len(computed) != len(differentiable):
                raise ShapeError(
                    f"{spec.name}: the jvp rule must return one tangent for each of "
                    f"{', '.join(spec.differentiable_outputs)}, got {len(computed)}."
                )
            places = differentiable
            if returns_list:
                places, computed = [i for i in range(len(ctx.sizes)) if i not in ctx.constants], computed[0]
                computed = [computed[i] for i in places]
            out: list[Any] = [None] * len(ctx.sizes)
            for i, tangent in zip(places, computed, strict=True):
                # Torch takes no absent tangent of an output that has one.
                size, dtype, device = ctx.sizes[i]
                out[i] = torch.zeros(size, dtype=dtype, device=device) if tangent is None else tangent
            if returns_list:
                return tuple(out)
            for i, name in statistics:
                out[i] = refused_tangent(spec.name, name, getattr(residuals, name))
        return tuple(out) if num_outputs > 1 else out[0]

    name = "".join(part.title() for part in spec.name.split("_"))
    return function_class(name, forward=forward, backward=backward, jvp=jvp)


def autograd_kernel(rules: RuleTable) -> Callable:
    """Kernel for the Autograd key of an operator: `(keyset, *args) -> outputs`.

    With `ready`, which is what has been computed below this level, it only records the call for reverse mode.
    A call that nothing differentiates goes straight to the implementation. Where a rule is missing, the decomposition
    is differentiated: at once in forward mode, when the backward pass comes in reverse mode. Without a
    decomposition the call raises `MissingRuleError`. A rule of kind `"autograd"` takes the place of all this.
    """
    spec, (residuals, _, every_argument) = rules.spec, rules.layouts
    apply_rules = _rules_class(rules, residuals, rules.flat_vjp).apply
    # Without a vjp rule the value still comes from the kernel, and the decomposition runs when its derivative is asked
    # for. torch.func.grad always prepares for that, mostly in vain.
    late_vjp = functools.partial(rules.apply_flat, rules.decomposed_vjp)
    apply_late_rules = _rules_class(rules, every_argument, late_vjp).apply
    redispatch, below_autograd = _redispatch(rules), _C._AutoDispatchBelowAutograd
    any_requires_grad, is_grad_enabled = _C._any_requires_grad, torch.is_grad_enabled
    lists, given, returns_list, on_cpu = spec.list_tensors, rules.given, spec.returns_list, rules.cpu
    get_tensors = tuple_getter([spec.arguments.index(name) for name in spec.tensors])

    @run_as_written
    def kernel(keyset: Any, *args: Any, ready: _Ready = _NOTHING) -> Any:
        if "autograd" in given:
            return given["autograd"](*args)
        reverse = is_grad_enabled() and any_requires_grad(*args)
        # In plain code eager `forward_ad` alone makes tangents.
        tangents = forward_ad._current_level >= 0 if keyset is FAST_PATH_CPU else tangents_possible()
        forward, args = _with_tangents(rules, args, get_tensors(args)) if tangents else (False, args)
        if not (reverse or forward):
            with below_autograd():
                return on_cpu(*args) if keyset is FAST_PATH_CPU else redispatch(keyset, *args)
        if forward and "jvp" not in given:
            return rules.require_decomposition("jvp")(*args)
        late = reverse and "vjp" not in given
        if late and rules.is_decomposed_at_once(args):
            return rules.require_decomposition("vjp")(*args)
        if late:
            rules.require_decomposition("vjp")
        tensors, lengths = get_tensors(args), None
        if lists:
            tensors, lengths = flatten(tensors, lists)
        if forward and not reverse and "value_and_jvp" in given:
            ready = _value_and_jvp(rules, args, tensors)
        call: _Call = (keyset, reverse, tangents, lengths, args, ready)
        apply = apply_late_rules if late else apply_rules
        if keyset is FAST_PATH_CPU:
            # No level to be entered: torch asks for permission inside transforms alone.
            output = apply(call, *tensors)
        else:
            previous = _functorch.get_single_level_autograd_function_allowed()
            _functorch.set_single_level_autograd_function_allowed(True)
            try:
                output = apply(call, *tensors)
            finally:
                _functorch.set_single_level_autograd_function_allowed(previous)
        return list(output) if returns_list else output

    return kernel
