"""What a call of a custom operator is beside its tensors: trees and static arguments, interned under a number.

The operator that torch sees takes a list of tensors and that number, whatever the trees look like.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import namedtuple
from typing import TYPE_CHECKING, Any, cast

import optree

from primitives.core.errors import TreeError
from primitives.core.sequences import tuple_maker
from primitives.core.trees.overlay import key_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Output:
    """The tree of the results: its treespec, and how many tensors belong to each top-level entry.

    A tuple is several outputs, anything else is one.
    """

    treespec: Any
    entries: tuple[int, ...]
    is_tuple: bool

    @classmethod
    def of(cls, tree: Any, treespec: Any) -> Output:
        """The description of `tree`, whose treespec is given."""
        is_tuple = isinstance(tree, tuple)
        entries = tuple(child.num_leaves for child in treespec.children()) if is_tuple else (treespec.num_leaves,)
        return cls(treespec, entries, is_tuple)

    @property
    def children(self) -> list[Any]:
        """Treespec of each top-level entry."""
        return self.treespec.children() if self.is_tuple else [self.treespec]

    def split(self, flat: Sequence[Any]) -> list[Any]:
        """`flat`, one value per tensor, as one tree per top-level entry."""
        trees, start = [], 0
        for child, length in zip(self.children, self.entries, strict=True):
            trees.append(optree.tree_unflatten(child, flat[start : start + length]))
            start += length
        return trees


class Structure:
    """Trees of the positional arguments, their leaves that are no tensors, and the static arguments.

    Attributes:
        number: What stands for it in a graph.
        treespec: Treespec of the tuple of positional arguments.
        static: Keyword-only arguments by name.
        static_values: The same as a namedtuple.
        output: Description of the results; `None` before the first call.
        constants: Positions of the result tensors that have no derivative because the operator says so.
        spans: The tensors that belong to each positional argument, by name.
        mutated: Positions of the tensors that are updated; their new values follow the results.
        num_outputs: Number of tensors of the results.
        single_output: Whether the result is one tensor and no tree.
        tuple_output: Whether the result is a tuple of tensors.
        is_flat: Whether every positional argument is a tensor.
    """

    def __init__(self, signature: Signature, number: int, treespec: Any, template: list[Any], static: dict) -> None:
        self.signature = signature
        self.number = number
        self.treespec = treespec
        self.static = static
        self.static_values = signature.Static(**static)
        self.output: Output | None = None
        # What autocast made of it: the results have its tree.
        self.cast: Structure | None = None
        self.constants: frozenset[int] = frozenset()
        self.single_output = self.tuple_output = False
        # None in the place of every tensor: a Structure outlives the call that it was made for.
        self._template = template
        self._places = [i for i, leaf in enumerate(template) if leaf is None]
        self._only_tensors = len(self._places) == len(template)
        self.is_flat = self._only_tensors and all(child.is_leaf() for child in treespec.children())
        self.spans = self._find_spans()
        spans = self.spans
        self.mutated = [i for name in signature.mutates for i in range(spans[name].start, spans[name].stop)]
        self.num_outputs = 0

    @property
    def num_tensors(self) -> int:
        """How many tensors a call has."""
        return len(self._places)

    def trees(self, values: Sequence[Any], other: Any = ...) -> tuple:
        """The positional arguments with `values` for the tensors, and `other` (default: as they are) for the rest."""
        if self.is_flat:
            return tuple(values)
        leaves = values
        if not self._only_tensors:
            leaves = list(self._template) if other is ... else [other] * len(self._template)
            for place, value in zip(self._places, values, strict=True):
                leaves[place] = value
        return cast("tuple", self.treespec.unflatten(leaves))

    def inputs(self, values: Sequence[Any]) -> Any:
        """All arguments by name: trees with `values` for the tensors, and the static arguments."""
        if self.is_flat:
            return self.signature.filled((*values, *self.static_values))
        return self.signature.Inputs(*self.trees(values), *self.static_values)

    def masks(self, values: Sequence[Any]) -> Any:
        """One tree per positional argument by name, with `values` for the tensors and `None` for all other leaves."""
        if self.is_flat:
            return self.signature.Inputs(*values, *[None] * len(self.static))
        return self.signature.Inputs(*self.trees(values, None), *[None] * len(self.static))

    def label(self, index: int) -> str:
        """Key path of tensor `index`, starting with the name of its argument."""
        accessor = self.treespec.accessors()[self._places[index]]
        name = self.signature.positional[accessor[0].entry]
        return key_path(optree.PyTreeAccessor(accessor[1:]), name)

    def _find_spans(self) -> dict[str, Span]:
        spans, leaf, start = {}, 0, 0
        tensors = set(self._places)
        for name, child in zip(self.signature.positional, self.treespec.children(), strict=True):
            is_tensor = tuple(i in tensors for i in range(leaf, leaf + child.num_leaves))
            is_plain = child.is_leaf() and is_tensor[0]
            spans[name] = Span(leaf, start, start + sum(is_tensor), child, is_tensor, is_plain)
            leaf, start = leaf + child.num_leaves, start + sum(is_tensor)
        return spans

    def settle(self, output: Any, treespec: Any, differentiability: Sequence[bool] | None) -> None:
        """Note the tree of the results.

        Raises:
            TreeError: If `differentiability` has another length than the results, or is true for one without tensors.
        """
        name = self.signature.name
        described = Output.of(output, treespec)
        constants: set[int] = set()
        if differentiability is not None:
            if len(differentiability) != len(described.entries):
                raise TreeError(
                    f"{name}: output_differentiability must have one bool for each of {len(described.entries)} "
                    f"outputs, got {len(differentiability)}."
                )
            start = 0
            for i, (length, differentiable) in enumerate(zip(described.entries, differentiability, strict=True)):
                if differentiable and length == 0:
                    raise TreeError(
                        f"{name}: output_differentiability marks output {i} as differentiable, but it holds no tensor."
                    )
                if not differentiable:
                    constants.update(range(start, start + length))
                start += length
        self.constants = frozenset(constants)
        self.num_outputs = treespec.num_leaves
        self.single_output = not described.is_tuple and treespec.is_leaf()
        self.tuple_output = treespec.type is tuple and all(child.is_leaf() for child in treespec.children())
        self.output = described

    @property
    def settled(self) -> Output:
        """`output`, after the first call."""
        if self.output is None and self.cast is not None and self.cast.output is not None:
            for name in ("constants", "num_outputs", "single_output", "tuple_output", "output"):
                setattr(self, name, getattr(self.cast, name))
        if self.output is None:
            raise TreeError(f"{self.signature.name}: the tree of the results is not known before the first call.")
        return self.output

    def output_tree(self, values: Sequence[Any]) -> Any:
        """The tree of the results with `values` for its tensors; the new values after them are left out."""
        if self.output is None:
            self.settled  # noqa: B018 - known now, or it raises
        if self.single_output:
            return values[0]
        if self.tuple_output:
            return tuple(values[: self.num_outputs])
        return self.settled.treespec.unflatten(values[: self.num_outputs])

    def new_trees(self, values: Sequence[Any]) -> list[Any]:
        """The updated arguments, from the results and the new values after them."""
        updated = dict(zip(self.mutated, values[self.num_outputs :], strict=True))
        trees = []
        for name in self.signature.mutates:
            span = self.spans[name]
            tensors = iter([updated[i] for i in range(span.start, span.stop)])
            rest = iter(self._template[span.leaf :])
            leaves = [
                next(tensors) if is_tensor else other for is_tensor, other in zip(span.is_tensor, rest, strict=False)
            ]
            trees.append(optree.tree_unflatten(span.treespec, leaves))
        return trees

    def output_entries(self, values: Sequence[Any]) -> Sequence[Any]:
        """`values`, one for each tensor of the results, as one tree per output."""
        return values[: self.num_outputs] if self.single_output or self.tuple_output else self.settled.split(values)


@dataclasses.dataclass(frozen=True)
class Span:
    """Where an argument lies.

    Attributes:
        leaf: Its first leaf among the leaves of all arguments.
        start: Its first tensor among the tensors of all arguments.
        stop: One past its last tensor.
        treespec: Its treespec.
        is_tensor: Which of its leaves are tensors.
        is_plain: Whether it is one tensor and no tree.
    """

    leaf: int
    start: int
    stop: int
    treespec: Any
    is_tensor: tuple[bool, ...]
    is_plain: bool


def _check_names(op_name: str, mutates: Sequence[str], positional: Sequence[str]) -> None:
    """Raise `TypeError` or `ValueError` unless `mutates` is a sequence of names of positional arguments."""
    if isinstance(mutates, str):
        raise TypeError(f"{op_name}: mutates must be a sequence of names, got {mutates!r}; write ({mutates!r},).")
    for name in mutates:
        if name not in positional:
            raise ValueError(f"{op_name}: mutates names {name!r}, which is none of the arguments {list(positional)}.")


class Signature:
    """The arguments of the function that a custom operator is made from.

    Attributes:
        name: Qualified name of the operator.
        positional: Names of the arguments that hold tensors.
        mutates: Names of the positional arguments that are updated in place.
        static: Names of the keyword-only arguments.
        Inputs: Namedtuple with all of these names as fields.
        Static: Namedtuple with the names of the keyword-only arguments as fields.
    """

    def __init__(self, name: str, function: Callable, mutates: Sequence[str]) -> None:
        self.name = name
        self.mutates = tuple(mutates)
        self._parsed = inspect.signature(function)
        self.positional: list[str] = []
        self.static: list[str] = []
        for parameter in self._parsed.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise TypeError(
                    f"{name}: the function takes {parameter}, but an operator has a fixed number of arguments; take a "
                    "tuple or a dict."
                )
            (self.static if parameter.kind is parameter.KEYWORD_ONLY else self.positional).append(parameter.name)
        defaults = {n: p.default for n, p in self._parsed.parameters.items() if p.default is not p.empty}
        self.Inputs = namedtuple("Inputs", [*self.positional, *self.static])
        self.filled = tuple_maker(self.Inputs)
        self.Static = namedtuple("Static", self.static)
        _check_names(name, mutates, self.positional)
        self.num_positional = len(self.positional)
        self._static = frozenset(self.static)
        self._required = frozenset(n for n in self.static if n not in defaults)
        self._static_defaults = [(name, defaults.get(name)) for name in self.static]
        # By the number of arguments given: the defaults of the others, if all have one.
        self._tails = {
            count: tuple(defaults[name] for name in self.positional[count:])
            for count in range(len(self.positional) + 1)
            if all(name in defaults for name in self.positional[count:])
        }

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Positional arguments as a tuple and static ones by name, defaults filled in; as a Python call binds them."""
        if not (self.static or kwargs) and len(args) == self.num_positional:
            return args, kwargs
        tail = self._tails.get(len(args))
        if tail is not None and self._required <= kwargs.keys() <= self._static:
            return args + tail, {name: kwargs.get(name, default) for name, default in self._static_defaults}
        bound = self._parsed.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        return tuple(given[name] for name in self.positional), {name: given[name] for name in self.static}
