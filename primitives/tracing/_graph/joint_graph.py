"""A traced joint function: `JointGraph`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from primitives._core.errors import ShapeError
from primitives.tracing import _torch_private as torch_private
from primitives.tracing._graph.partition import COTANGENT, PRIMAL, STATE, BackwardGraph, ForwardGraph, Graph, split
from primitives.tracing._graph.signature import Signature
from primitives.tracing._memory import refuse_sharing
from primitives.tracing._random.rng import PhiloxState
from primitives.tracing._sizes import failing_guards, num_guards


class JointGraph(Graph):
    """Forward and backward pass of a function as one graph; made by `trace_joint`.

    It can be pickled, with `torch.save` too, and copied.

    Attributes:
        module: The graph as a function of flat tensors: primals, cotangents and, if there are any, the seed and offset
            of the forward and of the backward state. It returns outputs, then gradients, each with a state behind
            them.
        graph: The nodes.
        signature: The meaning of its inputs and outputs.
        primal_names: Key path of each tensor among the primals, as code; placeholders are named after them.
        cotangent_names: Key path of each cotangent.
        output_names: Key path of each output that the graph computes.
        gradient_names: Name of each gradient: that of its primal, with `_bar`.
        mutated_names: Key paths of the primals that the function writes to, in the order of their new values in the
            output.
        in_treespec: Structure of the primals, and of the gradients.
        out_treespec: Structure of the output, and of the cotangents.
    """

    def __init__(self, module: fx.GraphModule, signature: Signature, mode: Any) -> None:
        self.signature: Signature = signature
        self._mode = mode
        self.primal_names: tuple[str, ...] = signature.primals.labels(signature.places)
        self.cotangent_names: tuple[str, ...] = signature.outs._replace(roots="cotangents").labels(
            signature.with_cotangent
        )
        self.output_names: tuple[str, ...] = signature.outs.labels(signature.computed)
        self.gradient_names: tuple[str, ...] = tuple(
            f"{name}_bar" for name in signature.primals.labels(signature.gradient_places)
        )
        self.mutated_names: tuple[str, ...] = signature.primals.labels(signature.mutated)
        self.in_treespec: Any = signature.primals.treespec
        self.out_treespec: Any = signature.outs.treespec
        states = [f"rng[{i}].{field}" for i in range(2) for field in PhiloxState._fields] * signature.has_states
        kinds = {PRIMAL: self.primal_names, COTANGENT: self.cotangent_names, STATE: states}
        inputs = [(label, kind) for kind, labels in kinds.items() for label in labels]
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        self.inputs: dict[str, tuple[str, str]] = dict(zip(names, inputs, strict=True))
        outputs = [*self.output_names, *states[:2], *self.gradient_names, *states[2:]]
        super().__init__(module, self.inputs, outputs, self)
        # Values of the symbols in sizes that the graph is valid for.
        self._fitting: set[tuple] = set()
        self._parts: dict[bool, tuple[ForwardGraph, BackwardGraph]] = {}

    def __getstate__(self) -> tuple[Any, ...]:
        """The state that is pickled, and copied by `copy.deepcopy`: nodes with their values, lines and constants."""
        return *torch_private.dumped(self.module), self.signature, self._mode.shape_env is not None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        data, constants, signature, symbolic = state
        mode = torch_private.fake_mode(symbolic=symbolic)
        self.__init__(torch_private.loaded(data, constants, mode), signature, mode)

    def __call__(self, primals: tuple[Any, ...], cotangents: Any = None, *, rng: Any = None) -> tuple[Any, ...]:
        """Run the graph.

        Args:
            primals: Tuple of the arguments of the function, like those that were traced.
            cotangents: Cotangents, in the structure of the output; `None` for one of several outputs means zero.
            rng: With `functionalize_rng`, the pair of random states for forward and backward pass.

        Returns:
            `(outs, grads)`, and with `functionalize_rng` the pair of states, advanced, behind them.

        Raises:
            TreeError: If a structure is not the one that was traced, or a constant differs.
            LeafError: If a leaf is not a tensor where one was traced, or a cotangent is given that was not.
            ShapeError: If a size differs that was not to be dynamic, or one that the graph is not valid for.
            DtypeError: If a dtype differs.
            DeviceError: If a kind of device differs.
            MutationError: If a primal that the function writes to overlaps another in memory.
        """
        signature = self.signature
        results = self._compute(
            [*signature.tensors_of(primals), *signature.cotangents_of(cotangents), *signature.flat_states(rng)]
        )
        outs, forward_state = signature.joined_outs(results[: signature.num_forward_outputs])
        bars, backward_state = signature.joined_gradients(results[signature.num_forward_outputs :])
        return (outs, bars, (*forward_state, *backward_state)) if signature.has_states else (outs, bars)

    def require_fit(self, primals: list[Tensor], symbols: dict[Any, int]) -> None:
        """Raise where the graph is not valid for these primals, and what the symbols in their sizes stand for."""
        refuse_sharing("JointGraph", self.primal_names, primals, self.signature.alone)
        # A compiler may have assumed more since.
        known = num_guards(self._mode), *symbols.values()
        failing = [] if known in self._fitting else failing_guards(self._mode, symbols)
        if failing:
            got = ", ".join(f"{name}: {[*x.shape]}" for name, x in zip(self.primal_names, primals, strict=True))
            raise ShapeError(
                f"JointGraph: the graph is valid under {' and '.join(failing)}, which does not hold where {symbols}, "
                f"got {got}."
            )
        self._fitting.add(known)

    def forward_graph(self, *, min_cut: bool = True) -> ForwardGraph:
        """The forward pass: `(primals) -> (outs, saved)`.

        Args:
            min_cut: Whether to save as little as torch's min-cut partitioner finds, and compute again in the backward
                pass what costs no more than a pass over memory: elementwise operators, views, normalizations,
                dropout, but no matrix product, convolution or large reduction; or to save whatever the backward
                pass uses. The bits are the same.

        Returns:
            The graph, which lists what it saves, with bytes.
        """
        return self._split(min_cut)[0]

    def backward_graph(self, *, min_cut: bool = True) -> BackwardGraph:
        """The backward pass: `(saved, cotangents) -> grads`, with what the forward graph of the same `min_cut` saved.

        Args:
            min_cut: As in `forward_graph`.

        Returns:
            The graph.
        """
        return self._split(min_cut)[1]

    def _split(self, min_cut: bool) -> tuple[ForwardGraph, BackwardGraph]:
        if min_cut not in self._parts:
            self._parts[min_cut] = split(self, min_cut=min_cut)
        return self._parts[min_cut]
