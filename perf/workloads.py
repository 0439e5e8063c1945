"""Named workloads: the shapes at which models call the operations.

The perf suite measures them and the machine-code gate compiles them. A name says which model a shape comes from; Llama
itself has RMS norms, of which layer norm at the same width is the neighbor.

A shape is added as a line below. An operation is added to `OPS`, with its calls in `perf.suite.providers`, a formula in
`perf.suite.reference`, minimum passes in `perf.suite.modes` and launchers in `perf.model`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

OPS = ("layer_norm", "log_softmax", "batch_norm", "batch_norm_eval", "dropout", "attention")
# Ops whose statistics belong to channels, in dim 1.
CHANNEL_OPS = ("batch_norm", "batch_norm_eval")
# Bound by products of matrices, where the others are bound by memory.
MATMUL_OPS = ("attention",)
EPS = 1e-5
# Probability of zero of the dropouts that are measured.
DROPOUT_P = 0.1
# `perf.suite.modes` defines what each mode computes; these first the suite measures on a GPU unless told otherwise.
KERNEL_MODES = ("forward", "backward", "jvp", "hvp", "double_backward")
MODES = (*KERNEL_MODES, "backward_of_jvp", "forward_backward", "training_step")
FIRST_ORDER = MODES[:3]
BASIC_MODES = MODES[:2]
# Attention's backward of a jvp has a target of its own.
ATTENTION_MODES = MODES[:6]
TRAINING = MODES[-1]
CPU_MODES = ("forward", "forward_backward", "jvp", "hvp", TRAINING)
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
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


@dataclass(frozen=True)
class Workload:
    """One call of one operation, which its `key` names.

    Attributes:
        name: Where the shape comes from.
        op: One of `OPS`; `batch_norm_eval` is batch norm with given statistics.
        shape: Of the input. Layer norm normalizes its last dim, log-softmax reduces `dim`, batch norm has channels in
            dim 1, in either memory format; attention has queries `(batch, heads, tokens, width)`.
        affine: Whether a norm has a weight and a bias.
        key_heads: Heads of the keys and values of attention; 0 for as many as the queries have.
        causal: Whether a token sees only those before it, and itself.
        masked: Whether attention has a bias, a mask and dropout, which no step of the suite has.
        modes: The modes that its kernels are compiled, predicted and, if asked for, measured in on a GPU.
        quick: Whether it is one of the few of a quick run.
        whole: Whether a full run measures all of its modes, as it does of the quick ones; the others' `BASIC_MODES`.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    dim: int = -1
    affine: bool = True
    channels_last: bool = False
    key_heads: int = 0
    causal: bool = False
    masked: bool = False
    modes: tuple[str, ...] = KERNEL_MODES
    quick: bool = False
    whole: bool = False

    @property
    def key(self) -> str:
        """Unique and stable, by which results of two runs are matched: `layer_norm GPT-2 8192x768 bf16`."""
        sizes = "x".join(map(str, self.shape))
        return " ".join([self.op, self.name, sizes, SHORT_DTYPES[self.dtype], *self._words()])

    @property
    def case(self) -> str:
        """Its name in the table of machine code, to which no model matters: `layer_norm 8192x768 bfloat16`."""
        sizes = "x".join(map(str, self.shape))
        return " ".join([self.op, sizes, self.dtype, *(words.replace(" ", "_") for words in self._words())])

    def _words(self) -> list[str]:
        words = {"channels_last": self.channels_last, f"{self.key_heads} key heads": self.key_heads}
        return [word for word, said in {**words, "causal": self.causal, "masked": self.masked}.items() if said]

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's object."""
        return getattr(torch, self.dtype)

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of parameters: torch's layer norm wants that of the input, batch norm at least float32."""
        return torch.promote_types(self.torch_dtype, torch.float32) if self.op in CHANNEL_OPS else self.torch_dtype

    @property
    def pass_bytes(self) -> int:
        """Bytes of one pass: of the input, and of every other tensor of its size."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def num_cols(self) -> int:
        """Values that share their statistics: a row's columns, or what batch norm reduces of one channel."""
        if self.op in CHANNEL_OPS:
            return math.prod(self.shape) // self.shape[1]
        return self.shape[self.dim if self.op == "log_softmax" else -1]

    @property
    def run(self) -> int:
        """Adjacent elements along which the tiles of a kernel run: columns, spatial positions or channels."""
        if self.op == "log_softmax":
            inner = math.prod(self.shape[self.dim % len(self.shape) + 1 :])
            return inner if inner > 1 else self.shape[-1]
        if self.op not in CHANNEL_OPS:
            return self.shape[-1]
        spatial = math.prod(self.shape[2:])
        return self.shape[1] if self.channels_last or spatial == 1 else spatial

    @property
    def num_params(self) -> int:
        """Elements of a weight or bias; 0 without them."""
        if self.op in {"log_softmax", "dropout", "attention"} or not self.affine:
            return 0
        return self.shape[1] if self.op in CHANNEL_OPS else self.shape[-1]

    @property
    def key_shape(self) -> tuple[int, ...]:
        """Of keys, and of values."""
        batch, heads, *rest = self.shape
        return (batch, self.key_heads or heads, *rest)

    @property
    def matmul_flops(self) -> int:
        """Multiplications and additions of one product of attention, over all pairs of a token and one that it sees."""
        batch, heads, tokens, width = self.shape
        return batch * heads * width * tokens * (tokens + 1 if self.causal else 2 * tokens)


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


def _layer_norms() -> Iterator[Workload]:
    # Other dtypes of a shape show whether the plans hold for them; their second derivatives would only cost time.
    yield Workload("GPT-2", "layer_norm", (8192, 768), whole=True)
    yield Workload("GPT-2 XL", "layer_norm", (8192, 1600))
    yield Workload("ViT-B/16", "layer_norm", (12608, 768))
    yield Workload("ViT-L/16", "layer_norm", (12608, 1024), dtype="float16", modes=FIRST_ORDER)
    yield Workload("DiT-XL/2", "layer_norm", (16384, 1152), affine=False)
    yield Workload("Llama 8B width", "layer_norm", (8192, 4096), quick=True)
    yield Workload("Llama 8B width", "layer_norm", (8192, 4096), dtype="float16", modes=FIRST_ORDER)
    yield Workload("Llama 8B width", "layer_norm", (8192, 4096), dtype="float32")
    yield Workload("Llama 8B width, few rows", "layer_norm", (1024, 4096))
    yield Workload("Llama 13B width", "layer_norm", (8192, 5120))
    yield Workload("Llama 70B width", "layer_norm", (8192, 8192), whole=True)
    yield Workload("Llama 405B width", "layer_norm", (4096, 16384))
    yield Workload("short rows", "layer_norm", (32768, 256))
    yield Workload("odd", "layer_norm", (8192, 1000))
    yield Workload("odd", "layer_norm", (8192, 4097), whole=True)
    yield Workload("odd", "layer_norm", (8192, 5124))
    yield Workload("long rows", "layer_norm", (2048, 32768))
    yield Workload("long rows", "layer_norm", (1024, 65536))
    yield Workload("long rows", "layer_norm", (512, 131072), whole=True)
    yield Workload("long rows", "layer_norm", (256, 262144))


def _log_softmaxes() -> Iterator[Workload]:
    yield Workload("ImageNet head", "log_softmax", (8192, 1000))
    yield Workload("attention rows", "log_softmax", (32768, 1024))
    yield Workload("attention rows", "log_softmax", (8192, 4096), whole=True)
    yield Workload("odd", "log_softmax", (8192, 4097), whole=True)
    yield Workload("odd", "log_softmax", (8192, 5124), modes=FIRST_ORDER)
    yield Workload("Llama 2 vocabulary", "log_softmax", (4096, 32000), whole=True)
    yield Workload("GPT-2 vocabulary", "log_softmax", (4096, 50257), whole=True)
    yield Workload("GPT-2 vocabulary", "log_softmax", (4096, 50257), dtype="float32", modes=FIRST_ORDER)
    yield Workload("long rows", "log_softmax", (2048, 65536))
    yield Workload("Llama 3 vocabulary", "log_softmax", (2048, 128256), quick=True)
    yield Workload("long rows", "log_softmax", (1024, 131072), dtype="float16", modes=FIRST_ORDER)
    yield Workload("Gemma vocabulary", "log_softmax", (1024, 262144))
    yield Workload("segmentation", "log_softmax", (16, 21, 512, 512), dim=1, modes=FIRST_ORDER)


def _batch_norms() -> Iterator[Workload]:
    resnet = ((64, 112), (64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7))
    for channels_last in (False, True):
        for channels, side in resnet:
            # The largest layer and the one in the middle of the network stand for the second derivatives.
            second = channels in {256, 1024}
            yield Workload(
                "ResNet-50",
                "batch_norm",
                (64, channels, side, side),
                channels_last=channels_last,
                modes=KERNEL_MODES if second else FIRST_ORDER,
                quick=channels == 256 and not channels_last,
                whole=channels == 256,
            )
    yield Workload("ResNet-50", "batch_norm", (64, 256, 56, 56), dtype="float16", modes=FIRST_ORDER)
    yield Workload("ResNet-50", "batch_norm", (64, 256, 56, 56), dtype="float32", modes=FIRST_ORDER)
    yield Workload("BatchNorm1d", "batch_norm", (8192, 1024), whole=True)
    yield Workload("video", "batch_norm", (8, 64, 16, 56, 56))


def _evaluations() -> Iterator[Workload]:
    shape = (64, 256, 56, 56)
    yield Workload("ResNet-50", "batch_norm_eval", shape, modes=FIRST_ORDER, quick=True)
    yield Workload("ResNet-50", "batch_norm_eval", shape, channels_last=True, modes=FIRST_ORDER)


def _dropouts() -> Iterator[Workload]:
    # It is linear: its derivatives of second order are zero or itself.
    yield Workload("Llama 8B width", "dropout", (8192, 4096), modes=FIRST_ORDER, quick=True)
    yield Workload("Llama 8B width", "dropout", (8192, 4096), dtype="float32", modes=FIRST_ORDER)


def _attentions() -> Iterator[Workload]:
    yield _attention("GPT-2", (8, 12, 1024, 64), causal=True, quick=True)
    # Images of 256 and of 512 pixels.
    yield _attention("DiT-XL/2", (64, 16, 256, 72), whole=True)
    yield _attention("DiT-XL/2", (16, 16, 1024, 72))
    yield _attention("Llama 8B", (2, 32, 4096, 128), key_heads=8, causal=True, whole=True)
    yield _attention("Llama 8B, 16k tokens", (1, 32, 16384, 128), key_heads=8, causal=True)


def _attention(name: str, shape: tuple[int, ...], **rest: Any) -> Workload:
    return Workload(name, "attention", shape, modes=ATTENTION_MODES, **rest)


_FAMILIES = (_layer_norms(), _log_softmaxes(), _batch_norms(), _evaluations(), _dropouts(), _attentions())
GPU_WORKLOADS = tuple(w for workloads in itertools.zip_longest(*_FAMILIES) for w in workloads if w is not None)

# Training sizes at which a CPU is still used. First derivatives of bfloat16 stand for autocast on CPU.
CPU_WORKLOADS = (
    Workload("GPT-2", "layer_norm", (2048, 768), dtype="float32", quick=True),
    Workload("Llama 8B width", "layer_norm", (512, 4096), dtype="float32"),
    Workload("ViT-B/16", "layer_norm", (1576, 768), dtype="bfloat16"),
    Workload("ImageNet head", "log_softmax", (2048, 1000), dtype="float32", quick=True),
    Workload("GPT-2 vocabulary", "log_softmax", (64, 50257), dtype="float32"),
    Workload("ResNet-50", "batch_norm", (8, 64, 56, 56), dtype="float32", quick=True),
    Workload("ResNet-50", "batch_norm", (8, 64, 56, 56), dtype="float32", channels_last=True, quick=True),
    Workload("ResNet-50", "batch_norm", (8, 256, 28, 28), dtype="float32"),
    Workload("BatchNorm1d", "batch_norm", (2048, 1024), dtype="float32"),
    _attention("GPT-2", (1, 12, 1024, 64), dtype="float32", causal=True),
    _attention("DiT-XL/2", (2, 16, 256, 72), dtype="float32", quick=True),
    _attention("Llama 8B", (1, 32, 512, 128), dtype="float32", key_heads=8, causal=True),
)

GPU_TRAINING = (
    TrainingWorkload("base width", "VisionTransformer", {"width": 768, "num_heads": 12, "num_blocks": 4}, 1024),
    TrainingWorkload("wide", "ConvNet", {"channels": 128}, 4096),
)
CPU_TRAINING = (
    TrainingWorkload("narrow", "VisionTransformer", {"width": 128, "num_heads": 4, "num_blocks": 2}, 64, True),
    TrainingWorkload("narrow", "ConvNet", {"channels": 32}, 64),
)
