"""Derivatives across the border between a wrapper subclass and the plain tensors inside it.

A subclass is taken for the collection of its plain tensors: the gradient with respect to these is what is inside the
gradient with respect to the subclass, which has to be a subclass of the same kind for that. Putting tensors in and
taking them out are each other's transpose, so that derivatives of every order exist.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import optree
import torch

from primitives.core.autograd import LinearMap, apply_linear
from primitives.core.dtypes import has_derivatives
from primitives.core.errors import LeafError
from primitives.tracing.subclasses.spec import SubclassSpec

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
        transpose = functools.partial(_wrapped_transpose, spec, treespec, label, record)
        return apply_linear(LinearMap(functools.partial(_wrap, spec, treespec), transpose), *leaves)
    return spec.wrap(plain)


def unwrapped(spec: SubclassSpec, x: Any) -> dict[str, Any]:
    """The plain tensors inside a subclass, by name; differentiable, if it requires grad."""
    plain = spec.unwrap(x)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return plain
    leaves, treespec = optree.tree_flatten(plain)  # type: ignore[arg-type] - a tree of tensors
    if not any(map(_is_differentiable, leaves)):
        return plain
    has_integers = not all(map(_is_differentiable, leaves))
    transpose = functools.partial(_unwrapped_transpose, spec, treespec, has_integers)
    result: Any = treespec.unflatten(apply_linear(LinearMap(functools.partial(_unwrap, spec, treespec), transpose), x))
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
    return has_derivatives(x.dtype)


def _wrap(spec: SubclassSpec, treespec: Any, *leaves: Tensor) -> Any:
    return spec.wrap(treespec.unflatten([x.detach() for x in leaves]))


def _wrapped_transpose(spec: SubclassSpec, treespec: Any, label: str, record: Any, x_bar: Any) -> list[Any]:
    found = SubclassSpec.of(x_bar)
    if found is None or optree.tree_structure(found.unwrap(x_bar)) != treespec:  # type: ignore[arg-type] - a tree
        raise LeafError(
            f"{_FUNCTION}: the gradient of {label} must be a {spec.type.__name__} too, to be one of what is inside, "
            f"got a {'plain tensor' if found is None else found.type.__name__}. {_HINT}"
        )
    if record is not None:
        record(found)
    return treespec.flatten_up_to(unwrapped(found, x_bar))


def _unwrap(spec: SubclassSpec, treespec: Any, x: Any) -> tuple[Tensor, ...]:
    return tuple(y.detach() for y in treespec.flatten_up_to(spec.unwrap(x)))


def _unwrapped_transpose(spec: SubclassSpec, treespec: Any, has_integers: bool, *leaves_bar: Any) -> tuple[Any]:
    if has_integers:
        raise LeafError(
            f"{_FUNCTION}: a {spec.type.__name__} with integers inside has no cotangent of its own kind. {_HINT}"
        )
    return (wrapped(spec, treespec.unflatten(leaves_bar)),)
