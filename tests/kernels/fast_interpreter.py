"""Triton's interpreter, made faster: what it does again for each operation of each program is done once.

Results stay what they are, bit by bit.
"""

import types
from typing import Any

import numpy as np
import triton.experimental.gluon  # noqa: F401 - a first launch imports it in a patched language: Python 3.10 fails
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """Make the interpreter of this process faster, for good. Call it once."""
    _replace_language()
    _remember_types()
    # It works out whether integers overflow and says so in debug mode alone, in which the interpreter never is.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, binary_op: None
    _cut_bfloat16_off()


def _replace_language() -> None:
    """Replace the functions of the language for good, where Triton does so anew in each launch and device function.

    This process compiles nothing, and it takes two thirds of the time of most launches here.
    """
    semantic = TritonSemantic(interpreter.interpreter_builder)

    def attach(target: Any, name: str, member: Any, *others: Any) -> None:
        function = getattr(member, "__wrapped__", member)
        setattr(target, name, lambda *args, **kwargs: function(*args, **(kwargs | {"_semantic": semantic})))

    interpreter._patch_attr = attach
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: types.SimpleNamespace(restore=lambda: None)


def _remember_types() -> None:
    """Make what follows from types alone once: Triton does so again for each operation of each program."""
    new_type, new_tensor, np_dtype = tl.core.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        name = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if name not in types:
            new_type(self, element_ty, shape)
            types[name] = dict(vars(self))
        vars(self).update(types[name])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            new_tensor(self, None, type)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name], handle=handle)

    def remembered(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = np_dtype(type)
        return dtypes[type.name]

    tl.core.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = init_type, init_tensor, remembered


def _cut_bfloat16_off() -> None:
    """A bfloat16 is the upper half of a float32, subnormal numbers too, which Triton makes others of."""
    convert = interpreter._convert_float

    def converted(data: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        names = input_dtype.name, output_dtype.name
        if names == ("bf16", "fp32"):
            return data.astype(np.uint32) << np.uint32(16)
        if names == ("fp32", "bf16") and rounding_mode is None:
            return (np.ascontiguousarray(data).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return convert(data, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = converted
