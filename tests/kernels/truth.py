"""What each launcher must return: float64 formulas, differentiated by torch, and the comparison of a call with them.

Each formula takes what its launcher takes, by name. Statistics that a launcher is given are those of its input.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, NamedTuple

import torch

from tests.philox_truth import true_noise, true_words
from triton_kernels._runtime import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from torch import Tensor

    from tests.kernels.calls import Call

# Large enough that the mean square of x_hat is visibly not 1, and far enough from a float32 number that rounding it to
# one shows in float64.
EPS = 1e-2 + 1e-10
MOMENTUM = 0.1

# Relative to the largest element, or to the number of terms of a sum over rows, positions or samples: as many roundings
# as a sum over the tested sizes can collect. The interpreter adds in sequence.
TOLERANCES = {torch.float32: 3e-6, torch.float64: 1e-13}


class Exact(NamedTuple):
    """A result in float64, and the dtype that it has to be rounded to."""

    value: Tensor
    dtype: torch.dtype


def expected(call: Call) -> list[Exact | None]:
    """What a call must return, None for what is not wanted."""
    name, given = call.launcher.__name__, inspect.signature(call.launcher).bind(*call.args).arguments
    op, is_norm, mode = name.partition("_norm_")
    return _norm(op, mode, given) if is_norm else FORMULAS[name](**given)


def check_values(call: Call, results: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
    """Hold the results of a call (by default of running it now) to the truth; returns them."""
    results = call.results() if results is None else results
    name, full_size = call.launcher.__name__, max(arg.numel() for arg in call.tensors())
    is_wide = any(arg.dtype == torch.float64 for arg in call.tensors() if arg.numel() == full_size)
    arithmetic = torch.float64 if is_wide else torch.float32
    for number, (actual, exact) in enumerate(zip(results, expected(call), strict=True)):
        what = f"result {number} of {name}"
        if exact is None:
            assert actual.shape == (0,), f"{what} is not wanted, and has the shape {tuple(actual.shape)}"
        else:
            assert_close(actual, exact, arithmetic, full_size, what)
    pointers = [result.data_ptr() for result in results if result.numel()]
    assert len(set(pointers)) == len(pointers), f"results of {name} share memory"
    return results


def assert_close(
    actual: Tensor,
    exact: Exact,
    arithmetic: torch.dtype = torch.float64,
    full_size: int = 0,
    what: str = "the result",
) -> None:
    """The exact value rounded once, give or take the rounding of the arithmetic; of the dtype and the shape."""
    value, dtype = exact
    assert (actual.dtype, actual.shape) == (dtype, value.shape), f"{what} is {actual.dtype} {tuple(actual.shape)}"
    if dtype == torch.int64:
        assert torch.equal(actual, value), f"{what} differs"
        return
    finite = value[value.isfinite()].abs()
    scale = max(finite.max().item() if finite.numel() else 0.0, 1.0)
    # The parameters of a group take a sum each.
    terms = full_size / actual.numel() if 0 < actual.numel() < full_size else 0.0
    info = torch.finfo(dtype)
    tolerance = max(TOLERANCES[accumulation_dtype(dtype)], TOLERANCES[arithmetic])
    bound = info.eps * (value.abs() + info.smallest_normal) + tolerance * max(scale, terms)
    error = (actual.double() - value).abs()
    right = (error <= bound) | (actual == value) | (actual.isnan() & value.isnan())
    assert right.all(), f"{what} is off by {error[~right].max()}, {(error / bound)[~right].max():.3g} times the bound"


# Functions whose derivatives all launchers are: of x and parameters, with the groups of `batch_ndim` leading dims.


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, norm_ndim: int, batch_ndim: int) -> Tensor:
    """Layer norm of elementary operations."""
    dims = tuple(range(-norm_ndim, 0))
    rest = (1,) * (x.dim() - norm_ndim - batch_ndim)

    def of_rows(param: Tensor) -> Tensor:
        return param.reshape(*param.shape[:batch_ndim], *rest, *param.shape[batch_ndim:])

    centered = x - x.mean(dims, keepdim=True)
    x_hat = centered / (centered.square().mean(dims, keepdim=True) + EPS).sqrt()
    return x_hat * of_rows(weight) + of_rows(bias)


def channel_dims(x: Tensor, batch_ndim: int) -> tuple[int, ...]:
    """What batch norm takes the mean over."""
    return batch_ndim, *range(batch_ndim + 2, x.dim())


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    batch_ndim: int,
    mean: Tensor | None = None,
    var: Tensor | None = None,
) -> Tensor:
    """Batch norm of elementary operations: in evaluation with a mean and a variance, in training without."""
    dims = channel_dims(x, batch_ndim)

    def of_channels(param: Tensor) -> Tensor:
        return param.reshape(*param.shape[:-1], 1, param.shape[-1], *(1,) * (x.dim() - batch_ndim - 2))

    mean = x.mean(dims, keepdim=True) if mean is None else of_channels(mean)
    var = (x - mean).square().mean(dims, keepdim=True) if var is None else of_channels(var)
    return (x - mean) / (var + EPS).sqrt() * of_channels(weight) + of_channels(bias)


def statistics(x: Tensor, dims: tuple[int, ...]) -> list[Tensor]:
    """The mean and the reciprocal standard deviation that a forward hands to the derivatives."""
    var, mean = torch.var_mean(x.double(), dims, correction=0)
    return [statistic.to(accumulation_dtype(x.dtype)) for statistic in (mean, (var + EPS) ** -0.5)]


class _Point:
    """Where derivatives of a function of x, weight and bias are taken; what is absent is 1 or 0."""

    def __init__(self, function: Callable[..., Tensor], x: Tensor, weight: Tensor | None, param_shape: Any) -> None:
        self.function, self.x, self.weight = function, x, weight
        self.param_shape = torch.Size(param_shape)
        self.acc = accumulation_dtype(x.dtype)
        # Of the cotangents of parameters in first order; in second order without a weight they are as narrow as x.
        self.param_dtype = self.acc if weight is None else weight.dtype
        self.second_param_dtype = x.dtype if weight is None else weight.dtype

    def primals(self, *others: Tensor) -> tuple[Tensor, ...]:
        ones = torch.ones(self.param_shape, dtype=torch.float64)
        weight = ones if self.weight is None else _wide(self.weight)
        return _wide(self.x), weight, torch.zeros_like(ones), *map(_wide, others)

    def y(self, bias: Tensor | None, *others: Tensor) -> Exact:
        x, weight, zero, *others = self.primals(*others)
        return Exact(self.function(x, weight, zero if bias is None else bias.double(), *others), self.x.dtype)

    def jvp(self, dots: Sequence[Tensor | None], *others: Tensor) -> Exact:
        primals = self.primals(*others)
        return Exact(torch.func.jvp(self.function, primals, _filled(dots, primals))[1], self.x.dtype)

    def bwd(self, y_bar: Tensor, wanted: Sequence[bool], *others: Tensor) -> list[Exact | None]:
        bars = torch.func.vjp(self.function, *self.primals(*others))[1](y_bar.double())
        dtypes = (self.x.dtype, self.param_dtype, self.param_dtype, *(other.dtype for other in others))
        return _wanted(bars, dtypes, wanted)

    def pairing(self, y_bar: Tensor, dots: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Exact | None]:
        x, weight, bias = primals = self.primals()

        def pairing(y_bar: Tensor, x: Tensor, weight: Tensor, *dots: Tensor) -> Tensor:
            return (y_bar * torch.func.jvp(self.function, (x, weight, bias), dots)[1]).sum()

        bars = torch.func.grad(pairing, tuple(range(6)))(_wide(y_bar), x, weight, *_filled(dots, primals))
        full, param = self.x.dtype, self.second_param_dtype
        return _wanted(bars, (full, full, param, full, param, param), wanted)

    def bwd_jvp(self, y_bar: Tensor, dots: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Exact | None]:
        x, weight, bias = self.primals()

        def bwd(y_bar: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(self.function, x, weight, bias)[1](y_bar)

        primals = (_wide(y_bar), x, weight)
        full, param = self.x.dtype, self.second_param_dtype
        return _wanted(torch.func.jvp(bwd, primals, _filled(dots, primals))[1], (full, param, param), wanted)


def _filled(dots: Sequence[Tensor | None], primals: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(p) if d is None else _wide(d) for d, p in zip(dots, primals, strict=True))


def _wide(tensor: Tensor) -> Tensor:
    # Elements that stand for several others have no place in a dual number.
    return tensor.double().contiguous()


def _wanted(values: Sequence[Tensor], dtypes: Sequence[torch.dtype], wanted: Sequence[bool]) -> list[Exact | None]:
    found = zip(values, dtypes, wanted, strict=True)
    return [Exact(value, dtype) if is_wanted else None for value, dtype, is_wanted in found]


def _norm(op: str, mode: str, given: dict[str, Any]) -> list[Exact | None]:
    """The formulas of both norms: of a launcher's arguments by name."""
    x, weight, batch_ndim = given["x"], given["weight"], given["batch_ndim"]
    if op == "layer":
        norm_ndim = given["norm_ndim"]
        dims, param_shape = tuple(range(-norm_ndim, 0)), (*x.shape[:batch_ndim], *x.shape[x.dim() - norm_ndim :])

        def function(*params: Any) -> Any:
            return layer_norm(*params, norm_ndim, batch_ndim)

    else:
        dims, param_shape = channel_dims(x, batch_ndim), (*x.shape[:batch_ndim], x.shape[batch_ndim + 1])

        def function(*params: Any) -> Any:
            return batch_norm(*params[:3], batch_ndim, *params[3:])

    point = _Point(function, x, weight, param_shape)
    stats = (given["running_mean"], given["running_var"]) if mode.startswith("eval") else ()
    if mode in {"bwd", "train_bwd", "eval_bwd"}:
        return point.bwd(given["y_bar"], given["wanted"], *stats)
    if mode in {"pairing", "bwd_jvp"}:
        names = ("x_dot", "weight_dot", "bias_dot") if mode == "pairing" else ("y_bar_dot", "x_dot", "weight_dot")
        return getattr(point, mode)(given["y_bar"], [given[name] for name in names], given["wanted"])
    if mode.endswith("jvp"):
        names = ("x_dot", "weight_dot", "bias_dot", "running_mean_dot", "running_var_dot")[: 3 + len(stats)]
        return [point.jvp([given[name] for name in names], *stats)]
    y = point.y(given["bias"], *stats)
    if stats:
        return [y]
    var, mean = torch.var_mean(x.double(), dims, correction=0)
    results = [y, Exact(mean, point.acc), Exact((var + given["eps"]) ** -0.5, point.acc)]
    if op == "layer":
        return results
    count, momentum = x.numel() // mean.numel(), given["momentum"]
    updated = ((given["running_mean"], mean), (given["running_var"], var * count / (count - 1)))
    return results + [
        None if old is None else Exact((1 - momentum) * old.double() + momentum * new, old.dtype)
        for old, new in updated
    ]


# Log-softmax, whose derivatives take its rounded output.


def _log_softmax_fwd(x, dim, output_dtype):
    dtype = x.dtype if output_dtype is None else output_dtype
    return [Exact(torch.log_softmax(x.to(dtype).double(), dim), dtype)]


def _of_output(y_bar: Tensor, y: Tensor, dim: int) -> Tensor:
    return y_bar - y.exp() * y_bar.sum(dim, keepdim=True)


def _log_softmax_bwd(y_bar, y, dim, x_dtype):
    return [Exact(_of_output(y_bar.double(), y.double(), dim), x_dtype)]


def _log_softmax_jvp(x_dot, y, dim):
    x_dot, wide = x_dot.double(), y.double()
    return [Exact(x_dot - (wide.exp() * x_dot).sum(dim, keepdim=True), y.dtype)]


def _log_softmax_pairing(y_bar, y, x_dot, dim, wanted):
    wide, p, wide_dot = y_bar.double(), y.double().exp(), x_dot.double()
    y_bar_sum = wide.sum(dim, keepdim=True)
    values = (wide_dot - (p * wide_dot).sum(dim, keepdim=True), -p * wide_dot * y_bar_sum, wide - p * y_bar_sum)
    return _wanted(values, (y_bar.dtype, y.dtype, x_dot.dtype), wanted)


def _log_softmax_bwd_jvp(y_bar, y, y_bar_dot, y_dot, dim, x_dtype):
    primals = (_wide(y_bar), _wide(y))
    dots = _filled((y_bar_dot, y_dot), primals)
    return [Exact(torch.func.jvp(lambda *args: _of_output(*args, dim), primals, dots)[1], x_dtype)]


# Random numbers.


def _streams(seed: Tensor, offset: Tensor | None) -> list[tuple[int, int]]:
    offsets = [0] * seed.numel() if offset is None else offset.expand(seed.shape).flatten().tolist()
    return list(zip(seed.flatten().tolist(), offsets, strict=True))


def _dropout_fwd(x, seed, offset, p, batch_ndim):
    shape = tuple(x.shape[batch_ndim:])
    noise = torch.stack([true_noise(shape, *stream, p) for stream in _streams(seed, offset)])
    return [Exact(x.double() * noise.reshape(x.shape), x.dtype)]


def _philox_words(seed, offset, size):
    count = torch.Size(size).numel()
    words = torch.tensor([true_words(*stream, count) for stream in _streams(seed, offset)])
    return [Exact(words.reshape(*seed.shape, *size), torch.int64)]


# By the name of the launcher, for those that are no norm's.
FORMULAS: dict[str, Callable[..., list[Exact | None]]] = {
    "log_softmax_fwd": _log_softmax_fwd,
    "log_softmax_bwd": _log_softmax_bwd,
    "log_softmax_jvp": _log_softmax_jvp,
    "log_softmax_pairing": _log_softmax_pairing,
    "log_softmax_bwd_jvp": _log_softmax_bwd_jvp,
    "dropout_fwd": _dropout_fwd,
    "philox_words": _philox_words,
}
