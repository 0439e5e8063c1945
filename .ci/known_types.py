"""Reads pyright's `--verifytypes` report: 95 % of what is public has a known type, and results are not `Any`."""

import inspect
import json
import sys

import primitives

# Trees, whose structure no annotation can say.
TREES = {"functional_call", "in_place", "unwrap_cotangents", "vjp", "wrap"}

# What these offer, `primitives.functional` does.
INSIDE = ("primitives.ops.", "primitives.kernels")


def unknown_results() -> set[str]:
    """Names of public functions and methods whose result is annotated as `Any`."""
    public = vars(primitives)
    modules = [primitives, *(public[name] for name in primitives.__all__ if inspect.ismodule(public[name]))]
    offered = [(name, getattr(module, name)) for module in modules for name in module.__all__]
    methods = [pair for _, kind in offered if inspect.isclass(kind) for pair in vars(kind).items()]
    functions = [(name, f) for name, f in (*offered, *methods) if inspect.isfunction(f) and not name.startswith("_")]
    return {name for name, function in functions if function.__annotations__.get("return") == "Any"}


if (found := unknown_results()) != TREES:
    sys.exit(f"make check: results are of type Any: {sorted(found - TREES)}; known by now: {sorted(TREES - found)}")
symbols = [each for each in json.load(sys.stdin)["typeCompleteness"]["symbols"] if each["isExported"]]
known = [each["isTypeKnown"] for each in symbols if not each["name"].startswith(INSIDE)]
if sum(known) < 0.95 * len(known):
    sys.exit(f"make check: {sum(known) / len(known):.1%} of what is public has a known type, and 95 % must.")
