"""Properties of every op, as functions of one record: every implementation is held to the same.

Public functions are held to the definition in float64, to the second order. The calls of primitives that they make are
each held to the reference in float64, which the former ties to the definition, and to what a compiler is told of them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from perf.ops.record import Op
from perf.ops.samples import LAYOUTS, Sample
from tests.call_properties import Call, CallRecorder, distinct, parts
from tests.support import assert_close, coarsest, like, subsets


def leaves(inputs: dict[str, Tensor | None], names: Sequence[str]) -> dict[str, Tensor | None]:
    """`inputs` with the named ones requiring grad; strides stay."""
    return {n: v.detach().requires_grad_() if n in names and v is not None else v for n, v in inputs.items()}


def output_dtype(case: Op, sample: Sample, x: Tensor) -> torch.dtype:
    """Dtype of `y`: the `dtype` option where there is one, else that of `x`."""
    return dict(sample.options).get("dtype") or x.dtype


def check_outputs(case: Op, sample: Sample, inputs: dict[str, Tensor | None]) -> None:
    """All outputs have the value of the definition; `y` has the dtype asked for, state that of the state given."""
    actual, expected = case.outputs(inputs, sample), case.true_outputs(inputs, sample)
    assert len(actual) == len(expected)
    state_dtypes = [v.dtype for n, v in inputs.items() if n not in case.differentiable and v is not None]
    dtypes = [output_dtype(case, sample, inputs["x"]), *state_dtypes]
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert_close(got, want, dtype=dtypes[i], what=f"output {i}")


def cotangent_layout(sample: Sample) -> str:
    """Another layout than that of the arguments."""
    return LAYOUTS[(LAYOUTS.index(sample.layout) + 1) % len(LAYOUTS)]


def check_not_finite(case: Op, value: float, device: torch.device) -> None:
    """One element of x is NaN or infinite. Torch's own op says where: the definition overflows in more places."""
    inputs = case.inputs(case.small, torch.float32, device)
    inputs["x"].view(-1)[1] = value
    y = case.outputs(inputs, case.small)[0]
    # -inf is a probability of 0, and 0 behind a ReLU; a row of attention whose scores are all -inf sees no key.
    names = ("attention", "softmax", "batch_norm_relu_eval")
    assert not y.isfinite().all() or (value == -torch.inf and case.name in names)
    expected = case.torch_function(*inputs.values(), **dict(case.small.options))
    torch.testing.assert_close(y, expected, equal_nan=True)


def check_vjp(case: Op, sample: Sample, inputs: dict[str, Tensor | None], names: Sequence[str]) -> None:
    """Cotangents of the arguments `names` have the value of the definition's, in the dtypes of the arguments."""
    ours, theirs = leaves(inputs, names), leaves({n: v if v is None else v.double() for n, v in inputs.items()}, names)
    y, true_y = case.outputs(ours, sample)[0], case.true_outputs(theirs, sample)[0]
    y_bar = like(y, seed=7, layout=cotangent_layout(sample))
    actual = torch.autograd.grad(y, [ours[n] for n in names], y_bar)
    expected = torch.autograd.grad(true_y, [theirs[n] for n in names], y_bar.to(true_y.dtype))
    for name, got, want in zip(names, actual, expected, strict=True):
        dtype = inputs[name].dtype
        # Through dtype= the cotangent passes the coarser of two dtypes.
        narrow = [y.dtype] if "dtype" in dict(sample.options) else []
        assert_close(got, want, dtype=dtype, precision=coarsest(dtype, *narrow), what=f"{name}_bar")


def check_jvp(case: Op, sample: Sample, inputs: dict[str, Tensor | None], names: Sequence[str]) -> None:
    """The tangent of `y` for tangents of the arguments `names` alone has the value of the definition's.

    By one call with the value, where there is such an operator, and by the jvp rule, as where reverse mode records too.
    """
    # torch refuses a dense tangent of an expanded primal, so tangents share the layout of their primals.
    dots = {n: like(inputs[n], seed=11 + i, layout=sample.layout) for i, n in enumerate(names)}
    found = []
    for primals in [inputs, *[leaves(inputs, names)] * (case.fwd_jvp is not None)]:
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(v, dots[n]) if n in dots else v for n, v in primals.items()}
            found.append(forward_ad.unpack_dual(case.outputs(duals, sample)[0]))
    primals = tuple(inputs[n].double() for n in names)
    tangents = tuple(dots[n].double() for n in names)
    _, expected = torch.func.jvp(case.of(names, inputs, sample, true=True), primals, tangents)
    for (y, y_dot), way in zip(found, ("first call", "jvp rule"), strict=False):
        assert_close(y_dot, expected, dtype=y.dtype, what=f"y_dot, {way}")


def second_derivatives(
    case: Op,
    function: Callable[..., Tensor],
    primals: Sequence[Tensor],
    dots: Sequence[Tensor],
    y_bar: Tensor,
    y_bar_dot: Tensor,
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
    if case.jvp.has_rule("jvp"):
        # Tangents that have tangents, as behind another function; of one alone, nestings take it.
        y_dot_dot = torch.func.jvp(jvp_of, (primals, dots), (dots, primals))[1]
        yield "jvp of jvp", (y_dot_dot,), (y_bar,)


def directions(case: Op, sample: Sample, inputs: dict[str, Any], names: Sequence[str]) -> tuple:
    """Primals, tangents of the layout of their primals (torch refuses others), cotangent and its tangent."""
    primals = [inputs[name] for name in names]
    dots = [like(inputs[name], seed=11 + i, layout=sample.layout) for i, name in enumerate(names)]
    shaped = torch.empty_like(inputs["x"], dtype=output_dtype(case, sample, inputs["x"]))
    layout = cotangent_layout(sample)
    return primals, dots, like(shaped, seed=7, layout=layout), like(shaped, seed=8, layout=layout)


@functools.lru_cache(maxsize=2)
def true_second_derivatives(
    case: Op, sample: Sample, dtype: torch.dtype, device: torch.device, names: tuple[str, ...]
) -> list:
    """`second_derivatives` of the definition, in float64; each is asked for by one backend after the other."""
    inputs = case.inputs(sample, dtype, device)
    primals, dots, *bars = directions(case, sample, inputs, names)
    wide = ([value.double() for value in values] for values in (primals, dots, bars))
    wide_primals, wide_dots, wide_bars = wide
    return list(
        second_derivatives(case, case.of(names, inputs, sample, true=True), wide_primals, wide_dots, *wide_bars)
    )


def second_order(
    case: Op, sample: Sample, dtype: torch.dtype, device: torch.device, names: Sequence[str]
) -> tuple[list, list[Call]]:
    """All second derivatives in the arguments `names`, and the calls of primitives that these make.

    Those of first order are among the calls, and none is there twice. A call that gives value and tangent comes with
    the two that it stands for.
    """
    inputs = case.inputs(sample, dtype, device)
    with CallRecorder() as recorder:
        found = list(second_derivatives(case, case.of(names, inputs, sample), *directions(case, sample, inputs, names)))
    return found, distinct(with_parts(case, recorder.calls))


def check_second_order(
    case: Op, sample: Sample, dtype: torch.dtype, device: torch.device, names: Sequence[str]
) -> list[Call]:
    """All second derivatives in the arguments `names` have the value of the definition's; the calls that these make."""
    ours, calls = second_order(case, sample, dtype, device, names)
    theirs = true_second_derivatives(case, sample, dtype, device, tuple(names))
    # Through dtype= derivatives pass the coarser of two dtypes, and through what an operator rounds that of its output.
    asked = dict(sample.options).get("dtype")
    narrow = [asked or dtype] if asked or not case.rounds_once else []
    for (what, actual, of), (_, expected, _) in zip(ours, theirs, strict=True):
        for i, (got, want, value) in enumerate(zip(actual, expected, of, strict=True)):
            precision = coarsest(value.dtype, *narrow)
            assert_close(got, want, dtype=value.dtype, precision=precision, order=2, what=f"{what}, result {i}")
    return calls


def lie_anew(samples: Iterable[Sample]) -> list[Sample]:
    """Samples with a layout, an option, an absent argument or mixed dtypes that none before has.

    How results lie, which a compiler is told, follows from these and not from sizes.
    """
    seen, found = set(), []
    for sample in samples:
        kinds = {(sample.layout, len(sample.shape)), *sample.options, *sample.absent, sample.mixed}
        found += [sample] * (not kinds <= seen)
        seen |= kinds
    return found


def with_parts(case: Op, calls: Sequence[Call]) -> Iterator[Call]:
    """`calls`, each that gives value and tangent followed by the two that it stands for."""
    for call in calls:
        yield call
        if case.fwd_jvp is not None and call.overload is case.fwd_jvp.overload:
            yield from parts(call, case.forward, case.jvp)


def vjp_call(case: Op, sample: Sample, inputs: dict[str, Tensor | None], names: Sequence[str]) -> Call:
    """The call of the backward primitive for cotangents of the arguments `names`."""
    wanted = leaves(inputs, names)
    y = case.outputs(wanted, sample)[0]
    with CallRecorder() as recorder:
        torch.autograd.grad(y, [wanted[n] for n in names], like(y, seed=7, layout=cotangent_layout(sample)))
    (call,) = recorder.calls
    return call


def jvp_call(case: Op, sample: Sample, inputs: dict[str, Tensor | None], names: Sequence[str]) -> Call:
    """The call of the jvp primitive for tangents of the arguments `names`."""
    with forward_ad.dual_level(), CallRecorder() as recorder:
        dots = {n: like(inputs[n], seed=3, layout=sample.layout) for n in names}
        duals = {n: forward_ad.make_dual(v, dots[n]) if n in dots else v for n, v in inputs.items()}
        case.outputs(duals, sample)
    # The forward call comes first; of a linear op it is one of the same primitive.
    *_, call = [c for c in with_parts(case, recorder.calls) if c.overload is case.jvp.overload]
    return call


def recorded_calls(case: Op, sample: Sample, inputs: dict[str, Tensor | None]) -> list[Call]:
    """Forward, vjp and jvp calls, for each perturbable argument alone and all together."""
    with CallRecorder() as recorder:
        case.outputs(inputs, sample)
    names = case.perturbable(sample)
    chosen = [s for s in subsets(names) if len(s) in (1, len(names))]
    vjps = [vjp_call(case, sample, inputs, subset) for subset in chosen]
    return [*recorder.calls, *vjps, *[jvp_call(case, sample, inputs, subset) for subset in chosen]]


def tiny_function(case: Op, device: torch.device) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """`y` of the tiny sample as a function of its differentiable arguments, and these."""
    inputs, names = case.inputs(case.tiny, torch.float64, device), case.perturbable(case.tiny)
    return case.of(names, inputs, case.tiny), tuple(inputs[name] for name in names)
