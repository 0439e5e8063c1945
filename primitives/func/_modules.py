"""Modules with other parameters and buffers, or without running statistics, as in `torch.func`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn

from primitives._core.errors import LeafError, TreeError


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
