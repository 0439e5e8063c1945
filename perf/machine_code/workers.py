"""Compile in processes of their own: as many as there are cores, and each with its own cache of kernels."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from perf.machine_code.table import Row

# For each key the kernel's name and the first case with it.
Keys = dict[str, tuple[str, str]]


def in_processes(work: Callable[..., Any], tasks: Sequence[tuple], jobs: int) -> list[Any]:
    """Results of `work` for the arguments of each task; a single job needs no process of its own."""
    if jobs == 1 or not tasks:
        return [work(*task) for task in tasks]
    # Spawned, because threads of torch do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(tasks)), maxtasksperchild=1) as pool:
        return pool.starmap(work, tasks, chunksize=1)


def walk_chip(chip: str, op: str | None = None) -> Keys:
    """All keys that the cases need on a chip; of one op if it is named."""
    with _own_cache():
        from perf.machine_code.compiling import described_calls

        keys: Keys = {}
        for case, launches in described_calls(chip, op=op):
            for launch in launches:
                keys.setdefault(launch.key, (launch.kernel.__name__, case))
        return keys


def compile_keys(chip: str, wanted: Keys) -> dict[str, Row | str]:
    """By key the rows of those that are wanted, or what the compiler complains of."""
    with _own_cache():
        from perf.machine_code.compiling import described_calls, try_compile

        made: dict[str, Row | str] = {}
        for case, launches in described_calls(chip, {case for _, case in wanted.values()}):
            for launch in launches:
                if launch.key in wanted and launch.key not in made:
                    made[launch.key] = try_compile(chip, launch, case)
        return made


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    # A kernel from an earlier compiler or an earlier edit must not stand in for this one.
    with tempfile.TemporaryDirectory() as cache_dir, warnings.catch_warnings():
        # Torch and Triton warn of the missing GPU, and of defaults to come: once per process, over the progress.
        warnings.simplefilter("ignore")
        os.environ["TRITON_CACHE_DIR"] = cache_dir
        # Line tables take a tenth of the time and change no instruction.
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        yield
