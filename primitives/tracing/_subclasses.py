"""Functions of traceable wrapper subclasses as functions of the plain tensors inside: `unwrap_subclasses`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from primitives.core.errors import LeafError
from primitives.core.structure import align, key_path
from primitives.tracing._torch_internals import hinted_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["SubclassSpec", "Unwrapped", "unwrap_subclasses"]

_FUNCTION = "unwrap_subclasses"
_OPTIONS: dict[str, Any] = {"namespace": "", "is_leaf": None}


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
        """Spec of a tensor; `None` if it is plain."""
        if not is_traceable_wrapper_subclass(x):
            return None
        names, context = x.__tensor_flatten__()
        held = {name: getattr(x, name) for name in names}
        values = {name: y for name, y in held.items() if isinstance(y, torch.Tensor)}
        wrapper: Any = x
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
        """The subclass, around tensors that may have other sizes than the recorded ones."""
        values = {name: plain[name] if spec is None else spec.wrap(plain[name]) for name, spec in self.inner.items()}
        size, stride = self._outer(values)
        x = self.type.__tensor_unflatten__({**values, **self.constants}, self.context, size, stride)  # type: ignore[attr-defined] - no stub
        return x.requires_grad_() if self.requires_grad and not x.requires_grad else x

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
            found = _difference(spec, other.inner[name], f"{label}.{name}")
            if found is not None:
                return found
        return None


def _difference(spec: SubclassSpec | None, other: SubclassSpec | None, label: str) -> str | None:
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
    """A context without the sizes that a `DTensor` has in it."""
    if hasattr(context, "placements") and hasattr(context, "mesh"):
        return context.mesh, context.placements
    if all(hasattr(context, name) for name in ("shape", "stride", "dtype")):
        return context.dtype
    if isinstance(context, (tuple, list)):
        return tuple(map(_comparable, context))
    return context


class Unwrapped:
    """A function of plain tensors, with the way to them and back; made by `unwrap_subclasses`.

    Attributes:
        fn: The function of plain tensors: a dict from attribute to plain tensor stands for every subclass, among the
            arguments and in the output. The given function itself, where no argument has a subclass.
        args: The given arguments, unwrapped.
        in_specs: Spec of each leaf of the arguments, `None` for what is no subclass.
        out_specs: Spec of each leaf of the output, from the last call of `fn`; `None` before.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        accessors, leaves, self._treespec = optree.tree_flatten_with_accessor(args)  # type: ignore[arg-type] - any tree
        self._labels = [key_path(accessor, "args") for accessor in accessors]
        self._original = fn
        self.in_specs = tuple(map(SubclassSpec.of, leaves))
        self.out_specs: tuple[SubclassSpec | None, ...] | None = None
        self._out_treespec: Any = None
        self._has_subclasses = any(spec is not None for spec in self.in_specs)
        self.fn = self._plain_call if self._has_subclasses else fn
        self.args = self.unwrap(*args)

    def unwrap(self, *args: Any) -> tuple[Any, ...]:
        """Arguments like those that were given first, unwrapped.

        Raises:
            TreeError: If they have another structure.
            LeafError: If a leaf is another subclass than the recorded one, or has other metadata.
        """
        if not self._has_subclasses:
            return args
        recorded = self._treespec.unflatten(range(len(self.in_specs)))
        leaves = align(_FUNCTION, "args", args, "the recorded arguments", recorded, _OPTIONS)
        plain = []
        for label, spec, x in zip(self._labels, self.in_specs, leaves, strict=True):
            found = _difference(spec, SubclassSpec.of(x), label)
            if found is not None:
                raise LeafError(f"{_FUNCTION}: {found}.")
            plain.append(x if spec is None else spec.unwrap(x))
        result: Any = self._treespec.unflatten(plain)
        return result

    def _plain_call(self, *args: Any) -> Any:
        """The function of plain tensors."""
        recorded = self._treespec.unflatten(range(len(self.in_specs)))
        pieces = align(_FUNCTION, "args", args, "the recorded arguments", recorded, _OPTIONS)
        leaves = []
        for label, spec, piece in zip(self._labels, self.in_specs, pieces, strict=True):
            if spec is not None:
                self._check_plain(label, spec, piece)
            leaves.append(piece if spec is None else spec.wrap(piece))
        output = self._original(*self._treespec.unflatten(leaves))
        results, self._out_treespec = optree.tree_flatten(output)
        self.out_specs = tuple(map(SubclassSpec.of, results))
        plain = [y if spec is None else spec.unwrap(y) for spec, y in zip(self.out_specs, results, strict=True)]
        return self._out_treespec.unflatten(plain)

    def _check_plain(self, label: str, spec: SubclassSpec, piece: Any) -> None:
        if not isinstance(piece, dict) or set(piece) != set(spec.inner):
            got = f"a dict with keys {sorted(piece)}" if isinstance(piece, dict) else type(piece).__name__
            raise LeafError(f"{_FUNCTION}: {label} must be a dict with keys {sorted(spec.inner)}, got {got}.")
        for name, inner in spec.inner.items():
            if inner is not None:
                self._check_plain(f"{label}[{name!r}]", inner, piece[name])
            elif piece[name].requires_grad:
                raise LeafError(
                    f"{_FUNCTION}: {label}[{name!r}] must not require grad: a wrapper has no derivative in what is "
                    "inside. Take derivatives inside: unwrap_subclasses(create_joint(fn), primals, tangents)."
                )

    def wrap(self, output: Any) -> Any:
        """What the original function returns, out of what `fn`, or a graph of it, returns.

        Raises:
            RuntimeError: If `fn` has not been called: the subclasses of the output are not known yet.
            TreeError: If the output has another structure than that of the last call.
        """
        if not self._has_subclasses:
            return output
        if self.out_specs is None:
            raise RuntimeError(f"{_FUNCTION}: wrap needs the output of a call of fn, and there was none.")
        recorded = self._out_treespec.unflatten(range(len(self.out_specs)))
        pieces = align(_FUNCTION, "output", output, "the recorded output", recorded, _OPTIONS)
        wrapped = [y if spec is None else spec.wrap(y) for spec, y in zip(self.out_specs, pieces, strict=True)]
        return self._out_treespec.unflatten(wrapped)

    def __call__(self, *args: Any) -> Any:
        """What the original function returns for these arguments, by way of the plain tensors inside."""
        return self.wrap(self.fn(*self.unwrap(*args)))


def unwrap_subclasses(fn: Callable[..., Any], *args: Any) -> Unwrapped:
    """`fn` as a function of the plain tensors inside wrapper subclasses.

    A wrapper subclass is one with `__tensor_flatten__` and `__tensor_unflatten__`, such as `DTensor`. `make_fx` traces
    the result to a graph of plain tensors. For gradients, unwrap the joint function: those of subclasses are
    subclasses again, whose metadata, which need not be that of the primals, are recorded in `out_specs`.

    Args:
        fn: Function of pytrees.
        *args: Its arguments, or others like them: their subclasses and metadata are recorded. Sizes may differ later.

    Returns:
        The function of plain tensors, as `fn`, with `args`, `unwrap` and `wrap`. If no argument has a subclass, `fn`
        is the given function and nothing is paid.

    Example:
        >>> from torch.testing._internal.two_tensor import TwoTensor
        >>> x = TwoTensor(torch.ones(2), torch.zeros(2))
        >>> unwrapped = unwrap_subclasses(lambda x: x + 1, x)
        >>> plain = unwrapped.fn(*unwrapped.args)
        >>> plain
        {'a': tensor([2., 2.]), 'b': tensor([1., 1.])}
        >>> type(unwrapped.wrap(plain)).__name__
        'TwoTensor'
    """
    return Unwrapped(fn, args)
