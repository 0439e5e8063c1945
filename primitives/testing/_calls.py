"""Properties of derivatives that depend on the call: its static arguments, and the dtypes of its tensors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from primitives.core.backend import current_backend, use_backend
from primitives.testing._compare import MismatchError, NotApplicableError, Record, all_like, contiguous, largest
from primitives.testing._derivatives import check_jvp, check_vjp, leaves, pullback, pushforward
from primitives.testing._subject import widened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from primitives.testing._subject import Subject

# A derivative passes through more roundings than a value: its tolerance is this many times that of a value.
DERIVATIVE_FACTOR = 2.0
# Where torch differentiates the reference at the same dtypes, errors this many times as large as its are allowed.
REFERENCE_FACTOR = 4.0

# Static arguments.


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
    if not checked:
        raise NotApplicableError(f"the result does not change with {' or '.join(sorted(seen))}")
    if seen - checked:
        record.note(f"the result does not change with {' or '.join(sorted(seen - checked))}")


def _check_changed(changed: Subject, record: Record, name: str, value: Any) -> None:
    shown = f"{value:g}" if isinstance(value, float) else repr(value)
    when = f", with {name}={shown},"
    if not isinstance(value, float):
        # A kernel may support some sizes and modes only, where the reference supports all.
        try:
            changed.call(*changed.tensors)
        except Exception:
            record.note(f"the operator refuses {name}={shown}, which the reference accepts")
            return
    reverse, forward = (changed.missing(kind) is None for kind in ("vjp", "jvp"))
    if changed.definition is not None:
        gots, wants = changed.call(*changed.tensors), changed.reference(*changed.tensors)
        for label, got, want in zip(changed.output_labels, gots, wants, strict=True):
            record.close(f"{label}{when}", got, want)
    try:
        if reverse:
            check_vjp(changed, record, when)
        if forward:
            check_jvp(changed, record, when)
    except MismatchError as error:
        raise MismatchError(f"{error} The derivative does not follow {name}.") from None


def _depends(subject: Subject, changed: Subject) -> bool:
    """Whether the definition gives something else where an argument is changed, and accepts that at all."""
    function, other = ((each.reference if each.definition else each.call) for each in (subject, changed))
    before = function(*subject.tensors)
    try:
        after = other(*changed.tensors)
    except Exception:
        return False
    if not all(bool(b.isfinite().all()) for b in after):
        return False
    return len(before) != len(after) or any(
        a.shape != b.shape or not torch.equal(a, b) for a, b in zip(before, after, strict=True)
    )


# Dtypes.


def derivatives_at_given_dtypes(subject: Subject, record: Record) -> None:
    """First derivatives at the dtypes of the arguments, against those in double precision."""
    reasons = {kind: subject.missing(kind) for kind in ("vjp", "jvp")}
    if all(reasons.values()):
        raise NotApplicableError(", ".join(dict.fromkeys(map(str, reasons.values()))))
    narrow, wide = subject.map(contiguous), subject.double()
    for kind, derive in (("vjp", _vjp), ("jvp", _jvp)):
        if reasons[kind] is not None:
            record.note(f"no {kind}: {reasons[kind]}")
            continue
        given = all_like(narrow.function()(*narrow.active), 1) if kind == "vjp" else all_like(narrow.active, 2)
        exact = [widened(x) for x in given]
        with _checked_backend():
            wants = derive(wide.function(), wide.active, exact)
            slack = _errors_of_reference(narrow, derive, given, wants)
        gots = derive(narrow.function(), narrow.active, given)
        labels = subject.active_labels if kind == "vjp" else subject.result_labels
        what = "cotangent" if kind == "vjp" else "tangent"
        dtypes = [x.dtype for x in subject.tensors]
        for label, got, want, error in zip(labels, gots, wants, slack, strict=True):
            usual = DERIVATIVE_FACTOR * record.tolerance(got.dtype, *dtypes) * max(largest(want), 1.0)
            allowed = usual + REFERENCE_FACTOR * error
            record.within(f"the {what} of {label} in {got.dtype}", got, want, allowed)


def _vjp(function: Callable, active: Sequence[Tensor], bars: Sequence[Tensor]) -> list[Tensor]:
    return pullback(function, leaves(active, range(len(active))), bars)


def _jvp(function: Callable, active: Sequence[Tensor], dots: Sequence[Tensor]) -> list[Tensor]:
    return pushforward(function, list(map(contiguous, active)), dots)


def _checked_backend() -> contextlib.AbstractContextManager[None]:
    """The backend whose derivatives in double precision the other properties hold to differences."""
    return use_backend("auto") if current_backend() == "triton" else contextlib.nullcontext()


def _errors_of_reference(
    subject: Subject, derive: Callable, given: Sequence[Tensor], wants: Sequence[Tensor]
) -> list[float]:
    """Errors of torch's derivatives of the reference at the same dtypes: what the problem itself makes inexact."""
    if subject.definition is None:
        return [0.0] * len(wants)
    try:
        others = derive(subject.function(reference=True), subject.active, given)
        return [largest(widened(other) - want) for other, want in zip(others, wants, strict=True)]
    except Exception:
        # A reference need not be differentiable, nor run at every dtype.
        return [0.0] * len(wants)
