"""What compiles, in processes of its own: as many as there are cores, and each with its own cache of kernels."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    # For each key the kernel's name and the first case with it.
    Keys = dict[str, tuple[str, str]]


def in_processes(tasks: Sequence[tuple[str, Keys | None]], jobs: int) -> dict[str, dict[str, Any]]:
    """For each chip all keys, or by key the rows of those that are wanted, or what the compiler complains of."""
    found: dict[str, dict[str, Any]] = {chip: {} for chip, _ in tasks}
    if tasks:
        # Spawned, because threads of torch do not survive a fork.
        with multiprocessing.get_context("spawn").Pool(min(jobs, len(tasks)), maxtasksperchild=1) as pool:
            for (chip, _), results in zip(tasks, pool.starmap(_work, tasks, chunksize=1), strict=True):
                found[chip].update(results)
    return found


def _work(chip: str, wanted: Keys | None) -> dict[str, Any]:
    # A kernel from an earlier compiler or an earlier edit must not stand in for this one.
    with tempfile.TemporaryDirectory() as cache_dir, warnings.catch_warnings():
        # Torch and Triton warn that there is no GPU, and of defaults to come: once per process, over the progress.
        warnings.simplefilter("ignore")
        os.environ["TRITON_CACHE_DIR"] = cache_dir
        # Line tables take a tenth of the time and change no instruction.
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        from perf.machine_code.compiling import try_compile, walk, whole_rows

        if wanted is None:
            return walk(chip, lambda launch, case: (launch.kernel.__name__, case))
        cases = {case for _, case in wanted.values()}
        made = walk(chip, lambda launch, case: launch.key in wanted and try_compile(chip, launch, case), cases)
        return whole_rows(chip, {key: each for key, each in made.items() if each})
