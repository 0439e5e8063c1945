"""What compiles, in processes of its own: as many as there are cores, and each with its own cache of kernels."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.machine_code.table import Row

    # For each key the kernel's name and the first case with it.
    Keys = dict[str, tuple[str, str]]


def find_keys(chip_names: Sequence[str], jobs: int) -> dict[str, Keys]:
    """For each chip the keys of every kernel variant."""
    # Spawned, because threads of torch do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(chip_names))) as pool:
        return dict(zip(chip_names, pool.map(_find_keys, chip_names, chunksize=1), strict=True))


def make_rows(wanted: dict[str, Keys], jobs: int) -> dict[str, dict[str, Row | str]]:
    """For each chip the rows of some kernel variants, or what the compiler complains of, by key."""
    tasks = [
        (chip, {key: keys[key] for key in list(keys)[share::jobs]})
        for chip, keys in wanted.items()
        for share in range(min(jobs, len(keys)))
    ]
    made: dict[str, dict[str, Row | str]] = {chip: {} for chip in wanted}
    if not tasks:
        return made
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        for (chip, _), rows in zip(tasks, pool.starmap(_make_rows, tasks, chunksize=1), strict=True):
            made[chip].update(rows)
    return made


def _find_keys(chip_name: str) -> Keys:
    with warnings.catch_warnings():
        # Torch and Triton warn that there is no GPU, and of defaults to come: once per process, over the progress.
        warnings.simplefilter("ignore")
        from perf.machine_code.compiling import needed_keys

        return needed_keys(chip_name)


def _make_rows(chip_name: str, wanted: Keys) -> dict[str, Row | str]:
    # A kernel from an earlier compiler or an earlier edit must not stand in for this one.
    with tempfile.TemporaryDirectory() as cache_dir, warnings.catch_warnings():
        # As above.
        warnings.simplefilter("ignore")
        os.environ["TRITON_CACHE_DIR"] = cache_dir
        # Line tables take a tenth of the time and change no instruction.
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        from perf.machine_code.compiling import compile_keys

        return compile_keys(chip_name, wanted.__contains__, {case for _, case in wanted.values()})
