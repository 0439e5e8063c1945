"""What instructions compute that each thread executes for itself: IEEE arithmetic on NumPy arrays, rounded as PTX says.

`operation` looks one up. Numbers of 16 bits that NumPy lacks (bfloat16) are unsigned integers between instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from primitives.testing._ptx.code import Instruction

__all__ = ["KINDS", "UNSIGNED", "Operation", "decode", "encode", "operation"]

Array = Any
Function = Callable[..., Array]

UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
# The arrays that hold each kind.
KINDS = {
    f"{letter}{8 * size}": np.dtype(f"{new}{size}")
    for letter, new in zip("bus", "uui", strict=True)
    for size in UNSIGNED
}
KINDS |= {"pred": np.dtype(bool), "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
KINDS |= {"bf16": np.dtype("u2"), "bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4")}
_FLOATS = ("f16", "bf16", "f32", "f64")
_U32 = KINDS["u32"]
# Functions with their largest relative errors by the manual: here they round correctly, or, if asked, are as far off.
_APPROXIMATE: dict[str, tuple[Function, float]] = {
    **{"ex2": (np.exp2, 2**-22.5), "lg2": (np.log2, 2**-22.6), "rsqrt": (lambda a: 1 / np.sqrt(a), 2**-22.9)},
    **{"sqrt": (np.sqrt, 2**-23), "rcp": (np.reciprocal, 2**-23), "div": (np.divide, 2**-22)},
    **{"tanh": (np.tanh, 2**-11), "sin": (np.sin, 2**-20.9), "cos": (np.cos, 2**-20.9)},
}
_ORDER: dict[str, Function] = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_TO_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
# What may stand between the name of an instruction and its kind.
_FORMS: dict[str, set[str]] = {
    **{op: {"rn", "ftz"} for op in ("add", "sub", "fma")},
    **{op: {"rn", "ftz", "lo", "hi", "wide"} for op in ("mul", "mad")},
    **{op: {"ftz", "NaN"} for op in ("min", "max")},
    **{op: {"ftz"} for op in ("neg", "abs")},
    **{op: set() for op in ("and", "or", "xor", "not", "shl", "shr", "bfe", "rem", "prmt", "mov", "selp")},
    **{op: {"rn", "approx", "full", "ftz"} for op in _APPROXIMATE},
    "cvt": {*KINDS, *_TO_INTEGRAL, "rn", "ftz", "sat"},
    "setp": {*_ORDER, *(f"{each}u" for each in _ORDER), *_LOGIC, "num", "nan", "ftz"},
}


class Operation(NamedTuple):
    """A function of arrays of the kinds `sources`, whose result is of the kind `result`."""

    function: Function
    result: np.dtype
    sources: tuple[np.dtype, ...]


def operation(instruction: Instruction, is_approximate: bool = False) -> Operation:
    """What an instruction computes of its operands behind the first.

    Args:
        instruction: The instruction.
        is_approximate: Whether approximations are off by as much as the manual allows.

    Raises:
        UnsupportedInstructionError: An instruction, a form or a kind that is not known.
    """
    op, count = instruction.op, len(instruction.operands) - 1
    *flags, kind = instruction.qualifiers or ("",)
    found = None
    if kind in KINDS and _FORMS.get(op, {""}).issuperset(flags) and "|" not in instruction.operands[0]:
        if op == "cvt":
            found = _convert(flags, kind)
        elif op == "setp":
            found = _compare(flags, kind)
        elif op == "selp":
            found = Operation(lambda a, b, p: np.where(p, a, b), KINDS[kind], (KINDS[kind],) * 2 + (KINDS["pred"],))
        elif kind.removesuffix("x2") in _FLOATS:
            found = _floating(op, flags, kind, count, is_approximate)
        else:
            found = _integer(op, flags, kind, count)
    if found is None:
        raise instruction.unsupported()
    return found


# Floating point.
def decode(kind: str, values: Array) -> Array:
    """Numbers as NumPy has them: those of bfloat16 and float16 as float32."""
    if kind == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.view(np.float16).astype(np.float32) if kind == "f16" else values


def encode(kind: str, values: Array) -> Array:
    """Floating-point numbers rounded once to nearest, ties to even, as they are stored."""
    if kind != "bf16":
        return values.astype(KINDS[kind])
    is_nan = np.isnan(values)
    if values.dtype == np.float64:
        # Rounded to odd, which a second rounding cannot tip over.
        bits, low = values.view(np.uint64), np.uint64((1 << 29) - 1)
        values = ((bits & ~low) | (((bits & low) != 0).astype(np.uint64) << np.uint64(29))).view(np.float64)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(is_nan, np.uint32(0x7FFF), rounded >> np.uint32(16)).astype(np.uint16)


def _flush(values: Array) -> Array:
    """Subnormal numbers as zeros of their sign."""
    if values.dtype != np.float32:
        return values
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def _floating(op: str, flags: list[str], kind: str, count: int, is_approximate: bool) -> Operation | None:
    dtype, single = KINDS[kind], kind.removesuffix("x2")
    exact: dict[str, Function] = {
        **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs},
        **{"fma": _fma, "mad": _fma, "mov": lambda a: a},
        "min": _extremum(np.minimum if "NaN" in flags else np.fmin, np.bitwise_or),
        "max": _extremum(np.maximum if "NaN" in flags else np.fmax, np.bitwise_and),
    }
    if op in _APPROXIMATE:
        function, error = _APPROXIMATE[op]
        exact[op] = _approximate(function, error if is_approximate and {"approx", "full"} & {*flags} else 0.0)
    if op not in exact or not {"lo", "hi", "wide"}.isdisjoint(flags):
        return None
    function = exact[op]

    def compute(*args: Array) -> Array:
        if "ftz" in flags:
            return _flush(function(*map(_flush, args)))
        return function(*args)

    def narrow(*args: Array) -> Array:
        # Exact in float64 but for one rounding; two numbers of a register are computed side by side.
        words = (np.ascontiguousarray(arg).view(np.uint16) for arg in np.broadcast_arrays(*args))
        return encode(single, function(*(decode(single, each).astype(np.float64) for each in words))).view(dtype)

    return Operation(narrow if single in ("f16", "bf16") else compute, dtype, (dtype,) * count)


def _approximate(function: Function, error: float) -> Function:
    def rounded(*args: Array) -> Array:
        value, bits = function(*(arg.astype(np.float64) for arg in args)), UNSIGNED[args[0].dtype.itemsize]
        if error:
            # In a direction that looks random, and is the same in every run.
            value = value * (1 + error * np.where(args[0].view(bits) * bits.type(2654435761) >> 13 & 1, 1.0, -1.0))
        return value.astype(args[0].dtype)

    return rounded


def _extremum(function: Function, of_zeros: Function) -> Function:
    """Of zeros, the negative one is the lesser."""

    def extremum(a: Array, b: Array) -> Array:
        bits = UNSIGNED[a.dtype.itemsize]
        return np.where(a == b, of_zeros(a.view(bits), b.view(bits)).view(a.dtype), function(a, b))

    return extremum


def _fma(a: Array, b: Array, c: Array) -> Array:
    """`a * b + c` rounded once: where the sum in float64 may lie between two float32, its error decides."""
    if a.dtype == np.float64:
        return _fma64(a, b, c)
    product = a.astype(np.float64) * b
    total = product + c
    between = np.flatnonzero((total.view(np.uint64) & np.uint64((1 << 28) - 1)) == 0)
    if between.size:
        p, s, c = (np.broadcast_to(x, total.shape)[between] for x in (product, total, c))
        error = _rest_of_sum(p, c, s)
        total[between] = np.where(error == 0, s, np.nextafter(s, np.copysign(np.inf, error)))
    return total.astype(np.float32)


def _rest_of_sum(a: Array, b: Array, total: Array) -> Array:
    """What rounding has taken from `a + b`."""
    z = total - a
    return (a - (total - z)) + (b - z)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """With the error of the product taken along (Dekker), so that a double rounding is rare."""
    p = a * b
    (a_high, a_low), (b_high, b_low) = ((high := (t := x * 134217729.0) - (t - x), x - high) for x in (a, b))
    error = ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low
    s = p + c
    tail = _rest_of_sum(p, c, s) + error
    return np.where(np.isfinite(s) & np.isfinite(tail), s + tail, s)


# Integers, and bits.
def _integer(op: str, flags: list[str], kind: str, count: int) -> Operation | None:
    dtype = KINDS[kind]
    if op in ("mul", "mad"):
        return _product(op, flags, dtype)
    functions: dict[str, Function] = {
        **_LOGIC,
        **{"add": np.add, "sub": np.subtract, "neg": np.negative, "abs": np.abs, "not": np.invert, "mov": lambda a: a},
        **{"min": np.minimum, "max": np.maximum, "div": _quotient, "rem": lambda a, b: a - _quotient(a, b) * b},
        **{"shl": _shift_left, "shr": _shift_right, "bfe": _field, "prmt": _permute},
    }
    if op not in functions or flags:
        return None
    sources = {"shl": (dtype, _U32), "shr": (dtype, _U32), "bfe": (dtype, _U32, _U32)}
    return Operation(functions[op], dtype, sources.get(op, (dtype,) * count))


def _product(op: str, flags: list[str], dtype: np.dtype) -> Operation | None:
    size, half = dtype.itemsize, next((each for each in flags if each in ("lo", "hi", "wide")), "lo")
    if size == 1 or (size == 8 and half == "wide"):
        return None
    # Of two numbers of 64 bits, Python has the product.
    wide = np.dtype(object) if size == 8 else np.dtype(f"{dtype.kind}{2 * size}")

    def product(a: Array, b: Array, c: Array | int = 0) -> Array:
        if half == "lo":
            return a * b + c
        whole = a.astype(wide) * b.astype(wide)
        return (whole if half == "wide" else (whole >> 8 * size).astype(dtype)) + c

    result = wide if half == "wide" else dtype
    return Operation(product, result, (dtype, dtype) if op == "mul" else (dtype, dtype, result))


def _shift_left(a: Array, n: Array) -> Array:
    """By the width or more, shifts leave nothing but the sign."""
    bits = 8 * a.dtype.itemsize
    return np.where(n >= bits, a.dtype.type(0), a << np.minimum(n, bits - 1).astype(a.dtype))


def _shift_right(a: Array, n: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n >= bits, a.dtype.type(0), shifted)


def _quotient(a: Array, b: Array) -> Array:
    """Rounded to zero; of a division by zero, which has no result in PTX, whatever comes."""
    b = np.where(b == 0, b.dtype.type(1), b)
    q = a // b
    return (q + ((q * b != a) & ((a < 0) != (b < 0)))).astype(a.dtype)


def _field(a: Array, p: Array, n: Array) -> Array:
    """`bfe`: `n` bits from bit `p`, extended by the highest of them that `a` has."""
    bits, p, n = np.uint32(8 * a.dtype.itemsize), p & np.uint32(255), n & np.uint32(255)
    end = np.minimum(p + n, bits)
    field = _shift_right(_shift_left(a, bits - end), bits - (end - np.minimum(p, end)))
    return np.where(n == 0, a.dtype.type(0), field)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """`prmt`: four bytes of eight, each chosen by four bits, of which the highest takes its sign alone."""
    eight, result = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.uint32(0)
    for number in range(4):
        choice = selector.astype(np.uint32) >> np.uint32(4 * number)
        byte = (eight >> ((choice & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint8)
        byte = np.where(choice & np.uint32(8), (byte.view(np.int8) >> 7).view(np.uint8), byte)
        result = result | byte.astype(np.uint32) << np.uint32(8 * number)
    return result


# Conversions and comparisons.
def _convert(flags: list[str], source: str) -> Operation | None:
    to = flags.pop()
    if to in ("bf16x2", "f16x2") and (flags, source) == (["rn"], "f32"):

        def pack(high: Array, low: Array) -> Array:
            high, low = (encode(to[:-2], part).view(np.uint16).astype(np.uint32) for part in (high, low))
            return low | high << np.uint32(16)

        return Operation(pack, KINDS[to], (KINDS["f32"],) * 2)
    to_integral = next((_TO_INTEGRAL[flag] for flag in flags if flag in _TO_INTEGRAL), None)
    from_float, to_float = source in _FLOATS, to in _FLOATS
    if (
        to not in KINDS
        or not KINDS.keys().isdisjoint(flags)
        or any(x == "pred" or x[-2:] == "x2" for x in (to, source))
    ):
        return None
    if from_float and not to_float and to_integral is None:
        return None

    def convert(values: Array) -> Array:
        values = decode(source, values) if from_float else values
        values = _flush(values) if "ftz" in flags else values
        values = values if to_integral is None else to_integral(values)
        if to_float:
            values = np.clip(values, 0, 1) if "sat" in flags else values
            narrow = encode(to, values if values.dtype.kind == "f" else values.astype(np.float64))
            return _flush(narrow) if "ftz" in flags else narrow
        if from_float or "sat" in flags:
            # The nearest integer that there is; NaN becomes 0.
            info = np.iinfo(KINDS[to])
            over, under = values >= float(info.max) + 1, values < info.min
            values = np.where(over | under | (values != values), 0, values).astype(KINDS[to])
            values = np.where(over, info.max, np.where(under, info.min, values))
        return values.astype(KINDS[to])

    return Operation(convert, KINDS[to], (KINDS[source],))


def _compare(flags: list[str], kind: str) -> Operation | None:
    how, *combined = (flag for flag in flags if flag != "ftz")
    is_float = kind in _FLOATS
    order = _ORDER.get(how) or (_ORDER.get(how[:-1]) if is_float else None)
    if kind.endswith("x2") or not _LOGIC.keys() >= {*combined} or (order is None and not is_float):
        return None

    def compare(a: Array, b: Array, *other: Array) -> Array:
        if is_float:
            a, b = (_flush(x) if "ftz" in flags else x for x in (decode(kind, a), decode(kind, b)))
        is_nan = (a != a) | (b != b)
        if order is None:
            found = is_nan if how == "nan" else ~is_nan
        else:
            found = order(a, b) & ~is_nan if how in _ORDER else order(a, b) | is_nan
        return _LOGIC[combined[0]](found, *other) if combined else found

    return Operation(compare, KINDS["pred"], (KINDS[kind],) * 2 + (KINDS["pred"],) * len(combined))
