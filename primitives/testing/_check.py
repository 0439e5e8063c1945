"""`check_rules`, and `check_rule` for one property as a test of its own."""

from __future__ import annotations

import dataclasses
import unittest
import warnings
from typing import TYPE_CHECKING, Any

import torch

from primitives.core.backend import current_backend, require_interpreter, use_backend
from primitives.core.errors import BackendError
from primitives.testing import _batching, _calls, _derivatives, _reproducer, _tracing, _values
from primitives.testing._compare import MismatchError, NotApplicableError, Record
from primitives.testing._report import FAILED, NOT_APPLICABLE, OK, Report, Row, RuleError
from primitives.testing._subject import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Property = Callable[[Subject, Record], None]
    Devices = str | torch.device | Sequence[str | torch.device] | None

_PROPERTIES: dict[str, Property] = {
    "reference against kernel": _values.reference_against_kernel,
    "gradcheck": _derivatives.gradcheck,
    "jvp against differences": _derivatives.jvp_against_differences,
    "transpose identity": _derivatives.transpose_identity,
    "gradgradcheck": _derivatives.gradgradcheck,
    "nestings": _derivatives.nestings,
    "derivatives by dtype": _calls.derivatives_at_given_dtypes,
    "vmap against loop": _batching.vmap_against_loop,
    "cotangent layouts": _values.cotangent_layouts,
    "non-contiguous inputs": _values.non_contiguous_inputs,
    "derivatives under vmap": _batching.derivatives_under_vmap,
    "fake against real": _tracing.fake_against_real,
    "opcheck": _tracing.opcheck,
    "compile against eager": _tracing.compile_against_eager,
    "determinism": _values.determinism,
    "uninitialized outputs": _values.uninitialized_outputs,
    "aliasing and mutation": _values.aliasing_and_mutation,
    "static arguments": _calls.static_arguments,
}
PROPERTIES: tuple[str, ...] = tuple(_PROPERTIES)
"""Names of what is checked, in the order of the table."""

# They make the outcome of others arbitrary, so they are what an error should name.
_CAUSES = ("aliasing and mutation", "uninitialized outputs", "determinism", "non-contiguous inputs")
# What no rule for derivatives takes part in.
_OF_VALUES = ("reference against kernel", "fake against real")
# In Triton's interpreter, which is slow: what depends on the kernel and not on the rules.
_OF_KERNELS = (
    "reference against kernel",
    "derivatives by dtype",
    "cotangent layouts",
    "fake against real",
    *_CAUSES,
)
# What changes arguments whose statistics are arguments too: only the reference computes those again.
_OF_STALE_STATISTICS = ("vmap against loop", "derivatives under vmap", "static arguments")


def check_rules(
    op: Callable,
    *args: Any,
    order: int = 2,
    devices: Devices = None,
    compile: bool = True,
    tolerances: Mapping[torch.dtype, float] | None = None,
    tree_namespace: str = "",
    raise_on_failure: bool = True,
    **static: Any,
) -> Report:
    """Prove the rules of an operator: hold it to its reference, to differences, and its transforms to one another.

    Derivatives are checked in double precision, first ones at the dtypes of the arguments too, and everything else at
    those. What is checked, and how, is described in `docs/check_rules.md`.

    Args:
        op: A `custom_op`, a `Primitive` (arguments in the order of its schema), or a function of pytrees of tensors. A
            function has no reference: its derivatives are compared with differences of itself.
        args: Positional arguments, trees with tensors. They are copied and never changed. The function must be smooth
            near them.
        order: Highest order of derivatives.
        devices: Device or devices to run on; by default that of the first tensor, and `"cuda"` where there is one. On
            the CPU the Triton kernels run too if Triton's interpreter is on.
        compile: Whether to check under `torch.compile`, which takes seconds.
        tolerances: Allowed relative error by dtype, in the place of the usual one.
        tree_namespace: optree namespace of the trees; by default that of the operator.
        raise_on_failure: Whether to raise if a property does not hold, or only to report it.
        static: Keyword arguments of `op`.

    Returns:
        A `Report`, which prints as a table: one row for each of `PROPERTIES`.

    Raises:
        RuleError: If a property does not hold: the first of the table, except that an argument that is written to,
            memory that is not written, results that change from run to run and strides that are ignored come first, as
            they explain the rest.
        TypeError: If `op` is not callable, or no argument holds a tensor.
        ValueError: If `order` is less than 1.
    """
    options = _Options(order, devices, tolerances or {})
    subject = Subject.of(op, args, static, tree_namespace)
    rows = []
    for name in PROPERTIES:
        if name == "compile against eager" and not compile:
            rows.append(Row(name, NOT_APPLICABLE, note="compile=False"))
        else:
            rows.append(_row(subject, name, options))
    report = Report(subject.name, tuple(rows))
    if raise_on_failure and not report.ok:
        causes = [name for name in _CAUSES if name in report.failed and not report[name].raised]
        raise RuleError(report[[*causes, *report.failed][0]], report)
    return report


def check_rule(
    op: Callable,
    property: str,
    *args: Any,
    order: int = 2,
    devices: Devices = None,
    tolerances: Mapping[torch.dtype, float] | None = None,
    tree_namespace: str = "",
    **static: Any,
) -> Row:
    """Check one property of an operator: with `pytest.mark.parametrize` over `PROPERTIES`, each is a test.

    Args:
        op: As for `check_rules`.
        property: One of `PROPERTIES`.
        args: Positional arguments of `op`.
        order: Highest order of derivatives.
        devices: Device or devices to run on.
        tolerances: Allowed relative error by dtype.
        tree_namespace: optree namespace of the trees.
        static: Keyword arguments of `op`.

    Returns:
        The row of the property, which holds.

    Raises:
        RuleError: If the property does not hold.
        unittest.SkipTest: If it does not apply to this operator; pytest and unittest report the test as skipped.
        TypeError: If `op` is not callable, or no argument holds a tensor.
        ValueError: If there is no such property, or `order` is less than 1.
    """
    if property not in PROPERTIES:
        raise ValueError(f"check_rule: the property must be one of {', '.join(PROPERTIES)}, got {property!r}.")
    subject = Subject.of(op, args, static, tree_namespace)
    row = _row(subject, property, _Options(order, devices, tolerances or {}))
    if row.status == FAILED:
        raise RuleError(row, Report(subject.name, (row,)))
    if row.status == NOT_APPLICABLE:
        raise unittest.SkipTest(f"{subject.name}: {property}: {row.note}")
    return row


@dataclasses.dataclass(frozen=True)
class _Options:
    order: int
    devices: Devices
    tolerances: Mapping[torch.dtype, float]

    def __post_init__(self) -> None:
        if self.order < 1:
            raise ValueError(f"check_rules: order must be at least 1, got {self.order}.")

    def given(self, subject: Subject) -> dict[str, Any]:
        """Those that are not the usual ones, as keywords of `check_rule`."""
        chosen = {"order": (self.order, 2), "tolerances": (dict(self.tolerances), {})}
        chosen["tree_namespace"] = (subject.namespace, "")
        return {name: value for name, (value, usual) in chosen.items() if value != usual}


@dataclasses.dataclass(frozen=True)
class _Place:
    device: torch.device
    backend: str

    def __str__(self) -> str:
        return f"{self.device}, {self.backend} backend"


def _places(subject: Subject, name: str, options: _Options) -> list[_Place]:
    """Where the property `name` is checked."""
    own = subject.tensors[0].device
    if options.devices is not None:
        given = (options.devices,) if isinstance(options.devices, (str, torch.device)) else options.devices
        devices = list(map(torch.device, given))
    else:
        devices = [own]
        if own.type == "cpu" and torch.cuda.is_available():
            devices.append(torch.device("cuda"))
    backend = "reference" if name in _OF_STALE_STATISTICS and subject.has_cached else current_backend()
    places = [_Place(device, backend) for device in devices]
    if (
        name in _OF_KERNELS
        and backend == "auto"
        and any(d.type == "cpu" for d in devices)
        and _interpreted(subject, name)
    ):
        places.append(_Place(torch.device("cpu"), "triton"))
    return places


def _interpreted(subject: Subject, name: str) -> bool:
    """Whether the operator has kernels, or its rules may call some, that Triton's interpreter can run."""
    if name in _OF_VALUES and subject.primitive is not None and "cuda" not in subject.primitive.rules.kernels:
        return False
    try:
        require_interpreter(subject.name)
    except BackendError:
        return False
    return True


def _row(subject: Subject, name: str, options: _Options) -> Row:
    """The property everywhere; the first failure is the outcome, or the result of the place that was least exact."""
    places = _places(subject, name, options)
    rows = []
    for place in places:
        with use_backend(place.backend), warnings.catch_warnings():
            # What torch and operators warn of is their users' affair; here every corner is visited on purpose.
            warnings.simplefilter("ignore")
            row = _row_at(subject.map(lambda x, place=place: x.to(place.device)), name, options, place)
        if row.status == FAILED:
            note = f"{row.note} ({place})" if len(places) > 1 else row.note
            return dataclasses.replace(row, note=note)
        rows.append(row)
    fine = [row for row in rows if row.status == OK]
    if not fine:
        return rows[0]
    return max(fine, key=lambda row: (row.error or 0.0) / (row.allowed or 1.0))


def _row_at(subject: Subject, name: str, options: _Options, place: _Place) -> Row:
    record = Record(options.order, options.tolerances)
    try:
        _PROPERTIES[name](subject, record)
    except NotApplicableError as reason:
        return Row(name, NOT_APPLICABLE, note=str(reason))
    except MismatchError as mismatch:
        text, raised = str(mismatch), ""
    except Exception as error:
        raised = type(error).__name__
        text = f"{raised}: {error}"
    else:
        return Row(name, OK, record.error, record.allowed, "; ".join(record.notes))
    program = _reproducer.program(subject, name, place.backend, options.given(subject))
    numbers = (None, None) if raised else (record.error, record.allowed)
    return Row(name, FAILED, *numbers, text, raised, program)
