"""Torch's own operators, and the nested derivatives that torch has wrong or lacks, by `perf.torch_derivatives`."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from primitives._core.decomposition import decomposition_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

__all__ = [
    "MAX_ORDER",
    "RIGHT_SIDE",
    "Verdict",
    "forget_table",
    "name_of",
    "read_table",
    "remedy_for",
    "table_path",
    "tabled_version",
    "verdict_of",
    "verdicts_of",
]

MAX_ORDER = 3
# The end of a name where an operator has another derivative for such an input.
CHANNELS_LAST, MASKED_ROWS, INFINITE, PRODUCT, ZEROS = " channels_last", " masked_rows", " infinite", " prod", " zeros"
# Of a system whose matrix is a constant.
RIGHT_SIDE = " right_side"

# Operators of CUDA, which the table's machine has not, by those of the CPU that stand in the same place and have their
# derivatives by the same formulas; and other names of one operator.
_ALIKE = {
    "aten._scaled_dot_product_flash_attention.default": "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default": "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_cudnn_attention.default": "aten._scaled_dot_product_flash_attention_for_cpu.default",
    # Of slice assignment, and of `zero_`.
    "aten.copy.default": "aten.clone.default",
    "aten.zero.default": "aten.fill.Scalar",
    "aten.cudnn_batch_norm.default": "aten.native_batch_norm.default",
    "aten.miopen_batch_norm.default": "aten.native_batch_norm.default",
    "aten._batch_norm_with_update.default": "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default": "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.no_stats": "aten.native_batch_norm.default",
    "aten.batch_norm.default": "aten.native_batch_norm.default",
    "aten._batch_norm_no_update.default": "aten.native_batch_norm.default",
}
_SERVED = ("layer_norm", "batch_norm", "_scaled_dot_product")


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
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
        return text
    if name == "_linalg_solve_ex":
        return text + RIGHT_SIDE * (moves is not None and not moves(x))
    if name == "scatter_reduce":
        return text + PRODUCT * ("prod" in args)
    if x.numel() and not x.is_meta:
        if "softmax" in name and "backward" not in name:
            return text + MASKED_ROWS * bool((x == -torch.inf).all(args[1]).any())
        if name in ("cumprod", "prod", "sinc"):
            return text + ZEROS * bool((x == 0).any())
        if name == "pow" and isinstance(args[1], torch.Tensor):
            return text + ZEROS * bool((args[1] == 0).any())
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
def _table() -> dict[str, Verdict]:
    return {row["operator"]: Verdict(tuple(row["wrong"].split()), tuple(row["raises"].split())) for row in read_table()}


def forget_table() -> None:
    """Have the table read again."""
    _table.cache_clear()
    verdicts_of.cache_clear()


def verdict_of(name: str) -> Verdict | None:
    """The table's entry for an operator by `name_of`; None if it does not stand there."""
    table = _table()
    plain, _, _ = name.partition(" ")
    for known in (name, plain, _ALIKE.get(plain, "")):
        if known in table:
            return table[known]
    return None


@functools.cache
def verdicts_of(operator: OpOverload) -> Verdict:
    """What the table says of an operator, all that may be special about its input taken together."""
    plain = name_of(operator)
    found = [verdict for name, verdict in _table().items() if name.partition(" ")[0] in (plain, _ALIKE.get(plain))]
    wrong, raises = ({nesting for verdict in found for nesting in verdict[i]} for i in range(2))
    return Verdict(tuple(sorted(wrong)), tuple(sorted(raises)))


def remedy_for(
    name: str, otherwise: str = "write it in other operations, or wrap it by custom_op with rules of its own"
) -> str:
    """The way to make an operator of torch right at every order, in words."""
    plain, _, special = name.partition(" ")
    _, base, overload = plain.split(".")
    operator = getattr(getattr(torch.ops.aten, base, None), overload, None)
    if base == "native_group_norm" and special:
        return "override_torch, or .contiguous() before it"
    if base == "_safe_softmax":
        return "nn.convert or override_torch: it is a part of attention"
    if any(part in base for part in _SERVED) and "backward" not in base:
        return "nn.convert or override_torch" + ", or sdpa_kernel(SDPBackend.MATH)" * base.startswith("_scaled_dot")
    if operator in decomposition_table:
        return "decompositions.differentiate_through"
    return otherwise
