"""Norms that others wrote, after `convert`: they keep their class and state, and compute by this package.

A `Form` says what the `forward` of a class was seen to do; `_proof` finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from primitives import functional
from primitives._core.decomposition import decomposition_table
from primitives._core.overrides import cumulative_weight
from primitives._core.write_back import count_up
from primitives._override import override_except_dropout
from primitives._serving import is_plain, served
from primitives.nn._base import OfThisPackage, Overridden

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "ByForm",
    "ByFunction",
    "Form",
    "ReluNorm",
    "Rounding",
    "ServedNorm",
    "batch_normed",
    "computed",
    "is_relu_alone",
    "weight_normed",
]


class Rounding(NamedTuple):
    """Where a norm rounds, for one dtype of its input and one of its parameters."""

    input: torch.dtype
    parameters: torch.dtype | None
    output: torch.dtype
    cast_first: bool


class Form(NamedTuple):
    """A norm that is composed of tensor operations: of which attributes, over which axis, and how it is rounded.

    `axis` is -1 or 1, `scale`, `shift` and `eps` are names of attributes, `argument` that of the parameter of
    `forward`; `parts` are modules inside that follow the norm, as an activation; `ranks` are the numbers of axes of the
    input that were checked, and `constants` the other attributes, with the values that they had.
    """

    argument: str
    scale: str | None
    shift: str | None
    eps: str
    axis: int
    centered: bool
    add_one: bool
    parts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    roundings: tuple[Rounding, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()


def computed(form: Form, module: torch.nn.Module, x: Tensor, rounding: Rounding) -> Tensor:
    """The result of a module of a form for `x`, by the functions of this package."""
    scale, shift = (None if name is None else getattr(module, name) for name in (form.scale, form.shift))
    given = form, x, scale, shift, getattr(module, form.eps), rounding
    if torch.is_autocast_enabled(x.device.type):
        # The operations that the class is written in take no part in autocast: that was checked too.
        with torch.autocast(x.device.type, enabled=False):
            y = _normalized(*given)
    else:
        y = _normalized(*given)
    if form.parts and form.axis == 1:
        # A part may write in place, which torch refuses for a view of what a rule returns.
        y = y.clone(memory_format=torch.contiguous_format)
    for name in form.parts:
        y = getattr(module, name)(y)
    return y


def _normalized(
    form: Form, x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float, rounding: Rounding
) -> Tensor:
    is_widened = rounding.output != x.dtype
    if is_widened and not rounding.cast_first:
        x, is_widened = x.to(rounding.output), False
    x = x.movedim(1, -1) if form.axis == 1 else x
    # The tracer of TorchScript has tensors for sizes; that of a norm is a constant of its.
    shape = tuple(map(int, x.shape[-1:])) if torch.jit.is_tracing() else tuple(x.shape[-1:])
    if form.centered:
        y = functional.layer_norm(x, shape, scale + 1 if scale is not None and form.add_one else scale, shift, eps)
    elif is_widened and scale is not None:
        y = functional.rms_norm(x, shape, None, eps) * (scale + 1 if form.add_one else scale)
    else:
        y = functional.rms_norm(x, shape, scale, eps, add_one=form.add_one, cast_first=rounding.cast_first)
    y = y if form.centered or shift is None else y + shift
    return y.movedim(-1, 1) if form.axis == 1 else y


class _OfOthers(OfThisPackage):
    """Goes before a class that somebody else wrote, whose `forward` runs where this package does not serve."""

    form: Any

    def _run_as_written(self, *args: Any, **kwargs: Any) -> Any:
        with override_except_dropout():
            return super().forward(*args, **kwargs)  # type: ignore[misc] - that of the class behind it


class ByForm(_OfOthers):
    """A norm of somebody's that computes by a form."""

    form: Form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The norm, by `rms_norm` or `layer_norm` for what its class was checked on, otherwise as it is written."""
        form = self.form
        x = args[0] if len(args) == 1 and not kwargs else None
        if not args and len(kwargs) == 1:
            x = kwargs.get(form.argument)
        rounding = _rounding(form, self, x)
        if rounding is None or x is None:
            return self._run_as_written(*args, **kwargs)
        return computed(form, self, x, rounding)


def _rounding(form: Form, module: torch.nn.Module, x: Any) -> Rounding | None:
    """How `x` is rounded; None if the form was not checked on the like of it."""
    scale, shift = (None if name is None else getattr(module, name) for name in (form.scale, form.shift))
    if not is_plain(x, scale, shift) or x.dim() not in form.ranks:
        return None
    if any(getattr(module, name) != value for name, value in form.constants):
        return None
    dtype = None
    if scale is not None:
        # Somebody may have changed a parameter.
        if (
            scale.dim() != 1
            or x.shape[form.axis] != scale.shape[0]
            or (shift is not None and shift.dtype != scale.dtype)
        ):
            return None
        dtype = scale.dtype
    for rounding in form.roundings:
        if rounding.input == x.dtype and rounding.parameters == dtype:
            return rounding
    return None


class ServedNorm(Overridden, OfThisPackage):
    """A norm of somebody's that calls a norm of torch as a function, which this package serves."""


def batch_normed(function: Callable[..., Tensor], module: Any, input: Tensor) -> Tensor:
    """The result of a batch norm for `input` by `function`; in training, its running statistics move on."""
    check = getattr(module, "_check_input_dim", None)  # TorchScript passes an object without the other methods.
    if check is not None:
        check(input)
    mean, var, training = module.running_mean, module.running_var, module.training
    use_batch = training or (mean is None and var is None)
    update = training and module.track_running_stats
    if training and not update:
        mean = var = None
    count = module.num_batches_tracked if update else None
    momentum = module.momentum if update else 0.0
    if momentum is None:
        # The plain average over all batches. Not read as a Python number, which all would have to wait for.
        momentum = 0.0 if count is None else cumulative_weight(count + 1)
    output = function(input, mean, var, module.weight, module.bias, use_batch, momentum, module.eps)
    if count is not None:
        # Counted last: a call that raises leaves the module as it was.
        count_up(count)
    return output


def is_relu_alone(module: torch.nn.Module) -> bool:
    """Whether the one part of a module that computes is a ReLU, and its parts are unwatched."""
    parts = list(module.children())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any("forward" in vars(part) or any(getattr(part, name) for name in hooks) for part in parts):
        return False
    return [type(part) for part in parts if type(part) is not torch.nn.Identity] == [torch.nn.ReLU]


class ReluNorm(ServedNorm):
    """A batch norm of somebody's that ends in a ReLU: both by one call, for inputs of the ranks in `form`."""

    form: tuple[int, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The norm and the ReLU, or what is written where another part has come or somebody watches them."""
        if len(args) == 1 and not kwargs and is_plain(*args) and args[0].dim() in self.form and is_relu_alone(self):
            y = served(batch_normed, functional.batch_norm_relu, self, args[0])
            if y is not NotImplemented:
                return y
        return super().forward(*args, **kwargs)


class ByFunction(_OfOthers):
    """A module that computes by a function which `register_converter` was given."""

    form: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function, or of the class's own `forward` if that is `NotImplemented`."""
        result = type(self).form(self, *args, **kwargs)
        return self._run_as_written(*args, **kwargs) if result is NotImplemented else result


def weight_normed(module: Any, g: Tensor, v: Tensor) -> Tensor:
    """The weight of torch's `parametrizations.weight_norm`, whose own second derivatives are silently wrong."""
    return decomposition_table[torch.ops.aten._weight_norm.default](v, g, module.dim)
