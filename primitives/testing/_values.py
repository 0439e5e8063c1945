"""Properties of what an operator computes, at the dtypes of its arguments: values and memory."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import TYPE_CHECKING

import torch

from primitives.core.backend import current_backend
from primitives.core.dtypes import has_derivatives
from primitives.testing._compare import (
    COTANGENT_LAYOUTS,
    LAYOUTS,
    MismatchError,
    NotApplicableError,
    Record,
    all_like,
    arranged,
    contiguous,
    same_bits,
)
from primitives.testing._derivatives import leaves, names, pullback, pushforward, require
from primitives.testing._subject import clone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from primitives.testing._subject import Subject

NUM_RUNS = 3


# Against the reference.


def reference_against_kernel(subject: Subject, record: Record) -> None:
    """Results of the kernel, at their dtype, against the reference in float64."""
    if subject.primitive is None:
        raise NotApplicableError("a plain function has no reference")
    device = subject.tensors[0].device.type
    backend = current_backend()
    kind = "cuda" if device == "cuda" or backend == "triton" else device
    if backend == "reference" or kind not in subject.primitive.rules.kernels:
        raise NotApplicableError(f"no kernel for {kind}: the reference runs")
    gots, same = subject.call(*map(clone, subject.tensors)), subject.reference(*map(clone, subject.tensors))
    wide = subject.double()
    wants = wide.reference(*wide.tensors)
    if len(gots) != len(wants):
        raise MismatchError(f"the kernel returns {len(gots)} tensors, expected {len(wants)}.")
    dtypes = [x.dtype for x in subject.tensors]
    for label, got, want, narrow in zip(subject.output_labels, gots, wants, same, strict=True):
        record.dtype(label, got, narrow.dtype)
        record.close(f"{label} of the kernel", got, want, got.dtype, *(dtypes if has_derivatives(got.dtype) else ()))


# Memory layouts.


def cotangent_layouts(subject: Subject, record: Record) -> None:
    """A cotangent with other strides gives what its contiguous copy gives."""
    require(subject, "vjp")
    function, active = subject.function(), subject.active
    everything = range(len(active))
    bars = all_like(function(*map(clone, active)), 1)
    for layout in COTANGENT_LAYOUTS:
        other = [arranged(bar, layout) for bar in bars]
        gots = pullback(function, leaves(active, everything), other)
        wants = pullback(function, leaves(active, everything), [contiguous(bar) for bar in other])
        for label, got, want in zip(subject.active_labels, gots, wants, strict=True):
            record.close(f"the cotangent of {label}, given a {layout} cotangent of the result,", got, want)


def non_contiguous_inputs(subject: Subject, record: Record) -> None:
    """Arguments with other strides give what their contiguous copies give, in value and derivatives."""
    for layout in LAYOUTS:
        tensors = [arranged(x, layout) for x in subject.tensors]
        wants = subject.call(*map(contiguous, tensors))
        gots = subject.call(*map(clone, tensors))
        for label, got, want in zip(subject.output_labels, gots, wants, strict=True):
            record.close(f"{label}, given {layout} arguments,", got, want)
        for kind, (directions, derivatives) in _derivatives(subject).items():
            # torch takes no tangent whose layout its primal cannot have.
            arrange = contiguous if kind == "vjp" else functools.partial(arranged, layout=layout)
            given = [arrange(direction) for direction in directions]
            other = subject.map(functools.partial(arranged, layout=layout))
            gots = derivatives(other, given)
            wants = derivatives(other.map(contiguous), list(map(contiguous, given)))
            for i, (got, want) in enumerate(zip(gots, wants, strict=True)):
                record.close(f"result {i} of the {kind}, given {layout} arguments,", got, want)


def _derivatives(subject: Subject) -> dict[str, tuple[list[Tensor], Callable[[Subject, Sequence[Tensor]], list]]]:
    """For the modes that exist: cotangents or tangents, and what gives the first derivative for a call and these."""

    def vjp(each: Subject, bars: Sequence[Tensor]) -> list[Tensor]:
        return pullback(each.function(), [clone(x).requires_grad_() for x in each.active], [clone(bar) for bar in bars])

    def jvp(each: Subject, dots: Sequence[Tensor]) -> list[Tensor]:
        return pushforward(each.function(), [clone(x) for x in each.active], [clone(dot) for dot in dots])

    modes = {}
    if subject.missing("vjp") is None:
        modes["vjp"] = all_like(subject.function()(*map(clone, subject.active)), 1), vjp
    if subject.missing("jvp") is None:
        modes["jvp"] = all_like(subject.active, 2), jvp
    return modes


# Runs.


def _runs(subject: Subject) -> list[tuple[str, Tensor]]:
    """Everything that one run computes: results and first derivatives."""
    values = zip(subject.output_labels, subject.call(*map(clone, subject.tensors)), strict=True)
    named = [(label, x) for label, x in values if x.numel()]
    for kind, (directions, derivatives) in _derivatives(subject).items():
        labels = subject.active_labels if kind == "vjp" else subject.result_labels
        what = "cotangent" if kind == "vjp" else "tangent"
        results = derivatives(subject.map(contiguous), directions)
        named += [(f"the {what} of {label}", x) for label, x in zip(labels, results, strict=True)]
    return named


def determinism(subject: Subject, record: Record) -> None:
    """Several runs give the same bits, in value and derivatives."""
    first = _runs(subject)
    for _ in range(NUM_RUNS - 1):
        for (label, got), (_, want) in zip(_runs(subject), first, strict=True):
            if not same_bits(got, want):
                record.within(f"{label} of another run", got, want, 0.0)
                raise MismatchError(f"{label} has other bits in another run.")
    record.error, record.allowed = 0.0, 0.0


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill memory that torch hands out uninitialized with NaN (integers: the largest)."""
    previous = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined] - no stub
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined] - no stub
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined] - no stub
        torch.use_deterministic_algorithms(previous[0], warn_only=previous[1])


def uninitialized_outputs(subject: Subject, record: Record) -> None:
    """Nothing of what an operator returns is memory that it did not write."""
    plain = _runs(subject)
    if subject.definition is not None:
        wants = [x for x in subject.reference(*map(clone, subject.tensors)) if x.numel()]
        plain[: len(wants)] = [(label, want) for (label, _), want in zip(plain, wants, strict=False)]
    with poisoned_memory():
        named = _runs(subject)
    for (label, got), (_, want) in zip(named, plain, strict=True):
        unwritten = got.isnan() & ~want.isnan() if has_derivatives(got.dtype) else torch.zeros((), dtype=torch.bool)
        if got.dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
            unwritten = (got == torch.iinfo(got.dtype).max) & (got != want)
        if unwritten.any():
            place = [int(i) for i in unwritten.nonzero()[0]]
            raise MismatchError(
                f"{label} at {place} is memory that was never written, expected {want[tuple(place)].item()!r}."
            )


def aliasing_and_mutation(subject: Subject, record: Record) -> None:
    """No argument is changed and no result shares memory with one, in value and derivatives."""
    given = list(map(clone, subject.tensors))
    results = subject.call(*given)
    _unchanged(subject.labels, given, subject.tensors, "")
    if subject.primitive is None:
        record.note("a plain function may return its arguments")
    else:
        for label, y in zip(subject.output_labels, results, strict=True):
            for name, x in zip(subject.labels, given, strict=True):
                if y.numel() and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                    raise MismatchError(f"{label} shares its memory with {name}, expected memory of its own.")
    if subject.mutates:
        _check_updates(subject, results, record)
    if subject.missing("vjp") is None:
        inputs = leaves(subject.active, range(len(subject.active)))
        bars = all_like([results[i] for i in subject.outputs], 1)
        pullback(subject.function(), inputs, bars)
        _unchanged(subject.active_labels, inputs, subject.active, " by the vjp")
        wants = all_like(bars, 1)
        _unchanged([f"the cotangent of {label}" for label in subject.result_labels], bars, wants, " by the vjp")
    if subject.missing("jvp") is None:
        inputs, dots = list(map(contiguous, subject.active)), all_like(subject.active, 2)
        pushforward(subject.function(), inputs, dots)
        _unchanged(subject.active_labels, inputs, subject.active, " by the jvp")
        everything = range(len(dots))
        _unchanged(
            [f"the tangent of {names(subject, [i])}" for i in everything], dots, all_like(dots, 2), " by the jvp"
        )


def _check_updates(subject: Subject, pure: Sequence[Tensor], record: Record) -> None:
    """The operator writes what its pure form returns, into the arguments that it declares and no others."""
    given = subject.map(clone)
    subject.op(*given.args, **subject.static)
    roots = tuple(subject.mutates)
    written = [i for i, label in enumerate(subject.labels) if re.split(r"\W", label)[0] in roots]
    for i, want in zip(written, pure[len(pure) - len(written) :], strict=True):
        record.close(f"{subject.labels[i]} after the call", given.tensors[i], want)
    others = [i for i in range(len(subject.tensors)) if i not in written]
    kept, before = ([each.tensors[i] for i in others] for each in (given, subject))
    _unchanged([subject.labels[i] for i in others], kept, before, "")


def _unchanged(labels: Sequence[str], given: Sequence[Tensor], wants: Sequence[Tensor], by: str) -> None:
    for label, x, want in zip(labels, given, wants, strict=True):
        if not same_bits(x, want):
            changed = (x.detach() != want).nonzero()
            place = [int(i) for i in changed[0]] if len(changed) else []
            values = [v.detach()[tuple(place)].item() for v in (x, want)] if len(changed) else ["other bits", "these"]
            raise MismatchError(f"{label} was written to{by}: at {place} it is {values[0]!r}, expected {values[1]!r}.")
        if x._version:
            raise MismatchError(f"{label} was written to{by}: its version is {x._version}, expected 0.")
