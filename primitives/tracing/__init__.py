"""Training functions as pure functions and as graphs: modules, joint graphs, mutations, random state, subclasses."""

from primitives.tracing._functional_call import PureModule, functional_call
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
