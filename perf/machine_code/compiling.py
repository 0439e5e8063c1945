"""Compiles the launches of the cases, and reads off what came out."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from perf.machine_code.assembly import accesses, unseen_pointers, usage
from perf.machine_code.cases import Shape, cases
from perf.machine_code.launches import Launch, watch_launches
from perf.machine_code.table import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def needed_keys(chip_name: str) -> dict[str, tuple[str, str]]:
    """For every kernel variant that the cases launch on a chip its kernel's name and the first case with it, by key."""
    return _walk(chip_name, lambda launch, case: (launch.kernel.__name__, case))


def compile_keys(
    chip_name: str, wanted: Callable[[str], bool], case_names: Collection[str] | None = None
) -> dict[str, Row | str]:
    """Rows of the kernel variants whose keys are wanted, by key; where the compiler failed, its complaint.

    Args:
        chip_name: A key of `CHIPS`.
        wanted: Says whether a key is.
        case_names: The cases to go through, if not all have to be.
    """

    def compiled(launch: Launch, case: str) -> Row | str | None:
        return try_compile(chip_name, launch, case) if wanted(launch.key) else None

    return {key: row for key, row in _walk(chip_name, compiled, case_names).items() if row is not None}


def _walk(chip_name: str, visit: Callable, case_names: Collection[str] | None = None) -> dict:
    found = {}
    current: list[Shape] = []
    case_name = [""]

    def on_launch(launch: Launch) -> None:
        if launch.key not in found:
            found[launch.key] = visit(launch, case_name[0])

    with watch_launches(chip_name, current, on_launch):
        for name, shape, launch_case in cases():
            if case_names is not None and name not in case_names:
                continue
            current[:], case_name[0] = [shape], name
            launch_case()
    return found


def try_compile(chip_name: str, launch: Launch, case: str) -> Row | str:
    """The row of a launch, or what the compiler complains of."""
    try:
        return compile_launch(chip_name, launch, case)
    # The compiler has many ways to fail, and the other kernels are to go on.
    except Exception as error:
        return f"{chip_name} {launch.kernel.__name__} ({case}): {type(error).__name__}: {error}"


def compile_launch(chip_name: str, launch: Launch, case: str) -> Row:
    """Compile one launch and describe the result."""
    compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.constants)
    registers, spills, local_bytes = usage(chip_name, compiled)
    counts = {"load": collections.Counter(), "store": collections.Counter()}
    narrow = 0
    for kind, num_bytes, pointer in accesses(compiled.asm["llir"]):
        # An access that cannot be traced counts as one of a large tensor with nothing in its way.
        width = 16 if pointer is None or pointer >= len(launch.widths) else launch.widths[pointer]
        if width is not None:
            counts[kind][num_bytes] += 1
            narrow += num_bytes < width
    # A large tensor whose accesses are not found might be read or written in any way.
    narrow += sum(
        n < len(launch.widths) and launch.widths[n] is not None for n in unseen_pointers(compiled.asm["llir"])
    )
    texts = [" ".join(f"{width}x{count[width]}" for width in sorted(count, reverse=True)) for count in counts.values()]
    return Row(
        kernel=launch.kernel.__name__,
        case=case,
        num_warps=compiled.metadata.num_warps,
        registers=registers,
        register_budget=launch.register_budget,
        spills=spills,
        local_bytes=local_bytes,
        shared_bytes=compiled.metadata.shared,
        loads=texts[0],
        stores=texts[1],
        narrow=narrow,
        key=launch.key,
    )
