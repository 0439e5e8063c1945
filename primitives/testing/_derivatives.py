"""Properties of derivatives: against differences, against one another, in every nesting, and at the given dtypes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from primitives._core.backend import current_backend, use_backend
from primitives.testing._compare import NotApplicableError, Record, all_like, clone, contiguous, largest, widened
from primitives.testing._subject import Subject

Function = Callable[..., tuple[Tensor, ...]]

# A central difference of fourth order with step 1e-4 leaves about 1e-16 of the fifth derivative and 1e-12 of rounding:
# the first number is relative to the derivative, and far above what a right rule needs; the second to the value.
STEP = 1e-4
# A step is at most this part of an argument, so that functions such as sqrt are smooth within it; but of an argument
# smaller than the floor, which a difference of fourth order would not resolve from rounding, it is that of the floor.
FLOOR = 1e-5
DIFFERENCE_TOLERANCE = 1e-6
ROUNDING_OF_DIFFERENCES = 1e-9
# Relative to the product of the norms, float64.
IDENTITY_TOLERANCE = 1e-10
# A derivative passes through more roundings than a value: its tolerance is this many times that of a value.
DERIVATIVE_FACTOR = 2.0
# Where torch differentiates the reference at the same dtypes, errors this many times as large as its are allowed.
REFERENCE_FACTOR = 4.0


def directions(xs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Tangents of `xs` along which differences are taken: random, and small where an element of `xs` is small."""
    return [
        dot * torch.where(x == 0, torch.ones_like(x.abs()), x.abs().clamp(FLOOR, 1.0))
        for x, dot in zip(xs, all_like(xs, seed), strict=True)
    ]


def pullback(results: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Cotangents of `inputs` by `torch.autograd.grad`; zeros for what nothing depends on."""
    pairs = [(y, y_bar) for y, y_bar in zip(results, cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    results, cotangents = zip(*pairs, strict=True)
    return list(torch.autograd.grad(results, inputs, cotangents, materialize_grads=True))


def pushforward(function: Function, inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor]:
    """Tangents of the results by `torch.autograd.forward_ad`; `None` among `tangents` stands for none."""
    with forward_ad.dual_level():
        duals = [x if d is None else forward_ad.make_dual(x, d) for x, d in zip(inputs, tangents, strict=True)]
        pairs = [forward_ad.unpack_dual(y) for y in function(*duals)]
        return [torch.zeros_like(y) if y_dot is None else y_dot for y, y_dot in pairs]


@dataclasses.dataclass(frozen=True)
class Mode:
    """Forward or reverse mode: `"vjp"` or `"jvp"`, and what it gives."""

    kind: str
    result: str

    def along(self, subject: Subject, seed: int = 1) -> list[Tensor]:
        """Random cotangents of the results, or tangents of the arguments."""
        shaped = subject.function()(*map(clone, subject.active)) if self.kind == "vjp" else subject.active
        return all_like(shaped, seed)

    def inputs(self, subject: Subject) -> list[Tensor]:
        """Copies of the arguments, with the same strides."""
        return [clone(x).requires_grad_(self.kind == "vjp") for x in subject.active]

    def of(
        self, subject: Subject, along: Sequence[Tensor], inputs: list[Tensor] | None = None, *, reference: bool = False
    ) -> list[Tensor]:
        """Cotangents of the arguments, or tangents of the results."""
        function, inputs = subject.function(reference=reference), inputs or self.inputs(subject)
        return (
            pullback(function(*inputs), inputs, along) if self.kind == "vjp" else pushforward(function, inputs, along)
        )

    def nested(self, function: Function, count: int) -> Function:
        """The derivative of a function of `count` tensors, a function of tangents or cotangents too; torch nests it."""
        if self.kind == "jvp":
            return lambda *values: torch.func.jvp(function, values[:count], values[count:])[1]
        return lambda *values: torch.func.vjp(function, *values[:count])[1](values[count:])

    def labels(self, subject: Subject) -> list[str]:
        """Names of what it gives."""
        names = subject.active_labels if self.kind == "vjp" else subject.result_labels
        return [f"the {self.result} of {name}" for name in names]


REVERSE, FORWARD = Mode("vjp", "cotangent"), Mode("jvp", "tangent")


def modes(subject: Subject, record: Record | None = None) -> list[Mode]:
    """Those that exist; a record takes a note of the others, and none at all is then not applicable."""
    reasons = {mode: subject.missing(mode.kind) for mode in (FORWARD, REVERSE)}
    missing = {mode: reason for mode, reason in reasons.items() if reason is not None}
    if record is not None:
        if len(missing) == len(reasons):
            raise NotApplicableError(", ".join(dict.fromkeys(missing.values())))
        for mode, reason in missing.items():
            record.note(f"no {mode.kind}: {reason}")
    return [mode for mode in reasons if mode not in missing]


def require(subject: Subject, *required: Mode) -> None:
    """Raise `NotApplicableError` where one of the modes does not exist."""
    for mode in required:
        if (reason := subject.missing(mode.kind)) is not None:
            raise NotApplicableError(reason)


def alone_and_together(count: int) -> list[tuple[int, ...]]:
    """Each of `count` things by itself, and all of them."""
    alone = [(i,) for i in range(count)] if count > 1 else []
    return [*alone, tuple(range(count))]


@dataclasses.dataclass(frozen=True)
class _Smooth:
    """A function of tensors and the one whose differences are the truth, with names of inputs and results."""

    function: Function
    truth: Function
    inputs: list[Tensor]
    names: list[str]
    results: list[str]

    @classmethod
    def of(cls, subject: Subject) -> _Smooth:
        functions = subject.function(), subject.function(reference=True)
        return cls(*functions, subject.active, subject.active_labels, subject.result_labels)

    def under(self, mode: Mode, seed: int, *, cached: bool) -> _Smooth:
        """The derivative, as a function of the tangents or cotangents too; held to its own differences."""
        along = directions(self.inputs, seed) if mode is FORWARD else all_like(self.function(*self.inputs), seed)
        moved, given = [[f"the {mode.result} of {name}" for name in names] for names in (self.names, self.results)]
        further, results = (moved, given) if mode is FORWARD else (given, moved)
        # Only the reference computes what is cached of an argument again.
        count, truth = len(self.inputs), self.truth if cached else self.function
        functions = mode.nested(self.function, count), mode.nested(truth, count)
        return _Smooth(*functions, [*self.inputs, *along], [*self.names, *further], results)

    def differences(self, dots: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
        """Central difference of fourth order along the chosen ones of `dots`."""
        along = [x_dot if i in chosen else torch.zeros_like(x_dot) for i, x_dot in enumerate(dots)]

        def at(step: float) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return self.truth(*[x.detach() + step * x_dot for x, x_dot in zip(self.inputs, along, strict=True)])

        values = zip(*[at(factor * STEP) for factor in (1, -1, 2, -2)], strict=True)
        return [((8 * (a - b) - (c - d)) / (12 * STEP)).detach() for a, b, c, d in values]


def _inner(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Real part of the inner product, over all elements."""
    return sum(((x.conj() * y).real.sum() for x, y in zip(xs, ys, strict=True)), torch.zeros((), dtype=torch.float64))


def _size(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> float:
    """Sum of the magnitudes of the products of all elements, those that are finite."""
    magnitudes = ([torch.where(v.isfinite(), v, 0.0).detach().abs() for v in values] for values in (xs, ys))
    return _inner(*magnitudes).item()


def _allowed(derivative: float, value: float) -> float:
    """The distance allowed between a derivative and a difference quotient of numbers as large as `value`."""
    return DIFFERENCE_TOLERANCE * derivative + ROUNDING_OF_DIFFERENCES * max(value, 1.0)


def _hold_vjp(smooth: _Smooth, record: Record, when: str = "", *, alone: bool = True) -> None:
    """Cotangents against differences: of all inputs for all results, and of each alone and for each result alone."""
    values, dots = smooth.truth(*smooth.inputs), directions(smooth.inputs, 2)
    cotangents, count = all_like(values, 1), len(smooth.inputs)
    # A rule may be given None for the cotangents of results that are not used.
    cases = [(chosen, slice(None)) for chosen in (alone_and_together(count) if alone else [tuple(range(count))])]
    if alone and len(values) > 1:
        cases += [(tuple(range(count)), slice(number, number + 1)) for number in range(len(values))]
    for chosen, used in cases:
        limits = " (the only one that is wanted)" if len(chosen) < count else ""
        if used.start is not None:
            limits = f" (with only {smooth.results[used.start]} used)"
        inputs = [contiguous(x).requires_grad_(i in chosen) for i, x in enumerate(smooth.inputs)]
        gots = pullback(smooth.function(*inputs)[used], [inputs[i] for i in chosen], cotangents[used])
        size = _size(cotangents[used], values[used])
        for i, got in zip(chosen, gots, strict=True):
            want = _inner(cotangents[used], smooth.differences(dots, [i])[used])
            what = f"the cotangent of {smooth.names[i]} along a random direction{when}{limits}"
            record.within(what, _inner([got], [dots[i]]), want, _allowed(_size([got], [dots[i]]), size))


def _hold_jvp(smooth: _Smooth, record: Record, when: str = "", *, alone: bool = True) -> None:
    """Tangents against differences: for tangents of all inputs, and of each alone."""
    values, dots, count = smooth.truth(*smooth.inputs), directions(smooth.inputs, 2), len(smooth.inputs)
    for chosen in alone_and_together(count) if alone else [tuple(range(count))]:
        given = [x_dot if i in chosen else None for i, x_dot in enumerate(dots)]
        inputs = tuple(map(contiguous, smooth.inputs))
        if alone:
            gots = pushforward(smooth.function, inputs, given)
        else:
            # Forward mode that torch nests.
            gots = torch.func.jvp(smooth.function, inputs, tuple(dots))[1]
        names = " and ".join(smooth.names[i] for i in chosen)
        for label, got, want, value in zip(smooth.results, gots, smooth.differences(dots, chosen), values, strict=True):
            what = f"the tangent of {label} for a tangent of {names}{when}"
            record.within(what, got, want, _allowed(largest(want), largest(value)))


def against_differences(mode: Mode, subject: Subject, record: Record, when: str = "") -> None:
    """First derivatives in one mode against differences of the definition."""
    require(subject, mode)
    (_hold_vjp if mode is REVERSE else _hold_jvp)(_Smooth.of(subject.double()), record, when)


def nestings(subject: Subject, record: Record) -> None:
    """Every nesting of forward and reverse mode: its outermost mode against differences of the rest."""
    existing, wide = modes(subject, record), subject.double()
    if record.order < 2:
        raise NotApplicableError(f"order={record.order}")
    rest = {"": _Smooth.of(wide)}
    for order in range(2, record.order + 1):
        rest = {
            f"{mode.kind} of {word}".removesuffix(" of "): smooth.under(mode, 9 + order, cached=wide.has_cached)
            for word, smooth in rest.items()
            for mode in existing
        }
        for (word, smooth), mode in itertools.product(rest.items(), existing):
            hold = _hold_vjp if mode is REVERSE else _hold_jvp
            hold(smooth, record, f", in the {mode.kind} of {word}", alone=False)


def transpose_identity(subject: Subject, record: Record) -> None:
    """`<y_bar, J x_dot> = <J^T y_bar, x_dot>`, which holds to the last digits of double precision."""
    require(subject, REVERSE, FORWARD)
    subject = subject.double()
    cotangents, tangents = REVERSE.along(subject, 1), FORWARD.along(subject, 2)
    pushed, pulled = FORWARD.of(subject, tangents), REVERSE.of(subject, cotangents)
    allowed = IDENTITY_TOLERANCE * max(_size(cotangents, pushed), _size(pulled, tangents)) + 1e-12
    what = "<y_bar, J x_dot> (from jvp), compared with <J^T y_bar, x_dot> (from vjp),"
    record.within(what, _inner(cotangents, pushed), _inner(pulled, tangents), allowed)


def derivatives_at_given_dtypes(subject: Subject, record: Record) -> None:
    """First derivatives at the dtypes of the arguments, against those in double precision."""
    narrow, wide = subject.map(contiguous), subject.double()
    for mode in modes(subject, record):
        along = mode.along(narrow, 1)
        # The triton backend is held to the derivatives that the other properties hold to differences.
        with use_backend("auto") if current_backend() == "triton" else contextlib.nullcontext():
            wants = mode.of(wide, list(map(widened, along)))
            others = wants
            if subject.primitive is not None:
                # A reference need not be differentiable, nor run at every dtype.
                with contextlib.suppress(Exception):
                    others = mode.of(narrow, along, reference=True)
        dtypes = [x.dtype for x in subject.tensors]
        for label, got, want, other in zip(mode.labels(subject), mode.of(narrow, along), wants, others, strict=True):
            usual = DERIVATIVE_FACTOR * record.tolerance(got.dtype, *dtypes) * max(largest(want), 1.0)
            # The inexactness of the problem itself.
            slack = REFERENCE_FACTOR * largest(widened(other) - want)
            record.within(f"{label} in {got.dtype}", got, want, usual + slack)
