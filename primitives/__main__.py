"""`python -m primitives`: what is installed, what would run where, and a self-check of every function; or an audit."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch import Tensor

import primitives as pr
from primitives._audit.nestings import described
from primitives._audit.strict import Call, errors_of
from primitives._core import registered_primitives, triton_kernels_module
from primitives._core.errors import BackendError

TOLERANCE = 1e-8


def _implementation(device: str) -> str:
    """Where a call on `device` ends up under the backend in force, in words."""
    backend = pr.current_backend()
    if backend == "reference":
        return "reference (plain torch)"
    if backend == "auto" and device == "cpu":
        return "ATen's fused kernels where they agree with the reference, else the reference (plain torch)"
    try:
        kernels = triton_kernels_module("runtime.kernel")
    except BackendError as error:
        return f"unavailable: {error}"
    if device == "cpu":
        return "Triton's interpreter" if kernels.INTERPRETED else "unavailable: TRITON_INTERPRET=1 is not set"
    return "Triton kernels"


def public_functions() -> dict[str, Callable[[Tensor], Tensor]]:
    """Each public function of one tensor `[2, 4, 4]`, of which all that the function must be given is made."""
    public = {name: getattr(pr.functional, name) for name in pr.functional.__all__}
    return {name: functools.partial(_called, name, f) for name, f in public.items() if inspect.isfunction(f)}


def arguments_of(name: str, function: Callable[..., Any], x: Tensor) -> dict[str, Any]:
    """All that a public function must be given, made of `x`, by the names of its arguments."""
    given = {
        **dict.fromkeys(("input", "query", "q"), x),
        **dict.fromkeys(("key", "k", "residual"), x.sin()),
        **dict.fromkeys(("value", "v"), x.cos()),
        **dict.fromkeys(("scale", "shift"), x[:, 0].sin()),
        **dict.fromkeys(("running_mean", "running_var")),
        "linear_weight": x[0].sin(),
        "target": torch.arange(8, device=x.device).reshape(2, 4) % 4,
        "normalized_shape": (4,),
        "num_groups": 2,
    }
    # Beside what has no default.
    asked = {"dim": 1, "training": True, "reduction": "none"}
    parameters = inspect.signature(function).parameters
    args = {key: value for key, value in asked.items() if key in parameters}
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in args:
            if key not in given:
                raise LookupError(f"self-check of {name}: give {key} a value in arguments_of, primitives/__main__.py.")
            args[key] = given[key]
    return args


def _called(name: str, function: Callable[..., Any], x: Tensor) -> Tensor:
    """All tensors that the function returns, as one vector."""
    torch.manual_seed(0)
    outputs = optree.tree_leaves(function(**arguments_of(name, function, x)))
    return torch.cat([out.flatten() for out in outputs if isinstance(out, torch.Tensor)])


def self_check(device: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Each function with the relative errors of its value and its derivatives, in float64, on `device`.

    The value is held to the reference, derivatives in every nesting of two to central differences, as by `audit`.
    """
    x = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    for name, function in public_functions().items():
        with torch.random.fork_rng():
            with pr.use_backend("reference"):
                reference = function(x)
            errors = errors_of(Call(function, (x,), {}), 2, "")
            value = ((function(x) - reference).abs().max() / reference.abs().max().clamp(min=1e-3)).item()
        found = {"value": value}
        for nesting, error in errors.items():
            if isinstance(error, Exception):
                raise error
            found[described(nesting)] = error
        yield name, found


def _check() -> int:
    """Print the report; the exit status is 1 if a self-check fails."""
    triton = importlib.util.find_spec("triton")
    version = importlib.import_module("triton").__version__ if triton else "not installed"
    print(f"primitives {pr.__version__}, Python {platform.python_version()} on {platform.platform()}")
    print(f"torch {torch.__version__}, triton {version}, optree {optree.__version__}")
    print(f"backend {pr.current_backend()!r}, {len(registered_primitives())} primitives")
    failed = False
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        name = f"{device} ({torch.cuda.get_device_name()})" if device == "cuda" else device
        implementation = _implementation(device)
        print(f"\n{name}: {implementation}")
        if implementation.startswith("unavailable"):
            failed = True
            continue
        print("  largest relative error, float64".ljust(34), end="", flush=True)
        for i, (name, row) in enumerate(self_check(device)):
            if not i:
                print("".join(kind.rjust(11) for kind in row))
            print(f"  {name}".ljust(34) + "".join(f"{error:11.1e}" for error in row.values()), flush=True)
            failed |= any(not error <= TOLERANCE for error in row.values())
    print(f"\nself-check {'FAILED' if failed else 'passed'} (limit {TOLERANCE:.0e})")
    return int(failed)


def _audit(place: str, order: int, *, strict: bool) -> int:
    """Print the audit of what a function `module:name` returns; the exit status is 1 if something was found."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.path.insert(0, os.getcwd())
    module, _, name = place.partition(":")
    if importlib.util.find_spec(module) is None:
        sys.exit(f"audit cannot find the module {module}: give module:name, as in train:main.")
    made = getattr(importlib.import_module(module), name or "main", None)
    case = made() if callable(made) else None
    if not (isinstance(case, tuple) and len(case) == 2):
        sys.exit(
            f"audit: {place} must be a function that returns (function, args), got {made if case is None else case}."
        )
    function, args = case
    report = pr.audit(function, args, order=order, strict=strict)
    print(report)
    return int(not report)


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser("python -m primitives", description="A self-check of the package, or an audit.")
    parser.add_argument("--version", action="version", version=pr.__version__)
    commands = parser.add_subparsers(dest="command", title="commands (without one: check)")
    commands.add_parser("check", help="compare every function with its definition: seconds")
    audit = commands.add_parser("audit", help="say which derivatives of a function torch gets right")
    audit.add_argument("place", help="`module:name` of a function that returns a function or module, and its args")
    audit.add_argument(
        "--order", type=int, choices=(1, 2, 3), default=2, help="how many derivatives are nested, 1 to 3"
    )
    audit.add_argument("--strict", action="store_true", help="compare with central differences too: minutes")
    given = parser.parse_args(argv)
    return _audit(given.place, given.order, strict=given.strict) if given.command == "audit" else _check()


if __name__ == "__main__":
    sys.exit(main())
