"""Bytes that the kernel of dropout moves, which is that of each of its derivatives too, and that of Philox words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_kernels.runtime.arithmetic import cdiv

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_kernels._cost import Account, Tensors


def _count_dropout(account: Account, named: Mapping[str, Any], grid: tuple[int, ...], tensors: Tensors) -> None:
    """X once; every program reads the seed of its sample, or that of each of its rows where a sample is one row."""
    account.load(x=named["x"])
    account.store(named["y"].nbytes)
    num_rows, times = named["num_rows"], grid[0]
    if named["SAMPLE_AXES"] == 1:
        times = times // cdiv(num_rows, named["BLOCK_ROWS"]) * num_rows
    _load_numbers(account, named, times)


def _count_philox(account: Account, named: Mapping[str, Any], grid: tuple[int, ...], tensors: Tensors) -> None:
    """The words, and what every program reads of seeds and offsets."""
    account.store(named["words"].nbytes)
    _load_numbers(account, named, grid[0])


def _load_numbers(account: Account, named: Mapping[str, Any], times: int) -> None:
    for name in ("seed", "offset"):
        account.load_often(name, named[name], 8 * times)


COUNTS = {"dropout_kernel": _count_dropout, "philox_kernel": _count_philox}
