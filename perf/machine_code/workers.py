"""What runs in processes of its own, because Triton's driver is chosen once per process."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.machine_code.table import Row


def find_keys(chip_names: Sequence[str], jobs: int) -> dict[str, dict[str, tuple[str, str]]]:
    """For each chip the kernel's name and the first case of every kernel variant, by key."""
    # Spawned, because threads of torch do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        return dict(zip(chip_names, pool.map(_find_keys, chip_names, chunksize=1), strict=True))


def make_rows(
    chip_names: Sequence[str], known: dict[str, dict[str, Row]], jobs: int
) -> dict[str, dict[str, Row | str]]:
    """For each chip the rows of all kernel variants but the known ones, by key, compiled by `jobs` processes."""
    tasks = [(chip, share, jobs, frozenset(known[chip])) for chip in chip_names for share in range(jobs)]
    made: dict[str, dict[str, Row | str]] = {chip: {} for chip in chip_names}
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        for (chip, *_), rows in zip(tasks, pool.starmap(_make_rows, tasks, chunksize=1), strict=True):
            made[chip].update(rows)
    return made


def _find_keys(chip_name: str) -> dict[str, tuple[str, str]]:
    with warnings.catch_warnings():
        # Torch and Triton warn that there is no GPU, and of defaults to come: once per process, over the progress.
        warnings.simplefilter("ignore")
        from perf.machine_code.compiling import needed_keys

        return needed_keys(chip_name)


def _make_rows(chip_name: str, share: int, num_shares: int, known: frozenset[str]) -> dict[str, Row | str]:
    # A kernel from an earlier compiler or an earlier edit must not stand in for this one.
    with tempfile.TemporaryDirectory() as cache_dir, warnings.catch_warnings():
        # As above.
        warnings.simplefilter("ignore")
        os.environ["TRITON_CACHE_DIR"] = cache_dir
        # Line tables take a tenth of the time and change no instruction.
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        from perf.machine_code.compiling import compile_keys

        return compile_keys(chip_name, lambda key: key not in known and int(key, 16) % num_shares == share)
