"""Launches through `Kernel` beside Triton's own launches, and calls repeated by recipes; fails where they differ.

`python -m tests.kernels.kernel_calls`, in a process without Triton's interpreter.
"""

from __future__ import annotations

import concurrent.futures
import random
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from triton import knobs

from perf.calls import Call
from primitives.kernels.runtime.kernel import Kernel, intercept, observe
from primitives.kernels.runtime.launch_cache import repeatable
from primitives.kernels.runtime.limits import use_limits
from tests.kernels import repeated_calls
from tests.kernels.calls import ROW_PLANS
from tests.kernels.stand_ins import Driver, launched, launches, stand_ins


# Constants of a kernel are capitals by this package's convention, and numbers to the checker.
# ruff: noqa: N803
# pyright: reportArgumentType=false
def _sample_kernel(
    x_ptr, y_ptr, num_rows, size, strides, SCALE: tl.constexpr, BLOCK: tl.constexpr = 32, FLAG: tl.constexpr = False
):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets * strides[0] + strides[1], mask=offsets < size, other=0.0)
    if y_ptr is not None:
        x += num_rows
    tl.store(x_ptr + offsets, x * SCALE)


def new_kernel() -> Kernel:
    """A kernel that nothing was compiled of yet."""
    launches.clear()
    return Kernel(_sample_kernel, unspecialized={"num_rows"})


memory = torch.zeros(64)
assert memory.data_ptr() % 16 == 0
X, UNALIGNED, DOUBLE = memory[:32], memory[1:33], torch.zeros(32, dtype=torch.float64)
STRIDES = (1, 0)
ARGS, CONSTANTS = (X, X, 7, 32, STRIDES), {"SCALE": 2}

# Calls that differ from these: arguments by position, or constants.
CHANGES = [
    {}, {0: UNALIGNED}, {0: DOUBLE}, {1: UNALIGNED}, {1: None},
    {2: 1}, {2: 16}, {2: 2**31}, {2: 2**63}, {2: 7.0}, {2: True},
    {3: 1}, {3: 17}, {3: 2**31}, {3: 16.0},
    {4: (1, 1)}, {4: (2, 16)}, {4: (1, 0, 5)}, {4: (2**31 + 1, 0)},
    {"SCALE": 3}, {"BLOCK": 16}, {"num_warps": 1},
]  # fmt: skip
VARIATIONS: list[tuple[tuple, dict]] = [
    (
        tuple(change.get(i, arg) for i, arg in enumerate(ARGS)),
        CONSTANTS | {k: v for k, v in change.items() if k == str(k)},
    )
    for change in CHANGES
]
# A constant by position, and a later one alone; an argument by keyword, which is left to Triton.
VARIATIONS += [((*ARGS, 2), {}), ((*ARGS, 2), {"FLAG": True}), (ARGS[:4], {"strides": STRIDES, "SCALE": 2})]


def check_variations() -> None:
    """The same kernels are launched with the same arguments as by Triton."""
    kernel, reference = new_kernel(), new_kernel().function
    # The first round fills the dictionary; afterwards every variation has to find its own entry among all others.
    for seed in range(3):
        for variation in random.Random(seed).sample(VARIATIONS, len(VARIATIONS)):
            args, constants = variation
            launches.clear()
            reference[(3,)](*args, **constants)
            kernel[(3,)](*args, **constants)
            expected, actual = launches
            assert expected[:3] == actual[:3], (variation, seed)
            assert all(a is b or a == b for a, b in zip(expected[3], actual[3], strict=True)), (variation, seed)


def check_grids_and_devices(driver: Driver) -> None:
    """Grids have three numbers; each device has its kernels and its stream, and a recipe the device of its tensors."""
    kernel = new_kernel()
    for grid in ((2,), (2, 3), (2, 3, 4), lambda meta: (meta["BLOCK"],)):
        kernel[grid](*ARGS, **CONSTANTS)
    assert [launch[1] for launch in launches] == [(2, 1, 1), (2, 3, 1), (2, 3, 4), (32, 1, 1)]
    repeated_calls.check(repeated_calls.CALL)
    driver.device = 1
    kernel[(1,)](*ARGS, **CONSTANTS)
    assert launches[-1][2] == 101
    with patch("torch.cuda.device", lambda device: patch.object(driver, "device", device)):
        assert [launch[2] for launch in launched(repeated_calls.CALL.results)[1]] == [100]
    driver.device = 0


def check_hooks() -> None:
    """Hooks of Triton and watchers see every launch, also of a call that has a recipe; other plans are followed."""
    runtime: Any = knobs.runtime
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        kernel, calls = new_kernel(), []
        for change in (lambda hook: None, chain.add, chain.remove):
            change(calls.append)
            kernel[(1,)](*ARGS, **CONSTANTS)
        assert len(calls) == 1
    repeated_calls.check(repeated_calls.CALL)
    seen: list[Any] = []
    for watch in (intercept, observe):
        with watch(lambda *launch: seen.append(launch)):
            repeated_calls.CALL.results()
    hooks = seen[0][0].function.pre_run_hooks
    hooks.append(lambda *args, **kwargs: seen.append(args))
    repeated_calls.CALL.results()
    hooks.clear()
    assert len(seen) == 3
    with use_limits(**ROW_PLANS["shared"]):
        repeated_calls.compare(repeated_calls.CALL)


def check_fusion() -> None:
    """Multiplications are fused with additions, whatever Triton's default is, by both ways to compile."""
    with patch.object(knobs.language, "default_fp_fusion", False):
        kernel = new_kernel()
        compiled = kernel.warmup(*ARGS, grid=(1,), **CONSTANTS)
        assert "'enable_fp_fusion': True" in compiled.hash
        kernel[(1,)](*ARGS, **CONSTANTS)
        kernel.function[(1,)](*ARGS, **CONSTANTS)
    pinned, default = (launch[0] for launch in launches)
    assert pinned == compiled.hash != default


def check_threads() -> None:
    """Many threads may launch at once."""
    kernel = new_kernel()
    mixed = random.Random(0).sample(8 * VARIATIONS[:8], 64)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda variation: kernel[(1,)](*variation[0], **variation[1]), mixed))
    assert len(launches) == 64


def check_memory_in_parts() -> None:
    """Recipes know several scratch tensors and parts of all; zeros that are late, after a launch, have no recipe."""
    kernel = new_kernel()

    @repeatable
    def launch(x: torch.Tensor, is_late: bool) -> torch.Tensor:
        small, large, y = x.new_empty(5), x.new_empty(40), torch.empty_like(x)
        for parts in ((x[2:], small[1:]), (large[10:], small[1:]), (y[1:], None)):
            kernel[(1,)](*parts, *ARGS[2:], **CONSTANTS)
        return y.zero_() if is_late else y

    repeated_calls.check(Call(launch, (X, False)))
    for _ in range(3):
        assert not launch(X, True).any()


if __name__ == "__main__":
    # Fills new memory.
    torch.use_deterministic_algorithms(True)
    with stand_ins() as stand_in:
        check_variations()
        check_grids_and_devices(stand_in)
        check_hooks()
        check_fusion()
        check_threads()
        check_memory_in_parts()
        repeated_calls.check_every_launcher()
        repeated_calls.check_keys()
        repeated_calls.check_memory()
