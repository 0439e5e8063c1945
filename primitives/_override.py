"""`override_torch`, and what stands for each function of torch inside it."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as torch_functional

from primitives import _override_losses, functional  # noqa: F401 - fills the table
from primitives._checks.attention import is_causal_bias
from primitives._core.autograd import is_transforming
from primitives._core.contexts import Decorates
from primitives._core.decomposition import decomposition_table
from primitives._core.overrides import BatchWeight, OverrideMode, register_override
from primitives._group_norms import pure_instance_norm
from primitives._serving import is_plain, served
from primitives.decompositions import register_decomposition
from primitives.decompositions._mode import torch_bodies

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["override_except_dropout", "override_torch"]


class override_torch(Decorates, OverrideMode):  # noqa: N801 - used like a function, as torch.no_grad is
    """Context manager, and decorator, in which functions of torch run on the primitives of this package.

    Code stays as it is written for torch. Inside, these calls are served by `primitives.functional`, by whatever name
    Python reaches them (`torch.nn.functional`, `torch`, a method of a tensor), also from within modules of `torch.nn`:
    `layer_norm`, `rms_norm`, `batch_norm`, `group_norm`, `instance_norm`, `softmax`, `log_softmax`, `cross_entropy`,
    `nll_loss`, `linear_cross_entropy`, `dropout`, `scaled_dot_product_attention`, whatever backend `sdpa_kernel` asks
    for, and `multi_head_attention_forward`. They are right at every order of derivative, and run on fused kernels.
    Results differ from torch's by rounding, and dropout draws other numbers, with the same probability. Running
    statistics are written as torch writes them, and batches counted inside of transforms too.

    Whatever a stand-in does not serve goes to torch's own function, with the arguments as they were: an `out=` or a
    legacy argument (`size_average`, `reduce`), dtypes that do not go together, sparse and nested tensors, wrapper
    subclasses as `DTensor`, and everything that torch refuses. Functions that torch composes itself (TorchScript) do
    not ask Python again, and run as they are; so do operators of other names, as `flex_attention`, whose jvp raises.

    A function that is run again after the context has ended, as by `torch.utils.checkpoint`, has to enter it there too:
    pass it `context_fn=lambda: (contextlib.nullcontext(), override_torch())`, or use `primitives.nn.convert`, whose
    modules enter it by themselves.

    The context holds for the calling thread, nests, and ends with the block, whatever is raised inside. Results
    from inside may be differentiated after it has ended.

    Example:
        >>> import torch, primitives as pr
        >>> norm, x = torch.nn.LayerNorm(2), torch.tensor([[1.0, 3.0]], requires_grad=True)
        >>> norm(x).grad_fn.name()
        'NativeLayerNormBackward0'
        >>> with pr.override_torch():
        ...     y = norm(x)
        >>> "layer_norm" in y.grad_fn.name()
        False
    """


class override_except_dropout(override_torch):  # noqa: N801 - as above
    """`override_torch` for a model that `convert` changed: it leaves dropout, which torch differentiates right."""

    left = frozenset([torch_functional.dropout, torch.dropout])


def _serve(ours: Callable[..., Any], *of_torch: Callable[..., Any]) -> None:
    """Let `ours` stand for functions of torch that have its arguments, and perhaps one about cuDNN behind them."""
    parameters = inspect.signature(ours).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]

    @register_override(*of_torch)
    def stand_in(mode: OverrideMode, *args: Any, **others: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        for name, value in others.items():
            if name in given or name not in (*names, "cudnn_enable", "cudnn_enabled"):
                return NotImplemented
            if name in names:
                given[name] = value
        if not is_plain(given.get("input"), *given.values()):
            return NotImplemented
        return served(functools.partial(ours, **given))


_serve(functional.layer_norm, torch_functional.layer_norm, torch.layer_norm)
_serve(functional.rms_norm, torch_functional.rms_norm, torch.rms_norm)
_serve(functional.group_norm, torch_functional.group_norm, torch.group_norm)


@register_override(torch.native_layer_norm)
def _native_layer_norm(mode: OverrideMode, *args: Any, **kwargs: Any) -> Any:
    # Its statistics are outputs that may be differentiated, which those of the primitive are not.
    with mode:
        return decomposition_table[torch.ops.aten.native_layer_norm.default](*args, **kwargs)


@register_override(torch.native_batch_norm)
def _native_batch_norm(mode: OverrideMode, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    if out is not None:
        return NotImplemented
    with mode:
        return decomposition_table[torch.ops.aten.native_batch_norm.default](*args, **kwargs)


@register_override(torch_functional.batch_norm)
def _functional_batch_norm(
    mode: OverrideMode,
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Any:
    given = input, running_mean, running_var, weight, bias
    weight_of_batch = momentum.tensor() if isinstance(momentum, BatchWeight) else momentum
    out = NotImplemented
    if is_plain(*given) and not (training and eps <= 0.0):
        out = served(functional.pure_batch_norm, *given, training, weight_of_batch, eps)
    if out is NotImplemented:
        if isinstance(momentum, BatchWeight):
            return torch_functional.batch_norm(*given, training, float(weight_of_batch), eps)
        return out
    if training and running_mean is not None and running_var is not None:
        mode.write([running_mean, running_var], [out.running_mean, out.running_var])
    return out.output


def _by_torchs_names(flag: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of `torch.batch_norm` or `instance_norm` by the names of `torch.nn.functional`, if complete."""
    parameters = ("input", "weight", "bias", "running_mean", "running_var", flag, "momentum", "eps", "cudnn_enabled")
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    if len(args) > len(parameters) or given.keys() != set(parameters):
        return None
    del given["cudnn_enabled"]
    return given


@register_override(torch.batch_norm)
def _torch_batch_norm(mode: OverrideMode, *args: Any, **kwargs: Any) -> Any:
    given = _by_torchs_names("training", args, kwargs)
    return NotImplemented if given is None else _functional_batch_norm(mode, **given)


@register_override(torch_functional.instance_norm)
def _functional_instance_norm(
    mode: OverrideMode,
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    given = input, running_mean, running_var, weight, bias
    # The dtypes of batch norm: torch's instance norm takes those of its functions on the CPU alone.
    if not is_plain(*given) or eps <= 0.0 or any(p is not None and p.dtype != input.dtype for p in given):
        return NotImplemented
    out = served(pure_instance_norm, *given, use_input_stats, momentum, eps)
    if out is NotImplemented:
        return out
    if use_input_stats and running_mean is not None and running_var is not None:
        mode.write([running_mean, running_var], [*out[1:]])
    return out[0]


@register_override(torch.instance_norm)
def _torch_instance_norm(mode: OverrideMode, *args: Any, **kwargs: Any) -> Any:
    given = _by_torchs_names("use_input_stats", args, kwargs)
    return NotImplemented if given is None else _functional_instance_norm(mode, **given)


def _serve_softmax(ours: Callable[..., Any], of_functional: Callable[..., Any], *of_torch: Callable[..., Any]) -> None:
    @register_override(of_functional)
    def softmax_of_functional(
        mode: OverrideMode, input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Any:
        # Without dim torch chooses one, and warns.
        return NotImplemented if dim is None or not is_plain(input) else served(ours, input, dim, _stacklevel, dtype)

    @register_override(*of_torch)
    def softmax_of_torch(
        mode: OverrideMode, input: Any, dim: Any, dtype: torch.dtype | None = None, **others: Any
    ) -> Any:
        return NotImplemented if others else softmax_of_functional(mode, input, dim, dtype=dtype)


_serve_softmax(
    functional.log_softmax,
    torch_functional.log_softmax,
    *(torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax),
)
_serve_softmax(functional.softmax, torch_functional.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)
_serve_softmax(functional.softmin, torch_functional.softmin)


@register_override(torch.Tensor.add_, torch.Tensor.__iadd__)
def _count(mode: OverrideMode, counter: Any, number: Any, **others: Any) -> Any:
    # A batch norm counts its batches in place, which a transform refuses for a tensor from outside it.
    is_counter = isinstance(counter, torch.Tensor) and counter.dtype == torch.int64 and type(number) is int
    if others or not is_counter or not is_transforming():
        return NotImplemented
    mode.write([counter], [counter + number])
    return counter


@register_override(torch_functional.dropout)
def _functional_dropout(
    mode: OverrideMode, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if not is_plain(input):
        return NotImplemented
    return served(functional.dropout, input, p, training, inplace)


@register_override(torch.dropout)
def _torch_dropout(mode: OverrideMode, input: Any, p: float, train: bool) -> Any:
    return _functional_dropout(mode, input, p, train)


@register_override(
    torch_functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
def _attention(
    mode: OverrideMode,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    # Torch refuses a probability by an error of its own.
    pairs = None if is_causal_bias(attn_mask) else attn_mask
    if not is_plain(query, key, value, pairs) or not 0.0 <= dropout_p <= 1.0:
        return NotImplemented
    call = functools.partial(functional.scaled_dot_product_attention, scale=scale, enable_gqa=enable_gqa)
    return served(call, query, key, value, attn_mask, dropout_p, is_causal)


@register_override(torch_functional.multi_head_attention_forward)
def _multi_head_attention(mode: OverrideMode, *args: Any, **kwargs: Any) -> Any:
    if not is_plain(*args[:3]):
        return NotImplemented
    with mode:
        return torch_bodies[torch_functional.multi_head_attention_forward](*args, **kwargs)


@register_decomposition(torch.ops.aten.scaled_dot_product_attention)
def _attention_of_aten(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    args = query, key, value, attn_mask, dropout_p, is_causal
    if not is_plain(query, key, value):
        return torch_functional.scaled_dot_product_attention(*args, scale=scale, enable_gqa=enable_gqa)
    return functional.scaled_dot_product_attention(*args, scale=scale, enable_gqa=enable_gqa)
