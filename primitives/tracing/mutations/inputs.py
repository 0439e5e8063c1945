"""The inputs of a function that writes: copies to run it on, and the way back from these to the inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from primitives.tracing.errors import UserCalls, typed_errors
from primitives.tracing.joint.grad_guard import grads_guarded
from primitives.tracing.memory import extent, is_wrapped, memories, require_storage, storages
from primitives.tracing.mutations.modes import FUNCTION, make_mode, unrecorded
from primitives.tracing.torch_private import is_tracing
from primitives.tracing.watching import WriteWatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Inputs"]


def _geometry(x: Tensor) -> tuple[Any, ...]:
    if x.layout != torch.strided:
        return tuple(x.shape), x.layout, x.dtype
    return tuple(x.shape), tuple(x.stride()), x.storage_offset(), x.dtype


class Inputs:
    """Leaves of the arguments of a function, and copies of them that it may write.

    Args:
        leaves: The leaves. What is no tensor is passed on.
        labels: Key path of each, for errors.

    Attributes:
        copies: The copies. Inputs that overlap in memory have copies that overlap alike.
    """

    def __init__(self, leaves: Sequence[Any], labels: Sequence[str]) -> None:
        self._leaves = leaves
        self._labels = labels
        self._mode = make_mode()
        self._mode.labels = labels
        for label, x in zip(labels, leaves, strict=True):
            require_storage(FUNCTION, label, x)
        self._tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self.copies: list[Any] = list(leaves)
        self._of_copy: dict[int, int] = {}
        with unrecorded():
            clusters = self._clusters()
        with self._mode:
            for cluster in clusters:
                self._copy_cluster(cluster)
        self._register()

    def _clusters(self) -> list[list[int]]:
        """Places of the tensors, those together that overlap in memory."""
        by_memory: dict[int, list[int]] = {}
        alone = []
        for i in self._tensors:
            numbers = memories(self._leaves[i])
            if numbers:
                by_memory.setdefault(numbers[0], []).append(i)
            else:
                alone.append([i])
        clusters = []
        for places in by_memory.values():
            clusters += [places] if len(places) == 1 or self._unrelatable(places) else self._overlapping(places)
        return [*clusters, *alone]

    def _unrelatable(self, places: list[int]) -> bool:
        group = [self._leaves[i] for i in places]
        return any(map(is_wrapped, group)) or len({x.dtype for x in group}) > 1

    def _overlapping(self, places: list[int]) -> list[list[int]]:
        clusters: list[list[int]] = []
        end = -1
        for i in sorted(places, key=lambda i: extent(self._leaves[i])):
            first, last = extent(self._leaves[i])
            if clusters and first < end:
                clusters[-1].append(i)
            else:
                clusters.append([i])
            end = max(end, last)
        return clusters

    def _copy_cluster(self, places: list[int]) -> None:
        places = sorted(places)
        first: dict[int, int] = {}
        for i in places:
            first.setdefault(id(self._leaves[i]), i)
        distinct = list(first.values())
        group = [self._leaves[i] for i in distinct]
        if len(distinct) == 1 or self._unrelatable(distinct) or any(map(_overlaps_itself, group)):
            for i in distinct:
                self.copies[i] = self._mode.copy_of(self._leaves[i])
                if len(distinct) > 1:
                    self._mode.unrelated[i] = ", ".join(self._labels[j] for j in distinct if j != i)
        else:
            self._copy_shared(distinct)
        for i in places:
            self.copies[i] = self.copies[first[id(self._leaves[i])]]

    def _copy_shared(self, places: list[int]) -> None:
        group = [self._leaves[i] for i in places]
        memory = self._mode.copy_of(_detached(group[0]), max(extent(x)[1] for x in group))
        with torch.enable_grad():
            # The first one is written last: the gradient of an element that several inputs have goes to it.
            for x in reversed(group):
                if x.requires_grad:
                    memory.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)
            for i, x in zip(places, group, strict=True):
                self.copies[i] = memory.as_strided(x.shape, x.stride(), x.storage_offset())

    def _register(self) -> None:
        """Remember the copies as they are before the function."""
        mode = self._mode
        mode.copies = self.copies
        self._memories: dict[int, list[int]] = {}
        self._geometries: dict[int, tuple[Any, ...]] = {}
        # Held, so that no tensor of the function comes to lie where a copy was.
        self._held = [storages(self.copies[i]) for i in self._tensors]
        for i in self._tensors:
            copy, x = self.copies[i], self._leaves[i]
            self._of_copy.setdefault(id(copy), i)
            self._memories[i] = memories(copy)
            self._geometries[i] = _geometry(copy)
            for number in self._memories[i]:
                mode.places.setdefault(number, []).append(i)
            if x.requires_grad and x.is_leaf:
                mode.hidden_matters[i] = not is_wrapped(x)

    def run(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the function returns for the copies."""
        mode = self._mode
        calls = UserCalls(
            FUNCTION,
            is_symbolic=mode.is_symbolic,
            on_data=mode.on_data,
            on_memory=mode.on_memory,
            refuses_seeds=is_tracing(),
        )
        guarded = grads_guarded(FUNCTION, self._labels.__getitem__, self.copies, self._leaves, self._leaves)
        with typed_errors(FUNCTION):
            with guarded, mode, mode.armed(), calls:
                output = fn(*args, **kwargs)
            mode.views.check([*optree.tree_leaves(output), *self.copies])
            mode.finish()
        return output

    def announce(self, places: Sequence[int]) -> None:
        """Tell those who watch the inputs that only copies of these were written to.

        What shares memory with such an input must not be another copy's, or it lacks the write.
        """
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, WriteWatcher):
                for i in self._data.intersection(places):
                    mode.on_written_copy(self._leaves[i])

    def changed(self) -> list[int]:
        """Places of the inputs that the function wrote to, once for each tensor."""
        with unrecorded():
            self._look_at_handed_out()
            self._compare()
        found = self._data | self._moved | self._reshaped
        return [i for i in self._tensors if i in found and self._of_copy[id(self.copies[i])] == i]

    def _look_at_handed_out(self) -> None:
        """Count what was written by NumPy, or straight to a storage, of which no operation is seen."""
        for i in sorted(self._mode.handed_out - self._mode.written):
            x, copy = self._leaves[i], self.copies[i]
            if not is_wrapped(x) and _geometry(x) == _geometry(copy) and not _same_bits(x, copy):
                self._mode.check_handed_out(i)

    def _compare(self) -> None:
        self._data = self._mode.written
        self._moved = {i for i in self._tensors if memories(self.copies[i]) != self._memories[i]}
        self._reshaped = {i for i in self._tensors if _geometry(self.copies[i]) != self._geometries[i]}
        self._within = {i for i in self._tensors if i not in self._reshaped or self._fits(i, self.copies[i])}
        self._back: set[int] = set()

    def kept(self, places: list[int]) -> list[int]:
        """Those of `places` whose new values can be copied to the inputs at the end of a graph."""
        metadata = self._moved | self._reshaped
        return [i for i in places if i not in metadata and not self._leaves[i].requires_grad]

    def write_back(self, places: list[int]) -> None:
        """Make these inputs what the function made of their copies."""
        moved = [i for i in places if i in self._moved or i not in self._within]
        for i in places:
            x, copy = self._leaves[i], self.copies[i]
            if i in moved:
                with torch.no_grad():
                    x.set_(copy.detach())
            elif i in self._reshaped:
                x.as_strided_(copy.shape, copy.stride(), copy.storage_offset())
        for i in places:
            x = self._leaves[i]
            if i in self._data and i not in moved:
                # Read, as torch takes a view whose base has come to require grad for a leaf until then.
                _ = x.grad_fn
                x.copy_(self.copies[i])
        self._back = {i for i in self._tensors if self._of_copy[id(self.copies[i])] in places}

    def new_value(self, place: int) -> Tensor:
        """What an input that was written to is afterwards, the input itself being left alone."""
        copy = self.copies[place]
        return copy if place in self._data or place not in self._within else self._regenerated(copy)

    def outside(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs, as aliases of inputs where they are aliases of the inputs' copies; one for one tensor."""
        found: dict[int, Tensor] = {}
        for y in outputs:
            if id(y) not in found:
                found[id(y)] = self._outside(y)
        return [found[id(y)] for y in outputs]

    def _outside(self, y: Tensor) -> Tensor:
        place = self._of_copy.get(id(y))
        if place is None:
            return self._regenerated(y)
        if place in self._back:
            return self._leaves[place]
        changed = place in self._data or place in self._moved or place in self._reshaped
        return self.new_value(place) if changed else self._leaves[place]

    def _source(self, y: Tensor) -> int | None:
        """Place of the input whose copy `y` shares memory with, if that copy is no new value."""
        numbers = memories(y)
        places = [
            i
            for i in self._tensors
            if numbers and self._memories[i] == numbers and (i not in self._data or i in self._back)
            if i not in self._moved or i not in self._back
        ]
        if len(places) > 1 and not any(is_wrapped(self._leaves[i]) for i in places):
            first, last = extent(y)
            inside = [i for i in places if extent(self._leaves[i])[0] <= first and last <= extent(self._leaves[i])[1]]
            places = inside or places
        return places[0] if places else None

    def _regenerated(self, y: Tensor) -> Tensor:
        with unrecorded():
            place = self._source(y)
            if place is None or (self._mode.records and place not in self._back):
                return y
            x, copy = self._leaves[place], self.copies[place]
            regular = not is_wrapped(x) and y.dtype == x.dtype and self._fits(place, y)
            same = regular and _geometry(y) == _geometry(x)
        base = y._base
        if base is not None and place not in self._reshaped and copy._base is None:
            new_base = x if base is copy else self._regenerated(base)
            result = y._view_func_unsafe(new_base) if new_base is not base else y  # type: ignore[attr-defined] - no stub
        elif not regular:
            return y
        elif same:
            result = x.detach() if x.requires_grad and not y.requires_grad else torch.ops.aten.alias.default(x)
        else:
            result = x.as_strided(y.shape, y.stride(), y.storage_offset())
        if y.requires_grad and not result.requires_grad:
            # Its history, which the input lacks as it was written to behind autograd's back, is worth more.
            return y
        return result.detach() if result.requires_grad and not y.requires_grad else result

    def _fits(self, place: int, y: Tensor) -> bool:
        """Whether the memory of an input suffices for the metadata of `y`."""
        x = self._leaves[place]
        return not is_wrapped(x) and bool(extent(y)[1] * y.element_size() <= x.untyped_storage().nbytes())


def _detached(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(*(z.detach().reshape(-1).contiguous().view(torch.uint8) for z in (x, y)))


def _overlaps_itself(x: Tensor) -> bool:
    return x.layout == torch.strided and any(
        n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)
    )
