"""What the forward graph hands to the backward graph, checked when it is taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from primitives.core.errors import DtypeError, LeafError, MutationError, ShapeError
from primitives.tracing import torch_private as internals

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_saved", "handed_out"]

_FUNCTION = "BackwardGraph"


class _Origin(NamedTuple):
    """Where a saved tensor comes from.

    Attributes:
        graph: Identity of the graph.
        place: Its place among what is saved.
        version: How often its memory had been written to.
    """

    graph: tuple[Any, ...]
    place: int
    version: int | None


# Beside the tensors and not in them, or in a tuple of a kind of its own, so that what is saved is a plain tuple to
# those who store and send it: a copy has no origin, and its memory is its own.
_origins: Any = WeakIdKeyDictionary()


def _version(x: torch.Tensor) -> int | None:
    return None if x.is_inference() else x._version


def handed_out(values: Sequence[Any], graph: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the forward graph saves, as it is given to the caller.

    Args:
        values: Tensors and sizes.
        graph: Identity of the graph.
    """
    if torch.compiler.is_compiling():
        return tuple(values)
    # Other objects, as one and the same primal may be saved by several runs. Not by `detach`, which takes the tangent
    # of forward mode away.
    with torch.no_grad():
        saved = tuple(torch.ops.aten.alias.default(x) if isinstance(x, torch.Tensor) else x for x in values)
    for i, x in enumerate(saved):
        if isinstance(x, torch.Tensor):
            _origins[x] = _Origin(graph, i, _version(x))
    return saved


def check_saved(
    saved: Sequence[Any], described: Sequence[Any], labels: Sequence[str], graph: tuple[Any, ...]
) -> dict[Any, int]:
    """What the symbols in sizes stand for; raises unless `saved` is what the forward graph saved, untouched since.

    Args:
        saved: What the caller passes.
        described: The values without memory that the graph was made with.
        labels: Name of each.
        graph: Identity of the graph.

    Raises:
        TypeError: If `saved` is no sequence.
        ValueError: If there are too few or too many, or they are another graph's.
        LeafError: If one is no tensor where a tensor was saved, or no size where a size was.
        ShapeError: If one has another shape.
        DtypeError: If one has another dtype.
        MutationError: If one was written to after the forward pass.
    """
    if not isinstance(saved, (tuple, list)):
        raise TypeError(f"{_FUNCTION}: saved must be the tuple that the forward graph gave, got {saved!r}.")
    if len(saved) != len(described):
        raise ValueError(f"{_FUNCTION}: saved must have {len(described)} entries, got {len(saved)}.")
    symbols = internals.bindings(described, saved)
    for i, (x, fake) in enumerate(zip(saved, described, strict=True)):
        label = f"saved[{i}] ({labels[i]})"
        _check_kind(label, x, fake, symbols)
        if isinstance(x, torch.Tensor) and not torch.compiler.is_compiling():
            _check_origin(label, x, graph, i)
    return symbols


def _check_kind(label: str, x: Any, fake: Any, symbols: dict[Any, int]) -> None:
    if not isinstance(fake, torch.Tensor):
        if isinstance(x, torch.Tensor):
            raise LeafError(f"{_FUNCTION}: {label} must be a size, got a tensor {list(x.shape)}.")
        return
    if not isinstance(x, torch.Tensor):
        raise LeafError(f"{_FUNCTION}: {label} must be a tensor, got {type(x).__name__}.")
    if x.dtype != fake.dtype:
        raise DtypeError(f"{_FUNCTION}: {label} must have dtype {fake.dtype}, got {x.dtype}.")
    sizes = internals.bound_sizes(fake.shape, symbols)
    if not internals.sizes_fit(sizes, x):
        raise ShapeError(f"{_FUNCTION}: {label} must have shape {sizes}, got {list(x.shape)}.")


def _check_origin(label: str, x: torch.Tensor, graph: tuple[Any, ...], place: int) -> None:
    origin = _origins.get(x)
    if origin is None:
        return
    if (origin.graph, origin.place) != (graph, place):
        raise ValueError(
            f"{_FUNCTION}: {label} was saved by another forward graph, or stood at another place. Pass what the "
            "forward graph of the same trace and the same min_cut gave."
        )
    version = _version(x)
    if version != origin.version:
        raise MutationError(
            f"{_FUNCTION}: {label} was written to in place after the forward pass: it is at version {version}, and "
            f"was saved at version {origin.version}. Write to a copy, or run the backward pass first."
        )
