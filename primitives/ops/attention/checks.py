"""Checks of attention: typed errors that name the argument, what is required and what came."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core.errors import DeviceError, DtypeError, ShapeError
from primitives._core.trees.leaves import require_dense
from primitives.ops.arguments import broadcasts, floating, probability
from primitives.ops.dropout.philox import MAX_SEED

MIN_DIM = 2


def options(op_name: str, *, mask: Any, causal: tuple[str, Any], scale: Any, dropout_p: Any) -> None:
    """Raise unless the options of an attention are of their types and go together; `causal` is its name and value."""
    probability(op_name, dropout_p, "dropout_p")
    flag(op_name, *causal)
    if causal[1] and mask is not None:
        raise ShapeError(
            f"{op_name}: a mask and causal attention were both asked for. Pass one mask: mask & "
            "torch.ones(rows, keys, dtype=torch.bool).tril()."
        )
    if scale is not None and not isinstance(scale, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise DtypeError(
            f"{op_name}: scale must be a number, got {type(scale).__name__}. Multiply the query by a tensor."
        )


def is_causal_bias(x: Any) -> bool:
    """Whether `x` is torch's stand-in for a causal mask; asked by name, since its module imports Triton."""
    return type(x).__name__ == "CausalBias" and type(x).__module__ == "torch.nn.attention.bias"


def flag(op_name: str, name: str, value: Any) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise DtypeError(f"{op_name}: {name} must be a bool, got {type(value).__name__}.")


def stream(op_name: str, seed: Any, offset: Any) -> None:
    """Raise unless the numbers among `seed` and `offset` are such, and an offset has a seed."""
    if offset is not None and seed is None:
        raise ShapeError(f"{op_name}: offset counts blocks of the stream of seed, which is None. Pass a seed.")
    for name, value in (("seed", seed), ("offset", offset)):
        if isinstance(value, (bool, float)):
            raise DtypeError(f"{op_name}: {name} must be an int or an int64 tensor, got {type(value).__name__}.")
        if isinstance(value, int) and not -MAX_SEED <= value <= MAX_SEED:
            raise ValueError(f"{op_name}: {name} must be in [-(2**63 - 1), 2**63 - 1], got {value}.")


def attention(
    op_name: str, label: str, q: Tensor, k: Any, v: Any, bias: Any, mask: Any, names: Sequence[str], *,
    shares_heads: bool, seed: Any = None, offset: Any = None,
) -> None:  # fmt: skip
    """Raise unless the tensors of an attention fit one another.

    Args:
        op_name: The function.
        label: Name of q.
        q: Queries.
        k: Keys.
        v: Values.
        bias: Added to the scores.
        mask: Which scores count.
        names: Names of k, v, bias and mask.
        shares_heads: Whether several heads of q may share one of k and v.
        seed: Key of the random stream.
        offset: Block of the stream at which to begin.
    """
    key, value, bias_name, mask_name = names
    rows = [(label, q), (key, k), (value, v)]
    given = [(bias_name, bias), (mask_name, mask), ("seed", seed), ("offset", offset)]
    for name, x in [*rows, *[(name, x) for name, x in given if x is not None]]:
        _dense(op_name, name, x)
        if x.device != q.device:
            raise DeviceError(f"{op_name}: {name} must be on the device of {label}, {q.device}, got {x.device}.")
    for name, x in rows:
        if x.dim() < MIN_DIM:
            raise ShapeError(f"{op_name}: {name} must have at least 2 axes, [rows, width], got {list(x.shape)}.")
    _dtypes(op_name, rows, (bias_name, bias), (mask_name, mask))
    for name, x in given[2:]:
        if x is not None and (x.dtype != torch.int64 or x.dim() > 0):
            raise DtypeError(f"{op_name}: {name} must be an int64 tensor of shape [], got {x.dtype}, {list(x.shape)}.")
    if k.shape[-1] != q.shape[-1]:
        raise ShapeError(f"{op_name}: {key} must be as wide as {label}, {q.shape[-1]}, got {list(k.shape)}.")
    if v.shape[-2] != k.shape[-2]:
        raise ShapeError(f"{op_name}: {value} must have the {k.shape[-2]} rows of {key}, got {list(v.shape)}.")
    lead = _axes_before_rows(op_name, rows, shares_heads)
    for name, x in given[:2]:
        shape = (*lead, q.shape[-2], k.shape[-2])
        broadcasts(op_name, name, x, shape, "the scores, [*batch, heads, rows, keys]")


def _dense(op_name: str, name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"{op_name}: {name} must be a tensor, got {type(x).__name__}.")
    if is_causal_bias(x):
        raise DtypeError(f"{op_name}: {name} must be a dense tensor, got a CausalBias. Pass causal=True, or a mask.")
    require_dense(op_name, name, x)


def _dtypes(op_name: str, rows: list[tuple[str, Tensor]], bias: tuple[str, Any], mask: tuple[str, Any]) -> None:
    (label, q), *others = rows
    floating(op_name, label, q.dtype)
    for name, x in [*others, bias]:
        if x is None or x.dtype == q.dtype:
            continue
        wanted, came = _computed(q), _computed(x)
        if came != wanted and not (x is bias[1] and came == torch.float32):
            or_wide = ", or torch.float32" if x is bias[1] and wanted != torch.float32 else ""
            raise DtypeError(f"{op_name}: {name} must have the dtype of {label}, {wanted}{or_wide}, got {came}.")
    if mask[1] is not None and mask[1].dtype != torch.bool:
        raise DtypeError(
            f"{op_name}: {mask[0]} must have dtype bool, true where a row sees a key, got {mask[1].dtype}."
        )


def _computed(x: Tensor) -> torch.dtype:
    """The dtype in which `x` is computed with, which autocast makes another one of all but float64."""
    device = x.device.type
    if not x.is_floating_point() or x.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
        return x.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _axes_before_rows(op_name: str, rows: list[tuple[str, Tensor]], shares_heads: bool) -> tuple[int, ...]:
    """The axes before those of the scores that are rows and keys, checked to go together."""
    (label, q), (key, k), (value, v) = rows
    if q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return tuple(q.shape[:-2])

    def shapes() -> str:
        # Of an error alone: the compiler cannot write sizes that it does not know.
        return ", ".join(f"{name} {list(x.shape)}" for name, x in rows)

    heads = [x.shape[-3] if x.dim() > MIN_DIM else 1 for x in (q, k, v)]
    if shares_heads:
        if any(heads[0] % count if count else heads[0] for count in heads[1:]):
            raise ShapeError(
                f"{op_name}: the heads (axis -3) of {key} and {value} must divide those of {label}, got {shapes()}."
            )
        shared: Sequence[int] | None = heads[:1]
    else:
        shared = _broadcast([(count,) for count in heads])
    if shared is None:
        raise ShapeError(
            f"{op_name}: {label}, {key} and {value} must have the same number of heads (axis -3), got {shapes()}. "
            "Pass enable_gqa=True for heads of key and value that several heads of query share."
        )
    lead = _broadcast([x.shape[:-3] for x in (q, k, v)])
    if lead is None:
        raise ShapeError(f"{op_name}: the axes before the heads must go together, got {shapes()}.")
    return (*lead, *shared) if max(x.dim() for x in (q, k, v)) > MIN_DIM else ()


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """The shape that all are broadcast to, or None."""
    # Asked first, since torch takes longer for its answer than a small attention does.
    if all(shape == shapes[0] for shape in shapes):
        return tuple(shapes[0])
    try:
        return tuple(torch.broadcast_shapes(*[tuple(shape) for shape in shapes]))
    except RuntimeError:
        return None
