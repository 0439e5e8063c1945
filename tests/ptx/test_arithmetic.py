"""Instructions that a thread executes for itself, by the tables and rules of the PTX manual."""

import numpy as np
import pytest

from primitives.testing._ptx.code import UnsupportedInstructionError
from tests.ptx.running import compute, run

INF = float("inf")
# The only one that chips have.
NAN = float(np.uint32(0x7FFFFFFF).view(np.float32))
TINY = 1e-40  # A subnormal number in float32.
ONE, HALF_UNIT, UNIT = 0x3F80, 0x3B80, 0x3C00  # In bfloat16 1, and of its last place half a unit and one.


def bits(values, kind):
    return np.asarray(values, kind).view(f"u{np.dtype(kind).itemsize}").tolist()


# Of an instruction the kinds of its result and operands, these, and what comes of them.
RESULTS = {
    "cvt.rn.bf16.f32": (
        *("bf16 f32", [1.0, 1.00390625, 1.01171875, 3.4e38, NAN, -INF, 1.003907]),
        [0x3F80, 0x3F80, 0x3F82, 0x7F80, 0x7FFF, 0xFF80, 0x3F81],
    ),
    "cvt.rn.f16.f32": ("f16 f32", [1.0, 65519.0, 65520.0, 2.0**-25, 2.0**-24 * 1.5], [1.0, 65504.0, INF, 0.0, 2**-23]),
    "cvt.f32.bf16": ("f32 bf16", [0x3F80, 0x7F80, 0x0001], [1.0, INF, 2.0**-133]),
    "cvt.rn.f32.f64": ("f32 f64", [1 + 2**-24, 1 + 3 * 2**-24, 1e300], [1.0, 1 + 2**-22, INF]),
    "cvt.rzi.s32.f32": ("s32 f32", [1.9, -1.9, 3e9, -3e9, NAN, INF], [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1]),
    "cvt.rni.s32.f32": ("s32 f32", [0.5, 1.5, 2.5, -0.5], [0, 2, 2, 0]),
    "cvt.rmi.s32.f32": ("s32 f32", [-0.1, 1.9], [-1, 1]),
    "cvt.rpi.s32.f32": ("s32 f32", [-0.9, 1.1], [0, 2]),
    "cvt.rzi.u32.f32": ("u32 f32", [-1.0, 5e9, 4e9], [0, 2**32 - 1, 4 * 10**9]),
    "cvt.rzi.u64.f64": ("u64 f64", [2.0**63, 2.0**64, -1.0], [2**63, 2**64 - 1, 0]),
    "cvt.rn.f32.s64": ("f32 s64", [2**24 + 1, 2**24 + 3, -(2**63)], [2.0**24, 2.0**24 + 4, -(2.0**63)]),
    "cvt.rn.f32.u64": ("f32 u64", [2**64 - 1], [2.0**64]),
    "cvt.u16.u32": ("u16 u32", [0x12345678], [0x5678]),
    "cvt.s64.s32": ("s64 s32", [-2], [-2]),
    "cvt.u64.u32": ("u64 u32", [2**32 - 1], [2**32 - 1]),
    "cvt.sat.s16.s32": ("s16 s32", [40000, -40000, 7], [32767, -32768, 7]),
    "cvt.rni.f32.f32": ("f32 f32", [0.5, 1.5, -0.25], [0.0, 2.0, -0.0]),
    "cvt.sat.f32.f32": ("f32 f32", [-1.0, 0.25, 7.0], [0.0, 0.25, 1.0]),
    "cvt.ftz.f32.f32": ("f32 f32", [TINY, -TINY], [0.0, -0.0]),
    # The first goes into the upper half.
    "cvt.rn.bf16x2.f32": ("b32 f32 f32", [1.0], [-2.0], [0x3F80C000]),
    # Zeros have signs here: -0.0 is the lesser.
    **{
        f"{form}.f32": ("f32 f32 f32", [NAN, 2.0, 0.0, -0.0, 1.0], [2.0, NAN, -0.0, 0.0, -INF], expected)
        for form, expected in {
            "min": [2.0, 2.0, -0.0, -0.0, -INF],
            "max": [2.0, 2.0, 0.0, 0.0, 1.0],
            "min.NaN": [NAN, NAN, -0.0, -0.0, -INF],
            "max.NaN": [NAN, NAN, 0.0, 0.0, 1.0],
        }.items()
    },
    "shl.b32": ("b32 b32 u32", 1, [0, 31, 32, 2**31], [1, 2**31, 0, 0]),
    "shr.u32": ("u32 u32 u32", 2**31, [0, 31, 32, 99], [2**31, 1, 0, 0]),
    "shr.s32": ("s32 s32 u32", -8, [1, 31, 32, 99], [-4, -1, -1, -1]),
    "shr.s64": ("s64 s64 u32", -8, [1, 63, 64], [-4, -1, -1]),
    "shl.b16": ("b16 b16 u32", 3, [15, 16], [2**15, 0]),
    # Amounts wrap at 32.
    **{
        f"shf.{side}.wrap.b32": ("b32 b32 b32 u32", 0x12345678, 0x9ABCDEF0, [32, 4, 31], expected)
        for side, expected in (("l", [0x9ABCDEF0, 0xABCDEF01, 0x91A2B3C]), ("r", [0x12345678, 0x1234567, 0x3579BDE0]))
    },
    # Bits from a place on, as many as there are, extended by the sign.
    **{
        f"bfe.{kind}": (f"{kind} {kind} u32 u32", value, [0, 4, 4, 31, 40, 4, 24], [0, 0, 7, 1, 7, 40, 6], expected)
        for kind, value, expected in (
            ("u32", 0x92345678, [0, 0, 0x67, 1, 0, 0x9234567, 0x12]),
            ("s32", 0x92345678 - 2**32, [0, 0, 0x67 - 2**7, -1, -1, 0x9234567 - 2**28, 0x12]),
            ("u64", 0x923456789ABCDEF0, [0, 0, 0x6F, 1, 0x56, 0x6789ABCDEF, 0x1A]),
            ("s64", 0x923456789ABCDEF0 - 2**64, [0, 0, 0x6F - 2**7, -1, 0x56 - 2**7, 0x6789ABCDEF, 0x1A]),
        )
    },
    # Rounded to zero.
    "div.s32": ("s32 s32 s32", [7, -7, 7, -7, -(2**31)], [2, 2, -2, -2, 3], [3, -3, -3, 3, -715827882]),
    "rem.s32": ("s32 s32 s32", [7, -7, 7, -7, -(2**31)], [2, 2, -2, -2, 3], [1, -1, 1, -1, -2]),
    # Bytes, or their signs.
    "prmt.b32": (
        *("b32 b32 b32 b32", 0x80706050, 0x10FF3020, [0x3210, 0x7654, 0xBE50]),
        [0x80706050, 0x10FF3020, 0xFFFF3050],
    ),
    # Half by half, each rounded once.
    "fma.rn.bf16x2": (
        *("b32 b32 b32 b32", ONE << 16 | ONE, HALF_UNIT << 16 | UNIT, ONE << 16 | ONE),
        [ONE << 16 | ONE + 1],
    ),
    "fma.rn.f32": ("f32 f32 f32 f32", [INF, NAN, 0.0], [1.0, 1.0, INF], [-INF, 1.0, 1.0], [NAN] * 3),
    # Rounded once, though the sum lies between two float32 in float64, and with the error of the product of doubles.
    "fma.rn.f32 {0}, {1}, {1}, {2}": (
        *("f32 f32 f32", 1 + 2**-12, [2.0**-60, 0.0, -(2.0**-60), 2.0**-24]),
        [1 + 2**-11 + 2**-23, 1 + 2**-11, 1 + 2**-11, 1 + 2**-11 + 2**-23],
    ),
    "fma.rn.f64 {0}, {1}, {1}, {2}": (
        *("f64 f64 f64", [1 + 2**-30, 1 + 2**-30, 3.0], [-(1 + 2**-29), 2.0**-53, -9.0]),
        [2.0**-60, 1 + 2**-29 + 2**-52, 0.0],
    ),
    "mul.ftz.f32": ("f32 f32 f32", [TINY, 1e-30, 2.0], [1e10, 1e-10, -TINY], [0.0, 0.0, -0.0]),
    "mul.f32": ("f32 f32 f32", [2.0**-100], [2.0**-40], [2.0**-140]),
    # With NaN, comparisons are ordered or not; of integers they have a sign or not.
    **{
        f"setp.{how}.f32 %p1, {{1}}, {{2}}; selp.b32 {{0}}, 1, 0, %p1": ("b32 f32 f32", [1.0, 2.0, NAN], 2.0, expected)
        for how, expected in {
            **{"eq": [0, 1, 0], "ne": [1, 0, 0], "lt": [1, 0, 0], "le": [1, 1, 0], "gt": [0, 0, 0], "ge": [0, 1, 0]},
            **{"equ": [0, 1, 1], "neu": [1, 0, 1], "ltu": [1, 0, 1], "geu": [0, 1, 1]},
            **{"num": [1, 1, 0], "nan": [0, 0, 1]},
        }.items()
    },
    **{
        f"setp.{how} %p1, {{1}}, {{2}}; selp.b32 {{0}}, 1, 0, %p1": ("b32 b32 b32", 2**32 - 1, 5, [expected])
        for how, expected in (("lt.s32", 1), ("lo.u32", 0), ("lt.u32", 0), ("hi.u32", 1))
    },
    # A predicate of each half, the lower one's first.
    """setp.le.bf16x2 %p1|%p2, {1}, {2};
    mov.b32 {0}, 0; @%p1 add.s32 {0}, {0}, 1; @%p2 add.s32 {0}, {0}, 2""": (
        *("b32 b32 b32", [ONE << 16, ONE, ONE << 16 | ONE, 0x7FC0 << 16], ONE << 16 | HALF_UNIT),
        [3, 2, 2, 1],
    ),
    # Predicates combine, and guard.
    """setp.lt.s32 %p1, {1}, 3; setp.gt.and.s32 %p2, {1}, 0, %p1; not.pred %p3, %p2;
    mov.b32 {0}, 7; @%p2 mov.b32 {0}, 8; @!%p1 add.s32 {0}, {0}, 100; @%p3 add.s32 {0}, {0}, 1000""": (
        *("b32 s32", [0, 1, 2, 3]),
        [1007, 8, 8, 1107],
    ),
}


@pytest.mark.parametrize("form", RESULTS, ids=lambda form: form.split()[0])
def test_results(form):
    """Bit by bit."""
    kinds, *operands, expected = RESULTS[form]
    places = ", ".join(f"{{{number}}}" for number in range(len(operands) + 1))
    found = compute(form if "{" in form else f"{form} {places}", kinds, *operands)
    assert bits(found, found.dtype) == bits(expected, found.dtype)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_products_of_integers(kind):
    width, is_signed = int(kind[1:]), kind[0] == "s"

    def wrapped(numbers, size):
        least = -(1 << size - 1) if is_signed else 0
        return [(number - least) % (1 << size) + least for number in numbers]

    words = np.random.default_rng(0).integers(0, 2**63, 16).tolist()
    a, b = wrapped([2 * word + 1 for word in words] + [-1, -1], width), wrapped([*words[::-1], -1, 7], width)
    exact = [x * y for x, y in zip(a, b, strict=True)]
    for half, expected in (("lo", wrapped(exact, width)), ("hi", [number >> width for number in exact])):
        assert compute(f"mul.{half}.{kind} {{0}}, {{1}}, {{2}}", f"{kind} {kind} {kind}", a, b).tolist() == expected
    if width < 64:
        wide = f"{kind[0]}{2 * width}"
        found = compute(f"mad.wide.{kind} {{0}}, {{1}}, {{2}}, {{3}}", f"{wide} {kind} {kind} {wide}", a, b, 5)
        assert found.tolist() == wrapped([number + 5 for number in exact], 2 * width)


@pytest.mark.parametrize("op, bound", [("ex2", 2**-22.5), ("rsqrt", 2**-22.9), ("lg2", 2**-22.6), ("tanh", 2**-11)])
def test_approximations_are_as_far_off_as_they_may_be_and_no_further(op, bound):
    x = np.linspace(1.5, 9.5, 500, dtype=np.float32)
    exact = {"ex2": np.exp2, "rsqrt": lambda x: x**-0.5, "lg2": np.log2, "tanh": np.tanh}[op](x.astype(np.float64))
    for is_approximate, share in ((False, 0.0), (True, 1.0)):
        found = compute(f"{op}.approx.f32 {{0}}, {{1}}", "f32 f32", x, is_approximate=is_approximate)
        error = np.abs(found / exact - 1)
        # And the rounding of the result itself.
        assert error.max() <= share * bound + 2**-24
        assert error.max() >= share * bound / 2


def test_narrow_loads_fill_their_registers():
    out, x = np.zeros(4, np.int32), np.array([-1, 5], np.int8)
    body = "ld.global.s8 %rs1, [%rd1]; ld.global.u8 %rs2, [%rd1]; cvt.s32.s16 %r1, %rs1; cvt.s32.s16 %r2, %rs2;"
    run(body + "st.global.v2.b32 [%rd0], {%r1, %r2};", [out, x], threads=32)
    assert out[:2].tolist() == [-1, 255]


@pytest.mark.parametrize(
    "text, name",
    [
        ("vabsdiff.s32.s32.s32 %r1, %r0, %r0", "vabsdiff"),
        ("add.sat.s32 %r1, %r0, %r0", "add.sat.s32"),
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, %r0, %r0", "cvt.rn.satfinite.e4m3x2.f32"),
        ("mul.rz.f32 %r1, %r0, %r0", "mul.rz.f32"),
        ("ld.local.b32 %r1, [%rd0]", "ld.local.b32"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%r1}, {%r1}, {%r1}, {%r1}", "mma.sync"),
        ("bar.sync 1, 64", "bar.sync"),
        ("mov.u32 %r1, %clock", "%clock"),
        ("mov.u32 %r1, elsewhere", "elsewhere"),
        ("frobnicate %r1", "frobnicate"),
    ],
)
def test_what_is_not_known_raises_with_its_name(text, name):
    with pytest.raises(UnsupportedInstructionError, match=name.replace(".", r"\.")):
        run(f"{text};", [np.zeros(64, np.uint32)], threads=64)
