"""Bounds of what a kernel may touch in Triton's interpreter: each pointer its own tensor's elements, and no others.

    with bounds_checked():
        layer_norm_fwd(x, None, None, 1, 0, 1e-5)

An access that is not masked off goes unnoticed wherever the values that it reads are not used, or what it writes is
memory of nobody. Here it fails, with the names of the kernel and of the argument that the address came from: while a
kernel runs, the upper bits of each of its pointers, which no address uses, hold the number of that argument, and
survive what a kernel adds.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

# Methods of the builder in which every load and store ends; their signatures differ between releases of Triton only
# behind these: positions of the pointers and of the mask among their arguments, and what they count as.
METHODS = {
    "create_masked_load": (0, 1, ("loads",)),
    "create_masked_store": (0, 2, ("stores",)),
    "create_atomic_cas": (0, None, ("loads", "stores")),
    "create_atomic_rmw": (1, 3, ("loads", "stores")),
}

_TAG_SHIFT = 48
_ADDRESS_BITS = np.uint64(2**48 - 1)


class OutOfBoundsError(AssertionError):
    """A kernel loads or stores outside of the tensor that it was given."""


def active_pointers(name: str, args: tuple) -> tuple[np.ndarray, int]:
    """Pointers of the lanes that are not masked off, in one axis, and the bytes of an element.

    Args:
        name: One of `METHODS`.
        args: What it is called with.
    """
    pointer_index, mask_index, _ = METHODS[name]
    pointers, mask = args[pointer_index], None if mask_index is None else args[mask_index]
    found = np.asarray(pointers.data)
    active = None if mask is None else np.asarray(mask.data)
    if active is not None and not active.all():
        found = found[np.broadcast_to(active, found.shape)]
    return found.ravel(), max(pointers.get_element_ty().primitive_bitwidth // 8, 1)


def addresses_of(pointers: np.ndarray) -> np.ndarray:
    """The addresses in pointers, which may say what argument they came from."""
    return pointers & _ADDRESS_BITS


class _Extent:
    """The memory of one argument of a launch, in pointers that hold its number.

    Args:
        tensor: The argument.
        tag: Its number.
    """

    def __init__(self, tensor: Tensor, tag: int) -> None:
        self._tensor, self._itemsize = tensor, tensor.element_size()
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._span = span + 1 if tensor.numel() else 0
        self._start = tensor.data_ptr() + (tag << _TAG_SHIFT)
        self._stop = self._start + self._span * self._itemsize
        self._has_gaps = self._span != tensor.numel()
        self._elements: np.ndarray | None = None

    def holds(self, pointers: np.ndarray, itemsize: int) -> bool:
        """Whether all of some pointers are those of elements."""
        if pointers.min() < self._start or pointers.max() >= self._stop or itemsize != self._itemsize:
            return False
        return not self._has_gaps or bool(self._is_element()[self._offsets(pointers)].all())

    def misses(self, pointers: np.ndarray) -> np.ndarray:
        """Offsets, in elements from the first one, of those that are not."""
        offsets = self._offsets(pointers)
        inside = (offsets >= 0) & (offsets < self._span)
        return offsets[~inside] if not self._span else offsets[~(inside & self._is_element()[offsets * inside])]

    def _offsets(self, pointers: np.ndarray) -> np.ndarray:
        return (pointers - np.uint64(self._start)).view(np.int64) // self._itemsize

    def _is_element(self) -> np.ndarray:
        """For each place from the first element to the last one whether it is an element: views have gaps."""
        if self._elements is None:
            self._elements = np.zeros(self._span, dtype=bool)
            strides = self._tensor.stride()
            np.lib.stride_tricks.as_strided(self._elements, self._tensor.shape, strides)[...] = True
        return self._elements


class _Launch:
    """A kernel in flight and the tensors among its arguments, in the order of its parameters."""

    def __init__(self, executor: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self._executor, self._args, self._kwargs = executor, args, kwargs
        self._extents: list[_Extent] = []
        self.error: OutOfBoundsError | None = None

    def add(self, tensor: Tensor) -> int:
        """Number of one more tensor."""
        self._extents.append(_Extent(tensor, len(self._extents)))
        return len(self._extents) - 1

    def check(self, pointers: np.ndarray, itemsize: int, kinds: tuple[str, ...]) -> None:
        """Hold every pointer to the tensor whose number it has."""
        if not pointers.size or self._extents[int(pointers[0]) >> _TAG_SHIFT].holds(pointers, itemsize):
            return
        tags = pointers >> np.uint64(_TAG_SHIFT)
        for tag in np.unique(tags).tolist():
            own = pointers[tags == tag]
            if not self._extents[tag].holds(own, itemsize):
                self.error = OutOfBoundsError(self._complaint(tag, own, kinds))
                raise self.error

    def _complaint(self, tag: int, pointers: np.ndarray, kinds: tuple[str, ...]) -> str:
        function = self._executor.fn
        kwargs = {name: value for name, value in self._kwargs.items() if name in self._executor.arg_names}
        bound = inspect.getcallargs(function, *self._args, **kwargs)
        name, tensor = [(name, value) for name, value in bound.items() if hasattr(value, "data_ptr")][tag]
        misses = self._extents[tag].misses(pointers)
        where = f"at {misses.min()} to {misses.max()}" if misses.size else "in elements of another size"
        return (
            f"{function.__name__} {' and '.join(kinds)} outside of {name}: of a tensor {tuple(tensor.shape)} with "
            f"strides {tuple(tensor.stride())} {misses.size} elements {where}"
        )


# The kernel that runs; the interpreter runs one at a time.
_running: list[_Launch] = []
# Not empty where launches are held to their bounds.
_in_force: list[bool] = []


def _converting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        converted = original(value)
        if _running and hasattr(value, "data_ptr"):
            converted.handle.data |= np.uint64(_running[-1].add(value) << _TAG_SHIFT)
        return converted

    return convert


def _checking(name: str, original: Callable) -> Callable:
    kinds = METHODS[name][2]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _running:
            _running[-1].check(*active_pointers(name, args), kinds)
            index = METHODS[name][0]
            pointers = args[index]
            plain = interpreter.TensorHandle(addresses_of(np.asarray(pointers.data)), pointers.dtype)
            args = (*args[:index], plain, *args[index + 1 :])
        return original(self, *args, **kwargs)

    return method


def _running_kernels(original: Callable) -> Callable:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launch = _Launch(self, args, kwargs)
        _running.append(launch)
        try:
            return original(self, *args, **kwargs)
        except Exception:
            # The interpreter reports what a kernel raises as an error of its own.
            if launch.error is not None:
                raise launch.error from None
            raise
        finally:
            _running.pop()

    return run


@contextlib.contextmanager
def bounds_checked() -> Iterator[None]:
    """Hold every kernel that is interpreted inside to the elements of its arguments; nested ones change nothing.

    Raises:
        OutOfBoundsError: From a launch that loads or stores elsewhere.
    """
    if _in_force:
        yield
        return
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    methods = {name: getattr(builder, name) for name in METHODS}
    convert, run = interpreter._implicit_cvt, executor.__call__
    for name, method in methods.items():
        setattr(builder, name, _checking(name, method))
    interpreter._implicit_cvt = _converting(convert)
    executor.__call__ = _running_kernels(run)
    _in_force.append(True)
    try:
        yield
    finally:
        _in_force.pop()
        for name, method in methods.items():
            setattr(builder, name, method)
        interpreter._implicit_cvt, executor.__call__ = convert, run
