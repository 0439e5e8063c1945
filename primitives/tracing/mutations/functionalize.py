"""Writes to inputs as further outputs: `functionalize_mutations`."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import optree
import torch

from primitives.core.trees.overlay import key_path
from primitives.tracing.joint.create import Leaves
from primitives.tracing.joint.opaque import refuse_opaque
from primitives.tracing.mutations.inputs import Inputs
from primitives.tracing.mutations.modes import FUNCTION

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["PureFunction", "functionalize_mutations"]


class PureFunction:
    """A function whose writes to its inputs are outputs; made by `functionalize_mutations`.

    Attributes:
        fn: The function that writes.
        keep_data_mutations: Whether values are copied back to inputs that do not require grad.
    """

    def __init__(self, fn: Callable[..., Any], *, keep_data_mutations: bool = False) -> None:
        self.fn = fn
        self.keep_data_mutations = keep_data_mutations

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, OrderedDict[str, Tensor]]:
        """Call the function, and leave its inputs as they are.

        Args:
            *args: Pytrees.
            **kwargs: Pytrees.

        Returns:
            `(output, mutated)`: what the function returns, and the inputs that it wrote to, as they are afterwards,
            by key path (`"args[0]['w']"`), in the order of the leaves of `args` and then `kwargs`.

        Raises:
            MutationError: If the function writes a tensor that is neither an input nor made inside; a leaf that
                requires grad, hidden from autograd; a sparse tensor; the `.grad` of an input; or, in a trace, in a way
                that cannot be made pure; or if it reads a `.grad` that an input has.
            TraceError: In a trace, if it asks for the values or the memory of a tensor, seeds torch's generator or
                passes one, or calls a collective that writes in place.
            LeafError: If an input is a nested tensor of the strided layout; if an object with a tensor inside, that
                optree does not take apart, is passed or returned.
            MissingRuleError: Under `make_fx(pre_dispatch=True)`.
        """
        return self._call(args, kwargs, None if self.keep_data_mutations else ())

    def in_place(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and copy what it wrote back to its inputs: the effect of `fn(*args, **kwargs)`.

        Args:
            *args: Pytrees.
            **kwargs: Pytrees.

        Returns:
            What the function returns. What aliases an input in it is an alias of that input.

        Raises:
            MutationError: As in a call.
            RuntimeError: If an input that was written to is a leaf that requires grad.
        """
        return self._call(args, kwargs, "all")[0]

    def _call(self, args: tuple, kwargs: dict[str, Any], write: Any) -> tuple[Any, OrderedDict[str, Tensor]]:
        accessors, leaves, treespec = optree.tree_flatten_with_accessor((args, kwargs))  # type: ignore[arg-type] - any tree
        labels = [_label(accessor) for accessor in accessors]
        refuse_opaque(FUNCTION, leaves, labels.__getitem__)
        inputs = Inputs(leaves, labels)
        inner: Any = treespec.unflatten(inputs.copies)
        outs = Leaves.of(inputs.run(self.fn, *inner), "outs")
        refuse_opaque(FUNCTION, outs.values, outs.label, through_functions=True)
        places = inputs.changed()
        inputs.announce(places)
        back = inputs.kept(places) if write is None else places if write == "all" else []
        inputs.write_back(back)
        mutated = OrderedDict((labels[i], inputs.new_value(i)) for i in places if i not in back)
        outside = iter(inputs.outside([y for y in outs.values if isinstance(y, torch.Tensor)]))
        return outs.join([next(outside) if isinstance(y, torch.Tensor) else y for y in outs.values]), mutated

    def __repr__(self) -> str:
        """`functionalize_mutations(step)`."""
        return f"functionalize_mutations({getattr(self.fn, '__name__', self.fn)})"


def _label(accessor: optree.PyTreeAccessor) -> str:
    return key_path(accessor[1:], "kwargs" if accessor[0].entry else "args")  # type: ignore[arg-type] - a slice is one


def functionalize_mutations(fn: Callable[..., Any], *, keep_data_mutations: bool = False) -> PureFunction:
    """`fn` as a function that leaves its inputs untouched, and returns what it would have written to them.

    Writes to values (`add_`, `copy_`, `x[i] = ...`, through views, of inputs that share memory) and to metadata
    (`transpose_`, `resize_`, `set_`) all count. Derivatives, of any order, are those of `fn`; leaves that require grad
    may be written to. Outputs that are inputs, or views of inputs, still are. `make_fx` records a graph without writes.

    An input counts as written to if an operation wrote to its memory, whatever the values; if one of several inputs
    that overlap in memory is written to, all of them are. A metadata change that was taken back does not count.

    Args:
        fn: Function of pytrees.
        keep_data_mutations: Whether new values are copied, at the end, to the inputs they belong to, instead of being
            returned; where an input requires grad, or its metadata changed as well, they are returned all the same.

    Returns:
        `pure(*args, **kwargs) -> (output, mutated)`; `mutated` is an `OrderedDict` from key path to new value, in the
        order of the input leaves. `pure.in_place(*args, **kwargs) -> output` copies everything back.

    Example:
        >>> def step(x, total):
        ...     total.add_(x)
        ...     return x * 2
        >>> pure = functionalize_mutations(step)
        >>> total = torch.zeros(2)
        >>> pure(torch.ones(2), total)
        (tensor([2., 2.]), OrderedDict([('args[1]', tensor([1., 1.]))]))
        >>> total
        tensor([0., 0.])
        >>> pure.in_place(torch.ones(2), total), total
        (tensor([2., 2.]), tensor([1., 1.]))
    """
    return PureFunction(fn, keep_data_mutations=keep_data_mutations)
