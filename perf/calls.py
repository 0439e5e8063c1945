"""Calls of every launcher: operands, and the modes of an op that can be called on them.

The tests call launchers on random numbers; the table of machine code on tensors that nobody touches.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from primitives import use_backend
from triton_kernels import (
    attention,
    batch_norm,
    batch_norm_second_order,
    costs,
    layer_norm,
    layer_norm_second_order,
    log_softmax,
    log_softmax_second_order,
)
from triton_kernels._runtime import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from torch import Tensor

    from triton_kernels.costs import Cost

# Large enough that the mean square of x_hat is visibly not 1, and far enough from a float32 number that rounding it to
# one shows in float64.
EPS = 1e-2 + 1e-10
MOMENTUM = 0.1


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers, shifted so that the mean matters."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    return numbers.to(torch.get_default_device(), dtype)


def statistics(x: Tensor, dims: tuple[int, ...]) -> dict[str, Tensor]:
    """The mean and the reciprocal standard deviation that a forward hands to the derivatives."""
    var, mean = torch.var_mean(x.double(), dims, correction=0)
    dtype = accumulation_dtype(x.dtype)
    return {"mean": mean.to(dtype), "rstd": ((var + EPS) ** -0.5).to(dtype)}


def pairwise(count: int) -> list[tuple[bool, ...]]:
    """Few choices of `count` flags in which any two flags meet in all four ways, and the choice of all.

    Each flag is up in half of the choices but the first one, which has none, and no two flags in the same ones.
    """
    size = next(size for size in itertools.count(4, 2) if math.comb(size - 1, size // 2) >= count)
    ups = list(itertools.islice(itertools.combinations(range(1, size), size // 2), count))
    return [*(tuple(number in up for up in ups) for number in range(size)), (True,) * count]


class Call(NamedTuple):
    """A launcher, its arguments, and how many operands it copies first because no view fits their strides."""

    launcher: Callable[..., Any]
    args: tuple[Any, ...]
    copies: int = 0

    def cost(self) -> Cost:
        """Its cost, by the function of the launcher's name; costs are those of operands without copies."""
        args = [arg.contiguous() if self.copies and isinstance(arg, torch.Tensor) else arg for arg in self.args]
        return getattr(costs, self.launcher.__name__)(*args)

    def results(self) -> tuple[Tensor, ...]:
        """Its results; empty tensors stand for those that are not wanted."""
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
    """Base of the operands of all ops. Each mode is a launcher that takes its arguments by their names from here."""

    MODES: ClassVar[dict[str, Callable[..., Any]]]
    # How many results there are to choose from, where they are not three.
    RESULTS: ClassVar[dict[str, int]] = {}

    def call(self, mode: str, wanted: Sequence[bool] | None = None, derived: Mapping[str, Any] | None = None) -> Call:
        """A call of one mode, by default of all its results, with what is derived from the operands if not given."""
        launcher = self.MODES[mode]
        wanted = (True,) * self.RESULTS.get(mode, 3) if wanted is None else wanted
        derived = self.derived() if derived is None else derived
        given = {"eps": EPS, "momentum": MOMENTUM, **vars(self), **derived, "wanted": wanted}
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
        full_size: Any = (random(*shape, dtype=dtype, seed=seed) for seed in range(4))
        params: Any = (random(*param_shape, dtype=param_dtype or dtype, seed=seed) for seed in range(4, 8))
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
        operands: Any = (*(x.transpose(-2, -3) for x in matrices), *bars)
        return cls(*operands, **options)

    def call(self, mode: str, wanted: Sequence[bool] | None = None, derived: Mapping[str, Any] | None = None) -> Call:
        """As for all; no kernel has a cotangent of a bias that is absent or broadcast."""
        count = self.RESULTS.get(mode, 0)
        has_bars = self.bias is not None and self.bias.shape == (*self.q.shape[:-1], self.k.shape[-2])
        of_bias = {"bwd": {3}, "pairing": {5, 9}}.get(mode, set())
        wanted = (True,) * count if wanted is None else wanted
        wanted = tuple(want and (has_bars or n not in of_bias) for n, want in enumerate(wanted))
        return super().call(mode, wanted, derived)

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
