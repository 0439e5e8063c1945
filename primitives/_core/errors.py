"""Exception types of the package.

Each one also derives from what `torch` raises for the same mistake, so that code which catches torch's error keeps
working when it moves here.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch


class PrimitivesError(Exception):
    """Base of all exception types of the package."""


class ShapeError(PrimitivesError, ValueError, RuntimeError):
    """An argument has the wrong shape, or a shape that the operation cannot take."""


class AxisError(ShapeError, IndexError):
    """An axis lies outside the axes of its tensor."""


class DeviceError(PrimitivesError, ValueError, RuntimeError):
    """Arguments that must be on one device are on several."""


class DtypeError(PrimitivesError, TypeError, NotImplementedError):
    """An argument has a dtype that the operation does not take, or one that differs from what it must match."""


class LabelError(PrimitivesError, ValueError, RuntimeError, IndexError):
    """A class index is not that of a class."""


class LeafError(DtypeError, ValueError):
    """A leaf of a pytree is not a tensor, or not one to differentiate: depending on where, torch raises either."""


class MissingRuleError(PrimitivesError, NotImplementedError):
    """An operation was asked for a derivative or a transform that it has no rule for."""


class TreeError(PrimitivesError, ValueError, TypeError, RuntimeError):
    """Two pytrees that must have the same structure differ."""


class BackendError(PrimitivesError, RuntimeError):
    """The chosen backend cannot run here: Triton is missing, is not ours, or has no device to run on."""


class CommunicationError(PrimitivesError, RuntimeError):
    """Another process of a group ended, or did not come within the time-out of the group."""


class TraceError(PrimitivesError, RuntimeError):
    """A function does something that no graph can hold; the message names the line."""


class MutationError(PrimitivesError, RuntimeError, ValueError):
    """A tensor was to be updated in place where that is impossible."""


def check_callable(function: str, func: object) -> None:
    """Raise unless `func` can be called: its result is easily passed in its place."""
    if not callable(func):
        raise TypeError(
            f"{function}: the first argument must be a function or a module, got {type(func).__name__}. Pass the "
            "function itself, not its result."
        )


def check_arguments(function: str, name: str, args: object) -> None:
    """Raise unless `args` is a tuple of arguments."""
    if not isinstance(args, tuple):
        raise TreeError(
            f"{function}: {name} must be a tuple of arguments, got {type(args).__name__}. Write (x,) for one."
        )


def refuse_shared_statistics(error: BaseException) -> None:
    """Raise in place of torch's error that `vmap` maps over a batch norm which updates statistics of all samples."""
    if not str(error).startswith("Batch norm got a batched tensor"):
        return
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_stack(innermost)]
    modules = [owner for owner in owners if isinstance(owner, torch.nn.Module)]
    who = type(modules[0]).__name__ if modules else "batch_norm"
    paths = [(path, outer) for outer in modules[:0:-1] for path, x in outer.named_modules() if path and x is modules[0]]
    if paths:
        who = f"{who} {paths[0][0]!r} of {type(paths[0][1]).__name__}"
    raise MutationError(
        f"vmap: running statistics of {who}, which training updates in place, must have a batch axis where the input "
        "has one, got statistics that all samples share. Call the model by primitives.tracing.pure_module, which "
        "returns those of each sample, or call model.eval(), or set track_running_stats=False. "
        f"({str(error).splitlines()[0]})"
    ) from error


@contextlib.contextmanager
def remedy_noted() -> Iterator[None]:
    """Context in which errors of torch name a remedy: a missing derivative's gets a note (Python 3.11+)."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        refuse_shared_statistics(error)
        text, note = str(error), ""
        if "use forward AD with" in text or ("derivative for" in text and "is not implemented" in text):
            note = (
                "primitives: torch lacks this derivative. pr.repair_torch() gives its operators what they lack; "
                "pr.audit(model, inputs) lists them."
            )
        elif "mutate a captured Tensor" in text:
            note = (
                "primitives: call a module that writes its buffers (batch norm in training) by "
                "primitives.tracing.pure_module, which returns them."
            )
        # Transforms nest, and each sees the error.
        if note and hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):
            error.add_note(note)  # type: ignore[attr-defined] - of Python 3.11
        raise
