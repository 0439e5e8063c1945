"""Calls of a joint graph that plain autograd records, where no transform is around.

Autograd itself takes as long as a small program, so each call does in Python what differs from the last one, and a
`Recording` holds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor
from torch._C._dynamo.guards import TensorGuards

from primitives._core.autograd import function_class
from primitives._core.levels import are_saved_by_hooks, in_strides, recomputed, versions_of
from primitives._core.sequences import tuple_getter

Tensors = tuple[Tensor, ...]


class Guarded(list):
    """What serves tensors of one kind: a guard in C++ looks at types, sizes, strides, flags, and what requires grad."""

    def find(self, tensors: Sequence[Tensor]) -> Any:
        """What serves these; `None` if nothing is known to."""
        for guard, found in self:
            if guard.check(*tensors):
                return found
        return None

    def note(self, tensors: Sequence[Tensor], found: Any) -> None:
        """Remember it; not for a tensor that is given twice, which no guard passes."""
        guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if guard.check(*tensors):
            self.append((guard, found))


class _Way(NamedTuple):
    """A backward pass for some wanted arguments and given cotangents.

    Attributes:
        function: The pullback, from what was kept where there is a way.
        values: Its arguments, out of what is saved, what is not read, the cotangents and the sizes.
        num: How many of these have derivatives.
        cotangents: What autograd gets, out of the results and a `None`.
    """

    function: Any
    values: Callable[[Sequence[Any]], tuple]
    num: int
    cotangents: Callable[[Sequence[Any]], tuple]


class Recording:
    """How calls of a joint graph are recorded, the forward half of which is `run(tensors)`."""

    def __init__(self, joint: Any, run: Callable[[Sequence[Tensor]], Sequence[Any]]) -> None:
        self.joint, self.run, self.changed = joint, run, joint.changed
        self._unread = sorted(joint.unread)
        self._read = [i for i in range(joint.count) if i not in joint.unread]
        self.unread, self.read = tuple_getter(self._unread), tuple_getter(self._read)
        self.constants = tuple_getter([k for k in range(joint.num) if k in joint.constants])
        self._ways: dict[Any, _Way | None] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> Tensors:
        """The results."""
        return _Recorded.apply(self, *self.joint.detached(tensors))

    def way(self, key: tuple[tuple[bool, ...], tuple[bool, ...], bool]) -> _Way | None:
        """That of a backward pass: what autograd wants, which cotangents it gives, and whether it maps a batch."""
        if key not in self._ways:
            needs, is_given, _ = key
            wanted = tuple([i for i, need in enumerate(needs[1:]) if need])
            given = tuple([k for k, each in enumerate(is_given) if each])
            self._ways[key] = self._made(wanted, given) if wanted and given else None
        return self._ways[key]

    def _made(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> _Way:
        joint = self.joint
        function = joint.resumed(joint.count, wanted, given)
        bars, kept = [("bar", k) for k in given], [("kept", k) for k in range(joint.num_kept)]
        num_tensors = joint.num_kept - joint.num_sizes
        found = [*self._read, *kept[:num_tensors], *self._unread, *bars, *kept[num_tensors:]]
        at, result = {x: place for place, x in enumerate(found)}, {i: k for k, i in enumerate(wanted)}
        inputs = [*range(joint.count), *bars, *(kept if function.resumes else ())]
        return _Way(
            function,
            tuple_getter([at[x] for x in inputs]),
            joint.count + len(bars),
            tuple_getter([result.get(i, -1) for i in range(-1, joint.count)]),
        )


def _forward(ctx: Any, recording: Recording, *tensors: Tensor) -> Tensors:
    joint = recording.joint
    if _C._is_any_autocast_enabled():
        with _C._DisableAutocast():
            output = tuple(recording.run(tensors))
    else:
        output = tuple(recording.run(tensors))
    if recording.changed:
        # The buffers of the caller are about to be written.
        tensors = tuple([x.clone() if i in recording.changed else x for i, x in enumerate(tensors)])
    end = len(output) - joint.num_sizes
    results, unread, saved = output[: joint.num], recording.unread(tensors), recording.read(tensors)
    strides = [x.stride() for x in saved] if are_saved_by_hooks() else ()
    ctx.call = recording, unread, versions_of(unread), output[end:], strides
    # Attributes are written here, as methods of `ctx` would: a call in Python for each takes longer.
    ctx.to_save = saved + output[joint.num : end]
    ctx.materialize_grads = False
    ctx.non_differentiable = recording.constants(results)
    return results


def _backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    recording, unread, versions, sizes, strides = ctx.call
    given = [y_bar for y_bar in cotangents if y_bar is not None]
    is_mapped = recording.joint.is_mapped()
    way = recording.way((ctx.needs_input_grad, tuple([y_bar is not None for y_bar in cotangents]), is_mapped))
    if way is None:
        return (None,) * len(ctx.needs_input_grad)
    saved, function = ctx.saved_tensors, way.function
    if strides:
        saved = *map(in_strides, saved, strides), *saved[len(strides) :]
    is_read = torch.is_grad_enabled() or not function.resumes
    if is_read and versions_of(unread) != versions:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: an "
            "argument, a parameter or a captured tensor of a compiled function, before its recorded backward pass."
        )
    values = way.values((*saved, *unread, *given, *sizes))
    found: Any = recomputed(function, values[: way.num], values[way.num :])
    if zeros := function.zeros:
        found = [None if k in zeros else bar for k, bar in enumerate(found)]
    return way.cotangents((*found, None))


_Recorded = function_class("Recomputed", forward=_forward, backward=_backward)
