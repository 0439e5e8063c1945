"""Decompositions as graphs, to read and to test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_structure

from primitives.core.decomposition import get_decomposition

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["decomposition_graph"]

_graphs: dict[tuple, tuple[Callable, torch.fx.GraphModule]] = {}


def _layout(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, str(leaf.device)
    return type(leaf).__name__, repr(leaf)


def decomposition_graph(op: Any, *example_args: Any, for_jvp: bool = False) -> torch.fx.GraphModule:
    """The decomposition of `op` as an FX graph of ATen operators.

    It is traced once for each layout of the tensors and each value of the other arguments, with fake tensors: nothing
    is computed and no memory is used.

    Args:
        op: What `get_decomposition` takes.
        *example_args: Arguments of the operator, in the order of its schema.
        for_jvp: Whether to look in the table for forward mode first.

    Returns:
        The graph; call it with arguments like the examples, read it as `.code` or `.graph`.

    Raises:
        MissingRuleError: If there is no decomposition.

    Example:
        >>> import torch, primitives as pr
        >>> graph = pr.decompositions.decomposition_graph(torch.ops.aten.trace.default, torch.ones(3, 3))
        >>> [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
        ['diagonal.default', 'sum.default']
        >>> graph(torch.ones(3, 3))
        tensor(3.)
    """
    decomposition = get_decomposition(op, for_jvp=for_jvp)
    key = (op, for_jvp, str(tree_structure(example_args)), *[_layout(leaf) for leaf in tree_leaves(example_args)])
    cached = _graphs.get(key)
    # A table may have been given another decomposition since.
    if cached is None or cached[0] is not decomposition:
        cached = _graphs[key] = (decomposition, make_fx(decomposition, tracing_mode="fake")(*example_args))
    return cached[1]
