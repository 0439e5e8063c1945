"""The cost of a call of a launcher: bytes of the op, bytes that the plan in force moves, launches.

    cost = cost_of(layer_norm_bwd, y_bar, x, weight, mean, rstd, 1, 0, (True, True, True))
    cost.minimum_bytes, cost.bytes_moved, cost.launches

Tensors may be meta tensors: only shapes, strides, dtypes and what is None or not wanted are looked at. The plan is the
one that the launcher would take on the device of `x`, or on the chip that `use_chip` sets. A cost is what the
launches of the launcher say of themselves, or their arguments, with nothing launched, while other threads go on
launching. The byte gate holds the kernels to these figures, and the benchmarks take their bytes from here, so
that the two cannot disagree.

Not counted is what a launcher has torch copy or fill: inputs that no view fits, or an input with nothing to drop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_kernels._cost import Cost, Tensors, counting
from triton_kernels.costs import _attention, _batch_norm, _dropout
from triton_kernels.runtime.kernel import intercept

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triton_kernels.runtime.kernel import Kernel

__all__ = ["Cost", "cost_of"]

# Of kernels whose launches do not count themselves: what each moves, by its arguments.
_COUNTS: Mapping[str, Callable[..., None]] = {**_batch_norm.COUNTS, **_attention.COUNTS, **_dropout.COUNTS}


def cost_of(launcher: Callable[..., Any], *args: Any) -> Cost:
    """The cost of a call of a launcher."""
    launches: list[tuple[Kernel, tuple[int, ...], tuple, dict[str, Any]]] = []
    with counting() as account, intercept(lambda *each: launches.append(each), every_thread=False):
        results = launcher(*args)
    tensors = Tensors(set(map(id, args)), set(map(id, results if isinstance(results, tuple) else (results,))), set())
    for kernel, grid, arguments, constants in launches:
        if kernel.__name__ in _COUNTS:
            named = {**dict(zip(kernel.argument_names, arguments, strict=False)), **constants}
            named = {name.removesuffix("_ptr"): value for name, value in named.items()}
            _COUNTS[kernel.__name__](account, named, grid, tensors)
    return account.cost(len(launches))
