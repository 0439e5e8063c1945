"""One record per op. Every generic test runs over `CASES`: a new op gets all of them by adding its record here.

Names and order tie a record to its primitives: the outputs of the backward primitive are the cotangents of the
differentiable arguments in their order, and the jvp primitive takes the tangent of an argument `x` as `x_dot`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

import primitives as pr
from primitives.ops.batch_norm import batch_norm_bwd_p, batch_norm_jvp_p, batch_norm_p
from primitives.ops.batch_norm_eval import batch_norm_eval_bwd_p, batch_norm_eval_jvp_p, batch_norm_eval_p
from primitives.ops.batch_norm_second_order import batch_norm_bwd_jvp_p, batch_norm_pairing_p
from primitives.ops.layer_norm import layer_norm_bwd_p, layer_norm_jvp_p, layer_norm_p
from primitives.ops.layer_norm_second_order import layer_norm_bwd_jvp_p, layer_norm_pairing_p
from primitives.ops.log_softmax import log_softmax_bwd_p, log_softmax_jvp_p, log_softmax_p
from primitives.ops.log_softmax_second_order import log_softmax_bwd_jvp_p, log_softmax_pairing_p
from tests.support import DTYPES, LOW_PRECISION, arranged, normal, pairwise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

EPS = 1e-5
MOMENTUM = 0.3


@dataclasses.dataclass(frozen=True)
class Sample:
    """One way to call an op, without its numbers.

    Attributes:
        shape: Shape of `x`, the first argument.
        options: Keyword arguments of the public function.
        absent: Arguments that are `None`.
        layout: Memory layout of every tensor, one of `support.LAYOUTS`.
        mixed: Whether the other arguments are float32 beside a low-precision `x`.
    """

    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()
    absent: tuple[str, ...] = ()
    layout: str = "contiguous"
    mixed: bool = False

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.shape)), *[f"{k}={v}" for k, v in self.options], self.layout]
        parts += [f"no_{name}" for name in self.absent] + ["mixed"] * self.mixed
        return "-".join(parts)


@dataclasses.dataclass(frozen=True)
class OpCase:
    """An op and what its tests need to know.

    Attributes:
        name: Name in test ids.
        forward: Primitive of the op itself.
        bwd: Primitive of its vjp.
        jvp: Primitive of its jvp.
        function: The public function, `(*arguments, **options)`, returning `y` or a tuple that begins with it.
        truth: The same by the definition, in plain torch operations, for float64 arguments.
        torch_function: `y` of torch's own op, with the same arguments.
        arguments: Names of the tensor arguments, `x` first.
        differentiable: Those that have derivatives.
        parameter_shape: Shape of every argument but `x`, given a sample.
        samples: What reference and kernels are tested on.
        small: A few elements, for derivatives by differences, compilers and vmap.
        tiny: Fewer still, for derivatives of order four.
        not_kept: Arguments, or `"y"`, that the forward pass must not keep for the backward pass.
        positive: Arguments that must be positive.
        second_order: Primitives of the derivatives of `bwd` and `jvp`; without any, these are decomposed.
        dtypes: Supported dtypes.
    """

    name: str
    forward: pr.core.Primitive
    bwd: pr.core.Primitive
    jvp: pr.core.Primitive
    function: Callable[..., Any]
    truth: Callable[..., Any]
    torch_function: Callable[..., Tensor]
    arguments: tuple[str, ...]
    differentiable: tuple[str, ...]
    parameter_shape: Callable[[Sample], tuple[int, ...]]
    samples: tuple[Sample, ...]
    small: Sample
    tiny: Sample
    not_kept: tuple[str, ...]
    positive: tuple[str, ...] = ()
    second_order: tuple[pr.core.Primitive, ...] = ()
    dtypes: tuple[torch.dtype, ...] = DTYPES

    def present(self, sample: Sample) -> list[str]:
        """Arguments that are tensors in `sample`."""
        return [name for name in self.arguments if name not in sample.absent]

    def perturbable(self, sample: Sample) -> list[str]:
        """Differentiable arguments that are tensors in `sample`."""
        return [name for name in self.differentiable if name not in sample.absent]

    def inputs(
        self, sample: Sample, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> dict[str, Tensor | None]:
        """Arguments by name, in the layout of the sample."""
        parameter_dtype = torch.float32 if sample.mixed and dtype in LOW_PRECISION else dtype
        made: dict[str, Tensor | None] = {}
        for position, name in enumerate(self.arguments):
            shape = sample.shape if position == 0 else self.parameter_shape(sample)
            values = normal(shape, seed + position, mean=0.5)
            if name in self.positive:
                values = 0.5 + values.abs()
            values = values.to(device, dtype if position == 0 else parameter_dtype)
            made[name] = None if name in sample.absent else arranged(values, sample.layout)
        return made

    def outputs(self, inputs: dict[str, Tensor | None], sample: Sample) -> tuple[Tensor, ...]:
        """All tensors that the public function returns, `y` first."""
        return _as_tuple(self.function(*inputs.values(), **dict(sample.options)))

    def true_outputs(self, inputs: dict[str, Tensor | None], sample: Sample) -> tuple[Tensor, ...]:
        """The same by the definition, in float64."""
        wide = [None if value is None else value.double() for value in inputs.values()]
        return _as_tuple(self.truth(*wide, **dict(sample.options)))

    def of(
        self, names: Sequence[str], inputs: dict[str, Tensor | None], sample: Sample, *, true: bool = False
    ) -> Callable[..., Tensor]:
        """`y` as a function of the arguments `names` alone, the others as in `inputs`."""
        outputs = self.true_outputs if true else self.outputs

        def y(*values: Tensor) -> Tensor:
            return outputs({**inputs, **dict(zip(names, values, strict=True))}, sample)[0]

        return y


def _as_tuple(out: Any) -> tuple[Tensor, ...]:
    return tuple(value for value in out if value is not None) if isinstance(out, tuple) else (out,)


def _options(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


def _samples(
    shapes: Sequence[tuple],
    absent: Sequence[tuple],
    layouts: Sequence[str],
    constant_when_expanded: Callable[[tuple[int, ...]], bool] = lambda shape: False,
) -> tuple[Sample, ...]:
    """All pairs of shape with options, layout, absent arguments and mixed dtypes.

    Left out are expanded shapes all of whose normalized values are equal: there the rounding of the mean, times
    1 / sqrt(eps), is all that remains.
    """
    rows = pairwise(shape=shapes, layout=layouts, absent=absent, mixed=(False, True) if len(absent) > 1 else (False,))
    samples = [Sample(*row.pop("shape"), **row) for row in rows]
    return tuple(s for s in samples if s.layout != "expanded" or not constant_when_expanded(s.shape))


# Layer norm.


def _layer_norm(x: Tensor, weight: Any, bias: Any, norm_ndim: int) -> Tensor:
    return pr.functional.layer_norm(x, x.shape[x.dim() - norm_ndim :], weight, bias, EPS)


def _true_layer_norm(x: Tensor, weight: Any, bias: Any, norm_ndim: int) -> Tensor:
    axes = tuple(range(-norm_ndim, 0))
    centered = x - x.mean(axes, keepdim=True)
    y = centered / (centered.square().mean(axes, keepdim=True) + EPS).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _torch_layer_norm(x: Tensor, weight: Any, bias: Any, norm_ndim: int) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[x.dim() - norm_ndim :], weight, bias, EPS)


_ONE_AXIS = _options(norm_ndim=1)
LAYER_NORM = OpCase(
    name="layer_norm",
    forward=layer_norm_p,
    bwd=layer_norm_bwd_p,
    jvp=layer_norm_jvp_p,
    second_order=(layer_norm_pairing_p, layer_norm_bwd_jvp_p),
    function=_layer_norm,
    truth=_true_layer_norm,
    torch_function=_torch_layer_norm,
    arguments=("x", "weight", "bias"),
    differentiable=("x", "weight", "bias"),
    parameter_shape=lambda sample: sample.shape[-dict(sample.options)["norm_ndim"] :],
    samples=_samples(
        shapes=[
            ((0, 5), _ONE_AXIS),
            ((1, 1), _ONE_AXIS),
            ((13, 31), _ONE_AXIS),
            ((3, 257), _ONE_AXIS),
            ((2, 3, 5, 4), _options(norm_ndim=2)),
            ((2, 7), _options(norm_ndim=2)),
            ((9,), _ONE_AXIS),
        ],
        absent=[(), ("bias",), ("weight",), ("weight", "bias")],
        layouts=["contiguous", "transposed", "sliced", "expanded"],
        constant_when_expanded=lambda shape: len(shape) == 1,
    ),
    small=Sample((2, 3, 4), _ONE_AXIS),
    tiny=Sample((1, 3), _ONE_AXIS),
    not_kept=("bias", "y"),
)


# Batch norm in training.


def _batch_norm(x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any) -> tuple:
    return pr.functional.pure_batch_norm(x, running_mean, running_var, weight, bias, True, MOMENTUM, EPS)


def _per_channel(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(1, -1, *[1] * (x.dim() - 2))


def _true_batch_norm(x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any) -> tuple:
    axes = (0, *range(2, x.dim()))
    mean = x.mean(axes)
    centered = x - _per_channel(mean, x)
    variance = centered.square().mean(axes)
    y = centered / _per_channel((variance + EPS).sqrt(), x)
    y = y if weight is None else y * _per_channel(weight, x)
    y = y if bias is None else y + _per_channel(bias, x)
    if running_mean is None:
        return (y,)
    count = x.numel() // max(x.shape[1], 1)
    if count == 0:
        return y, running_mean, running_var
    unbiased = variance * count / (count - 1)
    mixed = ((1 - MOMENTUM) * old + MOMENTUM * new for old, new in ((running_mean, mean), (running_var, unbiased)))
    return y, *mixed


def _torch_batch_norm(x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool) -> Tensor:
    running = [None if value is None else value.clone() for value in (running_mean, running_var)]
    return torch.nn.functional.batch_norm(x, *running, weight, bias, training, MOMENTUM, EPS)


_CHANNEL_ABSENT = [(), ("bias",), ("weight",), ("weight", "bias")]
_CHANNEL_LAYOUTS = ["contiguous", "channels_last", "transposed", "sliced", "expanded"]
_CHANNEL_SHAPES = [
    ((0, 3, 2), ()),
    ((2, 1, 1, 2), ()),
    ((3, 2, 3, 5), ()),
    ((13, 5), ()),
    ((2, 3, 131), ()),
    ((2, 3, 2, 2, 3), ()),
]


_NO_RUNNING = ("running_mean", "running_var")
BATCH_NORM = OpCase(
    name="batch_norm",
    forward=batch_norm_p,
    bwd=batch_norm_bwd_p,
    jvp=batch_norm_jvp_p,
    second_order=(batch_norm_pairing_p, batch_norm_bwd_jvp_p),
    function=_batch_norm,
    truth=_true_batch_norm,
    torch_function=functools.partial(_torch_batch_norm, training=True),
    arguments=("x", "weight", "bias", "running_mean", "running_var"),
    differentiable=("x", "weight", "bias"),
    parameter_shape=lambda sample: (sample.shape[1],),
    samples=_samples(
        _CHANNEL_SHAPES,
        [*_CHANNEL_ABSENT, _NO_RUNNING, ("bias", *_NO_RUNNING)],
        _CHANNEL_LAYOUTS,
        constant_when_expanded=lambda shape: len(shape) == 2,
    ),
    small=Sample((3, 2, 2)),
    tiny=Sample((3, 1), absent=_NO_RUNNING),
    not_kept=("bias", "y", "running_mean", "running_var"),
    positive=("running_var",),
)


# Batch norm in evaluation.


def _batch_norm_eval(x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any) -> Tensor:
    return pr.functional.batch_norm(x, running_mean, running_var, weight, bias, False, MOMENTUM, EPS)


def _true_batch_norm_eval(x: Tensor, weight: Any, bias: Any, running_mean: Tensor, running_var: Tensor) -> Tensor:
    y = (x - _per_channel(running_mean, x)) / _per_channel((running_var + EPS).sqrt(), x)
    y = y if weight is None else y * _per_channel(weight, x)
    return y if bias is None else y + _per_channel(bias, x)


BATCH_NORM_EVAL = OpCase(
    name="batch_norm_eval",
    forward=batch_norm_eval_p,
    bwd=batch_norm_eval_bwd_p,
    jvp=batch_norm_eval_jvp_p,
    function=_batch_norm_eval,
    truth=_true_batch_norm_eval,
    torch_function=functools.partial(_torch_batch_norm, training=False),
    arguments=("x", "weight", "bias", "running_mean", "running_var"),
    differentiable=("x", "weight", "bias", "running_mean", "running_var"),
    parameter_shape=lambda sample: (sample.shape[1],),
    samples=_samples([*_CHANNEL_SHAPES, ((1, 1), ())], _CHANNEL_ABSENT, _CHANNEL_LAYOUTS),
    small=Sample((2, 2, 2)),
    tiny=Sample((2, 1)),
    not_kept=("bias", "y"),
    positive=("running_var",),
)


# Log-softmax.


def _true_log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    # dtype= means a cast before the operation: a narrower one rounds x.
    x = x if dtype is None else x.to(dtype).double()
    return x - x.exp().sum(dim, keepdim=True).log()


LOG_SOFTMAX = OpCase(
    name="log_softmax",
    forward=log_softmax_p,
    bwd=log_softmax_bwd_p,
    jvp=log_softmax_jvp_p,
    second_order=(log_softmax_pairing_p, log_softmax_bwd_jvp_p),
    function=lambda x, dim, dtype=None: pr.functional.log_softmax(x, dim, dtype=dtype),
    truth=_true_log_softmax,
    torch_function=lambda x, dim, dtype=None: torch.nn.functional.log_softmax(x, dim, dtype=dtype),
    arguments=("x",),
    differentiable=("x",),
    parameter_shape=lambda sample: (),
    samples=_samples(
        shapes=[
            ((0, 5), _options(dim=1)),
            ((5, 0), _options(dim=0)),
            ((), _options(dim=0)),
            ((1, 1), _options(dim=-1)),
            ((13, 31), _options(dim=0)),
            ((3, 257), _options(dim=1)),
            ((2, 5, 3, 4), _options(dim=1)),
            ((2, 7), _options(dim=-1, dtype=torch.float32)),
            ((7, 2), _options(dim=0, dtype=torch.float16)),
            ((4, 3), _options(dim=0, dtype=torch.float64)),
            ((9,), _options(dim=0)),
        ],
        absent=[()],
        layouts=["contiguous", "transposed", "sliced", "expanded"],
    ),
    small=Sample((2, 3, 2), _options(dim=1)),
    tiny=Sample((1, 3), _options(dim=1)),
    not_kept=("x",),
)

CASES = (LAYER_NORM, BATCH_NORM, BATCH_NORM_EVAL, LOG_SOFTMAX)
