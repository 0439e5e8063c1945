"""Properties of an operator under tracers: tensors without data, torch's own checks, the compiler."""

from __future__ import annotations

import itertools
import types
from typing import TYPE_CHECKING, Any, cast

import optree
import torch

from primitives.core.dtypes import has_derivatives
from primitives.core.primitive import Primitive
from primitives.func import jvp
from primitives.testing._compare import (
    MismatchError,
    NotApplicableError,
    Record,
    all_like,
    arranged,
    contiguous,
)
from primitives.testing._derivatives import leaves
from primitives.testing._subject import clone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from primitives.testing._subject import Subject

_numbers = itertools.count()
MAX_LENGTHS = 3


# Tensors without data.


def layout_of(x: Tensor) -> tuple:
    """Shape, dtype, device and the strides that mean something: axes of one element have any."""
    strides = [None if size == 1 else s for size, s in zip(x.shape, x.stride(), strict=True)]
    return tuple(x.shape), x.dtype, x.device.type, strides


def fake_against_real(subject: Subject, record: Record) -> None:
    """On tensors without data the results have the shapes, dtypes, devices and strides of the real ones."""
    for layout in ("contiguous", "transposed"):
        _check_fake(subject, subject.call(*[arranged(x, layout) for x in subject.tensors]), layout)
    for length in _lengths(subject):
        longer = subject.map(lambda x, length=length: _longer(x, length))
        try:
            if subject.definition is not None:
                longer.reference(*map(clone, longer.tensors))
            reals = longer.call(*map(clone, longer.tensors))
        except Exception:
            # Some axes have to have the length that they have.
            continue
        _check_fake(longer, reals, "contiguous", f" (axes of length {length} are {length + 1} here)")


def _check_fake(subject: Subject, reals: Sequence[Tensor], layout: str, where: str = "") -> None:
    """Run on tensors without data, in that layout, and compare with the real results."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = subject.call(*[mode.from_tensor(arranged(x, layout)) for x in subject.tensors])
    if len(fakes) != len(reals):
        raise MismatchError(f"there are {len(fakes)} fake results, expected {len(reals)}.")
    for label, fake, real in zip(subject.output_labels, fakes, reals, strict=True):
        got, want = layout_of(fake), layout_of(real)
        if real.numel() == 0 and fake.numel() == 0:
            got, want = got[1:3], want[1:3]
        for what, a, b in zip(("shape", "dtype", "device", "strides"), got, want, strict=False):
            if a != b:
                raise MismatchError(f"{label} of {layout} arguments has the {what} {a} when fake, expected {b}{where}.")


def _lengths(subject: Subject) -> list[int]:
    """Lengths of axes, leading ones first: what a fake may have written down as a number."""
    leading = [x.shape[0] for x in subject.tensors if x.dim() > 0]
    others = [length for x in subject.tensors for length in x.shape[1:]]
    return [length for length in dict.fromkeys([*leading, *others]) if length > 0][:MAX_LENGTHS]


def _longer(x: Tensor, length: int) -> Tensor:
    """`x` with its last entry repeated along every axis of that length."""
    for axis in range(x.dim()):
        if x.shape[axis] == length:
            x = torch.cat([x, x.narrow(axis, length - 1, 1)], axis)
    return x


def opcheck(subject: Subject, record: Record) -> None:
    """`torch.library.opcheck` of the operator under the trees."""
    op = subject.primitive
    if op is None:
        raise NotApplicableError("a plain function is no operator")
    # torch gives every result a cotangent, those too that have none: statistics, and what was not wanted and is empty.
    refused = (
        op.spec.statistics or subject.mutates or not all(y.numel() for y in subject.call(*map(clone, subject.tensors)))
    )
    differentiable = not refused and subject.missing("vjp") is None
    tensors = [clone(x).requires_grad_(differentiable and i in subject.inputs) for i, x in enumerate(subject.tensors)]
    args = subject.trees(tensors)
    if not isinstance(subject.op, Primitive):
        flat, structure = subject.op.table.flatten(args, subject.static)
        args = (flat, structure.number)
    try:
        torch.library.opcheck(op.overload, args)
    except ModuleNotFoundError as error:
        raise NotApplicableError(f"torch's opcheck needs {error.name}") from None


# The compiler.


def _compiled(function: Callable) -> Callable:
    """`function` compiled on its own: a code object of another name shares nothing that Dynamo learnt before."""
    code = function.__code__
    fresh = types.FunctionType(
        code.replace(co_name=f"{code.co_name}_{next(_numbers)}"), function.__globals__, None, None, function.__closure__
    )
    return torch.compile(fresh, fullgraph=True, backend="aot_eager")


def compile_against_eager(subject: Subject, record: Record) -> None:
    """Under `torch.compile(fullgraph=True, backend="aot_eager")`: value, vjp and jvp as without it."""
    value = _value(subject)
    reverse = subject.missing("vjp") is None
    inputs = leaves(subject.tensors, subject.inputs if reverse else ())
    compiled = _compiled(value)
    gots, wants = (_tensors(subject, run(subject.trees(inputs))) for run in (compiled, value))
    _all_close(record, subject.output_labels[: len(wants)], "compiled", gots, wants)
    if reverse:
        bars = all_like([wants[i] for i in subject.outputs], 1)
        active = [inputs[i] for i in subject.inputs]
        grads = [
            torch.autograd.grad([ys[i] for i in subject.outputs], active, bars, materialize_grads=True)
            for ys in (gots, wants)
        ]
        labels = [f"the cotangent of {label}" for label in subject.active_labels]
        _all_close(record, labels, "compiled", *grads)
    if subject.missing("jvp") is None:
        _compiled_jvp(subject, record, value)


def _value(subject: Subject) -> Callable[[tuple], Any]:
    """The results as a function of all arguments, in terms that Dynamo traces."""
    op, static = subject.op, subject.static
    if subject.mutates:
        return lambda args: op.pure(*args, **static)[0]
    if not isinstance(op, Primitive):
        return lambda args: op(*args, **static)
    spec = op.spec
    overload, statistics = op.overload, [i for i, name in enumerate(spec.outputs) if name in spec.statistics]

    def value(args: tuple) -> Any:
        results = overload(*args)
        if not statistics:
            return results
        # A compiler differentiates all that it is given, and statistics refuse that.
        return [y.detach() if i in statistics else y for i, y in enumerate(results)]

    return value


def _compiled_jvp(subject: Subject, record: Record, value: Callable) -> None:
    """A jvp inside the compiled function, in the arguments that hold nothing but floating tensors."""
    args = subject.map(contiguous).args
    chosen = [i for i, arg in enumerate(args) if _is_floating(subject, arg)]
    if not chosen:
        record.note("no jvp under compile: no argument holds floating tensors alone")
        return
    primals = tuple(args[i] for i in chosen)
    options: dict[str, Any] = {"namespace": subject.namespace}
    flat, treespec = optree.tree_flatten(cast("Any", primals), **options)
    tangents = cast("tuple", optree.tree_unflatten(treespec, all_like(flat, 2)))

    def pushed(primals: tuple, tangents: tuple) -> Any:
        def of_primals(*primals: Any) -> Any:
            full = list(args)
            for i, primal in zip(chosen, primals, strict=True):
                full[i] = primal
            return value(tuple(full))

        return jvp(of_primals, primals, tangents, **options)[1]

    gots, wants = (_tensors(subject, run(primals, tangents)) for run in (_compiled(pushed), pushed))
    # Constants have tangents of zeros, or none.
    labels = [f"tangent {i} of the results" for i in range(len(wants))]
    _all_close(record, labels, "compiled", gots, wants)


def _is_floating(subject: Subject, tree: Any) -> bool:
    leaves = optree.tree_leaves(tree, namespace=subject.namespace)
    return bool(leaves) and all(isinstance(x, torch.Tensor) and has_derivatives(x.dtype) for x in leaves)


def _tensors(subject: Subject, output: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(output, namespace=subject.namespace) if isinstance(x, torch.Tensor)]


def _all_close(
    record: Record, labels: Sequence[str], how: str, gots: Sequence[Tensor], wants: Sequence[Tensor]
) -> None:
    if len(gots) != len(wants):
        raise MismatchError(f"there are {len(gots)} {how} results, expected {len(wants)}.")
    for label, got, want in zip(labels, gots, wants, strict=True):
        if want.numel() or got.numel():
            record.dtype(f"{label}, {how},", got, want.dtype)
            record.close(f"{label}, {how},", got, want)
