"""Graphs as text."""

from __future__ import annotations

import pathlib
import re
from typing import TYPE_CHECKING, Any

import torch

from primitives.tracing.graph.rewriting import is_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

__all__ = ["in_bytes", "line_of", "operation_of", "shape_of", "table"]

_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_KILO = 1024


def in_bytes(count: int) -> str:
    """A number of bytes, in words."""
    if count < _KILO:
        return f"{count} bytes"
    return f"{count / _KILO:.1f} KiB" if count < _KILO**2 else f"{count / _KILO**2:.1f} MiB"


def shape_of(shape: Sequence[Any], dtype: torch.dtype | None) -> str:
    """Dtype and shape, as in `float32[2, 3]`."""
    return "size" if dtype is None else f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def operation_of(node: fx.Node) -> str:
    """The operation of a node, in short."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


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
    return ", ".join(shape_of(x.shape, x.dtype) if isinstance(x, torch.Tensor) else str(x) for x in value)


def table(graph: fx.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """One line for each node: pass, name, operation and its arguments, value, line; then the outputs."""
    rows, labels = [], iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            rows.append(("input", node.name, next(labels), _value(node), ""))
        elif node.op != "output":
            direction = "backward" if is_backward(node) else "forward"
            operands = ", ".join(n.name for n in node.all_input_nodes)
            rows.append((direction, node.name, f"{operation_of(node)}({operands})", _value(node), line_of(node)))
    results = graph.output_node().args[0]
    for label, node in zip(outputs, results, strict=True):  # type: ignore[arg-type] - a tuple of nodes
        rows.append(("output", str(node), label, "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )
