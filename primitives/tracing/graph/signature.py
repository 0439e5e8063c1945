"""Trees at the boundary of a graph of flat tensors: what goes in, what comes out, and their names."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from primitives.core.errors import DeviceError, LeafError, MutationError, ShapeError, TreeError
from primitives.tracing import torch_private as internals
from primitives.tracing.leaves import require_tensor
from primitives.tracing.memory import refuse_sharing, sharing
from primitives.tracing.random.rng import PhiloxState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from primitives.tracing.leaves import Leaves

__all__ = ["Signature"]

_FUNCTION = "JointGraph"


@dataclasses.dataclass(frozen=True)
class Signature:
    """What the flat inputs and outputs of a joint graph mean.

    Attributes:
        primals: Leaves of the primals, with `None` in the places of tensors.
        places: Places of the tensors among them.
        outs: Leaves of the output: the constants themselves, `None` for what the graph computes.
        computed: Places of what the graph computes among the leaves of the output.
        with_tangent: Places of the leaves of the output that have a cotangent among the inputs.
        gradient_places: Places of the primals that get a gradient.
        mutated: Places of the primals whose new values are outputs.
        alone: Numbers of the tensors among the primals that are written to, and must share memory with no other.
        has_states: Whether random states are passed through.
        has_seed: Whether the cotangent 1 of a loss is made inside.
    """

    primals: Leaves
    places: tuple[int, ...]
    outs: Leaves
    computed: tuple[int, ...]
    with_tangent: tuple[int, ...]
    gradient_places: tuple[int, ...]
    mutated: tuple[int, ...]
    alone: tuple[int, ...]
    has_states: bool
    has_seed: bool

    @property
    def primal_names(self) -> tuple[str, ...]:
        """Key path of each tensor among the primals, as code."""
        return self.primals.labels(self.places)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Key path of each output that the graph computes, as code."""
        return self.outs.labels(self.computed)

    @property
    def tangent_names(self) -> tuple[str, ...]:
        """Key path of each cotangent, as code."""
        return self.outs._replace(roots="tangents").labels(self.with_tangent)

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Name of each gradient: that of its primal, with `_bar`."""
        return tuple(f"{name}_bar" for name in self.primals.labels(self.gradient_places))

    @property
    def num_forward_outputs(self) -> int:
        """Number of outputs of the graph that belong to the forward pass."""
        return len(self.computed) + 2 * self.has_states

    # Trees to flat inputs: first the structure, which `torch.compile` follows, then what it does not look into.

    def tensors_of(self, primals: Any) -> list[Any]:
        """The leaves that are tensors in the graph; the others must be the constants that were traced."""
        if not isinstance(primals, tuple):
            raise TypeError(f"{_FUNCTION}: primals must be the tuple of the arguments, got {type(primals).__name__}.")
        leaves = self.primals.aligned(_FUNCTION, "primals", primals, "the traced primals")
        for i, (leaf, constant) in enumerate(zip(leaves, self.primals.values, strict=True)):
            if i not in self.places and (type(leaf) is not type(constant) or _differ(leaf, constant)):
                raise TreeError(
                    f"{_FUNCTION}: {self.primals.label(i)} must be the traced constant {constant!r}, got {leaf!r}."
                )
        given = [leaves[place] for place in self.places]
        if torch.compiler.is_compiling():
            # Once inside, nothing tells a leaf from what has a history.
            return [x.detach() if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf else x for x in given]
        return given

    def cotangents_of(self, tangents: Any) -> list[Any]:
        """The cotangents in `tangents`, with 0 for one of several that is `None`."""
        if tangents is None and not self.with_tangent:
            return []
        pieces = self.outs.aligned(_FUNCTION, "tangents", tangents, "outs")
        for place, piece in enumerate(pieces):
            if piece is not None and place not in self.with_tangent:
                label = self.outs._replace(roots="tangents").label(place)
                raise LeafError(f"{_FUNCTION}: {label} must be None: the graph was traced without it.")
        absent = None if tangents is None else 0
        return [absent if pieces[place] is None else pieces[place] for place in self.with_tangent]

    def checked_primals(self, given: Sequence[Any], fakes: Sequence[Tensor], *, in_place: bool) -> list[Tensor]:
        """Tensors that are checked to be like those that were traced, sizes that may differ aside.

        Args:
            given: What `tensors_of` gave.
            fakes: The tensors that were traced.
            in_place: Whether the graph writes to those that the function writes to.
        """
        tensors = []
        for i, (x, fake) in enumerate(zip(given, fakes, strict=True)):
            tensors.append(_checked(self.primals, self.places[i], x, fake, internals.bound_sizes(fake.shape)))
            if in_place and i in self.alone and tensors[i] is not x:
                raise MutationError(
                    f"{_FUNCTION}: {self.primal_names[i]} is written to in place, so its axes must lie in memory in "
                    f"the order that was traced, got strides {list(x.stride())}. Trace it as it is, or with "
                    "functionalize=True."
                )
        if self.alone:
            # As given: a copy that was made for its strides shares nothing.
            refuse_sharing(_FUNCTION, [self.primal_names[i] for i in sharing(given, self.alone)])
        return tensors

    def checked_cotangents(
        self, given: Sequence[Any], fakes: Sequence[Any], symbols: dict[Any, int], others: Sequence[Any]
    ) -> list[Tensor]:
        """The cotangents, checked to be like those that were traced.

        Args:
            given: What `cotangents_of` gave; 0 stands for zero.
            fakes: The inputs that were traced.
            symbols: What the symbols in sizes stand for.
            others: Other inputs, on whose devices zeros are made.
        """
        named = self.outs._replace(roots="tangents")
        found = []
        for place, piece, fake in zip(self.with_tangent, given, fakes[len(self.places) :], strict=False):
            sizes = internals.bound_sizes(fake.shape, symbols)
            if isinstance(piece, int):
                found.append(_zeros(named.label(place), fake, sizes, others))
            else:
                found.append(_checked(named, place, piece, fake, sizes, viewable=True))
        return found

    def flat_states(self, rng: Any) -> list[Tensor]:
        """Seeds and offsets of the states that are passed."""
        if not self.has_states:
            if rng is not None:
                raise TypeError(f"{_FUNCTION}: the graph was traced without functionalize_rng and takes no rng.")
            return []
        states = tuple(rng) if isinstance(rng, (tuple, list)) else ()
        if len(states) != 2 or not all(isinstance(state, PhiloxState) for state in states):
            raise TypeError(f"{_FUNCTION}: rng must be a pair of PhiloxState, (forward, backward), got {rng!r}.")
        return [part for state in states for part in state]

    def join_outs(self, values: Sequence[Any]) -> Any:
        """The output, of what the graph computed."""
        leaves = list(self.outs.values)
        for place, value in zip(self.computed, values, strict=True):
            leaves[place] = value
        return self.outs.join(leaves)

    def join_gradients(self, values: Sequence[Tensor]) -> Any:
        """The gradients, in the structure of the primals."""
        leaves: list[Any] = [None] * len(self.primals.values)
        for place, value in zip(self.gradient_places, values, strict=True):
            leaves[place] = value
        return self.primals.join(leaves)


def _zeros(label: str, fake: Tensor, sizes: Sequence[int | None], others: Sequence[Any]) -> Tensor:
    known = [n for n in sizes if n is not None]
    if len(known) < len(sizes):
        raise LeafError(
            f"{_FUNCTION}: {label} must be a tensor, got None: nothing that is passed tells its size, "
            f"{list(fake.shape)}."
        )
    devices = [x.device for x in others if isinstance(x, torch.Tensor) and x.device.type == fake.device.type]
    return torch.zeros(known, dtype=fake.dtype, device=next(iter(devices), fake.device))


def _differ(x: Any, y: Any) -> bool:
    """Whether two constants of one type differ; numbers that are none, and arrays with them, may be the same."""
    if x is y:
        return False
    if any(getattr(x, name, None) != getattr(y, name, None) for name in ("dtype", "shape")):
        return True
    try:
        same = (x == y) | ((x != x) & (y != y))
        return not bool(same.all() if hasattr(same, "all") else same)
    except (RuntimeError, TypeError, ValueError):
        # Of some types there is no telling.
        return True


def _checked(
    leaves: Leaves, place: int, x: Any, fake: Tensor, sizes: Sequence[int | None], *, viewable: bool = False
) -> Tensor:
    """`x`, if it is like `fake`, a tensor of these sizes, and as the graph reads it.

    Args:
        leaves: What names it.
        place: Its place among these.
        x: What is passed.
        fake: What was traced.
        sizes: The sizes it must have, `None` for any.
        viewable: Whether it may have another shape.
    """
    if isinstance(x, torch.Tensor) and x.dtype == fake.dtype and x.device.type == fake.device.type:
        if viewable and not internals.sizes_fit(sizes, x) and sizes.count(None) <= 1:
            with contextlib.suppress(RuntimeError):
                x = x.view([-1 if n is None else n for n in sizes])
        if internals.sizes_fit(sizes, x):
            # Traced as plain memory, in which a lazy conjugate or negative is none.
            return _laid_out_like(x.resolve_conj().resolve_neg(), fake)
    label = f"{_FUNCTION}: {leaves.label(place)}"
    require_tensor(label, x, fake.dtype)
    if x.device.type != fake.device.type:
        raise DeviceError(f"{label} must be on {fake.device}, got {x.device}.")
    wanted = [fake.shape[i] if n is None else n for i, n in enumerate(sizes)]
    ways = "have shape" if not viewable else "be viewable as"
    raise ShapeError(f"{label} must {ways} {wanted}, got {list(x.shape)}.")


def _laid_out_like(x: Tensor, fake: Tensor) -> Tensor:
    """`x` with its axes in memory in the order that the graph was traced for."""
    order = internals.axis_order(fake)
    if order is None:
        return x
    strides, size = [0] * x.dim(), 1
    for axis in reversed(order):
        (traced,) = internals.bound_sizes(fake.stride()[axis : axis + 1])
        # An axis of one element may have any stride, and decides what can be viewed all the same.
        strides[axis] = traced if traced is not None and x.shape[axis] == 1 else size
        size *= max(int(x.shape[axis]), 1)
    if list(x.stride()) == strides:
        return x
    memory = x.permute(order).contiguous()
    return memory.as_strided(x.shape, strides, memory.storage_offset())
