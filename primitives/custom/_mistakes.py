"""What users' rules may return, checked at the call: errors name the operator, the rule, its place and the key path."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import optree
import torch

from primitives.core.dtypes import has_derivatives
from primitives.core.errors import DeviceError, DtypeError, LeafError, ShapeError, TreeError
from primitives.core.trees.overlay import align, key_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from primitives.core.trees.calls import Structure


# Stands for a tensor where only the tree matters.
LEAF = object()

# What a derivative must share with the tensor that it belongs to: shape, dtype, device.
Meta = tuple[torch.Size, torch.dtype, torch.device]


def place_of(rule: Callable) -> str:
    """File and line of a rule, for errors."""
    code = getattr(inspect.unwrap(rule), "__code__", None)
    return repr(rule) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


class RuleErrors:
    """Checks of what one rule returned.

    Args:
        op_name: Qualified name of the operator.
        kind: Name of the decorator that the rule was given to.
        rule: The rule.
        namespace: optree namespace of custom nodes.
    """

    def __init__(self, op_name: str, kind: str, rule: Callable, namespace: str) -> None:
        self.where = f"{op_name}: {kind} ({place_of(rule)})"
        self._namespace = namespace

    def flat_outputs(self, tree: Any) -> tuple[list[Tensor], Any]:
        """The tensors of a result, and its treespec.

        Raises:
            LeafError: If a leaf is no tensor.
        """
        leaves, treespec = optree.tree_flatten(tree, namespace=self._namespace)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                path = key_path(treespec.accessors()[i], "output")
                raise LeafError(
                    f"{self.where} must return a tree of tensors (and Nones), but {path} is {type(leaf).__name__}."
                )
        return leaves, treespec  # type: ignore[return-value] - every leaf was seen to be a tensor

    def same_tree(self, what: str, treespec: Any, wanted: Any, of: str) -> None:
        """Raise `TreeError` unless two treespecs agree."""
        if treespec != wanted:
            raise TreeError(f"{self.where} must return {what} with the tree of {of}, {wanted}, got {treespec}.")

    def refuse_alias(
        self, outputs: Sequence[Tensor], output: Tensor, leaves: Sequence[Tensor], structure: Structure
    ) -> None:
        """Raise `LeafError` for an output that shares memory with an input or an earlier output.

        Torch relies on operators that none does.
        """
        i = next(k for k, x in enumerate(outputs) if x is output)
        paths = [key_path(accessor, "output") for accessor in structure.settled.treespec.accessors()]
        shares = torch._C._is_alias_of  # type: ignore[attr-defined] - no stub
        found = [f"the argument {structure.label(j)}" for j, leaf in enumerate(leaves) if shares(output, leaf)]
        # One tensor that is returned twice is found where it stands first.
        found += [path for path, x in zip(paths, outputs, strict=False) if x is not output and shares(output, x)]
        found += [path for path, x in zip(paths[i + 1 :], outputs[i + 1 :], strict=False) if x is output]
        raise LeafError(
            f"{self.where} must return new tensors, but {paths[i]} shares its memory with {found[0]}; return a clone."
        )

    def refuse_batch(self, structure: Structure, i: int, axis: int, size: int, shape: Sequence[int]) -> None:
        """Raise `ShapeError` for a batched output that has another number of samples than the batch."""
        path = key_path(structure.settled.treespec.accessors()[i], "output")
        raise ShapeError(f"{self.where}: {path} must have {size} samples along axis {axis}, got shape {list(shape)}.")

    def flat_like(
        self,
        what: str,
        tree: Any,
        treespec: Any,
        root: str,
        like: Sequence[Meta],
        is_tensor: Sequence[bool] | None = None,
    ) -> list[Any]:
        """One derivative or `None` for each tensor of a tree that has the given treespec.

        Args:
            what: What the tree is, for errors.
            tree: What the rule returned: such a tree with `None` where a derivative is zero, or `None` for all of it.
            treespec: Its required treespec.
            root: Name that key paths start with.
            like: For each tensor of the tree: its shape, dtype and device.
            is_tensor: Which leaves of the treespec are tensors; by default all.

        Raises:
            TreeError: If the tree has another structure.
            LeafError: If a derivative is no tensor, or belongs to something that is none.
            ShapeError: If a shape differs.
            DtypeError: If a dtype differs.
            DeviceError: If a device differs.
        """
        if isinstance(tree, torch.Tensor) and treespec.is_leaf() and (is_tensor is None or is_tensor[0]):
            values = [tree]
        else:
            try:
                # Leaf by leaf: None may stand for a whole subtree.
                values = _up_to(treespec, tree, self._namespace)
            except ValueError:
                wanted_tree = optree.tree_unflatten(treespec, [LEAF] * treespec.num_leaves)
                options = {"namespace": self._namespace, "is_leaf": None}
                # Raises, naming the first difference.
                align(self.where, f"{what} {root}", tree, root, wanted_tree, options)
                raise
        results = []
        wanted = iter(like)
        for i, value in enumerate(values):
            if is_tensor is not None and not is_tensor[i]:
                if value is not None:
                    path = key_path(treespec.accessors()[i], root)
                    raise LeafError(
                        f"{self.where}: {what} {path} must be None, because that is no tensor, got {_named(value)}."
                    )
                continue
            meta = next(wanted)
            if value is not None:
                problem = _difference(value, meta)
                if problem is not None:
                    error, text = problem
                    raise error(f"{self.where}: {what} {key_path(treespec.accessors()[i], root)} must {text}.")
            # A tensor of integers has no derivative; one that is given could only be zero.
            results.append(value if has_derivatives(meta[1]) else None)
        return results


def _up_to(treespec: Any, tree: Any, namespace: str) -> list[Any]:
    """What stands in `tree` at the leaves of `treespec`; `None` in the place of a subtree stands for all its leaves."""
    if tree is None:
        return [None] * treespec.num_leaves
    if treespec.is_leaf():
        return [tree]
    children = treespec.children()
    one_level = treespec.one_level()
    parts = one_level.flatten_up_to(tree) if one_level is not None else []
    return [value for child, part in zip(children, parts, strict=True) for value in _up_to(child, part, namespace)]


def _named(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _difference(value: Any, meta: Meta) -> tuple[type[Exception], str] | None:
    """The first property in which a derivative differs from what it belongs to: the error's type and its text."""
    if not isinstance(value, torch.Tensor):
        return LeafError, f"be a tensor or None, got {type(value).__name__}"
    shape, dtype, device = meta
    if value.shape != shape:
        return ShapeError, f"have shape {list(shape)}, got {list(value.shape)}"
    if value.dtype != dtype:
        return DtypeError, f"have dtype {dtype}, got {value.dtype}"
    if value.device != device:
        return DeviceError, f"be on {device}, got {value.device}"
    return None
