"""A user's rule: what it is told, and checks of what it returns, which name the operator, the rule and the key path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from primitives._core.dtypes import has_derivatives
from primitives._core.errors import LeafError
from primitives._core.trees.leaves import Meta, check_like, is_like
from primitives._core.trees.overlay import align, key_path
from primitives.custom.trees.calls import Signature, Structure

# Stands for a tensor where only the tree matters.
_LEAF = object()
# How each rule is called. Others have the signature of the reference.
_SIGNATURES = {
    "def_save_for_backward": ["inputs", "output"],
    "def_backward": ["ctx", "saved", "*cotangents"],
    "def_jvp": ["inputs", "output", "tangents"],
    "def_vmap": ["info", "in_dims", "inputs"],
    "def_autocast": ["inputs"],
}


def check_signature(kind: str, function: Callable[..., Any], signature: Signature) -> None:
    """Raise `TypeError` unless a rule of an operator can be called as rules of its kind are.

    The number of cotangents is known only with the first result: any is right here.
    """
    if not callable(function):
        raise TypeError(f"{signature.name}: {kind} takes a function, got {type(function).__name__}.")
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):  # of C: it has none
        return
    names = _SIGNATURES.get(kind.partition("(")[0], signature.positional)
    constants = [] if names is not signature.positional else signature.static
    most = len(names) if names[-1] != "*cotangents" else max(len(names), len(own.parameters))
    reason = ""
    for count in range(len(names), most + 1):
        try:
            own.bind(*[None] * count, **dict.fromkeys(constants))
        except TypeError as error:
            reason = str(error)
        else:
            return
    wanted = ", ".join([*names, *(["*", *constants] if constants else [])])
    where = UserRule(signature.name, kind, function, "").where
    raise TypeError(f"{where} must take ({wanted}), but its signature is {own}: {reason}.")


class BackwardContext:
    """The context of a backward rule, beside the saved tree."""

    __slots__ = ("_output_mask", "_structure")

    def __init__(self, structure: Structure, output_mask: Sequence[bool]) -> None:
        self._structure = structure
        self._output_mask = output_mask

    @property
    def needs_input_grad(self) -> Any:
        """By argument name, a tree like the argument with a bool in the place of every tensor.

        The others' cotangents may be `None`.
        """
        return self._structure.masks(self._output_mask)

    @property
    def static(self) -> Any:
        """The keyword-only arguments by name."""
        return self._structure.static_values


class VmapInfo(NamedTuple):
    """The batch that a vmap rule gets beside its arguments.

    Attributes:
        batch_size: Length of the batch axis.
        randomness: `"error"`, `"same"` or `"different"`.
    """

    batch_size: int
    randomness: str


class UserRule:
    """One rule of an operator; `where`, the beginning of errors, has its `place`, file and line."""

    def __init__(self, op_name: str, kind: str, function: Callable[..., Any], namespace: str) -> None:
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.function = function
        self.place = repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        self.where = f"{op_name}: {kind} ({self.place})"
        self._namespace = namespace

    def flat_outputs(self, tree: Any) -> tuple[list[Tensor], Any]:
        """The tensors of a result, and its treespec."""
        leaves, treespec = optree.tree_flatten(tree, namespace=self._namespace)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                path = key_path(treespec.accessors()[i], "output")
                raise LeafError(
                    f"{self.where} must return a tree of tensors (and Nones), but {path} is {type(leaf).__name__}."
                )
        return leaves, treespec  # type: ignore[return-value] - every leaf was seen to be a tensor

    def refuse_alias(self, structure: Structure, leaves: Sequence[Tensor], outputs: Sequence[Tensor], i: int) -> None:
        """Raise `LeafError` for output `i`, which shares memory with an input or an earlier output.

        Torch relies on operators that none does.
        """
        shares, results = torch._C._is_alias_of, structure.results  # type: ignore[attr-defined] - no stub
        found = [f"the argument {structure.label(j)}" for j, x in enumerate(leaves) if shares(outputs[i], x)]
        found += [results.label(j) for j, x in enumerate(outputs[:i]) if shares(outputs[i], x)]
        raise LeafError(
            f"{self.where} must return new tensors, but {results.label(i)} shares its memory with {found[0]}; return a "
            "clone."
        )

    def flat_like(
        self, what: str, tree: Any, treespec: Any, root: str, like: Sequence[tuple],
        is_tensor: Sequence[bool] | None = None,
    ) -> list[Any]:  # fmt: skip
        """One derivative or `None` for each tensor of a tree of the given treespec, held to `like`, fields of `Meta`s.

        In `tree`, `None` stands for a derivative that is zero, or for a subtree of them.
        """
        try:
            # Leaf by leaf: None may stand for a whole subtree.
            values = _up_to(treespec, tree)
        except ValueError:
            wanted_tree = optree.tree_unflatten(treespec, [_LEAF] * treespec.num_leaves)
            # Raises, naming the first difference.
            align(self.where, f"{what} {root}", tree, root, wanted_tree, {"namespace": self._namespace})
            raise
        results, metas = [], iter(like)
        for i, value in enumerate(values):
            if is_tensor is not None and not is_tensor[i]:
                if value is not None:
                    path = key_path(treespec.accessors()[i], root)
                    raise LeafError(
                        f"{self.where}: {what} {path} must be None, because that is not a tensor, got "
                        f"{type(value).__name__}."
                    )
                continue
            meta = Meta(*next(metas))
            if value is not None and not is_like(value, meta):
                path = key_path(treespec.accessors()[i], root)
                check_like(self.where, f"{what} {path}", value, path, meta)
            # A tensor of integers has no derivative; one that is given could only be zero.
            results.append(value if has_derivatives(meta.dtype) else None)
        return results


def _up_to(treespec: Any, tree: Any) -> list[Any]:
    """The entries of `tree` at the leaves of `treespec`; `None` in the place of a subtree stands for all its leaves."""
    if tree is None or treespec.is_leaf():
        return [tree] * treespec.num_leaves
    pairs = zip(treespec.children(), treespec.one_level().flatten_up_to(tree), strict=True)
    return [value for child, part in pairs for value in _up_to(child, part)]
