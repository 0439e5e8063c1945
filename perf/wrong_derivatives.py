"""Which nested derivatives torch gets wrong, measured against float64 formulas: prints the page in docs/.

Run: `python -m perf.wrong_derivatives > docs/reference/wrong_derivatives.md`.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev

import primitives as pr
from perf.ops import CASES
from perf.ops.attention import ATTENTION
from perf.ops.samples import normal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from perf.ops.record import Op

# Float64 rounding in these small examples stays far below, and no wrong derivative comes near.
TOLERANCE = 1e-8
MAX_ORDER = 3
TRANSFORMS = {"jacfwd": jacfwd, "jacrev": jacrev}

PAGE = """# Derivatives that torch gets wrong

Every nesting of forward mode (`jacfwd`) and reverse mode (`jacrev`) of a scalar function of each operation, up to
order {order}: the largest error relative to the largest entry of the truth, which is the same nesting of the operation
written out in plain arithmetic, in float64. An error above {tolerance:.0e} counts as wrong; where the table does not
say "raises", the wrong number comes silently. Nestings read from the outside in: `jacrev(jacfwd)` differentiates a
forward-mode derivative in reverse mode.

torch {version}, CPU. Written by `python -m perf.wrong_derivatives > docs/reference/wrong_derivatives.md`.

{summary}

"here" is `primitives.functional`; "repaired" is torch's own function inside `primitives.repair_torch()`. The table of
all operators is [torch_derivatives.md](torch_derivatives.md).

{tables}
The reason is the same in all cases that are silently wrong: torch keeps mean and reciprocal standard deviation from the
forward pass, and differentiates the formulas that use them as if they were constants. First derivatives are right,
second ones are wrong when the inner one is forward mode, third ones are wrong in every nesting. A loss that stops the
gradient at a JVP, as MeanFlow does, takes first derivatives alone and is right in torch. See
[mechanism.md](../explanation/mechanism.md) for what is done instead.

Attention raises in torch wherever it is asked for more than a gradient: its fused kernels have a backward, which has no
derivative, and no forward mode. Its `MATH` backend, which has to be chosen and is what "attention" stands for here, is
right in every nesting and stores all products of queries with keys, N x N numbers for each head; this package stores
none of them.
"""


# By default torch takes its fused attention, of which its record has the formula that is right.
FUSED = "attention, torch's fused kernels"


class Operation(NamedTuple):
    """A function of one tensor by torch and by this package, the same in plain arithmetic, and the tensor."""

    torchs: Callable[[Tensor], Tensor]
    ours: Callable[[Tensor], Tensor]
    plain: Callable[[Tensor], Tensor]
    x: Tensor


def _operation(case: Op, torch_function: Callable[..., Tensor]) -> Operation:
    inputs = case.inputs(case.small, torch.float64, torch.device("cpu"))
    others, options = [*inputs.values()][1:], dict(case.small.options)

    def torchs(x: Tensor) -> Tensor:
        return torch_function(x, *others, **options)

    plain = case.of(["x"], inputs, case.small, true=True)
    return Operation(torchs, case.of(["x"], inputs, case.small), plain, cast("Tensor", inputs["x"]))


def _fused(x: Tensor, k: Tensor, v: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, k, v, bias, scale=0.7, enable_gqa=True)


# Of what torch has a function of; linear operations have no other derivatives than themselves.
_OF_TORCH = [case for case in CASES if not case.is_linear and hasattr(torch.nn.functional, case.public)]
OPERATIONS = {
    **{case.name.replace("_", " "): _operation(case, case.torch_function) for case in (*_OF_TORCH, ATTENTION)},
    FUSED: _operation(ATTENTION, _fused),
}


def _nested(function: Callable[[Tensor], Tensor], weights: Tensor, nesting: tuple[str, ...]) -> Callable:
    def scalar(x: Tensor) -> Tensor:
        return (function(x).pow(3) * weights).sum()

    result: Callable = scalar
    for name in reversed(nesting):
        result = TRANSFORMS[name](result)
    return result


def measure(name: str) -> Iterator[tuple[tuple[str, ...], list[float | str]]]:
    """For every nesting, outermost transform first, the errors of torch, of this package, and of torch repaired."""
    operation = OPERATIONS[name]
    weights = normal(operation.plain(operation.x).shape, 0)
    providers = (
        (operation.torchs, contextlib.nullcontext),
        (operation.ours, contextlib.nullcontext),
        (operation.torchs, pr.repair_torch),
    )
    for nesting in (word for n in range(1, MAX_ORDER + 1) for word in itertools.product(TRANSFORMS, repeat=n)):
        truth = _nested(operation.plain, weights, nesting)(operation.x)
        errors: list[float | str] = []
        for function, context in providers:
            try:
                with context():
                    value = _nested(function, weights, nesting)(operation.x)
                errors.append(((value - truth).abs().max() / truth.abs().max()).item())
            except (RuntimeError, NotImplementedError) as error:
                errors.append(f"raises {type(error).__name__}")
        yield nesting, errors


def is_right(error: float | str) -> bool:
    """Whether an error, as `measure` reports it, is rounding."""
    return not isinstance(error, str) and error <= TOLERANCE


def _cell(error: float | str) -> str:
    text = error if isinstance(error, str) else f"{error:.1e}"
    return text if is_right(error) else f"**{text}**"


def page() -> str:
    """The page, in Markdown."""
    summary = ["| | nestings | torch right | here right | repaired right |", "|---|---|---|---|---|"]
    tables = []
    for name in OPERATIONS:
        results = list(measure(name))
        columns = zip(*(errors for _, errors in results), strict=True)
        right = " | ".join(str(sum(map(is_right, column))) for column in columns)
        summary.append(f"| {name} | {len(results)} | {right} |")
        tables.append(f"## {name[0].upper()}{name[1:]}\n\n| nesting | torch | here | repaired |\n|---|---|---|---|")
        for nesting, errors in results:
            nested = f"{'('.join(nesting)}{')' * (len(nesting) - 1)}"
            tables.append(f"| `{nested}` | {' | '.join(map(_cell, errors))} |")
        tables.append("")
    return PAGE.format(
        order=MAX_ORDER,
        tolerance=TOLERANCE,
        version=torch.__version__.split("+")[0],
        summary="\n".join(summary),
        tables="\n".join(tables),
    )


if __name__ == "__main__":
    # Torch deprecates for its own callers; what counts here is numbers.
    warnings.simplefilter("ignore")
    print(page(), end="")
