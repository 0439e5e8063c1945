"""What instructions compute that each thread executes for itself: IEEE arithmetic on NumPy arrays, rounded as PTX says.

`operation` looks one up. Numbers of 16 bits that NumPy lacks (bfloat16) are unsigned integers between instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
Function = Callable[..., Array]
# A function of arrays, the type of its result, and those of its arguments.
Operation = tuple[Function, np.dtype, tuple[np.dtype, ...]]

UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
# The arrays that hold each kind.
KINDS = {
    f"{name}{8 * size}": np.dtype(f"{new}{size}") for name, new in zip("bus", "uui", strict=True) for size in UNSIGNED
}
KINDS |= {"pred": np.dtype(bool), "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
KINDS |= {"bf16": np.dtype("u2"), "bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4")}
_NAN = {size: (~np.zeros(1, UNSIGNED[size]) >> 1).view(f"f{size}") for size in (4, 8)}
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


@functools.cache
def operation(op: str, qualifiers: tuple[str, ...], count: int, is_approximate: bool) -> Operation | None:
    """What an instruction computes of `count` operands; None where that is not known.

    Approximations have the largest error that the manual allows, or none.
    """
    *flags, kind = qualifiers or ("",)
    forms, floating, integer, kinds = _TABLE.get(op, ("", None, None, ""))
    if kind not in KINDS or not {*forms.split()}.issuperset(flags):
        return None
    dtype, is_float = KINDS[kind], kind.removesuffix("x2") in _FLOATS
    if op in ("cvt", "setp"):
        return (_convert if op == "cvt" else _compare)(flags, kind)
    if op in ("mul", "mad") and not is_float:
        return _product(op, flags, dtype)
    function = floating if is_float else integer
    if function is None or not {"lo", "hi", "wide"}.isdisjoint(flags):
        return None
    if op in _APPROXIMATE and is_float:
        function = _approximate(*_APPROXIMATE[op], is_approximate and not {"approx", "full"}.isdisjoint(flags))
    if op in ("min", "max") and is_float:
        function = _extremum(op, "NaN" in flags)
    if op == "shf":
        function = _funnel("l" in flags)
    if is_float and op not in ("mov", "selp"):
        function = _rounded(function, kind, "ftz" in flags)
    named = {"u": _U32, "p": KINDS["pred"]}
    return function, dtype, tuple(named.get(each, dtype) for each in kinds or "k" * count)


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


def _rounded(function: Function, kind: str, flushes: bool) -> Function:
    """A function whose result is rounded to a kind; in place of numbers of 16 bits it has those of 64."""
    dtype, single = KINDS[kind], kind.removesuffix("x2")

    def compute(*args: Array) -> Array:
        if single not in ("f16", "bf16"):
            value = _flush(function(*map(_flush, args))) if flushes else function(*args)
            is_nan = value != value
            # Chips have one NaN, where NumPy has two signs of many.
            return np.where(is_nan, _NAN[value.itemsize], value) if is_nan.any() else value
        # Exact in float64 but for one rounding; two numbers of a register are computed side by side.
        words = (np.ascontiguousarray(arg).view(np.uint16) for arg in np.broadcast_arrays(*args))
        return encode(single, function(*(decode(single, each).astype(np.float64) for each in words))).view(dtype)

    return compute


def _approximate(function: Function, error: float, is_off: bool) -> Function:
    def rounded(*args: Array) -> Array:
        value, bits = function(*(arg.astype(np.float64) for arg in args)), UNSIGNED[args[0].dtype.itemsize]
        if is_off:
            # In a direction that looks random, and is the same in every run.
            value = value * (1 + error * np.where(args[0].view(bits) * bits.type(2654435761) >> 13 & 1, 1.0, -1.0))
        return value.astype(args[0].dtype)

    return rounded


def _extremum(op: str, keeps_nan: bool) -> Function:
    """Of zeros, the negative one is the lesser."""
    plain = (np.minimum if keeps_nan else np.fmin) if op == "min" else (np.maximum if keeps_nan else np.fmax)
    of_zeros = np.bitwise_or if op == "min" else np.bitwise_and

    def extremum(a: Array, b: Array) -> Array:
        bits = UNSIGNED[a.dtype.itemsize]
        return np.where(a == b, of_zeros(a.view(bits), b.view(bits)).view(a.dtype), plain(a, b))

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
    return product, result, (dtype, dtype) if op == "mul" else (dtype, dtype, result)


def _shift_left(a: Array, n: Array) -> Array:
    """By the width or more, shifts leave nothing but the sign."""
    bits = 8 * a.dtype.itemsize
    return np.where(n >= bits, a.dtype.type(0), a << np.minimum(n, bits - 1).astype(a.dtype))


def _shift_right(a: Array, n: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n >= bits, a.dtype.type(0), shifted)


def _funnel(is_left: bool) -> Function:
    """`shf.wrap`: the high word of two that are shifted left together, or the low one of two that go right."""

    def shift(low: Array, high: Array, n: Array) -> Array:
        both, n = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32), (n & np.uint32(31)).astype(np.uint64)
        return ((both << n) >> np.uint64(32) if is_left else both >> n).astype(np.uint32)

    return shift


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


def _select(a: Array, b: Array, choice: Array) -> Array:
    return np.where(choice, a, b)


# Conversions and comparisons.
def _convert(flags: list[str], source: str) -> Operation | None:
    *flags, to = flags
    if to in ("bf16x2", "f16x2") and (flags, source) == (["rn"], "f32"):

        def pack(high: Array, low: Array) -> Array:
            halves = np.broadcast_arrays(*(encode(to[:-2], each) for each in (low, high)))
            return np.stack(halves, 1).view(np.uint32)[:, 0]

        return pack, KINDS[to], (KINDS["f32"],) * 2
    to_integral = next((_TO_INTEGRAL[flag] for flag in flags if flag in _TO_INTEGRAL), None)
    from_float, to_float, single = source in _FLOATS, to in _FLOATS, KINDS.keys() - {"pred", "bf16x2", "f16x2"}
    is_cut = from_float and not to_float and to_integral is None
    if is_cut or not {to, source} <= single or not KINDS.keys().isdisjoint(flags):
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
            # The nearest integer that there is, in numbers that have all of 64 bits; NaN becomes 0.
            info, exact = np.iinfo(KINDS[to]), values.astype(np.longdouble)
            exact = np.clip(exact, *np.array([info.min, info.max], KINDS[to]).astype(np.longdouble))
            values = np.where(exact == exact, exact, 0)
        return values.astype(KINDS[to])

    return convert, KINDS[to], (KINDS[source],)


def _compare(flags: list[str], kind: str) -> Operation | None:
    how, *combined = (flag for flag in flags if flag != "ftz")
    word, kind = KINDS[kind], kind.removesuffix("x2")
    is_float, has_halves = kind in _FLOATS, word.itemsize > KINDS[kind].itemsize
    order = _ORDER.get(how) or (_ORDER.get(how[:-1]) if is_float else None)
    if (has_halves and combined) or not _LOGIC.keys() >= {*combined} or (order is None and not is_float):
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

    def compare_halves(a: Array, b: Array) -> Array:
        """Of both numbers in a register, the lower ones first."""
        return [compare(*((each >> np.uint32(shift)).astype(np.uint16) for each in (a, b))) for shift in (0, 16)]

    function = compare_halves if has_halves else compare
    return function, KINDS["pred"], (word,) * 2 + (KINDS["pred"],) * len(combined)


# What may stand between an instruction and its kind, what it computes of floating-point numbers and of integers, and
# the kinds of its operands if they are others: that of the instruction (k), u32 (u) or pred (p).
_TABLE: dict[str, tuple[str, Function | None, Function | None, str]] = {
    **{op: ("rn approx full ftz", function, None, "") for op, (function, _) in _APPROXIMATE.items()},
    **{op: ("", None, function, "") for op, function in _LOGIC.items()},
    "add": ("rn ftz", np.add, np.add, ""),
    "sub": ("rn ftz", np.subtract, np.subtract, ""),
    "mul": ("rn ftz lo hi wide", np.multiply, None, ""),
    "mad": ("rn ftz lo hi wide", _fma, None, ""),
    "fma": ("rn ftz", _fma, None, ""),
    "div": ("rn approx full ftz", np.divide, _quotient, ""),
    "rem": ("", None, lambda a, b: a - _quotient(a, b) * b, ""),
    "neg": ("ftz", np.negative, np.negative, ""),
    "abs": ("ftz", np.abs, np.abs, ""),
    "min": ("ftz NaN", np.fmin, np.minimum, ""),
    "max": ("ftz NaN", np.fmax, np.maximum, ""),
    "mov": ("", lambda a: a, lambda a: a, ""),
    "selp": ("", _select, _select, "kkp"),
    # Addresses are the same in every space.
    "cvta": ("to global shared", None, lambda a: a, ""),
    "not": ("", None, np.invert, ""),
    "shl": ("", None, _shift_left, "ku"),
    "shr": ("", None, _shift_right, "ku"),
    "shf": ("l r wrap", None, _funnel, "kku"),
    "bfe": ("", None, _field, "kuu"),
    "prmt": ("", None, _permute, ""),
    "cvt": (" ".join((*KINDS, *_TO_INTEGRAL, "rn ftz sat")), None, None, ""),
    "setp": (" ".join((*_ORDER, *(f"{each}u" for each in _ORDER), *_LOGIC, "num nan ftz")), None, None, ""),
}
