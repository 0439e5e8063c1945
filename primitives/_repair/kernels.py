"""The kernel that stands before torch's own for an operator whose derivatives torch has wrong or lacks.

In plain code torch's own kernel runs and torch's node is recorded. Inside a transform, and where an argument has a
tangent, the formula of the operator runs, and is differentiated. Where torch has reverse mode wrong too, a backward
pass that is itself recorded takes the formula: by the repaired backward operator of the node where there is one, else
by a hook of the node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _C
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from primitives._audit.table import is_tabled, verdicts_of
from primitives._core import backend
from primitives._core.decomposition import decomposition_table, decomposition_table_for_jvp
from primitives._repair import state
from primitives._repair.dispatcher import NAMESPACES, has_kernel
from primitives._repair.fused import FUSED, ON_CUDA_ALONE
from primitives._repair.nodes import backward_name, backward_operators
from primitives._repair.state import carries_tangent, is_active, is_repairing, process, repairing, this_thread

__all__ = ["SIGNS", "Repair", "forward_kernel", "inplace_kernel", "inplace_name", "repairs"]

_BATCH_NORMS = ("batch_norm", "instance_norm", "_batch_norm_impl_index")
SIGNS = ("layer_norm", "group_norm", *_BATCH_NORMS, "scaled_dot_product_attention")
"""Operators of torch that call one that waits: a transform of `torch.func` meets these first."""

# The half of the factor that they do not read has a gradient in torch, where it is not zero.
_WRONG_AT_ONCE = (torch.ops.aten.cholesky_solve.default, torch.ops.aten.cholesky_inverse.default)
# Their backward passes ask for values where they are recorded.
_ASK_FOR_VALUES = (torch.ops.aten.scatter_reduce.two, torch.ops.aten.index_reduce.default)
# Of others, in C++ that is wrong in place.
_COMPOSED = (torch.ops.aten.cosine_embedding_loss.default,)
# That of `_embedding_bag`, which depends on it where it is saved alone; an optimizer may step before the backward pass.
_NOT_ALWAYS_SAVED = ("weight",)


class _Saved(str):
    """Name of the attribute under which a node has an argument that it saves."""

    __slots__ = ()


# Formulas with products of matrices, which autocast rounds where they are differentiated, but for those in float64.
_OF_MATRICES = (
    *("linalg_det", "linalg_eigh", "linalg_householder", "linalg_slogdet", "linalg_solve"),
    *("cholesky", "ormqr", "triangular_solve"),
)
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_NARROWER = {wide: narrow for narrow, wide in _WIDER.items()}


def _cast(values: Any, dtypes: dict[torch.dtype, torch.dtype]) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.to(dtypes.get(x.dtype, x.dtype)), values)


def _autocast_depth() -> int:
    """How many contexts of autocast this is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class Repair:
    """How one operator is repaired.

    Attributes:
        operator: The operator.
        name: Its name, `"aten::native_layer_norm"`.
        formula: Differentiable function of its arguments; it has its derivatives of every order.
        is_fused: Whether the formula is a primitive, which runs on a GPU in plain code too.
        devices: Where the operator is repaired, `"CPU"` and `"CUDA"`.
        reverse: Who differentiates a backward pass that is recorded: `"torch"`, which has it right, `"node"`, the
            backward operator of its node, or `"formula"`.
        is_wrong_at_once: Whether torch's first gradient can be wrong too.
        waits_for: What comes before its kernel is registered, and plain code costs nothing until then: a `"transform"`
            or any tangent, one by `"forward_ad"`, or nothing. That of a primitive on a GPU is there from the start.
    """

    def __init__(self, operator: OpOverload) -> None:
        self.operator = operator
        self.name: str = operator.name()
        self.is_fused = operator in FUSED
        self.devices: tuple[str, ...] = ("CUDA",) if operator in ON_CUDA_ALONE else ("CPU", "CUDA")
        self._formulas = [
            table[operator] for table in (FUSED, decomposition_table_for_jvp, decomposition_table) if operator in table
        ]
        self._multiplies = operator._opname.removeprefix("_").startswith(_OF_MATRICES)
        self.is_wrong_at_once = operator in _WRONG_AT_ONCE
        self.reverse = "formula" if self.is_wrong_at_once or operator in _ASK_FOR_VALUES else "torch"
        if any(set(nesting) == {"r"} for nesting in verdicts_of(operator).beyond(1)):
            self.reverse = "node" if backward_name(operator) in backward_operators() else "formula"
        wrong = verdicts_of(operator).beyond(0)
        is_right_in_transforms = bool(wrong) and all("d" in nesting for nesting in wrong)
        self.waits_for = "" if self.reverse == "formula" else "forward_ad" if is_right_in_transforms else "transform"

    def formula(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, or `NotImplemented` where no formula takes the arguments."""
        if self.waits_for == "forward_ad" and _functorch.peek_interpreter_stack() is not None:
            return NotImplemented
        # Not whether it is enabled: it is not inside operators that autocast runs in float32, and is behind them.
        is_wide = self._multiplies and _autocast_depth() > 0
        is_wide = is_wide and not any(isinstance(x, torch.Tensor) and x.dtype in _NARROWER for x in args)
        if is_wide:
            args, kwargs = _cast((args, kwargs), _WIDER)
        for formula in self._formulas:
            outputs = formula(*args, **kwargs)
            if outputs is not NotImplemented:
                return _cast(outputs, _NARROWER) if is_wide else outputs
        return NotImplemented


def repairs() -> dict[str, Repair]:
    """All repairs by the name of their operator: of those that have a formula, the ones that torch has not right."""
    found = {}
    for operator in {**FUSED, **decomposition_table_for_jvp, **decomposition_table}:
        if operator.namespace not in NAMESPACES:  # the library of another may be gone
            continue
        is_wrong = operator in FUSED or not is_tabled(operator) or verdicts_of(operator).beyond(0)
        is_leaf = has_kernel(operator.name(), "Autograd") or operator in (*ON_CUDA_ALONE, *_COMPOSED)
        is_backward = operator.name() in backward_operators()
        if is_wrong and is_leaf and not is_backward:
            found[operator.name()] = Repair(operator)
    return found


def forward_kernel(repair: Repair, device: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """`(keyset, *args) -> outputs` for the Autograd key of a device; `own` is torch's kernel there."""
    name, peek, in_plain_code = repair.name, _functorch.peek_interpreter_stack, _in_plain_code(own, repair)
    num_modes, runs_kernels = _C._len_torch_dispatch_stack, device == "CUDA" and repair.is_fused

    # Questions are spelled out where every call asks them: each call of a function in Python takes time.
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not (process.is_repaired or this_thread.num_contexts) or (this_thread.running and is_repairing(name)):
            return own(keyset, *args, **kwargs)
        if peek() is None and (forward_ad._current_level < 0 or not carries_tangent(args, kwargs)):
            is_traced = num_modes() > 0
            if not (is_traced and carries_tangent(args, kwargs)) and (
                not runs_kernels or is_traced or backend.selected == "reference"
            ):
                return in_plain_code(keyset, *args, **kwargs)
        with repairing(name):
            outputs = repair.formula(*map(state.without_subclass, args), **kwargs)
        return own(keyset, *args, **kwargs) if outputs is NotImplemented else outputs

    return kernel


def inplace_name(repair: Repair) -> str | None:
    """Name of the operator that writes the result into its first argument, if there is one of the same arguments."""

    def arguments(operator: OpOverload) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in operator._schema.arguments]

    packet = getattr(torch.ops.aten, f"{repair.operator._opname}_", None)
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return next((own.name() for own in overloads if arguments(own) == arguments(repair.operator)), None)


def inplace_kernel(repair: Repair, own: Callable[..., Any]) -> Callable[..., Any]:
    """`(keyset, x, *args) -> x` for `inplace_name`: where it is differentiated, the other operator and a copy."""
    peek = _functorch.peek_interpreter_stack

    def kernel(keyset: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_active() or is_repairing(repair.name):
            return own(keyset, x, *args, **kwargs)
        is_recorded = repair.reverse == "formula" and torch.is_grad_enabled() and _C._any_requires_grad(x, *args)
        if peek() is None and not is_recorded and not carries_tangent((x, *args), kwargs):
            return own(keyset, x, *args, **kwargs)
        y = repair.operator(x.clone(), *args, **kwargs)
        # Torch's own refuses what does not fit.
        return x.copy_(y) if torch.can_cast(y.dtype, x.dtype) else own(keyset, x, *args, **kwargs)

    return kernel


def _in_plain_batch_norm(own: Callable[..., Any], repair: Repair) -> Callable[..., Any]:
    """Torch's own kernel, which refuses statistics that require grad; in evaluation the formula differentiates them."""

    def kernel(keyset: Any, *args: Any) -> Any:
        _, _, _, mean, var, is_training, *_ = args
        if is_training or not (torch.is_grad_enabled() and _C._any_requires_grad(mean, var)):
            return own(keyset, *args)
        with repairing(repair.name):
            return repair.formula(*args)

    return kernel


def _in_plain_code(own: Callable[..., Any], repair: Repair) -> Callable[..., Any]:
    """Torch's own kernel; its node gets a hook where the formula has to differentiate its backward pass."""
    if repair.operator is torch.ops.aten.native_batch_norm.default:
        return _in_plain_batch_norm(own, repair)
    if repair.reverse != "formula":
        return own
    arguments = [argument.name for argument in repair.operator._schema.arguments]
    is_leaf = repair.operator not in _COMPOSED

    def is_saved(node: Any, name: str) -> bool:
        return not repair.is_wrong_at_once and name not in _NOT_ALWAYS_SAVED and hasattr(type(node), f"_saved_{name}")

    def recorded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = _top_saved_tensors_default_hooks(False) if is_leaf else None
        if hooks is None:
            outputs = own(keyset, *args, **kwargs)
        else:
            with torch.autograd.graph.saved_tensors_hooks(*_unpacking_once(*hooks)):
                outputs = own(keyset, *args, **kwargs)
        node = (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).grad_fn
        if node is None:
            return outputs
        values, names = [*args, *kwargs.values()], [*arguments[: len(args)], *kwargs]
        # The hook holds a tensor only if the node does not hand it out: this may be another one by then.
        held = {i: x for i, x in enumerate(values) if isinstance(x, torch.Tensor) and not is_saved(node, names[i])}
        places = _places_of_edges(node, values) if held else None
        versions = {i: x._version for i, x in held.items() if x.requires_grad}
        values = [
            _Saved(f"_saved_{name}") if isinstance(x, torch.Tensor) and i not in held else x
            for i, (x, name) in enumerate(zip(values, names, strict=True))
        ]
        if repair.operator.namespace != "aten" or repair.operator in _ASK_FOR_VALUES:
            # Backward passes in Python may not be differentiable, and their results go where one is recorded.
            node.register_prehook(_unrecorded)
        node.register_hook(functools.partial(_replaced, repair, values, names, len(args), places, versions))
        if hooks is not None:
            node.register_hook(_forget)
        return outputs

    return recorded


def _unpacking_once(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], ...]:
    """Hooks by which a backward pass unpacks each saved tensor once, for the node and `_replaced`.

    A second time may cost a transfer, and a checkpoint refuses it.
    """

    def shared(packed: list[Any]) -> Any:
        node: Any = _C._current_autograd_node()
        if node is None:
            return unpack(packed[0])
        unpacked = node.metadata.setdefault((_forget, _C._current_graph_task_id()), {})
        if id(packed) not in unpacked:
            unpacked[id(packed)] = unpack(packed[0])
        return unpacked[id(packed)]

    return lambda x: [pack(x)], shared


def _forget(_found: Any, _cotangents: Any) -> None:
    """Let go of what `_unpacking_once` keeps for `_replaced`, which ran before."""
    node: Any = _C._current_autograd_node()
    if node is not None:
        node.metadata.pop((_forget, _C._current_graph_task_id()), None)


def _unrecorded(_cotangents: Any) -> None:
    """Until `_replaced` runs behind it, the node's backward pass is not recorded; the engine restores the mode."""
    node: Any = _C._current_autograd_node()
    if node is not None:  # compiled autograd has none, and records no backward pass
        node.metadata[_unrecorded] = torch.is_grad_enabled()
        _C._set_grad_enabled(False)


def _places_of_edges(node: Any, values: Sequence[Any]) -> list[int | None]:
    """For each gradient that a node returns, the place of the argument that has it; a leaf may be frozen by now."""
    tensors = {i: x for i, x in enumerate(values) if isinstance(x, torch.Tensor)}
    edges = {i: torch.autograd.graph.get_gradient_edge(x) for i, x in tensors.items() if x.requires_grad}
    places = []
    for end, number in node.next_functions:
        leaf = getattr(end, "variable", None)
        ours = (i for i, own in edges.items() if (own.node, own.output_nr) == (end, number))
        place = next(ours, next((i for i, x in tensors.items() if x is leaf), None))
        if place is not None:
            del tensors[place]
            edges.pop(place, None)
        places.append(place)
    return places


def _replaced(
    repair: Repair,
    values: list[Any],
    names: list[str],
    count: int,
    places: Any,
    versions: dict[int, int],
    found: Any,
    cotangents: Any,
) -> tuple[Any, ...] | None:
    """The gradients that a node returns, by the formula, where the backward pass is recorded or torch's are wrong.

    Torch's own stay if an argument that the node does not save was written to since, and if they are sparse.
    """
    node: Any = _C._current_autograd_node()
    is_recorded = False
    if node is not None:  # as in `_unrecorded`
        is_recorded = node.metadata.pop(_unrecorded, torch.is_grad_enabled())
        _C._set_grad_enabled(is_recorded)
    if not (is_recorded or repair.is_wrong_at_once):
        return None
    is_stale = any(values[i]._version != version for i, version in versions.items())
    if is_stale or any(bar is not None and bar.layout is not torch.strided for bar in found):
        return None
    values = [getattr(node, value) if isinstance(value, _Saved) else value for value in values]
    places = _places_of_edges(node, values) if places is None else places
    wanted = {place for place in places if place is not None}
    with repairing(repair.name), torch.enable_grad():
        # Views, so that what one argument has of another does not count twice.
        views = [state.without_subclass(_free(x) if i in wanted else x) for i, x in enumerate(values)]
        outputs = repair.formula(*views[:count], **dict(zip(names[count:], views[count:], strict=True)))
    if outputs is NotImplemented:
        return None
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    gradients = _gradients(outputs, {i: views[i] for i in wanted}, cotangents, is_recorded=is_recorded)
    # Autograd refuses a gradient of what nobody asked for, where torch has computed none.
    edges = zip(places, found, node.next_functions, strict=True) if node is not None else ()
    unasked = {place for place, bar, (end, _) in edges if bar is None and end and not _C._will_engine_execute_node(end)}
    return tuple(None if place is None or place in unasked else gradients[place] for place in places)


def _free(x: torch.Tensor) -> torch.Tensor:
    """A view that has a gradient of its own."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _gradients(
    outputs: Sequence[Any], values: dict[int, torch.Tensor], cotangents: Sequence[Any], *, is_recorded: bool
) -> dict[int, Any]:
    """By the place of each argument that has one; outputs that have none come last."""
    given = [(y, bar) for y, bar in zip(outputs, cotangents, strict=False) if bar is not None and y.requires_grad]
    if not given:
        return dict.fromkeys(values)
    ys, bars = zip(*given, strict=True)
    found = torch.autograd.grad(ys, [*values.values()], bars, create_graph=is_recorded, allow_unused=True)
    return dict(zip(values, found, strict=True))
