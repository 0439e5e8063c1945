"""What a call through the front end costs beside `torch.library.custom_op`, as ratios measured in one run.

The operators do next to nothing to small tensors, so that the time is the front end's and not the arithmetic's. Rounds
of the two sides alternate, and the median of the per-round ratios is reported: absolute times on a shared machine mean
little.

Run: `python -m perf.overhead [--rounds N] [--only WORDS] [--json FILE]`. The exit status is 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import primitives as pr
from perf.suite.timing import interleave, spread
from primitives.core import Primitive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    # What is compared, the side in question, the one that it is measured against, and the most that the ratio may be.
    Comparison = tuple[str, Callable[[], object], Callable[[], object], float]

CALLS_PER_ROUND = 300
WARM_UP_ROUNDS = 5
NAMESPACE = "perf_overhead"
LETTERS = "abcdefgh"


scale_p = Primitive("scale", "(Tensor x, Tensor weight) -> Tensor y", residuals=("x", "weight"), namespace=NAMESPACE)


@scale_p.def_reference
def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The operator of one output."""
    return x * weight


@scale_p.def_vjp
def _scale_vjp(residuals: Any, cotangents: Any, wanted: Any) -> dict[str, Tensor]:
    return {"x": cotangents.y * residuals.weight, "weight": cotangents.y * residuals.x}


def norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three outputs, of which two have no derivative, as in a norm that returns its statistics."""
    return x * weight, x.mean(), x.sum()


# The rules of both sides do the same, with nothing between them and the front end.


def _custom_backward(ctx: Any, saved: Any, y_bar: Tensor, *other_bars: Any) -> dict[str, Tensor]:
    x, weight, *_ = saved
    return {"x": y_bar * weight, "weight": y_bar * x}


def _library_backward(ctx: Any, y_bar: Tensor, *other_bars: Any) -> tuple[Tensor, Tensor]:
    x, weight, *_ = ctx.saved_tensors
    return y_bar * weight, y_bar * x


def _custom(function: Callable[..., Any], save: Callable, backward: Callable = _custom_backward, **options: Any) -> Any:
    op = pr.custom_op(f"{NAMESPACE}::custom_{function.__name__}", **options)(function)
    op.def_save_for_backward(save)
    op.def_backward(backward)
    return op


def _library(function: Callable[..., Any], save: Callable[..., Any]) -> Any:
    op = torch.library.custom_op(f"{NAMESPACE}::library_{function.__name__}", function, mutates_args=())
    op.register_autograd(_library_backward, setup_context=save)
    return op


# Eight tensors: in a dict, and as arguments.


def _eight(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor) -> Tensor:
    return a * b


def _tree(tree: Any) -> Tensor:
    return tree["a"] * tree["b"]


def _eight_bars(ctx: Any, saved: Any, y_bar: Tensor) -> dict[str, Any]:
    a, b = saved
    return {**dict.fromkeys(LETTERS), "a": y_bar * b, "b": y_bar * a}


def _pair(name: str, ours: Callable, theirs: Callable, args: tuple, leaves: tuple, limit: float) -> list[Comparison]:
    """A call with gradients, and one with its backward pass; the other side takes the leaves themselves."""
    y_bar = torch.ones(8)

    def backward(op: Callable, args: tuple) -> None:
        y = op(*args)
        torch.autograd.grad(y if isinstance(y, torch.Tensor) else y[0], leaves[:2], y_bar)

    return [
        (f"{name}: call with grad", lambda: ours(*args), lambda: theirs(*leaves), limit),
        (f"{name}: forward + backward", lambda: backward(ours, args), lambda: backward(theirs, leaves), limit),
    ]


def comparisons() -> list[Comparison]:
    """What is measured, with the limits of the design."""
    plain = torch.ones(8), torch.ones(8)
    eight = tuple(torch.ones(8).requires_grad_() for _ in LETTERS)
    two, tree = eight[:2], dict(zip(LETTERS, eight, strict=True))
    custom_scale = _custom(scale, lambda inputs, output: (inputs.x, inputs.weight))
    library_scale = _library(scale, lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    custom_norm = _custom(
        norm,
        lambda inputs, output: (inputs.x, inputs.weight, output[1], output[2]),
        output_differentiability=[True, False, False],
    )
    library_norm = _library(norm, lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1], output[2]))
    custom_tree = _custom(
        _tree,
        lambda inputs, output: (inputs.tree["a"], inputs.tree["b"]),
        lambda *args: {"tree": _eight_bars(*args)},
    )
    custom_eight = _custom(_eight, lambda inputs, output: (inputs.a, inputs.b), _eight_bars)
    overload, library = scale_p.overload, torch.ops.perf_overhead.library_scale.default
    with_grad, backward = _pair("primitive", overload, library, two, two, 1.0)
    without = ("primitive: call without grad", lambda: overload(*plain), lambda: library(*plain), 1.1)
    return [
        *(with_grad, without, backward),
        # As users call them: the objects that the decorators return.
        *_pair("custom_op, one output", custom_scale, library_scale, two, two, 1.0),
        *_pair("custom_op, three outputs", custom_norm, library_norm, two, two, 1.0),
        *_pair("dict of 8 against 8 arguments", custom_tree, custom_eight, (tree,), eight, 1.5),
    ]


def measured(rounds: int, only: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    """Each comparison with these words in its name: ratio, its quantiles and limit, and the microseconds of both."""
    torch.set_num_threads(1)

    def sampler(function: Callable[[], object]) -> Callable[[], float]:
        # Processor time of this process: what other processes do on the machine does not count.
        timer = timeit.Timer(function, timer=time.process_time)
        return lambda: timer.timeit(CALLS_PER_ROUND) / CALLS_PER_ROUND

    for name, ours, theirs, limit in comparisons():
        if only not in name:
            continue
        samplers = {"ours": sampler(ours), "theirs": sampler(theirs)}
        interleave(samplers, 0.0, WARM_UP_ROUNDS)
        samples = interleave(samplers, 0.0, rounds, rounds)
        ratio = spread([a / b for a, b in zip(samples["ours"], samples["theirs"], strict=True)])
        found = {"ratio": ratio["median"], "ratio_p20": ratio["p20"], "ratio_p80": ratio["p80"], "limit": limit}
        yield name, found | {f"{side}_us": spread(taken, 1e6)["median"] for side, taken in samples.items()}


def measure_all(rounds: int) -> dict[str, Any]:
    """What `--json` writes: torch's version, and what came of every comparison."""
    return {"torch": str(torch.__version__), "modes": dict(measured(rounds))}


def main() -> int:
    """Measure, print one line per comparison, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds of each side (default: %(default)s)")
    parser.add_argument("--only", default="", help="measure only what has these words in its name")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    print(f"torch {torch.__version__}: against torch.library.custom_op, medians of {options.rounds} rounds")
    results = {}
    for name, r in measured(options.rounds, options.only):
        results[name] = r
        verdict = "ok" if r["ratio"] <= r["limit"] else "MISSED"
        print(
            f"  {name:<50} {r['ratio']:.2f}  (p20 {r['ratio_p20']:.2f}, p80 {r['ratio_p80']:.2f}, limit "
            f"{r['limit']:.1f}: {verdict})  {r['ours_us']:.1f} us / {r['theirs_us']:.1f} us",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "modes": results}, indent=2) + "\n")
    return 0 if all(r["ratio"] <= r["limit"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
