"""One call of a launcher, held to everything: values, bounds, and results that no order of programs changes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from perf.calls import Call
from primitives.kernels.runtime.chips import chip_of, use_chip
from primitives.kernels.runtime.kernel import INTERPRETED
from tests.kernels.interpreting import reordered_programs
from tests.kernels.truth import check_values

EMULATED = not INTERPRETED and not torch.cuda.is_available()


def check(call: Call, *, in_any_order: bool = True) -> None:
    """Hold one call to everything. Scratch and outputs begin as NaN each time.

    Which programs share what follows from the kernel and its plan: without `in_any_order`, a call that differs in
    other things runs once.
    """
    first = call.results()
    check_values(call, first)
    if (in_any_order or not INTERPRETED) and not EMULATED:
        check_order(call, first)
    # A device holds the plan for fewer processors too.
    if not INTERPRETED and not EMULATED:
        few = dataclasses.replace(chip_of(torch.get_default_device()), num_processors=3)
        with use_chip(few):
            check_values(call)


def check_order(call: Call, first: Sequence[Tensor]) -> None:
    """Hold a call to the results that it had when its programs ran in the order of their numbers, or in any order."""
    with reordered_programs() if INTERPRETED else contextlib.nullcontext():
        again = call.results()
    # As integers: NaN differs from itself.
    bits = [[result.flatten().view(torch.uint8) for result in results] for results in (first, again)]
    assert all(map(torch.equal, *bits)), f"{call.launcher.__name__} depends on the order of its programs"
