"""Apply decompositions to plain torch code, whoever wrote it."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode, get_overridable_functions

from primitives._core.contexts import Decorates
from primitives._core.decomposition import (
    decomposition_table,
    decomposition_table_for_jvp,
    patterns_by_callable,
    registered_overloads,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch._ops import OpOverload

__all__ = ["differentiate_through", "forward_mode", "handles_functions", "torch_bodies"]

aten = torch.ops.aten
_BATCH_NORMS = (aten._native_batch_norm_legit_functional.default, aten.native_batch_norm.default)

# Operators that torch computes by others: one is replaced where any of those is to be.
_COMPONENTS: dict[OpOverload, tuple[OpOverload, ...]] = {
    aten.layer_norm.default: (aten.native_layer_norm.default,),
    aten.group_norm.default: (aten.native_group_norm.default,),
    aten.batch_norm.default: _BATCH_NORMS,
    aten.instance_norm.default: _BATCH_NORMS,
    aten._batch_norm_impl_index.default: _BATCH_NORMS,
    aten._weight_norm.default: (aten._weight_norm_interface.default,),
}


def _bodies(scope: Mapping[str, Any], functions: Iterable[Any]) -> dict[Callable, Callable[..., Any]]:
    """Functions of a module, each with one of the same body that never asks who else would handle it.

    A function that torch wrote in Python hides the operator that it calls: a mode sees the function, and torch switches
    the mode off before it runs the body. These run with the mode on.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    twin_scope = {**scope, **dict.fromkeys(names, lambda *args: False)}
    # By its name Dynamo would look the module up, and find the functions replaced here.
    del twin_scope["__name__"]
    bodies: dict[Callable, Callable[..., Any]] = {}
    for function in functions:
        own = isinstance(function, FunctionType) and function.__globals__ is scope
        if own and not set(names).isdisjoint(function.__code__.co_names):
            body = FunctionType(function.__code__, twin_scope, function.__name__, function.__defaults__)
            body.__kwdefaults__ = function.__kwdefaults__
            bodies[function] = body
    return bodies


torch_bodies = _bodies(vars(functional), vars(functional).values())
"""Functions of `torch.nn.functional` by a twin of each that runs with modes on."""

# Likewise; Dynamo takes their names for others in a dictionary.
_norm_bodies = {
    **_bodies(vars(torch.functional), [torch.functional.norm]),
    **_bodies(torch.Tensor.norm.__globals__, [torch.Tensor.norm]),
}


def handles_functions(kind: type) -> bool:
    """Whether a subclass of `torch.Tensor` has its own idea of what functions of torch do."""
    if kind.__torch_function__ is torch._C._disabled_torch_function_impl:
        return False
    own = getattr(kind.__torch_function__, "__func__", None)
    return own is not torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined] - a class method


def _jvp_level_exists() -> bool:
    stack = _functorch.get_interpreter_stack() or []
    return any(interpreter.key() == _functorch.TransformType.Jvp for interpreter in stack)


def _show_to_dynamo() -> None:
    """Have Dynamo ask modes about each function that is replaced here, as torch does when it runs without Dynamo.

    It asks about those alone that torch's list has, which lacks what is private and some losses.
    """
    replaced = {*patterns_by_callable, *torch_bodies}
    get_overridable_functions()["primitives"] = [*replaced]
    dynamo = sys.modules.get("torch._dynamo.variables.torch")
    if dynamo is not None:
        dynamo.get_overridable_functions().update(replaced)  # it has read the list perhaps


# As torch.compiler.assume_constant_result does; calling it would import the compiler together with this package.
for _function in (_jvp_level_exists, _show_to_dynamo):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined] - a mark for Dynamo


def _has_tangent(value: Any, levels: Sequence[Any]) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, (list, tuple)) and any(_has_tangent(entry, levels) for entry in value)
    while _functorch.is_functorch_wrapped_tensor(value):
        level = _functorch.maybe_get_level(value)
        if 0 < level <= len(levels) and levels[level - 1].key() == _functorch.TransformType.Jvp:
            return True
        value = _functorch.get_unwrapped(value)
    if forward_ad._current_level < 0:
        return False
    with torch._C._DisableFuncTorch():
        return torch._VF._unpack_dual(value, level=0)[1] is not None  # type: ignore[attr-defined] - no stub


def forward_mode(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether any argument carries a tangent at any level; while a compiler traces, whether there is such a level."""
    if torch.compiler.is_compiling():
        return _jvp_level_exists()
    levels = _functorch.get_interpreter_stack() or []
    return any(_has_tangent(value, levels) for value in (*args, *kwargs.values()))


class differentiate_through(Decorates, TorchFunctionMode):  # noqa: N801 - used like a function, as torch.no_grad is
    """Context manager, and decorator, in which plain torch code runs, and is differentiated, through decompositions.

    Every operator of the tables is replaced by its decomposition, by whatever name Python calls it: functions of
    `torch.nn.functional` and the modules that call them, functions of `torch`, methods of tensors, and
    `torch.ops.<namespace>.<op>` with its overloads. Results from inside are right at every order, in both modes,
    also when it is differentiated after the context has ended. Where an argument carries a tangent,
    `decomposition_table_for_jvp` comes first.

    Arguments that torch refuses are refused with an error of the same type, before running statistics are written.
    TorchScript is out of reach: it calls operators without asking Python. A function that is run again outside, as by
    `torch.utils.checkpoint`, has to enter the context there too: pass it
    `context_fn=lambda: (contextlib.nullcontext(), differentiate_through())`.

    Args:
        *ops: Operators to replace: what `register_decomposition` takes. None given means every operator that has a
            decomposition when it is called.

    Raises:
        MissingRuleError: If one of `ops` has no decomposition in either table.

    Example:
        >>> import torch, primitives as pr
        >>> x, v = torch.tensor([[1.0, 3.0], [1.0, 3.0]], dtype=torch.float64)
        >>> def loss(x):
        ...     return torch.nn.functional.layer_norm(x, (2,), eps=1.0)[0] ** 2
        >>> def curvature(x):
        ...     return torch.func.jvp(lambda x: torch.func.jvp(loss, (x,), (v,))[1], (x,), (v,))[1].item()
        >>> with pr.decompositions.differentiate_through():
        ...     right = curvature(x)
        >>> round(right, 3), round(curvature(x), 3)
        (-0.5, 0.25)
    """

    def __init__(self, *ops: Any) -> None:
        super().__init__()
        _show_to_dynamo()
        self._only: set[OpOverload] | None = None
        if ops:
            self._only = set(registered_overloads(ops, "differentiate_through"))
            for composite, components in _COMPONENTS.items():
                if any(component in self._only for component in components):
                    self._only.add(composite)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace `func` by its decomposition, if it has one here."""
        kwargs = kwargs or {}
        if func is torch.Tensor.unflatten:
            # Torch's method calls `super()`, which Dynamo cannot trace inside a mode; multi-head attention calls it.
            return torch.unflatten(*args, **kwargs)
        if func in torch_bodies and not any(map(handles_functions, types)):
            with self:
                return torch_bodies[func](*args, **kwargs)
        if not torch.compiler.is_compiling() and func in _norm_bodies:
            with self:
                return _norm_bodies[func](*args, **kwargs)
        signatures = patterns_by_callable.get(func)
        if signatures is None:
            return func(*args, **kwargs)
        names = kwargs
        if "input" in kwargs and "self" in signatures[0].positional:
            # Functions of torch call input what schemas call self.
            names = {"self" if name == "input" else name: value for name, value in kwargs.items()}
        meant = [signature for signature in signatures if signature.accepts(args, names)]
        if len(meant) > 1:
            meant = [signature for signature in meant if not signature.takes_tensor_as_number(args, names)]
        decomposition = self._decomposition(meant[0].overload, args, kwargs) if meant else None
        if decomposition is None:
            return func(*args, **kwargs)
        # By position, since a decomposition may have names of its own.
        given, names = [*args], dict(names)
        for name in meant[0].positional[len(args) :]:
            if name not in names:
                break
            given.append(names.pop(name))
        return decomposition(*given, **names)

    def _decomposition(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable | None:
        if self._only is not None and op not in self._only:
            return None
        if op in decomposition_table_for_jvp and forward_mode(args, kwargs):
            return decomposition_table_for_jvp[op]
        return decomposition_table.get(op)
