"""Plain eager calls, which can pass the dispatcher by: nothing takes part that it would have to see."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import _C
from torch._C import _functorch  # type: ignore[attr-defined] - no stub

from primitives.core.residuals import picker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from primitives.core.primitive import Primitive

__all__ = ["PLAIN_CPU", "are_unwatched", "direct_call", "plain_keys", "state_of_new_threads"]

# What a plain eager call finds: nothing that changes where calls go, and these keys on its tensors.
_INCLUDED, _EXCLUDED = _C._dispatch_tls_local_include_set, _C._dispatch_tls_local_exclude_set
_num_function_modes, _num_dispatch_modes = _C._len_torch_function_stack, _C._len_torch_dispatch_stack
_is_profiling = torch.autograd._profiler_enabled
_keys = _C._dispatch_keys


def _state() -> tuple[int, int]:
    return _INCLUDED().raw_repr(), _EXCLUDED().raw_repr()


def state_of_new_threads() -> tuple[int, int]:
    """What a thread begins with: this one may be inside autocast, or another mode, when this module is imported."""
    found: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: found.append(_state()))
    thread.start()
    thread.join()
    return found[0]


_PLAIN_INCLUDED, _PLAIN_EXCLUDED = state_of_new_threads()
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# Lists of flags come from rules alone, which make them of flags.
_TYPES_BY_KIND = {
    "Tensor": _PLAIN_TYPES,
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "ScalarType": (torch.dtype,),
    "List[bool]": (list, tuple),
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
# What `plain_keys` returns: the kernel of an operator knows a plain call by the identity of its keys.
PLAIN_CPU, _ = _PLAIN_KEYS.values()


def _keys_in_plain_code(tensors: Sequence[Tensor]) -> Any:
    """`plain_keys` of tensors that are no subclasses."""
    if (
        _INCLUDED().raw_repr() != _PLAIN_INCLUDED
        or _EXCLUDED().raw_repr() != _PLAIN_EXCLUDED
        or _num_function_modes()
        or _is_profiling()
    ):
        return None
    first = 0
    for x in tensors:
        found = _keys(x).raw_repr()
        if first and found != first:
            return None
        first = found
    return _PLAIN_KEYS.get(first)


def plain_keys(tensors: Sequence[Tensor]) -> Any:
    """The keys with which the dispatcher would call an operator of `tensors` in plain eager code.

    `None` where anything unusual takes part that the dispatcher has to see: a mode, a transform, a profiler, a
    subclass, tensors of several kinds, or none.
    """
    for x in tensors:
        if type(x) not in _PLAIN_TYPES:
            return None
    return _keys_in_plain_code(tensors)


def are_unwatched(tensors: Sequence[Tensor]) -> bool:
    """Whether no transform, mode or subclass takes part, so that one of ATen's operations can stand for one of ours.

    Less than `plain_keys` asks, in half of its time: a profiler and autocast see what ATen does.
    """
    if _functorch.peek_interpreter_stack() is not None or _num_dispatch_modes() or _num_function_modes():
        return False
    for x in tensors:  # noqa: SIM110 - a generator costs more than the questions
        if type(x) not in _PLAIN_TYPES:
            return False
    return True


def _plain_types(kind: str) -> frozenset[type]:
    """Types of what needs no conversion where the schema says `kind`; anything else is the dispatcher's to look at."""
    if kind.startswith("Optional["):
        return _plain_types(kind[len("Optional[") : -1]) | {type(None)}
    return frozenset(_TYPES_BY_KIND.get(kind, ()))


def _tensors_of(types: tuple[type, ...], kinds: Sequence[str]) -> Callable[[Sequence[Any]], tuple] | None:
    """`args -> tensors among them`, for arguments of these types; `None` if the dispatcher has to look at them."""
    if len(types) != len(kinds) or any(t not in _plain_types(k) for t, k in zip(types, kinds, strict=True)):
        return None
    return picker([i for i, found in enumerate(types) if found in _PLAIN_TYPES])


def direct_call(op: Primitive) -> Callable[..., Any]:
    """`(*args) -> outputs` for an operator in eager code.

    In plain code the dispatcher would take the arguments apart, put them together again and call the Autograd kernel,
    which costs as much as a small kernel. It is called here and now then.
    """
    overload, kernel = op.overload._op, op.autograd_kernel
    kinds = [str(argument.real_type) for argument in op.overload._schema.arguments]
    if kinds == ["List[Tensor]", "int"]:
        return _direct_call_of_list(overload, kernel)
    # One entry for each pattern of `None`s that the operator is called with; nothing is kept for other types.
    known: dict[tuple[type, ...], Callable[[Sequence[Any]], tuple]] = {}

    def call(*args: Any) -> Any:
        types = tuple(map(type, args))
        tensors_of = known.get(types)
        if tensors_of is None:
            tensors_of = _tensors_of(types, kinds)
            if tensors_of is None:
                return overload(*args)
            known[types] = tensors_of
        keyset = _keys_in_plain_code(tensors_of(args))
        return overload(*args) if keyset is None else kernel(keyset, *args)

    return call


def _direct_call_of_list(overload: Callable, kernel: Callable) -> Callable[[list[Tensor], int], list[Tensor]]:
    """The same for an operator of one list of tensors and a number."""

    def call(tensors: list[Tensor], number: int) -> list[Tensor]:
        keyset = plain_keys(tensors)
        return overload(tensors, number) if keyset is None else kernel(keyset, tensors, number)

    return call
