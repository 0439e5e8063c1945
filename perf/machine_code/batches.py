"""What another batch size compiles anew: nothing may, because columns are compile-time constants and rows never are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from perf.machine_code.cases import ALL_RESULTS, EPS, MOMENTUM, Shape, launch_mode
from perf.machine_code.launches import described_arguments
from perf.machine_code.stand_in import activate
from triton_kernels import batch_norm, batch_norm_second_order, layer_norm, layer_norm_second_order
from triton_kernels._kernel import intercept
from triton_kernels.launch.chips import CHIPS, use_chip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FIRST_ORDER = ("forward", "backward", "jvp")
_SECOND_ORDER = ("hvp", "double_backward", "x_only", "gradient_backward", "backward_of_jvp", "all_results")

# Shapes that reach every kernel, and other sizes of their first dim under which the plans stay as they are: an odd one,
# and one that is a multiple of 16, which the compiler could know.
_SHAPES: tuple[tuple[Shape, tuple[int, ...]], ...] = (
    (Shape("layer_norm", (4096, 4096), modes=(*_FIRST_ORDER, *_SECOND_ORDER)), (4095, 1008)),
    (Shape("layer_norm", (512, 131072), modes=(*_FIRST_ORDER, *_SECOND_ORDER)), (511, 400)),
    # Several programs share a row.
    (Shape("layer_norm", (64, 131072), modes=(*_FIRST_ORDER, *_SECOND_ORDER)), (63, 80)),
    (Shape("log_softmax", (4096, 4096), modes=(*_FIRST_ORDER, *_SECOND_ORDER)), (4095, 1008)),
    (Shape("log_softmax", (1024, 128256), modes=(*_FIRST_ORDER, *_SECOND_ORDER)), (1023, 400)),
    (Shape("log_softmax", (64, 128256), modes=(*_FIRST_ORDER, *_SECOND_ORDER)), (63, 80)),
    (Shape("log_softmax", (16, 21, 64, 64), dim=1, modes=(*_FIRST_ORDER, *_SECOND_ORDER)), (15, 32)),
    (Shape("batch_norm", (64, 256, 14, 14), modes=(*_FIRST_ORDER, *_SECOND_ORDER, "evaluation")), (63, 80)),
    (
        Shape(
            "batch_norm",
            (64, 256, 14, 14),
            channels_last=True,
            modes=(*_FIRST_ORDER, *_SECOND_ORDER, "evaluation"),
        ),
        (63, 80),
    ),
    (Shape("batch_norm", (8192, 1024), modes=(*_FIRST_ORDER, *_SECOND_ORDER)), (8191, 6400)),
    (Shape("dropout", (1024, 4096), modes=("forward", "batched")), (1023, 400)),
)


# Enough for as many partial sums as two of them can have under one plan, and an odd number.
GROUP_ROWS = (640, 639, 600)


def _launch_groups(num_rows: int) -> None:
    """Norms with parameters of their own for each of three groups, of `num_rows` rows or samples each."""
    # Columns that are a multiple of 8 alone: whether the distance of two groups is one of 16 depends on the rows.
    x, weight = torch.empty(3, num_rows, 1000, dtype=torch.bfloat16), torch.empty(3, 1000, dtype=torch.bfloat16)
    stat = torch.empty(3, num_rows)
    layer_norm.layer_norm_fwd(x, weight, weight, 1, 1, EPS)
    layer_norm.layer_norm_bwd(x, x, weight, stat, stat, 1, 1, (True, True, True))
    layer_norm.layer_norm_jvp(x, weight, stat, stat, x, weight, weight, 1, 1)
    operands = (x, x, weight, stat, stat)
    layer_norm_second_order.layer_norm_pairing(*operands, x, weight, weight, 1, 1, ALL_RESULTS)
    layer_norm_second_order.layer_norm_bwd_jvp(*operands, x, x, weight, 1, 1, (True, True, True))
    x, weight = torch.empty(3, num_rows, 256, 14, 14, dtype=torch.bfloat16), torch.empty(3, 256)
    batch_norm.batch_norm_train_fwd(x, weight, weight, weight, weight, 1, MOMENTUM, EPS)
    batch_norm.batch_norm_train_bwd(x, x, weight, weight, weight, 1, (True, True, True))
    operands = (x, x, weight, weight, weight, x, weight, weight, 1)
    batch_norm_second_order.batch_norm_pairing(*operands, ALL_RESULTS)


def _launch_shape(shape: Shape, num_rows: int) -> None:
    for mode in shape.modes:
        launch_mode(dataclasses.replace(shape, shape=(num_rows, *shape.shape[1:])), mode)


def compiled_anew(chip_name: str) -> list[str]:
    """The kernels that another number of rows compiles anew on a chip, and for which arguments; in words.

    Args:
        chip_name: A key of `CHIPS`.
    """
    driver = activate(chip_name)

    def launches(launch: Callable[..., None], *args: Any) -> list[tuple[str, dict[str, str]]]:
        found: list[tuple[str, dict[str, str]]] = []

        def note(kernel: Any, grid: Any, args: tuple, constants: dict[str, Any]) -> None:
            found.append((kernel.__name__, described_arguments(driver, kernel, args, constants)))

        with intercept(note), use_chip(CHIPS[chip_name]):
            launch(*args)
        return found

    problems = []
    for shape, others in _SHAPES:
        first = launches(_launch_shape, shape, shape.shape[0])
        for num_rows in others:
            problems += changed_arguments(f"{shape} with {num_rows}", first, launches(_launch_shape, shape, num_rows))
    first = launches(_launch_groups, GROUP_ROWS[0])
    for num_rows in GROUP_ROWS[1:]:
        problems += changed_arguments(f"groups of {num_rows} rows", first, launches(_launch_groups, num_rows))
    return problems


def changed_arguments(
    case: str, first: Sequence[tuple[str, dict[str, str]]], other: Sequence[tuple[str, dict[str, str]]]
) -> list[str]:
    """What the compiler knows differently of two sequences of launches, each a kernel and its described arguments.

    Args:
        case: What is launched.
        first: Launches.
        other: Launches with another number of rows.
    """
    names, others = [name for name, _ in first], [name for name, _ in other]
    if names != others:
        return [f"{case}: launches {others} instead of {names}"]
    found = {
        f"{case}: {kernel} is compiled anew for {argument}"
        for (kernel, before), (_, after) in zip(first, other, strict=True)
        for argument in before.keys() | after.keys()
        if before.get(argument) != after.get(argument)
    }
    return sorted(found)
