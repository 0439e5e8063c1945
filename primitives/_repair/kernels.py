"""The kernel that stands before torch's own for an operator whose derivatives torch has wrong or lacks.

In plain code torch's own kernel runs and torch's node is recorded. Inside a transform, and where an argument has a
tangent, the formula of the operator runs, and is differentiated. Where torch has reverse mode wrong too, a backward
pass that is itself recorded takes the formula: by the repaired backward operator of the node where there is one, else
by an autograd function around torch's node.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import _C
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from primitives._audit.table import is_tabled, verdicts_of
from primitives._core import backend
from primitives._core.autograd import function_class
from primitives._core.decomposition import decomposition_table, decomposition_table_for_jvp
from primitives._repair.dispatcher import NAMESPACES, has_kernel
from primitives._repair.fused import FUSED, ON_CUDA_ALONE
from primitives._repair.nodes import MARK, backward_name, backward_operators
from primitives._repair.state import carries_tangent, is_active, is_repairing, process, repairing, this_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

__all__ = ["Repair", "forward_kernel", "inplace_kernel", "inplace_name", "repairs"]


# The half of the factor that they do not read has a gradient in torch, where it is not zero.
_WRONG_AT_ONCE = (torch.ops.aten.cholesky_solve.default, torch.ops.aten.cholesky_inverse.default)

# Formulas with products of matrices, which autocast rounds where they are differentiated, but for those in float64.
_OF_MATRICES = (
    *("linalg_det", "linalg_eigh", "linalg_householder", "linalg_slogdet", "linalg_solve"),
    *("cholesky", "ormqr", "triangular_solve"),
)
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_NARROWER = {wide: narrow for narrow, wide in _WIDER.items()}


def _has_double(args: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype in _NARROWER for x in args)


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
        eps_at: Place of eps among the arguments, where a node keeps it.
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
        names = [argument.name for argument in operator._schema.arguments]
        self.eps_at: int | None = names.index("eps") if "eps" in names else None
        self.is_wrong_at_once = operator in _WRONG_AT_ONCE
        self.reverse = "formula" if self.is_wrong_at_once else "torch"
        if any(set(nesting) == {"r"} for nesting in verdicts_of(operator).beyond(1)):
            self.reverse = "node" if backward_name(operator) in backward_operators() else "formula"

    def formula(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, or `NotImplemented` where no formula takes the arguments."""
        # Not whether it is enabled: it is not inside operators that autocast runs in float32, and is behind them.
        is_wide = self._multiplies and _autocast_depth() > 0 and not _has_double(args)
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
        is_leaf = has_kernel(operator.name(), "Autograd") or operator in ON_CUDA_ALONE
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
            outputs = repair.formula(*args, **kwargs)
        return own(keyset, *args, **kwargs) if outputs is NotImplemented else outputs

    return kernel


def inplace_name(repair: Repair) -> str | None:
    """Name of the operator that writes the result into its first argument, if there is one of the same arguments."""
    packet = getattr(torch.ops.aten, f"{repair.operator._opname}_", None)
    inplace = getattr(packet, repair.operator._overloadname, None)
    return None if inplace is None else inplace.name()


def inplace_kernel(repair: Repair, own: Callable[..., Any]) -> Callable[..., Any]:
    """`(keyset, x, *args) -> x` for `inplace_name`: where it is differentiated, the other operator and a copy."""
    peek = _functorch.peek_interpreter_stack

    def kernel(keyset: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_active() or is_repairing(repair.name):
            return own(keyset, x, *args, **kwargs)
        is_recorded = repair.reverse != "torch" and torch.is_grad_enabled() and _C._any_requires_grad(x, *args)
        if peek() is None and not is_recorded and not carries_tangent((x, *args), kwargs):
            return own(keyset, x, *args, **kwargs)
        return x.copy_(repair.operator(x.clone(), *args, **kwargs))

    return kernel


def _in_plain_code(own: Callable[..., Any], repair: Repair) -> Callable[..., Any]:
    """Torch's own kernel, and what a recorded backward pass needs."""
    if repair.reverse == "torch":
        return own
    if repair.reverse == "formula":
        return _recorded_by(own, repair)
    eps_at, returns_several = repair.eps_at, len(repair.operator._schema.returns) > 1

    def marked(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = own(keyset, *args, **kwargs)
        node = (outputs[0] if returns_several else outputs).grad_fn
        if node is not None:
            node.metadata[MARK] = None if eps_at is None else args[eps_at]
        return outputs

    return marked


def _recorded_by(own: Callable[..., Any], repair: Repair) -> Callable[..., Any]:
    num_modes = _C._len_torch_dispatch_stack

    def recorded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and _C._any_requires_grad(*args, *kwargs.values())):
            return own(keyset, *args, **kwargs)
        # No operator of this kind takes a list of tensors.
        values, count, names = [*args, *kwargs.values()], len(args), tuple(kwargs)
        places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]

        # It holds no tensor: what a backward pass reads is saved as torch saves it.
        def call(function: Callable[..., Any], tensors: Sequence[Any]) -> list[Any]:
            given = list(values)
            for i, x in zip(places, tensors, strict=True):
                given[i] = x
            outputs = function(*given[:count], **dict(zip(names, given[count:], strict=True)))
            return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)

        tensors = [values[i] for i in places]
        if num_modes() > 0:
            # A graph is to hold torch's operator as it is.
            outputs = own(keyset, *args, **kwargs)
            node = (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).grad_fn
            if node is not None:
                node.register_hook(functools.partial(_replaced, call, repair, tensors, _places_of_edges(node, tensors)))
            return outputs
        for i in places:
            values[i] = None
        by_torch = lambda *a, **k: own(keyset, *a, **k)  # noqa: E731 - one of two functions of the same arguments
        outputs = _Repaired.apply((call, by_torch, repair), *tensors)
        return outputs[0] if len(outputs) == 1 else outputs

    return recorded


def _places_of_edges(node: Any, tensors: Sequence[Tensor]) -> list[int | None]:
    """For each gradient that a node returns, which of the tensors has it."""
    free = {i: torch.autograd.graph.get_gradient_edge(x) for i, x in enumerate(tensors) if x.requires_grad}
    places = []
    for edge in node.next_functions:
        place = next((i for i, own in free.items() if (own.node, own.output_nr) == edge), None)
        if place is not None:
            del free[place]
        places.append(place)
    return places


def _replaced(
    call: Any, repair: Repair, tensors: Sequence[Tensor], places: Sequence[int | None], _found: Any, cotangents: Any
) -> tuple[Any, ...] | None:
    """The gradients that torch's node returns, by the formula, where a tracer sees a backward pass that is recorded."""
    is_recorded = torch.is_grad_enabled()
    if not (is_recorded or repair.is_wrong_at_once):
        return None
    gradients = _by_formula(call, repair, tensors, cotangents, is_recorded=is_recorded)
    return tuple(None if place is None else gradients[place] for place in places)


def _by_formula(
    call: Any, repair: Repair, tensors: Sequence[Tensor], cotangents: Sequence[Any], *, is_recorded: bool
) -> list[Any]:
    """The cotangents of all tensors, `None` where there is none."""
    # Views, so that what one argument has of another does not count twice.
    with repairing(repair.name), torch.enable_grad():
        views = [x.view_as(x) if x.requires_grad else x for x in tensors]
        outputs = call(repair.formula, views)
    return _gradients(outputs, views, cotangents, is_recorded=is_recorded)


def _gradients(
    outputs: Sequence[Any], tensors: Sequence[Any], cotangents: Sequence[Any], *, is_recorded: bool
) -> list[Any]:
    wanted = [i for i, x in enumerate(tensors) if x.requires_grad]
    given = [(y, bar) for y, bar in zip(outputs, cotangents, strict=True) if bar is not None and y.requires_grad]
    found: list[Any] = [None] * len(tensors)
    if given:
        ys, bars = zip(*given, strict=True)
        inputs = [tensors[i] for i in wanted]
        options = {"retain_graph": True, "create_graph": is_recorded, "allow_unused": True}
        for i, gradient in zip(wanted, torch.autograd.grad(ys, inputs, bars, **options), strict=True):
            found[i] = gradient
    return found


def _forward(ctx: Any, how: Any, *tensors: Any) -> tuple[Any, ...]:
    call, by_torch, _ = ctx.how = how
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    with torch.enable_grad():
        ctx.inner = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        ctx.outputs = call(by_torch, ctx.inner)
    results = tuple(y.detach() for y in ctx.outputs)
    constants = [result for y, result in zip(ctx.outputs, results, strict=True) if not y.requires_grad]
    ctx.mark_non_differentiable(*constants)
    return results


def _backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
    call, _, repair = ctx.how
    is_recorded = torch.is_grad_enabled()
    if is_recorded or repair.is_wrong_at_once:
        return None, *_by_formula(call, repair, ctx.saved_tensors, cotangents, is_recorded=is_recorded)
    return None, *_gradients(ctx.outputs, ctx.inner, cotangents, is_recorded=False)


_Repaired: Any = function_class("Repaired", forward=_forward, backward=_backward)
