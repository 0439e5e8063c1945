"""A workload: one call of one op, at a shape at which a model calls it, and the modes that it is called in.

The table `workloads.csv` has all of them. Each line is of one op or of some, for one use: `gpu` and `cpu` are shapes of
models, which the bench measures there, and for those of a GPU the kernels are compiled, as they are for the `other`
ones. `small` ones have a few elements, in every layout and with every kind of parameters that the bench has; their rows
have more than 16 columns. `resized` ones reach every kernel, and take other sizes of the first dim that leave its plans
as they are: an odd one, and one that is a multiple of 16, which the compiler could know. Other dtypes of a shape show
whether the plans hold for them, in few modes. The words under `options` are attributes of `Workload`; a norm that is
`plain` has no parameters.
"""

from __future__ import annotations

import csv
import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

# `perf/steps.py` defines what each mode computes.
KERNEL_MODES = ("forward", "backward", "jvp", "hvp", "double_backward")
MODES = (*KERNEL_MODES, "backward_of_jvp", "forward_backward")
FIRST_ORDER = MODES[:3]
# By their names in the table.
NAMED_MODES = {"": KERNEL_MODES, "first_order": FIRST_ORDER, "bench": MODES[:6]}
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Probability of zero of the dropouts that are measured.
DROPOUT_P = 0.1

# The records by the names of their ops, each of which enters itself.
RECORDS: dict[str, Any] = {}


@dataclass(frozen=True)
class Workload:
    """One call of one operation, which its `key` names.

    Attributes:
        name: Which model the shape comes from. Llama itself has RMS norms, of which layer norm at the same width is
            the neighbor.
        shape: Of the input. Layer norm normalizes its last dim, log-softmax reduces `dim`, batch norm has channels in
            dim 1, in either memory format; attention has queries `(batch, heads, tokens, width)`.
        affine: Whether a norm has a weight and a bias.
        key_heads: Heads of the keys and values of attention; 0 for as many as the queries have.
        causal: Whether a token sees only those before it, and itself.
        classes: Of the linear layer before a loss.
        masked: Whether attention has a bias, a mask and dropout, or softmax a scale and a mask, which no step of the
            bench has.
        modes: The modes that its kernels are compiled and, if asked for, measured in on a GPU.
        quick: Whether it is one of the few of a quick run.
        whole: Whether a full run measures all of its modes, as it does of the quick ones; the others' `BASIC_MODES`.
        op: Name of its record; `batch_norm_eval` is batch norm with given statistics.
        resized: Other sizes of the first dim.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    dim: int = -1
    affine: bool = True
    channels_last: bool = False
    key_heads: int = 0
    causal: bool = False
    classes: int = 0
    masked: bool = False
    modes: tuple[str, ...] = ()
    quick: bool = False
    whole: bool = False
    op: str = ""
    resized: tuple[int, ...] = ()

    @property
    def record(self) -> Any:
        """The `Op` of which it is a call."""
        return RECORDS[self.op]

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
        words = {
            "channels_last": self.channels_last,
            f"{self.key_heads} key heads": self.key_heads,
            "causal": self.causal,
            f"{self.classes} classes": self.classes,
            "masked": self.masked,
        }
        return [word for word, said in words.items() if said]

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's object."""
        return getattr(torch, self.dtype)

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of parameters: torch's layer norm wants that of the input, batch norm at least float32."""
        dtype = self.torch_dtype
        return torch.promote_types(dtype, torch.float32) if self.record.has_channels else dtype

    @property
    def pass_bytes(self) -> int:
        """Bytes of one pass: of the input, and of every other tensor of its size."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def run(self) -> int:
        """Adjacent elements along which the tiles of a kernel run: columns, positions, or channels (of a group)."""
        if self.channels_last:
            return self.shape[1] // self.record.options(self).get("num_groups", 1)
        if self.record.has_channels:
            spatial = math.prod(self.shape[2:])
            return self.shape[1] if spatial == 1 else spatial
        inner = math.prod(self.shape[self.dim % len(self.shape) + 1 :])
        return inner if inner > 1 else self.shape[-1]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of one number a row: without `dim`."""
        dim = self.dim % len(self.shape)
        return (*self.shape[:dim], *self.shape[dim + 1 :])

    @property
    def param_shape(self) -> tuple[int, ...]:
        """Of a parameter, or of keys and values, or of the weight of a linear layer."""
        if self.classes:
            return (self.classes, *self.shape[-1:])
        if self.record.products:
            batch, heads, *rest = self.shape
            return (batch, self.key_heads or heads, *rest)
        of_channels = self.record.has_channels or "num_groups" in self.record.options(self)
        return self.shape[1:2] if of_channels else self.shape[-1:]

    @property
    def num_params(self) -> int:
        """Elements of a parameter; 0 without any."""
        return math.prod(self.param_shape) if self.record.num_params and self.affine else 0

    @property
    def matmul_flops(self) -> int:
        """Multiplications and additions of one product of attention, over all pairs of a token and one that it sees."""
        batch, heads, tokens, width = self.shape
        return batch * heads * width * tokens * (tokens + 1 if self.causal else 2 * tokens)

    def arrange(self, value: torch.Tensor) -> torch.Tensor:
        """The same in the layout of the input."""
        return value.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)


@functools.cache
def table() -> list[tuple[str, Workload]]:
    """The lines for each op, with their uses."""
    found = []
    with Path(__file__).with_name("workloads.csv").open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            words = {name: value for name, _, value in (word.partition("=") for word in line["options"].split())}
            given: dict[str, Any] = {name: int(value) if value else True for name, value in words.items()}
            given["affine"] = not given.pop("plain", False)
            given["modes"] = NAMED_MODES.get(line["modes"]) or tuple(line["modes"].split())
            given["resized"] = _numbers(line["sizes"])
            workload = Workload(line["name"], _numbers(line["shape"], "x"), line["dtype"], **given)
            found += [(line["use"], replace(workload, op=op)) for op in line["ops"].split()]
    return found


def _numbers(text: str, between: str | None = None) -> tuple[int, ...]:
    return tuple(map(int, text.split(between)))


def workloads_of(op: str, use: str, modes: tuple[str, ...]) -> tuple[Workload, ...]:
    """Those of an op for a use, in the modes that it has."""
    found = [workload for its_use, workload in table() if (workload.op, its_use) == (op, use)]
    return tuple(replace(each, modes=tuple(mode for mode in each.modes if mode in modes)) for each in found)
