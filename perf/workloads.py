"""The workloads and providers of the bench: named workloads, shapes at which models call operations, by the records.

The table of machine code has their kernels. A shape is a line of `perf/ops/workloads.csv`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from perf.calls import Call
from perf.ops import CASES
from perf.ops.cross_entropy import LINEAR_CROSS_ENTROPY
from perf.ops.workload import MODES, Workload

# What has no kernels of its own, and is measured beside the others.
COMPOSED = (LINEAR_CROSS_ENTROPY,)
BASIC_MODES = MODES[:2]
CPU_MODES = ("forward", "forward_backward", "jvp", "hvp")
# Who is measured; `perf/test_bench.py` defines what each does.
OURS, EAGER, COMPILED, TUNED = "primitives", "torch", "torch.compile", "torch.compile max-autotune"
# Module and call of each library's layer norm, which is what is measured of them.
LIBRARIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "liger": ("liger_kernel.transformers.functional", lambda m, x, w, b, eps: m.liger_layer_norm(x, w, b, eps)),
    "flash-attn": ("flash_attn.ops.triton.layer_norm", lambda m, x, w, b, eps: m.layer_norm_fn(x, w, b, eps=eps)),
    "apex": (
        "apex.normalization.fused_layer_norm",
        lambda m, x, w, b, eps: m.fused_layer_norm_affine(x, w, b, x.shape[-1:], eps),
    ),
}
# Torch's attention kept to one of its backends, by the name of `torch.nn.attention.SDPBackend`; eager torch chooses.
MATH = "SDPA math"
SDPA_BACKENDS = {
    "SDPA flash": "FLASH_ATTENTION",
    "SDPA efficient": "EFFICIENT_ATTENTION",
    "SDPA cuDNN": "CUDNN_ATTENTION",
    MATH: "MATH",
}
FLEX = "flex_attention"
PROVIDERS = (OURS, EAGER, COMPILED, TUNED, *LIBRARIES, *SDPA_BACKENDS, FLEX)
# Peers that take part in one operation alone.
ONLY_OP = dict.fromkeys(LIBRARIES, "layer_norm") | dict.fromkeys((*SDPA_BACKENDS, FLEX), "attention")


_BY_OP = itertools.zip_longest(*(case.workloads("gpu") for case in CASES))
GPU_WORKLOADS = tuple(w for workloads in _BY_OP for w in workloads if w is not None)
# First derivatives of bfloat16 stand for autocast on CPU.
CPU_WORKLOADS = tuple(w for case in (*CASES, *COMPOSED) for w in case.workloads("cpu"))


def units(device: str, *, quick: bool = False, every_mode: bool = False) -> list[tuple[Workload, str]]:
    """Workloads and modes of a run, in an order that may be ended early: the quick ones stand for the rest."""
    on_gpu = (*GPU_WORKLOADS, *(w for case in COMPOSED for w in case.workloads("gpu")))
    workloads = sorted(on_gpu if device == "cuda" else CPU_WORKLOADS, key=lambda workload: not workload.quick)

    def modes(workload: Workload) -> tuple[str, ...]:
        if device == "cuda":
            return workload.modes if every_mode or workload.quick or workload.whole else BASIC_MODES
        # Second orders of attention, which torch's choice of a backend lacks.
        wanted = (*CPU_MODES, *MODES[4:6]) if workload.record.products else CPU_MODES
        return tuple(mode for mode in wanted if mode in (*workload.modes, "forward_backward"))

    return [(workload, mode) for workload in workloads if workload.quick or not quick for mode in modes(workload)]


def cases() -> Iterator[tuple[str, Workload, list[Call]]]:
    """Name, workload and calls of every case of the table of machine code, the bench's first, without memory."""
    for workload in (*GPU_WORKLOADS, *(other for case in CASES for other in case.workloads("other"))):
        for mode in workload.modes:
            yield f"{workload.case} {mode}", workload, calls_of(workload, mode)


def launch_mode(workload: Workload, mode: str) -> None:
    """Make the calls of one mode of an op."""
    for call in calls_of(workload, mode):
        call.results()


def calls_of(workload: Workload, mode: str) -> list[Call]:
    """The calls of one mode of an op, as the rules of the op make them, on tensors without memory."""
    with torch.device("meta"):
        return workload.record.calls(workload, mode)
