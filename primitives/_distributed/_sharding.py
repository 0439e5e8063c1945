"""Rules of DTensor for calls of primitives: cut along an axis that is free, or run the reference on the parts.

Along a free axis (`ops/axes.py`) each process runs the operator on its part, without a message. Where x is cut along
another axis, the normalized one or the classes of a softmax, the reference runs instead, whose sums over that axis
DTensor turns into messages as long as statistics. Anything else DTensor redistributes.

Imported once `torch.distributed.tensor` is; nothing here imports it for a program that has no DTensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from primitives._core import registered_primitives
from primitives._core.rules import RuleTable
from primitives._core.spec import NAMESPACE
from primitives.ops.axes import CallAxes

# Those of operators whose results follow from their arguments alone.
_NAMESPACES = (NAMESPACE, "primitives_composed")


def _axes_of(rules: RuleTable, args: Sequence[Any]) -> CallAxes | None:
    return rules.rule("axes")(args) if "axes" in rules.given else None


def _placement(axes: Sequence[str | None] | None, axis: str | None, otherwise: Placement) -> Placement:
    if axes is None or axis is None:
        return Replicate()
    return Shard(axes.index(axis)) if axis in axes else otherwise


def _acceptable(rules: RuleTable, *args: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
    """Placements of outputs and arguments over one axis of a mesh, one pair for each way to run a call."""
    spec, axes = rules.spec, _axes_of(rules, args)
    if axes is None:
        axes = CallAxes(dict.fromkeys(spec.tensors, ()), ((),) * len(spec.outputs), frozenset(), can_compose=False)
    given = dict(zip(spec.arguments, args, strict=True))
    names = [name if name in spec.tensors and value is not None else None for name, value in given.items()]
    return [
        (
            [_placement(of, axis, Partial()) for of in axes.outputs],
            [None if name is None else _placement(axes.inputs[name], axis, Replicate()) for name in names],
        )
        for axis in (None, *sorted(axes.free))
    ]


def _alike(*args: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
    """Placements of a copy: those of what is copied."""
    cut = [Shard(dim) for dim in range(len(args[0].shape))]
    return [([placement], [placement]) for placement in (Replicate(), *cut)]


def _is_cut(rules: RuleTable, args: Sequence[Any]) -> bool:
    """Whether a call has a tensor of the shape of x that is cut along an axis which is not free."""
    axes = _axes_of(rules, args)
    if axes is None or not axes.can_compose:
        return False
    ndim = max(map(len, axes.inputs.values()))
    for name, x in zip(rules.spec.arguments, args, strict=True):
        of_x = axes.inputs.get(name, ())
        if isinstance(x, DTensor) and len(of_x) == ndim:
            cut = [(i, p.dim) for i, p in enumerate(x.placements) if isinstance(p, Shard)]
            if any(of_x[dim] not in axes.free for _, dim in cut):
                # An empty part has no maximum, and would raise in its process alone.
                return all(_has_no_empty_part(x.shape[dim], x.device_mesh.size(i)) for i, dim in cut)
    return False


def _has_no_empty_part(size: int, parts: int) -> bool:
    return -(-size // parts) * (parts - 1) < size


class _Composition(TorchDispatchMode):
    """Operations of a reference on parts of x.

    Sums over parts are added up at once: a mean that is not would have DTensor bring all of x to each process. Of what
    a reference makes by itself, such as the numbers of the classes, each process takes the part beside its part of x.
    """

    def __init__(self, x: DTensor) -> None:
        super().__init__()
        self._x = x

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operation, a primitive perhaps that is cut too; what it returns are parts or the whole."""
        op = registered_primitives().get(func._schema.name)
        if op is not None and not kwargs and _is_cut(op.rules, args):
            with self:
                return op.rule("reference")(*args)
        if any(isinstance(value, DTensor) for value in args):
            args = tuple([self._beside(value) if type(value) is torch.Tensor else value for value in args])
        if func is torch.ops.aten.mean.dim and not kwargs:
            # A mean over parts that differ in size DTensor takes of the whole.
            total = self.__torch_dispatch__(torch.ops.aten.sum.dim_IntList, types, args)
            return total / math.prod(args[0].shape[axis] for axis in args[1])
        return tree_map_only(DTensor, _settled, func(*args, **(kwargs or {})))

    def _beside(self, value: Tensor) -> DTensor:
        x, lead = self._x, self._x.dim() - value.dim()
        whole = DTensor.from_local(value, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
        placements = [
            Shard(p.dim - lead)
            if isinstance(p, Shard) and p.dim >= lead and value.shape[p.dim - lead] == x.shape[p.dim]
            else Replicate()
            for p in x.placements
        ]
        return whole.redistribute(placements=placements)


def _settled(x: DTensor) -> DTensor:
    if not any(isinstance(placement, Partial) for placement in x.placements):
        return x
    return x.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in x.placements])


def composed(rules: RuleTable, args: tuple) -> Any:
    """Outputs of a call of which x is cut along an axis that is not free, by the reference; else `NotImplemented`."""
    if not any(isinstance(x, DTensor) for x in args) or rules.spec.namespace not in _NAMESPACES:
        return NotImplemented
    if not _is_cut(rules, args):
        return NotImplemented
    x = max((x for x in args if isinstance(x, DTensor)), key=DTensor.dim)
    with _Composition(x):
        return rules.rule("reference")(*args)


def _have_same_storage(cls: Any, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None) -> bool:
    # The result of `to_local` has a tangent too, of which it knows nothing.
    return func(*[x._local_tensor if isinstance(x, DTensor) else x for x in args])


def _write_back(cls: Any, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None) -> None:
    for target, value in zip(*args, strict=True):
        target.copy_(value)


@functools.cache
def register() -> None:
    """Tell DTensor of all primitives of this package, once."""
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for op in registered_primitives().values():
        if op.spec.namespace in _NAMESPACES:
            register_sharding(op.overload)(functools.partial(_acceptable, op.rules))
            # DTensor remembers a call by its tensors, and by its other arguments from this one on: by default the first
            # integer, before which are flags, such as whether attention is causal, and tensors that may be None.
            known[op.overload].static_argnum = 0
    constant = registered_primitives().get("primitives_decompositions::constant")
    if constant is not None:
        register_sharding(constant.overload)(_alike)
    torch.library.register_torch_dispatch(f"{NAMESPACE}::write_back", DTensor, _write_back)
    # Questions of torch to a tensor and its tangent that DTensor does not answer.
    torch.library.register_torch_dispatch("aten::_has_same_storage_numel", DTensor, _have_same_storage)
