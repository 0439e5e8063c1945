"""Which implementation a primitive runs on: Triton kernels, kernels for the CPU, or the plain-torch reference.

The choice is one setting of the process, not of the thread: the autograd engine runs the backward pass of a CUDA
graph on threads of its own, and those must make the same choice as the forward pass did.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from primitives._core.contexts import Decorates
from primitives._core.errors import BackendError

BACKENDS = ("auto", "triton", "reference")
ENVIRONMENT_VARIABLE = "PRIMITIVES_BACKEND"


def _checked(name: str, origin: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{origin}: the backend must be one of {', '.join(BACKENDS)}, got {name!r}.")
    return name


# Read by every call, so not behind a function; written by `use_backend` alone.
selected = _checked(os.environ.get(ENVIRONMENT_VARIABLE) or "auto", ENVIRONMENT_VARIABLE)


def current_backend() -> str:
    """Name of the backend in force: `"auto"`, `"triton"` or `"reference"`.

    Example:
        >>> import primitives as pr
        >>> with pr.use_backend("reference"):
        ...     pr.current_backend()
        'reference'
    """
    return selected


def guard_on_backend() -> str:
    """The form in which Inductor sees a primitive, `"operator"` or `"kernels"`, asked in code that Dynamo traces.

    Dynamo then compiles anew when the answer is another one: Inductor takes kernels into the graph (see
    `primitives._core.inductor`), which fixes the choice.
    """
    # Dynamo guards on what decides a branch, and not on a comparison whose outcome goes unused.
    return "operator" if selected == "reference" else "kernels"


class use_backend(Decorates):  # noqa: N801 - used like a function, as contextlib.suppress is
    """Context manager and decorator that selects the backend of every primitive inside it.

    `"auto"` runs Triton kernels on CUDA (ROCm included), kernels made of ATen's on the CPU, and the reference where
    there are none; `"triton"` also runs Triton's on CPU tensors, in its interpreter, and raises where that is off;
    `"reference"` runs plain torch everywhere.
    The setting belongs to the process: threads share it. `PRIMITIVES_BACKEND` in the environment selects the first one.

    Args:
        name: `"auto"`, `"triton"` or `"reference"`.

    Raises:
        ValueError: If `name` is none of these.
        BackendError: Inside a function that is being compiled.

    Example:
        >>> import primitives as pr, torch
        >>> with pr.use_backend("reference"):
        ...     pr.functional.log_softmax(torch.zeros(2), dim=0)
        tensor([-0.6931, -0.6931])
    """

    def __init__(self, name: str) -> None:
        self.name: str = _checked(name, "use_backend")
        self._previous: list[str] = []

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            raise BackendError(
                "use_backend: the backend cannot change inside a compiled function, which chooses it when it runs. "
                "Put the context manager around the call of the compiled function."
            )
        global selected
        self._previous.append(selected)
        selected = self.name

    def __exit__(self, *exc_info: object) -> None:
        global selected
        selected = self._previous.pop()


def triton_kernels_module(name: str) -> ModuleType:
    """Module `<name>` of the kernels, imported on first use.

    Raises:
        BackendError: If Triton is not installed.
    """
    try:
        return importlib.import_module(f"primitives.kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise BackendError(
            "Triton kernels were asked for, but 'triton' is not installed. Install it (pip install triton, Linux only),"
            ' or choose the plain-torch implementation: primitives.use_backend("reference").'
        ) from error


def require_interpreter(op_name: str) -> None:
    """Raise unless Triton kernels can run on CPU tensors, which takes Triton's interpreter."""
    if not triton_kernels_module("runtime.kernel").INTERPRETED:
        raise BackendError(
            f'{op_name}: the backend is "triton" and the tensors are on the CPU, where Triton kernels only run in '
            "Triton's interpreter. Set TRITON_INTERPRET=1 before triton is imported, or use the backend "
            '"auto" or "reference".'
        )


def trace_kernel(kernel: Callable, args: tuple) -> Any:
    """Put what `kernel` does with `args` into the graph that torch is tracing.

    Returns:
        Its outputs, or `NotImplemented` where its launches cannot be nodes of a graph: in the interpreter, with options
        that graphs do not have, or where it leaves the call to the reference.
    """
    kernels = triton_kernels_module("runtime.kernel")
    if kernels.INTERPRETED:
        return NotImplemented
    try:
        with kernels.tracing():
            outputs = kernel(*args)
    except kernels.UntraceableLaunchError:
        return NotImplemented
    return NotImplemented if outputs is None else outputs
