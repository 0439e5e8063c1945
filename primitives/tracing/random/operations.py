"""What torch's random operations draw, made of Philox words: one function for each operation.

A source is a function `(size) -> words`: random integers in `[0, 2**32)`, int64, of the size asked for. Every operation
takes a fixed number of words per element of its result: docs/tracing/functionalize_rng.md has the table.

References:
    Box, Muller, "A note on the generation of random normal deviates", Ann. Math. Statist. 29, 1958.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from primitives.tracing.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Source = Callable[[Sequence[Any]], Tensor]

__all__ = ["FILLING", "OPERATIONS", "WHOLE", "arguments_of", "device_of", "draws_nothing", "is_random"]

_WORD = 2**32
# Largest number of bits of which every integer, and every multiple of 2**-bits below 1, is a number of the dtype.
_MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
_REAL_DTYPES = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_INT64_VALUES = 2**63
# These carry torch's mark of randomness and draw nothing.
_NEVER_DRAWING = frozenset(
    {"_flash_attention_forward_no_dropout_inplace", "_fused_sdp_choice", "_nested_tensor_softmax_with_shape"}
)


# Calls.


@functools.cache
def is_random(func: Any) -> bool:
    """Whether an operator draws random numbers, if its arguments do not say that it has nothing to draw."""
    if schema_of(func).name.removeprefix("aten::") in _NEVER_DRAWING:
        return False
    takes_generator = any(argument.name == "generator" for argument in schema_of(func).arguments)
    return takes_generator or torch.Tag.nondeterministic_seeded in func.tags


def arguments_of(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by the names of the schema, defaults included."""
    schema = schema_of(func).arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update(zip((a.name for a in schema), args, strict=False))
    return {**named, **kwargs}


def draws_nothing(a: dict[str, Any]) -> bool:
    """Whether the arguments of a call say that it has nothing to draw."""
    # In `train`, None means training.
    if a.get("train", True) is False or a.get("training", True) is False:
        return True
    return next((a[name] == 0 for name in ("dropout_p", "dropout") if name in a), False)


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


def _require(op: str, holds: Any, requirement: str, got: Any) -> None:
    """Raise what torch raises for a parameter out of range, unless the requirement holds."""
    if not holds:
        raise RuntimeError(f"{op}: {requirement}, got {got}.")


# Numbers.


def _shifted(words: Tensor, bits: int) -> Tensor:
    """`words >> bits`, by a name that works on a `DTensor` too: the operator leaves that as it is."""
    return torch.bitwise_right_shift(words, bits)


def _standard_uniform(source: Source, size: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1); of complex ones both parts."""
    if dtype in _REAL_DTYPES:
        return torch.view_as_complex(_standard_uniform(source, (*size, 2), _REAL_DTYPES[dtype]))
    bits = _MANTISSA_BITS[dtype]
    if bits > 32:
        words = source((*size, 2))
        integer = words[..., 0] * 2 ** (bits - 32) + _shifted(words[..., 1], 64 - bits)
    else:
        integer = _shifted(source(size), 32 - bits)
    return integer.to(dtype) * 2.0**-bits


def _standard_normal(source: Source, size: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Normal numbers of mean 0 and variance 1; a complex one has half of it in either part."""
    if dtype in _REAL_DTYPES:
        parts = _standard_normal(source, (*size, 2), _REAL_DTYPES[dtype])
        return torch.view_as_complex(parts * math.sqrt(0.5))
    if dtype == torch.float64:
        u, v = (_standard_uniform(source, (*size, 2), dtype)).unbind(-1)
        u = 1.0 - u
    else:
        words = source((*size, 2))
        u, v = (words[..., 0] + 1).to(torch.float32) / _WORD, words[..., 1].to(torch.float32) / _WORD
    return ((-2.0 * u.log()).sqrt() * (v * (2.0 * math.pi)).cos()).to(dtype)


def _integers(source: Source, size: Sequence[Any], low: Any, high: Any) -> Tensor:
    """Integers in [low, high), int64."""
    if not isinstance(high, torch.Tensor):
        _require("randint", low < high, "the range must not be empty", f"[{low}, {high})")
        _require("randint", high - low <= _INT64_VALUES, "the range must have at most 2**63 values", f"[{low}, {high})")
    words = source((*size, 2))
    # 32 bits of one word and 31 of the other, so that the sign stays out of it.
    bits = words[..., 0] * 2**31 + _shifted(words[..., 1], 1)
    if isinstance(high, int) and high - low == _INT64_VALUES:
        return bits + low
    return bits % (high - low) + low


# Operations, each a function of a source and of the arguments of a call by name.


def _made(draw: Callable[..., Tensor], source: Source, a: dict[str, Any], default: Any = None) -> Tensor:
    """What `draw(source, size, dtype)` draws, of the size that is asked for or like a tensor."""
    if "self" not in a:
        return _placed(draw(source, a["size"], _dtype(a, default)), a)
    x = a["self"]
    options = {name: a[name] for name in ("dtype", "device", "memory_format") if a.get(name) is not None}
    return torch.empty_like(x, **options).copy_(draw(source, x.shape, _dtype(a, x.dtype)))


def _randint(source: Source, a: dict[str, Any]) -> Tensor:
    def draw(source: Source, size: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return _integers(source, size, a.get("low", 0), a["high"]).to(dtype)

    return _made(draw, source, a, torch.int64)


def _random(source: Source, a: dict[str, Any]) -> Tensor:
    """Integers up to the largest that the dtype counts to exactly, if there is no limit."""
    dtype, high = a["self"].dtype, a.get("to")
    if high is None and dtype.is_floating_point:
        high = 2 ** _MANTISSA_BITS[dtype] + 1
    elif high is None:
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return _integers(source, a["self"].shape, a.get("from", 0), high)


def _randperm(source: Source, a: dict[str, Any]) -> Tensor:
    keys = _integers(source, (a["n"],), 0, _INT64_VALUES)
    return _placed(keys.argsort(stable=True).to(_dtype(a, torch.int64)), a)


def _bernoulli(source: Source, a: dict[str, Any]) -> Tensor:
    p, size = a.get("p", a["self"]), a["self"].shape
    if isinstance(p, torch.Tensor):
        return source(size) < p.to(torch.float64) * _WORD
    _require("bernoulli", 0.0 <= p <= 1.0, "p must be in [0, 1]", p)
    return source(size) < math.ceil(p * _WORD)


def _uniform(source: Source, a: dict[str, Any]) -> Tensor:
    low, high = a["from"], a["to"]
    _require("uniform", low <= high, "the lower bound must not exceed the upper one", f"[{low}, {high})")
    return _standard_uniform(source, a["self"].shape, a["self"].dtype) * (high - low) + low


def _normal(source: Source, a: dict[str, Any]) -> Tensor:
    """Of a size or a tensor to fill, or of means and standard deviations that are tensors."""
    mean, std = a["mean"], a["std"]
    tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    if not tensors:
        _require("normal", std >= 0.0, "the standard deviation must not be negative", std)
        size, dtype = (a["size"], _dtype(a)) if "size" in a else (a["self"].shape, a["self"].dtype)
    else:
        size = torch.broadcast_shapes(*(value.shape for value in tensors))
        dtype = tensors[0].dtype if len(tensors) == 1 else torch.promote_types(mean.dtype, std.dtype)
    return _placed((_standard_normal(source, size, dtype) * std + mean).to(dtype), a)


def _exponential(source: Source, a: dict[str, Any]) -> Tensor:
    """Never 0, so that its logarithm is finite; torch's definition is infinite for one of 256 bfloat16 numbers."""
    _require("exponential", a["lambd"] > 0.0, "lambd must be positive", a["lambd"])
    uniform = (source(a["self"].shape).to(torch.float64) + 0.5) / _WORD
    values = (-uniform.log() / a["lambd"]).to(a["self"].dtype)
    return values.clamp_min(torch.finfo(values.dtype).tiny)


def _multinomial(source: Source, a: dict[str, Any]) -> Tensor:
    weights, count = a["self"].to(torch.float64), a["num_samples"]
    if a.get("replacement"):
        total = weights.cumsum(-1)
        points = _standard_uniform(source, (*weights.shape[:-1], count), torch.float64) * total[..., -1:]
        return torch.searchsorted(total, points, right=True).clamp_max(weights.shape[-1] - 1)
    _require("multinomial", count <= weights.shape[-1], "num_samples must not exceed the categories", count)
    # The largest of weights over exponential numbers are a sample without replacement.
    return (weights / _exponential(source, {"self": weights, "lambd": 1.0})).topk(count, -1).indices


def _native_dropout(source: Source, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x, p = a["input"], a["p"]
    kept = source(x.shape) >= math.ceil(p * _WORD)
    noise = kept.to(torch.promote_types(x.dtype, torch.float32)) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return torch.empty_like(x).copy_(x * noise), torch.empty_like(x, dtype=torch.bool).copy_(kept)


def _rrelu(source: Source, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and slopes of the randomized leaky rectifier."""
    x = a["self"]
    slope = torch.where(x <= 0, _uniform(source, {"self": x, "from": a["lower"], "to": a["upper"]}), 1.0)
    return x * slope, slope


# These draw for a whole tensor at once; every other one draws for each element.
WHOLE = frozenset({"multinomial", "randperm"})
# By the name of the operation without the underscore of its in-place form. The results of the first ones have the
# values alone: what holds them is `self`, or is made like it.
FILLING: dict[str, Callable[[Source, dict[str, Any]], Any]] = {
    "bernoulli": _bernoulli,
    "exponential": _exponential,
    "normal": _normal,
    "normal_functional": _normal,
    "random": _random,
    "rrelu_with_noise": lambda source, a: a["self"] * a["noise"].copy_(_rrelu(source, a)[1]),
    "uniform": _uniform,
}
OPERATIONS = {
    **FILLING,
    "multinomial": _multinomial,
    "native_dropout": _native_dropout,
    "rand": functools.partial(_made, _standard_uniform),
    "rand_like": functools.partial(_made, _standard_uniform),
    "randint": _randint,
    "randint_like": _randint,
    "randn": functools.partial(_made, _standard_normal),
    "randn_like": functools.partial(_made, _standard_normal),
    "randperm": _randperm,
    "rrelu_with_noise_functional": _rrelu,
}
