"""The numbers of torch's random operations, made of Philox words: one function for each operation.

A source is a function `(size) -> words`: random integers in `[0, 2**32)`, int64, of the size asked for. Every operation
takes a fixed number of words per element of its result: docs/reference/tracing/functionalize_rng.md has the table.

References:
    Box, Muller, "A note on the generation of random normal deviates", Ann. Math. Statist. 29, 1958.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives.tracing._torch_private import schema_of

Source = Callable[[Sequence[Any]], Tensor]

_WORD = 2**32
# Largest number of bits of which every integer, and every multiple of 2**-bits below 1, is a number of the dtype.
_MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
_INT64_VALUES = 2**63
# These carry torch's mark of randomness and draw nothing.
_NEVER_DRAWING = frozenset(
    {"_flash_attention_forward_no_dropout_inplace", "_fused_sdp_choice", "_nested_tensor_softmax_with_shape"}
)


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


def draw(name: str, source: Source, a: dict[str, Any]) -> Any:
    """The result of the operation `name` of these arguments; one in place is named with its underscore."""
    stem, x, dtype = name.removesuffix("_"), a.get("self"), a.get("dtype")
    # A default in a schema is a number, and that of the default dtype is None.
    if not isinstance(dtype, torch.dtype):
        default = torch.int64 if stem in ("randint", "randperm") else torch.get_default_dtype()
        dtype = default if x is None else x.dtype
    size = a.get("size") if x is None else x.shape
    result = OPERATIONS[stem](source, size, dtype, a)
    if name != stem:
        return a["self"].copy_(result)
    if a.get("out") is not None:
        return a["out"].resize_(result.shape).copy_(result)
    if stem == "multinomial" or isinstance(result, tuple):
        return result
    if x is None:
        return result.pin_memory() if a.get("pin_memory") else result
    options = {name: a[name] for name in ("dtype", "device", "memory_format") if a.get(name) is not None}
    return torch.empty_like(x, **options).copy_(result)


def _require(op: str, holds: Any, requirement: str, got: Any) -> None:
    """Raise what torch raises for a parameter out of range, unless the requirement holds."""
    if not holds:
        raise RuntimeError(f"{op}: {requirement}, got {got}.")


# Operations, each a function of a source, of the size and dtype that are wanted, and of the arguments by name.


def _shifted(words: Tensor, bits: int) -> Tensor:
    """`words >> bits`, by a name that works on a `DTensor` too: the operator leaves that as it is."""
    return torch.bitwise_right_shift(words, bits)


def _standard_uniform(source: Source, size: Sequence[Any], dtype: torch.dtype, _: Any = None) -> Tensor:
    """Uniform numbers in [0, 1); of complex ones both parts."""
    if dtype.is_complex:
        return torch.view_as_complex(_standard_uniform(source, (*size, 2), dtype.to_real()))
    bits = _MANTISSA_BITS[dtype]
    if bits > 32:
        words = source((*size, 2))
        integer = words[..., 0] * 2 ** (bits - 32) + _shifted(words[..., 1], 64 - bits)
    else:
        integer = _shifted(source(size), 32 - bits)
    return integer.to(dtype) * 2.0**-bits


def _standard_normal(source: Source, size: Sequence[Any], dtype: torch.dtype, _: Any = None) -> Tensor:
    """Normal numbers of mean 0 and variance 1; a complex one has half of it in either part."""
    if dtype.is_complex:
        return torch.view_as_complex(_standard_normal(source, (*size, 2), dtype.to_real()) * math.sqrt(0.5))
    if dtype == torch.float64:
        u, v = _standard_uniform(source, (*size, 2), dtype).unbind(-1)
        u = 1.0 - u
    else:
        words = source((*size, 2))
        u, v = (words[..., 0] + 1).to(torch.float32) / _WORD, words[..., 1].to(torch.float32) / _WORD
    return ((-2.0 * u.log()).sqrt() * (v * (2.0 * math.pi)).cos()).to(dtype)


def _uniform(source: Source, size: Sequence[Any], dtype: torch.dtype, a: dict[str, Any]) -> Tensor:
    low, high = a["from"], a["to"]
    _require("uniform", low <= high, "the lower bound must not exceed the upper one", f"[{low}, {high})")
    return _standard_uniform(source, size, dtype) * (high - low) + low


def _normal(source: Source, size: Sequence[Any], dtype: torch.dtype, a: dict[str, Any]) -> Tensor:
    """Of means and standard deviations that may be tensors."""
    mean, std = a["mean"], a["std"]
    tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    if tensors:
        size = torch.broadcast_shapes(*(value.shape for value in tensors))
        dtype = tensors[0].dtype if len(tensors) == 1 else torch.promote_types(mean.dtype, std.dtype)
    else:
        _require("normal", std >= 0.0, "the standard deviation must not be negative", std)
    return (_standard_normal(source, size, dtype) * std + mean).to(dtype)


def _exponential(source: Source, size: Sequence[Any], dtype: torch.dtype, a: dict[str, Any]) -> Tensor:
    """Never 0, so that its logarithm is finite; torch's definition is infinite for one of 256 bfloat16 numbers."""
    _require("exponential", a["lambd"] > 0.0, "lambd must be positive", a["lambd"])
    uniform = (source(size).to(torch.float64) + 0.5) / _WORD
    return (-uniform.log() / a["lambd"]).to(dtype).clamp_min(torch.finfo(dtype).tiny)


def _bernoulli(source: Source, size: Sequence[Any], _: Any, a: dict[str, Any]) -> Tensor:
    p = a.get("p", a["self"])
    if isinstance(p, torch.Tensor):
        return source(size) < p.to(torch.float64) * _WORD
    _require("bernoulli", 0.0 <= p <= 1.0, "p must be in [0, 1]", p)
    return source(size) < math.ceil(p * _WORD)


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


def _randint(source: Source, size: Sequence[Any], dtype: torch.dtype, a: dict[str, Any]) -> Tensor:
    return _integers(source, size, a.get("low", 0), a["high"]).to(dtype)


def _random(source: Source, size: Sequence[Any], dtype: torch.dtype, a: dict[str, Any]) -> Tensor:
    """Integers up to the largest that the dtype counts to exactly, without a limit."""
    high = a.get("to")
    if high is None and dtype.is_floating_point:
        high = 2 ** _MANTISSA_BITS[dtype] + 1
    elif high is None:
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return _integers(source, size, a.get("from", 0), high)


def _randperm(source: Source, _: Any, dtype: torch.dtype, a: dict[str, Any]) -> Tensor:
    return _integers(source, (a["n"],), 0, _INT64_VALUES).argsort(stable=True).to(dtype)


def _multinomial(source: Source, size: Sequence[Any], _: Any, a: dict[str, Any]) -> Tensor:
    weights, count = a["self"].to(torch.float64), a["num_samples"]
    if a.get("replacement"):
        total = weights.cumsum(-1)
        points = _standard_uniform(source, (*size[:-1], count), torch.float64) * total[..., -1:]
        return torch.searchsorted(total, points, right=True).clamp_max(size[-1] - 1)
    _require("multinomial", count <= size[-1], "num_samples must not exceed the categories", count)
    # The largest of weights over exponential numbers are a sample without replacement.
    return (weights / _exponential(source, size, torch.float64, {"lambd": 1.0})).topk(count, -1).indices


def _native_dropout(source: Source, _size: Any, _dtype: Any, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x, p = a["input"], a["p"]
    kept = source(x.shape) >= math.ceil(p * _WORD)
    noise = kept.to(torch.promote_types(x.dtype, torch.float32)) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return torch.empty_like(x).copy_(x * noise), torch.empty_like(x, dtype=torch.bool).copy_(kept)


def _rrelu(source: Source, size: Sequence[Any], dtype: torch.dtype, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x = a["self"]
    slope = torch.where(x <= 0, _uniform(source, size, dtype, {"from": a["lower"], "to": a["upper"]}), 1.0)
    return x * slope, slope


# By the name of the operation without the underscore of its in-place form.
OPERATIONS: dict[str, Callable[[Source, Any, Any, dict[str, Any]], Any]] = {
    "bernoulli": _bernoulli,
    "exponential": _exponential,
    "multinomial": _multinomial,
    "native_dropout": _native_dropout,
    "normal": _normal,
    "normal_functional": _normal,
    "rand": _standard_uniform,
    "rand_like": _standard_uniform,
    "randint": _randint,
    "randint_like": _randint,
    "randn": _standard_normal,
    "randn_like": _standard_normal,
    "random": _random,
    "randperm": _randperm,
    "rrelu_with_noise": lambda *args: args[-1]["self"] * args[-1]["noise"].copy_(_rrelu(*args)[1]),
    "rrelu_with_noise_functional": _rrelu,
    "uniform": _uniform,
}
