"""A joint graph in two: a forward graph that saves, and a backward graph that takes what was saved."""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from primitives.tracing import torch_private
from primitives.tracing.graph.rewriting import SEED
from primitives.tracing.graph.summary import line_of, table
from primitives.tracing.leaves import like

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from primitives.tracing.random.rng import PhiloxState

__all__ = ["BackwardGraph", "ForwardGraph", "Graph", "Saved", "laid_out_like", "split"]

# Name of the backward graph's input for the cotangent of a loss, which the joint graph makes itself.
_SEED_INPUT = "tangents_seed"


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


class Graph:
    """A graph that is called with trees; `print` shows one line for each input, operation and output.

    Attributes:
        module: The graph, as a function of flat tensors.
        graph: The nodes.
        input_labels: What its inputs are called, in order.
        output_labels: What its outputs are called, in order.
    """

    _flat: Callable[..., list[Any]]

    def __init__(self, module: fx.GraphModule, input_labels: Sequence[str], output_labels: Sequence[str]) -> None:
        self.module, self.graph = module, module.graph
        self.input_labels, self.output_labels = tuple(input_labels), tuple(output_labels)
        self._compute = torch_private.as_one_operation(self._flat)

    @property
    def code(self) -> str:
        """The graph as Python code."""
        return self.module.code.strip()

    def __repr__(self) -> str:
        """The table that is printed."""
        return table(self.graph, self.input_labels, self.output_labels)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """What the graph computes; it has a history if a caller differentiates in an argument."""
        flat = args if torch_private.differentiated_outside(args) else [torch_private.detached(x) for x in args]
        # Under `no_grad`, kernels leave out what a backward pass reads: the workspace of a recurrent layer.
        with torch.enable_grad():
            return list(self.module(*flat))


class _Part(Graph):
    """What the two parts have in common: the names of inputs and outputs, and what is `saved` between the two."""

    _method: str

    def __init__(
        self, module: fx.GraphModule, outputs: Sequence[str], saved: list[Saved], joint: Any, cut: Any
    ) -> None:
        labels = {**joint.labels, _SEED_INPUT: SEED}
        inputs = [labels.get(node.name, node.name) for node in module.graph.find_nodes(op="placeholder")]
        super().__init__(module, inputs, outputs)
        self.input_names, self.output_names = self.input_labels, self.output_labels
        self.saved = tuple(saved)
        self._joint, self._cut = joint, cut

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
    """The forward pass of a joint graph: `(primals) -> (outs, saved)`."""

    _method = "forward_graph"

    def __call__(self, primals: tuple, *, rng: PhiloxState | None = None) -> tuple:
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
        results = self._compute(signature.tensors_of(primals), self._states(rng))
        outs, state = signature.joined_outs(results[: signature.num_forward_outputs])
        return outs, tuple(results[signature.num_forward_outputs :]), *state

    def _flat(self, primals: list[Any], states: list[Any]) -> list[Any]:
        return self.run([*self._joint.checked_primals(primals)[0], *states])


class BackwardGraph(_Part):
    """The backward pass of a joint graph: `(saved, tangents) -> grads`."""

    _method = "backward_graph"

    def __call__(self, saved: Sequence[Any], tangents: Any = None, *, rng: PhiloxState | None = None) -> Any:
        """Run the backward pass.

        Args:
            saved: What the forward graph of the same trace and `min_cut` saved, or copies, on another device too, of
                which nothing was written to since.
            tangents: Cotangents, in the structure of the output.
            rng: With `functionalize_rng`, the state of the backward pass.

        Returns:
            The gradients, in the structure of the primals; with `rng`, `(grads, state)`.
            `ValueError` if there are too few or too many saved values.
        """
        signature = self._joint.signature
        bars, state = signature.joined_gradients(
            self._compute(saved, signature.cotangents_of(tangents), self._states(rng))
        )
        return (bars, *state) if state else bars

    def _flat(self, saved: Sequence[Any], cotangents: list[Any], states: list[Any]) -> list[Any]:
        joint, names = self._joint, [entry.name for entry in self.saved]
        if len(saved) != len(names):
            raise ValueError(f"BackwardGraph: saved must have {len(names)} entries, got {len(saved)}.")
        fakes = {node.name: node.meta["val"] for node in self.graph.find_nodes(op="placeholder")}
        described = [fakes.get(name) for name in names]
        symbols = torch_private.bindings(described, saved)
        for i, (x, fake) in enumerate(zip(saved, described, strict=True)):
            if isinstance(fake, torch.Tensor):
                label = f"BackwardGraph: saved[{i}] ({joint.labels.get(names[i], names[i])})"
                # Torch describes the workspace of a recurrent layer as empty, which it is not.
                sizes = [n or None for n in torch_private.bound_sizes(fake.shape, symbols)]
                like(label, x, fake, sizes, any_device=True)
        tangents = joint.checked_cotangents(cotangents, symbols, saved)
        # The forward state is an input of the joint graph too, and of this one if it is saved.
        inputs, values = [*joint.labels][len(joint.primal_names) :], [*tangents, *states, *states]
        given = dict(zip([*inputs, *names], [*values, *saved], strict=True))
        for seed in _seeds(joint.graph):
            y = seed.meta["val"]
            given[_SEED_INPUT] = torch.ones(y.shape, dtype=y.dtype, device=y.device)
        return self.run([given[name] for name in fakes])


def laid_out_like(x: Tensor, fake: Tensor, symbols: dict[Any, int]) -> Tensor:
    """`x` with the strides that the graph was traced for, without a lazy conjugate or negative."""
    x, strides = x.resolve_conj().resolve_neg(), torch_private.bound_sizes(fake.stride(), symbols)
    if not torch_private.is_dense(fake) or None in strides or list(x.stride()) == strides:
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)  # type: ignore[arg-type] - no None


def _seeds(graph: fx.Graph) -> list[fx.Node]:
    """The node that makes the cotangent 1 of the loss, if the graph does."""
    return [node for node in graph.nodes if node.name == SEED and node.op == "call_function"]


def split(joint: Any, *, min_cut: bool) -> tuple[ForwardGraph, BackwardGraph]:
    """Forward and backward graph of a joint graph."""
    graph = copy.deepcopy(joint.graph)
    # By these names torch's partitioner tells what placeholders are.
    targets = [f"primals_{i}" for i, _ in enumerate(joint.primal_names)]
    targets += [f"tangents_{i}" for i, _ in enumerate(joint.tangent_names)]
    targets += ["primals_seed", "primals_offset", "bwd_seed_0", "bwd_base_offset_0"] * joint.signature.has_states
    for node, target in zip(graph.find_nodes(op="placeholder"), targets, strict=True):
        node.target = target
    for seed in _seeds(graph):
        # What depends on it is the backward pass.
        with graph.inserting_before(seed):
            new = graph.placeholder(_SEED_INPUT)
        new.meta = dict(seed.meta)
        seed.replace_all_uses_with(new)
        graph.erase_node(seed)
    num = joint.signature.num_forward_outputs
    forward, backward = torch_private.partition(fx.GraphModule(joint.module, graph), num, min_cut=min_cut)
    saved = _described(forward, forward.graph.output_node().args[0][num:])
    outputs = [*joint.output_labels[:num], *(entry.name for entry in saved)]
    return (
        ForwardGraph(forward, outputs, saved, joint, min_cut),
        BackwardGraph(backward, joint.output_labels[num:], saved, joint, min_cut),
    )


def _described(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[Saved]:
    inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    of_inputs = {torch_private.num_bytes(x)[0] for x in inputs if isinstance(x, torch.Tensor)}
    seen: set[int] = set()
    entries = []
    for node in nodes:
        value, line = node.meta["val"], line_of(node)
        if not isinstance(value, torch.Tensor):
            entries.append(Saved(node.name, (), None, 0, False, line))
            continue
        storage, size = torch_private.num_bytes(value)
        size = 0 if storage in seen else size
        entries.append(Saved(node.name, tuple(value.shape), value.dtype, size, storage in of_inputs, line))
        seen.add(storage)
    return entries
