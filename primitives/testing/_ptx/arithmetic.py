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
    f"{letter}{8 * size}": np.dtype(f"{'i' if letter == 's' else 'u'}{size}") for letter in "bus" for size in UNSIGNED
}
KINDS |= {"pred": np.dtype(bool), "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
KINDS |= {"bf16": np.dtype("u2"), "bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4")}
# Largest relative errors by the manual of instructions that are approximate: here they round correctly, or, if asked,
# are off by as much.
ERRORS = {
    **{"ex2": 2**-22.5, "lg2": 2**-22.6, "rsqrt": 2**-22.9, "sqrt": 2**-23, "rcp": 2**-23, "div": 2**-22},
    **{"tanh": 2**-11, "sin": 2**-20.9, "cos": 2**-20.9},
}
_ORDER = {
    **{
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    },
    **{"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_TO_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_ROUNDED = frozenset({"rn", "ftz"})
_APPROXIMATE = frozenset({"rn", "approx", "full", "ftz"})
# What may stand between the name of an instruction and its kind.
_FORMS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("add", "sub", "fma"), _ROUNDED),
    **dict.fromkeys(("mul", "mad"), _ROUNDED | {"lo", "hi", "wide"}),
    **dict.fromkeys(("min", "max"), frozenset({"ftz", "NaN"})),
    **dict.fromkeys(("neg", "abs"), frozenset({"ftz"})),
    **dict.fromkeys(("and", "or", "xor", "not", "shl", "shr", "bfe", "rem", "prmt", "popc", "mov"), frozenset()),
    **dict.fromkeys(ERRORS, _APPROXIMATE),
}


class Operation(NamedTuple):
    """A function of arrays of the kinds `sources`, whose result is of the kind `result`."""

    function: Function
    result: np.dtype
    sources: tuple[np.dtype, ...]


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
        bits = values.view(np.uint64)
        low = np.uint64((1 << 29) - 1)
        values = ((bits & ~low) | (((bits & low) != 0).astype(np.uint64) << np.uint64(29))).view(np.float64)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(is_nan, np.uint32(0x7FFF), rounded >> np.uint32(16)).astype(np.uint16)


def operation(instruction: Instruction, is_approximate: bool = False) -> Operation:
    """What an instruction computes of its operands behind the first.

    Args:
        instruction: The instruction.
        is_approximate: Whether approximations are off by as much as the manual allows.

    Raises:
        UnsupportedInstructionError: An instruction, a form or a kind that is not known.
    """
    op, qualifiers = instruction.op, instruction.qualifiers
    if op in ("cvt", "setp", "selp"):
        found = {"cvt": _convert, "setp": _compare, "selp": _select}[op](instruction)
    elif (
        op not in _FORMS or not qualifiers or not _FORMS[op].issuperset(qualifiers[:-1]) or qualifiers[-1] not in KINDS
    ):
        found = None
    elif qualifiers[-1] in ("bf16", "bf16x2", "f16", "f16x2"):
        found = _halves(op, qualifiers[-1], len(instruction.operands) - 1)
    elif qualifiers[-1][0] == "f":
        found = _floating(op, qualifiers, len(instruction.operands) - 1, is_approximate)
    else:
        found = _integer(op, qualifiers, len(instruction.operands) - 1)
    if found is None:
        raise instruction.unsupported()
    return found


def _flush(values: Array) -> Array:
    """Subnormal numbers as zeros of their sign."""
    if values.dtype != np.float32:
        return values
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def _floating(op: str, qualifiers: tuple[str, ...], count: int, is_approximate: bool) -> Operation | None:
    dtype = KINDS[qualifiers[-1]]
    exact: dict[str, Function] = {
        **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs},
        "mov": lambda a: a,
        **dict.fromkeys(("fma", "mad"), _fma64 if dtype.itemsize == 8 else _fma32),
        "min": _extremum(np.minimum if "NaN" in qualifiers else np.fmin, np.bitwise_or),
        "max": _extremum(np.maximum if "NaN" in qualifiers else np.fmax, np.bitwise_and),
    }
    transcendental: dict[str, Function] = {
        **{"div": np.divide, "rcp": np.reciprocal, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a), "ex2": np.exp2},
        **{"lg2": np.log2, "tanh": np.tanh, "sin": np.sin, "cos": np.cos},
    }
    if op in exact:
        function = exact[op]
    elif op in transcendental:
        error = ERRORS[op] if is_approximate and {"approx", "full"} & {*qualifiers} else 0.0
        function = _rounded(transcendental[op], dtype, error)
    else:
        return None
    if "ftz" in qualifiers:
        flushed = function

        def function(*args: Array) -> Array:
            return _flush(flushed(*map(_flush, args)))

    return Operation(function, dtype, (dtype,) * count)


def _rounded(function: Function, dtype: np.dtype, error: float) -> Function:
    def rounded(*args: Array) -> Array:
        value = function(*(arg.astype(np.float64) for arg in args))
        if error:
            # In a direction that looks random, and is the same in every run.
            up = args[0].view(UNSIGNED[dtype.itemsize]) * UNSIGNED[dtype.itemsize].type(2654435761) >> 13 & 1
            value = value * (1 + error * np.where(up, 1.0, -1.0))
        return value.astype(dtype)

    return rounded


def _extremum(function: Function, of_zeros: Function) -> Function:
    """Of zeros, the negative one is the lesser."""

    def extremum(a: Array, b: Array) -> Array:
        bits = UNSIGNED[a.dtype.itemsize]
        return np.where(a == b, of_zeros(a.view(bits), b.view(bits)).view(a.dtype), function(a, b))

    return extremum


def _fma32(a: Array, b: Array, c: Array) -> Array:
    """`a * b + c` rounded once: where the sum in float64 may lie between two float32, its error decides."""
    product = a.astype(np.float64) * b
    total = product + c
    between = np.flatnonzero((total.view(np.uint64) & np.uint64((1 << 28) - 1)) == 0)
    if between.size:
        p, s = (np.broadcast_to(x, total.shape)[between] for x in (product, total))
        z = s - p
        error = (p - (s - z)) + (np.broadcast_to(c, total.shape)[between] - z)
        total[between] = np.where(error == 0, s, np.nextafter(s, np.copysign(np.inf, error)))
    return total.astype(np.float32)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """With the error of the product taken along (Dekker), so that a double rounding is rare."""

    def halves(x: Array) -> tuple[Array, Array]:
        t = x * 134217729.0
        high = t - (t - x)
        return high, x - high

    p, (a_high, a_low), (b_high, b_low) = a * b, halves(a), halves(b)
    error = ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low
    s = p + c
    z = s - p
    tail = (p - (s - z)) + (c - z) + error
    return np.where(np.isfinite(s) & np.isfinite(tail), s + tail, s)


def _halves(op: str, kind: str, count: int) -> Operation | None:
    """Arithmetic in 16 bits, of one number or of two in a register: exact in float64 but for one rounding."""
    functions: dict[str, Function] = {
        **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs},
        **{"fma": lambda a, b, c: a * b + c, "min": _extremum(np.fmin, np.bitwise_or)},
        "max": _extremum(np.fmax, np.bitwise_and),
    }
    if op not in functions:
        return None
    single = kind.removesuffix("x2")

    def of_one(*args: Array) -> Array:
        return encode(single, functions[op](*(decode(single, arg).astype(np.float64) for arg in args)))

    def of_two(*args: Array) -> Array:
        args = np.broadcast_arrays(*args)
        parts = of_one(*(np.ascontiguousarray(arg).view(np.uint16) for arg in args))
        return parts.view(np.uint32)

    dtype = KINDS[kind]
    return Operation(of_one if kind == single else of_two, dtype, (dtype,) * count)


def _integer(op: str, qualifiers: tuple[str, ...], count: int) -> Operation | None:
    kind = qualifiers[-1]
    dtype, is_signed = KINDS[kind], kind[0] == "s"
    size = dtype.itemsize
    if op in ("mul", "mad"):
        return _product(op, qualifiers, dtype, is_signed)
    if op in ("shl", "shr"):
        return Operation(_shift(op == "shl", 8 * size, is_signed), dtype, (dtype, KINDS["u32"]))
    functions: dict[str, Function] = {
        **_LOGIC,
        **{"add": np.add, "sub": np.subtract, "neg": np.negative, "abs": np.abs, "not": np.invert, "mov": lambda a: a},
        **{"min": np.minimum, "max": np.maximum},
        "div": _quotient(is_signed),
        "rem": lambda a, b: a - _quotient(is_signed)(a, b) * b,
        "prmt": _permute,
    }
    if op in functions:
        return Operation(functions[op], dtype, (dtype,) * count)
    if op == "popc":
        return Operation(lambda a: np.bitwise_count(a).astype(np.uint32), KINDS["u32"], (dtype,))
    return Operation(_field(8 * size, is_signed), dtype, (dtype, KINDS["u32"], KINDS["u32"])) if op == "bfe" else None


def _product(op: str, qualifiers: tuple[str, ...], dtype: np.dtype, is_signed: bool) -> Operation | None:
    size = dtype.itemsize
    if (size == 8 and "wide" in qualifiers) or size == 1:
        return None
    wide = np.dtype(f"{'i' if is_signed else 'u'}{min(2 * size, 8)}")
    result = wide if "wide" in qualifiers else dtype

    def product(a: Array, b: Array) -> Array:
        if "wide" in qualifiers:
            return a.astype(wide) * b.astype(wide)
        if "hi" not in qualifiers:
            return a * b
        if size < 8:
            return (a.astype(wide) * b.astype(wide) >> wide.type(8 * size)).astype(dtype)
        return _high_half(a, b, is_signed)

    sources = (dtype, dtype) if op == "mul" else (dtype, dtype, result)
    return Operation(product if op == "mul" else lambda a, b, c: product(a, b) + c, result, sources)


def _high_half(a: Array, b: Array, is_signed: bool) -> Array:
    """The upper 64 bits of a product of 64-bit integers, from those of their halves."""
    x, y, low = a.view(np.uint64), b.view(np.uint64), np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    x_low, x_high, y_low, y_high = x & low, x >> half, y & low, y >> half
    middle = x_high * y_low + (x_low * y_low >> half)
    carried = (middle & low) + x_low * y_high
    high = x_high * y_high + (middle >> half) + (carried >> half)
    if is_signed:
        zero = np.uint64(0)
        high = high - np.where(a < 0, y, zero) - np.where(b < 0, x, zero)
    return high.view(a.dtype)


def _shift(is_left: bool, bits: int, is_signed: bool) -> Function:
    """Shifts by the width or more leave nothing but the sign."""

    def shift(a: Array, n: Array) -> Array:
        within = np.minimum(n, bits - 1).astype(a.dtype)
        shifted = a << within if is_left else a >> within
        return shifted if is_signed and not is_left else np.where(n >= bits, a.dtype.type(0), shifted)

    return shift


def _quotient(is_signed: bool) -> Function:
    """Rounded to zero; of a division by zero, which has no result in PTX, whatever comes."""

    def quotient(a: Array, b: Array) -> Array:
        b = np.where(b == 0, b.dtype.type(1), b)
        q = a // b
        return (q + ((q * b != a) & ((a < 0) != (b < 0)))).astype(a.dtype) if is_signed else q

    return quotient


def _field(bits: int, is_signed: bool) -> Function:
    """`bfe`: `n` bits from bit `p`, extended by the highest of them that `a` has."""
    left, right = _shift(True, bits, is_signed), _shift(False, bits, is_signed)

    def field(a: Array, p: Array, n: Array) -> Array:
        p, n = p & np.uint32(255), n & np.uint32(255)
        end = np.minimum(p + n, np.uint32(bits))
        width = end - np.minimum(p, end)
        return np.where(n == 0, a.dtype.type(0), right(left(a, bits - end), bits - width))

    return field


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """`prmt`: four bytes of eight, each chosen by four bits, of which the highest takes its sign alone."""
    eight, result = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.uint32(0)
    for number in range(4):
        choice = selector.astype(np.uint32) >> np.uint32(4 * number)
        byte = (eight >> ((choice & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result = result | np.where(choice & np.uint32(8), sign, byte) << np.uint32(8 * number)
    return result


def _convert(instruction: Instruction) -> Operation | None:  # noqa: C901 - one rule after another
    *flags, to, source = instruction.qualifiers
    if to not in KINDS or source not in KINDS or "pred" in (to, source):
        return None
    if to in ("bf16x2", "f16x2"):
        if flags != ["rn"] or source != "f32":
            return None
        single = to.removesuffix("x2")

        def pack(high: Array, low: Array) -> Array:
            parts = (encode(single, part).view(np.uint16).astype(np.uint32) for part in (low, high))
            return next(parts) | next(parts) << np.uint32(16)

        return Operation(pack, KINDS[to], (KINDS["f32"],) * 2)
    known, floats = {"rn", "ftz", "sat", *_TO_INTEGRAL}, ("f16", "bf16", "f32", "f64")
    if not known.issuperset(flags) or source.endswith("x2"):
        return None
    to_integral = next((_TO_INTEGRAL[flag] for flag in flags if flag in _TO_INTEGRAL), None)
    is_float = source in floats, to in floats
    if is_float == (True, False) and to_integral is None:
        return None

    def convert(values: Array) -> Array:
        if is_float[0]:
            values = decode(source, values)
        values = _flush(values) if "ftz" in flags else values
        values = values if to_integral is None else to_integral(values)
        if is_float[1]:
            values = np.clip(values, 0, 1) if "sat" in flags else values
            narrow = encode(to, values if values.dtype.kind == "f" else values.astype(np.float64))
            return _flush(narrow) if "ftz" in flags else narrow
        if is_float[0] or "sat" in flags:
            # The nearest integer that there is; NaN becomes 0.
            info = np.iinfo(KINDS[to])
            over, under = values >= float(info.max) + 1, values < info.min
            values = np.where(over | under | (values != values), 0, values).astype(KINDS[to])
            return np.where(over, info.max, np.where(under, info.min, values)).astype(KINDS[to])
        return values.astype(KINDS[to])

    return Operation(convert, KINDS[to], (KINDS[source],))


def _compare(instruction: Instruction) -> Operation | None:
    how, *combined, kind = instruction.qualifiers
    combined = [part for part in combined if part != "ftz"]
    logic = _LOGIC.get(combined[0]) if combined else None
    is_float = kind in ("f16", "bf16", "f32", "f64")
    either = how in ("num", "nan")
    order = _ORDER.get(how) or (_ORDER.get(how[:-1]) if is_float else None)
    if kind not in KINDS or kind.endswith("x2") or len(combined) > 1 or bool(combined) != (logic is not None):
        return None
    if (order is None and not (is_float and either)) or "|" in instruction.operands[0]:
        return None
    flushes = "ftz" in instruction.qualifiers

    def compare(a: Array, b: Array, *other: Array) -> Array:
        if is_float:
            a, b = decode(kind, a), decode(kind, b)
            a, b = (_flush(a), _flush(b)) if flushes else (a, b)
        is_nan = (a != a) | (b != b)
        if order is None:
            found = is_nan if how == "nan" else ~is_nan
        else:
            found = order(a, b) & ~is_nan if how in _ORDER else order(a, b) | is_nan
        return logic(found, *other) if logic is not None else found

    sources = (KINDS[kind],) * 2 + ((KINDS["pred"],) if combined else ())
    return Operation(compare, KINDS["pred"], sources)


def _select(instruction: Instruction) -> Operation | None:
    (kind,) = instruction.qualifiers
    dtype = KINDS.get(kind)
    return None if dtype is None else Operation(lambda a, b, p: np.where(p, a, b), dtype, (dtype, dtype, KINDS["pred"]))
