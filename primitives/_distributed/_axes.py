"""Which axes of the tensors of a call are the same axis, and along which of them a call may be cut.

A call is cut along an axis that its results treat element by element: rows of a norm, samples and heads of attention,
channels of batch norm. A part of each tensor that has the axis then gives a part of each result that has it, and a term
of the sum that any other result is. Axes are told apart by names; tensors have the axes of what they are named after
(`x_bar` and `x_dot` those of `x`), as in `batch_rows` and `batch_all`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from primitives._core.spec import Spec
from primitives.ops.row_maps import ROW_MAPS

_FULL = ("x", "y", "s", "residual", "output")
_CHANNELS = ("weight", "bias", "mean", "rstd", "running_mean", "running_var")


class Axes(NamedTuple):
    """Names of the axes of the tensors of a call.

    Attributes:
        inputs: By argument that is a tensor, its axes; an axis is None where the tensor is broadcast along it.
        outputs: For each output, its axes; None for one that was not asked for.
        free: The axes along which the call may be cut.
        can_compose: Whether the reference sends less than the whole of what is cut along another axis.
    """

    inputs: dict[str, tuple[str | None, ...]]
    outputs: tuple[tuple[str | None, ...] | None, ...]
    free: frozenset[str]
    can_compose: bool


def _stem(name: str) -> str:
    return re.sub("(_bar|_dot)+$", "", name.removeprefix("new_"))


def _numbered(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(count))


class _Family(NamedTuple):
    """Axes by the stem of a tensor's name, else those that are free, and whether the reference may run on parts."""

    of: dict[str, tuple[str, ...]]
    free: tuple[str, ...]
    can_compose: bool = False


def _rows(a: dict[str, Any]) -> _Family:
    x = next(a[name] for name in ("x", "s") if name in a)
    batch, norm_ndim = a["batch_ndim"], a.get("norm_ndim", 2)
    lead = _numbered("b", batch) + _numbered("r", len(x.shape) - norm_ndim - batch)
    norm = _numbered("n", norm_ndim)
    param = (*lead[:batch], lead[-1], norm[0]) if a.get("grouped", 0) else (*lead[:batch], *norm)
    of = {**dict.fromkeys(_FULL, (*lead, *norm)), "weight": param, "bias": param, "mean": lead, "rstd": lead}
    # Which numbers are dropped depends on where they stand in the whole.
    return _Family(of, () if a.get("seed") is not None else lead, can_compose=not a.get("grouped", 0) and "p" not in a)


def _channels(a: dict[str, Any], *, in_training: bool) -> _Family:
    batch, spatial = _numbered("b", a["batch_ndim"]), len(a["x"].shape) - a["batch_ndim"] - 2
    full = (*batch, "n", "c", *_numbered("s", spatial))
    of = {**dict.fromkeys(_FULL, full), **dict.fromkeys(_CHANNELS, (*batch, "c"))}
    return _Family(of, (*batch, "c") if in_training else full, can_compose=in_training)


def _row_map(a: dict[str, Any]) -> _Family:
    x = next(a[name] for name in ("x", "x_dot", "y_bar", "y") if a.get(name) is not None)
    axes, dim = _numbered("r", len(x.shape)), a["dim"] % len(x.shape)
    of: dict[str, tuple[str, ...]] = dict.fromkeys((*_FULL, "mask"), axes)
    return _Family(of, axes[:dim] + axes[dim + 1 :], can_compose=True)


def _cross_entropy(a: dict[str, Any]) -> _Family:
    axes, dim = _numbered("r", len(a["x"].shape)), a["dim"] % len(a["x"].shape)
    rows = axes[:dim] + axes[dim + 1 :]
    target = axes if len(a["target"].shape) == len(axes) else rows
    return _Family({"x": axes, "target": target}, rows, can_compose=True)


def _linear_cross_entropy(a: dict[str, Any]) -> _Family:
    more = _numbered("m", len(a["weight"].shape) - 2)
    target = ("r", *("c",) * (len(a["target"].shape) > 1 + len(more)), *more)
    of = {"x": ("r", "d"), "weight": ("c", *more, "d"), "bias": ("c", *more), "target": target}
    return _Family({**of, "loss": ("r", *more), "lse": ("r", *more)}, ("r",))


def _attention(a: dict[str, Any]) -> _Family:
    batch = _numbered("b", len(a["q"].shape) - 3)
    # Heads of q that share one of k and v would have to stay with it.
    heads = "h" if a["q"].shape[-3] == a["k"].shape[-3] else "k"
    of = {"q": (*batch, "h", "n", "d"), "k": (*batch, heads, "m", "d"), "v": (*batch, heads, "m", "e")}
    of |= {"o": (*batch, "h", "n", "e"), "lse": (*batch, "h", "n")}
    of |= dict.fromkeys(("bias", "mask"), (*batch, "h", "n", "m"))
    free = (*batch, *(("h",) if heads == "h" else ()), *(() if a["causal"] else ("n",)))
    return _Family(of, () if a.get("seed") is not None else free)


def _elementwise(a: dict[str, Any]) -> _Family:
    axes = _numbered("r", len(a["target"].shape))
    return _Family({"target": axes, "labels": axes}, axes)


# By what the names of primitives begin with, beside maps of rows; None where calls must stay whole.
FAMILIES: dict[str, Callable[[dict[str, Any]], _Family] | None] = {
    "layer_norm": _rows,
    "group_norm_silu": _rows,
    "add_layer_norm": _rows,
    "batch_norm": lambda a: _channels(a, in_training=True),
    "batch_norm_relu": lambda a: _channels(a, in_training=True),
    "batch_norm_eval": lambda a: _channels(a, in_training=False),
    "batch_norm_relu_eval": lambda a: _channels(a, in_training=False),
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "attention": _attention,
    "class_labels": _elementwise,
    "dropout": None,
}


def is_known(name: str) -> bool:
    """Whether it is said how calls of an operation may be cut; for a map of rows that follows from its `dim`."""
    return name in FAMILIES or name in ROW_MAPS


def axes_of_call(spec: Spec, args: Sequence[Any]) -> Axes | None:
    """The axes of a call of an operator; None for an operator that must stay whole (dropout, random bits)."""
    stem = re.sub("(_double_backward)?(_bwd|_fwd)?(_jvp)?$", "", spec.name)
    family = _row_map if stem in ROW_MAPS else FAMILIES.get(stem)
    given = dict(zip(spec.arguments, args, strict=True))
    if family is None:
        return None
    found = family(given)
    tensors = {name: given[name] for name in spec.tensors if given[name] is not None}
    sizes: dict[str, int] = {}
    inputs = {}
    for name, x in sorted(tensors.items(), key=lambda item: _stem(item[0]) in ("bias", "mask", "mean")):
        axes = found.of.get(_stem(name), found.free)
        # A mean of a norm that is not centered has no elements, and a mask may have fewer axes.
        axes = axes[len(axes) - len(x.shape) :] if len(x.shape) <= len(axes) else ()
        if len(axes) != len(x.shape):
            return None
        for axis, size in zip(axes, x.shape, strict=True):
            sizes.setdefault(axis, size)
        inputs[name] = tuple(axis if sizes[axis] == size else None for axis, size in zip(axes, x.shape, strict=True))
    outputs = [_of_output(name, i, found, given, inputs) for i, name in enumerate(spec.outputs)]
    return Axes(inputs, tuple(outputs), frozenset(found.free), found.can_compose)


def _of_output(
    name: str, place: int, family: _Family, given: dict[str, Any], inputs: dict[str, tuple[str | None, ...]]
) -> tuple[str | None, ...] | None:
    if "output_mask" in given and not given["output_mask"][place]:
        return None
    if (name == "mean" and not given.get("centered", True)) or (name.startswith("new_") and given[name[4:]] is None):
        return None
    # A cotangent of what is broadcast has its axes.
    own = inputs.get(_stem(name)) if name.endswith("_bar") else None
    return family.of.get(_stem(name), family.free) if own is None else own
