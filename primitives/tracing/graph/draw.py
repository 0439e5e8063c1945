"""Graphs as SVG, in layers: an operation stands below everything it reads."""

from __future__ import annotations

import dataclasses
from html import escape
from typing import TYPE_CHECKING

from primitives.tracing.graph.rewriting import is_backward
from primitives.tracing.graph.summary import _value, line_of, operation_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

__all__ = ["svg_of"]

_LAYER, _HEIGHT, _GAP, _MARGIN, _CHARACTER = 72, 36, 18, 20, 6.7
_SWEEPS = 8
_COLORS = {"input": "#eeeeee", "forward": "#cfe3f7", "backward": "#fbdcbf", "output": "#d9f0d3"}
_ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#555555"/></marker></defs>'
)


@dataclasses.dataclass(eq=False)
class _Box:
    """A rectangle, or a bend of an edge, which has no text."""

    layer: int
    lines: tuple[str, ...] = ()
    kind: str = ""
    tip: str = ""
    x: float = 0.0
    above: list[_Box] = dataclasses.field(default_factory=list)
    below: list[_Box] = dataclasses.field(default_factory=list)

    @property
    def width(self) -> float:
        return max((len(line) for line in self.lines), default=0) * _CHARACTER + 14 if self.lines else 6.0

    @property
    def top(self) -> float:
        return _MARGIN + self.layer * _LAYER


def _boxes(graph: fx.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> list[tuple[_Box, list[_Box]]]:
    """Each rectangle, with those that it reads."""
    boxes: dict[fx.Node, _Box] = {}
    found: list[tuple[_Box, list[_Box]]] = []
    labels = iter(inputs)
    for node in graph.nodes:
        if node.op == "output":
            continue
        sources = [boxes[n] for n in node.all_input_nodes]
        layer = 1 + max((box.layer for box in sources), default=0 if node.op != "placeholder" else -1)
        text = next(labels) if node.op == "placeholder" else operation_of(node)
        kind = "input" if node.op == "placeholder" else "backward" if is_backward(node) else "forward"
        boxes[node] = _Box(layer, (text, _value(node)), kind, f"{node.name} {line_of(node)}")
        found.append((boxes[node], sources))
    # An input stands right above its first reader, not at the top of a tall picture.
    for node, box in boxes.items():
        readers = [boxes[user].layer for user in node.users if user in boxes]
        if node.op == "placeholder" and readers:
            box.layer = min(readers) - 1
    results = graph.output_node().args[0]
    for label, node in zip(outputs, results, strict=True):  # type: ignore[arg-type] - a tuple of nodes
        if node in boxes:
            found.append((_Box(boxes[node].layer + 1, (label,), "output", str(node)), [boxes[node]]))
    return found


def _with_bends(found: list[tuple[_Box, list[_Box]]]) -> tuple[list[list[_Box]], list[list[_Box]]]:
    """Layers, and edges as paths that have a bend in each layer they cross."""
    layers: list[list[_Box]] = [[] for _ in range(1 + max((box.layer for box, _ in found), default=0))]
    for box, _ in found:
        layers[box.layer].append(box)
    paths = []
    bends: dict[tuple[int, int], _Box] = {}
    for box, sources in found:
        for source in sources:
            path = [source]
            for layer in range(source.layer + 1, box.layer):
                # Edges of one source run together until they part.
                key = (id(source), layer)
                if key not in bends:
                    bends[key] = _Box(layer)
                    layers[layer].append(bends[key])
                    _join(path[-1], bends[key])
                path.append(bends[key])
            _join(path[-1], box)
            paths.append([*path, box])
    return layers, paths


def _join(upper: _Box, lower: _Box) -> None:
    upper.below.append(lower)
    lower.above.append(upper)


def _place(layers: list[list[_Box]]) -> None:
    """Give every box its `x`: near its neighbors, without overlaps."""
    for layer in layers:
        _spread(layer, {box: float(i) for i, box in enumerate(layer)})
    for sweep in range(_SWEEPS):
        downward = sweep % 2 == 0
        for layer in layers if downward else reversed(layers):
            wanted = {}
            for box in layer:
                near = (box.above or box.below) if downward else (box.below or box.above)
                wanted[box] = sum(other.x for other in near) / len(near) if near else box.x
            layer.sort(key=wanted.__getitem__)
            _spread(layer, wanted)
    left = min(box.x - box.width / 2 for layer in layers for box in layer)
    for layer in layers:
        for box in layer:
            box.x += _MARGIN - left


def _spread(layer: list[_Box], wanted: dict[_Box, float]) -> None:
    # Neighbors that are too close are merged into a block, which stands where it is best for all of it.
    blocks: list[tuple[list[_Box], list[float], float]] = []
    for box in layer:
        members, offsets, width = [box], [box.width / 2], box.width + _GAP
        while True:
            start = sum(wanted[b] - o for b, o in zip(members, offsets, strict=True)) / len(members)
            if not blocks or blocks[-1][2] <= start:
                break
            previous, before, _ = blocks.pop()
            shift = sum(b.width + _GAP for b in previous)
            members, offsets, width = previous + members, before + [o + shift for o in offsets], width + shift
        blocks.append((members, offsets, start + width))
        for member, offset in zip(members, offsets, strict=True):
            member.x = start + offset


def _edge(path: list[_Box]) -> str:
    start, end = path[0], path[-1]
    x, y = start.x, start.top + _HEIGHT
    parts = [f"M{x:.0f} {y:.0f}"]
    for box in path[1:]:
        half = (box.top - y) / 2
        parts.append(f"C{x:.0f} {y + half:.0f} {box.x:.0f} {box.top - half:.0f} {box.x:.0f} {box.top:.0f}")
        x, y = box.x, box.top
        if box is not end:
            y += _HEIGHT
            parts.append(f"L{x:.0f} {y:.0f}")
    kept = start.kind == "forward" and end.kind == "backward"
    style = 'stroke="#c0392b" stroke-width="2"' if kept else 'stroke="#888888"'
    return f'<path d="{" ".join(parts)}" fill="none" {style} marker-end="url(#tip)"/>'


def _rectangle(box: _Box) -> str:
    lines = [line for line in box.lines if line]
    first = box.top + _HEIGHT / 2 + 4 - 7 * (len(lines) - 1)
    weights = [' font-weight="bold"', ""]
    texts = "".join(
        f'<text x="{box.x:.0f}" y="{first + 14 * i:.0f}"{weights[min(i, 1)]}>{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f'<g><title>{escape(box.tip)}</title><rect x="{box.x - box.width / 2:.0f}" y="{box.top:.0f}" '
        f'width="{box.width:.0f}" height="{_HEIGHT}" rx="4" fill="{_COLORS[box.kind]}" stroke="#555555"/>{texts}</g>'
    )


def svg_of(graph: fx.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Picture of a graph.

    Args:
        graph: The graph.
        inputs: Labels of its placeholders.
        outputs: Labels of its outputs.

    Returns:
        An SVG document. Pointing at a box shows the name of its node and the user's line.
    """
    found = _boxes(graph, inputs, outputs)
    layers, paths = _with_bends(found)
    _place(layers)
    width = max(box.x + box.width / 2 for layer in layers for box in layer) + _MARGIN
    height = 2 * _MARGIN + (len(layers) - 1) * _LAYER + _HEIGHT
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    text = 'font-family="monospace" font-size="11" text-anchor="middle"'
    edges, rectangles = [_edge(path) for path in paths], [_rectangle(box) for box, _ in found]
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {text}>', _ARROW]
    return "\n".join([*head, '<rect width="100%" height="100%" fill="white"/>', *edges, *rectangles, "</svg>"])
