"""The tools of `torch.func` beside derivatives and batches: `functionalize`, `debug_unwrap`, `rearrange`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import optree
import torch
from torch import Tensor

from primitives._core.typing import PyTree
from primitives.func._calls import FlatCall, eager_after_break, transformed

_P = ParamSpec("_P")
_R = TypeVar("_R")


def functionalize(
    func: Callable[_P, _R],
    *,
    remove: str = "mutations",
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Callable[_P, _R]:
    """`torch.func.functionalize` over pytrees: `func` without writes in place inside, for what traces it.

    Writes to arguments are still made, at the end. `primitives.tracing.functionalize_mutations` returns them instead.

    Args:
        func: Function of pytrees.
        remove: `"mutations"`, or `"mutations_and_views"`, which also replaces views by copies.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree of an argument or of the output is a leaf.

    Returns:
        Function of the arguments of `func` that returns what it returns.

    Raises:
        RuntimeError: If `remove` is neither of the two.

    Example:
        >>> import torch, primitives as pr
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def update(state):
        ...     return {"x": state["x"].clone().add_(1)}
        >>> graph = make_fx(pr.func.functionalize(update))({"x": torch.zeros(2)}).graph
        >>> [node.name for node in graph.nodes if node.op == "call_function"]
        ['clone', 'add']
    """
    options = {"namespace": namespace, "is_leaf": is_leaf}
    return transformed("functionalize", func, options, _functionalized, remove)


@eager_after_break
def _functionalized(given: tuple[Any, ...], remove: str) -> Any:
    call = FlatCall(*given)
    flat = torch.func.functionalize(lambda *tensors: call.output.split(call(*tensors)), remove=remove)
    values = flat(*call.tensors)
    return call.output.join(values)


def debug_unwrap(
    tensor: PyTree, *, recurse: bool = True, namespace: str = "", is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """`torch.func.debug_unwrap` over pytrees: the tensors inside those of transforms, to be printed and nothing else.

    Args:
        tensor: A tensor or a pytree; leaves that no transform has wrapped stay as they are.
        recurse: Whether to unwrap all transforms, or the innermost one.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree is a leaf.

    Returns:
        The tree, with the tensors inside. Results computed from them are not transformed.

    Example:
        >>> import torch, primitives as pr
        >>> def shown(tree):
        ...     print(pr.func.debug_unwrap(tree)["x"].shape)
        ...     return tree["x"].sum()
        >>> pr.func.vmap(shown)({"x": torch.ones(2, 3)})
        torch.Size([2, 3])
        tensor([3., 3.])
    """

    def unwrap(leaf: Any) -> Any:
        return torch.func.debug_unwrap(leaf, recurse=recurse) if isinstance(leaf, torch.Tensor) else leaf

    unwrapped: Any = optree.tree_map(unwrap, cast("Any", tensor), is_leaf=is_leaf, namespace=namespace)
    return unwrapped


def rearrange(tensor: Tensor | Sequence[Tensor], pattern: str, **axes_lengths: int) -> Tensor:
    """`torch.func.rearrange`: axes of a tensor permuted, split and merged by a pattern, as by `einops.rearrange`.

    `torch.compile` breaks the graph at it, as at torch's.

    Args:
        tensor: Tensor of any dtype, or a list or tuple of tensors of one shape, which are stacked along a first axis.
        pattern: Axes before and after, as in `"b (h w) c -> b c h w"`.
        axes_lengths: Lengths of axes that the shape leaves open.

    Returns:
        Tensor of the same dtype. Like other changes of shape it is differentiable to any order, in both modes.

    Raises:
        ValueError: If the pattern is wrong, or does not fit the number of axes.

    Example:
        >>> import torch, primitives as pr
        >>> pr.func.rearrange(torch.ones(2, 12, 3), "b (h w) c -> b c h w", h=4).shape
        torch.Size([2, 3, 4, 3])
    """
    return torch.func.rearrange(cast("Any", tensor), pattern, **axes_lengths)
