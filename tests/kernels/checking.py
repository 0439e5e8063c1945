"""One call of a launcher, held to everything that the device at hand shows."""

import dataclasses

import torch

from perf.calls import Call
from primitives.kernels.runtime.chips import chip_of, use_chip
from tests.kernels.truth import check_values


def check(call: Call) -> None:
    """Hold one call to its values; on a GPU also to the same bits again, and to the plan for fewer processors."""
    first = check_values(call)
    if (device := torch.get_default_device()).type != "cuda":
        return
    # As integers: NaN differs from itself.
    bits = [[result.flatten().view(torch.uint8) for result in results] for results in (first, call.results())]
    assert all(map(torch.equal, *bits)), f"{call.launcher.__name__} differs from run to run"
    with use_chip(dataclasses.replace(chip_of(device), num_processors=3)):
        check_values(call)
