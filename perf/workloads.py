"""The workloads and providers of the suite: named workloads, shapes at which models call operations, by the records.

The table of machine code has their kernels. A shape is added to the record of its op (`perf.ops`).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from perf.ops import CASES
from perf.ops.cross_entropy import LINEAR_CROSS_ENTROPY
from perf.ops.workload import MODES

# Those that the suite measures, and of these what has no kernels of its own.
COMPOSED = (LINEAR_CROSS_ENTROPY,)
COMPOSED_OPS = tuple(case.name for case in COMPOSED)
OPS = (*(case.name for case in CASES if case.gpu_workloads), *COMPOSED_OPS)
# Ops whose statistics belong to channels, in dim 1.
CHANNEL_OPS = tuple(case.name for case in CASES if case.has_channels)
# Bound by products of matrices, where the others are bound by memory.
MATMUL_OPS = tuple(case.name for case in CASES if case.products)
BASIC_MODES = MODES[:2]
TRAINING = MODES[-1]
CPU_MODES = ("forward", "forward_backward", "jvp", "hvp", TRAINING)
# Who is measured; `perf.suite.providers` defines what each does.
OURS, EAGER, COMPILED, TUNED = "primitives", "torch", "torch.compile", "torch.compile max-autotune"
LIBRARIES = ("liger", "flash-attn", "apex")
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


class TrainingWorkload(NamedTuple):
    """A training step of one of the demo's models, with so many images and these keyword arguments of the model."""

    name: str
    model: str
    sizes: dict[str, int]
    batch: int
    quick: bool = False

    @property
    def key(self) -> str:
        """As that of a workload."""
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.model} {self.name} {sizes} batch={self.batch}"


_BY_OP = itertools.zip_longest(*(case.gpu_workloads for case in CASES))
GPU_WORKLOADS = tuple(w for workloads in _BY_OP for w in workloads if w is not None)
COMPOSED_WORKLOADS = tuple(w for case in COMPOSED for w in case.gpu_workloads)
# First derivatives of bfloat16 stand for autocast on CPU.
CPU_WORKLOADS = tuple(w for case in (*CASES, *COMPOSED) for w in case.cpu_workloads)

GPU_TRAINING = (
    TrainingWorkload("base width", "VisionTransformer", {"width": 768, "num_heads": 12, "num_blocks": 4}, 1024),
    TrainingWorkload("wide", "ConvNet", {"channels": 128}, 4096),
)
CPU_TRAINING = (
    TrainingWorkload("narrow", "VisionTransformer", {"width": 128, "num_heads": 4, "num_blocks": 2}, 64, True),
    TrainingWorkload("narrow", "ConvNet", {"channels": 32}, 64),
)
