"""Which nested derivatives torch gets wrong, measured against float64 formulas; writes the page in docs/.

Run: `python -m perf.wrong_derivatives [--order N] [--output docs/wrong_derivatives.md]`. Without `--output` the page
goes to standard output.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.func import jacfwd, jacrev

import primitives as pr
from primitives.decompositions import differentiate_through

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

# Float64 rounding in these small examples stays far below, and no wrong derivative comes near.
TOLERANCE = 1e-8
TRANSFORMS = {"jacfwd": jacfwd, "jacrev": jacrev}

PAGE = """# Derivatives that torch gets wrong

Every nesting of forward mode (`jacfwd`) and reverse mode (`jacrev`) of a scalar function of each operation, up to
order {order}: the largest error relative to the largest entry of the truth, which is the same nesting of the operation
written out in plain arithmetic, in float64. An error above {tolerance:.0e} counts as wrong; where the table does not
say "raises", the wrong number comes silently. Nestings read from the outside in: `jacrev(jacfwd)` differentiates a
forward-mode derivative in reverse mode.

torch {version}, CPU. Written by `python -m perf.wrong_derivatives --output docs/wrong_derivatives.md`.

{summary}

"here" is `primitives.functional`; "decomposed" is torch's own function inside
`primitives.decompositions.differentiate_through()`.

{tables}
The reason is the same in all wrong cases: torch keeps mean and reciprocal standard deviation from the forward pass, and
differentiates the formulas that use them as if they were constants. First derivatives are right, second ones are wrong
when the inner one is forward mode, third ones are wrong in every nesting. A loss that stops the gradient at a JVP, as
MeanFlow does, takes first derivatives alone and is right in torch. See [mechanism.md](mechanism.md) for what is done
instead.
"""


class Operation(NamedTuple):
    """One operation three ways: torch's, this package's, and in plain arithmetic."""

    torch: Callable[[Tensor], Tensor]
    here: Callable[[Tensor], Tensor]
    truth: Callable[[Tensor], Tensor]


def _operation(name: str, truth: Callable[[Tensor], Tensor], *args: Any, **options: Any) -> Operation:
    first, second = getattr(torch.nn.functional, name), getattr(pr.functional, name)
    return Operation(lambda x: first(x, *args, **options), lambda x: second(x, *args, **options), truth)


def _standardized(x: Tensor, axis: int) -> Tensor:
    centered = x - x.mean(axis, keepdim=True)
    return centered / (centered.square().mean(axis, keepdim=True) + 1e-5).sqrt()


# As functions of a matrix `[4, 3]`.
OPERATIONS = {
    "layer norm": _operation("layer_norm", lambda x: _standardized(x, 1), (3,)),
    "batch norm (training)": _operation("batch_norm", lambda x: _standardized(x, 0), None, None, training=True),
    "log-softmax": _operation("log_softmax", lambda x: x - x.exp().sum(1, keepdim=True).log(), 1),
}


def nestings(max_order: int) -> Iterator[tuple[str, ...]]:
    """Names of the transforms of every nesting up to `max_order`, outermost first."""
    for order in range(1, max_order + 1):
        yield from itertools.product(TRANSFORMS, repeat=order)


def _nested(function: Callable[[Tensor], Tensor], weights: Tensor, nesting: tuple[str, ...]) -> Callable:
    def scalar(x: Tensor) -> Tensor:
        return (function(x).pow(3) * weights).sum()

    result: Callable = scalar
    for name in reversed(nesting):
        result = TRANSFORMS[name](result)
    return result


def _error(function: Callable, x: Tensor, weights: Tensor, nesting: tuple[str, ...], truth: Tensor) -> float | str:
    try:
        value = _nested(function, weights, nesting)(x)
    except (RuntimeError, NotImplementedError) as error:
        return f"raises {type(error).__name__}"
    return ((value - truth).abs().max() / truth.abs().max()).item()


def measure(operation: Operation, max_order: int) -> dict[tuple[str, ...], dict[str, float | str]]:
    """Relative error of each provider in each nesting."""
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    results = {}
    for nesting in nestings(max_order):
        truth = _nested(operation.truth, weights, nesting)(x)
        row = {name: _error(getattr(operation, name), x, weights, nesting, truth) for name in ("torch", "here")}
        with differentiate_through():
            row["decomposed"] = _error(operation.torch, x, weights, nesting, truth)
        results[nesting] = row
    return results


def is_right(error: float | str) -> bool:
    """Whether an error, as `measure` reports it, is rounding."""
    return not isinstance(error, str) and error <= TOLERANCE


def _cell(error: float | str) -> str:
    text = error if isinstance(error, str) else f"{error:.1e}"
    return text if is_right(error) else f"**{text}**"


def page(max_order: int) -> str:
    """The page, in Markdown."""
    summary = ["| | nestings | torch right | here right | decomposed right |", "|---|---|---|---|---|"]
    tables = []
    for name, operation in OPERATIONS.items():
        results = measure(operation, max_order)
        columns = zip(*(row.values() for row in results.values()), strict=True)
        right = " | ".join(str(sum(map(is_right, column))) for column in columns)
        summary.append(f"| {name} | {len(results)} | {right} |")
        tables.append(f"## {name[0].upper()}{name[1:]}\n\n| nesting | torch | here | decomposed |\n|---|---|---|---|")
        for nesting, row in results.items():
            nested = f"{'('.join(nesting)}{')' * (len(nesting) - 1)}"
            tables.append(f"| `{nested}` | {' | '.join(map(_cell, row.values()))} |")
        tables.append("")
    return PAGE.format(
        order=max_order,
        tolerance=TOLERANCE,
        version=torch.__version__.split("+")[0],
        summary="\n".join(summary),
        tables="\n".join(tables),
    )


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", type=int, default=3, help="highest order (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="file to write")
    options = parser.parse_args()
    # Torch deprecates for its own callers; what counts here is numbers.
    warnings.simplefilter("ignore")
    text = page(options.order)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
        print(f"wrote {options.output}")
    else:
        print(text)


if __name__ == "__main__":
    main()
