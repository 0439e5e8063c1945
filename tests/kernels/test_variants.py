"""Every variant of a kernel that a plan of the bench can reach is checked for values, at small sizes.

A kernel is compiled for its flags: modes, masks of what is wanted, axes, and which of its tensors there are. Any two of
them that meet in a launch of the bench or of the table of machine code, on any chip, have to meet in a call whose
results are held to the truth here: calls of the same modes on the small workloads of the op's record, with limits and
numbers of processors under which these take each plan.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from perf.calls import Call
from perf.ops import CASES
from perf.ops.record import Op
from perf.workloads import calls_of
from primitives.kernels.runtime.chips import CHIPS, Chip, chip_of, use_chip, use_limits
from tests.kernels.calls import ROW_PLANS, Launched, launched_by
from tests.kernels.truth import check_values

# Constants that are sizes, of which small calls have others, or the dtype of a tensor that is there.
SIZES = re.compile("BLOCK|NUM_|ALIGN|STAGES|EPS|SCALE|WIDTH|GROUPS?$|RUN|PLANES|ROUNDED")
DTYPES = ("float32", "bfloat16", "float64")
LIMITS = (*ROW_PLANS.values(), {"channel_tile_bytes": 1024})


def variants(launches: Iterable[Launched]) -> set[tuple[Any, ...]]:
    """Of each launch the kernel and its flags: constants that are not sizes, and whether each tensor is there."""
    found = set()
    for one in launches:
        named = {
            # A number of a row is as good as any other, or 0.
            name: value is None
            if value is None or isinstance(value, torch.Tensor)
            else str((value > 0) - (value < 0) if name.startswith("NUMBER") else value)
            for name, value in one.named.items()
            if value is None or isinstance(value, torch.Tensor) or (name.isupper() and not SIZES.search(name))
        }
        # The columns of a group are adjacent, or else lie apart.
        if "GROUP" in one.named:
            named["GROUP"] = str(one.named["GROUP"] > 0)
        found.add((one.kernel.__name__, *sorted(named.items())))
    return found


@functools.cache
def pairs(variant: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    """Flags of a variant that meet."""
    kernel, *flags = variant
    return {(kernel, *pair) for pair in itertools.combinations(flags, 2)}


def in_suite(op: Op) -> dict[tuple[Any, ...], str]:
    """The pairs that the bench and the table of machine code reach, each with a case that does."""
    found: dict[tuple[Any, ...], str] = {}
    for chip in CHIPS.values():
        # Tests fill memory that no code touches.
        with use_chip(chip), torch.device("meta"):
            for workload in (*op.workloads("gpu"), *op.workloads("other")):
                for mode in workload.modes:
                    calls = calls_of(workload, mode)
                    for variant in variants(launched_by(lambda calls=calls: [call.results() for call in calls])):
                        found.setdefault(variant, f"{workload.case} {mode}")
    return {pair: case for variant, case in found.items() for pair in pairs(variant)}


class Small(NamedTuple):
    """A small call, the chip and the limits that are to be in force when it is made, and what it shows."""

    call: Call
    chip: Chip
    limits: dict[str, int]
    pairs: set[tuple[Any, ...]]
    num_programs: int

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        with use_limits(**self.limits), use_chip(self.chip):
            yield


def small_calls(op: Op) -> Iterator[Small]:
    """Calls of all modes."""
    usual = chip_of(torch.get_default_device())
    few = dataclasses.replace(usual, num_processors=1)
    for chip, limits, dtype, workload in itertools.product((usual, few), LIMITS, DTYPES, op.workloads("small")):
        with use_limits(**limits), use_chip(chip):
            for mode in op.modes:
                for call in op.calls(dataclasses.replace(workload, dtype=dtype), mode):
                    launches = launched_by(call.results)
                    met = set().union(*map(pairs, variants(launches)))
                    yield Small(call, chip, limits, met, sum(math.prod(one.grid) for one in launches))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    # Other ops launch kernels of their family.
    "op",
    [pytest.param(op, id=op.name, marks=[pytest.mark.nightly] * bool(op.family)) for op in CASES],
)
def test_flags_that_meet_in_the_suite_meet_in_a_call_with_right_values(op):
    suite = in_suite(op)
    found, missing = [], suite.keys()
    for small in small_calls(op):
        if missing & small.pairs:
            found.append(small)
            missing = missing - small.pairs
        if not missing:
            break
    listed = "\n".join(f"{suite[pair]}: {pair}" for pair in missing)
    assert not missing, (
        f"perf/ops/workloads.csv: no small {op.name} has calls with these flags, as those have:\n{listed}"
    )
    # Later ones may show all that an earlier one does. The interpreter takes its time for each program.
    missing = suite.keys()
    while missing:
        best = max(found, key=lambda small: len(missing & small.pairs) / (1 + small.num_programs))
        missing = missing - best.pairs
        with best.in_force():
            check_values(best.call)
