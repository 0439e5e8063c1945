"""From the graph as traced to the graph as shown: named after key paths, without no-ops, marked by direction."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ROLE",
    "SEED",
    "TANGENT",
    "identifier",
    "is_backward",
    "mark_forward",
    "tidied",
]

# Torch's partitioner reads this too.
_TAG = "partitioner_tag"
# Where the metadata of a node says what it stands for: `SEED` or `TANGENT`.
ROLE = "joint_role"
# Name of the cotangent of a loss, and role of its node.
SEED = "loss_bar"
# Role of nodes that stand for a cotangent to come.
TANGENT = "tangent"


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


def tidied(
    module: fx.GraphModule, names: Sequence[str], tangent_names: Sequence[str], *, num_primals: int
) -> fx.GraphModule:
    """The graph anew.

    Args:
        module: As `make_fx` made it.
        names: One name for each placeholder.
        tangent_names: One name for each stand-in of a cotangent, which become placeholders.
        num_primals: How many of the placeholders come before these.
    """
    graph, made = fx.Graph(), {}
    stand_ins = [node for node in module.graph.nodes if node.meta.get(ROLE) == TANGENT]
    inputs = [*module.graph.find_nodes(op="placeholder")]
    inputs[num_primals:num_primals] = stand_ins
    names = [*names[:num_primals], *tangent_names, *names[num_primals:]]
    for node, name in zip(inputs, names, strict=True):
        made[node] = graph.placeholder(name)
        made[node].meta = {"val": node.meta["val"]}
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
            new.meta.setdefault(_TAG, "is_backward")
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(module, graph, "JointGraph")


_DETACH = torch.ops.aten.detach.default


def _is_identity(node: fx.Node) -> bool:
    """Whether a node stands for its argument, in derivatives too."""
    return node.target is torch.ops.aten.alias.default or (node.target is _DETACH and not _stops(node))


def _stops(node: fx.Node) -> bool:
    """Whether a `detach` is the user's: autograd's own are for the backward pass alone."""
    forward = [user for user in node.users if user.op == "output" or user.meta.get(_TAG) == "is_forward"]
    return any(user.target is not _DETACH or _stops(user) for user in forward)
