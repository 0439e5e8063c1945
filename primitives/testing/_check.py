"""`check_rules`, and `check_rule` for one property as a test of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import unittest
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from primitives._core.backend import current_backend, require_interpreter, use_backend
from primitives._core.errors import BackendError, check_arguments
from primitives.testing import _derivatives, _transforms, _values
from primitives.testing._compare import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    MismatchError,
    NotApplicableError,
    Record,
    Report,
    Row,
    RuleError,
)
from primitives.testing._subject import Subject, program

Property = Callable[[Subject, Record], None]
Devices = str | torch.device | Sequence[str | torch.device] | None

_PROPERTIES: dict[str, Property] = {
    "reference against kernel": _values.reference_against_kernel,
    "gradcheck": functools.partial(_derivatives.against_differences, _derivatives.REVERSE),
    "jvp against differences": functools.partial(_derivatives.against_differences, _derivatives.FORWARD),
    "transpose identity": _derivatives.transpose_identity,
    "nestings": _derivatives.nestings,
    "derivatives by dtype": _derivatives.derivatives_at_given_dtypes,
    "vmap against loop": _transforms.vmap_against_loop,
    "cotangent layouts": _values.cotangent_layouts,
    "non-contiguous inputs": _values.non_contiguous_inputs,
    "derivatives under vmap": _transforms.derivatives_under_vmap,
    "fake against real": _transforms.fake_against_real,
    "opcheck": _transforms.opcheck,
    "compile against eager": _transforms.compile_against_eager,
    "determinism": _values.determinism,
    "uninitialized outputs": _values.uninitialized_outputs,
    "aliasing and mutation": _values.aliasing_and_mutation,
    "static arguments": _values.static_arguments,
}
PROPERTIES: tuple[str, ...] = tuple(_PROPERTIES)
"""Names of what is checked, in the order of the table."""

# They make the outcome of others arbitrary, so they are what an error should name.
_CAUSES = ("aliasing and mutation", "uninitialized outputs", "determinism", "non-contiguous inputs")
# In Triton's interpreter, which is slow: what depends on the kernel and not on the rules.
_OF_KERNELS = ("reference against kernel", "derivatives by dtype", "cotangent layouts", "fake against real", *_CAUSES)
# The properties that change arguments whose statistics are arguments too: only the reference computes those again.
_OF_STALE_STATISTICS = ("vmap against loop", "derivatives under vmap", "static arguments")


def check_rules(
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    order: int = 2,
    devices: Devices = None,
    compile: bool = True,
    tolerances: Mapping[torch.dtype, float] | None = None,
    namespace: str = "",
    raise_on_failure: bool = True,
) -> Report:
    """Prove the rules of an operator: hold it to its reference, to differences, and its transforms to one another.

    Derivatives are checked in double precision, first ones at the dtypes of the arguments too, and everything else at
    those. `docs/how-to/test_operator.md` describes each check.

    Args:
        op: A `custom_op`, a `Primitive` (arguments in the order of its schema), or a function of pytrees of tensors. A
            function has no reference: its derivatives are compared with differences of itself.
        args: Tuple of its positional arguments, trees with tensors. They are copied and never changed. The function
            must be smooth near them.
        kwargs: Its keyword arguments.
        order: Highest order of derivatives.
        devices: Device or devices to run on; by default that of the first tensor, and `"cuda"` where there is one. On
            the CPU the Triton kernels run too if Triton's interpreter is on.
        compile: Whether to check under `torch.compile`, and `opcheck` by what AOTAutograd traces: these take seconds.
        tolerances: Allowed relative error by dtype, in the place of the usual one.
        namespace: optree namespace of custom pytree nodes; by default that of the operator.
        raise_on_failure: Whether to raise if a property does not hold, or only to report it.

    Returns:
        A `Report`, which prints as a table: one row for each of `PROPERTIES`.

    Raises:
        RuleError: If a property does not hold: the first of the table, except that an argument that is written to,
            memory that is not written, results that change from run to run and strides that are ignored come first, as
            they explain the rest.
        TypeError: If `op` is not callable, `args` not a tuple, or no argument holds a tensor.
        ValueError: If `order` is less than 1.

    Example:
        >>> import torch, primitives as pr
        >>> args, kwargs = (torch.rand(3) + 1,), {"order": 3}
        >>> report = pr.testing.check_rules(lambda x, *, order: x**order, args, kwargs, compile=False)
        >>> report.ok, report["gradcheck"].status
        (True, 'ok')
    """
    check = _Check.of(op, args, kwargs, order, devices, tolerances, namespace, compile)
    report = Report(check.subject.name, tuple(map(check.row, PROPERTIES)))
    if raise_on_failure and not report.ok:
        causes = [name for name in _CAUSES if name in report.failed and not report[name].raised]
        raise RuleError(report[[*causes, *report.failed][0]], report)
    return report


def check_rule(
    op: Callable[..., Any],
    property: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    order: int = 2,
    devices: Devices = None,
    tolerances: Mapping[torch.dtype, float] | None = None,
    namespace: str = "",
) -> Row:
    """Check one property of an operator: with `pytest.mark.parametrize` over `PROPERTIES`, each is a test.

    Args:
        op: As for `check_rules`.
        property: One of `PROPERTIES`.
        args: Tuple of the positional arguments of `op`.
        kwargs: Its keyword arguments.
        order: Highest order of derivatives.
        devices: Device or devices to run on.
        tolerances: Allowed relative error by dtype.
        namespace: optree namespace of custom pytree nodes; by default that of the operator.

    Returns:
        The row of the property, which holds.

    Raises:
        RuleError: If the property does not hold.
        unittest.SkipTest: If it does not apply to this operator; pytest and unittest report the test as skipped.
        TypeError: If `op` is not callable, `args` not a tuple, or no argument holds a tensor.
        ValueError: If the property is unknown, or `order` is less than 1.

    Example:
        >>> import torch, primitives as pr
        >>> pr.testing.check_rule(torch.sin, "gradcheck", (torch.rand(3),)).status
        'ok'
    """
    if property not in PROPERTIES:
        raise ValueError(f"check_rule: the property must be one of {', '.join(PROPERTIES)}, got {property!r}.")
    check = _Check.of(op, args, kwargs, order, devices, tolerances, namespace)
    row = check.row(property)
    if row.status == FAILED:
        raise RuleError(row, Report(check.subject.name, (row,)))
    if row.status == NOT_APPLICABLE:
        raise unittest.SkipTest(f"{check.subject.name}: {property}: {row.note}")
    return row


@dataclasses.dataclass(frozen=True)
class _Check:
    subject: Subject
    order: int
    devices: tuple[torch.device, ...]
    tolerances: Mapping[torch.dtype, float]
    compile: bool

    @classmethod
    def of(
        cls, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, order: int, devices: Devices,
        tolerances: Any, namespace: str, compile: bool = True,
    ) -> _Check:  # fmt: skip
        if order < 1:
            raise ValueError(f"check_rules: order must be at least 1, got {order}.")
        check_arguments("check_rules", "args", args)
        subject = Subject.of(op, args, dict(kwargs or {}), namespace)
        if devices is None:
            own = subject.tensors[0].device
            devices = [own, "cuda"] if own.type == "cpu" and torch.cuda.is_available() else own
        given = (devices,) if isinstance(devices, (str, torch.device)) else devices
        return cls(subject, order, tuple(map(torch.device, given)), tolerances or {}, compile)

    def row(self, name: str) -> Row:
        """The property everywhere: the first failure, or the result of the place that was least exact."""
        places, rows = self._places(name), []
        for device, backend in places:
            with use_backend(backend), warnings.catch_warnings():
                # Warnings of torch and operators are for their users; here every corner is visited on purpose.
                warnings.simplefilter("ignore")
                row = self._row_at(name, device, backend)
            if row.status == FAILED:
                note = f"{row.note} ({device}, {backend} backend)" if len(places) > 1 else row.note
                return dataclasses.replace(row, note=note)
            rows.append(row)
        fine = [row for row in rows if row.status == OK]
        return max(fine or rows[:1], key=lambda row: (row.error or 0.0) / (row.allowed or 1.0))

    def _places(self, name: str) -> list[tuple[torch.device, str]]:
        """Devices and backends that the property is checked on."""
        backend = "reference" if name in _OF_STALE_STATISTICS and self.subject.has_cached else current_backend()
        places = [(device, backend) for device in self.devices]
        on_cpu = [device for device in self.devices if device.type == "cpu"]
        if name in _OF_KERNELS and backend == "auto" and on_cpu:
            with contextlib.suppress(BackendError):
                require_interpreter(self.subject.name)
                places.append((on_cpu[0], "triton"))
        return places

    def _row_at(self, name: str, device: torch.device, backend: str) -> Row:
        subject, record = self.subject.map(lambda x: x.to(device)), Record(self.order, self.tolerances, self.compile)
        try:
            _PROPERTIES[name](subject, record)
        except NotApplicableError as reason:
            return Row(name, NOT_APPLICABLE, note=str(reason))
        except MismatchError as mismatch:
            note, raised, numbers = str(mismatch), "", (record.error, record.allowed)
        except Exception as error:
            raised, numbers = type(error).__name__, (None, None)
            note = f"{raised}: {error}"
        else:
            return Row(name, OK, record.error, record.allowed, "; ".join(record.notes))
        usual = {"order": 2, "tolerances": {}, "namespace": ""}
        given = {"order": self.order, "tolerances": dict(self.tolerances), "namespace": subject.namespace}
        options = {option: value for option, value in given.items() if value != usual[option]}
        return Row(name, FAILED, *numbers, note, raised, program(subject, name, backend, options))
