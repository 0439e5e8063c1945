"""Torch's own operators, and the nested derivatives that torch has wrong or lacks, by `perf.torch_derivatives`."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from primitives._core.decomposition import decomposition_table, decomposition_table_for_jvp

MAX_ORDER = 3
# The end of a name where an operator has another derivative for such an input.
CHANNELS_LAST, MASKED_ROWS, INFINITE, PRODUCT, ZEROS = " channels_last", " masked_rows", " infinite", " prod", " zeros"
COMPLEX = " complex"
# Of a system whose matrix is a constant.
RIGHT_SIDE = " right_side"

# Operators without a row, as those of CUDA, and one with the same formulas.
_ALIKE = (
    (r"_scaled_dot_product_\w+_attention\.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"),
    (r"(cudnn_|miopen_|_native_|_)?batch_norm(_legit|_(with|no)_update)?\.\w+", "aten.native_batch_norm.default"),
    # Of slice assignment, and of `zero_`.
    (r"copy\.default", "aten.clone.default"),
    (r"zero\.default", "aten.fill.Scalar"),
    # Linear, as the other is.
    (r"embedding_dense_backward\.default", "aten.embedding.default"),
    (r"transpose\.default", "aten.transpose.int"),
    (r"_conj\.default", "aten._conj_physical.default"),
    # Of sums with a tensor that torch knows to be zero.
    (r"to\.dtype_layout", "aten._to_copy.default"),
    (r"add\.default", "aten.add.Tensor"),
)


class Verdict(NamedTuple):
    """Nestings of an operator (`"fr"` is `jvp(vjp)`) that are silently wrong, and those that raise."""

    wrong: tuple[str, ...]
    raises: tuple[str, ...]

    def beyond(self, order: int) -> list[str]:
        """The nestings of a higher order than this that are not right."""
        return [nesting for nesting in (*self.wrong, *self.raises) if len(nesting) > order]


def name_of(operator: OpOverload, args: Sequence[Any] = (), moves: Callable[[Tensor], bool] | None = None) -> str:
    """Name of an operator in the table: that of its functional form, and what is special about its input.

    `moves` says of a tensor whether it is differentiated, by default every one.
    """
    namespace, _, name = operator._schema.name.partition("::")
    name = name.rstrip("_") or name
    text = f"{namespace}.{name}.{operator._overloadname}"
    x = args[0] if args else None
    if text == "aten.pow.Scalar":
        return text + ZEROS * (x == 0)
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
        return text
    if name == "_linalg_solve_ex":
        return text + RIGHT_SIDE * (moves is not None and not moves(x))
    if name in ("scatter_reduce", "sgn"):
        return text + PRODUCT * ("prod" in args) + COMPLEX * (name == "sgn" and x.is_complex())
    if x.numel() and not x.is_meta:
        if "softmax" in name and "backward" not in name:
            return text + MASKED_ROWS * bool((x == -torch.inf).all(args[1]).any())
        if name in ("cumprod", "prod", "sinc"):
            return text + ZEROS * bool((x == 0).any())
        if name == "pow" and isinstance(args[1], torch.Tensor):
            base = x if x.is_complex() else x.clamp(min=0)
            return text + ZEROS * bool(((base == 0) | (args[1] == 0)).any())
        if name == "logaddexp":
            return text + INFINITE * bool((x.isinf() | args[1].isinf()).any())
    is_image = x.dim() == 4 and not x.is_contiguous()
    return text + CHANNELS_LAST * (is_image and x.is_contiguous(memory_format=torch.channels_last))


def table_path() -> Path:
    """The table of this version of torch, whether there is one or not."""
    return Path(__file__).parent / f"torch_{'.'.join(torch.__version__.split('.')[:2])}.csv"


def _nearest() -> Path:
    """The table of this version, or of that nearest to it."""

    def minor(path: Path) -> int:
        return int(path.stem.rpartition(".")[2])

    wanted = minor(table_path())
    return min(table_path().parent.glob("torch_*.csv"), key=lambda path: abs(minor(path) - wanted))


def tabled_version() -> str:
    """The version of torch whose table is read: this one's, or the nearest that there is."""
    return _nearest().stem.partition("_")[2]


def read_table() -> list[dict[str, str]]:
    """The rows of the table."""
    with _nearest().open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@functools.cache
def _table() -> dict[str, tuple[Verdict, Verdict | None]]:
    """By operator, the verdicts without and with the repair; None where the table has no columns of the repair."""

    def verdict(row: dict[str, str], prefix: str = "") -> Verdict:
        return Verdict(tuple(row[f"{prefix}wrong"].split()), tuple(row[f"{prefix}raises"].split()))

    return {
        row["operator"]: (verdict(row), verdict(row, "repaired_") if "repaired_wrong" in row else None)
        for row in read_table()
    }


def forget_table() -> None:
    """Have the table read again."""
    for asked in (_table, is_tabled, verdicts_of):
        asked.cache_clear()


def _alike(plain: str) -> list[str]:
    return [known for pattern, known in _ALIKE if re.fullmatch(rf"(aten|prims)\.{pattern}", plain)]


def verdict_of(name: str, order: int = MAX_ORDER, *, repaired: bool = False) -> Verdict | None:
    """The verdict on an operator by `name_of`, to an order, with the repair or without; None if nothing says it."""
    plain, _, _ = name.partition(" ")
    rows = (_table()[known] for known in (name, plain, *_alike(plain)) if known in _table())
    torchs, measured = next(rows, (None, None))
    if repaired and (measured or _is_served(plain)):
        return measured or Verdict((), ())
    return torchs or (_of_backward(plain, repaired) if order < MAX_ORDER else None)


def _of_backward(plain: str, repaired: bool) -> Verdict | None:
    """The verdict on a backward operator by the rows of the forward one, whose innermost reverse mode calls it."""
    base, is_backward, _ = plain.rpartition("_backward.")
    names = (base, f"{base}_forward") if is_backward else ()
    rows = [row for name, row in _table().items() if name.partition(" ")[0].rpartition(".")[0] in names]
    found = [row[repaired] or row[0] for row in rows]
    wrong, raises = ({n[:-1] for verdict in found for n in verdict[i] if n[1:] and n[-1] == "r"} for i in range(2))
    return Verdict(tuple(sorted(wrong)), tuple(sorted(raises))) if found else None


@functools.cache
def is_tabled(operator: OpOverload) -> bool:
    """Whether the table has a row of an operator, or of one that stands for it."""
    plain = name_of(operator)
    known = {name.partition(" ")[0] for name in _table()}
    return not known.isdisjoint((plain, *_alike(plain)))


@functools.cache
def verdicts_of(operator: OpOverload) -> Verdict:
    """What the table says of an operator of unrepaired torch, whatever is special about its input."""
    plain = name_of(operator)
    names = plain, *_alike(plain)
    found = [row[0] for name, row in _table().items() if name.partition(" ")[0] in names]
    wrong, raises = ({nesting for verdict in found for nesting in verdict[i]} for i in range(2))
    return Verdict(tuple(sorted(wrong)), tuple(sorted(raises)))


def _is_served(plain: str) -> bool:
    """Whether the repair has rules for an operator: a formula of the tables, or attention's, whose kernels are many."""
    _, base, overload = plain.split(".")
    operator = getattr(getattr(torch.ops.aten, base, None), overload, None)
    is_attention = base.startswith("_scaled_dot_product") and "backward" not in base
    return is_attention or operator in decomposition_table or operator in decomposition_table_for_jvp
