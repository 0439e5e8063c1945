"""The front end: it knows how to register, differentiate and batch an operator, and knows no operator."""

from primitives._core.backend import triton_kernels_module as triton_kernels_module
from primitives._core.batching import BatchInfo as BatchInfo
from primitives._core.batching import to_front as to_front
from primitives._core.batching import vmap_by_loop as vmap_by_loop
from primitives._core.primitive import Primitive as Primitive
from primitives._core.primitive import registered_primitives as registered_primitives
from primitives._core.value_and_jvp import value_and_jvp as value_and_jvp
