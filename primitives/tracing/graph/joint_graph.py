"""A traced joint function: `JointGraph`."""

from __future__ import annotations

import functools
import pathlib
import uuid
from typing import TYPE_CHECKING, Any

import torch

from primitives.core.errors import MutationError, ShapeError
from primitives.tracing import torch_private as internals
from primitives.tracing.errors import refuse_reverse_mode
from primitives.tracing.graph.draw import svg_of
from primitives.tracing.graph.partition import BackwardGraph, ForwardGraph, split
from primitives.tracing.graph.rewriting import SEED, is_backward, packed, unpacked, writing_nodes
from primitives.tracing.graph.summary import table
from primitives.tracing.memory import refuse_sharing, sharing
from primitives.tracing.random.rng import PhiloxState

if TYPE_CHECKING:
    from collections.abc import Sequence

    import optree
    from torch import fx

    from primitives.tracing.graph.signature import Signature

__all__ = ["JointGraph"]


class JointGraph:
    """Forward and backward pass of a function as one graph; made by `trace_joint`.

    It can be pickled, with `torch.save` too, and copied.

    Attributes:
        module: The graph as a function of flat tensors: primals, cotangents and, if there are any, the seed and offset
            of the forward and of the backward state. It returns outputs, then gradients, each with a state behind
            them.
        signature: What its inputs and outputs mean.
        identity: What tells it from other traces, and is the same for its copies.
    """

    def __init__(
        self, module: fx.GraphModule, signature: Signature, mode: Any, *, functionalize: bool, identity: str = ""
    ) -> None:
        self.module = module
        self.signature = signature
        self._mode = mode
        self.identity = identity or uuid.uuid4().hex
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
            "identity": self.identity,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The graph again, in a mode of its own."""
        mode = internals.fake_mode(symbolic=state["symbolic"])
        module = unpacked(state["data"], state["constants"], mode)
        options = {key: state[key] for key in ("functionalize", "identity")}
        self.__init__(module, state["signature"], mode, **options)

    # What it is called with.

    @property
    def graph(self) -> fx.Graph:
        """The nodes."""
        return self.module.graph

    @property
    def primal_names(self) -> tuple[str, ...]:
        """Key path of each tensor among the primals, as code; placeholders are named after them."""
        return self.signature.primal_names

    @property
    def tangent_names(self) -> tuple[str, ...]:
        """Key path of each cotangent, as code."""
        return self.signature.tangent_names

    @property
    def output_names(self) -> tuple[str, ...]:
        """Key path of each output that the graph computes."""
        return self.signature.output_names

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Name of each gradient."""
        return self.signature.gradient_names

    @property
    def mutated_names(self) -> tuple[str, ...]:
        """Key paths of the primals that the function writes to, in the order of their new values in the output."""
        return self.signature.mutated_names

    @property
    def in_treespec(self) -> optree.PyTreeSpec:
        """Structure of the primals, and of the gradients."""
        return self.signature.primals.treespec

    @property
    def out_treespec(self) -> optree.PyTreeSpec:
        """Structure of the output, and of the cotangents."""
        return self.signature.outs.treespec

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
            MissingRuleError: If a caller differentiates in an argument by reverse mode (`grad`, `jacrev`); `vmap` and
                `jvp` go through.
        """
        args = self.flat_primals(primals)
        symbols = internals.bindings(self._described(0, len(args)), args)
        args += self.flat_tangents(tangents, symbols, args)
        if not self._functionalize:
            overlapping = sharing(args, self.signature.alone)
            refuse_sharing("JointGraph", [(*self.primal_names, *self.tangent_names)[i] for i in overlapping])
        args += self.signature.flat_states(rng)
        with torch.no_grad():
            results = self.module(*args)
        num = self.signature.num_forward_outputs
        forward, backward = results[:num], results[num:]
        if not self.signature.has_states:
            return self.signature.join_outs(forward), self.signature.join_gradients(backward)
        states = PhiloxState(*forward[-2:]), PhiloxState(*backward[-2:])
        return self.signature.join_outs(forward[:-2]), self.signature.join_gradients(backward[:-2]), states

    def flat_primals(self, primals: tuple) -> list[Any]:
        """The tensors of `primals`, checked; in the order of `primal_names`."""
        fakes = self._described(0, len(self.signature.places))
        tensors = self.signature.flat_primals(primals, fakes, in_place=not self._functionalize)
        refuse_reverse_mode("JointGraph", tensors)
        sizes = tuple(x.shape for x in tensors)
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

    def flat_tangents(self, tangents: Any, symbols: dict[Any, int], others: Sequence[Any]) -> list[Any]:
        """The cotangents, checked; in the order of `tangent_names`.

        Args:
            tangents: The tree of them; `None` in it stands for zero.
            symbols: What the symbols in sizes stand for.
            others: Other inputs, on whose devices zeros are made.
        """
        start = len(self.signature.places)
        described = self._described(start, start + len(self.tangent_names))
        found = self.signature.flat_tangents(tangents, described, symbols, others)
        refuse_reverse_mode("JointGraph", found)
        return found

    def seeds(self) -> list[Any]:
        """The cotangent 1 of the loss, if the graph makes it."""
        nodes = [node for node in self.graph.nodes if node.name == SEED] if self.signature.has_seed else []
        return [node.target(*node.args, **node.kwargs) for node in nodes]

    @functools.cached_property
    def _placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    def _described(self, start: int, stop: int) -> list[Any]:
        return [node.meta["val"] for node in self._placeholders[start:stop]]

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

    @property
    def code(self) -> str:
        """The graph as Python code."""
        return self.module.code.strip()

    def __str__(self) -> str:
        """One line for each input, operation and output."""
        return table(self.module, dict(zip(self._placeholders, self._labels(), strict=True)), self.output_labels())

    def __repr__(self) -> str:
        """How much there is of what."""
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        backward = sum(map(is_backward, calls))
        return (
            f"JointGraph({len(self.primal_names)} primals, {len(self.tangent_names)} tangents -> "
            f"{len(self.output_names)} outputs, {len(self.gradient_names)} gradients; {len(calls) - backward} forward "
            f"and {backward} backward operations)"
        )

    def _labels(self) -> list[str]:
        states = ["rng[0].seed", "rng[0].offset", "rng[1].seed", "rng[1].offset"] * self.signature.has_states
        return [*self.primal_names, *self.tangent_names, *states]

    def output_labels(self) -> list[str]:
        """What the outputs of the graph are called, in order."""
        forward, backward = (
            [f"rng[{i}].{field}" for field in PhiloxState._fields] * self.signature.has_states for i in range(2)
        )
        return [*self.output_names, *forward, *self.gradient_names, *backward]

    def to_svg(self) -> str:
        """The graph as a picture: forward pass blue, backward pass orange, what is kept between them drawn thick."""
        return svg_of(self.graph, self._labels(), self.output_labels())

    def draw(self, path: str | pathlib.Path) -> None:
        """Write `to_svg()` to a file.

        Args:
            path: Name of the file.
        """
        pathlib.Path(path).write_text(self.to_svg(), encoding="utf-8")
