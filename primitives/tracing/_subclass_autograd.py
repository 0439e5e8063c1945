"""Derivatives across the border between a wrapper subclass and the plain tensors inside it.

A subclass is taken for the collection of its plain tensors: the gradient with respect to these is what is inside the
gradient with respect to the subclass, which has to be a subclass of the same kind for that. Putting tensors in and
taking them out are each other's transpose, so that derivatives of every order exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import torch
from torch.autograd import Function

from primitives.core.errors import LeafError
from primitives.tracing._subclass_spec import SubclassSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["checked_input", "leaves_inside", "unwrapped", "wrapped"]

_FUNCTION = "unwrap_subclasses"
_HINT = "For such gradients, unwrap the joint function: unwrap_subclasses(create_joint(fn), primals, tangents)."


def wrapped(
    spec: SubclassSpec,
    plain: dict[str, Any],
    label: str = "output",
    record: Callable[[SubclassSpec], Any] | None = None,
) -> Any:
    """The subclass around plain tensors; differentiable, if one of these requires grad.

    Args:
        spec: What to make.
        plain: The tensors inside, by name.
        label: Key path of the subclass, for errors.
        record: Called with the spec of the gradient, in the backward pass.
    """
    leaves, treespec = optree.tree_flatten(plain)  # type: ignore[arg-type] - a tree of tensors
    if torch.is_grad_enabled() and any(x.requires_grad for x in leaves):
        return _Wrap.apply(spec, treespec, label, record, *leaves)
    return spec.wrap(plain)


def unwrapped(spec: SubclassSpec, x: Any) -> dict[str, Any]:
    """The plain tensors inside a subclass, by name; differentiable, if it requires grad."""
    plain = spec.unwrap(x)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return plain
    leaves, treespec = optree.tree_flatten(plain)  # type: ignore[arg-type] - a tree of tensors
    if not any(map(_is_differentiable, leaves)):
        return plain
    result: Any = treespec.unflatten(_Unwrap.apply(spec, treespec, x))
    return result


def leaves_inside(spec: SubclassSpec, x: Any) -> dict[str, Any]:
    """The plain tensors inside a subclass, by name, without its history; they require grad if it does."""
    plain = spec.unwrap(x)
    if not x.requires_grad:
        return plain
    leaves, treespec = optree.tree_flatten(plain)  # type: ignore[arg-type] - a tree of tensors
    result: Any = treespec.unflatten([y.detach().requires_grad_(_is_differentiable(y)) for y in leaves])
    return result


def checked_input(label: str, x: Any) -> Any:
    """A plain argument, whose gradient has to be plain too."""
    if not (torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad):
        return x

    def check(x_bar: Tensor) -> None:
        found = SubclassSpec.of(x_bar)
        if found is not None:
            raise LeafError(
                f"{_FUNCTION}: the gradient of {label}, which is a plain tensor, must be plain too, got a "
                f"{found.type.__name__}. {_HINT}"
            )

    # The hook is for this call, and so on a tensor of this call.
    alias = x.view_as(x)
    alias.register_hook(check)
    return alias


def _is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class _Wrap(Function):
    @staticmethod
    def forward(ctx: Any, spec: SubclassSpec, treespec: Any, label: str, record: Any, *leaves: Tensor) -> Any:
        ctx.spec, ctx.treespec, ctx.label, ctx.record = spec, treespec, label, record
        return spec.wrap(treespec.unflatten([x.detach() for x in leaves]))

    @staticmethod
    def backward(ctx: Any, x_bar: Any) -> Any:  # type: ignore[override] - one output
        found = SubclassSpec.of(x_bar)
        if found is None or optree.tree_structure(found.unwrap(x_bar)) != ctx.treespec:  # type: ignore[arg-type] - a tree
            raise LeafError(
                f"{_FUNCTION}: the gradient of {ctx.label} must be a {ctx.spec.type.__name__} too, to be one of what "
                f"is inside, got a {'plain tensor' if found is None else found.type.__name__}. {_HINT}"
            )
        if ctx.record is not None:
            ctx.record(found)
        return None, None, None, None, *ctx.treespec.flatten_up_to(unwrapped(found, x_bar))


class _Unwrap(Function):
    @staticmethod
    def forward(ctx: Any, spec: SubclassSpec, treespec: Any, x: Any) -> Any:
        ctx.spec, ctx.treespec = spec, treespec
        leaves = [y.detach() for y in treespec.flatten_up_to(spec.unwrap(x))]
        integral = [y for y in leaves if not _is_differentiable(y)]
        ctx.mark_non_differentiable(*integral)
        ctx.integral = [type(y).__name__ for y in integral]
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *leaves_bar: Any) -> Any:
        if ctx.integral:
            raise LeafError(
                f"{_FUNCTION}: a {ctx.spec.type.__name__} with integers inside has no cotangent of its own kind. "
                f"{_HINT}"
            )
        return None, None, wrapped(ctx.spec, ctx.treespec.unflatten(leaves_bar))
