"""Graphs that are called with trees: a joint graph in two, and all of them as text."""

from __future__ import annotations

import copy
import operator
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from primitives.tracing import _torch_private as torch_private
from primitives.tracing._graph.rewriting import SEED, TAG
from primitives.tracing._leaves import like
from primitives.tracing._memory import is_dense
from primitives.tracing._random.rng import PhiloxState
from primitives.tracing._sizes import bindings, bound_sizes, hinted_size

# Kinds of inputs; those that the forward graph saves have "saved[0]" and so on.
PRIMAL, COTANGENT, STATE = "primal", "cotangent", "state"
# Name of the backward graph's input for the cotangent of a loss, which the joint graph makes itself.
_SEED_INPUT = "tangents_seed"
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


class Saved(NamedTuple):
    """A value that the forward graph hands to the backward graph.

    Attributes:
        name: Name of its node.
        shape: Shape, with symbols for dynamic sizes; empty for a size that is saved itself.
        dtype: Its dtype; `None` for a size.
        num_bytes: Memory that it keeps from being freed, for the sizes that were traced; 0 where an entry before it
            keeps the same memory.
        is_input: Whether that memory is a primal's, and takes none in addition.
        line: The user's line that computes it.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: torch.dtype | None
    num_bytes: int
    is_input: bool
    line: str


class Graph:
    """A graph that is called with trees; `print` shows one line for each input, operation and output.

    Attributes:
        module: The graph, as a function of flat tensors.
        graph: The nodes.
        input_labels: Names of its inputs, in order.
        output_labels: Names of its outputs, in order.
    """

    def __init__(
        self, module: fx.GraphModule, inputs: Mapping[str, tuple[str, str]], outputs: Sequence[str], joint: Any
    ) -> None:
        self.module: fx.GraphModule = module
        self.graph: fx.Graph = module.graph
        self._joint = joint
        self._placeholders = self.graph.find_nodes(op="placeholder")
        # Label and kind of each.
        self._inputs = [inputs[node.name] for node in self._placeholders]
        self.input_labels: tuple[str, ...] = tuple(label for label, _ in self._inputs)
        self.output_labels: tuple[str, ...] = tuple(outputs)
        self._compute = torch_private.as_one_operation(self._flat)

    @property
    def code(self) -> str:
        """The graph as Python code."""
        return self.module.code.strip()

    def __repr__(self) -> str:
        return _table(self.graph, self.input_labels, self.output_labels)

    def _flat(self, values: Sequence[Any]) -> list[Any]:
        """The graph's results for values like those that were traced; a number stands for a cotangent full of it."""
        fakes = [node.meta["val"] for node in self._placeholders]
        # A cotangent may be viewed, and tells no size.
        sized = [None if kind == COTANGENT else fake for (_, kind), fake in zip(self._inputs, fakes, strict=True)]
        symbols = bindings(sized, values)
        args = []
        for (label, kind), x, fake in zip(self._inputs, values, fakes, strict=True):
            name = f"{type(self).__name__}: {label}"
            sizes: list[Any] = bound_sizes(fake.shape, symbols) if isinstance(fake, torch.Tensor) else []
            if kind == STATE or not isinstance(fake, torch.Tensor):
                args.append(x)
            elif kind == COTANGENT and isinstance(x, int) and None not in sizes:
                devices = [y.device for y in values if isinstance(y, torch.Tensor)]
                device = next((d for d in devices if d.type == fake.device.type), fake.device)
                args.append(torch.full(sizes, x, dtype=fake.dtype, device=device))
            elif kind in (PRIMAL, COTANGENT):
                x = None if isinstance(x, int) else x
                args.append(_laid_out_like(like(name, x, fake, sizes, viewable=kind == COTANGENT), fake, symbols))
            else:
                # Torch describes the workspace of a recurrent layer as empty, which it is not.
                sizes = [n or None for n in sizes]
                args.append(like(f"{type(self).__name__}: {kind} ({label})", x, fake, sizes, any_device=True))
        # As given: a copy that was made for its strides shares nothing.
        primals = [x for x, (_, kind) in zip(values, self._inputs, strict=True) if kind == PRIMAL]
        if primals:
            self._joint.require_fit(primals, symbols)
        # There is a history if a caller differentiates in an argument.
        if not torch_private.differentiated_outside(args):
            args = [torch_private.detached(x) for x in args]
        # Under `no_grad`, kernels leave out what a backward pass reads: the workspace of a recurrent layer.
        with torch.enable_grad():
            return list(self.module(*args))


class _Part(Graph):
    """The common parts of the two: the names of inputs and outputs, and what is `saved` between the two."""

    _method: str

    def __init__(
        self, module: fx.GraphModule, inputs: Any, outputs: Sequence[str], saved: list[Saved], joint: Any, cut: Any
    ) -> None:
        super().__init__(module, inputs, outputs, joint)
        self.input_names: tuple[str, ...] = self.input_labels
        self.output_names: tuple[str, ...] = self.output_labels
        self.saved: tuple[Saved, ...] = tuple(saved)
        self._cut = cut

    def __reduce__(self) -> tuple[Any, ...]:
        """The joint graph, to be split again."""
        return operator.methodcaller(self._method, min_cut=self._cut), (self._joint,)

    def _states(self, rng: PhiloxState | None) -> list[Any]:
        return self._joint.signature.flat_states(None if rng is None else (rng, rng))[:2]

    @property
    def saved_bytes(self) -> int:
        """Memory that what is saved takes between the two passes, primals not counted, for the sizes traced."""
        return sum(entry.num_bytes for entry in self.saved if not entry.is_input)


class ForwardGraph(_Part):
    """The forward pass of a joint graph: `(primals) -> (outs, saved)`; `print` also shows what is saved."""

    _method = "forward_graph"

    def __repr__(self) -> str:
        lines = [super().__repr__(), f"saved for the backward pass, {self.saved_bytes} bytes besides primals:"]
        for entry in self.saved:
            size = "a primal" if entry.is_input else f"{entry.num_bytes} bytes"
            lines.append(f"  {entry.name} {[*entry.shape]}: {size}")
        return "\n".join(lines)

    def __call__(self, primals: tuple[Any, ...], *, rng: PhiloxState | None = None) -> tuple[Any, ...]:
        """Run the forward pass.

        Args:
            primals: Tuple of the arguments of the function.
            rng: With `functionalize_rng`, the state of the forward pass.

        Returns:
            `(outs, saved)`, where `saved` is a tuple of tensors and sizes for the backward graph, and the state,
            advanced, behind them if there is one.
            It raises what the joint graph raises.
        """
        signature = self._joint.signature
        results = self._compute([*signature.tensors_of(primals), *self._states(rng)])
        outs, state = signature.joined_outs(results[: signature.num_forward_outputs])
        return outs, tuple(results[signature.num_forward_outputs :]), *state


class BackwardGraph(_Part):
    """The backward pass of a joint graph: `(saved, cotangents) -> grads`."""

    _method = "backward_graph"

    def __call__(self, saved: Sequence[Any], cotangents: Any = None, *, rng: PhiloxState | None = None) -> Any:
        """Run the backward pass.

        Args:
            saved: Tensors that the forward graph of the same trace and `min_cut` saved, or copies, on another device
                too, of which nothing was written to since.
            cotangents: Cotangents, in the structure of the output.
            rng: With `functionalize_rng`, the state of the backward pass.

        Returns:
            The gradients, in the structure of the primals; with `rng`, `(grads, state)`.
            `ValueError` if there are too few or too many saved values.
        """
        joint, signature = self._joint, self._joint.signature
        if len(saved) != len(self.saved):
            raise ValueError(f"BackwardGraph: saved must have {len(self.saved)} entries, got {len(saved)}.")
        # The forward state is an input of the joint graph too, and of this one if it is saved.
        names = [*list(joint.inputs)[len(joint.primal_names) :], _SEED_INPUT, *(entry.name for entry in self.saved)]
        values = [*signature.cotangents_of(cotangents), *self._states(rng) * 2, 1, *saved]
        given = dict(zip(names, values, strict=True))
        bars, state = signature.joined_gradients(self._compute([given[node.name] for node in self._placeholders]))
        return (bars, *state) if state else bars


def _laid_out_like(x: Tensor, fake: Tensor, symbols: dict[Any, int]) -> Tensor:
    """`x` with the strides that the graph was traced for, without a lazy conjugate or negative."""
    x, strides = x.resolve_conj().resolve_neg(), bound_sizes(fake.stride(), symbols)
    if not is_dense(fake) or None in strides or list(x.stride()) == strides:
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)  # type: ignore[arg-type] - no None


def split(joint: Any, *, min_cut: bool) -> tuple[ForwardGraph, BackwardGraph]:
    """Forward and backward graph of a joint graph."""
    graph = copy.deepcopy(joint.graph)
    # By these names torch's partitioner tells what placeholders are.
    targets = [f"primals_{i}" for i, _ in enumerate(joint.primal_names)]
    targets += [f"tangents_{i}" for i, _ in enumerate(joint.cotangent_names)]
    targets += ["primals_seed", "primals_offset", "bwd_seed_0", "bwd_base_offset_0"] * joint.signature.has_states
    for node, target in zip(graph.find_nodes(op="placeholder"), targets, strict=True):
        node.target = target
    for node in graph.nodes:
        # A check that raises: what it looks at is not computed again for it.
        if node.op == "call_function" and not node.users and node.meta.get(TAG) == "is_forward":
            node.meta[TAG] = "must_be_in_forward"
    for seed in [node for node in graph.nodes if node.name == SEED and node.op == "call_function"]:
        # The backward pass depends on it.
        with graph.inserting_before(seed):
            new = graph.placeholder(_SEED_INPUT)
        new.meta = dict(seed.meta)
        seed.replace_all_uses_with(new)
        graph.erase_node(seed)
    num = joint.signature.num_forward_outputs
    forward, backward = torch_private.partition(torch_private.GraphModule(joint.module, graph), num, min_cut=min_cut)
    saved = _described(forward, forward.graph.output_node().args[0][num:])
    inputs = {**joint.inputs, _SEED_INPUT: (SEED, COTANGENT)}
    labels = {entry.name: inputs.get(entry.name, (entry.name,))[0] for entry in saved}
    of_backward = inputs | {name: (label, f"saved[{i}]") for i, (name, label) in enumerate(labels.items())}
    return (
        ForwardGraph(forward, inputs, [*joint.output_labels[:num], *labels], saved, joint, min_cut),
        BackwardGraph(backward, of_backward, joint.output_labels[num:], saved, joint, min_cut),
    )


def _described(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[Saved]:
    inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    of_inputs = {torch_private.memory_of(x) for x in inputs if isinstance(x, torch.Tensor)}
    seen: set[int] = set()
    entries = []
    for node in nodes:
        x, line = node.meta["val"], _line_of(node)
        if not isinstance(x, torch.Tensor):
            entries.append(Saved(node.name, (), None, 0, False, line))
            continue
        memory = torch_private.memory_of(x)
        size = 0 if memory in seen else hinted_size(x.untyped_storage().nbytes())
        entries.append(Saved(node.name, tuple(x.shape), x.dtype, size, memory in of_inputs, line))
        seen.add(memory)
    return entries


def _line_of(node: fx.Node) -> str:
    """`file:line` of the user's innermost frame that a node comes from."""
    found = _LINE.findall(node.stack_trace or "")
    # Code that was typed at a prompt has no file to look into.
    if not found or found[-1][0].startswith("<"):
        return ""
    return f"{pathlib.PurePath(found[-1][0]).name}:{found[-1][1]}"


def _value(node: fx.Node) -> str:
    """Dtype and shape, as in `float32[2, 3]`, of each value of a node."""
    value = node.meta.get("val")
    return ", ".join(
        f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}]"
        if isinstance(x, torch.Tensor)
        else str(x)
        for x in (value if isinstance(value, (tuple, list)) else [] if value is None else [value])
    )


def _table(graph: fx.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """One line for each node: pass, name, operation and its arguments, value, line; then the outputs."""
    rows, labels = [], iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            rows.append(("input", node.name, next(labels), _value(node), ""))
        elif node.op != "output":
            direction = "backward" if node.meta.get(TAG) == "is_backward" else "forward"
            schema = torch_private.schema_of(node.target)
            name = getattr(node.target, "__name__", str(node.target)) if schema is None else schema.name
            operands = ", ".join(n.name for n in node.all_input_nodes)
            operation = f"{name.removeprefix('aten::').replace('::', '.')}({operands})"
            rows.append((direction, node.name, operation, _value(node), _line_of(node)))
    results = graph.output_node().args[0]
    for label, node in zip(outputs, results, strict=True):  # type: ignore[arg-type] - a tuple of nodes
        rows.append(("output", str(node), label, "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )
