"""The axes of the tensors of a family, said once: its rules for vmap and for DTensor follow from them.

    "x y: *batch *rest *norm, weight bias: *batch *norm, mean rstd: *batch *rest"

Tensors have the axes of what they are named after (`x_bar`, `x_dot` and `new_x` those of `x`). `*batch` stands for as
many axes as the argument `batch_ndim` says, `*norm` for `norm_ndim`, `*before` for `dim`, and any other group for the
axes that are left; `classes?` is there where a tensor has that many.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from primitives._core import BatchInfo, Primitive, to_front
from primitives._core.spec import Spec

_COUNTS = {"batch": "batch_ndim", "norm": "norm_ndim", "before": "dim"}
_ROWS = "*rest"


class Axes(NamedTuple):
    """The axes of a family.

    Attributes:
        of: The axes of its tensors, as above.
        free: Names of those along which a call may be cut, since results are computed element by element along them. A
            part of each tensor that has the axis gives a part of each result that has it, and a term of the sum that
            any other result is.
        can_compose: Whether the reference sends less than the whole of what is cut along another axis.
    """

    of: str
    free: str
    can_compose: bool = False


class CallAxes(NamedTuple):
    """Names of the axes of the tensors of a call.

    Attributes:
        inputs: By argument that is a tensor, its axes; an axis is None where the tensor is broadcast along it.
        outputs: For each output, its axes; None for one that was not asked for.
        free: The axes along which the call may be cut.
        can_compose: As of `Axes`.
    """

    inputs: dict[str, tuple[str | None, ...]]
    outputs: tuple[tuple[str | None, ...] | None, ...]
    free: frozenset[str]
    can_compose: bool


AxesOf = Callable[[dict[str, Any]], Axes]


def def_axes(axes: Axes | AxesOf, *ops: Primitive) -> None:
    """Give `ops` of a family the rule `"axes"`, `(args) -> CallAxes | None`, and by it that for vmap.

    Args:
        axes: The axes, or a function from the arguments of a call, by name, to them.
        ops: The operators.
    """
    axes_of = (lambda given: axes) if isinstance(axes, Axes) else axes
    for op in ops:
        op.rules.define("axes", functools.partial(_axes_of_call, op.spec, axes_of))
        op.def_vmap(functools.partial(_vmap, op, axes_of))


@functools.cache
def _patterns(of: str) -> dict[str, list[str]]:
    entries = [entry.split(": ") for entry in of.split(", ")]
    return {name: axes.split() for names, axes in entries for name in names.split()}


def _stem(name: str) -> str:
    return re.sub("(_bar|_dot)+$", "", name.removeprefix("new_"))


# Batches.


def fold_batch(batch: BatchInfo, primals: Any, names: Sequence[str]) -> Any:
    """`primals` with the batch axis of the named tensors brought to the front, where it is one more leading axis.

    Tensors without a batch axis are expanded, which costs no copy.
    """
    folded = {name: to_front(getattr(primals, name), getattr(batch.axes, name), batch.size) for name in names}
    return primals._replace(**folded)


def output_axes(op: Primitive, primals: Any) -> Any:
    """The batch comes first in every output; a stand-in for an unwanted one has none."""
    if "output_mask" in primals._fields:
        return tuple(0 if want else None for want in primals.output_mask)
    # The mean of a norm that is not centered is such a stand-in.
    has_mean = getattr(primals, "centered", True)
    axes = tuple(0 if has_mean or name != "mean" else None for name in op.spec.outputs)
    return axes if len(axes) > 1 else 0


def _vmap(op: Primitive, axes_of: AxesOf, batch: BatchInfo, primals: Any) -> tuple[Any, Any]:
    """The batch is the first axis of every tensor, or more rows, as long as all samples share the parameters.

    They do not where a tensor without rows is batched, or summed over the rows of each sample, or a seed is given, with
    whose stream each sample begins anew.
    """
    names, patterns = op.spec.tensors, _patterns(axes_of(primals._asdict()).of)
    rows = [name for name in names if _ROWS in patterns[_stem(name)]]
    shared = [name for name in names if name not in rows]
    if rows and not primals.batch_ndim and getattr(primals, "seed", None) is None and not batch.is_batched(*shared):
        mask = getattr(primals, "output_mask", ())
        wanted = itertools.compress(op.spec.outputs, mask)
        if all(_ROWS in patterns[_stem(name)] for name in wanted):
            return op(*fold_batch(batch, primals, rows)), output_axes(op, primals)
    folded, count = fold_batch(batch, primals, names), _COUNTS.get(patterns[_stem(names[0])][0][1:], "")
    if count in primals._fields:
        folded = folded._replace(**{count: getattr(primals, count) + 1})
    return op(*folded), output_axes(op, primals)


# Cuts.


def _expanded(pattern: Sequence[str], counts: dict[str, int], ndim: int | None = None) -> tuple[str, ...]:
    """The axes of a pattern; those that may be absent are there if they make it `ndim`."""
    found: list[str] = []
    for axis in pattern:
        found += [f"{axis[1:]}{i}" for i in range(counts.get(axis[1:], 0))] if axis[0] == "*" else [axis]
    return tuple(axis.rstrip("?") for axis in found if axis[-1] != "?" or len(found) == ndim)


def _axes_of_call(spec: Spec, axes_of: AxesOf, args: Sequence[Any]) -> CallAxes | None:
    """The axes of a call; None for one that must stay whole."""
    given = dict(zip(spec.arguments, args, strict=True))
    axes = axes_of(given)
    patterns = _patterns(axes.of)
    counts = {group: given[name] for group, name in _COUNTS.items() if name in given}
    inputs: dict[str, tuple[str | None, ...]] = {}
    sizes: dict[str, int] = {}
    # Tensors that come first in the text say how many axes a group has, and how long axes are.
    ordered = [name for stem in patterns for name in spec.tensors if _stem(name) == stem and given[name] is not None]
    for name in ordered:
        pattern, shape = patterns[_stem(name)], given[name].shape
        for group in [axis[1:] for axis in pattern if axis[0] == "*" and axis[1:] not in counts]:
            counts[group] = len(shape) - len(_expanded(pattern, counts))
        own = _expanded(pattern, counts, len(shape))
        # A mean of a norm that is not centered has no elements, and a mask may have fewer axes.
        own = own[len(own) - len(shape) :] if len(shape) <= len(own) else ()
        if len(own) != len(shape):
            return None
        for axis, size in zip(own, shape, strict=True):
            sizes.setdefault(axis, size)
        inputs[name] = tuple(axis if sizes[axis] == size else None for axis, size in zip(own, shape, strict=True))

    def of_output(name: str, place: int) -> tuple[str | None, ...] | None:
        if "output_mask" in given and not given["output_mask"][place]:
            return None
        if (name == "mean" and not given.get("centered", True)) or (name[:4] == "new_" and given[name[4:]] is None):
            return None
        # A cotangent of what is broadcast has its axes.
        own = inputs.get(_stem(name)) if "_bar" in name else None
        return _expanded(patterns[_stem(name)], counts) if own is None else own

    outputs = tuple(of_output(name, place) for place, name in enumerate(spec.outputs))
    free = _expanded([f"*{axis}" if axis in counts else axis for axis in axes.free.split()], counts)
    return CallAxes(inputs, outputs, frozenset(free), axes.can_compose)
