"""Shows Inductor the Triton kernels inside primitives.

A primitive is one opaque operator in a compiled graph, and has to be while derivatives and batches are taken of it.
Ahead-of-time autograd then functionalizes the graph, below every transform. There, for Inductor alone, the operator is
replaced by what its launcher does: allocations, views, and a node for every kernel, with the plan that the launcher
makes for these sizes and strides. `torch.library.triton_op` uses the same place.

The operator stays opaque, which costs no graph break, where

- a size or stride is symbolic: plans depend on the number of rows, and each would be a guard on the batch size;
- a kernel would not run on these tensors (see `use_backend`), or runs in the interpreter;
- another compiler than Inductor asks, or `torch.export`, whose programs keep operators;
- a kernel needs a compiler option that graphs do not have.

The programs of `primitives.compile` are traced in the same way, and get the formula of an operator where Inductor makes
faster code of that than the kernel is. Torch's own operator for zero tangents is replaced in every trace, by zeros that
have memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from primitives._core import backend
from primitives._core.rules import RuleTable

_KNOWN_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
_thread = threading.local()
# The entry of a node's metadata that tells a tangent of what does not move.
ZERO = "is_zero_tangent"


@contextlib.contextmanager
def tracing_a_program() -> Iterator[None]:
    """Context for a trace of which a program of `primitives.compile` is made."""
    before, _thread.is_tracing = getattr(_thread, "is_tracing", False), True
    try:
        yield
    finally:
        _thread.is_tracing = before


def _is_graph_for_inductor() -> bool:
    # Ahead-of-time autograd also runs the function without a graph, to learn what it returns: the fake rule will do.
    if get_proxy_mode() is None or not functorch_config.decompose_custom_triton_ops:
        return False
    return getattr(_thread, "is_tracing", False) or _inductor_is_tracing()


def _gets_formula(args: tuple) -> bool:
    # On the CPU Inductor fuses it with what is around; on CUDA the kernels are as for torch.compile.
    devices = {x.device.type for x in args if isinstance(x, torch.Tensor)}
    return devices == {"cpu"} and getattr(_thread, "is_tracing", False)


def _show(
    name: str, shown: Callable[..., Any], library: torch.library.Library | None = None,
    when: Callable[[], bool] = _is_graph_for_inductor,
) -> None:  # fmt: skip
    """Register with torch what a graph gets to see of an operator: `shown(types, args, kwargs)`, if it returns any."""

    def rule(mode: Any, overload: Any, types: Sequence[type], args: tuple, kwargs: dict[str, Any]) -> Any:
        if when():
            with mode:
                outputs = shown(types, args, kwargs)
            if outputs is not NotImplemented:
                return outputs
        return mode.__torch_dispatch__(overload, types, args, kwargs)

    torch.library.register_torch_dispatch(name, FunctionalTensorMode, rule, lib=library)
    _shown[name] = shown


_shown: dict[str, Callable[..., Any]] = {}


def shown_in_a_program(func: Any) -> Callable[..., Any] | None:
    """What a graph gets to see of an operator, a function `(types, args, kwargs)`; `None` for most."""
    return _shown.get(func.name())


def register_inductor_lowering(rules: RuleTable, library: torch.library.Library) -> None:
    """Register with torch what Inductor gets to see of an operator."""

    def shown(types: Sequence[type], args: tuple, kwargs: dict[str, Any]) -> Any:
        composition = rules.given.get("composition")
        if composition is not None and not kwargs:
            return composition(*args)
        if "reference" in rules.given and not kwargs and _gets_formula(args):
            return rules.given["reference"](*args)
        is_shown = _is_shown(rules, types, args, kwargs)
        return backend.trace_kernel(rules.kernels["cuda"], args) if is_shown else NotImplemented

    _show(rules.spec.qualified_name, shown, library)
    _enter_cache_key(rules.spec.qualified_name)


def register_inductor_write(qualified_name: str, write: Callable[..., None], library: torch.library.Library) -> None:
    """Register with torch that Inductor gets to see `write` instead of an operator that writes into its arguments.

    Its copies are then fused with each other, where the operator would make one launch of each.
    """
    _show(qualified_name, lambda types, args, kwargs: write(*args, **kwargs), library)


# It makes a tensor without memory. The dispatcher knows it to be zero, compiled code and tensors without memory do not:
# they read its null pointer, or hand it on as a buffer to write to, and the process dies (pytorch issue 177261). A
# tangent of a weight is such a tensor as soon as a linear layer of a sequence is inside a `jvp` that is differentiated.
# That of a number stays: torch marks it as a number, and reads a number with memory where a trace has no data.
def _zeros(types: Sequence[type], args: tuple, kwargs: dict[str, Any]) -> Any:
    # Without the copy for autograd that `torch.zeros` returns.
    zeros = torch.ops.aten.zeros.default(*args, **kwargs) if args[0] else NotImplemented
    if zeros is not NotImplemented and getattr(_thread, "is_tracing", False):
        mode: Any = get_proxy_mode()
        inner = torch._from_functional_tensor(zeros.elem) if isinstance(zeros, FunctionalTensor) else zeros
        slot: Any = get_proxy_slot(inner, mode.tracer)
        slot.proxy.node.meta[ZERO] = True
    return zeros


_show("aten::_efficientzerotensor", _zeros, when=lambda: get_proxy_mode() is not None)


# Torch makes it where a tangent has other strides than its primal, and reads sizes of memory, which symbols have not.
def _tangent(types: Sequence[type], args: tuple, kwargs: dict[str, Any]) -> Any:
    (x, primal), num = args, kwargs.get("self_num_batch_dims", 0)
    if not _is_symbolic(primal):
        return NotImplemented
    return torch.zeros_like(primal.expand(*x.shape[:num], *primal.shape), dtype=x.dtype)


_show("aten::_new_zeros_with_same_feature_meta", _tangent, when=lambda: get_proxy_mode() is not None)


def _is_shown(rules: RuleTable, types: Sequence[type], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether this call becomes kernels: the conditions in the module's docstring, cheap ones first."""
    if kwargs or len(args) != len(rules.spec.arguments) or any(t not in _KNOWN_TYPES for t in types):
        return False
    if not (rules.kernels_are_traceable and rules.has_kernel_for("cuda")):
        return False
    on_gpu = all(x.is_cuda for x in args if isinstance(x, torch.Tensor))
    return on_gpu and not any(map(_is_symbolic, args))


def _inductor_is_tracing() -> bool:
    # A module that was not imported is not tracing; importing it takes a second.
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and isinstance(virtualized.V.fake_mode, torch._subclasses.FakeTensorMode)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(map(_is_symbolic, (*value.shape, *value.stride())))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


# Torch keeps compiled graphs on disk, under a key that it makes before it sees any kernel.


def _enter_cache_key(qualified_name: str) -> None:
    """Make the key of cached graphs depend on the kernels of an operator, as `triton_op` does for its own."""
    torch._library.triton.triton_ops_to_kernels[qualified_name] = _KernelsInForce()  # type: ignore[assignment] - iterated


class _KernelsInForce:
    """Iterable of the one stand-in for all kernels and rules, made anew for every key.

    The lowering of a graph depends on the backend, on the kernels and on their plans.
    """

    def __iter__(self) -> Iterator[types.SimpleNamespace]:
        source = f"# {backend.current_backend()} {_sources_digest()}\n"
        # What torch reads of a Triton kernel: its source, and a function whose globals it goes through.
        yield types.SimpleNamespace(src=source, __name__="primitives", fn=lambda: None)


@functools.cache
def _sources_digest() -> str:
    """Digest of the source of this package and of the kernels."""
    digest = hashlib.sha256()
    for package in ("primitives", "primitives.kernels"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(pathlib.Path(folder).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()
