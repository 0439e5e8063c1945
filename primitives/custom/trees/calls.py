"""A call of a custom operator without its tensors: trees and static arguments, interned under a number.

The operator that torch sees takes a list of tensors and that number, whatever the trees look like.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor

from primitives._core.errors import MutationError, TreeError
from primitives._core.sequences import tuple_maker
from primitives._core.trees.overlay import key_path
from primitives._core.write_back import shares_memory, spans_overlap


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """The tree of the results of a call. A tuple is several outputs, anything else is one."""

    treespec: Any
    # Treespec of each output.
    outputs: list[Any]
    # Positions of the tensors that have no derivative because the operator says so.
    constants: frozenset[int]
    num_tensors: int
    # Whether it is one tensor and no tree, or a tuple of tensors.
    is_single: bool
    is_flat: bool

    @classmethod
    def of(cls, name: str, tree: Any, treespec: Any, differentiability: Sequence[bool] | None) -> Results:
        """The description of `tree`."""
        is_tuple = isinstance(tree, tuple)
        outputs = treespec.children() if is_tuple else [treespec]
        flags = [True] * len(outputs) if differentiability is None else differentiability
        if len(flags) != len(outputs):
            raise TreeError(
                f"{name}: output_differentiability must have one bool for each of {len(outputs)} outputs, "
                f"got {len(flags)}."
            )
        constants: set[int] = set()
        stops = accumulate(child.num_leaves for child in outputs)
        for i, (flag, child, stop) in enumerate(zip(flags, outputs, stops, strict=True)):
            if flag and child.num_leaves == 0 and differentiability is not None:
                raise TreeError(
                    f"{name}: output_differentiability marks output {i} as differentiable, but it holds no tensor."
                )
            if not flag:
                constants.update(range(stop - child.num_leaves, stop))
        is_flat = treespec.type is tuple and all(child.is_leaf() for child in outputs)
        is_single = not is_tuple and treespec.is_leaf()
        return cls(treespec, outputs, frozenset(constants), treespec.num_leaves, is_single, is_flat)

    def tree(self, values: Sequence[Any]) -> Any:
        """The tree of the results with `values` for its tensors; the new values after them are left out."""
        if self.is_single:
            return values[0]
        values = values[: self.num_tensors]
        return tuple(values) if self.is_flat else self.treespec.unflatten(values)

    def entries(self, values: Sequence[Any]) -> Sequence[Any]:
        """`values`, one for each tensor of the results, as one tree per output."""
        if self.is_single or self.is_flat:
            return values[: self.num_tensors]
        rest = iter(values)
        return [child.unflatten(list(islice(rest, child.num_leaves))) for child in self.outputs]

    def label(self, index: int) -> str:
        """Key path of tensor `index`."""
        return key_path(self.treespec.accessors()[index], "output")


class Span(NamedTuple):
    """Where the tensors of an argument lie among all, its treespec, and which of its leaves are tensors."""

    tensors: slice
    treespec: Any
    is_tensor: list[bool]


class Structure:
    """Trees of the positional arguments, their leaves that are not tensors, and the static arguments.

    It `is_flat` if every positional argument is a tensor; `spans` are the tensors of each by name, `mutated` the
    positions of those that are updated, whose new values follow the results.
    """

    def __init__(
        self, signature: Signature, number: int, treespec: Any, template: list[Any], static: dict[str, Any]
    ) -> None:
        self.signature = signature
        self.number = number
        self.static = static
        self.static_values: Any = signature.Static(**static)
        # `Results`, after the first call.
        self.results: Any = None
        # What autocast made of it: the results have its tree.
        self.cast: Structure | None = None
        self._treespec = treespec
        # None in the place of every tensor: a Structure outlives the call that it was made for.
        self._template = template
        self._places = [i for i, leaf in enumerate(template) if leaf is None]
        self._only_tensors = len(self._places) == len(template)
        children = treespec.children()
        self.is_flat: bool = self._only_tensors and all(child.is_leaf() for child in children)
        self.spans: dict[str, Span] = {}
        leaves, start = iter(template), 0
        for name, child in zip(signature.positional, children, strict=True):
            is_tensor = [leaf is None for leaf in islice(leaves, child.num_leaves)]
            self.spans[name] = Span(slice(start, start + sum(is_tensor)), child, is_tensor)
            start += sum(is_tensor)
        self.mutated: list[int] = [i for name in signature.mutates for i in range(start)[self.spans[name].tensors]]

    def trees(self, values: Sequence[Any], other: Any = ...) -> tuple[Any, ...]:
        """The positional arguments with `values` for the tensors, and `other` (default: as they are) for the rest."""
        if self.is_flat:
            return tuple(values)
        leaves = values
        if not self._only_tensors:
            leaves = list(self._template) if other is ... else [other] * len(self._template)
            for place, value in zip(self._places, values, strict=True):
                leaves[place] = value
        return cast("tuple", self._treespec.unflatten(leaves))

    def inputs(self, values: Sequence[Any]) -> Any:
        """All arguments by name: trees with `values` for the tensors, and the static arguments."""
        if self.is_flat:
            return self.signature.filled((*values, *self.static_values))
        return self.signature.Inputs(*self.trees(values), *self.static_values)

    def masks(self, values: Sequence[Any]) -> Any:
        """One tree per positional argument by name, with `values` for the tensors and `None` for all other leaves."""
        return self.signature.Inputs(*self.trees(values, None), *[None] * len(self.static))

    def with_copies(self, leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of a call with copies in the place of those that are updated, and the copies.

        So the operator is pure: it returns the new values, and writing them is an operator of its own.
        """
        updated = [leaves[i].clone() for i in self.mutated]
        copies = dict(zip(self.mutated, updated, strict=True))
        return [copies.get(i, x) for i, x in enumerate(leaves)] if updated else leaves, updated

    def without_written(self, leaves: Sequence[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """`tensors` to be saved, with copies of what the call will write: the backward pass must find it unchanged."""
        # A tensor that requires grad is never written to: this is the pure form.
        written = [leaves[i] for i in self.mutated if not leaves[i].requires_grad]
        return [x.clone() if any(shares_memory(x, y) for y in written) else x for x in tensors]

    def check_targets(self, leaves: Sequence[Tensor]) -> None:
        """Raise `MutationError` if a tensor that is to be written requires grad, or shares memory with another one."""
        for i in self.mutated:
            x, name = leaves[i], self.signature.name
            if x.requires_grad and torch.is_grad_enabled():
                raise MutationError(
                    f"{name}: {self.label(i)} is updated in place and must not require grad. Pass "
                    f"{self.label(i)}.detach(), or use the pure form, `pure`, which returns the new value."
                )
            for j, y in enumerate(leaves):
                if i != j and shares_memory(x, y) and (x is y or spans_overlap(x, y)):
                    raise MutationError(
                        f"{name}: {self.label(i)} is updated in place and shares memory with {self.label(j)}, which "
                        "would see the update or undo it. Pass a clone."
                    )

    def new_trees(self, values: Sequence[Any]) -> list[Any]:
        """The updated arguments, from the new values of their tensors."""
        updated = dict(zip(self.mutated, values, strict=True))
        trees = self.trees([updated.get(i) for i in range(len(self._places))])
        return [trees[self.signature.positional.index(name)] for name in self.signature.mutates]

    def label(self, index: int) -> str:
        """Key path of tensor `index`, starting with the name of its argument."""
        return self.signature.label(self._treespec.accessors()[self._places[index]])

    @property
    def settled(self) -> Results:
        """`results`, after the first call."""
        if self.results is None and self.cast is not None:
            self.results = self.cast.results
        if self.results is None:
            raise TreeError(f"{self.signature.name}: the tree of the results is not known before the first call.")
        return self.results


class Signature:
    """The arguments of the function that a custom operator is made from.

    Names of the `positional` ones, which hold tensors, and of the keyword-only, `static` ones. `bind` is the call
    itself, as Python binds it: positional arguments as a tuple and static ones by name.
    """

    def __init__(self, name: str, function: Callable[..., Any], mutates: Sequence[str]) -> None:
        self.name = name
        self.mutates: tuple[str, ...] = tuple(mutates)
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise TypeError(
                    f"{name}: the function takes {parameter}, but an operator has a fixed number of arguments; take a "
                    "tuple or a dict."
                )
        self.positional: list[str] = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.static: list[str] = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        if isinstance(mutates, str):
            raise TypeError(f"{name}: mutates must be a sequence of names, got {mutates!r}; write ({mutates!r},).")
        for other in set(mutates).difference(self.positional):
            raise ValueError(f"{name}: mutates names {other!r}, which is none of the arguments {self.positional}.")
        self.Inputs: Any = namedtuple("Inputs", [*self.positional, *self.static])
        self.filled: Callable[..., Any] = tuple_maker(self.Inputs)
        self.Static: Any = namedtuple("Static", self.static)
        # A function of these parameters binds in a tenth of the time that `inspect.Signature.bind` takes.
        names, star = "".join(f"{name}, " for name in self.positional), "*, " if self.static else ""
        static = ", ".join(f"{name!r}: {name}" for name in self.static)
        bind: Any = eval(f"lambda {names}{star}{', '.join(self.static)}: (({names}), {{{static}}})")
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        bind.__defaults__ = tuple(defaults[n] for n in self.positional if n in defaults)
        bind.__kwdefaults__ = {n: defaults[n] for n in self.static if n in defaults}
        bind.__name__ = bind.__qualname__ = name
        self.bind: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] = bind

    def label(self, accessor: optree.PyTreeAccessor) -> str:
        """Key path of a leaf of the positional arguments, starting with the name of its argument."""
        return key_path(optree.PyTreeAccessor(accessor[1:]), self.positional[accessor[0].entry])
