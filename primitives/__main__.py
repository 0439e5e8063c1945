"""`python -m primitives`: what is installed, what would run where, and a self-check of every primitive family."""

from __future__ import annotations

import importlib.util
import platform
import sys
from typing import TYPE_CHECKING

import optree
import torch

import primitives as pr
from primitives.core import BackendError, registered_primitives, triton_kernels_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TOLERANCE = 1e-9


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _implementation(device: str) -> str:
    """Where a call on `device` ends up under the backend in force, in words."""
    backend = pr.current_backend()
    if backend == "reference":
        return "reference (plain torch)"
    if backend == "auto" and device == "cpu":
        return "ATen's fused kernels where they agree with the reference, else the reference (plain torch)"
    try:
        kernels = triton_kernels_module("_kernel")
    except BackendError as error:
        return f"unavailable: {error}"
    if device == "cpu":
        return "Triton's interpreter" if kernels.INTERPRETED else "unavailable: TRITON_INTERPRET=1 is not set"
    return "Triton kernels"


def _families() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """One call of each family, and the same by formula."""

    def standardized(x: Tensor, axis: int) -> Tensor:
        centered = x - x.mean(axis, keepdim=True)
        return centered * (centered.square().mean(axis, keepdim=True) + 1e-5).rsqrt()

    functional = pr.functional

    def cross_entropy(x: Tensor) -> Tensor:
        return functional.cross_entropy(x, torch.arange(x.shape[0], device=x.device), reduction="none")

    return {
        "layer_norm": (lambda x: functional.layer_norm(x, (x.shape[-1],)), lambda x: standardized(x, 1)),
        "batch_norm": (lambda x: functional.batch_norm(x, None, None, training=True), lambda x: standardized(x, 0)),
        "attention": (lambda x: functional.attention(x, x, x, scale=1.0), lambda x: (x @ x.mT).softmax(-1) @ x),
        "cross_entropy": (cross_entropy, lambda x: x.exp().sum(1).log() - x.diagonal()),
        "log_softmax": (lambda x: functional.log_softmax(x, 1), lambda x: x - x.exp().sum(1, keepdim=True).log()),
    }


def _derivatives(function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The value, both first derivatives, and the mixed second ones, along `v`."""
    func = torch.func

    def loss(x: Tensor) -> Tensor:
        return (function(x) ** 3).sum()

    def tangent(x: Tensor) -> Tensor:
        return func.jvp(function, (x,), (v,))[1]

    return {
        "value": function(x),
        "jvp": tangent(x),
        "vjp": func.grad(loss)(x),
        "jvp(jvp)": func.jvp(tangent, (x,), (v,))[1],
        "jvp(vjp)": func.jvp(func.grad(loss), (x,), (v,))[1],
        "vjp(jvp)": func.grad(lambda x: (tangent(x) ** 2).sum())(x),
    }


def self_check(device: str) -> dict[str, dict[str, float]]:
    """Largest relative error of each family and derivative against a formula in float64, on `device`."""
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(5, 7, dtype=torch.float64, generator=generator).to(device) for _ in range(2))
    errors = {}
    for name, (ours, formula) in _families().items():
        got, truth = _derivatives(ours, x, v), _derivatives(formula, x, v)
        errors[name] = {
            kind: ((got[kind] - truth[kind]).abs().max() / truth[kind].abs().max()).item() for kind in truth
        }
    return errors


def main() -> int:
    """Print the report; the exit status is 1 if a self-check fails."""
    triton = importlib.util.find_spec("triton")
    version = importlib.import_module("triton").__version__ if triton else "not installed"
    print(f"primitives {pr.__version__}, Python {platform.python_version()} on {platform.platform()}")
    print(f"torch {torch.__version__}, triton {version}, optree {optree.__version__}")
    print(f"backend {pr.current_backend()!r}, {len(registered_primitives())} primitives")
    failed = False
    for device in _devices():
        name = f"{device} ({torch.cuda.get_device_name()})" if device == "cuda" else device
        implementation = _implementation(device)
        print(f"\n{name}: {implementation}")
        if implementation.startswith("unavailable"):
            failed = True
            continue
        errors = self_check(device)
        kinds = list(next(iter(errors.values())))
        print("  largest relative error, float64".ljust(34) + "".join(kind.rjust(11) for kind in kinds))
        for family, row in errors.items():
            print(f"  {family}".ljust(34) + "".join(f"{row[kind]:11.1e}" for kind in kinds))
            failed |= any(not error <= TOLERANCE for error in row.values())
    print(f"\nself-check {'FAILED' if failed else 'passed'} (limit {TOLERANCE:.0e})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
