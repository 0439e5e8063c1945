"""Walks through the calls of chips, in several processes: these find no function in a module that is run as `-m`."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Collection, Sequence

from perf.machine_code.table import Row


def _walk(chip: str, op: str | None, part: int, parts: int, known: Collection[str] | None) -> tuple[dict, list]:
    """The first case of each key on a chip, of one op if it is named; and what a part of the keys not known gives.

    That is a row, or a complaint; nothing is compiled where `known` is None.
    """
    # A kernel from an earlier compiler or an earlier edit must not stand in for this one.
    with tempfile.TemporaryDirectory() as cache, warnings.catch_warnings():
        # Torch and Triton warn of the missing GPU, and of defaults to come: once per process, over the progress.
        warnings.simplefilter("ignore")
        # Line tables take a tenth of the time and change no instruction.
        os.environ.update(TRITON_CACHE_DIR=cache, TRITON_DISABLE_LINE_INFO="1")
        from perf.machine_code.compiling import described_calls, try_compile

        needed: dict[str, str] = {}
        made: list[Row | str] = []
        for case, launches in described_calls(chip, op):
            for launch in launches:
                if launch.key not in needed:
                    needed[launch.key] = case
                    if known is not None and launch.key not in known and int(launch.key, 16) % parts == part:
                        made.append(try_compile(chip, launch, case))
        return needed, made


def walked(tasks: Sequence[tuple], jobs: int) -> list[tuple[dict, list]]:
    """`_walk` of each task, in processes of their own; a single job needs none."""
    if jobs == 1:
        return [_walk(*task) for task in tasks]
    # Spawned, because threads of torch do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(tasks)), maxtasksperchild=1) as pool:
        return pool.starmap(_walk, tasks, chunksize=1)
