r"""Second-order rules of log-softmax: derivatives of its backward and of its jvp.

Notation as in `log_softmax.py`, p = exp(y), sums over the axis. Both first-order operators are partial derivatives of
one scalar, the pairing of a cotangent with a tangent of the output,

    L = <y_bar, y_dot> = <y_bar, x_dot> - sum(y_bar) * sum(p * x_dot)

    dL/d(x_dot) = y_bar - p * sum(y_bar) = x_bar,        dL/d(y_bar) = x_dot - sum(p * x_dot) = y_dot

so the vjp of either one is the gradient of L, which `log_softmax_pairing_p` returns. The output y is kept in place of
x, and its own derivative leads on to x:

    dL/dy = -p * x_dot * sum(y_bar)

Forward over reverse, `log_softmax_bwd_jvp_p`:

    x_bar_dot = y_bar_dot - p * (y_dot * sum(y_bar) + sum(y_bar_dot))

Third and higher orders, and the jvp of a jvp, differentiate the references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from primitives.core import Primitive
from primitives.ops import _cpu_log_softmax as cpu
from primitives.ops._shared import accumulation_dtype, batch_all, bind_kernels, output_second_order, unwanted
from primitives.ops.log_softmax import log_softmax_bwd_p, log_softmax_jvp_p

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log_softmax_pairing_p = Primitive(
    "log_softmax_pairing",
    "(Tensor y_bar, Tensor y, Tensor x_dot, int dim, bool[] wanted)"
    " -> (Tensor y_bar_bar, Tensor output_bar, Tensor x_dot_bar)",
    decomposable=True,
)
log_softmax_bwd_jvp_p = Primitive(
    "log_softmax_bwd_jvp",
    "(Tensor y_bar, Tensor y, Tensor? y_bar_dot, Tensor? y_dot, int dim, ScalarType x_dtype) -> Tensor x_bar_dot",
    decomposable=True,
)


# Reference.


@log_softmax_pairing_p.def_reference
def _log_softmax_pairing_reference(
    y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulation_dtype(y.dtype)
    y_bar_acc, x_dot_acc = y_bar.contiguous().to(acc), x_dot.contiguous().to(acc)
    p = y.contiguous().to(acc).exp()
    y_bar_sum = y_bar_acc.sum(dim, keepdim=True)
    y_bar_bar = output_bar = x_dot_bar = None
    if wanted[0]:
        y_bar_bar = (x_dot_acc - (p * x_dot_acc).sum(dim, keepdim=True)).to(y_bar.dtype)
    if wanted[1]:
        output_bar = (-p * x_dot_acc * y_bar_sum).to(y.dtype)
    if wanted[2]:
        x_dot_bar = (y_bar_acc - p * y_bar_sum).to(x_dot.dtype)
    y_bar_bar, output_bar, x_dot_bar = (unwanted(y) if v is None else v for v in (y_bar_bar, output_bar, x_dot_bar))
    return y_bar_bar, output_bar, x_dot_bar


@log_softmax_bwd_jvp_p.def_reference
def _log_softmax_bwd_jvp_reference(
    y_bar: Tensor, y: Tensor, y_bar_dot: Tensor | None, y_dot: Tensor | None, dim: int, x_dtype: torch.dtype
) -> Tensor:
    acc = accumulation_dtype(y.dtype)
    p = y.contiguous().to(acc).exp()
    terms = []
    if y_bar_dot is not None:
        y_bar_dot = y_bar_dot.contiguous().to(acc)
        terms.append(y_bar_dot - p * y_bar_dot.sum(dim, keepdim=True))
    if y_dot is not None:
        terms.append(-p * y_dot.contiguous().to(acc) * y_bar.to(acc).sum(dim, keepdim=True))
    return sum(terms[1:], terms[0]).to(x_dtype, copy=True)


# Kernels: Triton's and those for the CPU.

bind_kernels(log_softmax_pairing_p, "log_softmax", "log_softmax_pairing", cpu.pairing)
bind_kernels(log_softmax_bwd_jvp_p, "log_softmax", "log_softmax_bwd_jvp", cpu.bwd_jvp)


output_second_order(log_softmax_bwd_p, log_softmax_jvp_p, log_softmax_pairing_p, log_softmax_bwd_jvp_p)

# Batching: the batch is one more axis that the sum does not run over.

batch_all(log_softmax_pairing_p, log_softmax_bwd_jvp_p, counter="dim")
