"""`repair_torch`: torch's own operators with right derivatives, for the process or for a thread."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._C import _functorch  # type: ignore[attr-defined] - no stub

from primitives._core.autograd import tangents_possible
from primitives._core.contexts import Decorates
from primitives._core.errors import BackendError, refuse_shared_statistics
from primitives._repair.dispatcher import DEVICES, Registrations
from primitives._repair.kernels import SIGNS, forward_kernel, inplace_kernel, inplace_name, repairs
from primitives._repair.nodes import install_backwards, keep_repaired
from primitives._repair.state import is_active, process, this_thread

_Function = TypeVar("_Function", bound="Callable[..., Any]")
_peek = _functorch.peek_interpreter_stack

__all__ = ["is_repaired", "repair_torch", "repaired_thread"]

_lock = threading.Lock()
# By what they wait for.
_at_once, _transforms, _forward_ad = _registrations = Registrations(), Registrations(), Registrations()
# One entry for each block that some thread is in.
_open_contexts: list[int] = []


def is_repaired() -> bool:
    """Whether torch's operators are repaired on this thread.

    Example:
        >>> import primitives as pr
        >>> with pr.repair_torch():
        ...     pr.is_repaired()
        True
    """
    return is_active()


class repair_torch(Decorates):  # noqa: N801 - used like a function, as torch.set_grad_enabled is
    """Make every derivative of torch's own operators right, whoever calls them; a context manager too.

    `pr.repair_torch()` acts at once, for the whole process; `undo` takes it back. `with pr.repair_torch():` acts for
    the calling thread until the block ends, and so it does as a decorator. Both may be repeated and nested.

    Operators whose nested derivatives torch has wrong or lacks (layer, batch and group norm, attention, determinants,
    solvers, `huber_loss`, ...) get a formula of this package, registered with torch's dispatcher. Modules, functions
    and models stay torch's, and so do values and first derivatives of plain code on the CPU, bit for bit. A derivative
    of higher order, a transform of `torch.func`, a tangent, or a CUDA tensor takes the formula, which on CUDA is a
    fused kernel where there is one. Code that a compiler traces without forward mode gives the same graph as before.

    Results that were recorded while it held may be differentiated after it has ended.

    Raises:
        BackendError: Inside a function that is being compiled.

    Warns:
        RuntimeWarning: If another package has registered kernels for the same operators.

    Derivatives:
        Forward and reverse mode, every nesting to order 3 by test. The page "Torch's operators, repaired" lists them.

    Example:
        >>> import torch, primitives as pr
        >>> x, v = torch.tensor([[1.0, 3.0], [1.0, 3.0]], dtype=torch.float64)
        >>> def loss(x):
        ...     return torch.nn.functional.layer_norm(x, (2,), eps=1.0)[0] ** 2
        >>> def curvature(x):
        ...     return torch.func.jvp(lambda x: torch.func.jvp(loss, (x,), (v,))[1], (x,), (v,))[1].item()
        >>> round(curvature(x), 3)
        0.25
        >>> with pr.repair_torch():
        ...     round(curvature(x), 3)
        -0.5
    """

    def __init__(self, *given: Any) -> None:
        if given:
            kind = type(given[0]).__name__
            raise TypeError(
                f"repair_torch: it must be called without arguments, got {kind}. Write @pr.repair_torch() for a "
                "function; operators are repaired for every module."
            )
        _refuse_to_compile()
        with _lock:
            # None once this is a context or a decorator.
            self._was_repaired: bool | None = process.is_repaired
            # What `this_thread` has of each thread that has entered: a generator may end in another one.
            self._entered: list[dict[str, Any]] = []
            _begin()
            _at_once.warn_of_others(repairs(), stacklevel=2)
            process.is_repaired = True

    def undo(self) -> None:
        """End the repair of the process, whoever began it; blocks of `with` that are open go on.

        What was recorded stays right, and so does `create_graph=True` where norms and attention are recorded later:
        nodes of torch do not say when they were made.
        """
        _refuse_to_compile()
        with _lock:
            if process.is_repaired:
                _Compiled.frames_at_end = _Compiled.frames()
                keep_repaired(math.inf)
            process.is_repaired = False
            if not _open_contexts:
                for registrations in _registrations:
                    registrations.take_back()

    def __enter__(self) -> repair_torch:
        """Begin on this thread alone."""
        _refuse_to_compile()
        with _lock:
            _begin()
            self._leave_process()
            _open_contexts.append(1)
            this_thread.num_contexts += 1
            self._entered.append(vars(this_thread))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End what `__enter__` began, for the thread that entered."""
        with _lock:
            own = next((n for n, thread in enumerate(self._entered) if thread is vars(this_thread)), -1)
            self._entered.pop(own)["num_contexts"] -= 1
            _open_contexts.pop()
            keep_repaired(None if own >= 0 else math.inf)
            if not is_active():
                _Compiled.frames_at_end = _Compiled.frames()

    def __repr__(self) -> str:
        """Whether torch is repaired, by how many operators, and who ends it."""
        if not is_active():
            return "<repair_torch: torch is as it was; call repair_torch() to repair it>"
        where = "undo() ends it" if process.is_repaired else "on this thread, to the end of the block"
        return f"<repair_torch: {len(repairs())} operators of torch are repaired; {where}>"

    def __call__(self, function: _Function) -> _Function:
        """`function`, run inside the context."""
        with _lock:
            self._leave_process()
        return super().__call__(function)

    def _leave_process(self) -> None:
        """Take back that the constructor began for every thread."""
        if self._was_repaired is False:
            process.is_repaired = False
        self._was_repaired = None


@contextlib.contextmanager
def repaired_thread() -> Iterator[None]:
    """Context in which functions of this package call torch repaired; nothing where a compiler traces."""
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    with _lock:
        _open_contexts.append(1)
        _register()
    this_thread.num_contexts += 1
    try:
        yield
    finally:
        this_thread.num_contexts -= 1
        with _lock:
            _open_contexts.pop()
            keep_repaired()


class _Compiled:
    """Code that Dynamo compiled while torch was not repaired, which has no guard on that.

    Code that was compiled with the repair on is right without it too, and stays.
    """

    frames_at_end = 0

    @staticmethod
    def frames() -> int:
        """How many Dynamo has compiled so far."""
        return getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)


def _begin() -> None:
    """Have Dynamo forget all code, if it has compiled some since the repair was on last, and register kernels."""
    if not is_active() and _Compiled.frames_at_end != _Compiled.frames():
        torch._dynamo.reset()
    _register()


def _register() -> None:
    """Put kernels before torch's own, once; those that wait where a transform or a tangent may be there already."""
    if not _at_once:
        install_backwards()
        # Others that wait are right in reverse mode alone, and a tangent has a sign of its own.
        early = [r for r in repairs().values() if r.waits_for and (r.is_fused or r.reverse == "node")]
        names = [repair.name for repair in early if "CPU" in repair.devices]
        front = [(name, "FuncTorchDynamicLayerFrontMode", _sign) for name in (*names, *map("aten::{}".format, SIGNS))]
        duals = [("aten::_make_dual", f"Autograd{device}", _sign) for device in DEVICES]
        _at_once.add([*_kernels(""), *duals, *front])
    if tangents_possible():
        _register_those_that_wait()


def _register_those_that_wait() -> None:
    if _at_once and not _transforms:
        _transforms.add(_kernels("transform"))
    if _at_once and not _forward_ad and _peek() is None:
        _forward_ad.add(_kernels("forward_ad"))


def _sign(own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, before whose first call the kernels that wait are registered."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _forward_ad and (not _transforms or _peek() is None):
            with _lock:
                _register_those_that_wait()
        try:
            return own(keyset, *args, **kwargs)
        except RuntimeError as error:
            refuse_shared_statistics(error)
            raise

    return kernel


def _kernels(waits_for: str) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    for repair in repairs().values():
        for device in repair.devices:
            if waits_for == ("" if device == "CUDA" and repair.is_fused else repair.waits_for):
                yield repair.name, f"Autograd{device}", functools.partial(forward_kernel, repair, device)
                name = inplace_name(repair)
                if name is not None:
                    yield name, f"Autograd{device}", functools.partial(inplace_kernel, repair)


def _refuse_to_compile() -> None:
    if torch.compiler.is_dynamo_compiling():
        raise BackendError(
            "repair_torch: torch's operators cannot change inside a compiled function. Call repair_torch before it, or "
            "put the context manager around its call."
        )
