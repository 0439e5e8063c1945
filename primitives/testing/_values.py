"""Properties of what an operator computes, at the dtypes of its arguments: values and memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core.backend import current_backend
from primitives._core.dtypes import has_derivatives
from primitives.testing._compare import (
    COTANGENT_LAYOUTS,
    LAYOUTS,
    MismatchError,
    NotApplicableError,
    Record,
    arranged,
    clone,
    contiguous,
)
from primitives.testing._derivatives import REVERSE, against_differences, modes, require
from primitives.testing._subject import Subject

NUM_RUNS = 3


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
    given = [[x.dtype for x in results] for results in (gots, same)]
    if given[0] != given[1]:
        raise MismatchError(f"the kernel returns tensors of {given[0]}, expected {given[1]}.")
    dtypes = [x.dtype for x in subject.tensors]
    for label, got, want in zip(subject.output_labels, gots, wants, strict=True):
        record.close(f"{label} of the kernel", got, want, got.dtype, *(dtypes if has_derivatives(got.dtype) else ()))


def cotangent_layouts(subject: Subject, record: Record) -> None:
    """A cotangent with other strides gives what its contiguous copy gives."""
    require(subject, REVERSE)
    subject = subject.map(contiguous)
    for layout in COTANGENT_LAYOUTS:
        other = [arranged(y_bar, layout) for y_bar in REVERSE.along(subject)]
        gots, wants = (REVERSE.of(subject, given) for given in (other, list(map(contiguous, other))))
        record.all_close(REVERSE.labels(subject), gots, wants, f", given a {layout} cotangent of the result,")


def non_contiguous_inputs(subject: Subject, record: Record) -> None:
    """Arguments with other strides give what their contiguous copies give, in value and derivatives."""
    for layout in LAYOUTS:
        other = subject.map(functools.partial(arranged, layout=layout))
        dense, where = other.map(contiguous), f", given {layout} arguments,"
        record.all_close(subject.output_labels, other.call(*other.tensors), dense.call(*dense.tensors), where)
        for mode in modes(subject):
            along = mode.along(subject)
            # torch takes no tangent whose layout its primal cannot have.
            given = along if mode is REVERSE else [arranged(x_dot, layout) for x_dot in along]
            wants = mode.of(dense, list(map(contiguous, given)))
            record.all_close(mode.labels(subject), mode.of(other, given), wants, where)


def _runs(subject: Subject, *, reference: bool = False) -> list[tuple[str, Tensor]]:
    """Everything that one run computes: results, or those of the reference, and first derivatives."""
    run = subject.reference if reference else subject.call
    values = zip(subject.output_labels, run(*map(clone, subject.tensors)), strict=True)
    named = [(label, x) for label, x in values if x.numel()]
    dense = subject.map(contiguous)
    for mode in modes(subject):
        named += zip(mode.labels(subject), mode.of(dense, mode.along(subject)), strict=True)
    return named


def determinism(subject: Subject, record: Record) -> None:
    """Several runs give the same, in value and derivatives."""
    first = _runs(subject)
    for _ in range(NUM_RUNS - 1):
        for (label, got), (_, want) in zip(_runs(subject), first, strict=True):
            record.within(f"{label} of another run", got, want, 0.0)


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
    plain = _runs(subject, reference=True)
    with poisoned_memory():
        named = _runs(subject)
    for (label, got), (_, want) in zip(named, plain, strict=True):
        if has_derivatives(got.dtype):
            unwritten = got.isnan() & ~want.isnan()
        else:
            unwritten = (got == (True if got.dtype is torch.bool else torch.iinfo(got.dtype).max)) & (got != want)
        if unwritten.any():
            place = [int(i) for i in unwritten.nonzero()[0]]
            raise MismatchError(
                f"{label} at {place} is memory that was never written, expected {want[tuple(place)].item()!r}."
            )


def aliasing_and_mutation(subject: Subject, record: Record) -> None:
    """No argument is changed and no result shares memory with one, in value and derivatives."""

    def unchanged(labels: Sequence[str], given: Sequence[Tensor], wants: Sequence[Tensor], by: str) -> None:
        for label, x, want in zip(labels, given, wants, strict=True):
            record.within(f"{label}, which {by} writes to,", x, want, 0.0)
            if x._version:
                raise MismatchError(f"{label} was written to by {by}: its version is {x._version}, expected 0.")

    given = list(map(clone, subject.tensors))
    results = subject.call(*given)
    unchanged(subject.labels, given, subject.tensors, "the call")
    if subject.primitive is None:
        record.note("a plain function may return its arguments")
    else:
        for label, y in zip(subject.output_labels, results, strict=True):
            for name, x in zip(subject.labels, given, strict=True):
                if y.numel() and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                    raise MismatchError(f"{label} shares its memory with {name}, expected memory of its own.")
    for mode in modes(subject):
        inputs, along = mode.inputs(subject.map(contiguous)), mode.along(subject)
        mode.of(subject, along, inputs)
        unchanged(subject.active_labels, inputs, subject.active, f"the {mode.kind}")
        names = subject.result_labels if mode is REVERSE else subject.active_labels
        unchanged([f"the {mode.result} of {n}" for n in names], along, mode.along(subject), f"the {mode.kind}")


def static_arguments(subject: Subject, record: Record) -> None:
    """With each number among the arguments changed, results and derivatives follow the definition."""
    wide, checked, seen = subject.double(), set(), set()
    for name, value, changed in wide.perturbed():
        seen.add(name)
        if name not in checked and _depends(wide, changed):
            checked.add(name)
            _check_changed(changed, record, name, value)
    if not seen:
        raise NotApplicableError("no float, int or bool argument")
    if seen > checked:
        unused = f"the result does not change with {' or '.join(sorted(seen - checked))}"
        if not checked:
            raise NotApplicableError(unused)
        record.note(unused)


def _depends(subject: Subject, changed: Subject) -> bool:
    """Whether the definition gives something else where an argument is changed, and accepts that at all."""
    before, after = subject.reference(*subject.tensors), changed.tried(*changed.tensors)
    if after is None or not all(bool(b.isfinite().all()) for b in after):
        return False
    return len(before) != len(after) or not all(map(torch.equal, before, after))


def _check_changed(changed: Subject, record: Record, name: str, value: Any) -> None:
    shown = f"{value:g}" if isinstance(value, float) else repr(value)
    when = f", with {name}={shown},"
    try:
        gots = changed.call(*changed.tensors)
    except Exception:
        # A kernel may support some sizes and modes only, where the reference supports all.
        record.note(f"the operator refuses {name}={shown}, which the reference accepts")
        return
    record.all_close(changed.output_labels, gots, changed.reference(*changed.tensors), when)
    try:
        for mode in modes(changed):
            against_differences(mode, changed, record, when)
    except MismatchError as error:
        raise MismatchError(f"{error} The derivative does not follow {name}.") from None
