"""Calls like one that a trace has seen: the nodes that it recorded are copied, and torch is not asked again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor, fx
from torch.fx.experimental import proxy_tensor

from primitives.tracing import _torch_private as torch_private
from primitives.tracing._torch_private import FakeTensor, memory_of

__all__ = ["Replayed"]


class _Step(NamedTuple):
    """A node, what it keeps besides its value, what its value is like, and whose memory it has, of those before."""

    node: fx.Node
    meta: dict[str, Any]
    kind: tuple[Any, ...]
    home: int | None


class _Recipe(NamedTuple):
    """The nodes of a call: of its tensors, each once, those that it records, and the one of its result, by number."""

    inputs: Sequence[fx.Node]
    steps: Sequence[_Step]
    result: int


class Replayed:
    """Calls of operators in one trace without symbols.

    A derivative calls the same operators on tensors of the same shapes again and again, and so do the blocks of a
    model. Decompositions and shapes take torch several times as long as a copy of nodes.
    """

    def __init__(self) -> None:
        self._recipes: dict[Any, _Recipe | None] = {}

    def __call__(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of the call, recorded."""
        mode: Any = proxy_tensor.get_proxy_mode()
        tensors: list[Any] = []
        numbers: dict[fx.Node, int] = {}
        if mode is None or not _is_pure(func) or _fake_mode() is None:
            return func(*args, **kwargs)
        try:
            key = func, torch.get_default_dtype(), _described((args, kwargs), mode.tracer, tensors, numbers)
            recipe = self._recipes.get(key)
        except (LookupError, TypeError):  # of what has no key, or no hash
            return func(*args, **kwargs)
        if recipe is not None:
            return _copied(recipe, mode.tracer, tensors, [*numbers])
        last = next(iter(reversed(mode.tracer.graph.nodes)))
        result = func(*args, **kwargs)
        if key not in self._recipes:
            self._recipes[key] = _recipe_of(result, last, mode.tracer, tensors, [*numbers])
        return result


# Of each node alone.
_OWN = ("val", "stack_trace")


def _fake_mode() -> Any:
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE)  # type: ignore[attr-defined] - no stub


@functools.cache
def _is_pure(func: Any) -> bool:
    schema = torch_private.schema_of(func)
    return schema is not None and not schema.is_mutable and torch.Tag.nondeterministic_seeded not in func.tags


def _described(x: Any, tracer: Any, tensors: list[Tensor], numbers: dict[fx.Node, int]) -> Any:
    """What decides how a call is recorded; the tensors in it and their nodes are noted."""
    if isinstance(x, FakeTensor):
        slot = proxy_tensor.get_proxy_slot(x, tracer, None)
        if slot is None or slot.constant is not None or not _is_usual(x):
            raise LookupError
        tensors.append(x)
        return numbers.setdefault(slot.proxy.node, len(numbers)), *_kind(x), x.untyped_storage().nbytes()
    if isinstance(x, torch.Tensor):
        raise LookupError
    if isinstance(x, (list, tuple)):
        return type(x), *[_described(y, tracer, tensors, numbers) for y in x]
    if isinstance(x, dict):
        return dict, *[_described(pair, tracer, tensors, numbers) for pair in x.items()]
    # Numbers that are equal differ by their types, and zeros by their signs.
    return type(x), repr(x) if isinstance(x, (float, complex)) else x


def _is_usual(x: Any) -> bool:
    """Whether a fake tensor is what its kind says, and no more."""
    is_flagged = x.dtype.is_complex or x.is_neg() or x._is_zerotensor()
    return type(x) is FakeTensor and x.layout == torch.strided and x.constant is None and not is_flagged


def _kind(x: Any) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device


def _recipe_of(
    result: Any, last: fx.Node, tracer: Any, tensors: Sequence[Tensor], inputs: Sequence[fx.Node]
) -> _Recipe | None:
    """Of the nodes behind `last`; `None` where there is more to them than nodes."""
    slot = proxy_tensor.get_proxy_slot(result, tracer, None) if isinstance(result, FakeTensor) else None
    new, node = [], last.next
    while node.op != "root":
        new.append(node)
        node = node.next
    if slot is None or slot.constant is not None or slot.proxy.node not in new:
        return None
    needed = {slot.proxy.node}
    for node in reversed(new):
        needed.update(node.all_input_nodes if node in needed else ())
    given = [memory_of(x) for x in tensors]
    homes = {number: i for i, number in enumerate(given)}
    steps: list[_Step] = []
    for node in new:
        if node in needed:
            x, meta = node.meta.get("val"), {key: y for key, y in node.meta.items() if key not in _OWN}
            if not (isinstance(x, FakeTensor) and _is_usual(x) and _is_pure(node.target)):
                return None
            home = homes.setdefault(memory_of(x), number := len(tensors) + len(steps))
            if given.count(memory_of(x)) > 1 or (home == number and x.storage_offset()):
                return None
            steps.append(_Step(node, meta, _kind(x), home if home < number else None))
    nodes = [step.node for step in steps]
    if not needed.issubset({*inputs, *nodes}):
        return None
    return _Recipe(inputs, steps, nodes.index(slot.proxy.node))


def _copied(recipe: _Recipe, tracer: Any, tensors: Sequence[Any], inputs: Sequence[fx.Node]) -> Tensor:
    """The result of a recipe for these tensors, of these nodes."""
    nodes, values = dict(zip(recipe.inputs, inputs, strict=True)), [*tensors]
    made: list[Any] = []
    mode = _fake_mode()
    with _C._DisableTorchDispatch():
        for node, meta, (shape, stride, offset, dtype, device), home in recipe.steps:
            like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if home is not None:
                like.set_(values[home].untyped_storage(), offset, shape, stride)
            args, kwargs = fx.map_arg((node.args, node.kwargs), nodes.__getitem__)
            copy = nodes[node] = tracer.create_node("call_function", node.target, args, kwargs, node.name)
            values.append(FakeTensor(mode, like, device))
            copy.meta.update(meta, val=values[-1])
            made.append((copy, like, device))
        node, like, device = made[recipe.result]
        # Another one than that in the graph, which autograd would change.
        result = FakeTensor(mode, like, device)
    proxy_tensor.set_proxy_slot(result, tracer, proxy_tensor._ProxyTensor(tracer.proxy(node), None))
    return result
