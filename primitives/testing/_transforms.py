"""Properties of an operator under `vmap`, and under tracers: tensors without data, torch's own checks, the compiler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from primitives._core.dtypes import has_derivatives
from primitives._core.primitive import Primitive
from primitives._core.sequences import in_places
from primitives.testing._compare import (
    MismatchError,
    NotApplicableError,
    Record,
    all_like,
    arranged,
    clone,
    contiguous,
    largest,
)
from primitives.testing._derivatives import (
    FORWARD,
    IDENTITY_TOLERANCE,
    REVERSE,
    Mode,
    alone_and_together,
    modes,
    pullback,
)
from primitives.testing._subject import Subject

Function = Callable[..., tuple[Tensor, ...]]

BATCH = 3
UNTRACED, TRACED = ("test_schema", "test_autograd_registration", "test_faketensor"), "test_aot_dispatch_dynamic"
_numbers = itertools.count()


def _samples(subject: Subject, record: Record) -> list[list[Tensor]]:
    """For each tensor `BATCH` versions that differ; what is positive stays so, integers are those given, moved."""
    return [
        [x * (1 + 0.25 * k) + 0.125 * k for k in range(BATCH)]
        if has_derivatives(x.dtype)
        else _rolled(subject, i, record)
        for i, x in enumerate(subject.tensors)
    ]


def _rolled(subject: Subject, i: int, record: Record) -> list[Tensor]:
    x = subject.tensors[i]
    lengths = {length for other in subject.tensors for length in other.shape}
    versions = [x.reshape(-1).roll(k).reshape(x.shape) for k in range(BATCH)]
    if all(torch.equal(x, version) for version in versions):
        reason = "has one value only"
    # The bounds of segments ascend from 0 to the length of an axis, which no other order does.
    elif x.dim() == 1 and x[0] == 0 and x[-1].item() in lengths and bool((x[1:] >= x[:-1]).all()):
        reason = "holds offsets"
    elif any(in_places(subject.tried, list(map(contiguous, subject.tensors)), [i])(x) is None for x in versions):
        reason = "has no other order that is accepted"
    else:
        return versions
    record.note(f"{subject.labels[i]} is the same in every sample: it {reason}")
    return [x] * BATCH


def _stacked(
    subject: Subject, versions: Sequence[Sequence[Tensor]], chosen: Sequence[int], axis: int
) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """All tensors, the chosen ones batched along `axis`; and the `in_dims` of that."""
    pairs = enumerate(zip(subject.tensors, versions, strict=True))
    full = [torch.stack(list(batch), dim=axis) if i in chosen else contiguous(x) for i, (x, batch) in pairs]
    return full, tuple(axis if i in chosen else None for i in range(len(full)))


def _loop(function: Callable[..., Sequence[Tensor]], axes: Sequence[int | None]) -> Function:
    """The meaning of `vmap` of `function`: one call per sample."""

    def loop(*values: Tensor) -> tuple[Tensor, ...]:
        rows = [
            function(*[x if axis is None else x.select(axis, k) for x, axis in zip(values, axes, strict=True)])
            for k in range(BATCH)
        ]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    return loop


def vmap_against_loop(subject: Subject, record: Record) -> None:
    """`torch.func.vmap` over each argument and over all against a loop over the samples."""
    if subject.primitive is not None and not subject.primitive.has_rule("vmap"):
        record.note("no def_vmap: a loop runs")
    versions = _samples(subject, record)
    for number, positions in enumerate(alone_and_together(len(subject.tensors))):
        axis = -1 if number % 2 else 0
        full, axes = _stacked(subject, versions, positions, axis)
        gots = torch.func.vmap(subject.call, axes)(*full)
        wants = _loop(lambda *xs: subject.call(*map(contiguous, xs)), axes)(*full)
        names = ", ".join(subject.labels[i] for i in positions)
        record.all_close(subject.output_labels, gots, wants, f" of vmap over {names} (axis {axis})")


def derivatives_under_vmap(subject: Subject, record: Record) -> None:
    """Derivatives of `vmap`, and `vmap` of derivatives, against those of a loop over the samples."""
    existing, wide = modes(subject, record), subject.double()
    versions = _samples(wide, record)
    sets = alone_and_together(len(wide.tensors))[::-1]
    if subject.mutates:
        # The reference is differentiated, and writes a batch into what has none.
        sets = sets[:1]
        record.note("over all arguments together only: an argument is updated")
    for positions, mode in itertools.product(sets, existing):
        full, axes = _stacked(wide, versions, positions, 0)
        names = ", ".join(wide.labels[i] for i in positions)
        _check_orders(wide, mode, full, axes, record, f"over {names}")


def _check_orders(
    subject: Subject, mode: Mode, full: list[Tensor], axes: tuple[int | None, ...], record: Record, over: str
) -> None:
    """The derivative of `vmap`, and `vmap` of the derivative."""

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = subject.call(*tensors)
        return tuple(values[i] for i in subject.outputs)

    batched, loop = torch.func.vmap(results, axes), _loop(results, axes)
    along = all_like(loop(*full) if mode is REVERSE else [full[i] for i in subject.inputs], 1)
    outside = _derivative(subject, mode, batched), _derivative(subject, mode, loop), along
    derivative = _derivative(subject, mode, results)
    samples = all_like([torch.stack([x] * BATCH) for x in mode.along(subject)], 3)
    all_axes = *axes, *[0] * len(samples)
    inside = torch.func.vmap(derivative, all_axes), _loop(derivative, all_axes), samples
    for what, (got, want, along) in {f"{mode.kind} of vmap": outside, f"vmap of {mode.kind}": inside}.items():
        for label, a, b in zip(mode.labels(subject), got(*full, *along), want(*full, *along), strict=True):
            if b.numel():
                record.within(f"{label} of {what} {over}", a, b, IDENTITY_TOLERANCE * max(largest(b), 1.0))


def _derivative(subject: Subject, mode: Mode, function: Function) -> Function:
    """The vjp or jvp of `function`, which takes all tensors and then cotangents of results or tangents of inputs."""
    count = len(subject.tensors)

    def derivative(*values: Tensor) -> tuple[Tensor, ...]:
        of_active = in_places(function, values[:count], subject.inputs)
        return mode.nested(of_active, len(subject.inputs))(*(values[i] for i in subject.inputs), *values[count:])

    return derivative


def fake_against_real(subject: Subject, record: Record) -> None:
    """On tensors without data the results have the shapes, dtypes, devices and strides of the real ones."""
    for layout in ("contiguous", "transposed"):
        reals = subject.call(*[arranged(x, layout) for x in subject.tensors])
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = subject.call(*[mode.from_tensor(arranged(x, layout)) for x in subject.tensors])
        for label, fake, real in zip(subject.output_labels, fakes, reals, strict=True):
            for what, got in _layout(fake).items():
                want = _layout(real)[what]
                if got != want:
                    raise MismatchError(
                        f"{label} of {layout} arguments has the {what} {got} when fake, expected {want}."
                    )


def _layout(x: Tensor) -> dict[str, Any]:
    """The strides that a compiler is told. Axes of one element, and empty tensors, have any strides."""
    strides = [s for size, s in zip(x.shape, x.stride(), strict=True) if size != 1] if x.numel() else []
    return {"shape": tuple(x.shape), "dtype": x.dtype, "device": x.device.type, "strides": strides}


def opcheck(subject: Subject, record: Record) -> None:
    """`torch.library.opcheck` of the operator under the trees."""
    op = subject.primitive
    if op is None:
        raise NotApplicableError("a plain function is not an operator")
    # torch gives every result a cotangent, those too that have none: statistics, and what was not wanted and is empty.
    empty = not all(y.numel() for y in subject.call(*map(clone, subject.tensors)))
    differentiable = not (op.spec.statistics or subject.mutates or empty) and REVERSE in modes(subject)
    tensors = [clone(x).requires_grad_(differentiable and i in subject.inputs) for i, x in enumerate(subject.tensors)]
    args = subject.trees(tensors)
    if not isinstance(subject.op, Primitive):
        flat, structure = subject.op.table.flatten(args, subject.static)
        args = (flat, structure.number)
    if not record.compile:
        record.note("compile=False: untraced")
    try:
        torch.library.opcheck(op.overload, args, test_utils=(*UNTRACED, TRACED) if record.compile else UNTRACED)
    except ModuleNotFoundError as error:
        raise NotApplicableError(f"torch's opcheck needs {error.name}") from None


def _compiled(function: Callable) -> Callable:
    """`function` compiled on its own: a code object of another name shares nothing that Dynamo learnt before."""
    function.__code__ = function.__code__.replace(co_name=f"compiled_{next(_numbers)}")
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def compile_against_eager(subject: Subject, record: Record) -> None:
    """Under `torch.compile(fullgraph=True, backend="aot_eager")`: value, vjp and jvp as without it."""
    if not record.compile:
        raise NotApplicableError("compile=False")
    existing, outputs = modes(subject), subject.outputs

    def value(*tensors: Tensor) -> list[Tensor]:
        # A compiler differentiates all that it is given, and statistics refuse that.
        return [y if i in outputs else y.detach() for i, y in enumerate(subject.call(*tensors))]

    tensors = [contiguous(x) for x in subject.tensors]
    inputs = [tensors[i].requires_grad_(REVERSE in existing) for i in subject.inputs]
    gots, wants = (run(*tensors) for run in (_compiled(value), value))
    record.all_close(subject.output_labels, gots, wants, ", compiled,")
    if REVERSE in existing:
        cotangents = all_like([wants[i] for i in outputs], 1)
        got, want = (pullback([ys[i] for i in outputs], inputs, cotangents) for ys in (gots, wants))
        record.all_close(REVERSE.labels(subject), got, want, ", compiled,")
    if FORWARD in existing:
        function, along = FORWARD.nested(subject.function(), len(inputs)), all_like(inputs, 2)
        got, want = (run(*[x.detach() for x in inputs], *along) for run in (_compiled(function), function))
        record.all_close(FORWARD.labels(subject), got, want, ", compiled,")
