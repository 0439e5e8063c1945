"""Which kernels the cases launch on a chip, each under a key of all that its machine code depends on."""

from __future__ import annotations

import contextlib
import hashlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from perf.machine_code.sources import source_text
from perf.machine_code.stand_in import MAX_REGISTERS, activate
from triton_kernels._kernel import intercept
from triton_kernels.launch.channels import channel_reduction_programs, channel_second_reduction_programs
from triton_kernels.launch.chips import CHIPS, use_chip
from triton_kernels.launch.tables import limits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from perf.machine_code.cases import Shape
    from triton_kernels.launch.chips import Chip

# Tensors of less than this share of the input are parameters, statistics, coefficients and partial results: their loads
# may be as narrow as they like.
LARGE_SHARE = 1 / 8
MAX_ACCESS_BYTES = 16
_SUMS = ("WANT_WEIGHT", "WANT_WEIGHT_DOT", "WANT_BIAS")
# Arguments that a reduction over channels of first order reads whole, as far as they are there.
_CHANNEL_REDUCTIONS = {"batch_norm_statistics_kernel": ("x_ptr",), "batch_norm_product_sums_kernel": ("u_ptr", "x_ptr")}


class Launch(NamedTuple):
    """One launch of a case.

    Attributes:
        key: Hash of all that the machine code depends on, and of what is expected of it.
        kernel: The `Kernel`.
        grid: Its grid.
        args: Its positional arguments.
        constants: Its compile-time constants and options.
        widths: For each tensor among `args`, the widest access that its size and alignment allow to all its elements;
            None for those that are not large.
        register_budget: Registers per thread that the plan counts on.
    """

    key: str
    kernel: Any
    grid: Any
    args: tuple
    constants: dict[str, Any]
    widths: list[int | None]
    register_budget: int


@contextlib.contextmanager
def watch_launches(chip_name: str, shape: list[Shape], callback: Callable[[Launch], None]) -> Iterator[None]:
    """Context in which every launch is handed to `callback` instead, planned and described for the chip.

    Args:
        chip_name: A key of `CHIPS`.
        shape: One shape, that of the case under way; the caller sets it.
        callback: Is given each launch.
    """
    driver = activate(chip_name)
    texts: dict[Any, str] = {}

    def describe(kernel: Any, grid: Any, args: tuple, constants: dict[str, Any]) -> None:
        if kernel not in texts:
            texts[kernel] = source_text(kernel.function)
        widths = [_width(tensor, shape[0]) for tensor in args if isinstance(tensor, torch.Tensor)]
        budget = _register_budget(chip_name, kernel, args, constants)
        key = _key(chip_name, driver, kernel, texts[kernel], args, constants, (widths, budget))
        callback(Launch(key, kernel, grid, args, constants, widths, budget))

    with intercept(describe), use_chip(CHIPS[chip_name]):
        yield


def _key(
    chip_name: str, driver: Any, kernel: Any, text: str, args: tuple, constants: dict[str, Any], expected: tuple
) -> str:
    """Hash of what the machine code depends on, and of what is expected of it."""
    specialization = _specialization(driver, kernel, args, constants)
    options = sorted((name, value) for name, value in constants.items() if name not in kernel.argument_names)
    parts = (triton.__version__, chip_name, text, repr(specialization), repr(options), repr(expected))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _specialization(driver: Any, kernel: Any, args: tuple, constants: dict[str, Any]) -> Any:
    """What Triton lets the compiler know of each argument, in their order."""
    binder = kernel.function.device_caches[driver.get_current_device()][-1]
    return binder(*args, debug=False, **constants)[1]


def described_arguments(driver: Any, kernel: Any, args: tuple, constants: dict[str, Any]) -> dict[str, str]:
    """What the compiler knows of each argument and option of a launch, by name.

    Args:
        driver: What `stand_in.activate` returned.
        kernel: The `Kernel`.
        args: Its positional arguments.
        constants: Its compile-time constants and options.
    """
    known = _specialization(driver, kernel, args, constants)
    options = {name: value for name, value in constants.items() if name not in kernel.argument_names}
    return {name: repr(value) for name, value in (*zip(kernel.argument_names, known, strict=True), *options.items())}


def _width(tensor: torch.Tensor, shape: Shape) -> int | None:
    if tensor.nbytes < LARGE_SHARE * shape.num_bytes:
        return None
    return math.gcd(MAX_ACCESS_BYTES, shape.run * tensor.element_size(), tensor.data_ptr() % MAX_ACCESS_BYTES)


def _register_budget(chip_name: str, kernel: Any, args: tuple, constants: dict[str, Any]) -> int:
    """Registers per thread that leave room for the threads that the plan wants on a processor."""
    chip = CHIPS[chip_name]
    threads = constants["num_warps"] * chip.warp_size
    # Programs that carry sums are as many as fit a processor at once, which is what the plan fills it with; of the
    # others, one block has to fit.
    if any(constants.get(name) for name in _SUMS) and "num_cols" in constants:
        threads = max(threads, limits_of(chip).resident_threads)
    threads *= _programs_at_once(chip, kernel, args, constants)
    # Registers are dealt out to whole warps in units of eight per thread.
    return min(chip.registers // threads // 8 * 8, MAX_REGISTERS[chip_name])


def _programs_at_once(chip: Chip, kernel: Any, args: tuple, constants: dict[str, Any]) -> int:
    """Programs of a reduction over channels that the plan wants on a processor; 1 for all other kernels."""
    if kernel.__name__ == "batch_norm_second_sums_kernel":
        return channel_second_reduction_programs(chip)
    if kernel.__name__ not in _CHANNEL_REDUCTIONS:
        return 1
    named = dict(zip(kernel.argument_names, args, strict=False))
    num_inputs = sum(named[name] is not None for name in _CHANNEL_REDUCTIONS[kernel.__name__])
    return channel_reduction_programs(constants["SPATIAL_INNER"], num_inputs, chip)
