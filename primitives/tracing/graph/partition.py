"""A joint graph in two: a forward graph that saves, and a backward graph that takes what was saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from primitives.core.errors import DtypeError, LeafError, ShapeError
from primitives.tracing import torch_private as internals
from primitives.tracing.graph.rewriting import SEED
from primitives.tracing.graph.summary import in_bytes, line_of, shape_of, table
from primitives.tracing.random.rng import PhiloxState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = ["BackwardGraph", "ForwardGraph", "Saved", "run", "split"]


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
    shape: tuple
    dtype: torch.dtype | None
    num_bytes: int
    is_input: bool
    line: str


class _Part:
    """What the two parts have in common.

    Attributes:
        module: The graph, as a function of flat tensors.
        input_names: Names of its inputs: key paths as code, and node names for what is saved.
        output_names: Names of its outputs.
        saved: What goes from forward to backward graph.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        input_names: Sequence[str],
        output_names: Sequence[str],
        saved: Sequence[Saved],
        joint: Any,
        min_cut: bool,
    ) -> None:
        self.module = module
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)
        self.saved = tuple(saved)
        self._joint = joint
        self._min_cut = min_cut
        self._compute = internals.as_one_operation(self._flat)

    def __reduce__(self) -> tuple[Any, ...]:
        """The joint graph, to be split again."""
        return _part_of, (self._joint, self._min_cut, type(self) is BackwardGraph)

    def _states(self, rng: PhiloxState | None) -> list[Any]:
        return self._joint.signature.flat_states(None if rng is None else (rng, rng))[:2]

    _flat: Callable[..., list[Any]]

    @property
    def graph(self) -> fx.Graph:
        """The nodes."""
        return self.module.graph

    @property
    def code(self) -> str:
        """The graph as Python code."""
        return self.module.code.strip()

    @property
    def saved_bytes(self) -> int:
        """Memory that what is saved takes between the two passes, primals not counted, for the sizes traced."""
        return sum(entry.num_bytes for entry in self.saved if not entry.is_input)

    def __str__(self) -> str:
        """One line for each input, operation and output, and the list of what is saved."""
        placeholders = self.graph.find_nodes(op="placeholder")
        lines = [table(self.module, dict(zip(placeholders, self.input_names, strict=True)), self.output_names)]
        lines.append(f"saved for the backward pass, {in_bytes(self.saved_bytes)} besides primals:")
        for entry in self.saved:
            size = "primal" if entry.is_input else in_bytes(entry.num_bytes)
            lines.append(f"  {entry.name}: {shape_of(entry.shape, entry.dtype)}, {size}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """How much there is of what."""
        return (
            f"{type(self).__name__}({len(self.input_names)} inputs -> {len(self.output_names)} outputs; "
            f"{len(self.saved)} saved, {in_bytes(self.saved_bytes)} besides primals)"
        )


class ForwardGraph(_Part):
    """The forward pass of a joint graph: `(primals) -> (outs, saved)`."""

    def __call__(self, primals: tuple, *, rng: PhiloxState | None = None) -> tuple:
        """Run the forward pass.

        Args:
            primals: Tuple of the arguments of the function.
            rng: With `functionalize_rng`, the state of the forward pass.

        Returns:
            `(outs, saved)`, where `saved` is a tuple of tensors and sizes for the backward graph, and the state,
            advanced, behind them if there is one.

        Raises:
            TypeError: If a state is missing, or there is none to pass.
            ValueError: If `primals` are not like those that were traced; see `JointGraph`.
        """
        signature, results = (
            self._joint.signature,
            self._compute(self._joint.signature.tensors_of(primals), self._states(rng)),
        )
        num = signature.num_forward_outputs
        outs, saved = results[:num], tuple(results[num:])
        if not signature.has_states:
            return signature.join_outs(outs), saved
        return signature.join_outs(outs[:-2]), saved, PhiloxState(*outs[-2:])

    def _flat(self, primals: list[Any], states: list[Any]) -> list[Any]:
        """Outputs, state, and what is saved."""
        return run(self.module, [*self._joint.checked_primals(primals), *states])


class BackwardGraph(_Part):
    """The backward pass of a joint graph: `(saved, tangents) -> grads`."""

    def __init__(
        self, *args: Any, sources: Sequence[tuple[str, int]], described: Sequence[Any], labels: Sequence[str]
    ) -> None:
        super().__init__(*args)
        # For each flat input, the kind it is of and its number among that kind.
        self._sources = sources
        self._described, self._labels = described, labels

    def __call__(self, saved: Sequence[Any], tangents: Any = None, *, rng: PhiloxState | None = None) -> Any:
        """Run the backward pass.

        Args:
            saved: What the forward graph of the same trace and `min_cut` saved, or copies, on another device too, of
                which nothing was written to since.
            tangents: Cotangents, in the structure of the output.
            rng: With `functionalize_rng`, the state of the backward pass.

        Returns:
            The gradients, in the structure of the primals; with `rng`, `(grads, state)`.

        Raises:
            TypeError: If a state is missing, or there is none to pass.
            ValueError: If there are too few or too many saved values, or they or the cotangents are not like those that
                were traced; see `JointGraph`.
        """
        signature, results = (
            self._joint.signature,
            self._compute(saved, self._joint.signature.cotangents_of(tangents), self._states(rng)),
        )
        if not signature.has_states:
            return signature.join_gradients(results)
        return signature.join_gradients(results[:-2]), PhiloxState(*results[-2:])

    def _flat(self, saved: Sequence[Any], cotangents: list[Any], states: list[Any]) -> list[Any]:
        """Gradients and state."""
        symbols = _check_saved(saved, self._described, self._labels)
        pools = {
            "saved": saved,
            "tangent": self._joint.checked_cotangents(cotangents, symbols, saved),
            "state": states,
            "seed": self._joint.seeds(),
        }
        return run(self.module, [pools[kind][i] for kind, i in self._sources])


def run(module: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """What a graph computes; it has a history if a caller differentiates in an argument."""
    flat = args if internals.differentiated_outside(args) else [internals.detached(x) for x in args]
    # Under `no_grad`, kernels leave out what a backward pass reads: the workspace of a recurrent layer.
    with torch.enable_grad():
        return list(module(*flat))


def _check_saved(saved: Sequence[Any], described: Sequence[Any], labels: Sequence[str]) -> dict[Any, int]:
    """What the symbols in sizes stand for; raises unless `saved` is like what the forward graph saved."""
    if not isinstance(saved, (tuple, list)):
        raise TypeError(f"BackwardGraph: saved must be the tuple that the forward graph gave, got {saved!r}.")
    if len(saved) != len(described):
        raise ValueError(f"BackwardGraph: saved must have {len(described)} entries, got {len(saved)}.")
    symbols = internals.bindings(described, saved)
    for i, (x, fake) in enumerate(zip(saved, described, strict=True)):
        wanted = "a tensor" if isinstance(fake, torch.Tensor) else "a size"
        label = f"BackwardGraph: saved[{i}] ({labels[i]}) must"
        if isinstance(x, torch.Tensor) != isinstance(fake, torch.Tensor):
            raise LeafError(f"{label} be {wanted}, got {type(x).__name__}.")
        if not isinstance(x, torch.Tensor):
            continue
        if x.dtype != fake.dtype:
            raise DtypeError(f"{label} have dtype {fake.dtype}, got {x.dtype}.")
        sizes = internals.bound_sizes(fake.shape, symbols)
        # Torch describes the workspace of a recurrent layer as empty, which it is not.
        if 0 not in sizes and not internals.sizes_fit(sizes, x):
            raise ShapeError(f"{label} have shape {sizes}, got {list(x.shape)}.")
    return symbols


def _for_partitioner(joint: Any) -> fx.GraphModule:
    """A copy whose placeholders tell torch's partitioner what they are."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(joint.graph, copies))
    num_primals, num_tangents = len(joint.primal_names), len(joint.tangent_names)
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        if i < num_primals:
            node.target = f"primals_{i + 1}"
        elif i < num_primals + num_tangents:
            node.target = f"tangents_{i + 1 - num_primals}"
        else:
            k = i - num_primals - num_tangents
            node.target = (f"primals_{i + 1}", f"primals_{i + 1}", "bwd_seed_0", "bwd_base_offset_0")[k]
    if joint.signature.has_seed:
        _make_input(graph, copies[next(node for node in joint.graph.nodes if node.name == SEED)])
    return fx.GraphModule(joint.module, graph)


def _make_input(graph: fx.Graph, seed: fx.Node) -> None:
    """Replace the node that makes the cotangent of the loss: what depends on it is the backward pass."""
    with graph.inserting_before(seed):
        new = graph.placeholder("tangents_seed")
    new.meta = dict(seed.meta)
    seed.replace_all_uses_with(new)
    graph.erase_node(seed)


def _part_of(joint: Any, min_cut: bool, backward: bool) -> ForwardGraph | BackwardGraph:
    return joint.backward_graph(min_cut=min_cut) if backward else joint.forward_graph(min_cut=min_cut)


def split(joint: Any, *, min_cut: bool) -> tuple[ForwardGraph, BackwardGraph]:
    """Forward and backward graph of a joint graph."""
    num = joint.signature.num_forward_outputs
    forward, backward = internals.partition(_for_partitioner(joint), num, min_cut=min_cut)
    results = list(forward.graph.output_node().args[0])
    saved_nodes = results[num:]
    labels = dict(zip([n.name for n in joint.graph.find_nodes(op="placeholder")], joint._labels(), strict=True))
    saved = _described(forward, saved_nodes)
    names = [entry.name for entry in saved]
    outputs = joint.output_labels()
    # An output that is a primal goes by the primal's name.
    meanings = {**dict(zip(map(str, results[:num]), outputs, strict=False)), **labels}
    forward_inputs = [labels[n.name] for n in forward.graph.find_nodes(op="placeholder")]
    tangents = list(joint.tangent_names)
    sources: list[tuple[str, int]] = []
    backward_inputs = []
    for node in backward.graph.find_nodes(op="placeholder"):
        label = labels.get(node.name, node.name)
        backward_inputs.append(label)
        if node.name in names:
            sources.append(("saved", names.index(node.name)))
        elif label in tangents:
            sources.append(("tangent", tangents.index(label)))
        elif node.name == "tangents_seed":
            sources.append(("seed", 0))
            backward_inputs[-1] = SEED
        else:
            sources.append(("state", ("rng[1].seed", "rng[1].offset").index(label)))
    return (
        ForwardGraph(forward, forward_inputs, [*outputs[:num], *names], saved, joint, min_cut),
        BackwardGraph(
            *(backward, backward_inputs, outputs[num:], saved, joint, min_cut),
            sources=sources,
            described=[node.meta["val"] for node in saved_nodes],
            labels=[meanings.get(name, name) for name in names],
        ),
    )


def _described(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[Saved]:
    inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    of_inputs = {internals.num_bytes(x)[0] for x in inputs if isinstance(x, torch.Tensor)}
    seen: set[int] = set()
    entries = []
    for node in nodes:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            entries.append(Saved(node.name, (), None, 0, False, line_of(node)))
            continue
        storage, size = internals.num_bytes(value)
        size = 0 if storage in seen else size
        seen.add(storage)
        is_input = node.op == "placeholder" or storage in of_inputs
        entries.append(Saved(node.name, tuple(value.shape), value.dtype, size, is_input, line_of(node)))
    return entries
