"""Small pieces that the references and rules of several families use."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from primitives.core import BatchInfo, Primitive, to_front, triton_kernels_module
from primitives.core.sequences import tuple_getter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = [
    "LOW_PRECISION",
    "accumulation_dtype",
    "bind_launcher",
    "cast_to_float32",
    "fold_batch",
    "of_wanted",
    "unwanted",
]

LOW_PRECISION = (torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums and statistics: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unwanted(x: Tensor) -> Tensor:
    """Stands for an output that nobody asked for: no elements, the dtype and device of `x`."""
    return x.new_empty(0)


def of_wanted(cotangents: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """The cotangents of the outputs that were computed: those of stand-ins (`unwanted`) mean nothing."""
    return [bar if want else None for bar, want in zip(cotangents, wanted, strict=True)]


def bind_launcher(op: Primitive, module: str, name: str) -> None:
    """Make the launcher `name` of `triton_kernels.<module>` the CUDA kernel of `op`.

    It gets the arguments of `op` that its own parameters are named after; the module is imported at the first call.
    """

    @functools.cache
    def pick() -> Callable[[Sequence[Any]], tuple]:
        parameters = inspect.signature(getattr(triton_kernels_module(module), name)).parameters
        return tuple_getter([op.spec.arguments.index(parameter) for parameter in parameters])

    @op.def_kernel("cuda")
    def kernel(*args: Any) -> Any:
        # Looked up at each call: tests and tuning may put another launcher in its place.
        return getattr(triton_kernels_module(module), name)(*pick()(args))


def cast_to_float32(primals: Any) -> Any:
    """Autocast rule of the operations that torch runs in float32: low-precision tensors are cast up."""
    return primals._make(
        value.float() if isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION else value
        for value in primals
    )


def fold_batch(batch: BatchInfo, primals: Any, names: tuple[str, ...]) -> Any:
    """`primals` with the batch axis of the named tensors brought to the front, where it is one more leading axis.

    Tensors without a batch axis are expanded, which costs no copy.
    """
    folded = {name: to_front(getattr(primals, name), getattr(batch.axes, name), batch.size) for name in names}
    return primals._replace(**folded)
