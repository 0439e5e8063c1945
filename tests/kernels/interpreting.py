"""Triton's interpreter, held to the bounds of its tensors, and watched.

An access that is not masked off goes unnoticed wherever the values that it reads are not used, or what it writes is
outside all tensors. Here it fails, with the names of the kernel and of the argument that the address came from: while a
kernel runs, the upper bits of each of its pointers, which no address uses, hold the number of that argument, and
survive what a kernel adds.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

from tests.kernels import fast_interpreter

REPOSITORY = pathlib.Path(__file__).parents[2]

# Methods of the builder in which every load and store ends; their signatures differ between releases of Triton only
# behind these: positions of the pointers and of the mask among their arguments, and what they count as.
_METHODS = {
    "create_masked_load": (0, 1, ("loads",)),
    "create_masked_store": (0, 2, ("stores",)),
    "create_atomic_cas": (0, None, ("loads", "stores")),
    "create_atomic_rmw": (1, 3, ("loads", "stores")),
}
_TAG_SHIFT = 48
_ADDRESS_BITS = np.uint64(2**48 - 1)

# The kernel that runs; the interpreter runs one at a time.
_running: list[Launch] = []
# For each `watched` in force, the launches that it has seen.
_watchers: list[list[Launch]] = []


class OutOfBoundsError(AssertionError):
    """A kernel loads or stores outside of the tensor that it was given."""


class Accesses(NamedTuple):
    """Addresses of the elements, of so many bytes, that one load of a program read: one per active lane."""

    addresses: np.ndarray
    itemsize: int
    program: tuple[int, ...]

    def within(self, start: int, stop: int) -> Accesses:
        """Those in a range of addresses."""
        return self._replace(addresses=self.addresses[(self.addresses >= start) & (self.addresses < stop)])


class _Extent:
    """The memory of one argument of a launch, in pointers that hold its number."""

    def __init__(self, tensor: Tensor, tag: int) -> None:
        self._tensor, self._itemsize = tensor, tensor.element_size()
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._span = span + 1 if tensor.numel() else 0
        self._start = tensor.data_ptr() + (tag << _TAG_SHIFT)
        self._stop = self._start + self._span * self._itemsize
        own = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        self._has_gaps = self._span > own
        self._elements: np.ndarray | None = None

    def holds(self, pointers: np.ndarray, itemsize: int) -> bool:
        """Whether all of some pointers are those of elements."""
        if pointers.min() < self._start or pointers.max() >= self._stop or itemsize != self._itemsize:
            return False
        return not self._has_gaps or bool(self._is_element()[self.offsets(pointers)].all())

    def offsets(self, pointers: np.ndarray) -> np.ndarray:
        return (pointers - np.uint64(self._start)).view(np.int64) // self._itemsize

    def _is_element(self) -> np.ndarray:
        """For each place from the first element to the last one whether it is an element: views have gaps."""
        if self._elements is None:
            self._elements = np.zeros(self._span, dtype=bool)
            strides = self._tensor.stride()
            np.lib.stride_tricks.as_strided(self._elements, self._tensor.shape, strides)[...] = True
        return self._elements


class Launch:
    """A kernel in flight: its tensors, and if somebody watches, its loads and how many products it takes."""

    def __init__(self, executor: Any, args: tuple) -> None:
        self._executor, self._args = executor, args
        self._extents: list[_Extent] = []
        self.error: OutOfBoundsError | None = None
        self.num_programs = 0 if callable(executor.grid) else math.prod(executor.grid)
        self.loads: list[Accesses] = []
        self.num_matmuls = 0

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
        bound = zip(self._executor.arg_names, self._args, strict=False)
        name, tensor = [(name, value) for name, value in bound if hasattr(value, "data_ptr")][tag]
        offsets = self._extents[tag].offsets(pointers)
        return (
            f"{self._executor.fn.__name__} {' and '.join(kinds)} outside of {name}: of a tensor {tuple(tensor.shape)} "
            f"with strides {tuple(tensor.stride())} elements from {offsets.min()} to {offsets.max()}"
        )


def _converting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        converted = original(value)
        if _running and hasattr(value, "data_ptr"):
            converted.handle.data |= np.uint64(_running[-1].add(value) << _TAG_SHIFT)
        return converted

    return convert


def _checking(name: str, original: Callable) -> Callable:
    pointer_index, mask_index, kinds = _METHODS[name]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _running:
            return original(self, *args, **kwargs)
        pointers, mask = args[pointer_index], None if mask_index is None else args[mask_index]
        found, active = np.asarray(pointers.data), None if mask is None else np.asarray(mask.data)
        plain = interpreter.TensorHandle(found & _ADDRESS_BITS, pointers.dtype)
        if active is not None and not active.all():
            found = found[np.broadcast_to(active, found.shape)]
        found, itemsize = found.ravel(), max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        _running[-1].check(found, itemsize, kinds)
        if _watchers and "loads" in kinds:
            _running[-1].loads.append(Accesses(found & _ADDRESS_BITS, itemsize, self.grid_idx))
        return original(self, *args[:pointer_index], plain, *args[pointer_index + 1 :], **kwargs)

    return method


def _counting(original: Callable) -> Callable:
    def create_dot(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _running and _watchers:
            _running[-1].num_matmuls += 1
        return original(self, *args, **kwargs)

    return create_dot


def _running_kernels(original: Callable) -> Callable:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launch = Launch(self, args)
        _running.append(launch)
        for seen in _watchers:
            seen.append(launch)
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


def install() -> None:
    """Hold every kernel that this process interprets to the elements of its arguments. Call it once.

    Kernels raise `OutOfBoundsError` from a load or a store elsewhere.
    """
    for name in _METHODS:
        setattr(interpreter.InterpreterBuilder, name, _checking(name, getattr(interpreter.InterpreterBuilder, name)))
    interpreter.InterpreterBuilder.create_dot = _counting(interpreter.InterpreterBuilder.create_dot)
    interpreter._implicit_cvt = _converting(interpreter._implicit_cvt)
    interpreter.GridExecutor.__call__ = _running_kernels(interpreter.GridExecutor.__call__)
    fast_interpreter.install()


@contextlib.contextmanager
def watched() -> Iterator[list[Launch]]:
    """Record the launches inside, with all that they load and multiply."""
    seen: list[Launch] = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.remove(seen)


@contextlib.contextmanager
def reordered_programs() -> Iterator[None]:
    """Visit the programs of every launch inside from the last to the first, so that each two are exchanged."""
    builder = interpreter.interpreter_builder

    def set_grid_idx(*place: int) -> None:
        turned = (size - 1 - number for size, number in zip(builder.grid_dim, place, strict=True))
        type(builder).set_grid_idx(builder, *turned)

    # An attribute of the one instance, in front of the method of its class.
    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        del builder.set_grid_idx


def run_compiled(module: str, *arguments: str, failure: str = "") -> str:
    """The output of a module in a process without the interpreter, in which kernels are compiled."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{failure}\n{done.stderr[-4000:]}"
    return done.stdout
