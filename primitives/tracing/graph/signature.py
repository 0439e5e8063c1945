"""Trees at the boundary of a graph of flat tensors: what goes in, what comes out, and their names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import optree
import torch

from primitives.core.errors import DeviceError, DtypeError, LeafError, MutationError, ShapeError, TreeError
from primitives.core.trees.overlay import align
from primitives.tracing import torch_private as internals
from primitives.tracing.joint.create import detached
from primitives.tracing.memory import refuse_sharing, sharing
from primitives.tracing.random.rng import PhiloxState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from primitives.tracing.joint.create import Leaves

__all__ = ["Signature"]

_OPTIONS: dict[str, Any] = {"namespace": "", "is_leaf": None}
_FUNCTION = "JointGraph"


@dataclasses.dataclass(frozen=True)
class Signature:
    """What the flat inputs and outputs of a joint graph mean.

    Attributes:
        primals: Leaves of the primals, with `None` in the places of tensors.
        places: Places of the tensors among them.
        primal_names: Key path of each tensor, as code.
        outs: Leaves of the output: the constants themselves, `None` for what the graph computes.
        computed: Places of what the graph computes among the leaves of the output.
        output_names: Key path of each of these, as code.
        taken: Whether each leaf of the output takes a cotangent.
        with_tangent: Places of the leaves of the output that have a cotangent among the inputs.
        gradient_places: Places of the primals that get a gradient.
        mutated: Places of the primals that the function writes to.
        alone: Numbers of the tensors among the primals that must share memory with no other.
        has_states: Whether random states are passed through.
        has_seed: Whether the cotangent 1 of a loss is made inside.
    """

    primals: Leaves
    places: tuple[int, ...]
    primal_names: tuple[str, ...]
    outs: Leaves
    computed: tuple[int, ...]
    output_names: tuple[str, ...]
    taken: tuple[bool, ...]
    with_tangent: tuple[int, ...]
    gradient_places: tuple[int, ...]
    mutated: tuple[int, ...]
    alone: tuple[int, ...]
    has_states: bool
    has_seed: bool

    @property
    def tangent_names(self) -> tuple[str, ...]:
        """Key path of each cotangent, as code."""
        tangents = self.outs._replace(root="tangents")
        return tuple(tangents.label(i) for i in self.with_tangent)

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Name of each gradient: that of its primal, with `_bar`."""
        names = dict(zip(self.places, self.primal_names, strict=True))
        return tuple(f"{names[i]}_bar" for i in self.gradient_places)

    @property
    def mutated_names(self) -> tuple[str, ...]:
        """Key path of each primal that is written to."""
        names = dict(zip(self.places, self.primal_names, strict=True))
        return tuple(names[i] for i in self.mutated)

    @property
    def num_forward_outputs(self) -> int:
        """Number of outputs of the graph that belong to the forward pass."""
        return len(self.computed) + 2 * self.has_states

    def flat_primals(self, primals: Any, fakes: Sequence[Tensor], *, in_place: bool) -> list[Tensor]:
        """The tensors of `primals`, checked to be like those that were traced, sizes that may differ aside.

        Args:
            primals: What the graph is called with.
            fakes: The tensors that were traced.
            in_place: Whether the graph writes to those that the function writes to.
        """
        if not isinstance(primals, tuple):
            raise TypeError(f"{_FUNCTION}: primals must be the tuple of the arguments, got {type(primals).__name__}.")
        like = list(self.primals.values)
        for place, fake in zip(self.places, fakes, strict=True):
            like[place] = fake
        leaves = align(_FUNCTION, "primals", primals, "the traced primals", self.primals.join(like), _OPTIONS)
        traced = dict(zip(self.places, zip(self.primal_names, fakes, strict=True), strict=True))
        tensors = []
        for i, (leaf, constant) in enumerate(zip(leaves, self.primals.values, strict=True)):
            if i in traced:
                name, fake = traced[i]
                tensors.append(_checked(name, leaf, fake, [internals.fixed_size(n) for n in fake.shape]))
            elif type(leaf) is not type(constant) or _differ(leaf, constant):
                raise TreeError(
                    f"{_FUNCTION}: {self.primals.label(i)} must be the traced constant {constant!r}, got {leaf!r}."
                )
        if in_place:
            self._require_themselves(leaves, tensors)
        if self.alone:
            # As given: a copy that was made for its strides shares nothing.
            overlapping = sharing([leaves[place] for place in self.places], self.alone)
            refuse_sharing(_FUNCTION, [self.primal_names[i] for i in overlapping])
        return tensors

    def _require_themselves(self, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        for i in self.alone:
            if tensors[i] is not leaves[self.places[i]]:
                strides = list(leaves[self.places[i]].stride())
                raise MutationError(
                    f"{_FUNCTION}: {self.primal_names[i]} is written to in place, so its axes must lie in memory in "
                    f"the order that was traced, got strides {strides}. Trace it as it is, or with functionalize=True."
                )

    def flat_tangents(
        self, tangents: Any, outs: Sequence[Tensor], symbols: dict[Any, int], others: Sequence[Any]
    ) -> list[Tensor]:
        """The cotangents, like `outs`, the traced ones; zeros where one of several is `None`."""
        if tangents is None and not self.with_tangent:
            return []
        # Anything but None is a leaf.
        values: list[Any] = [False if y is None else y for y in self.outs.values]
        for place, y in zip(self.with_tangent, outs, strict=True):
            values[place] = y
        pieces = align(_FUNCTION, "tangents", tangents, "outs", self.outs.join(values), _OPTIONS)
        found = []
        for place, piece in enumerate(pieces):
            label = self.outs._replace(root="tangents").label(place)
            if place not in self.with_tangent:
                if piece is not None:
                    raise LeafError(f"{_FUNCTION}: {label} must be None: the graph was traced without it.")
                continue
            sizes = internals.bound_sizes(values[place].shape, symbols)
            if piece is None and tangents is not None:
                found.append(_zeros(label, values[place], sizes, others))
            else:
                found.append(_checked(label, piece, values[place], sizes, viewable=True))
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
            # An output that is a primal, or a view of one, is no way into its history.
            leaves[place] = detached(value)
        return self.outs.join(leaves)

    def join_gradients(self, values: Sequence[Tensor]) -> Any:
        """The gradients, in the structure of the primals."""
        leaves: list[Any] = [None] * len(self.primals.values)
        for place, value in zip(self.gradient_places, values, strict=True):
            leaves[place] = value
        return optree.tree_unflatten(self.primals.treespec, leaves)


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
    if x is y:
        return False
    if all(hasattr(x, name) for name in ("__array__", "dtype", "shape")):
        # An array, or a scalar of NumPy; a missing value is one constant, though it equals nothing.
        same = x.dtype == y.dtype and x.shape == y.shape and ((x == y) | ((x != x) & (y != y))).all()
        return not bool(same)
    try:
        # Only what is not a number differs from itself.
        return bool(x != y) and (bool(x == x) or bool(y == y))
    except (RuntimeError, TypeError, ValueError):
        # Of some types there is no telling.
        return True


def _checked(label: str, x: Any, fake: Tensor, sizes: Sequence[int | None], *, viewable: bool = False) -> Tensor:
    if not isinstance(x, torch.Tensor):
        raise LeafError(f"{_FUNCTION}: {label} must be a tensor, got {type(x).__name__}.")
    if x.dtype != fake.dtype:
        raise DtypeError(f"{_FUNCTION}: {label} must have dtype {fake.dtype}, got {x.dtype}.")
    if x.device.type != fake.device.type:
        raise DeviceError(f"{_FUNCTION}: {label} must be on {fake.device}, got {x.device}.")
    wanted = [fake.shape[i] if n is None else n for i, n in enumerate(sizes)]
    if viewable and not internals.sizes_fit(sizes, x) and sizes.count(None) <= 1:
        try:
            x = x.view([-1 if n is None else n for n in sizes])
        except RuntimeError:
            raise ShapeError(f"{_FUNCTION}: {label} must be viewable as {wanted}, got {list(x.shape)}.") from None
    if not internals.sizes_fit(sizes, x):
        raise ShapeError(f"{_FUNCTION}: {label} must have shape {wanted}, got {list(x.shape)}.")
    # Traced as plain memory, in which a lazy conjugate or negative is none.
    return _laid_out_like(x.resolve_conj().resolve_neg(), fake)


def _laid_out_like(x: Tensor, fake: Tensor) -> Tensor:
    """`x` with its axes in memory in the order that the graph was traced for."""
    order = internals.axis_order(fake)
    if order is None:
        return x
    strides = [0] * x.dim()
    size = 1
    for axis in reversed(order):
        traced = internals.fixed_size(fake.stride()[axis])
        # An axis of one element may have any stride, and decides what can be viewed all the same.
        strides[axis] = traced if traced is not None and x.shape[axis] == 1 else size
        size *= max(int(x.shape[axis]), 1)
    if list(x.stride()) == strides:
        return x
    ordered = x.permute(order)
    if not ordered.is_contiguous():
        x = ordered.contiguous().permute([order.index(i) for i in range(len(order))])
    return x.as_strided(x.shape, strides, x.storage_offset())
