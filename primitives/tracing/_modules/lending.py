"""A module that is lent to a call: its attributes come back as they were, and writes to its buffers are caught."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import RootGuardManager
from torch.nn import functional as torch_functional
from torch.nn.modules.batchnorm import BatchNorm1d, SyncBatchNorm
from torch.overrides import TorchFunctionMode

from primitives import functional
from primitives._core.autograd import is_transforming
from primitives._core.write_back import cumulative_weight, write_back
from primitives.ops.norms.group_norm import pure_instance_norm
from primitives.tracing._recompute import replaying_checkpoints
from primitives.tracing._torch_private import bottom, function_modes

# Those of hooks too: one that a call registers would run twice in the next, which finds no mark that it is there.
_REGISTRIES = tuple(name for name, x in vars(nn.Module()).items() if isinstance(x, (dict, set)))
# Batch norms that read nothing of their momentum but whether it is None, and hand it on.
_FORWARDS_THAT_PASS_MOMENTUM = (BatchNorm1d.forward, SyncBatchNorm.forward)
_write_back = torch.ops.primitives.write_back.default


@contextlib.contextmanager
def attributes_kept(owners: Sequence[nn.Module]) -> Iterator[None]:
    """Context after which the attributes of modules are what they were, where no compiler runs."""
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    # Those of TorchScript belong to its own object.
    owners = [owner for owner in owners if not isinstance(owner, torch.jit.ScriptModule)]
    originals = [owner.__dict__ for owner in owners]
    try:
        # On a copy of its attributes, a module can change whatever it wants.
        for owner in owners:
            object.__setattr__(owner, "__dict__", _copied(owner.__dict__))
        yield
    finally:
        for owner, attributes in zip(owners, originals, strict=True):
            object.__setattr__(owner, "__dict__", attributes)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {**attributes, **{name: attributes[name].copy() for name in _REGISTRIES}}


def counting_in(owners: Sequence[nn.Module]) -> list[nn.Module]:
    """Batch norms of torch that will read their counter as a number, to average over all batches."""
    norms = [x for x in owners if type(x).forward in _FORWARDS_THAT_PASS_MOMENTUM and x.training]
    return [x for x in norms if x.momentum is None and x.track_running_stats and x.num_batches_tracked is not None]


@contextlib.contextmanager
def running(owners: Sequence[nn.Module]) -> Iterator[None]:
    """Context for a call of modules, within `attributes_kept`: buffers are rebound, and checkpoints replay."""
    counting = counting_in(owners)
    for owner in counting:
        owner.momentum = BatchWeight(owner)  # type: ignore[assignment] - stands for a float
    mode = _PureMode(owners)
    is_dynamo = torch.compiler.is_dynamo_compiling()
    checkpoints = contextlib.nullcontext() if is_dynamo else replaying_checkpoints(mode.moment)
    try:
        with mode, checkpoints:
            yield
    finally:
        for owner in counting:
            owner.momentum = None  # type: ignore[assignment] - as it was


def is_lending() -> bool:
    """Whether a call of lent modules runs on this thread."""
    return any(isinstance(mode, _PureMode) for mode in function_modes())


class BatchWeight:
    """Stands for `momentum=None` of a batch norm module: the weight that makes running statistics plain averages.

    The module reads its counter as a Python number, which neither `vmap` nor a compiler can. With this in the place of
    its momentum it hands the counter on unread.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class _PureMode(TorchFunctionMode):
    """New running statistics and counters take the place of the old ones, and are not written over them."""

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        super().__init__()
        self._owners = owners
        # A copy of each buffer, and how often the buffer had been written then, for checkpointed regions.
        self._copies: dict[Tensor, tuple[int, Tensor]] = {}
        self._places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for owner in owners:
            for leaf, value in owner._buffers.items():
                if value is not None:
                    self._places[value] = [*self._places.get(value, []), (owner, leaf)]

    def write(self, targets: list[Tensor], values: list[Tensor]) -> None:
        """Rebind what is a buffer of the modules, so that it may be batched; write anything else in place."""
        others = []
        for target, value in zip(targets, values, strict=True):
            places = self._places.pop(target, [])
            for owner, leaf in places:
                if owner._buffers.get(leaf) is target:
                    owner._buffers[leaf] = value
            if places:
                self._places[value] = places
            else:
                others.append((target, value))
        if others:
            write_back(*map(list, zip(*others, strict=True)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        if func is _write_back:
            return self.write(*args)
        stand_in = _WRITERS.get(func)
        result = NotImplemented if stand_in is None else stand_in(self, *args, **kwargs or {})
        if result is not NotImplemented:
            return result
        if func is torch.Tensor.unflatten:
            # Torch's method calls `super()`, which Dynamo cannot trace inside a mode; multi-head attention calls it.
            return torch.unflatten(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def moment(self, is_reentrant: bool) -> Callable[[], contextlib.AbstractContextManager] | None:
        """The context in which a checkpointed region that begins here is computed again; `None` on another thread."""
        if self not in function_modes():
            return None
        if is_reentrant and torch.is_grad_enabled():
            # It takes the parameters that it finds in the module in the backward pass.
            raise RuntimeError(
                "pure_module: the module calls torch.utils.checkpoint with use_reentrant=True, whose backward "
                "pass cannot be given the parameters of the call. Pass use_reentrant=False."
            )
        attributes = [_copied(owner.__dict__) for owner in self._owners]
        buffers = [x for each in attributes for x in each["_buffers"].values() if x is not None]
        copies = {x: self._copy(x) for x in dict.fromkeys(buffers)}

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            # One buffer for all of its places, and another one for each time.
            used = {x: copy.clone() for x, copy in copies.items()}
            with attributes_kept(self._owners):
                for owner, earlier in zip(self._owners, attributes, strict=True):
                    registry = {leaf: used.get(x) for leaf, x in earlier["_buffers"].items()}
                    object.__setattr__(owner, "__dict__", {**_copied(earlier), "_buffers": registry})
                with running(self._owners):
                    yield

        return again

    def _copy(self, x: Tensor) -> Tensor:
        """A copy of a buffer, which the regions share between which nothing writes to it."""
        version = -1 if x.is_inference() else bottom(x)._version
        found = self._copies.get(x)
        if found is None or found[0] != version or version < 0:
            self._copies[x] = found = version, x.clone()
        return found[1]


def _batch_norm(
    mode: _PureMode, input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: Any = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if not training or running_mean is None or running_var is None:
        return NotImplemented
    if isinstance(momentum, BatchWeight):
        momentum = cumulative_weight(momentum.module.num_batches_tracked)  # type: ignore[arg-type] - a buffer
    out = functional.pure_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    mode.write([running_mean, running_var], [out.running_mean, out.running_var])
    return out.output


def _instance_norm(
    mode: _PureMode, input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if not use_input_stats or running_mean is None or running_var is None:
        return NotImplemented
    y, *moved = pure_instance_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
    mode.write([running_mean, running_var], moved)
    return y


def _count(mode: _PureMode, counter: Any, number: Any, **others: Any) -> Any:
    # A batch norm counts its batches in place, which a transform refuses for a tensor from outside it.
    is_counter = isinstance(counter, torch.Tensor) and counter.dtype == torch.int64 and type(number) is int
    if others or not is_counter or not is_transforming():
        return NotImplemented
    mode.write([counter], [counter + number])
    return counter


_WRITERS = {
    torch_functional.batch_norm: _batch_norm,
    torch_functional.instance_norm: _instance_norm,
    torch.Tensor.add_: _count,
    torch.Tensor.__iadd__: _count,
}


def guard_of(objects: list[Any]) -> Any:
    """Its `check(objects)` tells whether no dictionary, no attribute, and no class of a module has changed since."""
    from torch._dynamo.guards import GuardManagerType

    root, kind = RootGuardManager(), GuardManagerType.GUARD_MANAGER
    for k, x in enumerate(objects):
        manager, values = root.list_getitem_manager(k, "", x, kind), x
        if isinstance(x, nn.Module):
            values = vars(x)
            manager.add_type_match_guard(id(type(x)), [""], None)
            manager = manager.get_generic_dict_manager("", values, kind)
        manager.add_dict_version_guard(values, [""], None)
    return root
