"""Functions of traceable wrapper subclasses as functions of the plain tensors inside: `unwrap_subclasses`.

A subclass is taken for the collection of its plain tensors: the gradient with respect to these is what is inside the
gradient with respect to the subclass, which has to be a subclass of the same kind for that. Putting tensors in and
taking them out are each other's transpose, so that derivatives of every order exist.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from primitives._core.autograd import apply_linear
from primitives._core.dtypes import has_derivatives
from primitives._core.errors import LeafError, check_arguments
from primitives.tracing._errors import errors_in_trace
from primitives.tracing._leaves import Leaves
from primitives.tracing._sizes import hinted_size
from primitives.tracing._torch_private import is_wrapper_subclass

_FUNCTION = "unwrap_subclasses"
_HINT = "For such gradients, unwrap the joint function: unwrap_subclasses(create_joint(fn), (primals, cotangents))."


@dataclasses.dataclass(frozen=True)
class SubclassSpec:
    """The recipe for a wrapper subclass out of plain tensors.

    Attributes:
        type: The subclass.
        inner: The tensors inside, by the name of its attribute: the spec of a subclass, or `None` for a plain tensor.
        constants: All else inside that is not a tensor, such as the mesh of a `DTensor` in some releases of torch.
        context: Metadata, as `__tensor_flatten__` gives it.
        size: Outer size when it was recorded.
        stride: Outer stride.
        inner_sizes: Sizes of what is inside.
        inner_strides: Strides of what is inside.
        requires_grad: Whether the subclass requires grad.
        kind: Equal in two specs of which one can go for the other: all but sizes, and whether they require grad.
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
                f"{_FUNCTION}: a subclass must have sizes that are numbers, got a nested tensor {list(x.shape)}. "
                "Pass x.values() and x.offsets(), and make it inside by torch.nested.nested_tensor_from_jagged."
            )
        names, context = wrapper.__tensor_flatten__()
        held = {name: getattr(x, name) for name in names}
        values = {name: y for name, y in held.items() if isinstance(y, torch.Tensor)}
        constants = {name: y for name, y in held.items() if name not in values}
        inner = {name: cls.of(y) for name, y in values.items()}
        compared = context
        if hasattr(x, "placements") and isinstance(context, tuple):
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
        inner = ", ".join(name if spec is None else f"{name}: {spec}" for name, spec in self.inner.items())
        return f"a {self.type.__name__} ({inner}) with the metadata {self.kind[-1]!r}"


def _hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(hinted_size(n) for n in sizes)


def _strides(size: tuple[Any, ...], like: tuple[int, ...]) -> tuple[Any, ...]:
    """Strides of memory without gaps, with the axes in the order of the strides `like`."""
    result: dict[int, Any] = {}
    step: Any = 1
    for axis in sorted(range(len(size)), key=lambda i: (like[i], -i)):
        result[axis], step = step, step * size[axis]
    return tuple(result[axis] for axis in range(len(size)))


def _flat(plain: Any) -> tuple[list[Any], Any]:
    return optree.tree_flatten(plain)


def _spec_of_gradient(label: str, spec: SubclassSpec | None, treespec: Any, x_bar: Any) -> SubclassSpec | None:
    """Spec of the gradient of `label`, which must be made of tensors as `treespec` says."""
    found = SubclassSpec.of(x_bar)
    if _flat(x_bar if found is None else found.unwrap(x_bar))[1] != treespec:
        raise LeafError(
            f"{_FUNCTION}: the gradient of {label} must be {spec or 'a plain tensor'} too, got "
            f"{found or 'a plain tensor'}. {_HINT}"
        )
    return found


def _wrapped(
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
        return treespec.flatten_up_to(_unwrapped(found, x_bar))

    return apply_linear(forward, transpose, *leaves)


def _unwrapped(spec: SubclassSpec, x: Any) -> dict[str, Any]:
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
            raise LeafError(f"{_FUNCTION}: {spec}, with integers inside, has no cotangent of its kind. {_HINT}")
        return (_wrapped(spec, treespec.unflatten(leaves_bar)),)

    return treespec.unflatten(apply_linear(forward, transpose, x))


class Unwrapped:
    """A function of plain tensors, with the way to them and back; made by `unwrap_subclasses`.

    Attributes:
        fn: The function of plain tensors: a dict from attribute to plain tensor stands for every subclass, among the
            arguments and in the output. The given function itself, where no argument has a subclass.
        args: The given positional arguments, unwrapped.
        kwargs: The given keyword arguments, unwrapped.
        in_specs: Spec of each leaf of the arguments, positional ones first; `None` for what is not a subclass.
        out_specs: Spec of each leaf of the output, from the last call of `fn`; `None` before.
        gradient_specs: Spec of the gradient of each leaf of the arguments, from the backward pass of the last call of
            `fn`; `None` for those that had none, or a plain one.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], namespace: str
    ) -> None:
        self._original, self._namespace = fn, namespace
        self._args = _specs(Leaves.of(args, "args", namespace))
        self._kwargs = _specs(Leaves.of(dict(kwargs), "kwargs", namespace))
        self._outs: Leaves | None = None
        self.in_specs: tuple[SubclassSpec | None, ...] = (*self._args.values, *self._kwargs.values)
        self.out_specs: tuple[SubclassSpec | None, ...] | None = None
        self.gradient_specs: list[SubclassSpec | None] = [None] * len(self.in_specs)
        self._has_subclasses = any(spec is not None for spec in self.in_specs)
        # Its arguments go by the names that those of `fn` have.
        self.fn: Callable[..., Any] = fn
        if self._has_subclasses:
            self.fn = functools.wraps(fn, updated=())(functools.partial(self._plain_call))
        self.args: tuple[Any, ...] = self.unwrap(*args)
        self.kwargs: dict[str, Any] = self.unwrap_kwargs(**kwargs)

    def unwrap(self, *args: Any) -> tuple[Any, ...]:
        """Positional arguments like those that were given first, unwrapped.

        Raises:
            TreeError: If they have another structure.
            LeafError: If a leaf is another subclass than the recorded one, or has other metadata.
        """
        return _taken_out(self._args, args, _leaves_inside)

    def unwrap_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        """Keyword arguments like those that were given first, unwrapped; raises what `unwrap` raises."""
        return _taken_out(self._kwargs, kwargs, _leaves_inside)

    def _plain_call(self, *args: Any, **kwargs: Any) -> Any:
        leaves: list[Any] = []
        self.gradient_specs = [None] * len(self.in_specs)
        for i, (label, spec, piece) in enumerate([*_pieces(self._args, args), *_pieces(self._kwargs, kwargs)]):
            if spec is None:
                if torch.is_grad_enabled() and isinstance(piece, torch.Tensor) and piece.requires_grad:
                    # Its gradient has to be plain too. The hook is for this call, and so on a tensor of this call.
                    piece = piece.view_as(piece)
                    piece.register_hook(functools.partial(_spec_of_gradient, label, None, _flat(piece)[1]))
                leaves.append(piece)
                continue
            x = _wrapped(spec, piece, label, functools.partial(self.gradient_specs.__setitem__, i))
            leaves.append(x.requires_grad_() if spec.requires_grad and not x.requires_grad else x)
        num_args = len(self._args.values)
        args, kwargs = self._args.join(leaves[:num_args]), self._kwargs.join(leaves[num_args:])
        with errors_in_trace(_FUNCTION):
            outs = Leaves.of(self._original(*args, **kwargs), "output", self._namespace)
        self._outs = _specs(outs)
        self.out_specs = tuple(self._outs.values)
        pairs = zip(self.out_specs, outs.values, strict=True)
        return outs.join([y if spec is None else _unwrapped(spec, y) for spec, y in pairs])

    def _recorded_outs(self, name: str) -> Leaves:
        if self._outs is None:
            raise RuntimeError(f"{_FUNCTION}: the {name} are those of a call of fn, and there was none.")
        return self._outs._replace(roots=name)

    def wrap(self, output: Any) -> Any:
        """The result of the original function, out of that of `fn`, or of a graph of it.

        Raises:
            RuntimeError: If `fn` has not been called: the subclasses of the output are not known yet.
            TreeError: If the output has another structure than that of the last call.
        """
        if not self._has_subclasses:
            return output
        recorded = self._recorded_outs("output")
        return recorded.join([y if spec is None else _wrapped(spec, y) for _, spec, y in _pieces(recorded, output)])

    def unwrap_cotangents(self, cotangents: Any) -> Any:
        """Cotangents of the output of the original function as those of the output of `fn`.

        Args:
            cotangents: A tree with the structure of the output, `None` where there is none.

        Raises:
            RuntimeError: If `fn` has not been called.
            TreeError: If the structure is another one.
            LeafError: If a cotangent is another subclass than the output.
        """
        if not self._has_subclasses:
            return cotangents
        return _taken_out(self._recorded_outs("cotangents"), cotangents, SubclassSpec.unwrap)

    def wrap_gradients(self, *gradients: Any) -> tuple[Any, ...]:
        """Gradients with respect to the positional arguments, out of those with respect to `args`.

        Args:
            *gradients: A tree for each argument, as `torch.autograd` or a `JointGraph` of `fn` gives them: `None` where
                there is none.

        Returns:
            A tree for each argument, with subclasses by their recorded metadata.

        Raises:
            RuntimeError: If a gradient is given that no backward pass of `fn` has recorded.
            TreeError: If the structure is another one.
        """
        values: list[Any] = []
        for (_, spec, piece), found in zip(_pieces(self._args, gradients), self.gradient_specs, strict=False):
            if spec is None or piece is None or all(y is None for y in piece.values()):
                values.append(piece if spec is None else None)
            elif found is None:
                raise RuntimeError(f"{_FUNCTION}: wrap_gradients needs a backward pass of fn, and there was none.")
            else:
                values.append(found.wrap(piece))
        return self._args.join(values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the original function for these arguments, by way of the plain tensors inside."""
        plain, plain_kwargs = _taken_out(self._args, args, _unwrapped), _taken_out(self._kwargs, kwargs, _unwrapped)
        return self.wrap(self.fn(*plain, **plain_kwargs))


def _leaves_inside(spec: SubclassSpec, x: Any) -> dict[str, Any]:
    """The plain tensors inside a subclass, by name, without its history; they require grad if it does."""
    leaves, treespec = _flat(spec.unwrap(x))
    return treespec.unflatten([y.detach().requires_grad_(x.requires_grad and has_derivatives(y.dtype)) for y in leaves])


def _specs(leaves: Leaves) -> Leaves:
    """The record of leaves, which are not held: the spec of each in its place."""
    return leaves._replace(values=list(map(SubclassSpec.of, leaves.values)))


def _pieces(recorded: Leaves, tree: Any) -> list[tuple[str, SubclassSpec | None, Any]]:
    """Key path and spec of each recorded leaf, with what stands there in a tree."""
    pieces = recorded.aligned(_FUNCTION, str(recorded.roots), tree, "what was recorded")
    return [*zip(recorded.labels(range(len(pieces))), recorded.values, pieces, strict=True)]


def _taken_out(recorded: Leaves, tree: Any, taken_out: Callable[[SubclassSpec, Any], Any]) -> Any:
    """A tree like the recorded one, with plain tensors in the place of subclasses; a cotangent may be `None`."""
    plain = []
    for label, spec, x in _pieces(recorded, tree):
        is_absent, found = x is None and recorded.roots == "cotangents", SubclassSpec.of(x)
        if not is_absent and (spec and spec.kind) != (found and found.kind):
            raise LeafError(
                f"{_FUNCTION}: {label} must be {spec or 'a plain tensor'}, got {found or 'a plain tensor'}."
            )
        plain.append(x if spec is None or is_absent else taken_out(spec, x))
    return recorded.join(plain)


def unwrap_subclasses(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *, namespace: str = ""
) -> Unwrapped:
    """`fn` as a function of the plain tensors inside wrapper subclasses.

    A wrapper subclass is one with `__tensor_flatten__` and `__tensor_unflatten__`, such as `DTensor`. `make_fx` traces
    the result to a graph of plain tensors, and `trace_joint` to a joint graph: the gradient with respect to the plain
    tensors is what is inside the gradient with respect to the subclass, whose metadata are recorded in
    `gradient_specs`. Where that is not such a subclass, unwrap the joint function: its gradients are outputs, and their
    metadata are recorded in `out_specs`.

    Args:
        fn: Function of pytrees.
        args: Tuple of its positional arguments, or others like them: their subclasses and metadata are recorded. Sizes
            may differ later.
        kwargs: Its keyword arguments, likewise.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        The function of plain tensors, as `fn`, with `args`, `kwargs`, `unwrap` and `wrap`. If no argument has a
        subclass, `fn` is the given function and nothing is paid.

    Raises:
        TreeError: If `args` is not a tuple.
        LeafError: If an argument is a nested tensor.

    Example:
        >>> import torch, primitives as pr
        >>> from torch.testing._internal.two_tensor import TwoTensor
        >>> x = TwoTensor(torch.ones(2), torch.zeros(2))
        >>> unwrapped = pr.tracing.unwrap_subclasses(lambda x: x + 1, (x,))
        >>> plain = unwrapped.fn(*unwrapped.args)
        >>> plain
        {'a': tensor([2., 2.]), 'b': tensor([1., 1.])}
        >>> type(unwrapped.wrap(plain)).__name__
        'TwoTensor'
    """
    check_arguments(_FUNCTION, "args", args)
    return Unwrapped(fn, args, kwargs or {}, namespace)
