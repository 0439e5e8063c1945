"""The front end: it knows how to register, differentiate and batch an operator, and knows no operator."""

from primitives._core.backend import current_backend, triton_kernels_module, use_backend
from primitives._core.batching import BatchInfo, to_front, vmap_by_loop
from primitives._core.errors import (
    AxisError,
    BackendError,
    CommunicationError,
    DeviceError,
    DtypeError,
    LabelError,
    LeafError,
    MissingRuleError,
    MutationError,
    PrimitivesError,
    ShapeError,
    TraceError,
    TreeError,
)
from primitives._core.primitive import Primitive, registered_primitives
from primitives._core.value_and_jvp import value_and_jvp

__all__ = [
    "AxisError",
    "BackendError",
    "BatchInfo",
    "CommunicationError",
    "DeviceError",
    "DtypeError",
    "LabelError",
    "LeafError",
    "MissingRuleError",
    "MutationError",
    "Primitive",
    "PrimitivesError",
    "ShapeError",
    "TraceError",
    "TreeError",
    "current_backend",
    "registered_primitives",
    "to_front",
    "triton_kernels_module",
    "use_backend",
    "value_and_jvp",
    "vmap_by_loop",
]
