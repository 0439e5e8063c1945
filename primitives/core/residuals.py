"""What the forward pass of a primitive keeps for its derivative rules."""

from __future__ import annotations

import functools
import operator
from collections import namedtuple
from typing import TYPE_CHECKING, Any, Protocol

from primitives.core.lists import flatten, regroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["ResidualLayout", "Residuals", "tuple_getter", "tuple_maker"]

DTYPE_SUFFIX = ".dtype"


def tuple_getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple]:
    """`values -> tuple of the values at indices`, for what runs in every call."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return (lambda values: (values[indices[0]],)) if indices else lambda _: ()


def tuple_maker(kind: type) -> Callable[[Iterable[Any]], Any]:
    """`values -> kind(*values)` for a namedtuple `kind` and as many values as it has fields, which nobody counts."""
    return functools.partial(tuple.__new__, kind)


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
        op_name: Name of the primitive, for errors.
        residuals: Names, as above.
        arguments: Names of all arguments of the schema, in order.
        tensor_arguments: Those of them that are tensors.
        outputs: Names of all outputs, in order.
        lists: Names of the arguments and outputs that are lists of tensors.

    Raises:
        ValueError: If a residual is neither an argument nor an output.
    """

    def __init__(
        self,
        op_name: str,
        residuals: Sequence[str],
        arguments: Sequence[str],
        tensor_arguments: Sequence[str],
        outputs: Sequence[str],
        lists: Sequence[str] = (),
    ) -> None:
        inputs: list[int] = []
        from_outputs: list[int] = []
        input_names, output_names, dtype_names = [], [], []
        self._dtypes: list[int] = []
        for residual in residuals:
            argument = residual.removesuffix(DTYPE_SUFFIX)
            if residual != argument and argument in tensor_arguments:
                dtype_names.append(f"{argument}_dtype")
                self._dtypes.append(arguments.index(argument))
            elif residual in tensor_arguments:
                input_names.append(residual)
                inputs.append(arguments.index(residual))
            elif residual in outputs:
                output_names.append(residual)
                from_outputs.append(outputs.index(residual))
            else:
                raise ValueError(
                    f"{op_name}: residual {residual!r} is neither a tensor argument ({', '.join(tensor_arguments)}) "
                    f"nor an output ({', '.join(outputs)})."
                )
        self._get_tensors = tuple_getter([*inputs, *[len(arguments) + i for i in from_outputs]])
        self._lists = [i for i, name in enumerate([*input_names, *output_names]) if name in lists]
        static = [name for name in arguments if name not in tensor_arguments]
        self._get_static = tuple_getter([arguments.index(name) for name in static])
        fields = [*input_names, *output_names, *dtype_names, *static]
        self.Residuals = namedtuple("Residuals", fields)
        self._filled = tuple_maker(self.Residuals)

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
        return self._filled((*tensors, *static))
