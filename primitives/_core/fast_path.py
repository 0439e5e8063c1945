"""Plain eager calls, which can pass the dispatcher by: nothing takes part that it would have to see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _C, Tensor
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._ops import OpOverload

from primitives._core.sequences import tuple_getter

# The state of a plain eager call: nothing that changes where calls go, and these keys on its tensors.
_INCLUDED, _EXCLUDED = _C._dispatch_tls_local_include_set, _C._dispatch_tls_local_exclude_set
_num_function_modes, _num_dispatch_modes = _C._len_torch_function_stack, _C._len_torch_dispatch_stack
_is_profiling = torch.autograd._profiler_enabled
_keys = _C._dispatch_keys


def _state() -> tuple[int, int]:
    return _INCLUDED().raw_repr(), _EXCLUDED().raw_repr()


def state_of_new_threads() -> tuple[int, int]:
    """The first state of a thread: this one may be inside autocast, or another mode, when this module is imported."""
    found: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: found.append(_state()))
    thread.start()
    thread.join()
    return found[0]


_PLAIN_INCLUDED, _PLAIN_EXCLUDED = state_of_new_threads()
PLAIN_TYPES = frozenset([torch.Tensor, torch.nn.Parameter])
_TYPES_BY_KIND = {
    "Tensor": PLAIN_TYPES,
    "int": frozenset([int]),
    "float": frozenset([float]),
    "bool": frozenset([bool]),
    "str": frozenset([str]),
    "ScalarType": frozenset([torch.dtype]),
    # Rules make tuples of flags. Entries of lists are for the dispatcher to look at, lists of tensors to copy.
    "List[bool]": frozenset([tuple]),
}


def _plain_keys() -> dict[int, Any]:
    """For each device, the keys of a plain tensor, and those of them that an operator sees."""
    keys = {}
    for device in ("CPU", "CUDA"):
        names = (device, f"Autograd{device}", "ADInplaceOrView", f"Autocast{device}")
        backend, autograd, idle, autocast = (_C.DispatchKeySet(getattr(_C.DispatchKey, name)) for name in names)
        keys[(backend | autograd | idle | autocast).raw_repr()] = backend | autograd
    return keys


_PLAIN_KEYS = _plain_keys()
# The result of `fast_path_keys`: the kernel of an operator knows a plain call by the identity of its keys.
FAST_PATH_CPU, _ = _PLAIN_KEYS.values()


def fast_path_keys(tensors: Sequence[Tensor]) -> Any:
    """The keys with which the dispatcher would call an operator of `tensors` in plain eager code.

    `None` where anything unusual takes part that the dispatcher has to see: a mode, a transform, a profiler, a
    subclass, tensors of several kinds, or none.
    """
    if (
        _INCLUDED().raw_repr() != _PLAIN_INCLUDED
        or _EXCLUDED().raw_repr() != _PLAIN_EXCLUDED
        or _num_function_modes()
        or _is_profiling()
    ):
        return None
    first = 0
    for x in tensors:
        if type(x) not in PLAIN_TYPES:
            return None
        found = _keys(x).raw_repr()
        if first and found != first:
            return None
        first = found
    return _PLAIN_KEYS.get(first)


def are_unwatched(tensors: Sequence[Tensor]) -> bool:
    """Whether no transform, mode or subclass takes part, so that one of ATen's operations can stand for one of ours.

    Less than `fast_path_keys` asks, in a tenth of its time: a profiler and autocast see what ATen does.
    """
    if _num_function_modes() or _functorch.peek_interpreter_stack() is not None or _num_dispatch_modes():
        return False
    for x in tensors:  # noqa: SIM110 - a generator costs more than the questions
        if type(x) not in PLAIN_TYPES:
            return False
    return True


class FastPathTensors(dict[tuple[type, ...], "Callable[[Sequence[Any]], Sequence[Tensor]]"]):
    """By the types of the arguments of an operator: `args -> tensors`, all that are among them.

    Where the dispatcher would convert or refuse an argument of such a type there are none, and `fast_path_keys` says
    so. One entry is kept for each pattern of `None`s that the operator is called with.
    """

    def __init__(self, overload: OpOverload) -> None:
        arguments = overload._schema.arguments
        has_keywords = any(argument.kwarg_only for argument in arguments)
        self._kinds = None if has_keywords else [str(argument.real_type) for argument in arguments]

    def __missing__(self, types: tuple[type, ...]) -> Callable[[Sequence[Any]], Sequence[Tensor]]:
        """Learn a pattern; those of other types are not kept, since a type may be anybody's."""
        kinds = self._kinds
        if kinds is None or len(types) != len(kinds) or not all(map(_takes, kinds, types)):
            return tuple_getter(())
        self[types] = tuple_getter([i for i, found in enumerate(types) if found in PLAIN_TYPES])
        return self[types]


def _takes(kind: str, found: type) -> bool:
    """Whether what is of this type needs no conversion where the schema says `kind`."""
    if kind.startswith("Optional["):
        return found is type(None) or _takes(kind[len("Optional[") : -1], found)
    return found in _TYPES_BY_KIND.get(kind, ())
