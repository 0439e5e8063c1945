"""Which nested derivatives torch gets wrong, measured against float64 formulas: prints the page in docs/.

Run: `python -m perf.wrong_derivatives > docs/wrong_derivatives.md`.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import primitives as pr
from primitives.decompositions import differentiate_through

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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

torch {version}, CPU. Written by `python -m perf.wrong_derivatives > docs/wrong_derivatives.md`.

{summary}

"here" is `primitives.functional`; "decomposed" is torch's own function inside
`primitives.decompositions.differentiate_through()`.

{tables}
The reason is the same in all cases that are silently wrong: torch keeps mean and reciprocal standard deviation from the
forward pass, and differentiates the formulas that use them as if they were constants. First derivatives are right,
second ones are wrong when the inner one is forward mode, third ones are wrong in every nesting. A loss that stops the
gradient at a JVP, as MeanFlow does, takes first derivatives alone and is right in torch. See
[mechanism.md](mechanism.md) for what is done instead.

Attention (`scaled_dot_product_attention`, causal here) raises in torch wherever it is asked for more than a gradient:
its fused kernels have a backward, which has no derivative, and no forward mode. Its `MATH` backend, which has to be
chosen, is right in every nesting and stores all products of queries with keys, N x N numbers for each head; here none
of them is stored.
"""


def _standardized(x: Tensor, axis: int) -> Tensor:
    centered = x - x.mean(axis, keepdim=True)
    return centered / (centered.square().mean(axis, keepdim=True) + 1e-5).sqrt()


def _attention(functions: Any, x: Tensor) -> Tensor:
    heads = x.view(1, 1, 4, 3)
    return functions.scaled_dot_product_attention(heads, heads.sin(), heads, is_causal=True).view(4, 3)


def _attention_by_math(functions: Any, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _attention(functions, x)


def _plain_attention(x: Tensor) -> Tensor:
    weights = (x @ x.sin().mT / 3**0.5).exp().tril()
    return weights @ x / weights.sum(1, keepdim=True)


# For torch's functions or this package's, an operation on a matrix `[4, 3]`; and the same in plain arithmetic.
OPERATIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "layer norm": (lambda f, x: f.layer_norm(x, (3,)), lambda x: _standardized(x, 1)),
    "batch norm (training)": (
        lambda f, x: f.batch_norm(x, None, None, training=True),
        lambda x: _standardized(x, 0),
    ),
    "log-softmax": (lambda f, x: f.log_softmax(x, 1), lambda x: x - x.exp().sum(1, keepdim=True).log()),
    "attention": (_attention, _plain_attention),
    "attention, torch's `MATH` backend": (_attention_by_math, _plain_attention),
}


def _nested(function: Callable[[Tensor], Tensor], weights: Tensor, nesting: tuple[str, ...]) -> Callable:
    def scalar(x: Tensor) -> Tensor:
        return (function(x).pow(3) * weights).sum()

    result: Callable = scalar
    for name in reversed(nesting):
        result = TRANSFORMS[name](result)
    return result


def measure(name: str) -> Iterator[tuple[tuple[str, ...], list[float | str]]]:
    """For every nesting, outermost transform first, the errors of torch, of this package, and of torch decomposed."""
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    operation, plain = OPERATIONS[name]
    providers = (
        (torch.nn.functional, contextlib.nullcontext),
        (pr.functional, contextlib.nullcontext),
        (torch.nn.functional, differentiate_through),
    )
    for nesting in (word for n in range(1, MAX_ORDER + 1) for word in itertools.product(TRANSFORMS, repeat=n)):
        truth = _nested(plain, weights, nesting)(x)
        errors: list[float | str] = []
        for functions, context in providers:
            try:
                with context():
                    value = _nested(partial(operation, functions), weights, nesting)(x)
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
    summary = ["| | nestings | torch right | here right | decomposed right |", "|---|---|---|---|---|"]
    tables = []
    for name in OPERATIONS:
        results = list(measure(name))
        columns = zip(*(errors for _, errors in results), strict=True)
        right = " | ".join(str(sum(map(is_right, column))) for column in columns)
        summary.append(f"| {name} | {len(results)} | {right} |")
        tables.append(f"## {name[0].upper()}{name[1:]}\n\n| nesting | torch | here | decomposed |\n|---|---|---|---|")
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
