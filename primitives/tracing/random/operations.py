"""Which random operation of torch draws what: one entry for each, in terms of `draws`.

An entry is a function `(source, arguments) -> result`, where the arguments of the operation come by the names of its
schema. In-place operations write their result into their first argument.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from primitives.tracing.random import draws

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from primitives.tracing.random.draws import Source

__all__ = ["FILLING", "NEVER_DRAWING", "OPERATIONS", "WHOLE", "arguments_of", "device_of", "draws_nothing"]

# These carry torch's mark of randomness and draw nothing.
NEVER_DRAWING = frozenset(
    {"_flash_attention_forward_no_dropout_inplace", "_fused_sdp_choice", "_nested_tensor_softmax_with_shape"}
)

# These draw for a whole tensor at once; every other one draws for each element.
WHOLE = frozenset({"multinomial", "randperm"})


def arguments_of(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by the names of the schema, defaults included."""
    schema = func._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update(zip((a.name for a in schema), args, strict=False))
    return {**named, **kwargs}


def draws_nothing(a: dict[str, Any]) -> bool:
    """Whether the arguments of a call say that it has nothing to draw."""
    for name in ("train", "training"):
        # None means training.
        if a.get(name, True) is False:
            return True
    for name in ("dropout_p", "dropout"):
        if name in a:
            return a[name] == 0
    return False


def device_of(a: dict[str, Any]) -> torch.device:
    """Device of the result of a call."""
    if a.get("device") is not None:
        return torch.device(a["device"])
    tensors = [value for value in a.values() if isinstance(value, torch.Tensor)]
    # A tensor without axes may lie on the CPU beside others that do not.
    return max(tensors, key=torch.Tensor.dim).device if tensors else torch.device("cpu")


def _dtype(a: dict[str, Any], default: torch.dtype | None = None) -> torch.dtype:
    # A default in a schema is a number, and that of the default dtype is None.
    given = a.get("dtype")
    return given if isinstance(given, torch.dtype) else default or torch.get_default_dtype()


def _placed(values: Tensor, a: dict[str, Any]) -> Tensor:
    return values.pin_memory() if a.get("pin_memory") else values


def _made(a: dict[str, Any], draw: Callable[[Sequence[Any], torch.dtype], Tensor], default: Any = None) -> Tensor:
    """What `draw(size, dtype)` draws, of the size that is asked for or like a tensor."""
    if "self" not in a:
        return _placed(draw(a["size"], _dtype(a, default)), a)
    x = a["self"]
    options = {name: a[name] for name in ("dtype", "device", "memory_format") if a.get(name) is not None}
    return torch.empty_like(x, **options).copy_(draw(x.shape, _dtype(a, x.dtype)))


def _rand(source: Source, a: dict[str, Any]) -> Tensor:
    return _made(a, functools.partial(draws.standard_uniform, source))


def _randn(source: Source, a: dict[str, Any]) -> Tensor:
    return _made(a, functools.partial(draws.standard_normal, source))


def _randint(source: Source, a: dict[str, Any]) -> Tensor:
    low, high = a.get("low", 0), a["high"]
    return _made(a, lambda size, dtype: draws.integers(source, size, low, high).to(dtype), torch.int64)


def _randperm(source: Source, a: dict[str, Any]) -> Tensor:
    keys = draws.integers(source, (a["n"],), 0, draws.INT64_VALUES)
    return _placed(keys.argsort(stable=True).to(_dtype(a, torch.int64)), a)


def _bernoulli(source: Source, a: dict[str, Any]) -> Tensor:
    return draws.bernoulli(source, a["self"].shape, a.get("p", a["self"]))


def _normal_of(source: Source, a: dict[str, Any]) -> Tensor:
    """`torch.normal`, in which mean and standard deviation may be tensors."""
    mean, std = a["mean"], a["std"]
    tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    if not tensors:
        draws.require("normal", std >= 0.0, "the standard deviation must not be negative", std)
        return _placed(draws.standard_normal(source, a["size"], _dtype(a)) * std + mean, a)
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    dtype = tensors[0].dtype if len(tensors) == 1 else torch.promote_types(mean.dtype, std.dtype)
    return (draws.standard_normal(source, shape, dtype) * std + mean).to(dtype)


def _multinomial(source: Source, a: dict[str, Any]) -> Tensor:
    weights, count = a["self"].to(torch.float64), a["num_samples"]
    if a.get("replacement"):
        total = weights.cumsum(-1)
        points = draws.standard_uniform(source, (*weights.shape[:-1], count), torch.float64) * total[..., -1:]
        return torch.searchsorted(total, points, right=True).clamp_max(weights.shape[-1] - 1)
    draws.require("multinomial", count <= weights.shape[-1], "num_samples must not exceed the categories", count)
    # The largest of weights over exponential numbers are a sample without replacement.
    return (weights / draws.exponential(source, weights, 1.0)).topk(count, -1).indices


def _native_dropout(source: Source, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x, p = a["input"], a["p"]
    kept = source(x.shape) >= math.ceil(p * draws.WORD)
    noise = kept.to(torch.promote_types(x.dtype, torch.float32)) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return torch.empty_like(x).copy_(x * noise), torch.empty_like(x, dtype=torch.bool).copy_(kept)


def _rrelu(source: Source, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and slopes of the randomized leaky rectifier."""
    x = a["self"]
    slope = torch.where(x <= 0, draws.uniform(source, x, a["lower"], a["upper"]), 1.0)
    return x * slope, slope


def _rrelu_with_noise(source: Source, a: dict[str, Any]) -> Tensor:
    output, slope = _rrelu(source, a)
    a["noise"].copy_(slope)
    return output


def _filled(draw: Callable[..., Tensor], *names: str) -> Callable[[Source, dict[str, Any]], Tensor]:
    """Entry of an operation of `FILLING` whose further arguments are called `names`."""

    def operation(source: Source, a: dict[str, Any]) -> Tensor:
        return draw(source, a["self"], *[a[name] for name in names])

    return operation


def _normal(source: Source, a: dict[str, Any]) -> Tensor:
    return draws.normal(source, a["self"], a["mean"], a["std"]) if "self" in a else _normal_of(source, a)


def _random(source: Source, a: dict[str, Any]) -> Tensor:
    return draws.random(source, a["self"], a.get("from", 0), a.get("to"))


# The results of these have the values alone: what holds them is `self`, or is made like it.
FILLING = frozenset(
    {
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "normal",
        "normal_functional",
        "random",
        "rrelu_with_noise",
        "uniform",
    }
)

# By the name of the operation without the underscore of its in-place form.
OPERATIONS: dict[str, Callable[[Source, dict[str, Any]], Any]] = {
    "bernoulli": _bernoulli,
    "cauchy": _filled(draws.cauchy, "median", "sigma"),
    "exponential": _filled(draws.exponential, "lambd"),
    "geometric": _filled(draws.geometric, "p"),
    "log_normal": _filled(draws.log_normal, "mean", "std"),
    "multinomial": _multinomial,
    "native_dropout": _native_dropout,
    "normal": _normal,
    "normal_functional": _filled(draws.normal, "mean", "std"),
    "rand": _rand,
    "rand_like": _rand,
    "randint": _randint,
    "randint_like": _randint,
    "randn": _randn,
    "randn_like": _randn,
    "random": _random,
    "randperm": _randperm,
    "rrelu_with_noise": _rrelu_with_noise,
    "rrelu_with_noise_functional": _rrelu,
    "uniform": _filled(draws.uniform, "from", "to"),
}
