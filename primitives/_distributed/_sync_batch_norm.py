r"""Batch norm with the statistics of all processes of a group, and the sum over a group, as differentiable operators.

Notation as in `ops/norms/batch_norm.py`. Process r has n_r values of a channel, with mean mean_r and M_r = sum((x -
mean_r)**2). One all-gather brings (n_r, mean_r, M_r) of all to each, and Chan's formula merges them:

    N = sum(n_r),   mean = sum(n_r * mean_r) / N,   var = sum(M_r + n_r * (mean_r - mean)**2) / N

mean and var are outputs like y, with derivatives. A, the sum over the processes, is linear and its own transpose, so
that its vjp and its jvp are A again. With the sums s(v) = sum(v) and t(v) = sum(v * x_hat) of this process,

    P(v)  = rstd * (v - A(s(v)) / N - x_hat * A(t(v)) / N)
    jvp   y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot
          mean_dot = A(s(x_dot)) / N,   var_dot = 2 / rstd * A(t(x_dot)) / N
    vjp   x_bar = P(y_bar) * weight + A(mean_bar) / N + 2 * (x - mean) * A(var_bar) / N
          weight_bar = t(y_bar),   bias_bar = s(y_bar)

`x_bar` is the derivative of the sum of all processes' losses. Each rule is one pass of sums, one all-reduce, and one
pass that writes: the backward and the jvp of batch norm in evaluation. Rules are made of operators that have
derivatives themselves, and so orders above the first follow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from primitives._core import Primitive
from primitives._core.errors import CommunicationError, DtypeError, ShapeError
from primitives._core.write_back import write_back
from primitives.ops import arguments
from primitives.ops.axes import Axes, def_axes, fold_batch
from primitives.ops.norms.batch_norm_eval import batch_norm_eval_bwd_p, batch_norm_eval_jvp_p, batch_norm_eval_p
from primitives.ops.norms.channels import contiguous_like, per_channel
from primitives.ops.rules import accumulation_dtype, weight_beside

# Apart from operators that launch kernels of their own.
NAMESPACE = "primitives_distributed"

all_reduce_p = Primitive("all_reduce", "(Tensor x, str group) -> Tensor total", namespace=NAMESPACE)
sync_batch_norm_p = Primitive(
    "sync_batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, int batch_ndim, float eps, str group, int world)"
    " -> (Tensor y, Tensor mean, Tensor var, Tensor count)",
    residuals=("x", "weight", "mean", "var", "count"),
    state=("count",),
    namespace=NAMESPACE,
)


def received(send: Callable[..., Tensor], *message: Any) -> Tensor:
    """The answer to a message that every process of a group sends by a functional collective."""
    try:
        return torch.ops._c10d_functional.wait_tensor(send(*message))
    except RuntimeError as error:
        raise CommunicationError(
            f"SyncBatchNorm: every process of the group must send its statistics within the time-out; rank "
            f"{dist.get_rank()} of {dist.get_world_size()} waited for one that has ended, has not come, or "
            f"sends nothing because its module is in evaluation. The first process that failed says why; "
            f"init_process_group(timeout=...) sets the time-out. The backend: {error}"
        ) from error


@all_reduce_p.def_reference
def _all_reduce_reference(x: Tensor, group: str) -> Tensor:
    return received(torch.ops._c10d_functional.all_reduce, x.contiguous(), "sum", group)


@all_reduce_p.def_vjp
def _all_reduce_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor]:
    return {"x": all_reduce_p(cotangents.total, residuals.group)}


@all_reduce_p.def_jvp
def _all_reduce_jvp(residuals: Any, tangents: Any) -> Tensor:
    return all_reduce_p(tangents.x, residuals.group)


def_axes(Axes("x total: *all", ""), all_reduce_p)


# Inductor orders torch's own messages, and computes while they are under way.
all_reduce_p.rules.define("composition", _all_reduce_reference)


def _merged(x: Tensor, batch_ndim: int, group: str, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel over all processes, [*batch, C], and how many values a channel has."""
    axes = [batch_ndim, *range(batch_ndim + 2, x.dim())]
    count = x.new_full((1,), x.shape[batch_ndim] * x.shape[batch_ndim + 2 :].numel())
    # An empty batch has sums, and no mean.
    mean = x.sum(axes) / count.clamp(min=1)
    squares = (x - per_channel(mean, x, batch_ndim)).square().sum(axes)
    own = torch.cat([count, mean.flatten(), squares.flatten()])
    every = received(torch.ops._c10d_functional.all_gather_into_tensor, own, world, group).view(world, -1)
    counts, moments = every.tensor_split([1], 1)
    means, squares = moments.view(world, 2, *mean.shape).unbind(1)
    counts, total = counts.view(world, *[1] * mean.dim()), counts.sum()
    shares = counts / total.clamp(min=1)
    # About the first of them, so that means which are alike come back as they are.
    mean = means[0] + (shares * (means - means[0])).sum(0)
    var = (squares / total.clamp(min=1) + shares * (means - mean).square()).sum(0)
    return mean, var, total


@sync_batch_norm_p.def_reference
def _sync_batch_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, batch_ndim: int, eps: float, group: str, world: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = contiguous_like(x, x, batch_ndim).to(accumulation_dtype(x.dtype))
    mean, var, count = _merged(wide, batch_ndim, group, world)
    return batch_norm_eval_p(x, weight, bias, mean, var, eps, batch_ndim), mean, var, count


sync_batch_norm_p.rules.define("composition", _sync_batch_norm_reference)


def _sums(v: Tensor, r: Any) -> tuple[Tensor, Tensor]:
    """`s(v)` and `t(v)`, in the dtype of sums."""
    output_mask = (False, True, True, False, False)
    _, t, s, _, _ = batch_norm_eval_bwd_p(v, r.x, None, r.mean, r.var, r.eps, r.batch_ndim, output_mask)
    return s, t


def _over_processes(sums: list[Tensor], r: Any) -> list[Tensor]:
    """`A` of each of some sums of this process, divided by N: one all-reduce."""
    return list((all_reduce_p(torch.stack(sums), r.group) / r.count.clamp(min=1)).unbind())


@sync_batch_norm_p.def_vjp
def _sync_batch_norm_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor]:
    r, c, out = residuals, cotangents, {}
    sums: list[Tensor] = []
    if c.y is not None:
        # Autograd casts to the dtypes of the parameters.
        out["bias"], out["weight"] = sums = [*_sums(c.y, r)]
    if output_mask.x:
        bars = []
        if c.mean is not None or c.var is not None:
            bars = [torch.zeros_like(r.mean) if bar is None else bar for bar in (c.mean, c.var)]
        totals, twice_std = _over_processes([*sums, *bars], r), 2 * (r.var + r.eps).sqrt()
        dots: list[Tensor | None] = [None] * 4
        if sums:
            dots[2], dots[3] = totals[0], twice_std * totals[1]
        if bars:
            # 2 * (x - mean) = 2 / rstd * x_hat
            dots[0], dots[1] = twice_std * totals[-1], totals[-2]
        out["x"] = batch_norm_eval_jvp_p(r.x, r.weight, r.mean, r.var, c.y, *dots, r.eps, r.batch_ndim)
    return {name: bar for name, bar in out.items() if getattr(output_mask, name)}


@sync_batch_norm_p.def_jvp
def _sync_batch_norm_jvp(residuals: Any, tangents: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    r, t = residuals, tangents
    mean_dot = var_dot = None
    if t.x is not None:
        mean_dot, paired = _over_processes([*_sums(t.x, r)], r)
        var_dot = 2 * (r.var + r.eps).sqrt() * paired
    dots = (t.x, t.weight, t.bias, mean_dot, var_dot)
    y_dot = batch_norm_eval_jvp_p(r.x, r.weight, r.mean, r.var, *dots, r.eps, r.batch_ndim)
    return y_dot, mean_dot, var_dot


@sync_batch_norm_p.def_vmap
def _sync_batch_norm_vmap(batch: Any, primals: Any) -> tuple[Any, Any]:
    folded = fold_batch(batch, primals, sync_batch_norm_p.spec.tensors)
    return sync_batch_norm_p(*folded._replace(batch_ndim=primals.batch_ndim + 1)), (0, 0, 0, None)


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
