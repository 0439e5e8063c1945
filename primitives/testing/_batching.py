"""Properties of an operator under `torch.func.vmap`: its values, and its derivatives inside and outside."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from primitives.core.dtypes import has_derivatives
from primitives.testing._compare import (
    IDENTITY_TOLERANCE,
    MismatchError,
    NotApplicableError,
    Record,
    all_like,
    contiguous,
    largest,
)
from primitives.testing._derivatives import alone_and_together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from primitives.testing._subject import Subject

    Function = Callable[..., tuple[Tensor, ...]]

BATCH = 3
# All subsets of four tensors; of more, the small ones and all.
MAX_SUBSETS = 16


def subsets(count: int) -> tuple[list[tuple[int, ...]], int]:
    """Non-empty subsets of `count` things, the small ones and the largest where there are too many; how many exist."""
    every = itertools.chain.from_iterable(itertools.combinations(range(count), r) for r in range(1, count + 1))
    total = 2**count - 1
    if total <= MAX_SUBSETS:
        return list(every), total
    return [*itertools.islice(every, MAX_SUBSETS - 1), tuple(range(count))], total


# Samples.


def samples(subject: Subject, record: Record) -> list[list[Tensor]]:
    """For each tensor `BATCH` versions that differ; what is positive stays so, integers are those given, moved."""
    return [
        [x * (1 + 0.25 * k) + 0.125 * k for k in range(BATCH)]
        if has_derivatives(x.dtype)
        else _rolled(subject, i, record)
        for i, x in enumerate(subject.tensors)
    ]


def _rolled(subject: Subject, i: int, record: Record) -> list[Tensor]:
    x = subject.tensors[i]
    versions = [x.reshape(-1).roll(k).reshape(x.shape) for k in range(BATCH)]
    if all(torch.equal(x, version) for version in versions):
        reason = "has one value only"
    elif _are_offsets(subject, x):
        reason = "holds offsets"
    elif not all(_accepted(subject, i, version) for version in versions):
        reason = "has no other order that is accepted"
    else:
        return versions
    record.note(f"{subject.labels[i]} is the same in every sample: it {reason}")
    return [x] * BATCH


def _are_offsets(subject: Subject, x: Tensor) -> bool:
    """Whether `x` ascends from 0 to the length of an axis, as the bounds of segments do, which no other order has."""
    if x.dim() != 1 or x.numel() < 2 or x.dtype is torch.bool:
        return False
    lengths = {length for other in subject.tensors for length in other.shape}
    return x[0].item() == 0 and x[-1].item() in lengths and bool((x.diff() >= 0).all())


def _accepted(subject: Subject, i: int, version: Tensor) -> bool:
    values = [version if j == i else contiguous(x) for j, x in enumerate(subject.tensors)]
    try:
        (subject.call if subject.definition is None else subject.reference)(*values)
    except Exception:
        return False
    return True


def _stacked(
    subject: Subject, versions: Sequence[Sequence[Tensor]], chosen: Sequence[int], axis: int
) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """All tensors, the chosen ones batched along `axis`; and the `in_dims` of that."""
    full = [
        torch.stack(list(versions[i]), dim=axis) if i in chosen else contiguous(x)
        for i, x in enumerate(subject.tensors)
    ]
    return full, tuple(axis if i in chosen else None for i in range(len(full)))


def _loop(function: Callable[..., Sequence[Tensor]], axes: Sequence[int | None]) -> Function:
    """What `vmap` of `function` stands for: one call per sample."""

    def loop(*values: Tensor) -> tuple[Tensor, ...]:
        rows = [
            function(*[x if axis is None else x.select(axis, k) for x, axis in zip(values, axes, strict=True)])
            for k in range(BATCH)
        ]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    return loop


# Values.


def vmap_against_loop(subject: Subject, record: Record) -> None:
    """`torch.func.vmap` over every set of arguments against a loop over the samples."""
    chosen, total = subsets(len(subject.tensors))
    if len(chosen) < total:
        record.note(f"{len(chosen)} of {total} sets of arguments")
    if subject.primitive is not None and not subject.primitive.has_rule("vmap"):
        record.note("no def_vmap: a loop runs")
    versions = samples(subject, record)
    for number, positions in enumerate(chosen):
        axis = -1 if number % 2 else 0
        full, axes = _stacked(subject, versions, positions, axis)
        gots = torch.func.vmap(subject.call, axes)(*full)
        wants = _loop(lambda *xs: subject.call(*map(contiguous, xs)), axes)(*full)
        names = ", ".join(subject.labels[i] for i in positions)
        for label, got, want in zip(subject.output_labels, gots, wants, strict=True):
            if want.numel():
                record.close(f"{label} of vmap over {names} (axis {axis})", got, want)


# Derivatives.


def derivatives_under_vmap(subject: Subject, record: Record) -> None:
    """Derivatives of `vmap`, and `vmap` of derivatives, against those of a loop over the samples."""
    reasons = {kind: subject.missing(kind) for kind in ("vjp", "jvp")}
    kinds = [kind for kind, reason in reasons.items() if reason is None]
    if not kinds:
        raise NotApplicableError(", ".join(dict.fromkeys(map(str, reasons.values()))))
    for kind in reasons.keys() - set(kinds):
        record.note(f"no {kind}: {reasons[kind]}")
    wide = subject.double()
    versions = samples(wide, record)
    sets = alone_and_together(len(wide.tensors))[::-1]
    if subject.mutates:
        # The reference is differentiated, and writes a batch into what has none.
        sets = sets[:1]
        record.note("over all arguments together only: an argument is updated")
    for positions in sets:
        names = ", ".join(wide.labels[i] for i in positions)
        full, axes = _stacked(wide, versions, positions, 0)
        for kind in kinds:
            _check_derivative_of_vmap(wide, kind, full, axes, record, f"over {names}")
            _check_vmap_of_derivative(wide, kind, full, axes, record, f"over {names}")


def _results(subject: Subject) -> Function:
    """The differentiable results as a function of all tensors."""

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        results = subject.call(*values)
        return tuple(results[i] for i in subject.outputs)

    return function


def _derivative(subject: Subject, kind: str, function: Function) -> Function:
    """The vjp or jvp of `function`, which takes all tensors and then cotangents of results or tangents of inputs."""
    count = len(subject.tensors)

    def derivative(*values: Tensor) -> tuple[Tensor, ...]:
        def of_active(*active: Tensor) -> tuple[Tensor, ...]:
            given = list(values[:count])
            for i, x in zip(subject.inputs, active, strict=True):
                given[i] = x
            return function(*given)

        active, along = tuple(values[i] for i in subject.inputs), tuple(values[count:])
        if kind == "vjp":
            return torch.func.vjp(of_active, *active)[1](along)
        return torch.func.jvp(of_active, active, along)[1]

    return derivative


def _check_derivative_of_vmap(
    subject: Subject, kind: str, full: Sequence[Tensor], axes: tuple[int | None, ...], record: Record, what: str
) -> None:
    function = _results(subject)
    batch, loop = torch.func.vmap(function, axes), _loop(function, axes)
    along = all_like(loop(*full), 1) if kind == "vjp" else all_like([full[i] for i in subject.inputs], 2)
    gots, wants = (_derivative(subject, kind, each)(*full, *along) for each in (batch, loop))
    _compare(subject, kind, gots, wants, record, f"of {kind} of vmap {what}")


def _check_vmap_of_derivative(
    subject: Subject, kind: str, full: Sequence[Tensor], axes: tuple[int | None, ...], record: Record, what: str
) -> None:
    function = _results(subject)
    shapes = function(*subject.tensors) if kind == "vjp" else subject.active
    along = all_like([torch.stack([x] * BATCH) for x in shapes], 3)
    derivative, all_axes = _derivative(subject, kind, function), (*axes, *[0] * len(along))
    gots = torch.func.vmap(derivative, all_axes)(*full, *along)
    wants = _loop(derivative, all_axes)(*full, *along)
    _compare(subject, kind, gots, wants, record, f"of vmap of {kind} {what}")


def _compare(
    subject: Subject, kind: str, gots: Sequence[Tensor], wants: Sequence[Tensor], record: Record, what: str
) -> None:
    labels = subject.active_labels if kind == "vjp" else subject.result_labels
    name = "cotangent" if kind == "vjp" else "tangent"
    if len(gots) != len(wants):
        raise MismatchError(f"there are {len(gots)} results {what}, expected {len(wants)}.")
    for label, got, want in zip(labels, gots, wants, strict=True):
        if want.numel():
            allowed = IDENTITY_TOLERANCE * max(largest(want), 1.0)
            record.within(f"the {name} of {label} {what}", got, want, allowed)
