"""Calls of every launcher: operands, each in memory of its own, and the modes of an op that can be called on them."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pytest
import torch

from primitives import use_backend
from tests.kernels.truth import EPS, MOMENTUM
from triton_kernels import (
    attention,
    batch_norm,
    batch_norm_second_order,
    dropout,
    layer_norm,
    layer_norm_second_order,
    log_softmax,
    log_softmax_second_order,
    philox,
)
from triton_kernels._runtime import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers, shifted so that the mean matters."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    return numbers.to(torch.get_default_device(), dtype)


def channels_last(x: Tensor) -> Tensor:
    """The same, with its channels next to each other."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def statistics(x: Tensor, dims: tuple[int, ...]) -> dict[str, Tensor]:
    """The mean and the reciprocal standard deviation that a forward hands to the derivatives."""
    var, mean = torch.var_mean(x.double(), dims, correction=0)
    dtype = accumulation_dtype(x.dtype)
    return {"mean": mean.to(dtype), "rstd": ((var + EPS) ** -0.5).to(dtype)}


def need_memory(num_bytes: int) -> None:
    """Skip the test on a GPU that has less left, where all pages exist."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < num_bytes:
            pytest.skip(f"needs another {num_bytes >> 30} GiB of the GPU's memory")


def far_apart(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`values` in memory of that many elements between them, of which only the pages that are used exist."""
    span = sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True)) + 1
    need_memory(span * values.element_size())
    # Pages that nothing touches take no memory, and storage that is made so is not filled.
    storage = torch.UntypedStorage(span * values.element_size(), device=torch.get_default_device())
    return torch.empty(0, dtype=values.dtype).set_(storage, 0, values.shape, strides).copy_(values)


def pairwise(count: int) -> list[tuple[bool, ...]]:
    """Few choices of `count` flags in which any two flags meet in all four ways, and the choice of all.

    Each flag is up in half of the choices but the first one, which has none, and no two flags in the same ones.
    """
    size = next(size for size in itertools.count(4, 2) if math.comb(size - 1, size // 2) >= count)
    ups = list(itertools.islice(itertools.combinations(range(1, size), size // 2), count))
    return [*(tuple(number in up for up in ups) for number in range(size)), (True,) * count]


def short_rows(num_cols: int, max_splits: int) -> dict[str, int]:
    """Limits with which rows of more than `num_cols` columns take the plans of rows that do not fit in registers."""
    names = ("two_row_cols", "accumulated_cols", "sweep_cols", "second_cols", "second_summed_cols", "second_sweep_cols")
    limits = {f"layer_norm_{name}": num_cols for name in names}
    names = ("row_cols", "two_row_cols", "three_row_cols", "sweep_cols", "second_sweep_cols")
    limits |= {f"log_softmax_{name}": num_cols for name in names}
    tiles = {"log_softmax_tile": 4 * num_cols, "log_softmax_two_tile": 4 * num_cols, "layer_norm_param_cols": num_cols}
    return limits | tiles | {"layer_norm_fwd_bytes": num_cols * 2, "max_row_splits": max_splits, "double_divisor": 1}


# Plans that rows of more than 16 columns take under other limits.
ROW_PLANS = {
    "in registers": {},
    "sums apart": {f"layer_norm_{name}": 16 for name in ("second_summed_cols", "accumulated_cols", "param_cols")},
    "swept": short_rows(16, 1),
    "shared": short_rows(16, 4),
}


class Call(NamedTuple):
    """A launcher, its arguments, and how many operands it copies first because no view fits their strides."""

    launcher: Callable[..., Any]
    args: tuple[Any, ...]
    copies: int = 0

    def results(self) -> tuple[Tensor, ...]:
        """What it returns; empty tensors stand for what is not wanted."""
        results = self.launcher(*self.args)
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [arg for arg in self.args if isinstance(arg, torch.Tensor)]


def _modes(*modules: ModuleType) -> dict[str, Callable[..., Any]]:
    """The launchers of an op, in their order, by their names without that of the op."""
    op = modules[0].__name__.rpartition(".")[2]
    return {
        name.removeprefix(f"{op}_"): launcher
        for module in modules
        for name, launcher in vars(module).items()
        if name in module.__all__
    }


class _Operands:
    """What the operands of all ops have: modes, each a launcher that takes its arguments by their names from here."""

    MODES: ClassVar[dict[str, Callable[..., Any]]]
    # How many results there are to choose from, where they are not three.
    RESULTS: ClassVar[dict[str, int]] = {}

    def call(self, mode: str, wanted: Sequence[bool] | None = None) -> Call:
        """A call of one mode, by default of all its results."""
        launcher = self.MODES[mode]
        wanted = (True,) * self.RESULTS.get(mode, 3) if wanted is None else wanted
        given = {**vars(self), **self.derived(), "eps": EPS, "momentum": MOMENTUM, "wanted": wanted}
        return Call(launcher, tuple(given[name] for name in inspect.signature(launcher).parameters))

    def calls(self, *modes: str) -> list[Call]:
        """A call of each of these modes, by default of all."""
        return [self.call(mode) for mode in modes or self.MODES]

    def calls_with(self, name: str) -> list[Call]:
        """A call of each mode that takes the named operand."""
        return [
            self.call(mode) for mode, launcher in self.MODES.items() if name in inspect.signature(launcher).parameters
        ]

    def choices(self, mode: str) -> Iterator[Call]:
        """Calls in which any two of the operands that may be absent and the results meet in all four ways."""
        parameters = inspect.signature(self.MODES[mode]).parameters
        names = [name for name, parameter in parameters.items() if parameter.annotation == "Tensor | None"]
        num_results = self.RESULTS.get(mode, 3) if "wanted" in parameters else 0
        for choice in pairwise(len(names) + num_results):
            absent = [name for name, is_there in zip(names, choice, strict=False) if not is_there]
            # A launcher of tangents is called for one at least.
            if not mode.endswith("jvp") or any(name.endswith("_dot") and name not in absent for name in names):
                yield self.change(**dict.fromkeys(absent)).call(mode, choice[len(names) :])

    def derived(self) -> dict[str, Any]:
        """Arguments that follow from others."""
        raise NotImplementedError

    def change(self, **fields: Any) -> Any:
        """The same with other tensors; None for one that is absent."""
        return dataclasses.replace(self, **fields)  # pyright: ignore[reportArgumentType]

    def here(self) -> Any:
        """The same where a test makes its tensors, for operands that were drawn before it began."""
        device = torch.get_default_device()
        return self.change(**{n: x.to(device) for n, x in vars(self).items() if isinstance(x, torch.Tensor)})


@dataclasses.dataclass(frozen=True)
class LayerNorm(_Operands):
    """Operands of layer norm; None for an absent parameter and for a tangent that is zero."""

    MODES: ClassVar = _modes(layer_norm, layer_norm_second_order)
    RESULTS: ClassVar = {"pairing": 6}

    x: Tensor
    y_bar: Tensor
    x_dot: Tensor | None
    y_bar_dot: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    weight_dot: Tensor | None
    bias_dot: Tensor | None
    norm_ndim: int = 1
    batch_ndim: int = 0

    @classmethod
    def draw(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype | None = None,
        **dims: int,
    ) -> LayerNorm:
        """Contiguous random operands."""
        batch_ndim, norm_ndim = dims.get("batch_ndim", 0), dims.get("norm_ndim", 1)
        param_shape = (*shape[:batch_ndim], *shape[len(shape) - norm_ndim :])
        full_size = (random(*shape, dtype=dtype, seed=seed) for seed in range(4))
        params = (random(*param_shape, dtype=param_dtype or dtype, seed=seed) for seed in range(4, 8))
        return cls(*full_size, *params, **dims)

    def derived(self) -> dict[str, Any]:
        """Statistics of x."""
        return statistics(self.x, tuple(range(-self.norm_ndim, 0)))


@dataclasses.dataclass(frozen=True)
class BatchNorm(_Operands):
    """Operands of batch norm in training and evaluation; None for what is absent."""

    MODES: ClassVar = _modes(batch_norm, batch_norm_second_order)
    RESULTS: ClassVar = {"pairing": 6, "eval_bwd": 5}

    x: Tensor
    y_bar: Tensor
    x_dot: Tensor | None
    y_bar_dot: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    weight_dot: Tensor | None
    bias_dot: Tensor | None
    running_mean_dot: Tensor | None
    running_var_dot: Tensor | None
    batch_ndim: int = 0

    @classmethod
    def draw(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype | None = None,
        batch_ndim: int = 0,
        arrange: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
    ) -> BatchNorm:
        """Random operands, those of full size in some layout."""
        channels = (*shape[:batch_ndim], shape[batch_ndim + 1])
        param_dtype = param_dtype or torch.promote_types(dtype, torch.float32)
        full_size = (arrange(random(*shape, dtype=dtype, seed=seed)) for seed in range(4))
        params = [random(*channels, dtype=param_dtype, seed=seed) for seed in range(8)]
        # A variance.
        params[3] = random(*channels, dtype=torch.float64, seed=3).abs().add(0.1).to(param_dtype)
        return cls(*full_size, *params, batch_ndim=batch_ndim)

    def derived(self) -> dict[str, Any]:
        """Statistics of x."""
        return statistics(self.x, (self.batch_ndim, *range(self.batch_ndim + 2, self.x.dim())))


@dataclasses.dataclass(frozen=True)
class LogSoftmax(_Operands):
    """Operands of log-softmax over `dim`; its derivatives take its output `y`."""

    MODES: ClassVar = _modes(log_softmax, log_softmax_second_order)

    x: Tensor
    y: Tensor
    y_bar: Tensor
    x_dot: Tensor
    y_bar_dot: Tensor | None
    y_dot: Tensor | None
    dim: int
    output_dtype: torch.dtype | None = None

    @classmethod
    def draw(
        cls,
        shape: Sequence[int],
        dim: int,
        dtype: torch.dtype = torch.float32,
        arrange: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
    ) -> LogSoftmax:
        """Random operands in some layout."""
        x, y, *others = (random(*shape, dtype=torch.float64, seed=seed) for seed in range(6))
        return cls(*(arrange(tensor.to(dtype)) for tensor in (x, torch.log_softmax(y, dim), *others)), dim=dim)

    def derived(self) -> dict[str, Any]:
        """The dtype of x."""
        return {"x_dtype": self.x.dtype}


@dataclasses.dataclass(frozen=True)
class Attention(_Operands):
    """Operands of attention; None for what is absent, and for tangents of the results, which the pairing finds then.

    Of the tangents of results that are there, only the shape matters.
    """

    MODES: ClassVar = _modes(attention)
    RESULTS: ClassVar = {"bwd": 4, "pairing": 10}

    q: Tensor
    k: Tensor
    v: Tensor
    o_bar: Tensor | None
    o_bar_dot: Tensor | None
    q_dot: Tensor | None
    k_dot: Tensor | None
    v_dot: Tensor | None
    lse_bar: Tensor | None
    lse_bar_dot: Tensor | None
    bias: Tensor | None = None
    bias_dot: Tensor | None = None
    mask: Tensor | None = None
    seed: Tensor | None = None
    offset: Tensor | None = None
    o_dot: Tensor | None = None
    lse_dot: Tensor | None = None
    scale: float = 0.3
    causal: bool = False
    dropout_p: float = 0.0

    @classmethod
    def draw(
        cls,
        shape: Sequence[int],
        keys: int,
        dtype: torch.dtype = torch.float32,
        key_heads: int | None = None,
        value_width: int | None = None,
        **options: Any,
    ) -> Attention:
        """Random operands for queries [*batch, heads, rows, width], which lie as [*batch, rows, heads, width]."""
        *batch, heads, rows, width = shape
        of_keys = (*batch, keys, key_heads or heads)
        shapes = ((*batch, rows, heads, width), (*of_keys, width), (*of_keys, value_width or width))
        made = (*batch, rows, heads, value_width or width)
        matrices = (random(*each, dtype=dtype, seed=n) for n, each in enumerate((*shapes, made, made, *shapes)))
        statistic = accumulation_dtype(dtype)
        bars = (random(*batch, heads, rows, dtype=statistic, seed=seed) for seed in (8, 9))
        return cls(*(x.transpose(-2, -3) for x in matrices), *bars, **options)

    def call(self, mode: str, wanted: Sequence[bool] | None = None) -> Call:
        """As for all; no kernel has a cotangent of a bias that is absent or broadcast."""
        count = self.RESULTS.get(mode, 0)
        has_bars = self.bias is not None and self.bias.shape == (*self.q.shape[:-1], self.k.shape[-2])
        of_bias = {"bwd": {3}, "pairing": {5, 9}}.get(mode, set())
        wanted = (True,) * count if wanted is None else wanted
        return super().call(mode, [want and (has_bars or n not in of_bias) for n, want in enumerate(wanted)])

    def choices(self, mode: str) -> Iterator[Call]:
        """As for all; a backward has a cotangent of o or of lse."""
        return (call for call in super().choices(mode) if mode != "bwd" or call.args[:2] != (None, None))

    def derived(self) -> dict[str, Any]:
        """The results of the forward, in the dtypes and the layout in which it gives them, and tangents where given."""
        bias_dot = None if self.bias is None else self.bias_dot
        primals, dots = (self.q, self.k, self.v, self.bias), (self.q_dot, self.k_dot, self.v_dot, bias_dot)
        options = (self.mask, self.seed, self.offset, self.scale, self.causal, self.dropout_p)
        with use_backend("reference"):
            o, lse = torch.ops.primitives.attention(*primals, *options)
            o_dot, lse_dot = torch.ops.primitives.attention_jvp(*primals, o, lse, *dots, *options)
        given = {
            "o_dot": o_dot if self.o_dot is not None else None,
            "lse_dot": lse_dot if self.lse_dot is not None else None,
        }
        return {"o": o, "lse": lse, "bias_dot": bias_dot, **given}


def dropout_calls(dtype: torch.dtype = torch.float32) -> list[Call]:
    """Dropout with one seed and with a seed per sample, and stored words, whose tiles are partial.

    Tensors are contiguous, or have gaps between their rows, are transposed, or stand for several rows or columns.
    """
    seeds, offsets = torch.tensor([3, 5]), torch.tensor([0, 7])
    one, per_sample = seeds[0].clone(), random(2, 2501, dtype=dtype)
    with_gaps = random(2, 4, 75, dtype=dtype, seed=1)[:, :3, :70]
    whole, row, column = (random(*shape, dtype=dtype, seed=2) for shape in ((75, 40), (1, 40), (75, 1)))
    return [
        Call(dropout.dropout_fwd, (random(3, 1100, dtype=dtype), one, None, 0.3, 0)),
        Call(dropout.dropout_fwd, (per_sample, seeds, offsets, 0.3, 1)),
        Call(dropout.dropout_fwd, (with_gaps, seeds, None, 0.3, 1)),
        Call(dropout.dropout_fwd, (whole.t(), one, offsets[1].clone(), 0.3, 0)),
        Call(dropout.dropout_fwd, (row.expand(75, 40), one, None, 0.3, 0)),
        Call(dropout.dropout_fwd, (column.expand(75, 40), one, None, 0.3, 0)),
        Call(philox.philox_words, (seeds, offsets, (2101,))),
    ]


def copying_calls(dtype: torch.dtype) -> list[Call]:
    """Calls whose operands no view fits, so that they are copied first, and dropout that drops nothing: a copy itself.

    Strides have no view where dims that a kernel merges lie apart: two normalized dims that are exchanged, positions
    of an image that is turned around, three levels of rows.
    """
    normalized = random(3, 8, 5, dtype=dtype).transpose(1, 2)
    rows = LayerNorm.draw(normalized.shape, dtype, norm_ndim=2).change(x=normalized, weight=None, bias=None)
    turned = random(2, 3, 8, 6, dtype=dtype).transpose(2, 3)
    images = BatchNorm.draw(turned.shape, dtype).change(x=turned)
    levels = random(2, 4, 3, 6, 10, dtype=dtype)[:, ::2, :, ::2].transpose(0, 2)
    seed = torch.tensor(3)
    return [
        rows.call("fwd")._replace(copies=1),
        images.call("train_fwd")._replace(copies=1),
        images.call("train_bwd")._replace(copies=1),
        images.change(y_bar=turned).call("train_bwd")._replace(copies=2),
        images.call("eval_fwd")._replace(copies=1),
        Call(log_softmax.log_softmax_fwd, (levels, 4, None), 1),
        Call(dropout.dropout_fwd, (random(3, 20, dtype=dtype), seed, None, 0.0, 0), 1),
        Call(dropout.dropout_fwd, (levels.as_strided((2, 2, 2, 2, 2), (64, 30, 14, 6, 2)), seed, None, 0.3, 0), 2),
    ]
