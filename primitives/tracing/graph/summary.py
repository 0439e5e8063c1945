"""Graphs as text."""

from __future__ import annotations

import pathlib
import re
from typing import TYPE_CHECKING, Any

import torch

from primitives.tracing.graph.rewriting import TAG
from primitives.tracing.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

__all__ = ["line_of", "table"]

_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def _shape(shape: Sequence[Any], dtype: torch.dtype | None) -> str:
    """Dtype and shape, as in `float32[2, 3]`."""
    return "size" if dtype is None else f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def _operation(node: fx.Node) -> str:
    """The operation of a node, in short."""
    schema = schema_of(node.target)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    return schema.name.removeprefix("aten::").replace("::", ".")


def line_of(node: fx.Node) -> str:
    """`file:line` of the user's innermost frame that a node comes from."""
    found = _LINE.findall(node.stack_trace or "")
    # Code that was typed at a prompt has no file to look into.
    if not found or found[-1][0].startswith("<"):
        return ""
    return f"{pathlib.PurePath(found[-1][0]).name}:{found[-1][1]}"


def _value(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)):
        value = [] if value is None else [value]
    return ", ".join(_shape(x.shape, x.dtype) if isinstance(x, torch.Tensor) else str(x) for x in value)


def table(graph: fx.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """One line for each node: pass, name, operation and its arguments, value, line; then the outputs."""
    rows, labels = [], iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            rows.append(("input", node.name, next(labels), _value(node), ""))
        elif node.op != "output":
            direction = "backward" if node.meta.get(TAG) == "is_backward" else "forward"
            operands = ", ".join(n.name for n in node.all_input_nodes)
            rows.append((direction, node.name, f"{_operation(node)}({operands})", _value(node), line_of(node)))
    results = graph.output_node().args[0]
    for label, node in zip(outputs, results, strict=True):  # type: ignore[arg-type] - a tuple of nodes
        rows.append(("output", str(node), label, "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )
