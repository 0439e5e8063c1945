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
from perf.workloads import DROPOUT_P

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from perf.workloads import Workload

    Function = Callable[..., Any]

OURS = "primitives"
EAGER = "torch"
# Of Inductor's modes those that leave CUDA graphs to the caller: the timer captures its own.
COMPILE_MODES = {"torch.compile": "default", "torch.compile max-autotune": "max-autotune-no-cudagraphs"}
LIBRARIES = ("liger", "quack", "flash-attn", "apex")
NAMES = (OURS, EAGER, *COMPILE_MODES, *LIBRARIES)


class CannotError(NotImplementedError):
    """A provider does not have what is asked for."""


class LeftOutError(RuntimeError):
    """A provider might do what is asked for, but is not asked to."""


@dataclass(frozen=True)
class Provider:
    """One side of the comparison.

    Attributes:
        name: One of `NAMES`.
        functions: From names of ops to what makes `f(x, weight, bias)` for a workload.
        compile_mode: Mode of torch.compile, if it is compiled.
        compiles: Whether a first call takes long enough to be worth doing in parallel beforehand.
        param_dtype: Dtype of parameters, if it is not the workload's.
    """

    name: str
    functions: dict[str, Callable[[Workload], Function]]
    compile_mode: str | None = None
    compiles: bool = True
    param_dtype: torch.dtype | None = None

    def function(self, workload: Workload) -> Function:
        """What computes the op of `workload`.

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


def _layer_norm(layer_norm: Function) -> Callable[[Workload], Function]:
    def make(workload: Workload) -> Function:
        normalized_shape = workload.shape[-1:]

        def function(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
            return layer_norm(x, normalized_shape, weight, bias, EPS)

        return function

    return make


def _log_softmax(log_softmax: Function) -> Callable[[Workload], Function]:
    return lambda workload: lambda x: log_softmax(x, dim=workload.dim)


def _batch_norm(batch_norm: Function) -> Callable[[Workload], Function]:
    # Running statistics are small state that only modules have.
    def function(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return batch_norm(x, None, None, weight, bias, training=True, eps=EPS)

    return lambda _: function


def _batch_norm_eval(batch_norm: Function) -> Callable[[Workload], Function]:
    def function(x: Tensor, *rest: Tensor) -> Tensor:
        *params, mean, variance = rest
        return batch_norm(x, mean, variance, *params, training=False, eps=EPS)

    return lambda _: function


def _dropout(dropout: Function) -> Callable[[Workload], Function]:
    return lambda _: lambda x: dropout(x, DROPOUT_P, training=True)


def _family(source: Any) -> dict[str, Callable[[Workload], Function]]:
    return {
        "layer_norm": _layer_norm(source.layer_norm),
        "log_softmax": _log_softmax(source.log_softmax),
        "batch_norm": _batch_norm(source.batch_norm),
        "batch_norm_eval": _batch_norm_eval(source.batch_norm),
        "dropout": _dropout(source.dropout),
    }


def _affine(workload: Workload) -> None:
    if not workload.affine:
        raise CannotError("the layer norm needs a weight and a bias.")


def _liger() -> Provider:
    functional = importlib.import_module("liger_kernel.transformers.functional")

    def make(workload: Workload) -> Function:
        _affine(workload)
        return lambda x, weight, bias: functional.liger_layer_norm(x, weight, bias, EPS)

    return Provider("liger", {"layer_norm": make})


def _quack() -> Provider:
    rmsnorm = importlib.import_module("quack.rmsnorm")

    def make(workload: Workload) -> Function:
        _affine(workload)
        return lambda x, weight, bias: rmsnorm.layernorm_fwd(x, weight, bias, eps=EPS)

    # Its layer norm takes float32 parameters alone.
    return Provider("quack", {"layer_norm": make}, param_dtype=torch.float32)


def _flash_attn() -> Provider:
    module = importlib.import_module("flash_attn.ops.triton.layer_norm")

    def make(workload: Workload) -> Function:
        _affine(workload)
        return lambda x, weight, bias: module.layer_norm_fn(x, weight, bias, eps=EPS)

    return Provider("flash-attn", {"layer_norm": make})


def _apex() -> Provider:
    module = importlib.import_module("apex.normalization.fused_layer_norm")

    def make(workload: Workload) -> Function:
        _affine(workload)
        return lambda x, weight, bias: module.fused_layer_norm_affine(x, weight, bias, workload.shape[-1:], EPS)

    return Provider("apex", {"layer_norm": make}, compiles=False)


_LIBRARIES = {"liger": _liger, "quack": _quack, "flash-attn": _flash_attn, "apex": _apex}


def provider(name: str) -> Provider:
    """The provider of that name.

    Raises:
        ValueError: If there is none of that name.
        ImportError: If it cannot be imported.
    """
    if name == OURS:
        return Provider(name, _family(pr.functional))
    if name == EAGER:
        return Provider(name, _family(F), compiles=False)
    if name in COMPILE_MODES:
        return Provider(name, _family(F), compile_mode=COMPILE_MODES[name])
    if name not in _LIBRARIES:
        raise ValueError(f"provider must be one of {', '.join(NAMES)}, got {name}.")
    return _LIBRARIES[name]()


def available(names: tuple[str, ...]) -> dict[str, str | None]:
    """Each name with None if it can be used, else the reason why not."""
    return {name: _reason_against(name) for name in names}


def _reason_against(name: str) -> str | None:
    try:
        provider(name)
    # A peer that is broken is as good as absent, and must not stop the run.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
