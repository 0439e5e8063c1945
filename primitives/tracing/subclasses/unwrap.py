"""Functions of traceable wrapper subclasses as functions of the plain tensors inside: `unwrap_subclasses`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import optree

from primitives.core.errors import LeafError
from primitives.core.trees.overlay import align, key_path
from primitives.tracing.errors import errors_in_trace
from primitives.tracing.subclasses.autograd import checked_input, leaves_inside, unwrapped, wrapped
from primitives.tracing.subclasses.spec import SubclassSpec, difference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["SubclassSpec", "Unwrapped", "unwrap_subclasses"]

_FUNCTION = "unwrap_subclasses"
_OPTIONS: dict[str, Any] = {"namespace": "", "is_leaf": None}


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
        (labels, leaves), (keyword_labels, keyword_leaves) = _labeled("args", args), _labeled("kwargs", kwargs)
        self._labels = [*labels, *keyword_labels]
        self._treespec = optree.tree_structure((args, kwargs))  # type: ignore[arg-type] - any tree
        self._original = fn
        self.in_specs = tuple(map(SubclassSpec.of, [*leaves, *keyword_leaves]))
        self.out_specs: tuple[SubclassSpec | None, ...] | None = None
        self.gradient_specs: list[SubclassSpec | None] = [None] * len(self.in_specs)
        self._out_treespec: Any = None
        self._has_subclasses = any(spec is not None for spec in self.in_specs)
        self.fn = self._plain_call if self._has_subclasses else fn
        self.args, self.kwargs = self._unwrapped(args, kwargs, leaves_inside)

    def unwrap(self, *args: Any) -> tuple[Any, ...]:
        """Positional arguments like those that were given first, unwrapped.

        Raises:
            TreeError: If they have another structure.
            LeafError: If a leaf is another subclass than the recorded one, or has other metadata.
        """
        return self._unwrapped(args, None, leaves_inside)[0]

    def unwrap_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        """Keyword arguments like those that were given first, unwrapped; raises what `unwrap` raises."""
        return self._unwrapped(None, kwargs, leaves_inside)[1]

    def _recorded(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments in the recorded structure."""
        result: Any = self._treespec.unflatten(values)
        return result

    def _aligned(self, args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> list[tuple[int, Any]]:
        """What stands at the place of each recorded leaf of the arguments that are not `None`, with its number."""
        recorded = self._recorded(range(len(self.in_specs)))
        pairs: list[tuple[int, Any]] = []
        for name, given, places in zip(("args", "kwargs"), (args, kwargs), recorded, strict=True):
            if given is not None:
                pieces = align(_FUNCTION, name, given, f"the recorded {name}", places, _OPTIONS)
                pairs += zip(optree.tree_leaves(places), pieces, strict=True)  # type: ignore[arg-type] - a tree of numbers
        return pairs

    def _unwrapped(self, args: Any, kwargs: Any, taken_out: Callable[..., Any]) -> tuple[Any, Any]:
        if not self._has_subclasses:
            return args, kwargs
        plain: list[Any] = [None] * len(self.in_specs)
        for i, x in self._aligned(args, kwargs):
            spec = self.in_specs[i]
            found = difference(spec, SubclassSpec.of(x), self._labels[i])
            if found is not None:
                raise LeafError(f"{_FUNCTION}: {found}.")
            plain[i] = x if spec is None else taken_out(spec, x)
        return self._recorded(plain)

    def _plain_call(self, *args: Any, **kwargs: Any) -> Any:
        """The function of plain tensors."""
        leaves: list[Any] = [None] * len(self.in_specs)
        self.gradient_specs = [None] * len(self.in_specs)
        for i, piece in self._aligned(args, kwargs):
            spec = self.in_specs[i]
            if spec is None:
                leaves[i] = checked_input(self._labels[i], piece)
                continue
            _check_plain(self._labels[i], spec, piece)
            x = wrapped(spec, piece, self._labels[i], functools.partial(self.gradient_specs.__setitem__, i))
            leaves[i] = x.requires_grad_() if spec.requires_grad and not x.requires_grad else x
        args, kwargs = self._recorded(leaves)
        with errors_in_trace(_FUNCTION):
            output = self._original(*args, **kwargs)
        results, self._out_treespec = optree.tree_flatten(output)
        self.out_specs = tuple(map(SubclassSpec.of, results))
        plain = [y if spec is None else unwrapped(spec, y) for spec, y in zip(self.out_specs, results, strict=True)]
        return self._out_treespec.unflatten(plain)

    def wrap(self, output: Any) -> Any:
        """What the original function returns, out of what `fn`, or a graph of it, returns.

        Raises:
            RuntimeError: If `fn` has not been called: the subclasses of the output are not known yet.
            TreeError: If the output has another structure than that of the last call.
        """
        if not self._has_subclasses:
            return output
        pieces = self._of_output("output", output)
        specs = self.out_specs or ()
        results = [y if spec is None else wrapped(spec, y) for spec, (_, y) in zip(specs, pieces, strict=True)]
        return self._out_treespec.unflatten(results)

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
        plain = []
        for spec, (label, y_bar) in zip(self.out_specs or (), self._of_output("tangents", tangents), strict=True):
            found = None if y_bar is None else difference(spec, SubclassSpec.of(y_bar), label)
            if found is not None:
                raise LeafError(f"{_FUNCTION}: {found}.")
            plain.append(y_bar if y_bar is None or spec is None else spec.unwrap(y_bar))
        return self._out_treespec.unflatten(plain)

    def _of_output(self, name: str, tree: Any) -> list[tuple[str, Any]]:
        """What stands at the place of each leaf of the output, with its key path."""
        if self.out_specs is None:
            raise RuntimeError(f"{_FUNCTION}: the {name} are those of a call of fn, and there was none.")
        recorded = self._out_treespec.unflatten(range(len(self.out_specs)))
        pieces = align(_FUNCTION, name, tree, "the recorded output", recorded, _OPTIONS)
        return [*zip(_labeled(name, recorded)[0], pieces, strict=True)]

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
        if not self._has_subclasses:
            return gradients
        values: list[Any] = [None] * len(self.in_specs)
        for i, piece in self._aligned(gradients, None):
            found = self.gradient_specs[i]
            if self.in_specs[i] is None or piece is None or all(y is None for y in piece.values()):
                values[i] = None if isinstance(piece, dict) else piece
            elif found is None:
                raise RuntimeError(f"{_FUNCTION}: wrap_gradients needs a backward pass of fn, and there was none.")
            else:
                values[i] = found.wrap(piece)
        return self._recorded(values)[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the original function returns for these arguments, by way of the plain tensors inside."""
        args, kwargs = self._unwrapped(args, kwargs, unwrapped)
        return self.wrap(self.fn(*args, **kwargs))


def _labeled(root: str, tree: Any) -> tuple[list[str], list[Any]]:
    """Key path of each leaf, and the leaves."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
    return [key_path(accessor, root) for accessor in accessors], leaves


def _check_plain(label: str, spec: SubclassSpec, piece: Any) -> None:
    if not isinstance(piece, dict) or set(piece) != set(spec.inner):
        got = f"a dict with keys {sorted(piece)}" if isinstance(piece, dict) else type(piece).__name__
        raise LeafError(f"{_FUNCTION}: {label} must be a dict with keys {sorted(spec.inner)}, got {got}.")
    for name, inner in spec.inner.items():
        if inner is not None:
            _check_plain(f"{label}[{name!r}]", inner, piece[name])


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
