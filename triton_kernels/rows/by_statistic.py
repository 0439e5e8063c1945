"""All kernels of a map by a statistic of its rows, from two functions of numbers.

The map is `y = value(x, t)`, where t is the sum of `summand(x)` over a row. With a for `y_bar`, v for `x_dot`, and
subscripts for partial derivatives,

    b = sum(y_t a)      c = sum(t_x v)      e = sum(y_xt a v)

    jvp   y_dot = y_x v + y_t c
    vjp   x_bar = y_x a + t_x b

and x_bar moves along v by the derivative of <a, y_dot> in x,

    a (y_xx v + y_xt c) + t_xx v b + t_x (e + q b c),       q = y_tt / y_t

q must be the same for all x of a row, as it is where `y = h(x) + m(x) g(t)`: a fourth sum would be needed otherwise.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from ..runtime.kernel import INTERPRETED
from .maps import Part, RowMapKernels
from .tiles import nothing

# Absent operands are `nothing()`. Past the end of a row, where x is 0, a summand may be anything.
_SOURCE = """
{summand}

{value}

def fwd_terms(x, p, r, mask):
    moved, t = nothing(), summand(within(x[0], mask){constants})
    if x[1].type.is_block():
        moved = tl.where(mask, t[1] * x[1], 0.0)
    return tl.where(mask, t[0], 0.0), moved

def fwd_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    y_dot, y = nothing(), value(within(x[0], mask), within(s[0], mask){constants})
    if x[1].type.is_block():
        y_dot = y[1] * x[1] + y[2] * s[1]
    return y[0], y_dot

def found(x, r, mask):
    x = within(x, mask)
    return summand(x{numbers}), value(x, within(r[0], mask){numbers})

def along_x(t, y, a, v, s):
    return a * (y[3] * v + y[4] * s[1]) + t[2] * v * s[0] + t[1] * (s[2] + y[5] * s[0] * s[1])

def double_backward_terms(x, p, r, mask):
    b, c, e = nothing(), nothing(), nothing()
    t, y = found(x[1], r, mask)
    if x[0].type.is_block():
        b = tl.where(mask, y[2] * x[0], 0.0)
    if x[2].type.is_block():
        c = tl.where(mask, t[1] * x[2], 0.0)
        if x[0].type.is_block():
            e = tl.where(mask, y[4] * x[0] * x[2], 0.0)
    return b, c, e

def double_backward_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    y_bar_bar, x_bar, x_dot_bar = nothing(), nothing(), nothing()
    t, y = found(x[1], r, mask)
    if s[1].type.is_block():
        y_bar_bar = y[1] * x[2] + y[2] * s[1]
    if s[0].type.is_block():
        x_dot_bar = y[1] * x[0] + t[1] * s[0]
    if s[2].type.is_block():
        x_bar = along_x(t, y, x[0], x[2], s)
    return y_bar_bar, x_bar, x_dot_bar

def bwd_jvp_terms(x, p, r, mask):
    b, c, e = nothing(), nothing(), nothing()
    t, y = found(x[1], r, mask)
    if x[2].type.is_block():
        e = tl.where(mask, y[2] * x[2], 0.0)
    if x[3].type.is_block():
        b, c = tl.where(mask, y[2] * x[0], 0.0), tl.where(mask, t[1] * x[3], 0.0)
        moved = tl.where(mask, y[4] * x[0] * x[3], 0.0)
        e = e + moved if x[2].type.is_block() else moved
    return b, c, e

def bwd_jvp_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    t, y = found(x[1], r, mask)
    if not x[3].type.is_block():
        return (y[1] * x[2] + t[1] * s[2],)
    moved = along_x(t, y, x[0], x[3], s)
    return (moved + y[1] * x[2] if x[2].type.is_block() else moved,)
"""
_ALL = ("y_bar", "x", "x_dot")
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def number(tile):
    """One of `tiles.as_tiles`: 0 of `nothing()`."""
    return tile if tile.type.is_block() else 0.0


@triton.jit
def power(base, exponent):
    """`base ** exponent` of a base that is not negative."""
    found = tl.exp2(exponent * tl.log2(tl.where(base == 0.0, 1.0, base)))
    found = tl.where(base == 0.0, tl.where(exponent > 0.0, 0.0, float("inf")), found)
    return tl.where(exponent == 0.0, 1.0, found)


@triton.jit
def within(tile, mask):
    """`tile`; in the interpreter, where NumPy warns of numbers that are not finite, 1 past the end of rows."""
    return tl.where(mask, tile, 1.0) if _INTERPRETED else tile


def map_by_statistic(
    name: str, summand: Callable[..., Any], value: Callable[..., Any], statistic: str, options: Sequence[str] = ()
) -> RowMapKernels:
    """The kernels of a map, and their launchers.

    Args:
        name: Of the map.
        summand: `(x, *options)` to its value t and the derivatives t_x and t_xx. It and `value` compute by operators,
            by methods that tensors of torch and of Triton share, as `x.abs()` and `x.exp()`, by `power` and `where`.
        value: `(x, t, *options)` to y, y_x, y_t, y_xx, y_xt and q.
        statistic: Name of t.
        options: Names of the numbers that the map takes beside `dim`.
    """
    places = range(len(options))
    source = _SOURCE.format(
        summand=_source(summand, "summand"),
        value=_source(value, "value"),
        constants="".join(f", number(r[{place}])" for place in places),
        numbers="".join(f", number(r[{1 + place}])" for place in places),
    )
    file = f"<{__name__} {name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    known: dict[str, Any] = {"__name__": f"{__name__}.{name}", "tl": tl}
    known |= {"nothing": nothing, "number": number, "power": power, "where": tl.where, "within": within}
    exec(compile(source, file, "exec", dont_inherit=True), known)
    functions = [each for each in known.values() if inspect.isfunction(each) and each.__code__.co_filename == file]
    known |= {each.__name__: triton.jit(each) for each in functions}
    return RowMapKernels(
        f"{__name__}.{name}",
        known,
        "x",
        double_backward=(
            Part((1,), ("x", "x_dot"), ("x", "x_dot")),
            Part((0, 1, 2), _ALL, _ALL),
            Part((0,), ("y_bar", "x"), ("y_bar", "x")),
        ),
        bwd_jvp=(Part((2,), ("x", "y_bar_dot"), ("x", "y_bar_dot")), Part((0, 1, 2), _ALL, _ALL)),
        numbers=(statistic,),
        options=("dim", *options),
        forward=(Part((0,), ("x",), ("x",)), Part((0, 1), ("x", "x_dot"), ("x", "x_dot"))),
        num_constants=len(options),
        constants=lambda given: [given[option] for option in options],
        num_results=2,
    )


def _source(function: Callable[..., Any], name: str) -> str:
    """A function as Triton reads it: without annotations, which Inductor would print and not know."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(found, ast.FunctionDef)  # noqa: S101
    found.name, found.returns = name, None
    for each in found.args.args:
        each.annotation = None
    return ast.unparse(found)
