"""What stands in for a rule that a primitive does not have: its decomposition, or a loop over the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._guards import detect_fake_mode

from primitives.core.sequences import flatten, regroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from primitives.core.rules import RuleTable
    from primitives.core.spec import Spec

__all__ = ["decomposed_vjp", "vmap_by_loop"]


def decomposed_vjp(rules: RuleTable, residuals: Any, cotangents: Any, wanted: Any) -> dict[str, Any]:
    """The vjp rule of a primitive that has none: that of its decomposition."""
    spec, decomposition = rules.spec, rules.require_decomposition("vjp")
    args = {name: getattr(residuals, name) for name in spec.arguments}
    # A pullback may run after its level has ended: what it saved is then wrapped for a level that another one takes.
    flat, lengths = flatten([args[name] for name in spec.tensors], spec.list_tensors)
    tensors = [_alive(x) for x in flat]
    mask = wanted._replace(**dict.fromkeys(spec.cached, False))
    active = [i for i, want in enumerate(flatten(mask, spec.list_tensors)[0]) if want]
    places = range(len(cotangents[0])) if spec.returns_list else map(spec.outputs.index, cotangents._fields)
    by_place = zip(places, cotangents[0] if spec.returns_list else cotangents, strict=True)
    given = {place: _alive(cotangent) for place, cotangent in by_place if cotangent is not None}

    def function(*values: Any) -> tuple:
        substituted = list(tensors)
        for i, value in zip(active, values, strict=True):
            substituted[i] = value
        substitutes = zip(spec.tensors, regroup(substituted, lengths), strict=True)
        outputs = decomposition(*{**args, **dict(substitutes)}.values())
        flat = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
        return tuple(flat[place] for place in given)

    pullback = torch.func.vjp(function, *[tensors[i] for i in active])[1]
    result: list[Any] = [None] * len(tensors)
    for i, cotangent in zip(active, pullback(tuple(given.values())), strict=True):
        result[i] = cotangent
    return dict(zip(spec.tensors, regroup(result, lengths), strict=True))


def _alive(value: Any) -> Any:
    return torch._C._functorch.unwrap_if_dead(value) if isinstance(value, torch.Tensor) else value  # type: ignore[attr-defined] - no stub


def _random_states(on_cuda: bool) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_cuda else [])]


def _each_sample(name: str, randomness: str, size: int, tensors: Sequence[Any]) -> Iterator[int]:
    """The samples of a loop, which draw what vmap's `randomness` says: the same numbers, or none."""
    # A tracer's tensors draw no numbers.
    if randomness == "different" or detect_fake_mode(list(tensors)) is not None:
        yield from range(size)
        return
    on_cuda = any(isinstance(x, torch.Tensor) and x.is_cuda for x in tensors)
    first = _random_states(on_cuda)
    for i in range(size):
        if randomness == "same":
            torch.set_rng_state(first[0])
            if on_cuda:
                torch.cuda.set_rng_state(first[1])
        yield i
        if randomness == "error" and not all(map(torch.equal, _random_states(on_cuda), first)):
            raise RuntimeError(
                f"vmap: {name} called a random operation while in randomness error mode. Please either use "
                "the 'same' or 'different' randomness flags on vmap or perform the randomness operation out of vmap."
            )


def vmap_by_loop(spec: Spec, size: int, randomness: str, axes: tuple, args: tuple) -> tuple[Any, Any]:
    """The batching rule of a primitive that has none: one call for each sample.

    torch.vmap of the reference is no choice: the dispatcher keys of a running batching rule exclude a new layer.
    """
    # An argument that is no list has one axis or None, a list has a list of them.
    (flat, lengths), (flat_axes, _) = flatten(args, spec.list_arguments), flatten(axes, spec.list_arguments)

    def outputs_of(sample: list) -> Sequence[Any]:
        output = spec.overload(*regroup(sample, lengths))
        return output if spec.returns_list or len(spec.outputs) > 1 else (output,)

    def sample(i: int) -> list:
        return [x if axis is None else x.select(axis, i) for x, axis in zip(flat, flat_axes, strict=True)]

    if size:
        rows = [outputs_of(sample(i)) for i in _each_sample(spec.name, randomness, size, flat)]
        stacks = [torch.stack(column) for column in zip(*rows, strict=True)]
    else:
        # The shapes and dtypes of the results for no sample are those for a sample of zeros.
        zeros = [
            x if axis is None else x.new_zeros(x.movedim(axis, 0).shape[1:])
            for x, axis in zip(flat, flat_axes, strict=True)
        ]
        stacks = [x.new_empty((0, *x.shape)) for x in outputs_of(zeros)]
    if spec.returns_list:
        return stacks, [0] * len(stacks)
    return (tuple(stacks), (0,) * len(stacks)) if len(stacks) > 1 else (stacks[0], 0)
