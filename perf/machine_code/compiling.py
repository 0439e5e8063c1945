"""Which kernels the cases launch on a chip, each under a key of all that its machine code depends on, and their rows.

The launchers run on CPU tensors while a stand-in driver answers for the chip, up to the point where a compiled kernel
would be loaded; each of their launches is described, and compiled instead of run.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import hashlib
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import DependenciesFinder

from perf.machine_code.assembly import accesses, loads_ahead, unseen_pointers, usage
from perf.machine_code.table import Row
from perf.ops.workload import Workload
from perf.workloads import cases
from primitives.kernels.batch_norm._plan import channel_programs
from primitives.kernels.runtime.chips import CHIPS, limits_of, use_chip
from primitives.kernels.runtime.kernel import intercept
from primitives.testing._ptx.launching import StandInDriver


class _Finder(DependenciesFinder):
    """Triton's own finder of what a kernel names, which keeps the device functions and the constants."""

    def __init__(self, function: Any) -> None:
        nonlocals = inspect.getclosurevars(function).nonlocals
        super().__init__(function.__qualname__, function.__globals__, nonlocals, "")
        self.called: list[Any] = []

    def _update_hash(self, func: Any) -> None:
        self.called.append(func)


@functools.cache
def source_text(function: Any) -> str:
    """Text of a `triton.jit` function, of all device functions that it calls, and of the constants that they name.

    It does not say in which modules they are: a file that moves changes no code. Triton's own functions come with its
    version, and its decorators ask the compiler for nothing but what the launch says as well.

    Raises:
        RuntimeError: If one of them calls a function that is not compiled with it.
    """
    texts: set[str] = set()
    _collect(function, texts)
    return "\n".join(sorted(texts))


def _collect(function: Any, texts: set[str]) -> None:
    own, called = _own_texts(function)
    if not own <= texts:
        texts |= own
        for each in called:
            _collect(each, texts)


# Most kernels share most of their device functions.
@functools.cache
def _own_texts(function: Any) -> tuple[set[str], list[Any]]:
    """Texts of a function and of the constants that it names, and the device functions that it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            node.body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
    finder = _Finder(function.fn)
    finder.visit(tree)
    constants = {f"# {name}\n{value!r}" for (name, _), (value, _) in finder.used_global_vals.items()}
    called = [each for each in finder.called if not each.__module__.startswith("triton.")]
    return {f"# {function.fn.__qualname__}\n{ast.unparse(tree)}", *constants}, called


# Registers that one thread can have. A compute unit of AMD has four register files of 512 registers for each lane, of
# which a wavefront sees one.
_MAX_REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}
# Tensors of less than this share of the input are parameters, statistics, coefficients and partial results: their loads
# may be as narrow as they like.
_LARGE_SHARE = 1 / 8
_MAX_ACCESS_BYTES = 16
# Arguments that a reduction over channels reads whole, as far as they are there.
_CHANNEL_OPERANDS = ("y_bar_ptr", "x_ptr", "x_dot_ptr", "y_bar_dot_ptr")


class Launch(NamedTuple):
    """One launch of a case.

    Attributes:
        key: Hash of all that the machine code depends on, and of what is expected of it.
        kernel: The `Kernel`, then its grid, positional arguments, and compile-time constants and options.
        widths: For each tensor among `args`, the widest access that its size and alignment allow to all its elements;
            None for those that are not large.
        register_budget: Registers per thread that the plan counts on.
        known: What Triton lets the compiler know of each argument, in their order.
    """

    key: str
    kernel: Any
    grid: Any
    args: tuple
    constants: dict[str, Any]
    widths: list[int | None]
    register_budget: int
    known: Any

    def described_arguments(self) -> dict[str, str]:
        """The compiler's knowledge of each argument and option, by name."""
        options = {name: value for name, value in self.constants.items() if name not in self.kernel.argument_names}
        named = (*zip(self.kernel.argument_names, self.known, strict=True), *options.items())
        return {name: repr(value) for name, value in named}


@contextlib.contextmanager
def watch_launches(chip_name: str, workload: list[Workload], callback: Callable[[Launch], None]) -> Iterator[None]:
    """Context in which every launch is handed to `callback` instead, planned and described for a chip of `CHIPS`.

    `workload` holds that of the case under way; the caller sets it.
    """
    driver = StandInDriver(chip_name)
    triton.runtime.driver.set_active(driver)  # pyright: ignore[reportArgumentType] - it quacks

    def describe(kernel: Any, grid: Any, args: tuple, constants: dict[str, Any]) -> None:
        widths = [_width(tensor, workload[0]) for tensor in args if isinstance(tensor, torch.Tensor)]
        budget = _register_budget(chip_name, kernel, grid, args, constants)
        known = kernel.function.device_caches[driver.get_current_device()][-1](*args, debug=False, **constants)[1]
        options = sorted((name, value) for name, value in constants.items() if name not in kernel.argument_names)
        parts = (
            triton.__version__,
            chip_name,
            source_text(kernel.function),
            repr(known),
            repr(options),
            repr((widths, budget)),
        )
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        callback(Launch(key, kernel, grid, args, constants, widths, budget, known))

    with intercept(describe), use_chip(CHIPS[chip_name]):
        yield


def _width(tensor: torch.Tensor, workload: Workload) -> int | None:
    # Integers are labels, one of a row.
    if tensor.nbytes < _LARGE_SHARE * workload.pass_bytes or not tensor.is_floating_point():
        return None
    if tensor.dtype == torch.uint8:
        # A thread has as many elements of a mask as of x beside it.
        return math.gcd(_MAX_ACCESS_BYTES // workload.torch_dtype.itemsize, workload.run)
    return math.gcd(_MAX_ACCESS_BYTES, workload.run * tensor.element_size(), tensor.data_ptr() % _MAX_ACCESS_BYTES)


def _register_budget(chip_name: str, kernel: Any, grid: Any, args: tuple, constants: dict[str, Any]) -> int:
    """Registers per thread that leave room for the threads that the plan wants on a processor."""
    if "maxnreg" in constants:
        # The plan has told the compiler, whatever number of programs this launch has.
        return constants["maxnreg"]
    chip = CHIPS[chip_name]
    threads = constants["num_warps"] * chip.warp_size
    named = dict(zip(kernel.argument_names, args, strict=False))
    # That of AMD is told nothing. Programs that carry sums over rows, of which each writes a partial row, are as many
    # as the plan takes to fit a processor at once, up to a limit; of the others, one block has to fit.
    if any(name.endswith("_part_ptr") and value is not None for name, value in named.items()):
        programs = math.ceil(math.prod(grid) / chip.num_processors)
        threads = max(threads, min(programs * threads, limits_of(chip).resident_threads))
    if kernel.__name__ == "batch_norm_sums_kernel":
        operands = [named[name] for name in _CHANNEL_OPERANDS if named[name] is not None]
        sums = (len(operands), named["mean_ptr"] is None, operands[0].element_size())
        threads *= channel_programs(constants["SPATIAL_INNER"], *sums, chip)
    # Registers are dealt out to whole warps in units of eight per thread.
    return min(chip.registers // threads // 8 * 8, _MAX_REGISTERS[chip_name])


def described_calls(chip_name: str, op: str | None = None) -> Iterator[tuple[str, list[Launch]]]:
    """The case of each call, of all ops if none is named, and its launches on a chip."""
    current: list[Workload] = []
    launches: list[Launch] = []
    with watch_launches(chip_name, current, launches.append):
        for case_name, workload, calls in cases():
            if op not in (None, workload.op):
                continue
            current[:] = [workload]
            for call in calls:
                launches.clear()
                call.results()
                yield case_name, list(launches)


def try_compile(chip_name: str, launch: Launch, case: str) -> Row | str:
    """The row of a launch, or what the compiler complains of: it has many ways to fail, and the others are to go on."""
    try:
        compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.constants)
        registers, spills, local_bytes = usage(chip_name, compiled)
        loads, stores, narrow = _global_accesses(launch, compiled.asm["llir"])
    except Exception as error:
        return f"{chip_name} {launch.kernel.__name__} ({case}): {type(error).__name__}: {error}"
    num_warps, shared_bytes = compiled.metadata.num_warps, compiled.metadata.shared
    used = (num_warps, registers, launch.register_budget, spills, local_bytes, shared_bytes)
    ahead = loads_ahead(chip_name, compiled.asm["ttgir"])
    return Row(launch.kernel.__name__, case, *used, loads, stores, narrow, ahead, launch.key)


def _global_accesses(launch: Launch, llvm_ir: str) -> tuple[str, str, int]:
    """Loads and stores of large tensors by their widths, and how many are narrow."""
    counts = {"load": collections.Counter(), "store": collections.Counter()}
    # A large tensor whose accesses are not found might be read or written in any way.
    narrow = sum(n < len(launch.widths) and launch.widths[n] is not None for n in unseen_pointers(llvm_ir))
    for kind, num_bytes, pointer in accesses(llvm_ir):
        # An access that cannot be traced counts as one of a large tensor with nothing in its way.
        width = 16 if pointer is None or pointer >= len(launch.widths) else launch.widths[pointer]
        if width is not None:
            counts[kind][num_bytes] += 1
            narrow += num_bytes < width
    texts = [" ".join(f"{width}x{count[width]}" for width in sorted(count, reverse=True)) for count in counts.values()]
    return texts[0], texts[1], narrow
