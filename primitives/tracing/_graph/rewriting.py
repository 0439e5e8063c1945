"""From the graph as traced to the graph as shown: named after key paths, without no-ops, marked by direction."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import fx

from primitives.tracing._torch_private import ROLE, GraphModule

# Which pass a node belongs to; torch's partitioner reads this too.
TAG = "partitioner_tag"
# Roles of nodes: a cotangent to come, or that of a loss, which has this name.
COTANGENT, SEED = "cotangent", "loss_bar"


def identifier(label: str) -> str:
    """A key path as a Python name."""
    name = re.sub(r"\W+", "_", label).strip("_")
    return name if name[:1].isalpha() else f"_{name}"


def tidied(module: fx.GraphModule, names: Sequence[str], cotangent_names: Sequence[str], first: int) -> fx.GraphModule:
    """The graph of `make_fx` anew, with these names for its placeholders, and stand-ins as the `first`."""
    graph, made = fx.Graph(), {}
    inputs, labels = [*module.graph.find_nodes(op="placeholder")], [*names]
    inputs[first:first] = [node for node in module.graph.nodes if node.meta.get(ROLE) == COTANGENT]
    labels[first:first] = cotangent_names
    for node, name in zip(inputs, labels, strict=True):
        made[node] = new = graph.placeholder(name)
        # Two key paths may make one name.
        new.target, new.meta = new.name, {"val": node.meta["val"]}
    for node in module.graph.nodes:
        if node in made:
            continue
        if _is_identity(node):
            made[node] = made[node.args[0]]
            continue
        made[node] = new = graph.node_copy(node, made.__getitem__)
        if node.meta.get(ROLE) == SEED:
            new.name = SEED
        if node.op != "output":
            new.meta.setdefault(TAG, "is_backward")
    graph.eliminate_dead_code()
    graph.lint()
    return GraphModule(module, graph, "JointGraph")


_DETACH = torch.ops.aten.detach.default


def _is_identity(node: fx.Node) -> bool:
    """Whether a node stands for its argument, in derivatives too."""
    return node.target is torch.ops.aten.alias.default or (node.target is _DETACH and not _stops(node))


def _stops(node: fx.Node) -> bool:
    """Whether a `detach` is the user's: autograd's own are for the backward pass alone."""
    forward = [user for user in node.users if user.op == "output" or user.meta.get(TAG) == "is_forward"]
    return any(user.target is not _DETACH or _stops(user) for user in forward)
