"""The description of an operator: arguments and outputs of its schema, properties from its definition, residuals."""

from __future__ import annotations

import dataclasses
import functools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from primitives._core.sequences import flatten, regroup, tuple_getter, tuple_maker

NAMESPACE = "primitives"

# Operators live as long as their library object does: one per namespace, for the life of the process.
_libraries: dict[str, torch.library.Library] = {}


def library(namespace: str) -> torch.library.Library:
    """The library object that the operators of `namespace` are defined in."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]


@dataclasses.dataclass(frozen=True)
class Spec:
    """An operator without its rules; see `Primitive` for what the declarations mean.

    Attributes:
        name: Name of the operator.
        namespace: Its namespace.
        schema: Its schema.
        arguments: Names of all arguments, in order.
        outputs: Names of all outputs, in order.
        tensors: The arguments that torch differentiates: those that are tensors, or lists of them.
        lists: The arguments, and the output, that are lists of tensors.
        statistics: Outputs whose derivative is refused.
        state: Outputs that are constants to every derivative.
        cached: Arguments that the reference takes from another argument again.
    """

    name: str
    namespace: str
    schema: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: tuple[str, ...]
    lists: frozenset[str]
    statistics: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()

    @classmethod
    def parse(cls, name: str, namespace: str, schema: str, **declared: Sequence[str]) -> Spec:
        """The operator of this schema, of which `statistics`, `state` and `cached` are declared."""
        parsed = torch._C.parse_schema(f"{namespace}::{name}{schema}")
        inputs, outputs = _types(parsed.arguments, "input"), _types(parsed.returns, "output")
        lists = frozenset(_lists(inputs) + _lists(outputs))
        if len(outputs) > 1 and not lists.isdisjoint(outputs):
            raise ValueError(f"{name}: a list of tensors must be the only output, got {schema}.")
        tensors = tuple(argument for argument, kind in inputs.items() if "Tensor" in kind)
        for option, names in declared.items():
            what, allowed = ("tensor argument", tensors) if option == "cached" else ("output", tuple(outputs))
            for unknown in (n for n in names if n not in allowed):
                raise ValueError(
                    f"{name}: {option} names {unknown!r}, which is none of the {what}s ({', '.join(allowed)})."
                )
        options = {option: tuple(names) for option, names in declared.items()}
        return cls(name, namespace, schema, tuple(inputs), tuple(outputs), tensors, lists, **options)

    @functools.cached_property
    def qualified_name(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}::{self.name}"

    @functools.cached_property
    def overload(self) -> OpOverload:
        """The operator as torch knows it, once it is defined there."""
        return getattr(getattr(torch.ops, self.namespace), self.name).default

    @functools.cached_property
    def list_arguments(self) -> list[int]:
        """Positions of the lists among the arguments."""
        return [i for i, name in enumerate(self.arguments) if name in self.lists]

    @functools.cached_property
    def list_tensors(self) -> list[int]:
        """Positions of the lists among the arguments that torch differentiates."""
        return [i for i, name in enumerate(self.tensors) if name in self.lists]

    @functools.cached_property
    def returns_list(self) -> bool:
        """Whether the one output is a list of tensors."""
        return not self.lists.isdisjoint(self.outputs)

    @functools.cached_property
    def differentiable_outputs(self) -> list[str]:
        """The outputs that have derivatives."""
        return [name for name in self.outputs if name not in (*self.statistics, *self.state)]

    @functools.cached_property
    def state_positions(self) -> list[int]:
        """Positions of the constants among the outputs."""
        return [self.outputs.index(name) for name in self.state]


def _types(entries: Sequence[Any], unnamed: str) -> dict[str, str]:
    """Types of the entries of a schema; those without a name are called `unnamed`, numbered if there are several."""
    names = [entry.name or (unnamed if len(entries) == 1 else f"{unnamed}{i}") for i, entry in enumerate(entries)]
    return {name: str(entry.type) for name, entry in zip(names, entries, strict=True)}


def _lists(types: dict[str, str]) -> list[str]:
    """Entries that are lists of tensors; one that may be `None` is refused: autograd could not count its tensors."""
    for name, kind in types.items():
        if kind.startswith("Optional[List[") and "Tensor" in kind:
            raise ValueError(f"{name}: a list of tensors must not be optional; pass an empty list, got {kind}.")
    return [name for name, kind in types.items() if kind.startswith("List[") and "Tensor" in kind]


class ResidualLayout:
    """Where each residual of a primitive comes from, and the namedtuple that hands them to a rule.

    A residual is the name of a tensor argument or output, or `"<argument>.dtype"`, which keeps the dtype and not the
    tensor (field `<argument>_dtype`). Arguments that are not tensors are always kept. An argument or output that is a
    list of tensors is kept whole.
    """

    def __init__(self, spec: Spec, residuals: Sequence[str]) -> None:
        of_dtypes = [r.removesuffix(".dtype") for r in residuals if r.endswith(".dtype")]
        kept = [r for r in residuals if not r.endswith(".dtype")]
        for name in (*of_dtypes, *kept):
            if name not in spec.tensors and (name in of_dtypes or name not in spec.outputs):
                raise ValueError(
                    f"{spec.name}: residual {name!r} is neither a tensor argument ({', '.join(spec.tensors)}) "
                    f"nor an output ({', '.join(spec.outputs)})."
                )
        # Arguments stand before outputs.
        kept.sort(key=lambda name: name not in spec.tensors)
        places = (*spec.arguments, *spec.outputs)
        self._get_tensors = tuple_getter([places.index(name) for name in kept])
        self._lists = [i for i, name in enumerate(kept) if name in spec.lists]
        self._dtypes = [spec.arguments.index(name) for name in of_dtypes]
        static = [name for name in spec.arguments if name not in spec.tensors]
        self._get_static = tuple_getter([spec.arguments.index(name) for name in static])
        self.fields = (*kept, *[f"{name}_dtype" for name in of_dtypes], *static)
        self._made = tuple_maker(namedtuple("Residuals", self.fields))

    def pack(self, args: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence, tuple]:
        """Split one call into the tensors to save (or `None`s) and the values that are not tensors."""
        tensors, static = self._get_tensors((*args, *outputs)), self._get_static(args)
        if self._dtypes:
            static = (*[None if args[i] is None else args[i].dtype for i in self._dtypes], *static)
        if not self._lists:
            return tensors, static
        tensors, lengths = flatten(tensors, self._lists)
        return tensors, (lengths, *static)

    def unpack(self, tensors: Sequence[Any], static: tuple) -> Any:
        """The residuals as a namedtuple."""
        if self._lists:
            tensors, static = regroup(tensors, static[0]), static[1:]
        return self._made((*tensors, *static))
