"""Trees of every kind of node, registered in a namespace of their own, and comparisons of trees."""

import warnings
from typing import Any, NamedTuple

import optree
import torch

from tests.support import randn as randn

NAMESPACE = "primitives_func_tests"
N = {"namespace": NAMESPACE}


@optree.dataclasses.dataclass(namespace=NAMESPACE)
class Affine:
    """A dataclass: two children and a field that is not a child."""

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


def point() -> tuple[Any, Batch]:
    """Arguments of `loss` and `output`: a dataclass, a registered class, a list, a tuple, a namedtuple, `None`."""
    params = {"affine": Affine(randn(2), randn(2), name="own"), "pair": Pair([(randn(),), None], None)}
    return params, Batch(randn(2), randn(2))


def output(params: dict[str, Any], batch: Batch) -> dict[str, Any]:
    y = params["pair"].left[0][0] * torch.tanh(params["affine"].w * batch.x + params["affine"].b)
    return {"y": y, "rest": Pair((y - batch.y).square().sum(), None)}


def loss(params: dict[str, Any], batch: Batch) -> torch.Tensor:
    return output(params, batch)["rest"].left


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def structure(tree: Any) -> Any:
    return optree.tree_structure(tree, namespace=NAMESPACE)


def rebuilt(tree: Any, values: Any) -> Any:
    """The structure of `tree` with other leaves."""
    return optree.tree_unflatten(structure(tree), list(values))


def flat(function: Any, args: tuple) -> Any:
    """`function` of the leaves of `args`, one by one, to a tuple of leaves: for torch's own transforms."""
    return lambda *tensors: tuple(leaves(function(*rebuilt(args, tensors))))


def like(tree: Any) -> Any:
    """A random tree of the structure, shapes and dtypes of `tree`."""
    return optree.tree_map(torch.randn_like, tree, namespace=NAMESPACE)


def assert_tree(actual: Any, expected: Any, **options: Any) -> None:
    """The trees have one structure and close tensors; what is not a tensor is equal."""
    assert structure(actual) == structure(expected)
    assert_leaves(actual, leaves(expected), **options)


def assert_leaves(actual: Any, expected: Any, **options: Any) -> None:
    """The leaves of a tree are close to a sequence of tensors."""
    for value, wanted in zip(leaves(actual), expected, strict=True):
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


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")
