"""What the second order of every op has to satisfy, from the public function down: a continuation of `properties`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.properties import CallRecorder, cotangent_layout, output_dtype
from tests.support import assert_close, coarsest, like

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from tests.op_cases import OpCase, Sample
    from tests.properties import Call


def second_derivatives(
    function: Callable[..., Tensor], primals: Sequence[Tensor], dots: Sequence[Tensor], y_bar: Tensor, y_bar_dot: Tensor
) -> Iterator[tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Name of each way to compose two modes, its results, and the inputs that these are the derivatives of."""
    primals, dots = tuple(primals), tuple(dots)

    def vjp_of(y_bar: Tensor, *primals: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(function, *primals)[1](y_bar)

    def jvp_of(primals: tuple[Tensor, ...], dots: tuple[Tensor, ...]) -> Tensor:
        return torch.func.jvp(function, primals, dots)[1]

    yield "vjp of vjp", torch.func.vjp(vjp_of, y_bar, *primals)[1](dots), (y_bar, *primals)
    yield "jvp of vjp", torch.func.jvp(vjp_of, (y_bar, *primals), (y_bar_dot, *dots))[1], primals
    # Without a tangent of the cotangent: what a Hessian-vector product of a sum asks for.
    yield "jvp of vjp, y_bar fixed", torch.func.jvp(lambda *p: vjp_of(y_bar, *p), primals, dots)[1], primals
    primal_bars, dot_bars = torch.func.vjp(jvp_of, primals, dots)[1](y_bar)
    yield "vjp of jvp", (*primal_bars, *dot_bars), (*primals, *dots)


def _directions(case: OpCase, sample: Sample, inputs: dict[str, Any], names: Sequence[str]) -> tuple:
    """Primals, tangents of the layout of their primals (torch refuses others), cotangent and its tangent."""
    primals = [inputs[name] for name in names]
    dots = [like(inputs[name], seed=11 + i, layout=sample.layout) for i, name in enumerate(names)]
    shaped = torch.empty_like(inputs["x"], dtype=output_dtype(case, sample, inputs["x"]))
    layout = cotangent_layout(sample)
    return primals, dots, like(shaped, seed=7, layout=layout), like(shaped, seed=8, layout=layout)


def check_second_order(case: OpCase, sample: Sample, inputs: dict[str, Any], names: Sequence[str]) -> None:
    """All second derivatives with respect to the arguments `names` have the value of the definition's."""
    primals, dots, y_bar, y_bar_dot = _directions(case, sample, inputs, names)
    wide = ([value.double() for value in values] for values in (primals, dots, (y_bar, y_bar_dot)))
    wide_primals, wide_dots, wide_bars = wide
    ours = second_derivatives(case.of(names, inputs, sample), primals, dots, y_bar, y_bar_dot)
    theirs = second_derivatives(case.of(names, inputs, sample, true=True), wide_primals, wide_dots, *wide_bars)
    # Through dtype= derivatives pass the coarser of two dtypes.
    narrow = [y_bar.dtype] if "dtype" in dict(sample.options) else []
    for (what, actual, of), (_, expected, _) in zip(ours, theirs, strict=True):
        for i, (got, want, value) in enumerate(zip(actual, expected, of, strict=True)):
            precision = coarsest(value.dtype, *narrow)
            assert_close(got, want, dtype=value.dtype, precision=precision, order=2, what=f"{what}, result {i}")


def second_order_calls(case: OpCase, sample: Sample, inputs: dict[str, Any], names: Sequence[str]) -> list[Call]:
    """The calls of the second-order primitives of `case` that the second derivatives make."""
    primals, dots, y_bar, y_bar_dot = _directions(case, sample, inputs, names)
    with CallRecorder() as recorder:
        list(second_derivatives(case.of(names, inputs, sample), primals, dots, y_bar, y_bar_dot))
    overloads = [primitive.overload for primitive in case.second_order]
    return [call for call in recorder.calls if call.overload in overloads]


def fullest(calls: Sequence[Call], primitive: Any) -> Call:
    """Of the calls of `primitive`, the one with the most tensors and the most wanted outputs."""
    candidates = [call for call in calls if call.overload is primitive.overload]
    return max(
        candidates, key=lambda call: (len(call.tensors), sum(call.argument("wanted")) if "wanted" in call.names else 0)
    )
