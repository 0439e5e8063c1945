"""Training functions as pure functions and as graphs: modules, joint graphs, mutations, random state, subclasses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from primitives.tracing._functional_call import PureModule, functional_call

if TYPE_CHECKING:
    from primitives.tracing._graph import JointGraph
    from primitives.tracing._joint import create_joint
    from primitives.tracing._mutations import PureFunction, functionalize_mutations
    from primitives.tracing._rng import PhiloxState, functionalize_rng, rng_mode
    from primitives.tracing._subclasses import SubclassSpec, Unwrapped, unwrap_subclasses
    from primitives.tracing._trace import trace_joint
    from primitives.tracing._user_code import TraceError

__all__ = [
    "JointGraph",
    "PhiloxState",
    "PureFunction",
    "PureModule",
    "SubclassSpec",
    "TraceError",
    "Unwrapped",
    "create_joint",
    "functional_call",
    "functionalize_mutations",
    "functionalize_rng",
    "rng_mode",
    "trace_joint",
    "unwrap_subclasses",
]

# Loaded when they are asked for: torch's tracer takes half a second to import, and most programs trace nothing.
_MODULES = {
    "JointGraph": "_graph",
    "PhiloxState": "_rng",
    "PureFunction": "_mutations",
    "SubclassSpec": "_subclasses",
    "TraceError": "_user_code",
    "Unwrapped": "_subclasses",
    "create_joint": "_joint",
    "functionalize_mutations": "_mutations",
    "functionalize_rng": "_rng",
    "rng_mode": "_rng",
    "trace_joint": "_trace",
    "unwrap_subclasses": "_subclasses",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
