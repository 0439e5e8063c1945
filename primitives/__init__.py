"""Training primitives for PyTorch that stay right under every derivative: attention, norms and log-softmax.

`primitives.functional` mirrors `torch.nn.functional`, `primitives.nn` mirrors `torch.nn`; `primitives.nn.convert`
changes the modules of an existing model. Importing this package imports no Triton: kernels are loaded at their first
call.
"""

import sys
from typing import Any

from primitives import autograd, custom, decompositions, func, functional, nn, testing, tracing
from primitives._audit.function import audit
from primitives._audit.report import AuditReport, Finding
from primitives._compiled._api import compile
from primitives._core.backend import current_backend, use_backend
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
from primitives._core.naming import publish
from primitives._repair.switch import is_repaired, repair_torch
from primitives._version import __version__
from primitives._warm_up import warm_up
from primitives.custom import custom_op
from primitives.testing import KernelError, RuleError

__all__ = [
    "AuditReport",
    "AxisError",
    "BackendError",
    "CommunicationError",
    "DeviceError",
    "DtypeError",
    "Finding",
    "KernelError",
    "LabelError",
    "LeafError",
    "MissingRuleError",
    "MutationError",
    "PrimitivesError",
    "RuleError",
    "ShapeError",
    "TraceError",
    "TreeError",
    "__version__",
    "audit",
    "autograd",
    "compile",
    "current_backend",
    "custom",
    "custom_op",
    "decompositions",
    "func",
    "functional",
    "is_repaired",
    "nn",
    "repair_torch",
    "testing",
    "tracing",
    "use_backend",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    homes = [module for module in (functional, nn, func, autograd, tracing, testing) if name in module.__all__]
    where = f" Did you mean {' or '.join(f'{module.__name__}.{name}' for module in homes)}?" if homes else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{where}", name=name, obj=sys.modules[__name__])


publish(custom, autograd, decompositions, func, functional, nn, testing, tracing, sys.modules[__name__])
