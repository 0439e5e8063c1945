"""What a record of an op is: see `op_cases`, which has one for each."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from primitives.core import registered_primitives
from tests.support import DTYPES, LOW_PRECISION, arranged, normal, pairwise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    import primitives as pr

__all__ = ["OpCase", "Sample", "make_options", "make_samples"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One way to call an op, without its numbers: shape of `x`, the first argument, and keyword arguments.

    Arguments that are `absent` are `None`; the layout of every tensor is one of `support.LAYOUTS`; `mixed` makes the
    other arguments float32 beside a low-precision `x`.
    """

    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()
    absent: tuple[str, ...] = ()
    layout: str = "contiguous"
    mixed: bool = False

    @property
    def numel(self) -> int:
        """Elements of `x`."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.shape)), *[f"{k}={v}" for k, v in self.options], self.layout]
        parts += [f"no_{name}" for name in self.absent] + ["mixed"] * self.mixed
        return "-".join(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class OpCase:
    """An op and what its tests need to know.

    `function` is the public one, `(*arguments, **options)`, and returns `y` or a tuple that begins with it; `truth` is
    the same by the definition, in plain torch operations, for float64 arguments; `torch_function` `y` of torch's own.

    Attributes:
        arguments: Names of the tensor arguments, `x` first; those that are `differentiable` have derivatives.
        parameter_shape: Shape of every argument but `x`, given a sample and the argument's name.
        samples: What reference and kernels are tested on.
        small: A few elements, for derivatives by differences, compilers and vmap.
        tiny: Fewer still, for derivatives of order four.
        large: Past the sizes up to which kernels hold rows, tiles and sums at once, in float64 on every chip.
        not_kept: Arguments, or `"y"`, that the forward pass must not keep for the backward pass.
        positive: Arguments that must be positive.
        is_linear: Whether the op is its own derivative: primitives of the vjp and jvp are that of the op.
        first: What the primitives call `x`.
        like_first: Arguments that have the dtype of `x` in a mixed sample too.
        num_kept: Tensors of the size of `y` that the forward pass keeps for the backward pass.
        rounds_once: Whether what its derivatives are given has been rounded in no way that sums of theirs show.
        rounds_between: Whether value and tangent by one call may take the tangent from the rounded value.
    """

    name: str
    function: Callable[..., Any]
    truth: Callable[..., Any]
    torch_function: Callable[..., Tensor]
    arguments: tuple[str, ...]
    differentiable: tuple[str, ...]
    parameter_shape: Callable[[Sample, str], tuple[int, ...]]
    samples: tuple[Sample, ...]
    small: Sample
    tiny: Sample
    large: tuple[Sample, ...]
    not_kept: tuple[str, ...]
    positive: tuple[str, ...] = ()
    is_linear: bool = False
    rounds_once: bool = True
    rounds_between: bool = False
    first: str = "x"
    like_first: tuple[str, ...] = ()
    num_kept: int = 1
    dtypes: tuple[torch.dtype, ...] = DTYPES

    @property
    def narrower(self) -> tuple[torch.dtype, ...]:
        """Supported dtypes but float64."""
        return tuple(dtype for dtype in self.dtypes if dtype is not torch.float64)

    def primitive(self, suffix: str) -> pr.core.Primitive:
        """That of the name of the op with a suffix."""
        return registered_primitives()[f"primitives::{self.name}{'' if self.is_linear else suffix}"]

    @property
    def forward(self) -> pr.core.Primitive:
        return self.primitive("")

    @property
    def bwd(self) -> pr.core.Primitive:
        return self.primitive("_bwd")

    @property
    def jvp(self) -> pr.core.Primitive:
        return self.primitive("_jvp")

    @property
    def fwd_jvp(self) -> pr.core.Primitive | None:
        """That which forward mode calls instead of `forward` and `jvp` where it is outermost, if the op has one."""
        return registered_primitives().get(f"primitives::{self.name}_fwd_jvp")

    @property
    def first_order(self) -> tuple[pr.core.Primitive, ...]:
        """Primitives of the value and the first derivatives, each once."""
        found = (self.forward, self.bwd, self.jvp, self.fwd_jvp)
        return tuple(dict.fromkeys(primitive for primitive in found if primitive is not None))

    def is_rounded_once(self, overload: Any) -> bool:
        """Whether the outputs of a primitive are what `rounds_once` says."""
        between = self.fwd_jvp is not None and overload is self.fwd_jvp.overload and self.rounds_between
        return self.rounds_once and not between

    @property
    def second_order(self) -> tuple[pr.core.Primitive, ...]:
        """Primitives of the derivatives of `bwd` and `jvp`; without any, these are decomposed."""
        names = [f"primitives::{self.name}_{suffix}" for suffix in ("pairing", "bwd_jvp")]
        return tuple(registered_primitives()[name] for name in names if name in registered_primitives())

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
            shape = sample.shape if position == 0 else self.parameter_shape(sample, name)
            values = normal(shape, seed + position, mean=0.5)
            if name in self.positive:
                values = 0.5 + values.abs()
            values = values.to(device, dtype if position == 0 or name in self.like_first else parameter_dtype)
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


def make_options(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


def make_samples(
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
