"""Who is measured: this package, torch eager and compiled, and the peers that can be imported.

Peers are given as they are documented; what one cannot do shows in the results with the error that it raises.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import primitives as pr
from perf.calls import EPS
from perf.workloads import COMPILED, FLEX, LIBRARIES, OURS, SDPA_BACKENDS, TUNED

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from perf.ops.workload import Workload

    Function = Callable[..., Any]

# Of Inductor's modes those that leave CUDA graphs to the caller: the timer captures its own.
COMPILE_MODES = {COMPILED: "default", TUNED: "max-autotune-no-cudagraphs", FLEX: "default"}


class Provider(NamedTuple):
    """One side of the comparison: its `function` makes `f(x, weight, bias)` for a workload, or raises."""

    name: str
    function: Callable[[Workload], Function]

    def wrap(self, function: Function) -> Function:
        """`function` as this provider runs it."""
        if self.name not in COMPILE_MODES:
            return function
        return torch.compile(function, mode=COMPILE_MODES[self.name], dynamic=False)


def _family(source: Any, workload: Workload) -> Function:
    """The op of a workload, of a module with the signatures of `torch.nn.functional`."""
    op, options = workload.record, workload.record.options(workload)
    return lambda *tensors: op.call(source, *tensors, **options)


def _backend(name: str, workload: Workload) -> Function:
    """Torch's attention by one of its backends, or an error."""
    attention, backend = _family(F, workload), getattr(SDPBackend, SDPA_BACKENDS[name])

    def of_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return attention(q, k, v)

    return of_backend


def _flex(workload: Workload) -> Function:
    """Torch's attention of any scores, with blocks that causal attention leaves out, on the default device."""
    tokens, block_mask = workload.shape[-2], None
    if workload.causal:
        device = torch.get_default_device()
        block_mask = create_block_mask(lambda b, h, row, key: row >= key, None, None, tokens, tokens, device=device)
    return lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask, enable_gqa=workload.key_heads > 0)


# Module and call of each library's layer norm, which is what is measured of them.
_LIBRARIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "liger": ("liger_kernel.transformers.functional", lambda m, x, w, b: m.liger_layer_norm(x, w, b, EPS)),
    "flash-attn": ("flash_attn.ops.triton.layer_norm", lambda m, x, w, b: m.layer_norm_fn(x, w, b, eps=EPS)),
    "apex": (
        "apex.normalization.fused_layer_norm",
        lambda m, x, w, b: m.fused_layer_norm_affine(x, w, b, x.shape[-1:], EPS),
    ),
}


def provider(name: str) -> Provider:
    """The provider of that name, one of `PROVIDERS`; raises what its import raises."""
    if name in SDPA_BACKENDS:
        return Provider(name, lambda workload: _backend(name, workload))
    if name == FLEX:
        return Provider(name, _flex)
    if name not in LIBRARIES:
        source = pr.functional if name == OURS else F
        return Provider(name, lambda workload: _family(source, workload))
    path, call = _LIBRARIES[name]
    module = importlib.import_module(path)

    def function(workload: Workload) -> Function:
        if not workload.affine:
            raise NotImplementedError(f"{name} has only a layer norm with a weight and a bias.")
        return lambda x, weight, bias: call(module, x, weight, bias)

    return Provider(name, function)


def reason_against(name: str) -> str | None:
    """Why a provider cannot be used; None if it can."""
    try:
        provider(name)
    # A peer that is broken is as good as absent, and must not stop the run.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
