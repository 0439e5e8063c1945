"""Checks of `test_machine_code` that take a process without the interpreter.

`python -m tests.kernels.compiled_cases`
"""

# Compile-time constants are upper case, as in the kernels of the package.
# ruff: noqa: N803

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from perf.machine_code.assembly import loads_ahead
from perf.machine_code.compiling import Launch, try_compile, watch_launches
from perf.machine_code.rules import broken_rules
from perf.ops import CASES
from perf.ops.batch_norm import BatchNorm
from perf.ops.layer_norm import LAYER_NORM, LayerNorm
from perf.ops.workload import Workload, unnamed
from perf.workloads import launch_mode
from primitives.testing._ptx.launching import StandInDriver


def launches(chip_name: str, workload: Workload, launch: Callable[[], object]) -> list[Launch]:
    """The launches on a chip."""
    found: list[Launch] = []
    with watch_launches(chip_name, [workload], found.append):
        launch()
    return found


def in_groups(num_rows: int) -> None:
    """Norms with parameters of their own for each of three groups, of `num_rows` rows or samples each."""
    # Columns that are a multiple of 8 alone: whether the distance of two groups is one of 16 depends on the rows.
    rows = LayerNorm.draw((3, num_rows, 200), torch.bfloat16, batch_ndim=1)
    images = BatchNorm.draw((3, num_rows, 16, 4, 4), torch.bfloat16, batch_ndim=1)
    for call in (*rows.calls(), *images.calls("train_fwd", "train_bwd", "double_backward")):
        call.results()


def anew(chip_name: str) -> None:
    """Another number of rows compiles no kernel anew."""

    def described(workload: Workload, launch: Callable[[], object]) -> list[tuple[str, dict[str, str]]]:
        return [(one.kernel.__name__, one.described_arguments()) for one in launches(chip_name, workload, launch)]

    def launch_all(workload: Workload, num_rows: int) -> None:
        for mode in workload.record.modes:
            launch_mode(dataclasses.replace(workload, shape=(num_rows, *workload.shape[1:])), mode)

    cases = [(each.case, each, (each.shape[0], *others), launch_all) for op in CASES for each, others in op.resized]
    cases.append(("groups", LAYER_NORM.resized[0][0], (640, 639, 600), lambda workload, num_rows: in_groups(num_rows)))
    problems = []
    for name, workload, sizes, launch in cases:
        first, *again = (described(workload, functools.partial(launch, workload, num_rows)) for num_rows in sizes)
        for num_rows, found in zip(sizes[1:], again, strict=True):
            problems += changed(f"{name} with {num_rows}", first, found)
    assert not problems, "\n".join(problems)
    # A difference is found, and named.
    (complaint,) = changed("a case", [("kernel", {"n": "divisible by 16"})], [("kernel", {"n": "any"})])
    assert complaint.endswith("compiled anew for n")


def changed(case: str, first: list[tuple[str, dict[str, str]]], again: list[tuple[str, dict[str, str]]]) -> list[str]:
    """The differences, to the compiler, of two sequences of launches, each a kernel and its described arguments."""
    names = [[name for name, _ in one] for one in (first, again)]
    if names[0] != names[1]:
        return [f"{case}: launches {names[1]} instead of {names[0]}"]
    found = {
        f"{case}: {kernel} is compiled anew for {argument}"
        for (kernel, before), (_, after) in zip(first, again, strict=True)
        for argument in before.keys() | after.keys()
        if before.get(argument) != after.get(argument)
    }
    return sorted(found)


@triton.jit
def _sums(x_ptr, y_ptr, num_rows, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over rows."""
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=STAGES):
        total += tl.load(x_ptr + row * BLOCK + cols)
    tl.store(y_ptr + tl.program_id(0) * BLOCK + cols, total)


def loops(chip_name: str, *ahead: str) -> None:
    """A loop says how many steps are under way, with one to four stages."""
    triton.runtime.driver.set_active(StandInDriver(chip_name))  # pyright: ignore[reportArgumentType] - it quacks
    x = torch.empty(1 << 20)
    for num_stages, expected in enumerate(ahead, 1):
        compiled = _sums.warmup(x, x, 1023, STAGES=num_stages, BLOCK=1024, num_warps=4, grid=(8,))
        assert loads_ahead(chip_name, compiled.asm["ttgir"]) == expected, (chip_name, num_stages)


def faults(chip_name: str) -> None:
    """A layer norm backward with a mistake in its plan breaks the rules: too few warps, or no alignment."""
    workload = unnamed((8192, 4096), op="layer_norm")
    (launch, *_) = launches(chip_name, workload, lambda: launch_mode(workload, "backward"))
    # The compiler takes no more registers than leave room for the other programs.
    mistakes = ({"num_warps": launch.constants["num_warps"] // 2}, "registers"), ({"ALIGN": 1}, "narrow")
    with watch_launches(chip_name, [workload], lambda launch: None):
        for change, complaint in mistakes:
            changed_launch = launch._replace(constants={**launch.constants, **change})
            row = try_compile(chip_name, changed_launch, f"{workload.case} with {change}")
            assert not isinstance(row, str), row
            assert any(complaint in problem for problem in broken_rules(chip_name, row)), row


if __name__ == "__main__":
    anew("sm_100")
    loops("sm_90", "-", "0", "1", "2")
    loops("gfx942", "-", "1")
    faults("sm_90")
