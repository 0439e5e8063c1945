"""A traced joint function: `JointGraph`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree

from primitives.core.errors import MutationError, ShapeError
from primitives.tracing import torch_private as internals
from primitives.tracing.graph.partition import BackwardGraph, ForwardGraph, Runnable, run, split
from primitives.tracing.graph.rewriting import is_backward, packed, unpacked, writing_nodes
from primitives.tracing.graph.summary import table
from primitives.tracing.memory import refuse_sharing, sharing
from primitives.tracing.random.rng import PhiloxState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, fx

    from primitives.tracing.graph.signature import Signature

__all__ = ["JointGraph"]


class JointGraph(Runnable):
    """Forward and backward pass of a function as one graph; made by `trace_joint`.

    It can be pickled, with `torch.save` too, and copied.

    Attributes:
        module: The graph as a function of flat tensors: primals, cotangents and, if there are any, the seed and offset
            of the forward and of the backward state. It returns outputs, then gradients, each with a state behind
            them.
        graph: The nodes.
        signature: What its inputs and outputs mean.
        primal_names: Key path of each tensor among the primals, as code; placeholders are named after them.
        tangent_names: Key path of each cotangent.
        output_names: Key path of each output that the graph computes.
        gradient_names: Name of each gradient: that of its primal, with `_bar`.
        mutated_names: Key paths of the primals that the function writes to, in the order of their new values in the
            output.
        in_treespec: Structure of the primals, and of the gradients.
        out_treespec: Structure of the output, and of the cotangents.
        labels: The key path for which each placeholder stands.
        fakes: Their values when traced, without memory.
    """

    def __init__(self, module: fx.GraphModule, signature: Signature, mode: Any, *, functionalize: bool) -> None:
        super().__init__(module)
        self.signature = signature
        self.primal_names, self.tangent_names = signature.primal_names, signature.tangent_names
        self.output_names, self.gradient_names = signature.output_names, signature.gradient_names
        self.mutated_names = signature.primals.labels(signature.mutated)
        self.in_treespec = optree.tree_structure(signature.primals.skeleton)
        self.out_treespec = optree.tree_structure(signature.outs.skeleton)
        placeholders = self.graph.find_nodes(op="placeholder")
        self._states = [f"rng[{i}].{field}" for i in range(2) for field in PhiloxState._fields] * signature.has_states
        names = [*self.primal_names, *self.tangent_names, *self._states]
        self.labels = {node.name: name for node, name in zip(placeholders, names, strict=True)}
        self.fakes = [node.meta["val"] for node in placeholders]
        self._mode = mode
        self._functionalize = functionalize
        self._sizes_known_to_fit: set[tuple] = set()
        self._parts: dict[bool, tuple[ForwardGraph, BackwardGraph]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, and copied by `copy.deepcopy`: nodes with their values, lines and constants."""
        data, constants = packed(self.module)
        return {
            "data": data,
            "constants": constants,
            "signature": self.signature,
            "symbolic": self._mode.shape_env is not None,
            "functionalize": self._functionalize,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The graph again, in a mode of its own."""
        mode = internals.fake_mode(symbolic=state["symbolic"])
        module = unpacked(state["data"], state["constants"], mode)
        self.__init__(module, state["signature"], mode, functionalize=state["functionalize"])

    def __call__(self, primals: tuple, tangents: Any = None, *, rng: Any = None) -> tuple:
        """Run the graph.

        Args:
            primals: Tuple of the arguments of the function, like those that were traced.
            tangents: Cotangents, in the structure of the output; `None` for one of several outputs means zero.
            rng: With `functionalize_rng`, the pair of random states for forward and backward pass.

        Returns:
            `(outs, grads)`, and with `functionalize_rng` the pair of states, advanced, behind them.

        Raises:
            TreeError: If a structure is not the one that was traced, or a constant differs.
            LeafError: If a leaf is no tensor where one was traced, or a cotangent is given that was not.
            ShapeError: If a size differs that was not to be dynamic, or one that the graph is not valid for.
            DtypeError: If a dtype differs.
            DeviceError: If a kind of device differs.
            MutationError: If a primal that the function writes to overlaps another in memory.
        """
        signature = self.signature
        results = self._compute(
            signature.tensors_of(primals), signature.cotangents_of(tangents), signature.flat_states(rng)
        )
        num = signature.num_forward_outputs
        forward, backward = results[:num], results[num:]
        if not signature.has_states:
            return signature.join_outs(forward), signature.join_gradients(backward)
        states = PhiloxState(*forward[-2:]), PhiloxState(*backward[-2:])
        return signature.join_outs(forward[:-2]), signature.join_gradients(backward[:-2]), states

    def _flat(self, primals: list[Any], cotangents: list[Any], states: list[Tensor]) -> list[Any]:
        """What the graph computes: outputs, forward state, gradients, backward state."""
        args = self.checked_primals(primals)
        symbols = internals.bindings(self.fakes[: len(args)], args)
        args += self.signature.checked_cotangents(cotangents, self.fakes, symbols, args)
        if not self._functionalize:
            overlapping = sharing(args, self.signature.alone)
            refuse_sharing("JointGraph", [(*self.primal_names, *self.tangent_names)[i] for i in overlapping])
        return run(self.module, [*args, *states])

    def checked_primals(self, given: list[Any]) -> list[Any]:
        """The tensors among the primals, checked; in the order of `primal_names`."""
        fakes = self.fakes[: len(self.signature.places)]
        tensors = self.signature.checked_primals(given, fakes, in_place=not self._functionalize)
        # As numbers: where `torch.compile` has symbols, it takes those of the call.
        sizes = tuple(tuple(int(n) for n in x.shape) for x in tensors)
        if sizes not in self._sizes_known_to_fit:
            if not internals.guards_hold(self._mode, fakes, tensors):
                raise self._misfit(fakes, tensors)
            self._sizes_known_to_fit.add(sizes)
        return tensors

    def _misfit(self, fakes: Sequence[Any], tensors: Sequence[Any]) -> ShapeError:
        got, traced = (
            ", ".join(f"{name}: {[*x.shape]}" for name, x in zip(self.primal_names, values, strict=True))
            for values in (tensors, fakes)
        )
        failing = internals.failing_guards(self._mode, internals.bindings(fakes, tensors))
        conditions = f", under {', '.join(failing)}, which does not hold" if failing else ""
        return ShapeError(
            f"JointGraph: the graph was made for {traced} (a symbol is one size wherever it stands, and at least 2)"
            f"{conditions}, got {got}."
        )

    # Its parts.

    def forward_graph(self, *, min_cut: bool = True) -> ForwardGraph:
        """The forward pass: `(primals) -> (outs, saved)`.

        Args:
            min_cut: Whether to save as little as torch's min-cut partitioner finds, and compute again in the backward
                pass what costs no more than a pass over memory: elementwise operators, views, normalizations,
                dropout, but no matrix product, convolution or large reduction; or to save whatever the backward
                pass uses. The bits are the same.

        Returns:
            The graph, which lists what it saves, with bytes.

        Raises:
            MutationError: If the graph writes in place, as one traced with `functionalize=False` may.
        """
        return self._split(min_cut)[0]

    def backward_graph(self, *, min_cut: bool = True) -> BackwardGraph:
        """The backward pass: `(saved, tangents) -> grads`, with what the forward graph of the same `min_cut` saved.

        Args:
            min_cut: As in `forward_graph`.

        Returns:
            The graph.

        Raises:
            MutationError: If the graph writes in place.
        """
        return self._split(min_cut)[1]

    def _split(self, min_cut: bool) -> tuple[ForwardGraph, BackwardGraph]:
        if min_cut not in self._parts:
            writing = writing_nodes(self.graph)
            if writing and not self._functionalize:
                raise MutationError(
                    f"JointGraph: a graph that writes in place cannot be split, and {writing[0]} does. Trace it with "
                    "functionalize=True."
                )
            self._parts[min_cut] = split(self, min_cut=min_cut)
        return self._parts[min_cut]

    # How it looks.

    def __str__(self) -> str:
        """One line for each input, operation and output."""
        return table(self.graph, [*self.labels.values()], self.output_labels())

    def __repr__(self) -> str:
        """How much there is of what."""
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        backward = sum(map(is_backward, calls))
        return (
            f"JointGraph({len(self.primal_names)} primals, {len(self.tangent_names)} tangents -> "
            f"{len(self.output_names)} outputs, {len(self.gradient_names)} gradients; {len(calls) - backward} forward "
            f"and {backward} backward operations)"
        )

    def output_labels(self) -> list[str]:
        """What the outputs of the graph are called, in order."""
        return [*self.output_names, *self._states[:2], *self.gradient_names, *self._states[2:]]
