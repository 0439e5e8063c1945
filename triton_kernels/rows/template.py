"""One source for all kernels over rows, whose slots are the operands and the device functions of an operation.

A kernel is a flat signature around one call of `rows.kernel.row_op` or `rows.sums.row_sums_op`. It is written out for
each operation, because graphs take neither tuples nor functions as arguments, and Inductor prints a kernel and the
functions that it calls by their own names. The arguments of an operand `x` are `x_ptr` and, of one of full size,
`x_segment_stride`, `x_row_stride` and `x_col_stride`; of a parameter, `x_stride`. `rows.launch` fills all of them in.
"""

from __future__ import annotations

import linecache
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import triton.language as tl

from ..runtime.kernel import Kernel, batch_independent_jit, stride_independent_jit
from .kernel import row_op, row_slice
from .sums import row_sums_op
from .tiles import aligned

_CONSTANTS = ("num_cols", "DTYPE", "AXES", "ALIGN", "BLOCK_ROWS", "BLOCK_COLS", "STAGES", "NUM", "SUM_MASK")
_OF_ROWS = (
    *("TWO_LEVEL", "ROW_ALIGN", "MODE", "SUM_READS", "EMIT_READS", "ANCHOR_READS", "BLOCK_SPLITS"),
    *("GROUPS", "LAYOUT", "RUN", "PLANES"),
)
_NOISE = ("seed_ptr", "seed_segment_stride", "num_stream_rows", "last_dropped", "scale_low", "scale_high")
_SCALE = ("scale_low", "scale_high")
# What sums of a row need that are not plain sums of tiles, by `terms`.
_SUMS = ("stats", "fold", "merge")
# As many sums of a row as an operation may have: each has a place for a pointer.
_PLACES = 7

_ROW_KERNEL = """def {name}(
    {arguments}
    parts_ptr, num_splits, num_rows,
    {constants}
):
{before}    row_op(
        {x}, {x_strides},
        {p}, {p_strides}, {r}, {num_r}, {out}, (out_segment_stride, out_row_stride, out_col_stride),
        {s}, parts_ptr, num_splits, num_rows, num_cols, DTYPE, AXES, TWO_LEVEL, ALIGN, ROW_ALIGN, BLOCK_ROWS,
        BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS, NUM, SUM_MASK, GROUPS=GROUPS, LAYOUT=LAYOUT,
        RUN=RUN, PLANES=PLANES, ANCHOR_READS=ANCHOR_READS, {given}
    )
"""
_REPEATED = """    if {last}_repeats is not None:
        block = row_slice(num_splits, num_cols, BLOCK_COLS, MODE)[0]
        sample = (block // tl.cdiv(num_rows, BLOCK_ROWS) // {last}_repeats).to(tl.int64)
        {last}_ptr += sample * aligned({last}_segment_stride, ALIGN)
"""
_ROW_SUMS_KERNEL = """def {name}(
    {arguments}
    num_splits, num_rows,
    {constants}
):
    row_sums_op(
        {x}, {x_strides},
        {p}, {p_strides}, {r}, {num_r}, {out}, (out_segment_stride, out_row_stride, out_col_stride),
        {s}, {num_s}, num_splits, num_rows, num_cols, DTYPE, AXES, ALIGN, BLOCK_ROWS, BLOCK_COLS, STAGES, NUM, SUM_MASK,
        WRITES, {given}
    )
"""


def row_kernel(
    name: str, x: Sequence[str], *, p: Sequence[str] = (), r: Sequence[str] = (), out: Sequence[str] = (),
    s: Sequence[str] = (), numbers: int = 0, options: Sequence[str] = (), first: float = 0.0, other: float = 0.0,
    scaled: bool = False, repeats: bool = False, any_strides: bool = False, **functions: Any,
) -> Kernel:  # fmt: skip
    """A kernel on `row_op`, with operands and outputs of these names, each in the order of its tiles.

    Args:
        name: Its name.
        x: Operands of full size.
        p: Parameters.
        r: Statistics.
        out: Outputs of full size, of `emit`.
        s: Outputs of one number per row: the sums, or what `rows` makes of them.
        numbers: How many constants `NUMBER_0`, ... the statistics end with.
        options: Further constants that `row_op` takes.
        first: First value of the first sum; those of the others are 0.
        other: Value of the first operand past the end of a row.
        scaled: Whether the statistics end with a factor.
        repeats: Whether so many segments, one after another, may share the last operand.
        any_strides: Whether no other stride compiles it anew (see `stride_independent_jit`).
        **functions: `terms`, or `stats`, `fold`, `merge` and perhaps `anchor`; `emit`, `rows` and `mix`.

    Raises:
        TypeError: If a function is missing.
    """
    sums = ("terms",) if not {*_SUMS} & {*functions} else _SUMS
    given = [f"{option}={option}" for option in options]
    given += [f"NUMBERS=({''.join(f'NUMBER_{number}, ' for number in range(numbers))})"] * bool(numbers)
    given += [", ".join(f"{number}={number}" for number in _SCALE)] * scaled
    given += [f'{slot}=float("{value}")' for slot, value in (("FIRST", first), ("OTHER", other)) if value]
    strides, more = [_strides(operand) for operand in x], [*_SCALE] * scaled
    if repeats:
        last = x[-1]
        strides[-1] = f"({last}_segment_stride if {last}_repeats is None else 0, {last}_row_stride, {last}_col_stride)"
        more.append(f"{last}_repeats")
    return _instance(
        _ROW_KERNEL,
        name,
        (x, p, r, out, s),
        (*_CONSTANTS, *_OF_ROWS, *(f"NUMBER_{number}" for number in range(numbers)), *options),
        functions,
        (*sums, *["emit"] * bool(out)),
        more=more,
        given=given,
        jit=stride_independent_jit if any_strides else batch_independent_jit,
        before=_REPEATED.format(last=x[-1]) if repeats else "",
        x_strides=_tuple(strides),
        s=_tuple([*(f"{each}_ptr" for each in s), *["None"] * (_PLACES - len(s))]),
    )


def row_sums_kernel(
    name: str, x: Sequence[str], *, p: Sequence[str] = (), r: Sequence[str] = (), out: Sequence[str] = (),
    s: Sequence[str] = (), **functions: Any,
) -> Kernel:  # fmt: skip
    """A kernel on `row_sums_op`, as of `row_kernel`; `s` are the partial rows, and `columns` makes their tiles.

    Raises:
        TypeError: If a function is missing.
    """
    needed = ("emit", "columns", "stats" if "stats" in functions else "terms")
    return _instance(_ROW_SUMS_KERNEL, name, (x, p, r, out, s), (*_CONSTANTS, "WRITES"), functions, needed)


def _instance(
    template: str, name: str, operands: tuple[Sequence[str], ...], constants: Sequence[str],
    functions: Mapping[str, Any], needed: Sequence[str], more: Sequence[str] = (), given: Sequence[str] = (),
    jit: Any = batch_independent_jit, **texts: str,
) -> Kernel:  # fmt: skip
    functions = {slot: function for slot, function in functions.items() if function is not None}
    missing = [slot for slot in needed if slot not in functions]
    if missing:
        raise TypeError(f"{name} needs the device functions {', '.join(missing)}: it has {', '.join(functions)}.")
    x, p, r, out, s = operands
    arguments = [f"{each}_ptr, {_strides(each)[1:-1]}" for each in x]
    arguments += [f"{each}_ptr, {each}_stride" for each in p] + [f"{each}_ptr" for each in (*r, *out)]
    arguments += [_strides("out")[1:-1], *(f"{each}_ptr" for each in s), *_NOISE * ("mix" in functions), *more]
    given = [*given, *(f"{slot.upper()}={each.fn.__name__}" for slot, each in functions.items())]
    given += [f"noise={_tuple(_NOISE)}"] * ("mix" in functions)
    fields = {
        "x": _tuple(f"{each}_ptr" for each in x),
        "x_strides": _tuple(map(_strides, x)),
        "p": _tuple(f"{each}_ptr" for each in p),
        "p_strides": _tuple(f"{each}_stride" for each in p),
        "r": _tuple(f"{each}_ptr" for each in r),
        "out": _tuple(f"{each}_ptr" for each in out),
        "s": _tuple(f"{each}_ptr" for each in s),
        "num_r": str(len(r)),
        "num_s": str(len(s)),
        "arguments": "".join(f"{argument}, " for argument in arguments),
        "constants": ", ".join(f"{constant}: tl.constexpr" for constant in constants),
        "given": ", ".join(given),
        **texts,
    }
    source = template.format(name=name, **fields)
    module = next(iter(functions.values())).fn.__module__
    file = f"<{module}.{name} {zlib.crc32(source.encode()):08x}>"
    # Whoever asks for the source of the kernel, Triton first, finds it there.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    known = {"__name__": module, "tl": tl, "row_op": row_op, "row_sums_op": row_sums_op}
    known |= {"row_slice": row_slice, "aligned": aligned, **{each.fn.__name__: each for each in functions.values()}}
    exec(compile(source, file, "exec", dont_inherit=True), known)
    return jit(known[name])


def _strides(name: str) -> str:
    return f"({name}_segment_stride, {name}_row_stride, {name}_col_stride)"


def _tuple(texts: Any) -> str:
    return f"({''.join(f'{text}, ' for text in texts)})"
