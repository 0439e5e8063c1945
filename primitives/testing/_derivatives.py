"""Properties of derivatives, in double precision: against differences, against one another, and in every nesting."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from primitives.testing._compare import (
    DIFFERENCE_TOLERANCE,
    IDENTITY_TOLERANCE,
    ROUNDING_OF_DIFFERENCES,
    STEP,
    NotApplicableError,
    Record,
    all_like,
    contiguous,
    directions,
    largest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from primitives.testing._subject import Subject

    Function = Callable[..., tuple[Tensor, ...]]

# Each argument alone, as long as there are not more.
MAX_ALONE = 12


def require(subject: Subject, *kinds: str) -> None:
    """Raise `NotApplicableError` where one of the modes does not exist."""
    for kind in kinds:
        reason = subject.missing(kind)
        if reason is not None:
            raise NotApplicableError(reason)


def alone_and_together(count: int) -> list[tuple[int, ...]]:
    """Each of `count` things by itself, and all of them."""
    alone = [(i,) for i in range(count)] if 1 < count <= MAX_ALONE else []
    return [*alone, tuple(range(count))]


def differences(function: Function, inputs: Sequence[Tensor], dots: Sequence[Tensor]) -> list[Tensor]:
    """Central difference of fourth order of `function` along `dots`."""

    def at(step: float) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(
                y.detach() for y in function(*[x.detach() + step * dot for x, dot in zip(inputs, dots, strict=True)])
            )

    near, far = (list(zip(at(step), at(-step), strict=True)) for step in (STEP, 2 * STEP))
    return [(8 * (a - b) - (c - d)) / (12 * STEP) for (a, b), (c, d) in zip(near, far, strict=True)]


def inner(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Real part of the inner product, over all elements."""
    return sum(((x.conj() * y).real.sum() for x, y in zip(xs, ys, strict=True)), torch.zeros((), dtype=torch.float64))


def finite(x: Tensor) -> Tensor:
    """`x` with zeros in the place of what is not finite."""
    return torch.where(x.isfinite(), x, torch.zeros_like(x))


def size(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> float:
    """Sum of the magnitudes of the products of all elements."""
    return inner([x.detach().abs() for x in xs], [y.detach().abs() for y in ys]).item()


def pullback(function: Function, inputs: Sequence[Tensor], bars: Sequence[Tensor], *, graph: bool = False) -> list:
    """Cotangents of `inputs` by `torch.autograd.grad`; zeros for what nothing depends on."""
    pairs = [(y, bar) for y, bar in zip(function(*inputs), bars, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    results, bars = [y for y, _ in pairs], [bar for _, bar in pairs]
    return list(torch.autograd.grad(results, inputs, bars, create_graph=graph, materialize_grads=True))


def pushforward(function: Function, inputs: Sequence[Tensor], dots: Sequence[Tensor | None]) -> list[Tensor]:
    """Tangents of the results by `torch.autograd.forward_ad`; `None` among `dots` is no tangent at all."""
    with forward_ad.dual_level():
        duals = [x if d is None else forward_ad.make_dual(x, d) for x, d in zip(inputs, dots, strict=True)]
        pairs = [forward_ad.unpack_dual(y) for y in function(*duals)]
        return [torch.zeros_like(y) if dot is None else dot for y, dot in pairs]


def leaves(inputs: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
    """Copies of `inputs`, of which the chosen ones require grad."""
    return [contiguous(x).requires_grad_(i in chosen) for i, x in enumerate(inputs)]


def names(subject: Subject, chosen: Sequence[int]) -> str:
    """The chosen differentiable arguments, for errors."""
    return " and ".join(subject.active_labels[i] for i in chosen)


def one_direction(dots: Sequence[Tensor], i: int) -> list[Tensor]:
    """`dots` with zeros for all but number `i`."""
    return [dot if j == i else torch.zeros_like(dot) for j, dot in enumerate(dots)]


def allowed_difference(want: float, value: float) -> float:
    """What may lie between a derivative and a difference quotient of numbers as large as `value`."""
    return DIFFERENCE_TOLERANCE * want + ROUNDING_OF_DIFFERENCES * max(value, 1.0)


# First order.


def check_vjp(subject: Subject, record: Record, when: str = "") -> None:
    """Cotangents, wanted one at a time and all together, against differences of the definition."""
    truth = subject.function(reference=subject.definition is not None)
    function, active = subject.function(), subject.active
    values = truth(*active)
    bars, dots = all_like(values, 1), directions(active, 2)
    quotients = [differences(truth, active, one_direction(dots, i)) for i in range(len(active))]
    wants = [inner(bars, quotient) for quotient in quotients]
    for chosen in alone_and_together(len(active)):
        inputs = leaves(active, chosen)
        wanted = [inputs[i] for i in chosen]

        def of_wanted(*_: Tensor, inputs: Sequence[Tensor] = inputs) -> tuple[Tensor, ...]:
            return function(*inputs)

        for i, bar in zip(chosen, pullback(of_wanted, wanted, bars), strict=True):
            what = f"the cotangent of {subject.active_labels[i]} along a random direction{when}"
            if len(chosen) < len(active):
                what += " (the only one that is wanted)"
            scale = size([finite(bar)], [dots[i]])
            record.within(what, inner([bar], [dots[i]]), wants[i], allowed_difference(scale, size(bars, values)))

    if len(values) > 1:
        _check_single_cotangents(subject, record, function, bars, dots, quotients, values, when)


def _check_single_cotangents(
    subject: Subject,
    record: Record,
    function: Function,
    bars: Sequence[Tensor],
    dots: Sequence[Tensor],
    quotients: Sequence[Sequence[Tensor]],
    values: Sequence[Tensor],
    when: str,
) -> None:
    """Cotangents where only one result is used, against the differences along `dots`: the others may be `None`."""
    everything = range(len(subject.active))
    for number, bar in enumerate(bars[:MAX_ALONE]):

        def one_result(*inputs: Tensor, number: int = number) -> tuple[Tensor]:
            return (function(*inputs)[number],)

        gots = pullback(one_result, leaves(subject.active, everything), [bar])
        for i, got in enumerate(gots):
            what = f"the cotangent of {subject.active_labels[i]} along a random direction{when}"
            what += f" (with only {subject.result_labels[number]} used)"
            scale = size([finite(got)], [dots[i]])
            want = inner([bar], [quotients[i][number]])
            record.within(what, inner([got], [dots[i]]), want, allowed_difference(scale, size([bar], [values[number]])))


def check_jvp(subject: Subject, record: Record, when: str = "") -> None:
    """Tangents, for tangents of one argument at a time and of all together, against differences of the definition."""
    truth = subject.function(reference=subject.definition is not None)
    function, active = subject.function(), subject.active
    dots, values = directions(active, 2), truth(*active)
    for chosen in alone_and_together(len(active)):
        given = [dot if i in chosen else None for i, dot in enumerate(dots)]
        direction = [dot if i in chosen else torch.zeros_like(dot) for i, dot in enumerate(dots)]
        wants = differences(truth, active, direction)
        gots = pushforward(function, [contiguous(x) for x in active], given)
        for label, got, want, value in zip(subject.result_labels, gots, wants, values, strict=True):
            what = f"the tangent of {label} for a tangent of {names(subject, chosen)}{when}"
            record.within(what, got, want, allowed_difference(largest(want), largest(value)))


def gradcheck(subject: Subject, record: Record) -> None:
    """First-order vjp against central differences."""
    require(subject, "vjp")
    check_vjp(subject.double(), record)


def jvp_against_differences(subject: Subject, record: Record) -> None:
    """First-order jvp against central differences."""
    require(subject, "jvp")
    check_jvp(subject.double(), record)


def transpose_identity(subject: Subject, record: Record) -> None:
    """`<y_bar, J x_dot> = <J^T y_bar, x_dot>`."""
    require(subject, "vjp", "jvp")
    subject = subject.double()
    function, active = subject.function(), subject.active
    dots = all_like(active, 2)
    y_dots = pushforward(function, [contiguous(x) for x in active], dots)
    y_bars = all_like(y_dots, 1)
    x_bars = pullback(function, leaves(active, range(len(active))), y_bars)
    allowed = IDENTITY_TOLERANCE * max(size(y_bars, y_dots), size(x_bars, dots)) + 1e-12
    what = "<y_bar, J x_dot> (from jvp), compared with <J^T y_bar, x_dot> (from vjp),"
    record.within(what, inner(y_bars, y_dots), inner(x_bars, dots), allowed)


# Second order.


def gradgradcheck(subject: Subject, record: Record) -> None:
    """Derivatives of the vjp, in the inputs and in the cotangents, against its differences."""
    if record.order < 2:
        raise NotApplicableError(f"order={record.order}")
    require(subject, "vjp")
    subject = subject.double()
    # Only the reference computes what is cached of an argument again.
    base = subject.function(reference=subject.has_cached)
    active, function = subject.active, subject.function()
    count = len(active)
    bars = all_like(function(*active), 1)
    weights, dots = all_like(active, 3), [*directions(active, 2), *all_like(bars, 4)]

    def contracted(function: Function, *values: Tensor, graph: bool = False) -> tuple[Tensor]:
        with torch.enable_grad():
            inputs = [v if v.requires_grad else v.detach().requires_grad_() for v in values[:count]]
            return (inner(pullback(function, inputs, values[count:], graph=graph), weights),)

    inputs = [contiguous(x).requires_grad_() for x in (*active, *bars)]
    (total,) = contracted(function, *inputs, graph=True)
    gots = pullback(lambda *_: (total,), inputs, [torch.ones_like(total)])
    labels = [*subject.active_labels, *[f"the cotangent of {label}" for label in subject.result_labels]]
    for i, (label, got) in enumerate(zip(labels, gots, strict=True)):
        (want,) = differences(lambda *v: contracted(base, *v), [*active, *bars], one_direction(dots, i))
        scale = size([finite(got)], [dots[i]])
        what = f"the second derivative (vjp of vjp) in {label} along a random direction"
        record.within(what, inner([got], [dots[i]]), want, allowed_difference(scale, abs(total.item())))


# Every nesting.


def nest(function: Function, word: str, along: Sequence[Sequence[Tensor]]) -> Function:
    """`function` under one transform per letter of `word`, the last one first: `f` is a jvp, `r` a vjp.

    `along` holds the tangents or cotangents of each letter.
    """
    for letter, direction in zip(reversed(word), reversed(along), strict=True):
        function = _transformed(function, letter, direction)
    return function


def _transformed(function: Function, letter: str, direction: Sequence[Tensor]) -> Function:
    if letter == "f":
        return lambda *x: torch.func.jvp(function, x, tuple(direction))[1]
    return lambda *x: torch.func.vjp(function, *x)[1](tuple(direction))


def words(subject: Subject, record: Record) -> Iterator[str]:
    """Every word of at most `order` letters over the modes that exist."""
    missing = {letter: subject.missing(kind) for letter, kind in (("f", "jvp"), ("r", "vjp"))}
    letters = [letter for letter, reason in missing.items() if reason is None]
    if not letters:
        raise NotApplicableError(", ".join(dict.fromkeys(reason for reason in missing.values() if reason)))
    for letter in missing.keys() - set(letters):
        record.note(f"no word with {'forward' if letter == 'f' else 'reverse'} mode: {missing[letter]}")
    for length in range(1, record.order + 1):
        for word in itertools.product(letters, repeat=length):
            yield "".join(word)


def nestings(subject: Subject, record: Record) -> None:
    """Every nesting of forward and reverse mode, against that of the reference, or against differences."""
    wide = subject.double()
    for word in words(subject, record):
        active = wide.active
        along: list[Sequence[Tensor]] = []
        shaped: Sequence[Tensor] = wide.function()(*active)
        for i, letter in enumerate(reversed(word)):
            along.insert(0, directions(active, 11 + i) if letter == "f" else all_like(shaped, 11 + i))
            shaped = shaped if letter == "f" else active
        gots = nest(wide.function(), word, along)(*active)
        if not _agrees_with_reference(wide, word, along, gots, record):
            _check_word_by_differences(wide, word, along, gots, record)


def _spelled(word: str) -> str:
    return " of ".join("jvp" if letter == "f" else "vjp" for letter in word)


def _result_labels(subject: Subject, word: str) -> list[str]:
    if "r" not in word:
        return [f"the tangent of {label}" for label in subject.result_labels]
    return [f"the derivative in {label}" for label in subject.active_labels]


def _agrees_with_reference(
    subject: Subject, word: str, along: Sequence[Sequence[Tensor]], gots: Sequence[Tensor], record: Record
) -> bool:
    """Whether nested modes of the reference give the same; where not, torch's derivatives of it may be wrong."""
    own = any(subject.from_reference("jvp" if letter == "f" else "vjp") for letter in word)
    if subject.definition is None or own:
        return False
    attempt = Record(record.order, record.tolerances)
    try:
        wants = nest(subject.function(reference=True), word, along)(*subject.active)
        for got, want in zip(gots, wants, strict=True):
            attempt.within(word, got, want, DIFFERENCE_TOLERANCE * max(largest(want), 1.0))
    except Exception:
        return False
    if attempt.error is not None and attempt.error >= (record.error or 0.0):
        record.error, record.allowed = attempt.error, attempt.allowed
    return True


def _check_word_by_differences(
    subject: Subject, word: str, along: Sequence[Sequence[Tensor]], gots: Sequence[Tensor], record: Record
) -> None:
    """The outermost letter of `word` against differences of the rest of it."""
    reference = subject.has_cached or (len(word) == 1 and subject.definition is not None)
    inside = nest(subject.function(reference=reference), word[1:], along[1:])
    active, values = subject.active, inside(*subject.active)
    if word[0] == "f":
        wants = differences(inside, active, along[0])
        for label, got, want, value in zip(_result_labels(subject, word), gots, wants, values, strict=True):
            what = f"{_spelled(word)}: {label}"
            record.within(what, got, want, allowed_difference(largest(want), largest(value)))
        return
    dots = directions(active, 2)
    for i, (label, got) in enumerate(zip(_result_labels(subject, word), gots, strict=True)):
        want = inner(along[0], differences(inside, active, one_direction(dots, i)))
        scale = size([finite(got)], [dots[i]])
        what = f"{_spelled(word)}: {label} along a random direction"
        record.within(what, inner([got], [dots[i]]), want, allowed_difference(scale, size(along[0], values)))
