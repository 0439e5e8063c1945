"""Apply decompositions to plain torch code, whoever wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from primitives.core.decomposition import decomposition_table, get_decomposition, overloads_of
from primitives.core.write_back import write_back
from primitives.decompositions._norms import constant_p

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["differentiate_through"]

aten = torch.ops.aten


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return get_decomposition(aten.native_layer_norm.default)(input, normalized_shape, weight, bias, eps)[0]


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    running = running_mean, running_var
    if running_mean is None or running_var is None:
        running = input.new_zeros(input.shape[1]), input.new_ones(input.shape[1])
    decomposition = get_decomposition(aten._native_batch_norm_legit_functional.default)
    y, _, _, new_mean, new_var = decomposition(input, weight, bias, *running, training, momentum, eps)
    if training and running_mean is not None and running_var is not None:
        write_back([running_mean, running_var], [constant_p(new_mean), constant_p(new_var)])
    return y


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch norm in which every channel of every sample is a channel of its own."""
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    samples, channels = input.shape[:2]
    mean, var, scale, shift = (
        None if p is None else p.repeat(samples) for p in (running_mean, running_var, weight, bias)
    )
    flat = input.reshape(1, samples * channels, *input.shape[2:])
    y = _batch_norm(flat, mean, var, scale, shift, True, momentum, eps)
    if running_mean is not None and running_var is not None:
        means = [constant_p(p.reshape(samples, channels).mean(0)) for p in (mean, var) if p is not None]
        write_back([running_mean, running_var], means)
    return y.reshape(input.shape)


# Python entry points, each with the operator whose decomposition it runs.
_ENTRY_POINTS: dict[Callable, tuple[OpOverload, Callable]] = {
    torch.nn.functional.layer_norm: (aten.native_layer_norm.default, _layer_norm),
    torch.layer_norm: (aten.native_layer_norm.default, _layer_norm),
    torch.nn.functional.batch_norm: (aten._native_batch_norm_legit_functional.default, _batch_norm),
    torch.nn.functional.instance_norm: (aten._native_batch_norm_legit_functional.default, _instance_norm),
}


class differentiate_through(TorchFunctionMode):  # noqa: N801 - used like a function, as torch.no_grad is
    """Context manager in which plain torch code runs, and is differentiated, through decompositions.

    `torch.nn.functional.layer_norm`, `batch_norm` and `instance_norm`, the modules that call them, and every ATen
    operator of the tables that is called as `torch.ops.aten.<op>` are replaced by their decompositions. What was
    computed inside is right at every order, in forward and reverse mode, also when it is differentiated after the
    context has ended.

    Args:
        *ops: Operators to replace: what `register_decomposition` takes. None given means every operator that has a
            decomposition when it is called.

    Raises:
        MissingRuleError: If one of `ops` has no decomposition.

    Example:
        >>> import torch, primitives as pr
        >>> norm = torch.nn.LayerNorm(3, dtype=torch.float64)
        >>> x, v = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
        >>> def second(x):
        ...     first = lambda x: torch.func.jvp(norm, (x,), (v,))[1]
        ...     return torch.func.jvp(first, (x,), (v,))[1]
        >>> with pr.decompositions.differentiate_through():
        ...     right = second(x)
        >>> step = 1e-4
        >>> truth = (norm(x + step * v) - 2 * norm(x) + norm(x - step * v)) / step**2
        >>> torch.allclose(right, truth, atol=1e-4), torch.allclose(second(x), truth, atol=1e-4)
        (True, False)
    """

    def __init__(self, *ops: Any) -> None:
        super().__init__()
        self._only: set[OpOverload] | None = None
        if ops:
            for op in ops:
                get_decomposition(op)
            self._only = {overload for overload in overloads_of(list(ops)) if overload in decomposition_table}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Replace `func` by its decomposition, if it has one here."""
        kwargs = kwargs or {}
        if func in _ENTRY_POINTS:
            op, replacement = _ENTRY_POINTS[func]
            return (replacement if self._applies(op) else func)(*args, **kwargs)
        if isinstance(func, OpOverloadPacket):
            # torch chooses the overload by the arguments; only the functional one is replaced.
            func_overload = getattr(func, "default", None) if not any("out" in name for name in kwargs) else None
        else:
            func_overload = func if isinstance(func, OpOverload) else None
        if func_overload is not None and self._applies(func_overload):
            return decomposition_table[func_overload](*args, **kwargs)
        return func(*args, **kwargs)

    def _applies(self, op: OpOverload) -> bool:
        return op in decomposition_table and (self._only is None or op in self._only)
