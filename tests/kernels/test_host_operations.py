"""A launcher allocates, views and launches: no operation of torch that touches memory runs beside its kernels.

It allocates its results and at most one scratch tensor. The launches are taken out of the way, so that each call costs
what its host code does; no result means anything. No launcher is left out of this, of the costs or of the other gates.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import triton_kernels
from tests.kernels.calls import (
    CHANNEL_LAYOUTS,
    EPS,
    LAYER_NORM,
    REDUCED_LAYOUTS,
    ROW_LAYOUTS,
    STRIDED_CHANNELS,
    Call,
    batch_norm_calls,
    calls_of_all_launchers,
    copying_calls,
    dropout_calls,
    layer_norm_call,
    log_softmax_calls,
    short_rows,
)
from tests.kernels.layer_norm_truth import random
from triton_kernels import costs, layer_norm, log_softmax
from triton_kernels._kernel import Kernel, intercept

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import Tensor

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
COPIES = {"clone", "copy_", "_to_copy"}
DTYPES = (torch.float32, torch.bfloat16)


class HostOperations(TorchDispatchMode):
    """Collects what is allocated inside, and the names of the operations that touch the memory of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        # Kept alive, so that no two of them have one address.
        self.allocated: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ALLOCATIONS and not _is_view(func) and _has_tensors(func):
            self.names.append(name)
        result = func(*args, **(kwargs or {}))
        if name in ALLOCATIONS:
            self.allocated.append(result)
        return result

    def scratch(self, results: list[Tensor]) -> list[tuple[int, ...]]:
        """Shapes of the tensors with elements that were allocated inside and hold none of the results."""
        kept = {result.untyped_storage().data_ptr() for result in results}
        found = [tensor for tensor in self.allocated if tensor.numel()]
        return [tuple(tensor.shape) for tensor in found if tensor.untyped_storage().data_ptr() not in kept]


def _has_tensors(func: Any) -> bool:
    return any("Tensor" in str(value.type) for value in (*func._schema.arguments, *func._schema.returns))


def _is_view(func: Any) -> bool:
    """Whether an operation returns what an argument of it holds, and writes to none."""
    arguments, returns = func._schema.arguments, func._schema.returns
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)
    return not writes and any(result.alias_info is not None for result in returns)


def check(call: Call) -> None:
    """Hold one call to its declared copies and launches, and to one scratch tensor."""
    launched: list[str] = []
    with intercept(lambda kernel, *launch: launched.append(kernel.__name__)), HostOperations() as operations:
        results = call.run()
    name = call.launcher.__name__
    others = [operation for operation in operations.names if operation not in COPIES]
    assert not others, f"{name} runs {', '.join(others)} beside its kernels"
    scratch = operations.scratch(results)
    assert len(scratch) <= 1, f"{name} allocates {len(scratch)} scratch tensors, {scratch}, beside its results"
    copies = len(operations.names)
    assert copies == call.copies, f"{name} runs {copies} copies, {call.copies} declared"
    # Costs are those of operands that need no copy.
    args = [arg.contiguous() if copies and isinstance(arg, torch.Tensor) else arg for arg in call.args]
    declared = getattr(costs, name)(*args).launches
    assert len(launched) == declared, f"{name} launches {', '.join(launched)}, {declared} launches are declared"


# A limit below all rows of the calls here makes them rows that one program or several sweep.
PLANS = pytest.mark.parametrize("splits", [0, 1, 32], ids=["in registers", "one program per row", "several per row"])


@PLANS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(dtype: torch.dtype, splits: int, use_limits: Callable[..., None]) -> None:
    if splits:
        use_limits(**short_rows(32, splits))
    for layout in ROW_LAYOUTS:
        for mode in LAYER_NORM:
            check(layer_norm_call(mode, 80, dtype, 6, layout))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [*CHANNEL_LAYOUTS, *STRIDED_CHANNELS])
def test_batch_norm(layout: str, dtype: torch.dtype) -> None:
    for call in batch_norm_calls(layout, dtype=dtype):
        check(call)


@PLANS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, dim", [((3, 80), 1), ((2, 40, 3), 1)], ids=str)
def test_log_softmax(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, splits: int, use_limits: Callable[..., None]
) -> None:
    if splits:
        use_limits(**short_rows(32, splits))
    for call in log_softmax_calls(shape, dim, dtype):
        # Rows that are every second one of a longer tensor are read where they are.
        strided = [arg.repeat_interleave(2, 0)[::2] if isinstance(arg, torch.Tensor) else arg for arg in call.args]
        check(call._replace(args=tuple(strided)))
    for layout in REDUCED_LAYOUTS:
        for call in log_softmax_calls(shape, dim, dtype, layout):
            check(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_and_declared_copies(dtype: torch.dtype) -> None:
    for call in dropout_calls(dtype):
        check(call)
    copying = copying_calls(dtype)
    assert all(call.copies for call in copying)
    for call in copying:
        check(call)


# Public functions of the modules of launchers that launch nothing.
HELPERS = {"per_stream"}
# A public module without launchers.
NO_LAUNCHERS = {"tuning"}


def launcher_modules() -> list[ModuleType]:
    """The public modules of the package, which are those of launchers, but for the ones named above."""
    found = pkgutil.iter_modules(triton_kernels.__path__)
    names = [module.name for module in found if not (module.ispkg or module.name.startswith("_"))]
    return [importlib.import_module(f"triton_kernels.{name}") for name in names if name not in NO_LAUNCHERS]


def public_functions(module: ModuleType) -> set[str]:
    """Names of the functions that a module defines for others, listed by it or not."""
    functions = inspect.getmembers(module, inspect.isfunction)
    return {name for name, value in functions if value.__module__ == module.__name__ and not name.startswith("_")}


def test_every_launcher_has_costs_and_calls() -> None:
    modules = launcher_modules()
    launchers = {name for module in modules for name in module.__all__} - HELPERS
    unlisted = {name for module in modules for name in public_functions(module)} - HELPERS - launchers
    assert not unlisted, f"{unlisted} are public and not in __all__"
    declared = set(costs.__all__) - {"Cost"}
    assert launchers == declared, f"launchers without costs: {launchers - declared}; others: {declared - launchers}"
    called = {call.launcher.__name__ for call in calls_of_all_launchers()}
    assert launchers == called, f"launchers that no gate calls: {launchers - called}; others: {called - launchers}"


def test_every_kernel_is_launched(use_limits: Callable[..., None]) -> None:
    modules = [
        importlib.import_module(f"triton_kernels.{m.name}") for m in pkgutil.iter_modules(triton_kernels.__path__)
    ]
    kernels = {name for module in modules for name, value in vars(module).items() if isinstance(value, Kernel)}
    launched: set[str] = set()
    with intercept(lambda kernel, *launch: launched.add(kernel.__name__)):
        for limits in ({}, short_rows(16, 1)):
            use_limits(**limits)
            for call in calls_of_all_launchers():
                call.run()
    assert kernels == launched, f"kernels that no gate launches: {kernels - launched}"


# What must not get through, each beside the kernels of a launcher.
X = random(2, 6, 80)
MISTAKES = {
    "a pass over a result": (
        lambda x: layer_norm.layer_norm_fwd(x, None, None, 1, 0, EPS)[0].mul_(1.0),
        "runs mul_ beside",
    ),
    "a copy of a result": (
        lambda x: (y := log_softmax.log_softmax_fwd(x, 2, None)).copy_(y.clone()),
        "2 copies, 0 declared",
    ),
    "zeroed scratch": (
        lambda x: (x.new_zeros(4), log_softmax.log_softmax_fwd(x, 2, None)),
        "runs new_zeros beside",
    ),
    "a sum of partial results": (
        lambda x: (x.new_empty(4, 80).sum(0), log_softmax.log_softmax_fwd(x, 2, None)),
        "runs sum beside",
    ),
    "a cast": (lambda x: log_softmax.log_softmax_fwd(x.double(), 2, None), "1 copies, 0 declared"),
    "a copy of an operand": (
        lambda x: log_softmax.log_softmax_fwd(x[:, ::2].contiguous(), 2, None),
        "1 copies, 0 declared",
    ),
    "a second scratch tensor": (
        lambda x: (x.new_empty(2, 8), x.new_empty(3), log_softmax.log_softmax_fwd(x, 2, None))[2],
        r"2 scratch tensors, \[\(2, 8\), \(3,\)\], beside its results",
    ),
    "one launch too many": (
        lambda x: [log_softmax.log_softmax_fwd(x, 2, None) for _ in range(2)],
        "1 launches are declared",
    ),
}


@pytest.mark.parametrize("launcher, complaint", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_caught(launcher: Callable[..., Any], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, launcher.__name__, lambda x: costs.log_softmax_fwd(x, 2, None), raising=False)
    with pytest.raises(AssertionError, match=complaint):
        check(Call(launcher, (X,)))
