"""A training step of batch norm over all processes of a group, with what they must agree on."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from primitives._core.errors import DtypeError, ShapeError
from primitives._core.write_back import write_back
from primitives._distributed._sync_batch_norm import received, sync_batch_norm_p
from primitives.ops import arguments
from primitives.ops.rules import accumulation_dtype, weight_beside

# By module, what its processes have agreed on. A copy of a module begins anew.
_agreements: weakref.WeakKeyDictionary[torch.nn.Module, tuple] = weakref.WeakKeyDictionary()


def sync_batch_norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float | Tensor, eps: float, *, module: torch.nn.Module, group: Any,
) -> Tensor:  # fmt: skip
    """Batch norm of `x` by the statistics of all processes of `group`; the running statistics move on, in place.

    Arguments are those of `batch_norm`, in training. N and the spatial axes may differ from process to process, and N
    may be 0. At the first call of `module` the processes compare what they pass.
    """
    name, state = "SyncBatchNorm", (running_mean, running_var)
    arguments.momentum(name, momentum)
    arguments.number(name, "eps", eps)
    arguments.positive_eps(name, eps)
    arguments.batch_norm(name, "input", x, *state, weight, bias, training=training, writes=True, is_whole=False)
    if x.dim() == 1:
        raise ShapeError(f"SyncBatchNorm: input must have at least 2 axes, [N, C, *spatial], got {list(x.shape)}.")
    group_name, world = group.group_name, group.size()
    if not torch.compiler.is_dynamo_compiling():
        _agree(module, group_name, world, x)
    given = x, weight_beside(bias, weight, x), bias
    y, mean, var, count = sync_batch_norm_p(*given, 0, eps, group_name, world)
    if running_mean is not None and running_var is not None:
        momentum = momentum.detach() if isinstance(momentum, torch.Tensor) else momentum
        unbiased = var.detach() * (count / (count - 1).clamp(min=1))
        moved = [
            # Without a single value they stay as they are.
            torch.where(count > 0, momentum * batch + (1 - momentum) * running, running).to(running.dtype)
            for batch, running in ((mean.detach(), running_mean), (unbiased, running_var))
        ]
        write_back([running_mean, running_var], moved)
    return y


def _agree(module: torch.nn.Module, group: str, world: int, x: Tensor) -> None:
    """At the first call of a module in a group, raise in every process unless all pass the same channels and dtype.

    Messages of different lengths are not an error to every backend: gloo returns numbers for them.
    """
    dtypes = (torch.float32, torch.float64)
    given = (x.shape[1], dtypes.index(accumulation_dtype(x.dtype)))
    if _agreements.get(module) == (group, *given) or detect_fake_mode(x) is not None or get_proxy_mode() is not None:
        return
    own = torch.tensor(given, device=x.device)
    found = received(torch.ops._c10d_functional.all_gather_into_tensor, own, world, group).view(world, -1).tolist()
    for column, error, what in ((0, ShapeError, "number of channels"), (1, DtypeError, "dtype")):
        values = [row[column] if column == 0 else dtypes[row[column]] for row in found]
        if len(set(values)) > 1:
            raise error(
                f"SyncBatchNorm: input must have the same {what} in every process, got "
                f"{', '.join(f'{value} in rank {rank}' for rank, value in enumerate(values))} of the process group."
            )
    _agreements[module] = (group, *given)
