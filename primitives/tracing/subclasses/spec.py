"""What wrapper subclasses are made of, and derivatives across the border between them and the plain tensors inside.

A subclass is taken for the collection of its plain tensors: the gradient with respect to these is what is inside the
gradient with respect to the subclass, which has to be a subclass of the same kind for that. Putting tensors in and
taking them out are each other's transpose, so that derivatives of every order exist.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import optree
import torch

from primitives.core.autograd import apply_linear
from primitives.core.dtypes import has_derivatives
from primitives.core.errors import LeafError
from primitives.tracing.torch_private import hinted_size, is_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["SubclassSpec", "checked_input", "leaves_inside", "require_like", "unwrapped", "wrapped"]

_HINT = "For such gradients, unwrap the joint function: unwrap_subclasses(create_joint(fn), primals, tangents)."


@dataclasses.dataclass(frozen=True)
class SubclassSpec:
    """What makes a wrapper subclass out of plain tensors.

    Attributes:
        type: The subclass.
        inner: What is inside, by the name of its attribute: the spec of a subclass, or `None` for a plain tensor.
        constants: What else is inside and is no tensor, such as the mesh of a `DTensor` in some releases of torch.
        context: Metadata, as `__tensor_flatten__` gives it.
        size: Outer size when it was recorded.
        stride: Outer stride.
        inner_sizes: Sizes of what is inside.
        inner_strides: Strides of what is inside.
        requires_grad: Whether the subclass requires grad.
        kind: What two specs have in common if one can go for the other: all but sizes, and whether they require grad.
    """

    type: type
    inner: dict[str, SubclassSpec | None]
    constants: dict[str, Any]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    inner_sizes: dict[str, tuple[int, ...]]
    inner_strides: dict[str, tuple[int, ...]]
    requires_grad: bool
    kind: tuple[Any, ...]

    @classmethod
    def of(cls, x: Any) -> SubclassSpec | None:
        """Spec of a tensor; `None` if it is plain.

        Raises:
            LeafError: If it is a nested tensor.
        """
        if not is_wrapper_subclass(x):
            return None
        wrapper: Any = x
        if wrapper.is_nested:
            raise LeafError(
                f"unwrap_subclasses: a subclass must have sizes that are numbers, got a nested tensor {list(x.shape)}. "
                "Pass x.values() and x.offsets(), and make it inside by torch.nested.nested_tensor_from_jagged."
            )
        names, context = wrapper.__tensor_flatten__()
        held = {name: getattr(x, name) for name in names}
        values = {name: y for name, y in held.items() if isinstance(y, torch.Tensor)}
        constants = {name: y for name, y in held.items() if name not in values}
        inner = {name: cls.of(y) for name, y in values.items()}
        compared = context
        if hasattr(x, "placements"):
            # The context of a `DTensor` has its sizes, and whether it requires grad, among other things.
            orders = [item for item in context if type(item) is tuple]
            compared = wrapper.device_mesh, wrapper.placements, wrapper.dtype, orders
        return cls(
            type(x),
            inner,
            constants,
            context,
            _hints(x.shape),
            _hints(x.stride()),
            {name: _hints(y.shape) for name, y in values.items()},
            {name: _hints(y.stride()) for name, y in values.items()},
            wrapper.requires_grad,
            (type(x), {name: spec and spec.kind for name, spec in inner.items()}, constants, compared),
        )

    def unwrap(self, x: Any) -> dict[str, Any]:
        """The plain tensors inside, by name; a dict in the place of a subclass that is inside."""
        return {
            name: getattr(x, name) if spec is None else spec.unwrap(getattr(x, name))
            for name, spec in self.inner.items()
        }

    def wrap(self, plain: dict[str, Any]) -> Any:
        """The subclass, around tensors that may have other sizes than the recorded ones; it requires no grad."""
        values = {name: plain[name] if spec is None else spec.wrap(plain[name]) for name, spec in self.inner.items()}
        size, stride = self._outer(values)
        return self.type.__tensor_unflatten__({**values, **self.constants}, self.context, size, stride)  # type: ignore[attr-defined] - no stub

    def _outer(self, values: dict[str, Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Outer size and stride: those of the first inner tensor with as many axes, in the recorded proportion."""
        for name, y in values.items():
            recorded = self.inner_sizes[name]
            if len(recorded) == len(self.size) == y.dim():
                if _hints(y.shape) == recorded and not any(isinstance(n, torch.SymInt) for n in y.shape):
                    break
                sizes = zip(self.size, recorded, y.shape, strict=True)
                size = tuple(k * (n // m) if m and n % m == 0 else n for n, m, k in sizes)
                same = self.stride == self.inner_strides[name]
                return size, tuple(y.stride()) if same else _strides(size, self.stride)
        return self.size, self.stride

    def __str__(self) -> str:
        """The kind, in words."""
        inner = ", ".join(name if spec is None else f"{name}: {spec}" for name, spec in self.inner.items())
        return f"a {self.type.__name__} ({inner}) with the metadata {self.kind[-1]!r}"


def require_like(label: str, spec: SubclassSpec | None, x: Any) -> None:
    """Raise `LeafError` unless `x` is of the recorded kind; sizes may differ."""
    found = SubclassSpec.of(x)
    if (spec and spec.kind) != (found and found.kind):
        raise LeafError(
            f"unwrap_subclasses: {label} must be {spec or 'a plain tensor'}, got {found or 'a plain tensor'}."
        )


def _hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(hinted_size(n) for n in sizes)


def _strides(size: tuple[Any, ...], like: tuple[int, ...]) -> tuple[Any, ...]:
    """Strides of memory without gaps, with the axes in the order of the strides `like`."""
    result: dict[int, Any] = {}
    step: Any = 1
    for axis in sorted(range(len(size)), key=lambda i: (like[i], -i)):
        result[axis], step = step, step * size[axis]
    return tuple(result[axis] for axis in range(len(size)))


# The border.


def _flat(plain: Any) -> tuple[list[Any], Any]:
    return optree.tree_flatten(plain)


def _spec_of_gradient(label: str, spec: SubclassSpec | None, treespec: Any, x_bar: Any) -> SubclassSpec | None:
    """Spec of the gradient of `label`, which must be made of tensors as `treespec` says."""
    found = SubclassSpec.of(x_bar)
    if _flat(x_bar if found is None else found.unwrap(x_bar))[1] != treespec:
        raise LeafError(
            f"unwrap_subclasses: the gradient of {label} must be {spec or 'a plain tensor'} too, got "
            f"{found or 'a plain tensor'}. {_HINT}"
        )
    return found


def wrapped(
    spec: SubclassSpec, plain: dict[str, Any], label: str = "output", record: Callable[..., Any] | None = None
) -> Any:
    """The subclass around plain tensors, by name; differentiable, and `record` gets the spec of the gradient."""
    leaves, treespec = _flat(plain)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in leaves)):
        return spec.wrap(plain)

    def forward(*leaves: Tensor) -> Any:
        return spec.wrap(treespec.unflatten([x.detach() for x in leaves]))

    def transpose(x_bar: Any) -> list[Any]:
        found: Any = _spec_of_gradient(label, spec, treespec, x_bar)
        if record is not None:
            record(found)
        return treespec.flatten_up_to(unwrapped(found, x_bar))

    return apply_linear(forward, transpose, *leaves)


def unwrapped(spec: SubclassSpec, x: Any) -> dict[str, Any]:
    """The plain tensors inside a subclass, by name; differentiable, if it requires grad."""
    plain = spec.unwrap(x)
    leaves, treespec = _flat(plain)
    differentiable = [has_derivatives(y.dtype) for y in leaves]
    if not (torch.is_grad_enabled() and x.requires_grad and any(differentiable)):
        return plain

    def forward(x: Any) -> tuple[Tensor, ...]:
        return tuple(y.detach() for y in treespec.flatten_up_to(spec.unwrap(x)))

    def transpose(*leaves_bar: Any) -> tuple[Any]:
        if not all(differentiable):
            raise LeafError(f"unwrap_subclasses: {spec}, with integers inside, has no cotangent of its kind. {_HINT}")
        return (wrapped(spec, treespec.unflatten(leaves_bar)),)

    return treespec.unflatten(apply_linear(forward, transpose, x))


def leaves_inside(spec: SubclassSpec, x: Any) -> dict[str, Any]:
    """The plain tensors inside a subclass, by name, without its history; they require grad if it does."""
    leaves, treespec = _flat(spec.unwrap(x))
    return treespec.unflatten([y.detach().requires_grad_(x.requires_grad and has_derivatives(y.dtype)) for y in leaves])


def checked_input(label: str, x: Any) -> Any:
    """A plain argument, whose gradient has to be plain too."""
    if not (torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad):
        return x
    # The hook is for this call, and so on a tensor of this call.
    alias = x.view_as(x)
    alias.register_hook(functools.partial(_spec_of_gradient, label, None, _flat(x)[1]))
    return alias
