"""Plain eager calls, which can pass the dispatcher by: nothing takes part that it would have to see."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import _C

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from primitives.core.primitive import Primitive

__all__ = ["direct_call", "plain_keys", "state_of_new_threads"]

# What a plain eager call finds: nothing that changes where calls go, and these keys on its tensors.
_INCLUDED, _EXCLUDED = _C._dispatch_tls_local_include_set, _C._dispatch_tls_local_exclude_set
_num_function_modes, _is_profiling = _C._len_torch_function_stack, torch.autograd._profiler_enabled


def _state() -> tuple[int, int]:
    return _INCLUDED().raw_repr(), _EXCLUDED().raw_repr()


def state_of_new_threads() -> tuple[int, int]:
    """What a thread begins with: this one may be inside autocast, or another mode, when this module is imported."""
    found: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: found.append(_state()))
    thread.start()
    thread.join()
    return found[0]


_PLAIN_STATE = state_of_new_threads()
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _plain_keys() -> dict[int, Any]:
    """For each device, the keys of a plain tensor, and those of them that an operator sees."""
    keys = {}
    for device in ("CPU", "CUDA"):
        names = (device, f"Autograd{device}", "ADInplaceOrView", f"Autocast{device}")
        backend, autograd, idle, autocast = (_C.DispatchKeySet(getattr(_C.DispatchKey, name)) for name in names)
        keys[(backend | autograd | idle | autocast).raw_repr()] = backend | autograd
    return keys


_PLAIN_KEYS = _plain_keys()


def plain_keys(tensors: Sequence[Tensor]) -> Any:
    """The keys with which the dispatcher would call an operator of `tensors`, one at least, in plain eager code.

    `None` where anything unusual takes part that the dispatcher has to see: a mode, a transform, a profiler, a
    subclass, tensors of several kinds.
    """
    if _state() != _PLAIN_STATE or _num_function_modes() or _is_profiling():
        return None
    first = _C._dispatch_keys(tensors[0]).raw_repr()
    for x in tensors:
        if type(x) not in _PLAIN_TYPES or _C._dispatch_keys(x).raw_repr() != first:
            return None
    return _PLAIN_KEYS.get(first)


def direct_call(op: Primitive) -> Callable[[list[Tensor], int], list[Tensor]]:
    """`(tensors, number) -> outputs` for an operator of one list of tensors and a number, in eager code.

    In plain code the dispatcher would take the list apart, put it together again and call the Autograd kernel, which
    costs a quarter of a call. It is called here and now then.
    """
    overload, kernel = op.overload._op, op.autograd_kernel

    def call(tensors: list[Tensor], number: int) -> list[Tensor]:
        keyset = plain_keys(tensors)
        return overload(tensors, number) if keyset is None else kernel(keyset, tensors, number)

    return call
