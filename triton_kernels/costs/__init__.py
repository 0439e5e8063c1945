"""The cost of a call of a launcher: bytes of the op, bytes that the plan in force moves, launches.

    cost = costs.layer_norm_bwd(y_bar, x, weight, mean, rstd, 1, 0, (True, True, True))
    cost.minimum_bytes, cost.bytes_moved, cost.launches

There is one function per launcher, of its name and with its arguments, which may be meta tensors: only shapes, strides,
dtypes and what is None or not wanted are looked at. The plan is the one that the launcher would take on the device of
`x`, or on the chip that `launch.use_chip` sets. Most costs are what the launches of the launcher say of themselves,
with nothing launched, while other threads go on launching. The byte gate holds the kernels to these figures, the time
model predicts from them, and the benchmarks take their bytes from here, so that no two of the three can disagree.

Inputs are taken to need no copy: what a launcher copies because no view fits its strides is not counted.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from triton_kernels import (
    batch_norm,
    batch_norm_second_order,
    layer_norm,
    layer_norm_second_order,
    log_softmax,
    log_softmax_second_order,
)
from triton_kernels._cost import Cost, counting
from triton_kernels._kernel import intercept
from triton_kernels.costs._batch_norm import COUNTS
from triton_kernels.costs.attention import attention_bwd, attention_fwd, attention_jvp, attention_pairing
from triton_kernels.costs.dropout import dropout_fwd, philox_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_kernels._kernel import Kernel


def _cost_of(launcher: Callable[..., Any], *args: Any) -> Cost:
    given = {id(arg) for arg in args}

    def count(kernel: Kernel, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
        account.launch()
        if kernel.__name__ in COUNTS:
            named = {**dict(zip(kernel.argument_names, arguments, strict=False)), **constants}
            named = {name.removesuffix("_ptr"): value for name, value in named.items()}
            COUNTS[kernel.__name__](account, named, grid, given)

    with counting() as account, intercept(count, every_thread=False):
        launcher(*args)
    return account.cost()


# Modules whose launches count themselves.
_COUNTED = (
    layer_norm,
    layer_norm_second_order,
    batch_norm,
    batch_norm_second_order,
    log_softmax,
    log_softmax_second_order,
)
_BY_NAME = {name: functools.partial(_cost_of, getattr(module, name)) for module in _COUNTED for name in module.__all__}


def __getattr__(name: str) -> Callable[..., Cost]:
    """The cost function of a launcher of that name."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise AttributeError(f"costs: a launcher has that name, got {name!r}.") from None


__all__ = [
    "Cost",
    "attention_bwd",
    "attention_fwd",
    "attention_jvp",
    "attention_pairing",
    "dropout_fwd",
    "philox_words",
]
__all__ += [name for module in _COUNTED for name in module.__all__]
