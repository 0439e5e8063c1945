"""Launches of Triton kernels, compiled for a chip that is not there and run by the emulator on CPU tensors."""

from __future__ import annotations

import contextlib
import re
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import triton
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from primitives.kernels.runtime.chips import CHIPS
from primitives.testing._ptx import instructions, products  # noqa: F401 - registers them
from primitives.testing._ptx.machine import Machine, prepared
from primitives.testing._ptx.memory import Fault, Faults, Global, Traffic

Array = Any


class StandInDriver:
    """Stands in for the driver of a chip of `CHIPS`, with what Triton asks of one before it loads a kernel."""

    def __init__(self, chip_name: str) -> None:
        self.utils, self._number, self._chip = self, list(CHIPS).index(chip_name), CHIPS[chip_name]

    def get_current_target(self) -> GPUTarget:
        """Chip that Triton compiles for."""
        name, warp_size = self._chip.name, self._chip.warp_size
        if name.startswith("gfx"):
            return GPUTarget("hip", name, warp_size)
        return GPUTarget("cuda", int(name.removeprefix("sm_")), warp_size)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Limits that Triton checks a compiled kernel against."""
        limits = {"max_shared_mem": self._chip.shared_bytes, "multiprocessor_count": self._chip.num_processors}
        return limits | {"warpSize": self._chip.warp_size, "max_num_regs": self._chip.registers}

    def get_current_device(self) -> int:
        """A number that no device has: Triton keeps compiled kernels for each."""
        return 1000 + self._number

    def get_current_stream(self, device: int) -> int:
        """Handle of a stream."""
        return 0


class Launched(NamedTuple):
    """One launch.

    Attributes:
        kernel: The kernel's name.
        grid: Numbers of programs.
        loads: What it loads, by the names of arguments; those that share a storage are one.
        stores: What it stores.
        counts: Instructions of threads and of warps, barriers of blocks, and conflicts of banks of shared memory.
    """

    kernel: str
    grid: tuple[int, ...]
    loads: dict[str, Traffic]
    stores: dict[str, Traffic]
    counts: dict[str, int]

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.counts.items())
        lines = [f"  {self.kernel}, {' x '.join(map(str, self.grid))} programs: {counts}"]
        for verb, traffic in (("loads", self.loads), ("stores", self.stores)):
            for name, each in traffic.items():
                if each.num_bytes:
                    widths = ", ".join(map(str, sorted(each.widths)))
                    sizes = f"{each.num_bytes} bytes of {name}, {each.distinct_bytes} distinct, {widths} at once"
                    lines.append(f"    {verb} {sizes}, in {each.requests} requests of {each.sectors} sectors")
        return "\n".join(lines)


def _with_memory(x: Any) -> Any:
    return x.new_zeros(x.shape) if isinstance(x, Tensor) and x._is_zerotensor() else x


class Emulation(TorchDispatchMode):
    """Launches in a context, what is wrong about them, and which bytes of storages nobody has written."""

    def __init__(self, is_approximate: bool = False, edit: Callable[[str, str], str] = lambda kernel, ptx: ptx) -> None:
        super().__init__()
        self.faults: list[Fault] = []
        self.launches: list[Launched] = []
        # Forgotten with their storage, whose address may come again.
        self._unwritten: WeakKeyDictionary[UntypedStorage, Array] = WeakKeyDictionary()
        self._is_approximate, self._edit = is_approximate, edit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A tangent that torch knows to be zero has no memory, and what runs below a mode reads it.
        args, kwargs = tree_map(_with_memory, (args, kwargs or {}))
        result = func(*args, **kwargs)
        is_empty = func.overloadpacket.__name__.startswith(("empty", "new_empty"))
        given = {_storage(each) for each in tree_leaves((args, kwargs))}
        for each in tree_leaves(result):
            if (storage := _storage(each)) is None:
                continue
            if is_empty:
                self._unwritten[storage] = np.ones(storage.nbytes(), np.uint8)
            elif storage not in given or func._schema.is_mutable:
                # Torch has written it.
                self._unwritten.pop(storage, None)
        return result

    def run(self, function: JITFunction, grid: Any, args: tuple, options: dict[str, Any]) -> None:
        """Compile and run one launch."""
        names = function.arg_names
        values = {each.name: each.default for each in function.params if each.has_default}
        values |= dict(zip(names, args, strict=False)) | {n: v for n, v in options.items() if n in names}
        rest = {name: value for name, value in options.items() if name not in names}
        compiled = function.warmup(*(values[name] for name in names), grid=(1,), **rest)
        places: Any = grid(values) if callable(grid) else grid
        grid = tuple(places)
        faults = Faults(function.__name__)
        tensors = ((name, x) for name, each in values.items() for x in tree_leaves(each) if isinstance(x, Tensor))
        memory = Global(tensors, self._unwritten, faults)
        program = prepared(self._edit(function.__name__, compiled.asm["ptx"]), self._is_approximate)
        source: Any = compiled.src
        kinds = {name: kind for name, kind in source.signature.items() if kind != "constexpr"}
        flat = zip(tree_leaves([*kinds.values()]), tree_leaves([values[name] for name in kinds]), strict=True)
        parameters = [_parameter(kind, value, memory) for kind, value in flat if kind != "constexpr"]
        # Scratch memory for profilers and the like.
        parameters += [np.zeros(1, np.uint64)] * (len(program.code.parameters) - len(parameters))
        machine = Machine(program, memory, parameters, compiled.metadata.shared, faults)
        machine.run(grid)
        memory.write_back()
        threads = program.code.threads
        loads, stores = (memory.traffic(is_store, threads) for is_store in (False, True))
        self.launches.append(Launched(function.__name__, grid, loads, stores, dict(machine.counts)))
        self.faults += faults.values()


def _storage(value: Any) -> UntypedStorage | None:
    """The memory of a tensor; None for what has none, as tensors that are fake or made of others."""
    try:
        storage = value.untyped_storage() if isinstance(value, Tensor) else None
        return storage if storage is not None and storage.data_ptr() else None
    except RuntimeError:
        return None


def _parameter(kind: str, value: Any, memory: Global) -> Array:
    if kind.startswith("*"):
        return np.array([0 if value is None else memory.address(value)], np.uint64)
    if kind.startswith("fp"):
        return np.array([value], f"f{int(kind[2:]) // 8}")
    bits = max(int(re.sub(r"\D", "", kind)), 8)
    return np.array([int(value) & (1 << bits) - 1], f"u{bits // 8}")


@contextlib.contextmanager
def emulated(chip: str = "sm_80", **options: Any) -> Iterator[Emulation]:
    """Context in which launches of kernels that `triton.jit` made are compiled for a chip, and emulated.

    Options are those of `Emulation`: `edit` changes the PTX of a kernel, given its name; a test can plant faults so.
    """
    emulation = Emulation(**options)
    run = JITFunction.run

    def emulate(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return run(function, *args, grid=grid, warmup=True, **kwargs)
        return emulation.run(function, grid, args, kwargs)

    driver: Any = triton.runtime.driver
    try:
        before = driver.active
    except RuntimeError:
        # There is no GPU.
        before = None
    driver.set_active(StandInDriver(chip))
    try:
        with unittest.mock.patch.object(JITFunction, "run", emulate), emulation, knobs.compilation.scope():
            knobs.compilation.disable_line_info = True
            yield emulation
    finally:
        driver.set_active(before)
