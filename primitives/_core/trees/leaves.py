"""The tensors of a pytree as a flat list, and errors that name one of them by its key path.

Transforms see flat tensors only: a tree is split where it enters and joined where it leaves. Everything here but the
making of errors is code that Dynamo traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor

from primitives._core.dtypes import has_derivatives
from primitives._core.errors import DeviceError, DtypeError, LeafError, ShapeError
from primitives._core.trees.overlay import align, is_leafless, key_path, spread, tracing_predicate


class Partition:
    """The tensors of a pytree apart from everything else in it.

    `split` takes a tree apart and remembers what puts it together again; `join` does that with other values in the
    places of the tensors.
    """

    def __init__(self, namespace: str = "", is_leaf: Callable[[Any], bool] | None = None) -> None:
        if torch.compiler.is_dynamo_compiling():
            is_leaf = tracing_predicate(is_leaf)
        self.options: dict[str, Any] = {"namespace": namespace, "is_leaf": is_leaf}
        self.treespec: Any = None
        self._template: list[Any] = []
        self._places: list[int] = []

    def split(self, tree: Any) -> list[Tensor]:
        """The tensors of `tree`, in the order of its leaves."""
        leaves, self.treespec = optree.tree_flatten(tree, **self.options)
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        # The tensors themselves are not kept: what is joined later may belong to another level of a transform.
        self._template = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return [cast("Tensor", leaves[i]) for i in self._places]

    def join(self, values: Sequence[Any]) -> Any:
        """The tree that was split, with `values` in place of its tensors."""
        leaves = list(self._template)
        for place, value in zip(self._places, values, strict=True):
            leaves[place] = value
        return optree.tree_unflatten(self.treespec, leaves)

    @property
    def num_leaves(self) -> int:
        """Number of leaves of the tree that was split, tensors and others."""
        return len(self._template)

    def own(self, values: Sequence[Any]) -> list[Any]:
        """Those of `values`, one for each leaf, that belong to tensors."""
        return [values[i] for i in self._places]

    def others(self, values: Sequence[Any], root: str) -> list[tuple[str, Any, Any]]:
        """Key path, entry of `values` and leaf, for each leaf that is not a tensor."""
        places = set(self._places)
        rest = [i for i, leaf in enumerate(self._template) if i not in places and not is_leafless(leaf)]
        if not rest:
            return []
        accessors = self.treespec.accessors()
        return [(key_path(accessors[i], root), values[i], self._template[i]) for i in rest]

    def label(self, index: int, root: str) -> str:
        """Key path of tensor `index`, as code that starts with `root`."""
        return key_path(self.treespec.accessors()[self._places[index]], root)

    def require_tensors(self, function: str, root: str, purpose: str = "") -> None:
        """Raise unless every leaf of the tree that was split is a tensor."""
        for label, _, leaf in self.others(self._template, root):
            raise LeafError(f"{function}: {label} must be a tensor{purpose}, got {type(leaf).__name__}.")

    def match(
        self, function: str, name: str, tree: Any, like_name: str, like: Sequence[Tensor], *, some: bool = False
    ) -> list[Any]:
        """The entry of `tree` for each tensor, checked to be like that of the tree that was split.

        With `some`, `None` may stand for a tensor, and must for a leaf that cannot be differentiated.
        """
        pieces = align(function, name, tree, like_name, self.join(like), self.options)
        given = [(label, leaf) for label, piece, leaf in self.others(pieces, like_name) if some and piece is not None]
        for label, leaf in given:
            raise LeafError(
                f"{function}: {label} must be a tensor to be differentiated, got {type(leaf).__name__}. "
                f"Pass None in {name} to hold it constant."
            )
        leaves = self.own(pieces)
        for i, (leaf, wanted) in enumerate(zip(leaves, like, strict=True)):
            if some and leaf is not None and not has_derivatives(wanted.dtype):
                raise LeafError(
                    f"{function}: {self.label(i, like_name)} must be floating point or complex to be differentiated, "
                    f"got {wanted.dtype}. Pass None in {name} to hold it constant."
                )
            if not (is_like(leaf, wanted) or (some and leaf is None)):
                check_like(function, self.label(i, name), leaf, self.label(i, like_name), wanted)
        return leaves


class Meta(NamedTuple):
    """The properties that a derivative must share with the tensor that it belongs to."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def is_like(leaf: Any, wanted: Tensor | Meta) -> bool:
    """Whether `leaf` is a tensor with the shape, dtype and device of `wanted`."""
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.shape == wanted.shape
        and leaf.dtype == wanted.dtype
        and leaf.device == wanted.device
    )


def check_like(function: str, label: str, leaf: Any, wanted_label: str, wanted: Tensor | Meta) -> None:
    """Raise unless `leaf` is a tensor with the shape, dtype and device of `wanted`."""
    if not isinstance(leaf, torch.Tensor):
        raise LeafError(f"{function}: {label} must be a tensor like {wanted_label}, got {type(leaf).__name__}.")
    if leaf.shape != wanted.shape:
        raise ShapeError(
            f"{function}: {label} must have shape {list(wanted.shape)} ({wanted_label}), got {list(leaf.shape)}."
        )
    if leaf.dtype != wanted.dtype:
        raise DtypeError(f"{function}: {label} must have dtype {wanted.dtype} ({wanted_label}), got {leaf.dtype}.")
    if leaf.device != wanted.device:
        raise DeviceError(f"{function}: {label} must be on {wanted.device} ({wanted_label}), got {leaf.device}.")


def _are_dense_tensors(values: Iterable[Any]) -> bool:
    # A loop, because all() over a generator takes three times as long as the question.
    for value in values:
        if value is not None and not (
            isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested
        ):
            return False
    return True


def require_dense(op_name: str, label: str, x: torch.Tensor) -> None:
    """Raise if `x` is nested, sparse or of another layout that the operators do not take."""
    if x.is_nested or x.layout is not torch.strided:
        kind, remedy = ("nested", "its parts, list(x.unbind())") if x.is_nested else (x.layout, "x.to_dense()")
        raise DtypeError(f"{op_name}: {label} must be a dense tensor, got a {kind} one. Pass {remedy}.")


def _require_dense_tensors(op_name: str, labels: Iterable[str], values: Iterable[Any]) -> None:
    for label, value in zip(labels, values, strict=True):
        if isinstance(value, torch.Tensor):
            require_dense(op_name, label, value)
        elif value is not None:
            raise DtypeError(f"{op_name}: {label} must be a tensor, got {type(value).__name__}.")


def map_tensors(
    op_name: str, check: Callable[..., None], compute: Callable[..., Any], tree: Any, prefixes: dict[str, Any], *,
    namespace: str = "", num_results: int | None = None, root: str = "input",
) -> Any:  # fmt: skip
    """Apply `compute(leaf, *values)` to every tensor of `tree`, after `check(label, leaf, **values)` passed for all.

    The values are those of `prefixes`, each a tensor, `None`, or a tree prefix of `tree`. With `num_results`, `compute`
    returns a tuple of that many, and this a tuple of trees. `None`s in the tree stay as they are. Errors call the tree
    `root`.
    """
    if tree is None:
        raise DtypeError(f"{op_name}: {root} must be a tensor, got NoneType.")
    if isinstance(tree, torch.Tensor):
        values = prefixes.values()
        if _are_dense_tensors((tree, *values)):
            check(root, tree, **prefixes)
            return compute(tree, *values)
    leaves, treespec = optree.tree_flatten(cast("Any", tree), none_is_leaf=True, namespace=namespace)
    accessors = treespec.accessors()
    options = {"namespace": namespace, "none_is_leaf": True}
    columns = [
        [prefix] * len(leaves)
        if prefix is None or isinstance(prefix, torch.Tensor)
        else spread(op_name, name, prefix, root, tree, options)
        for name, prefix in prefixes.items()
    ]
    calls = list(zip(leaves, *columns, strict=True))
    for accessor, call in zip(accessors, calls, strict=True):
        if call[0] is None:
            continue
        label = accessor.codify(root)
        _require_dense_tensors(op_name, (label, *prefixes), call)
        check(label, call[0], **dict(zip(prefixes, call[1:], strict=True)))
    results = [None if call[0] is None else compute(*call) for call in calls]
    if num_results is None:
        return treespec.unflatten(results)
    rows = [(None,) * num_results if r is None else r for r in results]
    return tuple(treespec.unflatten([row[i] for row in rows]) for i in range(num_results))
