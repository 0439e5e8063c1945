"""Trees at the boundary of a graph of flat tensors: what goes in, what comes out, and their names."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

from primitives._core.errors import LeafError, TreeError, check_arguments
from primitives.custom.trees.table import content
from primitives.tracing._leaves import Leaves
from primitives.tracing._random.rng import PhiloxState

_FUNCTION = "JointGraph"


@dataclasses.dataclass
class Signature:
    """The meaning of the flat inputs and outputs of a joint graph; filled while it is traced.

    Attributes:
        primals: Leaves of the primals, with `None` in the places of tensors.
        places: Places of the tensors among them.
        has_states: Whether random states are passed through.
        outs: Leaves of the output: the constants themselves, `None` for what the graph computes.
        computed: Places of what the graph computes among the leaves of the output.
        with_cotangent: Places of the leaves of the output that have a cotangent among the inputs.
        gradient_places: Places of the primals that get a gradient.
        mutated: Places of the primals whose new values are outputs.
        alone: Numbers of the tensors among the primals that are written to, or copies of which are, and must share
            memory with no other.
    """

    primals: Leaves
    places: tuple[int, ...]
    has_states: bool
    outs: Leaves = dataclasses.field(init=False)
    computed: tuple[int, ...] = ()
    with_cotangent: tuple[int, ...] = ()
    gradient_places: tuple[int, ...] = ()
    mutated: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()

    @property
    def num_forward_outputs(self) -> int:
        """Number of outputs of the graph that belong to the forward pass."""
        return len(self.computed) + 2 * self.has_states

    def tensors_of(self, primals: Any) -> list[Any]:
        """The leaves that are tensors in the graph; the others must be the constants that were traced."""
        check_arguments(_FUNCTION, "primals", primals)
        leaves = self.primals.aligned(_FUNCTION, "primals", primals, "the traced primals")
        for i, (leaf, constant) in enumerate(zip(leaves, self.primals.values, strict=True)):
            if i not in self.places and not _same(leaf, constant):
                label = self.primals.label(i)
                raise TreeError(f"{_FUNCTION}: {label} must be the traced constant {constant!r}, got {leaf!r}.")
        given = [leaves[place] for place in self.places]
        if torch.compiler.is_dynamo_compiling():
            # Once inside, nothing tells a leaf from what has a history.
            return [x.detach() if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf else x for x in given]
        return given

    def cotangents_of(self, cotangents: Any) -> list[Any]:
        """The cotangents in `cotangents`, with 0 for one of several that is `None`."""
        if cotangents is None and not self.with_cotangent:
            return []
        pieces = self.outs.cotangents(_FUNCTION, cotangents, self.with_cotangent)
        absent = None if cotangents is None else 0
        given = [pieces[place] for place in self.with_cotangent]
        if any(isinstance(x, int) for x in given):
            raise LeafError(f"{_FUNCTION}: cotangents must be tensors or None, got {cotangents!r}.")
        return [absent if x is None else x for x in given]

    def flat_states(self, rng: Any) -> list[Tensor]:
        """Seeds and offsets of the states that are passed."""
        if not self.has_states:
            if rng is not None:
                raise TypeError(f"{_FUNCTION}: the graph was traced without functionalize_rng and takes no rng.")
            return []
        if not isinstance(rng, (tuple, list)) or [type(state) for state in rng] != [PhiloxState] * 2:
            raise TypeError(f"{_FUNCTION}: rng must be a pair of PhiloxState, (forward, backward), got {rng!r}.")
        return [part for state in rng for part in state]

    def joined_outs(self, values: list[Any]) -> tuple[Any, tuple[PhiloxState, ...]]:
        """The output, of what the graph computed, and the state behind it, if there is one."""
        return _joined(self.outs, self.computed, values)

    def joined_gradients(self, values: list[Any]) -> tuple[Any, tuple[PhiloxState, ...]]:
        """The gradients, in the structure of the primals, and the state behind them, if there is one."""
        none = self.primals._replace(values=[None] * len(self.primals.values))
        return _joined(none, self.gradient_places, values)


def _joined(leaves: Leaves, places: tuple[int, ...], values: list[Any]) -> tuple[Any, tuple[PhiloxState, ...]]:
    state = values[len(places) :]
    return leaves.filled(places, values[: len(places)]), (PhiloxState(*state),) if state else ()


def _same(x: Any, y: Any) -> bool:
    """Whether two constants are of one type and equal; numbers that are none, and arrays with them, may be so."""
    if x is y or type(x) is not type(y):
        return x is y
    with contextlib.suppress(TypeError):
        return content(x) == content(y)
    try:
        same = (x == y) | ((x != x) & (y != y))
        return bool(same.all() and (x.dtype, x.shape) == (y.dtype, y.shape) if hasattr(same, "all") else same)
    except (RuntimeError, TypeError, ValueError):
        # Some types do not tell.
        return False
