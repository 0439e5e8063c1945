"""Functions of traceable wrapper subclasses as functions of the plain tensors inside: `unwrap_subclasses`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from primitives.tracing.errors import errors_in_trace
from primitives.tracing.leaves import Leaves
from primitives.tracing.subclasses.spec import (
    SubclassSpec,
    checked_input,
    leaves_inside,
    require_like,
    unwrapped,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SubclassSpec", "Unwrapped", "unwrap_subclasses"]

_FUNCTION = "unwrap_subclasses"


class Unwrapped:
    """A function of plain tensors, with the way to them and back; made by `unwrap_subclasses`.

    Attributes:
        fn: The function of plain tensors: a dict from attribute to plain tensor stands for every subclass, among the
            arguments and in the output. The given function itself, where no argument has a subclass.
        args: The given positional arguments, unwrapped.
        kwargs: The given keyword arguments, unwrapped.
        in_specs: Spec of each leaf of the arguments, positional ones first; `None` for what is no subclass.
        out_specs: Spec of each leaf of the output, from the last call of `fn`; `None` before.
        gradient_specs: Spec of the gradient of each leaf of the arguments, from the backward pass of the last call of
            `fn`; `None` for those that had none, or a plain one.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._original = fn
        self._args, self._kwargs = _specs(Leaves.of(args, "args")), _specs(Leaves.of(kwargs, "kwargs"))
        self._outs: Leaves | None = None
        self.in_specs: tuple[SubclassSpec | None, ...] = (*self._args.values, *self._kwargs.values)
        self.out_specs: tuple[SubclassSpec | None, ...] | None = None
        self.gradient_specs: list[SubclassSpec | None] = [None] * len(self.in_specs)
        self._has_subclasses = any(spec is not None for spec in self.in_specs)
        self.fn = self._plain_call if self._has_subclasses else fn
        self.args, self.kwargs = self.unwrap(*args), self.unwrap_kwargs(**kwargs)

    def unwrap(self, *args: Any) -> tuple[Any, ...]:
        """Positional arguments like those that were given first, unwrapped.

        Raises:
            TreeError: If they have another structure.
            LeafError: If a leaf is another subclass than the recorded one, or has other metadata.
        """
        return _taken_out(self._args, args, leaves_inside)

    def unwrap_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        """Keyword arguments like those that were given first, unwrapped; raises what `unwrap` raises."""
        return _taken_out(self._kwargs, kwargs, leaves_inside)

    def _plain_call(self, *args: Any, **kwargs: Any) -> Any:
        """The function of plain tensors."""
        leaves: list[Any] = []
        self.gradient_specs = [None] * len(self.in_specs)
        for i, (label, spec, piece) in enumerate([*_pieces(self._args, args), *_pieces(self._kwargs, kwargs)]):
            if spec is None:
                leaves.append(checked_input(label, piece))
                continue
            x = wrapped(spec, piece, label, functools.partial(self.gradient_specs.__setitem__, i))
            leaves.append(x.requires_grad_() if spec.requires_grad and not x.requires_grad else x)
        num_args = len(self._args.values)
        args, kwargs = self._args.join(leaves[:num_args]), self._kwargs.join(leaves[num_args:])
        with errors_in_trace(_FUNCTION):
            outs = Leaves.of(self._original(*args, **kwargs), "output")
        self._outs = _specs(outs)
        self.out_specs = tuple(self._outs.values)
        pairs = zip(self.out_specs, outs.values, strict=True)
        return outs.join([y if spec is None else unwrapped(spec, y) for spec, y in pairs])

    def _recorded_outs(self, name: str) -> Leaves:
        if self._outs is None:
            raise RuntimeError(f"{_FUNCTION}: the {name} are those of a call of fn, and there was none.")
        return self._outs._replace(roots=name)

    def wrap(self, output: Any) -> Any:
        """What the original function returns, out of what `fn`, or a graph of it, returns.

        Raises:
            RuntimeError: If `fn` has not been called: the subclasses of the output are not known yet.
            TreeError: If the output has another structure than that of the last call.
        """
        if not self._has_subclasses:
            return output
        recorded = self._recorded_outs("output")
        return recorded.join([y if spec is None else wrapped(spec, y) for _, spec, y in _pieces(recorded, output)])

    def unwrap_tangents(self, tangents: Any) -> Any:
        """Cotangents of the output of the original function as those of the output of `fn`.

        Args:
            tangents: A tree with the structure of the output, `None` where there is none.

        Raises:
            RuntimeError: If `fn` has not been called.
            TreeError: If the structure is another one.
            LeafError: If a cotangent is another subclass than the output.
        """
        if not self._has_subclasses:
            return tangents
        return _taken_out(self._recorded_outs("tangents"), tangents, SubclassSpec.unwrap)

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
        """What the original function returns for these arguments, by way of the plain tensors inside."""
        plain, plain_kwargs = _taken_out(self._args, args, unwrapped), _taken_out(self._kwargs, kwargs, unwrapped)
        return self.wrap(self.fn(*plain, **plain_kwargs))


def _specs(leaves: Leaves) -> Leaves:
    """What is recorded of leaves, which are not held: the spec of each in its place."""
    return leaves._replace(values=list(map(SubclassSpec.of, leaves.values)))


def _pieces(recorded: Leaves, tree: Any) -> list[tuple[str, SubclassSpec | None, Any]]:
    """Key path and spec of each recorded leaf, with what stands there in a tree."""
    pieces = recorded.aligned(_FUNCTION, str(recorded.roots), tree, "what was recorded")
    return [*zip(recorded.labels(range(len(pieces))), recorded.values, pieces, strict=True)]


def _taken_out(recorded: Leaves, tree: Any, taken_out: Callable[[SubclassSpec, Any], Any]) -> Any:
    """A tree like the recorded one, with plain tensors in the place of subclasses; a cotangent may be `None`."""
    plain = []
    for label, spec, x in _pieces(recorded, tree):
        is_absent = x is None and recorded.roots == "tangents"
        if not is_absent:
            require_like(label, spec, x)
        plain.append(x if spec is None or is_absent else taken_out(spec, x))
    return recorded.join(plain)


def unwrap_subclasses(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Unwrapped:
    """`fn` as a function of the plain tensors inside wrapper subclasses.

    A wrapper subclass is one with `__tensor_flatten__` and `__tensor_unflatten__`, such as `DTensor`. `make_fx` traces
    the result to a graph of plain tensors, and `trace_joint` to a joint graph: the gradient with respect to the plain
    tensors is what is inside the gradient with respect to the subclass, whose metadata are recorded in
    `gradient_specs`. Where that is no such subclass, unwrap the joint function: its gradients are outputs, and their
    metadata are recorded in `out_specs`.

    Args:
        fn: Function of pytrees.
        *args: Its arguments, or others like them: their subclasses and metadata are recorded. Sizes may differ later.
        **kwargs: Its keyword arguments, likewise.

    Returns:
        The function of plain tensors, as `fn`, with `args`, `kwargs`, `unwrap` and `wrap`. If no argument has a
        subclass, `fn` is the given function and nothing is paid.

    Raises:
        LeafError: If an argument is a nested tensor.

    Example:
        >>> import torch
        >>> from torch.testing._internal.two_tensor import TwoTensor
        >>> x = TwoTensor(torch.ones(2), torch.zeros(2))
        >>> unwrapped = unwrap_subclasses(lambda x: x + 1, x)
        >>> plain = unwrapped.fn(*unwrapped.args)
        >>> plain
        {'a': tensor([2., 2.]), 'b': tensor([1., 1.])}
        >>> type(unwrapped.wrap(plain)).__name__
        'TwoTensor'
    """
    return Unwrapped(fn, args, kwargs)
