"""`torch.func` over pytrees: dicts, dataclasses, namedtuples and everything else that is registered with optree.

The transforms are torch's own, run on flat tensors: they nest with each other, with those of `torch.func`, and inside
`torch.compile(fullgraph=True)`. Trees, shapes and dtypes are checked first, and errors name the leaf by its key path.
"""

from primitives.func._forward import hvp, jvp, linearize
from primitives.func._jacobian import hessian, jacfwd, jacrev
from primitives.func._modules import (
    debug_unwrap,
    functional_call,
    functionalize,
    rearrange,
    replace_all_batch_norm_modules_,
    stack_module_state,
)
from primitives.func._region import checkpoint
from primitives.func._reverse import grad, grad_and_value, vjp
from primitives.func._vmap import chunk_vmap, vmap

__all__ = [
    "checkpoint",
    "chunk_vmap",
    "debug_unwrap",
    "functional_call",
    "functionalize",
    "grad",
    "grad_and_value",
    "hessian",
    "hvp",
    "jacfwd",
    "jacrev",
    "jvp",
    "linearize",
    "rearrange",
    "replace_all_batch_norm_modules_",
    "stack_module_state",
    "vjp",
    "vmap",
]
