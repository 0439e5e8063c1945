"""Calls of launchers on the emulator, as on a GPU of few processors."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import primitives as pr
from perf.calls import Call
from primitives.kernels.runtime.chips import CHIPS, use_chip, use_limits
from primitives.testing import KernelReport
from tests.kernels.truth import check_values

EMULATED = ("sm_80", "sm_90")
# So few that loops over blocks, shares of rows and sums of partial results occur in tensors of this size.
PROCESSORS = 4


@contextlib.contextmanager
def few_processors(chip: str, limits: Mapping[str, int]) -> Iterator[None]:
    """Plans of a chip, but for its number of processors and some limits."""
    few = dataclasses.replace(CHIPS[chip], num_processors=PROCESSORS)
    with use_chip(few), use_limits(**limits):
        yield


def emulate(call: Call, chip: str, limits: Mapping[str, int] | None = None, **options: Any) -> KernelReport:
    """Hold a call to the truth, and to everything that the emulator looks at."""
    with few_processors(chip, limits or {}):
        report = pr.testing.check_kernel(call.launcher, call.args, chip=chip, **options)
    results = report.results
    check_values(call, results if isinstance(results, (tuple, list)) else (results,))
    return report
