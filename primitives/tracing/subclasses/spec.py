"""What wrapper subclasses are made of: `SubclassSpec`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from primitives.core.errors import LeafError
from primitives.tracing.torch_private import hinted_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["SubclassSpec", "difference"]


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

    @classmethod
    def of(cls, x: Any) -> SubclassSpec | None:
        """Spec of a tensor; `None` if it is plain.

        Raises:
            LeafError: If it is a nested tensor.
        """
        if not is_traceable_wrapper_subclass(x):
            return None
        wrapper: Any = x
        if wrapper.is_nested:
            raise LeafError(
                f"unwrap_subclasses: a subclass must have sizes that are numbers, got a nested tensor {list(x.shape)}. "
                "Pass x.values() and x.offsets(), and make it inside by torch.nested.nested_tensor_from_jagged."
            )
        names, context = x.__tensor_flatten__()
        held = {name: getattr(x, name) for name in names}
        values = {name: y for name, y in held.items() if isinstance(y, torch.Tensor)}
        return cls(
            type(x),
            {name: cls.of(y) for name, y in values.items()},
            {name: y for name, y in held.items() if name not in values},
            context,
            _hints(x.shape),
            _hints(x.stride()),
            {name: _hints(y.shape) for name, y in values.items()},
            {name: _hints(y.stride()) for name, y in values.items()},
            wrapper.requires_grad,
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
            if len(self.inner_sizes[name]) == len(self.size) == y.dim():
                if _hints(y.shape) == self.inner_sizes[name] and not any(isinstance(n, torch.SymInt) for n in y.shape):
                    break
                size = _in_proportion(self.size, self.inner_sizes[name], y.shape)
                if self.stride == self.inner_strides[name]:
                    return size, tuple(y.stride())
                return size, _strides(size, self.stride)
        return self.size, self.stride

    def difference(self, other: SubclassSpec | None, label: str) -> str | None:
        """How another tensor's spec differs, sizes aside; `None` if it does not."""
        if other is None or other.type is not self.type:
            got = "a plain tensor" if other is None else f"a {other.type.__name__}"
            return f"{label} must be a {self.type.__name__}, got {got}"
        if list(other.inner) != list(self.inner):
            return f"{label} must have {list(self.inner)} inside, got {list(other.inner)}"
        if other.constants != self.constants:
            return f"{label} must have {self.constants} inside, got {other.constants}"
        if _comparable(other.context) != _comparable(self.context):
            return f"{label} must have the metadata {self.context!r}, got {other.context!r}"
        for name, spec in self.inner.items():
            found = difference(spec, other.inner[name], f"{label}.{name}")
            if found is not None:
                return found
        return None


def difference(spec: SubclassSpec | None, other: SubclassSpec | None, label: str) -> str | None:
    """How two specs differ, in words; `None` if they do not."""
    if spec is None:
        return None if other is None else f"{label} must be a plain tensor, got a {other.type.__name__}"
    return spec.difference(other, label)


def _hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(hinted_size(n) for n in sizes)


def _in_proportion(outer: tuple[int, ...], inner: tuple[int, ...], sizes: Sequence[Any]) -> tuple[Any, ...]:
    result = []
    for n, m, size in zip(outer, inner, sizes, strict=True):
        whole = m and n % m == 0
        result.append(size * (n // m) if whole else n)
    return tuple(result)


def _strides(size: tuple[Any, ...], like: tuple[int, ...]) -> tuple[Any, ...]:
    """Strides of memory without gaps, with the axes in the order of the strides `like`."""
    result: list[Any] = [1] * len(size)
    step: Any = 1
    for axis in sorted(range(len(size)), key=lambda i: (like[i], -i)):
        result[axis] = step
        step = step * size[axis]
    return tuple(result)


def _comparable(context: Any) -> Any:
    """A context without what a `DTensor` has in it of its sizes, and of whether it requires grad."""
    if hasattr(context, "placements") and hasattr(context, "mesh"):
        return context.mesh, context.placements
    if all(hasattr(context, name) for name in ("shape", "stride", "dtype")):
        return context.dtype
    if isinstance(context, (tuple, list)):
        of_distributed = any(map(_is_layout, context))
        return tuple(_comparable(item) for item in context if not (of_distributed and isinstance(item, bool)))
    return context


def _is_layout(item: Any) -> bool:
    """Whether this says how the parts of a `DTensor` are placed: its whole spec, or the placements alone."""
    placements = getattr(item, "placements", item)
    return isinstance(placements, tuple) and any(hasattr(each, "is_shard") for each in placements)
