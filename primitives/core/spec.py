"""What an operator is: the arguments and outputs that its schema names, and what its definition says of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverload

__all__ = ["NAMESPACE", "Spec", "library"]

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
        """The operator of this schema, of which `statistics`, `state` and `cached` are declared.

        Raises:
            ValueError: If a declared name is not in the schema, or a list of tensors stands where it must not.
        """
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
