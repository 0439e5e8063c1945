"""Batches: what vmap rules are told, and the loop over the samples for an operator that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from primitives._core.sequences import flatten, regroup
from primitives._core.spec import Spec


class BatchInfo(NamedTuple):
    """The batch that a vmap rule gets beside its arguments.

    Attributes:
        size: Length of the batch axis.
        axes: One entry per argument, by name: position of its batch axis, or `None` where it has none; a list of
            these for a list of tensors.
        randomness: The mode of random operations: `"error"`, `"same"` or `"different"`.
    """

    size: int
    axes: tuple
    randomness: str = "error"

    def is_batched(self, *names: str) -> bool:
        """Whether any of the named arguments carries the batch axis."""
        return any(getattr(self.axes, name) is not None for name in names)


def to_front(x: Tensor | None, axis: int | None, size: int) -> Tensor | None:
    """`x` with its batch axis first; an unbatched tensor is expanded (stride 0, no copy), `None` stays `None`."""
    if x is None:
        return None
    return x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)


def legacy_vmap_kernel(op: Callable[..., Any]) -> Callable[..., Any]:
    """Kernel of `op` for torch's older vmap, under which batches of cotangents run (`is_grads_batched`): `torch.vmap`.

    Torch's own kernel for that dispatch key loops over the batch, and refuses lists of tensors.
    """

    def kernel(*args: Any) -> Any:
        leaves, treespec = tree_flatten(args)
        level, front = _innermost_batch(leaves)
        axes = [0 if x is not y else None for x, y in zip(leaves, front, strict=True)]
        outputs = torch.vmap(op, tree_unflatten(axes, treespec))(*tree_unflatten(front, treespec))
        return tree_map(lambda y: torch._add_batch_dim(y, 0, level), outputs)

    return kernel


def _innermost_batch(leaves: Sequence[Any]) -> tuple[int, list[Any]]:
    """The innermost level of the older vmap that any tensor belongs to, and the leaves with its axis at the front."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    while level > 0:
        front = [_without_level(x, level) if isinstance(x, torch.Tensor) else x for x in leaves]
        if any(x is not y for x, y in zip(leaves, front, strict=True)):
            return level, front
        level -= 1
    raise AssertionError("no argument is batched")


def _without_level(x: Tensor, level: int) -> Tensor:
    """`x` with its batch axis of this level at the front, or `x` itself if it has none."""
    one, two = (torch._remove_batch_dim(x, level, size, 0) for size in (1, 2))
    # Torch expands a tensor without that axis to the size it is told.
    return one if one.shape[0] == two.shape[0] else x


def _random_states(tensors: Sequence[Any]) -> list[Tensor]:
    return [torch.get_rng_state(), *get_device_states(*tensors)[1]]


def rewinder(tensors: Sequence[Any]) -> Callable[[], None]:
    """A function that sets the generators which a function of `tensors` draws from back to what they are now."""
    state, (devices, states) = torch.get_rng_state(), get_device_states(*tensors)

    def rewind() -> None:
        torch.set_rng_state(state)
        set_device_states(devices, states)

    return rewind


def _each_sample(name: str, randomness: str, size: int, tensors: Sequence[Any]) -> Iterator[int]:
    """The samples of a loop, which draw what vmap's `randomness` says: the same numbers, or none."""
    # A tracer's tensors draw no numbers.
    if randomness == "different" or detect_fake_mode(list(tensors)) is not None:
        yield from range(size)
        return
    first, rewind = _random_states(tensors), rewinder(tensors)
    for i in range(size):
        if randomness == "same":
            rewind()
        yield i
        if randomness == "error" and not all(map(torch.equal, _random_states(tensors), first)):
            raise RuntimeError(
                f"vmap: {name} called a random operation while in randomness error mode. Please either use "
                "the 'same' or 'different' randomness flags on vmap or perform the randomness operation out of vmap."
            )


def vmap_by_loop(spec: Spec, size: int, randomness: str, axes: tuple, args: tuple) -> tuple[Any, Any]:
    """The batching rule of a primitive that has none: one call for each sample.

    torch.vmap of the reference does not serve: the dispatcher keys of a running batching rule exclude a new layer.
    """
    # An argument that is not a list of tensors has one axis or None, or a list of Nones; such a list has one of them.
    (flat, lengths), (flat_axes, _) = flatten(args, spec.list_arguments), flatten(axes, spec.list_arguments)

    def outputs_of(sample: list) -> Sequence[Any]:
        output = spec.overload(*regroup(sample, lengths))
        return output if spec.returns_list or len(spec.outputs) > 1 else (output,)

    def sample(i: int) -> list:
        return [x.select(axis, i) if isinstance(axis, int) else x for x, axis in zip(flat, flat_axes, strict=True)]

    if size:
        rows = [outputs_of(sample(i)) for i in _each_sample(spec.name, randomness, size, flat)]
        stacks = [torch.stack(column) for column in zip(*rows, strict=True)]
    else:
        # The shapes and dtypes of the results for no sample are those for a sample of zeros.
        zeros = [
            x.new_zeros(x.movedim(axis, 0).shape[1:]) if isinstance(axis, int) else x
            for x, axis in zip(flat, flat_axes, strict=True)
        ]
        stacks = [x.new_empty((0, *x.shape)) for x in outputs_of(zeros)]
    if spec.returns_list:
        return stacks, [0] * len(stacks)
    return (tuple(stacks), (0,) * len(stacks)) if len(stacks) > 1 else (stacks[0], 0)
