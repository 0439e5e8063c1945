"""The tools of `torch.func` beside derivatives and batches: `functionalize` and its kin, and modules as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import optree
import torch
from torch import Tensor, nn

from primitives._core.errors import LeafError, TreeError
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
    return transformed("functionalize", func, _functionalized, remove, namespace=namespace, is_leaf=is_leaf)


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


def functional_call(
    module: nn.Module,
    parameter_and_buffer_dicts: Any,
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """`torch.func.functional_call`, whose tensors may also be nested by name: the module with other parameters.

    Buffers are updated in place in what is given, and the output alone is returned. `primitives.tracing.pure_module`
    returns new buffers, and works where torch refuses writes to buffers, as under `vmap`.

    Args:
        module: Module. It is lent to the call: two threads take two copies.
        parameter_and_buffer_dicts: Tensors by name, `{"layer.weight": ...}`, as `named_parameters` gives them; or
            nested by name, in any pytree: the keys and fields on the way to a tensor, joined by dots, are its name. A
            tuple or list of such trees is taken together; no name may be in two of them.
        args: A tuple of arguments, or a single argument that is not one. `None` means no argument.
        kwargs: Keyword arguments.
        tie_weights: Whether a tensor given for one of several tied names goes for all of them.
        strict: Whether every parameter and buffer must be given, and no other name.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree is a leaf.

    Returns:
        The output of the module.

    Raises:
        TreeError: If a name is given twice.
        LeafError: If a leaf is not a tensor.
        RuntimeError: If `strict` and a name is missing or unknown, or tied names are given different tensors.

    Example:
        >>> import torch, primitives as pr
        >>> linear = torch.nn.Linear(2, 1)
        >>> params = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
        >>> pr.func.functional_call(linear, params, torch.tensor([3.0, 4.0]))
        tensor([7.])
        >>> pr.func.functional_call(torch.nn.Sequential(linear), {"0": params}, torch.ones(2))
        tensor([2.])
    """
    given = parameter_and_buffer_dicts
    several = isinstance(given, (tuple, list)) and not hasattr(given, "_fields")
    trees: Any = given if several else (given,)
    by_name: dict[str, Tensor] = {}
    for tree in trees:
        paths, leaves, _ = optree.tree_flatten_with_path(tree, is_leaf=is_leaf, namespace=namespace)
        for path, leaf in zip(paths, leaves, strict=True):
            name = ".".join([str(entry) for entry in path])
            if not isinstance(leaf, torch.Tensor):
                raise LeafError(f"functional_call: {name or 'the leaf'} must be a tensor, got {type(leaf).__name__}.")
            if name in by_name:
                raise TreeError(f"functional_call: every name must be given once, got {name} twice.")
            by_name[name] = leaf
    return torch.func.functional_call(module, by_name, args, kwargs, tie_weights=tie_weights, strict=strict)


def stack_module_state(
    models: Any, *, namespace: str = "", is_leaf: Callable[[Any], bool] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`torch.func.stack_module_state`: the parameters and buffers of several models as one batch of each, for `vmap`.

    Args:
        models: Modules of one class, all in training or all in evaluation: a `ModuleList`, or any pytree of them.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree is a leaf.

    Returns:
        `(params, buffers)`, dicts by dotted name. Each tensor has one more axis, the first, with an entry for each
        model in the order of the leaves; parameters are leaves that require grad as those of the models do.

    Raises:
        TreeError: If `models` holds none.
        LeafError: If a leaf is not a module.
        RuntimeError: If the models differ in class or mode, or some of a parameter require grad.

    Example:
        >>> import torch, primitives as pr
        >>> models = {"first": torch.nn.Linear(3, 2), "second": torch.nn.Linear(3, 2)}
        >>> params, buffers = pr.func.stack_module_state(models)
        >>> call = lambda params, x: pr.func.functional_call(models["first"], params, x)
        >>> pr.func.vmap(call, in_dims=(0, None))(params, torch.ones(5, 3)).shape
        torch.Size([2, 5, 2])
    """
    tree: Any = list(models) if isinstance(models, torch.nn.ModuleList) else models
    leaves: Any = optree.tree_leaves(tree, is_leaf=is_leaf, namespace=namespace)
    for leaf in leaves:
        if not isinstance(leaf, torch.nn.Module):
            raise LeafError(f"stack_module_state: models must hold modules, got {type(leaf).__name__}.")
    if not leaves:
        raise TreeError("stack_module_state: models must hold a module, got none.")
    return torch.func.stack_module_state(leaves)


def replace_all_batch_norm_modules_(root: nn.Module) -> nn.Module:
    """`torch.func.replace_all_batch_norm_modules_`: batch norms that keep no running statistics, in place.

    They normalize by the batch then, in evaluation too, and write nothing, so that they work under every transform.
    `primitives.tracing.pure_module` keeps the statistics and works there as well.

    Args:
        root: Module. Its batch norms, torch's and this package's, lose their statistics; others stay as they are.

    Returns:
        `root`.

    Example:
        >>> import torch, primitives as pr
        >>> norm = pr.func.replace_all_batch_norm_modules_(pr.nn.BatchNorm1d(2))
        >>> pr.func.vmap(norm, randomness="same")(torch.ones(3, 4, 2)).shape
        torch.Size([3, 4, 2])
    """
    return torch.func.replace_all_batch_norm_modules_(root)
