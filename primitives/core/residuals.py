"""What the forward pass of a primitive keeps for its derivative rules."""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any, Protocol

from primitives.core.sequences import flatten, regroup, tuple_getter, tuple_maker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from primitives.core.spec import Spec

__all__ = ["ResidualLayout", "Residuals"]

DTYPE_SUFFIX = ".dtype"


class Residuals(Protocol):
    """What decides what the forward pass keeps for a rule, and how the rule gets it."""

    def pack(self, args: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence, tuple]:
        """Split one call into the tensors to save (or `None`s) and the values that are no tensors."""
        ...

    def unpack(self, tensors: Sequence[Any], static: tuple) -> Any:
        """What the rule gets."""
        ...


class ResidualLayout:
    """Where each residual of a primitive comes from, and the namedtuple that hands them to a rule.

    A residual is the name of a tensor argument or output, or `"<argument>.dtype"`, which keeps the dtype and not the
    tensor (field `<argument>_dtype`). Arguments that are no tensors are always kept. An argument or output that is a
    list of tensors is kept whole.

    Args:
        spec: The operator.
        residuals: Names, as above.

    Raises:
        ValueError: If a residual is neither an argument nor an output.
    """

    def __init__(self, spec: Spec, residuals: Sequence[str]) -> None:
        of_dtypes = [r.removesuffix(DTYPE_SUFFIX) for r in residuals if r.endswith(DTYPE_SUFFIX)]
        kept = [r for r in residuals if not r.endswith(DTYPE_SUFFIX)]
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
        """Split one call into the tensors to save (or `None`s) and the values that are no tensors."""
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
