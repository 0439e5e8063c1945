"""Launches through `Kernel` beside Triton's own launches; prints what each did, as JSON.

`python -m tests.kernels.kernel_calls`, in a process without Triton's interpreter. A stand-in driver records launches.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import sys
import types
import unittest.mock

import torch
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from tests.kernels.recording_driver import activate
from triton_kernels import _kernel, batch_norm, layer_norm, log_softmax
from triton_kernels._kernel import Kernel, intercept, key_function
from triton_kernels.launch.chips import CHIPS, use_chip

driver = activate()


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
    return Kernel(_sample_kernel, unspecialized={"num_rows"})


@contextlib.contextmanager
def counting_triton():
    """Counts calls of Triton's own launch path, in the list that it gives."""
    calls, run = [], JITFunction.run

    def counted(self, *args, grid, warmup, **kwargs):
        calls.append(warmup)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = counted
    try:
        yield calls
    finally:
        JITFunction.run = run


memory = torch.zeros(64)
assert memory.data_ptr() % 16 == 0
X, UNALIGNED, DOUBLE = memory[:32], memory[1:33], torch.zeros(32, dtype=torch.float64)
STRIDES = (1, 0)

# Name, positional arguments, keyword arguments, whether Triton's own launch is left to take it.
VARIATIONS = [
    ("plain", (X, X, 7, 32, STRIDES), {"SCALE": 2}, False),
    ("unaligned x", (UNALIGNED, X, 7, 32, STRIDES), {"SCALE": 2}, False),
    ("unaligned y", (X, UNALIGNED, 7, 32, STRIDES), {"SCALE": 2}, False),
    ("other dtype", (DOUBLE, X, 7, 32, STRIDES), {"SCALE": 2}, False),
    ("no y", (X, None, 7, 32, STRIDES), {"SCALE": 2}, False),
    ("rows 1", (X, X, 1, 32, STRIDES), {"SCALE": 2}, False),
    ("rows 16", (X, X, 16, 32, STRIDES), {"SCALE": 2}, False),
    ("64-bit rows", (X, X, 2**31, 32, STRIDES), {"SCALE": 2}, False),
    ("unsigned rows", (X, X, 2**63, 32, STRIDES), {"SCALE": 2}, False),
    ("floating rows", (X, X, 7.0, 32, STRIDES), {"SCALE": 2}, False),
    ("boolean rows", (X, X, True, 32, STRIDES), {"SCALE": 2}, False),
    ("size 1", (X, X, 7, 1, STRIDES), {"SCALE": 2}, False),
    ("size 17", (X, X, 7, 17, STRIDES), {"SCALE": 2}, False),
    ("64-bit size", (X, X, 7, 2**31, STRIDES), {"SCALE": 2}, False),
    ("floating size", (X, X, 7, 16.0, STRIDES), {"SCALE": 2}, False),
    ("strides 1 and 1", (X, X, 7, 32, (1, 1)), {"SCALE": 2}, False),
    ("strides 2 and 16", (X, X, 7, 32, (2, 16)), {"SCALE": 2}, False),
    ("longer strides", (X, X, 7, 32, (1, 0, 5)), {"SCALE": 2}, False),
    ("64-bit stride", (X, X, 7, 32, (2**31 + 1, 0)), {"SCALE": 2}, False),
    ("other constant", (X, X, 7, 32, STRIDES), {"SCALE": 3}, False),
    ("other default", (X, X, 7, 32, STRIDES), {"SCALE": 2, "BLOCK": 16}, False),
    ("positional constant", (X, X, 7, 32, STRIDES, 2), {}, False),
    ("later constant alone", (X, X, 7, 32, STRIDES, 2), {"FLAG": True}, False),
    ("warps", (X, X, 7, 32, STRIDES), {"SCALE": 2, "num_warps": 1}, False),
    ("argument by keyword", (X, X, 7, 32), {"strides": STRIDES, "SCALE": 2}, True),
]


def same_as_triton() -> dict[str, list[str]]:
    """Variations that `Kernel` launched otherwise than Triton does, or through Triton when it should not have."""
    kernel, reference = new_kernel(), new_kernel().function
    wrong, slow = [], []
    # The first round fills the dictionary; afterwards every variation has to find its own entry among all others.
    for seed in range(3):
        order = random.Random(seed).sample(VARIATIONS, len(VARIATIONS))
        for name, args, constants, by_triton in order:
            driver.launches.clear()
            reference[(3,)](*args, **constants)
            with counting_triton() as calls:
                kernel[(3,)](*args, **constants)
            expected, actual = driver.launches
            same = expected[:3] == actual[:3] and all(
                a is b or a == b for a, b in zip(expected[3], actual[3], strict=True)
            )
            if not same:
                wrong.append(f"{name}, round {seed}")
            # Triton has the first launch of everything, and all of some.
            if calls not in ([[False]] if by_triton else [[]] if seed else [[], [False]]):
                slow.append(f"{name}, round {seed}: {calls}")
    return {"wrong": wrong, "slow": slow}


ARGS, CONSTANTS = (X, X, 7, 32, STRIDES), {"SCALE": 2}


def grids() -> list:
    """Grids that reach the device for grids of one, two and three numbers, and for a function."""
    kernel = new_kernel()
    driver.launches.clear()
    for grid in ((2,), (2, 3), (2, 3, 4), lambda meta: (meta["BLOCK"],)):
        kernel[grid](*ARGS, **CONSTANTS)
    return [launch[1] for launch in driver.launches]


def devices() -> list:
    """Streams of launches on two devices, and the compiled kernels among them."""
    kernel = new_kernel()
    driver.launches.clear()
    for device in (0, 1, 0):
        driver.device = device
        kernel[(1,)](*ARGS, **CONSTANTS)
    driver.device = 0
    return [[launch[2] for launch in driver.launches], len(kernel._compiled)]


def hooks() -> dict[str, list[int]]:
    """How often hooks are called in two launches that follow a first one: by Triton's own, and by `Kernel`."""
    return {name: [_hook_calls(name, new_kernel().function), _hook_calls(name, new_kernel())] for name in HOOKS}


HOOKS = ("launch_enter_hook", "launch_exit_hook", "add_stages_inspection_hook", "pre_run")


def _hook_calls(name: str, kernel) -> int:
    calls, runtime = [], knobs.runtime

    def hook(*args, **kwargs):
        calls.append(args)
        return "key", "hash"

    kernel[(1,)](*ARGS, **CONSTANTS)
    if name == "pre_run":
        getattr(kernel, "function", kernel).add_pre_run_hook(hook)
    elif name.startswith("launch"):
        getattr(runtime, name).add(hook)
    else:
        setattr(runtime, name, hook)
    for _ in range(2):
        kernel[(1,)](*ARGS, **CONSTANTS)
    if name.startswith("launch"):
        getattr(runtime, name).remove(hook)
    elif name != "pre_run":
        setattr(runtime, name, None)
    return len(calls)


def threads() -> int:
    """Launches of eight threads at once, of which each launches every variation."""
    kernel = new_kernel()
    driver.launches.clear()

    def launch_all(seed):
        for _, args, constants, _ in random.Random(seed).sample(VARIATIONS[:8], 8):
            kernel[(1,)](*args, **constants)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(launch_all, range(8)))
    return len(driver.launches)


def offsets_on_amd() -> bool:
    """Whether a storage beyond 32-bit offsets has another key where the backend asks for it."""

    def pointer(num_bytes):
        storage = types.SimpleNamespace(size=lambda: num_bytes, nbytes=lambda: num_bytes)
        return types.SimpleNamespace(dtype=torch.float32, data_ptr=lambda: 0, untyped_storage=lambda: storage)

    near, far = pointer(2**31 - 1), pointer(2**31)
    rest = (None, 7, 32, STRIDES)
    keys = [key_function(new_kernel().function.params, asks) for asks in (True, False)]
    return keys[0](near, *rest) != keys[0](far, *rest) and keys[1](near, *rest) == keys[1](far, *rest)


def _other_releases() -> dict[str, contextlib.AbstractContextManager]:
    """Contexts in which something that direct launches rely on is not as in the releases they were written for."""
    getitem, changed = CompiledKernel.__getitem__, unittest.mock.patch.object
    settings = [field for field in dir(knobs.runtime) if field != "add_stages_inspection_hook"]
    without_hook = types.SimpleNamespace(**{field: getattr(knobs.runtime, field) for field in settings})
    without_constants = types.SimpleNamespace(signature={"x_ptr": "*fp32"})
    source = property(lambda self: without_constants, lambda self, source: None)

    def without_stream(self, grid):
        return lambda *values: getitem(self, grid)(*values, stream=None)

    return {
        "settings without a hook": changed(_kernel, "_runtime", without_hook),
        "another class of compiled kernels": changed(_kernel, "CompiledKernel", type("Unrelated", (), {})),
        "a launcher without a stream": changed(CompiledKernel, "__getitem__", without_stream),
        "launchers without constants": changed(CompiledKernel, "src", source, create=True),
        "parameters without names": changed(_kernel, "_PARAMETER_FIELDS", ("name", "renamed")),
    }


def other_releases() -> dict[str, list]:
    """Calls of Triton's own launch path, and launches, of three launches in each other release."""
    found = {}
    for name, release in _other_releases().items():
        driver.launches.clear()
        with release, counting_triton() as calls:
            kernel = new_kernel()
            for _ in range(3):
                kernel[(3,)](*ARGS, **CONSTANTS)
        found[name] = [calls, len(driver.launches)]
    return found


def launches_of_the_package() -> list:
    """Every launch of the first- and second-order launchers, as `(kernel, args, constants)`."""
    x, weight = torch.zeros(8, 4, 64), torch.zeros(64)
    channels, param = torch.zeros(4, 8, 5, 5), torch.zeros(8)
    launches = []

    def note(kernel, grid, args, constants):
        launches.append((kernel, args, constants))

    with use_chip(CHIPS["sm_90"]), intercept(note):
        _, mean, rstd = layer_norm.layer_norm_fwd(x, weight, weight, 1, 0, 1e-5)
        layer_norm.layer_norm_jvp(x, weight, mean, rstd, x, weight, weight, 1, 0)
        layer_norm.layer_norm_bwd(x, x, weight, mean, rstd, 1, 0, (True, True, True))
        _, mean, rstd, *_ = batch_norm.batch_norm_train_fwd(channels, param, param, None, None, 0, 0.1, 1e-5)
        batch_norm.batch_norm_train_bwd(channels, channels, param, mean, rstd, 0, (True, True, True))
        log_softmax.log_softmax_fwd(x, 2, None)
    return launches


def keyless_launches() -> list:
    """Number of launches of the package, and kernels of which one was left to Triton for want of a key."""

    def has_key(kernel, args, constants):
        try:
            return hash((*kernel._key(*args), *constants.values())) is not None
        except TypeError:
            return False

    launches = launches_of_the_package()
    return [len(launches), [repr(launch[0]) for launch in launches if not has_key(*launch)]]


CHECKS = (
    same_as_triton,
    grids,
    devices,
    hooks,
    other_releases,
    threads,
    offsets_on_amd,
    keyless_launches,
)

if __name__ == "__main__":
    json.dump({check.__name__: check() for check in CHECKS}, sys.stdout)
