"""From the graph as traced to the graph as shown: named after key paths, without no-ops, marked by direction."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from primitives.tracing import torch_private as internals
from primitives.tracing.lines import user_part

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SEED", "identifier", "is_backward", "mark_forward", "packed", "tidied", "unpacked", "writing_nodes"]

# Torch's partitioner reads this too.
_TAG = "partitioner_tag"
# Name of the cotangent of a loss.
SEED = "loss_bar"
# In a graph without writes these are their argument.
_IDENTITIES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


def identifier(label: str) -> str:
    """A key path as a Python name."""
    name = re.sub(r"\W+", "_", label).strip("_")
    return name if name[:1].isalpha() else f"_{name}"


def mark_forward(nodes: Sequence[fx.Node]) -> None:
    """Mark nodes, at the end of the forward pass; those that come later belong to the backward pass."""
    for node in nodes:
        if node.op not in ("placeholder", "output"):
            node.meta[_TAG] = "is_forward"


def is_backward(node: fx.Node) -> bool:
    """Whether a node belongs to the backward pass."""
    return node.meta.get(_TAG) == "is_backward"


def writing_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that write in place."""
    return [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]


def _one(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    return graph.create_node("call_function", torch.ops.aten.full.default, (list(value.shape), 1), options, SEED)


def tidied(module: fx.GraphModule, names: Sequence[str], *, pure: bool) -> fx.GraphModule:
    """The graph anew.

    Args:
        module: As `make_fx` made it.
        names: One name for each placeholder. If there is one more of these, it is the cotangent of a loss, and becomes
            a node that makes it.
        pure: Whether nothing in it writes in place.
    """
    graph = fx.Graph()
    environment: dict[fx.Node, Any] = {}
    remaining = iter(names)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            name = next(remaining, None)
            new = _one(graph, node) if name is None else graph.placeholder(name)
            new.meta = dict(node.meta)
            if name is None:
                new.meta[_TAG] = "is_backward"
        elif pure and node.target in _IDENTITIES:
            environment[node] = environment[node.args[0]]
            continue
        else:
            new = graph.node_copy(node, environment.__getitem__)
        environment[node] = new
        if node.op not in ("placeholder", "output"):
            new.meta.setdefault(_TAG, "is_backward")
        if new.stack_trace:
            new.stack_trace = user_part(new.stack_trace)
    if pure:
        graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(module, graph, "JointGraph")


def packed(module: fx.GraphModule) -> tuple[bytes, dict[str, Any]]:
    """A graph as bytes, and its constants, of which torch's pickler for graphs would keep the shapes alone."""
    constants = {str(n.target): getattr(module, str(n.target)) for n in module.graph.find_nodes(op="get_attr")}
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return internals.dumped(fx.GraphModule(_module(dict.fromkeys(constants)), graph)), constants


def unpacked(data: bytes, constants: dict[str, Any], mode: Any) -> fx.GraphModule:
    """The graph again.

    Args:
        data: As `packed` gave it.
        constants: The constants.
        mode: Where the values without memory are to live.
    """
    loaded = internals.loaded(data, mode)
    graph = fx.Graph()
    graph.output(graph.graph_copy(loaded.graph, {}))
    return fx.GraphModule(_module(constants), graph, "JointGraph")


def _module(attributes: dict[str, Any]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
