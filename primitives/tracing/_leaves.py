"""Trees, taken apart into leaves that have names."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from primitives._core.errors import DeviceError, DtypeError, LeafError, ShapeError
from primitives._core.trees.overlay import align, key_path


class Leaves(NamedTuple):
    """A tree, taken apart; `None` is not a leaf."""

    values: list[Any]
    # The tree, with the number of each leaf in its place: what puts them together.
    skeleton: Any
    # Name of the tree in key paths, or, of a tuple of arguments, the name of each.
    roots: str | tuple[str, ...]
    # optree's, of custom nodes.
    namespace: str

    @classmethod
    def of(
        cls, tree: Any, roots: str | tuple[str, ...], namespace: str, is_leaf: Callable[[Any], bool] | None = None
    ) -> Leaves:
        """The leaves of `tree`."""
        values, treespec = optree.tree_flatten(tree, is_leaf, namespace=namespace)
        return cls(values, optree.tree_unflatten(treespec, range(len(values))), roots, namespace)

    @classmethod
    def of_arguments(
        cls, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, namespace: str = ""
    ) -> Leaves:
        """The leaves of arguments: of the positional ones, by the names of the parameters of `fn`, then by keyword."""
        kwargs = kwargs or {}
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            parameters = ()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        more = [f"args[{i}]" for i in range(len(args) - len(names))]
        return cls.of((*args, *kwargs.values()), (*[*names, *more][: len(args)], *kwargs), namespace)

    @property
    def treespec(self) -> optree.PyTreeSpec:
        """Structure of the tree."""
        return optree.tree_structure(self.skeleton, namespace=self.namespace)

    def labels(self, places: Sequence[int]) -> tuple[str, ...]:
        """Key paths of leaves, as code."""
        accessors = optree.tree_accessors(self.skeleton, namespace=self.namespace)
        if isinstance(self.roots, str):
            return tuple(key_path(accessors[i], self.roots) for i in places)
        return tuple(key_path(accessors[i][1:], self.roots[accessors[i][0].entry]) for i in places)

    def label(self, place: int) -> str:
        """Key path of a leaf, as code."""
        return self.labels([place])[0]

    def aligned(self, function: str, name: str, tree: Any, like_name: str) -> list[Any]:
        """The entry of `tree` in the place of each leaf; `TreeError` if the structure differs."""
        return align(function, name, tree, like_name, self.skeleton, {"namespace": self.namespace, "is_leaf": None})

    def cotangents(self, function: str, cotangents: Any, taken: Container[int]) -> list[Any]:
        """The entry of `cotangents` in the place of each leaf of an output; `LeafError` where one is not `taken`."""
        pieces = self.aligned(function, "cotangents", cotangents, "outs")
        for i, piece in enumerate(pieces):
            if piece is not None and i not in taken:
                raise LeafError(
                    f"{function}: {self._replace(roots='cotangents').label(i)} must be None: this output takes no "
                    "cotangent, as it is not a floating-point tensor, does not require grad, shares memory with an "
                    "input, or was traced without one."
                )
        return pieces

    def join(self, values: Sequence[Any]) -> Any:
        """The tree, with other leaves."""
        # Dynamo follows this, and not the use of a treespec that it has not made.
        return optree.tree_map(lambda i: values[i], self.skeleton, namespace=self.namespace)

    def filled(self, places: Sequence[int], values: Sequence[Any]) -> Any:
        """The tree, with other leaves in some places."""
        leaves = list(self.values)
        for place, value in zip(places, values, strict=True):
            leaves[place] = value
        return self.join(leaves)


def refuse_opaque(function: str, leaves: Sequence[Any], label: Callable[[int], str]) -> None:
    """Raise `LeafError` for a leaf with a tensor in an attribute or as an entry, which no derivative would reach.

    Such a leaf is a dataclass or a `dict` that optree does not take apart, or a module.
    """
    for i, x in enumerate(leaves):
        if isinstance(x, (torch.Tensor, type)):
            continue
        attributes = x.state_dict() if isinstance(x, torch.nn.Module) else getattr(x, "__dict__", {})
        inside = {f".{name}": y for name, y in attributes.items()}
        inside |= {f"[{key!r}]": y for key, y in x.items()} if isinstance(x, dict) else {}
        path = next((path for path, y in inside.items() if isinstance(y, torch.Tensor)), None)
        if path is not None:
            kind, name = type(x).__name__, label(i)
            raise LeafError(
                f"{function}: {name} must be a tensor, a constant or a container that optree takes apart, got a "
                f"{kind} with a tensor inside, {name}{path}. For a module, use pure_module; for another class, "
                f"optree.register_pytree_node({kind}, ..., namespace=name), and pass namespace=name to {function}."
            )


def like(
    label: str, x: Any, model: Tensor, sizes: Sequence[Any], *, viewable: bool = False, any_device: bool = False
) -> Tensor:
    """`x`, if it is a tensor like `model`, of these sizes (`None` for any); if `viewable`, viewed in them."""
    if not isinstance(x, torch.Tensor):
        raise LeafError(f"{label} must be a tensor, got {type(x).__name__}.")
    if x.dtype != model.dtype:
        raise DtypeError(f"{label} must have dtype {model.dtype}, got {x.dtype}.")
    if x.device.type != model.device.type and not any_device:
        raise DeviceError(f"{label} must be on {model.device}, got {x.device}.")
    y = x
    if viewable and x.shape != tuple(sizes) and sizes.count(None) <= 1:
        with contextlib.suppress(RuntimeError):
            y = x.view([-1 if n is None else n for n in sizes])
    if y.dim() == len(sizes) and all(n in (None, m) for n, m in zip(sizes, y.shape, strict=True)):
        return y
    wanted = [model.shape[i] if n is None else n for i, n in enumerate(sizes)]
    advice = f" with strides {list(x.stride())}, which cannot be viewed in it" if viewable else ""
    raise ShapeError(f"{label} must have shape {wanted}, got {list(x.shape)}{advice}.")
