"""True results of each launcher: the reference of its operator in float64, which the records hold to a definition."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perf.calls import EPS, MOMENTUM, Call, operator_of
from primitives import use_backend
from primitives.kernels.runtime.chips import chip_of, use_chip
from primitives.kernels.runtime.numbers import accumulation_dtype
from primitives.ops.norms.layer_norm import NormOptions
from tests.call_properties import Call as OperatorCall
from tests.call_properties import in_float64

# Relative to the largest element, or to the number of terms of a sum over rows, positions or samples: as many roundings
# as a sum over the tested sizes can collect. The interpreter adds in sequence.
TOLERANCES = {torch.float32: 3e-6, torch.float64: 1e-13}


class Exact(NamedTuple):
    """A result in float64, and the dtype that it has to be rounded to."""

    value: Tensor
    dtype: torch.dtype


def expected(call: Call, s: Tensor | None = None) -> list[Exact]:
    """True results of a call, of shape (0,) where not wanted. With `s`, that is the sum of x and residual."""
    bound = inspect.signature(call.launcher).bind(*call.args).arguments
    given = {**NormOptions(1, EPS)._asdict(), "momentum": MOMENTUM, **bound}
    if given.get("offset", 0) is None and given["seed"] is not None:
        given["offset"] = torch.zeros_like(given["seed"])
    operator = operator_of(call.launcher.__name__, given)
    # Statistics that a launcher finds anew, as references do.
    given = {
        **dict.fromkeys(operator.spec.cached, given.get("x", given.get("s"))),
        "y_dtype": getattr(call.args[0], "dtype", None),
        **given,
    }
    true = OperatorCall(operator.overload, tuple(given[argument] for argument in operator.spec.arguments))
    with use_backend("reference"):
        narrow = true.outputs()
    if s is not None:
        summed = given | {"x": torch.zeros_like(s), "residual": s}
        true = OperatorCall(operator.overload, tuple(summed[argument] for argument in operator.spec.arguments))
    return [Exact(value, like.dtype) for value, like in zip(in_float64(true), narrow, strict=True)]


def check_values(call: Call, results: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
    """Hold the results of a call (by default of running it now) to the truth; returns them."""
    results = call.results() if results is None else results
    name, full_size = (
        call.launcher.__name__,
        max((x.numel() for x in call.tensors() if x.is_floating_point()), default=0),
    )
    is_wide = any(arg.dtype == torch.float64 for arg in call.tensors() if arg.numel() == full_size)
    arithmetic = torch.float64 if is_wide else torch.float32
    # Attention rounds its factors before it multiplies them.
    rounds = name.startswith("attention")
    true = expected(call)
    if name.startswith("add_layer_norm_fwd"):
        # The norm is that of s as it was rounded.
        of_s = expected(call, results[1])
        true = [exact if number in (1, 5) else of_s[number] for number, exact in enumerate(true)]
    for number, (actual, exact) in enumerate(zip(results, true, strict=True)):
        assert_close(actual, exact, arithmetic, full_size, f"result {number} of {name}", rounds=rounds)
    pointers = [result.data_ptr() for result in results if result.numel()]
    assert len(set(pointers)) == len(pointers), f"results of {name} share memory"
    return results


def assert_close(
    actual: Tensor,
    exact: Exact,
    arithmetic: torch.dtype = torch.float64,
    full_size: int = 0,
    what: str = "the result",
    rounds: bool = False,
) -> None:
    """The exact value rounded once, give or take the rounding of the arithmetic; of the dtype and the shape.

    With `rounds`, what is summed was rounded to the dtype.
    """
    value, dtype = exact
    assert actual.shape == value.shape, f"{what} has the shape {tuple(actual.shape)}, expected {tuple(value.shape)}"
    if not value.numel():
        return
    assert actual.dtype == dtype, f"{what} is {actual.dtype}, expected {dtype}"
    if dtype == torch.int64:
        assert torch.equal(actual, value), f"{what} differs"
        return
    finite = value[value.isfinite()].abs()
    scale = max(finite.max().item() if finite.numel() else 0.0, 1.0)
    # The parameters of a group take a sum each.
    terms = full_size / actual.numel() if actual.numel() < full_size else 0.0
    info = torch.finfo(dtype)
    tolerance = max(TOLERANCES[accumulation_dtype(dtype)], TOLERANCES[arithmetic])
    if rounds:
        # The interpreter cuts bfloat16 off, where a GPU rounds.
        tolerance = max(tolerance, info.eps * (1 + (dtype == torch.bfloat16)))
    bound = info.eps * (value.abs() + info.smallest_normal) + tolerance * max(scale, terms)
    error = (actual.double() - value).abs()
    right = (error <= bound) | (actual == value) | (actual.isnan() & value.isnan())
    assert right.all(), f"{what} is off by {error[~right].max()}, {(error / bound)[~right].max():.3g} times the bound"


def check(call: Call) -> None:
    """Hold one call to its values; on a GPU also to the same bits again, and to the plan for fewer processors."""
    first = check_values(call)
    if (device := torch.get_default_device()).type != "cuda":
        return
    # As integers: NaN differs from itself.
    bits = [[result.flatten().view(torch.uint8) for result in results] for results in (first, call.results())]
    assert all(map(torch.equal, *bits)), f"{call.launcher.__name__} differs from run to run"
    with use_chip(dataclasses.replace(chip_of(device), num_processors=3)):
        check_values(call)
