"""The transform of batch norm reads first what the reduction before it read last, so that a cache can serve it.

The order in which a GPU reads is simulated: the interpreter tells which lines each program loads, programs start in the
order of their numbers, and as many as run at once take turns. A cache that evicts what was used the longest time ago,
of a third of the operands' size, then holds about a third of them when the transform begins.
"""

from __future__ import annotations

import collections
import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.kernels.bounds import addresses_of
from tests.kernels.layer_norm_truth import ALL, EPS, random
from triton_kernels.batch_norm import batch_norm_train_bwd, batch_norm_train_fwd, batch_norm_train_jvp
from triton_kernels.batch_norm_second_order import batch_norm_pairing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    # For each launch and program, (axis 1, axis 0), which is the order in which programs start: its loads of lines.
    Loads = list[dict[tuple[int, int], list[set[int]]]]

LINE_BYTES = 128
PROCESSORS = 2
# How many programs of a transform run at once; all of a reduction do. Together they read less than the cache holds.
RESIDENT = 4
CACHE_SHARE = 1 / 3

LAYOUTS = {
    "channels first": ((8, 4, 16, 16), torch.contiguous_format),
    "channels last": ((8, 16, 8, 8), torch.channels_last),
}


@contextlib.contextmanager
def recorded_loads(tensors: list[Tensor]) -> Iterator[Loads]:
    """Lines of `tensors` that each load of the kernels launched inside touches."""
    launches: Loads = []
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    masked_load, run_grid = builder.create_masked_load, executor.__call__
    # As if each began where a line does, as a tensor on a GPU would.
    ranges = [(tensor.data_ptr(), tensor.nbytes, number << 32) for number, tensor in enumerate(tensors)]

    def load(self, pointers, mask, *args, **kwargs):
        addresses = addresses_of(np.asarray(pointers.data)[np.broadcast_to(mask.data, pointers.data.shape)])
        places = [(addresses.astype(np.int64) - start, size, base) for start, size, base in ranges]
        inside = np.concatenate([base + place[(place >= 0) & (place < size)] for place, size, base in places])
        # One element of each channel says where its sums begin; a load of a whole tile is longer.
        if inside.size > LINE_BYTES // 4:
            program = (self.grid_idx[1], self.grid_idx[0])
            launches[-1].setdefault(program, []).append(set((inside // LINE_BYTES).tolist()))
        return masked_load(self, pointers, mask, *args, **kwargs)

    def run(self, *args, **kwargs):
        launches.append({})
        return run_grid(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", load)
        patch.setattr(executor, "__call__", run)
        yield launches


def as_run(programs: dict[tuple[int, int], list[set[int]]], resident: int) -> list[set[int]]:
    """The loads of a launch in the order in which `resident` programs at a time make them."""
    waiting = collections.deque(list(programs[number]) for number in sorted(programs))
    running: list[list[set[int]]] = []
    order = []
    while waiting or running:
        while waiting and len(running) < resident:
            running.append(waiting.popleft())
        order += [loads.pop(0) for loads in running]
        running = [loads for loads in running if loads]
    return order


def hit_rate(before: list[set[int]], after: list[set[int]]) -> float:
    """Share of the lines loaded `after` that the cache holds, which `before` went through first."""
    capacity = int(len(set().union(*before)) * CACHE_SHARE)
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    num_hits = num_lines = 0
    for counted, loads in ((False, before), (True, after)):
        for line in (line for load in loads for line in sorted(load)):
            num_lines += counted
            num_hits += counted and line in cache
            cache[line] = None
            cache.move_to_end(line)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return num_hits / num_lines


def calls(full: list[Tensor], weight: Tensor) -> dict[str, tuple[Callable[[], object], list[Tensor]]]:
    """Launchers with a reduction and a transform, and their full-size operands."""
    x, y_bar, x_dot = full
    double_backward = (True, True, True, False, False, False)
    stats = (weight, weight)
    return {
        "forward": (lambda: batch_norm_train_fwd(x, weight, weight, None, None, 0, 0.1, EPS), [x]),
        "backward": (lambda: batch_norm_train_bwd(y_bar, x, weight, *stats, 0, ALL), [x, y_bar]),
        "jvp": (lambda: batch_norm_train_jvp(x, weight, *stats, x_dot, None, None, 0), [x, x_dot]),
        "double backward": (
            lambda: batch_norm_pairing(y_bar, x, weight, *stats, x_dot, None, None, 0, double_backward),
            [x, y_bar, x_dot],
        ),
    }


@pytest.mark.parametrize(
    "layout, mode",
    [
        ("channels first", "forward"),
        ("channels last", "forward"),
        ("channels first", "backward"),
        ("channels last", "jvp"),
        ("channels first", "double backward"),
    ],
)
def test_transform_begins_in_the_cache(
    layout: str, mode: str, use_limits: Callable[..., None], use_processors: Callable[[int], None]
) -> None:
    use_limits(channel_tile_bytes=1024, channel_transform_programs=1)
    use_processors(PROCESSORS)
    shape, memory_format = LAYOUTS[layout]
    full = [random(*shape, seed=seed).contiguous(memory_format=memory_format) for seed in range(3)]
    call, operands = calls(full, random(shape[1]).abs())[mode]
    with recorded_loads(operands) as launches:
        call()
    reduction, _, transform = launches
    before, after = as_run(reduction, len(reduction)), as_run(transform, RESIDENT)
    assert len(transform) > RESIDENT, "everything runs at once, so that the order of programs is not tested"
    assert hit_rate(before, after) > 0.75 * CACHE_SHARE
    # From the beginning, every line would be evicted before its turn.
    assert hit_rate(before, after[::-1]) < 0.25 * CACHE_SHARE
