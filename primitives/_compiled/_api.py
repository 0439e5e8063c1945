"""`primitives.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch

from primitives._core.errors import check_callable

if TYPE_CHECKING:
    from primitives._compiled._function import CompiledFunction

__all__ = ["compile"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Module = TypeVar("_Module", bound=torch.nn.Module)


@overload
def compile(
    fn: _Module, *, backend: str | Callable[..., Any] = "inductor", mode: str | None = None,
    options: dict[str, Any] | None = None, dynamic: bool = False,
) -> _Module: ...  # fmt: skip


@overload
def compile(
    fn: Callable[_P, _R], *, backend: str | Callable[..., Any] = "inductor", mode: str | None = None,
    options: dict[str, Any] | None = None, dynamic: bool = False,
) -> CompiledFunction[_P, _R]: ...  # fmt: skip


@overload
def compile(
    fn: None = None, *, backend: str | Callable[..., Any] = "inductor", mode: str | None = None,
    options: dict[str, Any] | None = None, dynamic: bool = False,
) -> Callable[[Callable[_P, _R]], CompiledFunction[_P, _R]]: ...  # fmt: skip


def compile(
    fn: Callable[..., Any] | None = None,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool = False,
    **_others: Any,
) -> Callable[..., Any]:
    """`fn`, compiled, with derivatives of every order inside and outside of it.

    The value of `fn` and each of its derivatives is traced when it is first needed, and compiled: a program. A training
    step takes two, the forward pass, and the backward pass from what the first has saved. A derivative of a backward
    pass computes again, once per order. So compile the whole loss where it holds derivatives, rather than the model.

    Python runs once per program; twice where `fn` writes to a view, or raises. There is one for each set of sizes,
    strides, dtypes and devices of tensors, for each set of constants among the arguments, and for the state of torch
    that changes results: grad mode, autocast, default dtype. Modules, variables of the closure and of globals, and
    attributes of objects that code names, are looked up at each call: their tensors are arguments of the programs, and
    another value of a variable or an attribute, or a module of another structure, gets programs of its own. Random
    numbers are drawn anew in each call from the state that `torch.manual_seed` sets, and are other ones than those of
    the uncompiled function. Inside `torch.compile`, and inside any trace, `fn` itself runs.

    Args:
        fn: Function of pytrees, or a module; without it the result is a decorator. What it writes to buffers of
            modules is written once a call; it may not write to arguments or captured tensors.
        backend: As in `torch.compile`: a name or a function `(graph module, example inputs) -> callable`.
        mode: As in `torch.compile`, for Inductor.
        options: Inductor's options.
        dynamic: Whether one program serves all sizes. An axis of size 0 or 1 stays as it is.

    Returns:
        The compiled function; `print` shows its programs, and `graphs` are their joint graphs. For a module, one of
        the same class that shares everything with it; there they are `compiled` and `compiled.graphs`.

    Raises:
        TypeError: If `fn` cannot be called, or for another option: `fullgraph`, as a program is always whole.
        ValueError: If `mode` is not a mode of Inductor, or `backend` not one of torch.
        TraceError: By a call, with the line, if `fn` asks for the values of a tensor, as a branch, `.item()`,
            `nonzero` and masks as indices do; calls `backward()`, or reads or writes `.grad`; or calls
            `torch.manual_seed` or `torch.seed`.
        MutationError: By a call, if `fn` writes to arguments or captured tensors, or assigns to `.data`; sets a buffer
            that is `None`; or writes to a buffer that shares memory with another, or to a part of a tensor of which
            `unfold` has made windows with gaps.
        LeafError: By a call, if an argument is neither a tensor, a dataclass nor a hashable constant, or a tensor that
            requires grad is used that is neither reached by the closure nor an argument; for subclasses of tensors and
            sparse tensors; for lazy modules inside that had no call yet, and modules of TorchScript; if `fn` returns
            another structure where it is differentiated, or a function, an iterator or a view that hold tensors; if
            `as_strided` with a `storage_offset` reads an argument that is a view from elsewhere in its memory; for
            `torch.utils.checkpoint` inside with `use_reentrant=True`; and where a `DistributedDataParallel` is reached,
            which goes around what is compiled.
        MissingRuleError: By a call, if `fn` draws with `generator=`, or from distributions whose numbers are drawn by
            rejection (`Gamma`, `Beta`); and by a recorded backward pass (`create_graph=True`) of a batch of cotangents
            (`is_grads_batched=True`).

    Example:
        >>> import torch, primitives as pr
        >>> w = torch.ones(3, requires_grad=True)
        >>> def loss(x):
        ...     y, y_dot = torch.func.jvp(lambda x: (w * x).sin(), (x,), (torch.ones(3),))
        ...     return (y - y_dot).square().sum()
        >>> step = pr.compile(loss, backend="eager")  # "inductor" is the default
        >>> step(torch.zeros(3)).backward()
        >>> w.grad
        tensor([2., 2., 2.])
    """
    if _others:
        advice = "Leave it out: a program is always whole." if "fullgraph" in _others else "Inductor's go into options."
        raise TypeError(f"compile: must have backend, mode, options or dynamic, got {', '.join(_others)}. {advice}")
    if not callable(backend) and backend not in ("inductor", "eager"):
        from torch import _dynamo

        if backend not in (known := _dynamo.list_backends(None)):
            raise ValueError(f"compile: backend must be a function or one of {', '.join(known)}, got {backend!r}.")
    if fn is None:
        return functools.partial(compile, backend=backend, mode=mode, options=options, dynamic=dynamic)
    check_callable("compile", fn)
    from primitives._compiled._function import CompiledFunction
    from primitives._compiled._graphs import Settings

    chosen = dict(options or {})
    if mode is not None:
        from torch import _inductor

        modes = _inductor.list_mode_options()
        if mode not in modes:
            raise ValueError(f"compile: mode must be one of {', '.join(modes)}, got {mode!r}.")
        chosen = {**modes[mode], **chosen}
    settings = Settings(backend, {name.replace("-", "_"): value for name, value in chosen.items()}, dynamic)
    if isinstance(fn, torch.nn.Module):
        # One that is compiled already, by this or by torch.compile.
        return _twin(getattr(fn, "_original", getattr(fn, "_orig_mod", fn)), settings)
    return CompiledFunction(fn, settings)


class _Compiled:
    """The part of a compiled module that differs from the module itself, with which it shares its attributes."""

    _original: torch.nn.Module
    _forward: Any
    compiled: Any  # a property, since the function would be a method

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Another module of the class, as a slice of a `Sequential` makes one, is not this one compiled."""
        return cls.__bases__[1](*args, **kwargs)

    @property
    def forward(self) -> Any:
        """The module's, compiled; or what was set on the module since."""
        found = vars(self).get("forward")
        return self.compiled if found is self._forward else found

    @forward.setter
    def forward(self, value: Any) -> None:
        vars(self)["forward"] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _twin, (self._original, self.compiled.settings.fresh())


def _twin(module: Any, settings: Any) -> Any:
    """A module that shares the attributes of `module`, and whose `forward` is compiled."""
    from primitives._compiled._function import CompiledFunction
    from primitives.func._calls import no_torchscript

    if isinstance(module, torch.jit.ScriptModule):
        raise no_torchscript()
    kind = type(module)
    compiled = CompiledFunction(module.forward, settings)
    # Properties are found before the attributes of the object.
    own = vars(module).get("forward")
    members = {"_original": module, "compiled": property(lambda self: compiled), "__module__": kind.__module__}
    members["_forward"] = property(lambda self: own)
    twin = object.__new__(type(f"Compiled{kind.__name__}", (_Compiled, kind), members))
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin
