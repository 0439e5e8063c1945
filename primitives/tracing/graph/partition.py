"""A joint graph in two: a forward graph that saves, and a backward graph that takes what was saved."""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from primitives.core.errors import LeafError, ShapeError
from primitives.tracing import torch_private as internals
from primitives.tracing.graph.rewriting import SEED
from primitives.tracing.graph.summary import in_bytes, line_of, shape_of, table
from primitives.tracing.leaves import require_tensor
from primitives.tracing.random.rng import PhiloxState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BackwardGraph", "ForwardGraph", "Runnable", "Saved", "run", "split"]

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


class Runnable:
    """A graph that is called with trees.

    Attributes:
        module: The graph, as a function of flat tensors.
        graph: The nodes.
    """

    _flat: Callable[..., list[Any]]

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = module.graph
        self._compute = internals.as_one_operation(self._flat)

    @property
    def code(self) -> str:
        """The graph as Python code."""
        return self.module.code.strip()


class _Part(Runnable):
    """What the two parts have in common.

    Attributes:
        input_names: Names of its inputs: key paths as code, and node names for what is saved.
        output_names: Names of its outputs.
        saved: What goes from forward to backward graph.
    """

    _method: str

    def __init__(
        self,
        module: fx.GraphModule,
        output_names: Sequence[str],
        saved: Sequence[Saved],
        values: Sequence[Any],
        joint: Any,
        min_cut: bool,
    ) -> None:
        super().__init__(module)
        labels = {**joint.labels, _SEED_INPUT: SEED}
        self.input_names = tuple(labels.get(n.name, n.name) for n in module.graph.find_nodes(op="placeholder"))
        self.output_names = tuple(output_names)
        self.saved = tuple(saved)
        self._values = values
        self._joint, self._min_cut = joint, min_cut

    def __reduce__(self) -> tuple[Any, ...]:
        """The joint graph, to be split again."""
        return operator.methodcaller(self._method, min_cut=self._min_cut), (self._joint,)

    def _states(self, rng: PhiloxState | None) -> list[Any]:
        return self._joint.signature.flat_states(None if rng is None else (rng, rng))[:2]

    @property
    def saved_bytes(self) -> int:
        """Memory that what is saved takes between the two passes, primals not counted, for the sizes traced."""
        return sum(entry.num_bytes for entry in self.saved if not entry.is_input)

    def __str__(self) -> str:
        """One line for each input, operation and output, and the list of what is saved."""
        lines = [table(self.graph, self.input_names, self.output_names)]
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

    _method = "forward_graph"

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
        signature = self._joint.signature
        results = self._compute(signature.tensors_of(primals), self._states(rng))
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

        Raises:
            TypeError: If a state is missing, or there is none to pass.
            ValueError: If there are too few or too many saved values, or they or the cotangents are not like those that
                were traced; see `JointGraph`.
        """
        signature = self._joint.signature
        results = self._compute(saved, signature.cotangents_of(tangents), self._states(rng))
        if not signature.has_states:
            return signature.join_gradients(results)
        return signature.join_gradients(results[:-2]), PhiloxState(*results[-2:])

    def _flat(self, saved: Sequence[Any], cotangents: list[Any], states: list[Any]) -> list[Any]:
        """Gradients and state."""
        joint, names = self._joint, [entry.name for entry in self.saved]
        symbols = _check_saved(saved, self._values, [joint.labels.get(name, name) for name in names])
        tangents = joint.signature.checked_cotangents(cotangents, joint.fakes, symbols, saved)
        # The forward state is an input of the joint graph too, and of this one if it is saved.
        inputs, values = [*joint.labels][len(joint.primal_names) :], [*tangents, *states, *states]
        given = dict(zip([*inputs, *names], [*values, *saved], strict=True))
        given |= {_SEED_INPUT: seed.target(*seed.args, **seed.kwargs) for seed in _seeds(joint)}  # noqa: B035 - at most one
        return run(self.module, [given[node.name] for node in self.graph.find_nodes(op="placeholder")])


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
        label = f"BackwardGraph: saved[{i}] ({labels[i]})"
        if isinstance(fake, torch.Tensor):
            require_tensor(label, x, fake.dtype)
            sizes = internals.bound_sizes(fake.shape, symbols)
            # Torch describes the workspace of a recurrent layer as empty, which it is not.
            if 0 not in sizes and not internals.sizes_fit(sizes, x):
                raise ShapeError(f"{label} must have shape {sizes}, got {list(x.shape)}.")
        elif isinstance(x, torch.Tensor):
            raise LeafError(f"{label} must be a size, got {type(x).__name__}.")
    return symbols


def _seeds(joint: Any) -> list[Any]:
    """The node that makes the cotangent 1 of the loss, if the graph does."""
    return [node for node in joint.graph.nodes if node.name == SEED] if joint.signature.has_seed else []


def _for_partitioner(joint: Any) -> fx.GraphModule:
    """A copy whose placeholders tell torch's partitioner what they are."""
    graph = copy.deepcopy(joint.graph)
    targets = [f"primals_{i}" for i, _ in enumerate(joint.primal_names)]
    targets += [f"tangents_{i}" for i, _ in enumerate(joint.tangent_names)]
    targets += ["primals_seed", "primals_offset", "bwd_seed_0", "bwd_base_offset_0"] * joint.signature.has_states
    for node, target in zip(graph.find_nodes(op="placeholder"), targets, strict=True):
        node.target = target
    seeds = {node.name for node in _seeds(joint)}
    for seed in [node for node in graph.nodes if node.name in seeds]:
        # What depends on it is the backward pass.
        with graph.inserting_before(seed):
            new = graph.placeholder(_SEED_INPUT)
        new.meta = dict(seed.meta)
        seed.replace_all_uses_with(new)
        graph.erase_node(seed)
    return fx.GraphModule(joint.module, graph)


def split(joint: Any, *, min_cut: bool) -> tuple[ForwardGraph, BackwardGraph]:
    """Forward and backward graph of a joint graph."""
    num = joint.signature.num_forward_outputs
    forward, backward = internals.partition(_for_partitioner(joint), num, min_cut=min_cut)
    nodes = forward.graph.output_node().args[0][num:]
    values = [node.meta["val"] for node in nodes]
    saved, outputs = _described(forward, nodes), joint.output_labels()
    return (
        ForwardGraph(forward, [*outputs[:num], *(entry.name for entry in saved)], saved, values, joint, min_cut),
        BackwardGraph(backward, outputs[num:], saved, values, joint, min_cut),
    )


def _described(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[Saved]:
    inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    of_inputs = {internals.num_bytes(x)[0] for x in inputs if isinstance(x, torch.Tensor)}
    seen: set[int] = set()
    entries = []
    for node in nodes:
        value, line = node.meta["val"], line_of(node)
        if not isinstance(value, torch.Tensor):
            entries.append(Saved(node.name, (), None, 0, False, line))
            continue
        storage, size = internals.num_bytes(value)
        is_input = node.op == "placeholder" or storage in of_inputs
        size = 0 if storage in seen else size
        entries.append(Saved(node.name, tuple(value.shape), value.dtype, size, is_input, line))
        seen.add(storage)
    return entries
