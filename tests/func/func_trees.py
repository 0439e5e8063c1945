"""Trees of every kind of node, registered in a namespace of their own, and comparisons of trees."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import optree
import torch

NAMESPACE = "primitives_func_tests"


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class Affine:
    """A dataclass: two children and a field that is no child."""

    w: torch.Tensor
    b: torch.Tensor
    name: str = optree.dataclasses.field(default="affine", pytree_node=False)


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Pair:
    """A class that is a node only in the namespace of these tests."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


optree.register_pytree_node(
    Pair,
    lambda pair: ((pair.left, pair.right), None, ("left", "right")),
    lambda _, children: Pair(*children),
    path_entry_type=optree.GetAttrEntry,
    namespace=NAMESPACE,
)


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def params() -> dict[str, Any]:
    """Parameters of `predict`: a dataclass, a registered class, a list, a tuple, `None`."""
    return {
        "affine": Affine(randn(3, 2), randn(3), name="own"),
        "pair": Pair(randn(3), [randn(3), None]),
        "scale": (randn(()),),
    }


def predict(tree: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(tree["affine"].w @ x + tree["affine"].b)
    return tree["scale"][0] * (hidden * tree["pair"].left.sin() + tree["pair"].right[0] * hidden**2)


def loss(tree: dict[str, Any], batch: Batch) -> torch.Tensor:
    return ((predict(tree, batch.x) - batch.y) ** 2).sum()


def flat_predict(w: Any, b: Any, left: Any, right: Any, scale: Any, x: Any) -> torch.Tensor:
    """`predict` as a function of tensors, for torch's own transforms."""
    hidden = torch.tanh(w @ x + b)
    return scale * (hidden * left.sin() + right * hidden**2)


def flat_loss(*tensors: torch.Tensor) -> torch.Tensor:
    return ((flat_predict(*tensors[:6]) - tensors[6]) ** 2).sum()


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def like(tree: Any) -> Any:
    """A random tree of the structure, shapes and dtypes of `tree`."""
    return optree.tree_map(torch.randn_like, tree, namespace=NAMESPACE)


def structure(tree: Any) -> Any:
    return optree.tree_structure(tree, namespace=NAMESPACE)


def assert_tree(actual: Any, expected: Any, **options: Any) -> None:
    """The trees have one structure and close tensors; what is no tensor is equal."""
    assert structure(actual) == structure(expected)
    assert_leaves(actual, leaves(expected), **options)


def assert_leaves(actual: Any, expected: Any, **options: Any) -> None:
    """The leaves of a tree are close to a sequence of tensors."""
    found = leaves(actual)
    assert len(found) == len(expected)
    for value, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(value, wanted, **options)
        else:
            assert value == wanted


def nested_tensors(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """One nested tensor of each of torch's layouts."""
    with warnings.catch_warnings():
        # That the layout of strides is a prototype; it is in use.
        warnings.simplefilter("ignore", UserWarning)
        return [torch.nested.nested_tensor(list(tensors), layout=layout) for layout in (torch.strided, torch.jagged)]
