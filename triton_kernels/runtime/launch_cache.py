"""Launch recipes: what a launcher allocated and launched, done again without asking how.

A launcher views its operands, plans, allocates and launches; all of that follows from the shapes, strides, dtypes,
devices and alignment of its tensors and from its other arguments. The second call with the same of these is recorded,
and later ones repeat it: one look-up, the results, one allocation for everything else, and the compiled kernels.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from .arithmetic import CACHE_LINE_BYTES, cdiv
from .kernel import INTERPRETED, MAX_INT32, DirectLaunch, are_launches_seen, recording
from .planned import plan_changes, remembered

Launcher = TypeVar("Launcher", bound=Callable[..., Any])

# Sequences may have any length, and every one of them needs a recipe; beyond this many, a launcher's are forgotten.
MAX_RECIPES = 1024

# Triton asks for this of an address; allocations have more.
_ALIGNMENT = 16
_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])
_SETTINGS = frozenset([type(None), bool, int, float, str, torch.dtype, tuple])
_aten = torch.ops.aten
_ALLOCATORS = frozenset(
    [
        *(_aten.empty, _aten.empty_like, _aten.empty_permuted, _aten.empty_strided),
        *(_aten.new_empty, _aten.new_empty_strided, _aten.new_zeros),
    ]
)
_ZEROS = frozenset([_aten.new_zeros, _aten.zero_])
_driver: Any = driver
_is_amd = bool(torch.version.hip)

# In place of a recipe: the call was seen once, or does what no recipe can repeat.
_SEEN, _UNREPEATABLE = object(), object()


def repeatable(launcher: Launcher) -> Launcher:
    """Decorate a launcher so that a call like an earlier one repeats its allocations and launches.

    A launcher takes its arguments by position, and returns tensors that it has allocated, each in memory of its own.
    Calls that copy an operand, or run any other operation of torch, are not repeated, and neither are those whose
    launches are watched, traced or interpreted.
    """
    if INTERPRETED:
        return launcher
    recipes: dict[Any, Any] = remembered({})

    @functools.wraps(launcher)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs or are_launches_seen():
            return launcher(*args, **kwargs)
        key, addresses = _described(args)
        recipe: Any
        try:
            recipe = recipes.get(key)
        except TypeError:
            recipe = _UNREPEATABLE
        if recipe.__class__ is Recipe and not any(recipe.hooks):
            return recipe.repeat(addresses)
        if recipe is _SEEN:
            return _record(recipes, key, launcher, args)
        if recipe is None:
            if len(recipes) >= MAX_RECIPES:
                recipes.clear()
            recipes[key] = _SEEN
        return launcher(*args)

    return wrapper  # pyright: ignore[reportReturnType] - same signature


def _described(args: tuple) -> tuple[Any, list[Any]]:
    """The key of a call, and the addresses of its tensors. A key that is a list has no hash, and is found nowhere."""
    key, addresses = [], []
    for arg in args:
        kind = arg.__class__
        if kind in _TENSORS:
            address = arg.data_ptr()
            addresses.append(address)
            key += (arg.shape, arg.stride(), arg.dtype, arg.get_device(), address % _ALIGNMENT)
            if _is_amd:
                key.append(arg.untyped_storage().nbytes() <= MAX_INT32)
        elif kind in _SETTINGS:
            key.append(arg)
        elif kind is list:
            key.append(tuple(arg))
        else:
            return [], []
    return tuple(key), addresses


class Recipe(NamedTuple):
    """Allocations and launches of a call, without any tensor.

    Kernels take values, in this order: the addresses of the tensors among the arguments, of the results and of other
    memory, all of `num_bytes`; addresses within these (`places`: the number of a value, and the distance in bytes); and
    what is not an address (`constants`). Results have a shape, strides and a dtype; those that are `zeroed` are zero at
    first, and a single one is not in a tuple. Of each launch there is the compiled kernel on its grid, what picks its
    arguments from the values, and the hooks that Triton would call before it. The device is the one that was in use.
    """

    device: int
    memory: torch.device
    results: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    zeroed: list[int]
    is_single: bool
    num_bytes: int
    places: list[tuple[int, int]]
    constants: list[Any]
    launches: list[tuple[Callable[..., None], Callable[[list[Any]], tuple]]]
    hooks: list[list]

    def repeat(self, values: list[Any]) -> Any:
        """Allocate and launch for arguments at the addresses `values`, and return the results."""
        active = _driver.active
        device = active.get_current_device()
        if device != self.device:
            with torch.cuda.device(self.device):
                return self.repeat(values)
        memory = self.memory
        results = [torch.empty_strided(shape, strides, dtype=d, device=memory) for shape, strides, d in self.results]
        for number in self.zeroed:
            results[number].zero_()
        values += [result.data_ptr() for result in results]
        scratch = torch.empty(self.num_bytes, dtype=torch.uint8, device=memory) if self.num_bytes else None
        values.append(0 if scratch is None else scratch.data_ptr())
        values += [values[number] + distance for number, distance in self.places]
        values += self.constants
        stream = active.get_current_stream(device)
        for run, pick in self.launches:
            run(*pick(values), stream=stream)
        return results[0] if self.is_single else tuple(results)


def _record(recipes: dict[tuple, Any], key: tuple, launcher: Callable, args: tuple) -> Any:
    """Results of the launcher, whose recipe is kept unless plans change meanwhile."""
    changes = plan_changes()
    # A tensor that is passed twice becomes two: other calls with this key may pass different ones.
    args = tuple(arg.detach() if _is_among(arg, args[:n]) else arg for n, arg in enumerate(args))
    recorder = _Recorder([arg for arg in args if isinstance(arg, torch.Tensor)])
    with recording(recorder.note), recorder:
        results = launcher(*args)
    if plan_changes() == changes:
        recipes[key] = recorder.recipe(results)
    return results


def _is_among(arg: Any, others: Sequence[Any]) -> bool:
    return isinstance(arg, torch.Tensor) and any(arg is other for other in others)


class _Recorder(TorchDispatchMode):
    """Follows memory from the arguments and allocations of a call to the arguments of its launches."""

    def __init__(self, args: Sequence[Tensor]) -> None:
        super().__init__()
        self._num_args, self._device = len(args), args[0].device
        # By the identity of an argument or a view of it: itself, the inverse of the argument's number, and the distance
        # in bytes.
        self._read = {id(arg): (arg, ~number, 0) for number, arg in enumerate(args)}
        # Allocations by the addresses of their storages: torch may have returned another tensor by now.
        self._made: dict[int, Tensor] = {}
        self._zeroed: list[int] = []
        # Launches, and for each argument that is an address the root, which is one of these inverse numbers or the
        # address of a storage, and the distance in bytes.
        self._launches: list[tuple[DirectLaunch, list[tuple[int, int] | None]]] = []
        # Kept instead of a recipe.
        self._refusal: object | None = None

    def _refuse(self, refusal: object) -> None:
        self._refusal = refusal
        # Tuning runs a launcher many times within one call.
        self._read, self._made, self._launches = {}, {}, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what an operation returns, or that it is more than a view or an allocation."""
        del types
        out = func(*args, **(kwargs or {}))
        if self._refusal is not None or func.overloadpacket is _aten.promote_types:
            return out
        packet = func.overloadpacket
        if packet in _ALLOCATORS and out.device == self._device and out.data_ptr() % _ALIGNMENT == 0:
            self._made[out.untyped_storage().data_ptr()] = out
        if packet in _ZEROS and self._is_fresh(out):
            self._zeroed.append(out.untyped_storage().data_ptr())
        elif packet not in _ALLOCATORS and not func.is_view:
            self._refuse(_UNREPEATABLE)
        elif func.is_view and id(args[0]) in self._read:
            source, root, distance = self._read[id(args[0])]
            for view in [out] if isinstance(out, torch.Tensor) else out:
                self._read[id(view)] = view, root, distance + view.data_ptr() - source.data_ptr()
        return out

    def _is_fresh(self, tensor: Tensor) -> bool:
        """Whether it is all of an allocation, and no kernel has had it yet."""
        storage = tensor.untyped_storage()
        used = (place for _, places in self._launches for place in places if place is not None)
        is_whole = storage.data_ptr() in self._made and storage.nbytes() == tensor.nbytes
        return is_whole and all(root != storage.data_ptr() for root, _ in used)

    def note(self, launch: DirectLaunch | None) -> None:
        """Note a launch; None for one that Triton made, or for none."""
        if self._refusal is not None:
            return
        if launch is None:
            self._refuse(_SEEN)
            return
        try:
            self._launches.append((launch, [self._place(arg) for arg in launch.args]))
        except KeyError:
            self._refuse(_UNREPEATABLE)

    def _place(self, arg: Any) -> tuple[int, int] | None:
        if not isinstance(arg, torch.Tensor) or arg.data_ptr() == 0:
            return None
        if id(arg) in self._read:
            return self._read[id(arg)][1:]
        storage = arg.untyped_storage().data_ptr()
        return storage, arg.data_ptr() - self._made[storage].data_ptr()

    def recipe(self, results: Any) -> object:
        """The recipe of the call that returned `results`, or what is kept in its place."""
        is_single = isinstance(results, torch.Tensor)
        made: list[Tensor] = [results] if is_single else list(results or ())
        if self._refusal is not None or not self._launches or not self._can_make(made):
            return self._refusal or _UNREPEATABLE
        storages = [result.untyped_storage().data_ptr() for result in made]
        # Where each root is among the values; what is not returned shares one allocation, on cache lines of its own.
        roots = [*(~number for number in range(self._num_args)), *storages]
        parts = {root: (value, 0) for value, root in enumerate(roots)}
        num_bytes, numbers = 0, {(value, 0): value for value in range(len(roots) + 1)}
        picks: list[list[int | None]] = []
        for _, places in self._launches:
            picks.append(pick := [])
            for place in places:
                if place is None:
                    pick.append(None)
                    continue
                root, distance = place
                if root not in parts:
                    parts[root] = len(roots), num_bytes
                    num_bytes += cdiv(self._made[root].untyped_storage().nbytes(), CACHE_LINE_BYTES) * CACHE_LINE_BYTES
                value, start = parts[root]
                pick.append(numbers.setdefault((value, start + distance), len(numbers)))
        constants = []
        for (launch, _), pick in zip(self._launches, picks, strict=True):
            for n, arg in enumerate(launch.args):
                if pick[n] is None:
                    pick[n] = len(numbers) + len(constants)
                    # A tensor without elements has no address.
                    constants.append(0 if isinstance(arg, torch.Tensor) else arg)
        launches = [launch for launch, _ in self._launches]
        return Recipe(
            device=launches[0].device,
            memory=self._device,
            results=[(tuple(result.shape), result.stride(), result.dtype) for result in made],
            zeroed=[number for number, storage in enumerate(storages) if storage in self._zeroed],
            is_single=is_single,
            num_bytes=num_bytes,
            places=list(numbers)[len(roots) + 1 :],
            constants=constants,
            launches=[(launch.run, operator.itemgetter(*pick)) for launch, pick in zip(launches, picks, strict=True)],
            hooks=[launch.hooks for launch in launches],
        )

    def _can_make(self, results: Sequence[Tensor]) -> bool:
        """Whether each result is all of an allocation of this call, and all else is left as it was allocated."""
        if not all(isinstance(result, torch.Tensor) for result in results):
            return False
        storages = [result.untyped_storage() for result in results if result.numel()]
        addresses = {storage.data_ptr() for storage in storages}
        return (
            not any(id(result) in self._read for result in results)
            and addresses <= self._made.keys()
            and len(addresses) == len(storages)
            and sum(storage.nbytes() for storage in storages) == sum(result.nbytes for result in results)
            and addresses | {0} >= set(self._zeroed)
        )
