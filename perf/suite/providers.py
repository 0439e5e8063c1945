"""Who is measured: this package, torch eager and compiled, and the peers that can be imported.

Peers are given as they are documented; what one cannot do shows in the results with the error that it raises.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

import primitives as pr
from perf.suite.reference import EPS
from perf.workloads import COMPILED, DROPOUT_P, EAGER, LIBRARIES, OURS, PROVIDERS, TUNED

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from perf.workloads import Workload

    Function = Callable[..., Any]

# Of Inductor's modes those that leave CUDA graphs to the caller: the timer captures its own.
COMPILE_MODES = {COMPILED: "default", TUNED: "max-autotune-no-cudagraphs"}


class CannotError(NotImplementedError):
    """A provider does not have what is asked for."""


class LeftOutError(RuntimeError):
    """A provider might do what is asked for, but is not asked to."""


@dataclass(frozen=True)
class Provider:
    """One side of the comparison.

    Attributes:
        name: One of `PROVIDERS`.
        functions: From names of ops to what makes `f(x, weight, bias)` for a workload.
        compile_mode: Mode of torch.compile, if it is compiled.
        param_dtype: Dtype of parameters, if it is not the workload's.
    """

    name: str
    functions: dict[str, Callable[[Workload], Function]]
    compile_mode: str | None = None
    param_dtype: torch.dtype | None = None

    def function(self, workload: Workload) -> Function:
        """The function that computes the op of `workload`.

        Raises:
            CannotError: If there is none.
        """
        if workload.op not in self.functions:
            raise CannotError(f"{self.name} has no {workload.op.replace('_', ' ')}.")
        return self.functions[workload.op](workload)

    def wrap(self, function: Function) -> Function:
        """`function` as this provider runs it."""
        if self.compile_mode is None:
            return function
        return torch.compile(function, mode=self.compile_mode, dynamic=False)


def _family(source: Any) -> dict[str, Callable[[Workload], Function]]:
    """The ops of a module with the signatures of `torch.nn.functional`."""

    def layer_norm(workload: Workload) -> Function:
        shape = workload.shape[-1:]
        return lambda x, weight=None, bias=None: source.layer_norm(x, shape, weight, bias, EPS)

    def log_softmax(workload: Workload) -> Function:
        return lambda x: source.log_softmax(x, dim=workload.dim)

    def batch_norm(workload: Workload) -> Function:
        # Running statistics are small state that only modules have.
        return lambda x, weight=None, bias=None: source.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)

    def batch_norm_eval(workload: Workload) -> Function:
        def function(x: Tensor, *rest: Tensor) -> Tensor:
            *params, mean, variance = rest
            return source.batch_norm(x, mean, variance, *params, training=False, eps=EPS)

        return function

    def dropout(workload: Workload) -> Function:
        return lambda x: source.dropout(x, DROPOUT_P, training=True)

    return {make.__name__: make for make in (layer_norm, log_softmax, batch_norm, batch_norm_eval, dropout)}


def _layer_norm_alone(module: str, call: Callable[..., Any]) -> dict[str, Callable[[Workload], Function]]:
    """The only op of a library: `call(module, x, weight, bias)`."""
    imported = importlib.import_module(module)

    def make(workload: Workload) -> Function:
        if not workload.affine:
            raise CannotError("the layer norm needs a weight and a bias.")
        return lambda x, weight, bias: call(imported, x, weight, bias)

    return {"layer_norm": make}


# Module and call of each library's layer norm.
_LIBRARIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "liger": ("liger_kernel.transformers.functional", lambda m, x, w, b: m.liger_layer_norm(x, w, b, EPS)),
    "quack": ("quack.rmsnorm", lambda m, x, w, b: m.layernorm_fwd(x, w, b, eps=EPS)),
    "flash-attn": ("flash_attn.ops.triton.layer_norm", lambda m, x, w, b: m.layer_norm_fn(x, w, b, eps=EPS)),
    "apex": (
        "apex.normalization.fused_layer_norm",
        lambda m, x, w, b: m.fused_layer_norm_affine(x, w, b, x.shape[-1:], EPS),
    ),
}


def provider(name: str) -> Provider:
    """The provider of that name.

    Raises:
        ValueError: If there is none of that name.
        ImportError: If it cannot be imported.
    """
    if name == OURS:
        return Provider(name, _family(pr.functional))
    if name == EAGER or name in COMPILE_MODES:
        return Provider(name, _family(F), COMPILE_MODES.get(name))
    if name not in LIBRARIES:
        raise ValueError(f"provider must be one of {', '.join(PROVIDERS)}, got {name}.")
    # The layer norm of quack takes float32 parameters alone.
    return Provider(name, _layer_norm_alone(*_LIBRARIES[name]), None, torch.float32 if name == "quack" else None)


def reason_against(name: str) -> str | None:
    """Why a provider cannot be used; None if it can."""
    try:
        provider(name)
    # A peer that is broken is as good as absent, and must not stop the run.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
