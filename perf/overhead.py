"""What a call through the front end costs beside `torch.library.custom_op`, as ratios measured in one run.

The operators do next to nothing to small tensors, so that the time is the front end's and not the arithmetic's. Rounds
of the two sides alternate, and the median of the per-round ratios is reported: absolute times on a shared machine mean
little.

Run: `python -m perf.overhead [--rounds N] [--only WORDS] [--json FILE]`. The exit status is 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import primitives as pr
from primitives.core import Primitive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

CALLS_PER_ROUND = 300
WARM_UP_ROUNDS = 5
NUM_ENTRIES = 8


class Comparison(NamedTuple):
    """Two functions that do the same, and how long the first may take.

    Attributes:
        name: What is compared.
        ours: The side in question.
        theirs: The side that it is measured against.
        limit: Upper limit of (time of ours / time of theirs), from the design.
    """

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    limit: float


# One output.

scale_p = Primitive(
    "scale", "(Tensor x, Tensor weight) -> Tensor y", residuals=("x", "weight"), namespace="perf_overhead"
)


@scale_p.def_reference
def _scale_reference(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


@scale_p.def_vjp
def _scale_vjp(residuals: Any, cotangents: Any, wanted: Any) -> dict[str, Tensor]:
    return {"x": cotangents.y * residuals.weight, "weight": cotangents.y * residuals.x}


custom_scale = pr.custom_op("perf_overhead::custom_scale")(_scale_reference)
custom_scale.def_save_for_backward(lambda inputs, output: (inputs.x, inputs.weight))


@custom_scale.def_backward
def _custom_scale_backward(ctx: Any, saved: Any, y_bar: Tensor) -> dict[str, Tensor]:
    x, weight = saved
    return {"x": y_bar * weight, "weight": y_bar * x}


@torch.library.custom_op("perf_overhead::library_scale", mutates_args=())
def library_scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same operator through torch.library."""
    return x * weight


def _library_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _library_scale_backward(ctx: Any, y_bar: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return y_bar * weight, y_bar * x


library_scale.register_autograd(_library_scale_backward, setup_context=_library_setup)


# Three outputs, of which two have no derivative, as in a norm that returns its statistics.


def _with_statistics(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * weight, x.mean(), x.sum()


custom_norm = pr.custom_op("perf_overhead::custom_norm", output_differentiability=[True, False, False])(
    _with_statistics
)
custom_norm.def_save_for_backward(lambda inputs, output: (inputs.x, inputs.weight, output[1], output[2]))


@custom_norm.def_backward
def _custom_norm_backward(ctx: Any, saved: Any, y_bar: Tensor, *_: Any) -> dict[str, Tensor]:
    x, weight, _, _ = saved
    return {"x": y_bar * weight, "weight": y_bar * x}


@torch.library.custom_op("perf_overhead::library_norm", mutates_args=())
def library_norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same operator through torch.library."""
    return x * weight, x.mean(), x.sum()


def _library_norm_setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, output[1], output[2])


def _library_norm_backward(ctx: Any, y_bar: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    x, weight, _, _ = ctx.saved_tensors
    return y_bar * weight, y_bar * x


library_norm.register_autograd(_library_norm_backward, setup_context=_library_norm_setup)


# Eight tensors: in a dict, and as arguments.

custom_tree = pr.custom_op("perf_overhead::custom_tree")(lambda tree: tree["0"] * tree["1"])
custom_tree.def_save_for_backward(lambda inputs, output: (inputs.tree["0"], inputs.tree["1"]))


@custom_tree.def_backward
def _custom_tree_backward(ctx: Any, saved: Any, y_bar: Tensor) -> dict[str, Any]:
    first, second = saved
    bars = dict.fromkeys(map(str, range(NUM_ENTRIES)))
    return {"tree": {**bars, "0": y_bar * second, "1": y_bar * first}}


def _eight(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor) -> Tensor:
    return a * b


custom_eight = pr.custom_op("perf_overhead::custom_eight")(_eight)
custom_eight.def_save_for_backward(lambda inputs, output: (inputs.a, inputs.b))


@custom_eight.def_backward
def _custom_eight_backward(ctx: Any, saved: Any, y_bar: Tensor) -> dict[str, Any]:
    a, b = saved
    return {**dict.fromkeys("cdefgh"), "a": y_bar * b, "b": y_bar * a}


def _forward_backward(op: Callable[..., Any], args: Sequence[Any], leaves: Sequence[Tensor]) -> Callable[[], object]:
    y_bar = torch.ones(8)

    def run() -> object:
        y = op(*args)
        return torch.autograd.grad(y if isinstance(y, torch.Tensor) else y[0], leaves, y_bar)

    return run


def _tracked(count: int) -> tuple[Tensor, ...]:
    return tuple(torch.ones(8).requires_grad_() for _ in range(count))


def comparisons() -> list[Comparison]:
    """What is measured, with the limits of the design."""
    plain, two = (torch.ones(8), torch.ones(8)), _tracked(2)
    library = torch.ops.perf_overhead.library_scale.default
    rows = [
        Comparison("primitive: call with grad", lambda: scale_p.overload(*two), lambda: library(*two), 1.0),
        Comparison("primitive: call without grad", lambda: scale_p.overload(*plain), lambda: library(*plain), 1.1),
        Comparison(
            "primitive: forward + backward",
            _forward_backward(scale_p.overload, two, two),
            _forward_backward(library, two, two),
            1.0,
        ),
    ]
    # As users call them: the objects that the decorators return.
    pairs = {"one output": (custom_scale, library_scale), "three outputs": (custom_norm, library_norm)}
    for name, (ours, theirs) in pairs.items():
        rows += [
            Comparison(f"custom_op, {name}: call with grad", lambda op=ours: op(*two), lambda op=theirs: op(*two), 1.0),
            Comparison(
                f"custom_op, {name}: forward + backward",
                _forward_backward(ours, two, two),
                _forward_backward(theirs, two, two),
                1.0,
            ),
        ]
    eight = _tracked(NUM_ENTRIES)
    tree = {str(i): x for i, x in enumerate(eight)}
    return [
        *rows,
        Comparison(
            "dict of 8 against 8 arguments: call with grad",
            lambda: custom_tree(tree),
            lambda: custom_eight(*eight),
            1.5,
        ),
        Comparison(
            "dict of 8 against 8 arguments: forward + backward",
            _forward_backward(custom_tree, (tree,), eight[:2]),
            _forward_backward(custom_eight, eight, eight[:2]),
            1.5,
        ),
    ]


def _seconds(function: Callable[[], object]) -> float:
    # Processor time of this process: what other processes do on the machine does not count.
    start = time.process_time()
    for _ in range(CALLS_PER_ROUND):
        function()
    return time.process_time() - start


def measure(comparison: Comparison, rounds: int) -> dict[str, float]:
    """Median ratio, its 20 % and 80 % quantiles, and the microseconds of both sides."""
    pair = comparison.ours, comparison.theirs
    samples = []
    for i in range(WARM_UP_ROUNDS + rounds):
        # Alternate who goes first, so that a drifting clock favors nobody.
        order = (0, 1) if i % 2 else (1, 0)
        seconds = {side: _seconds(pair[side]) for side in order}
        if i >= WARM_UP_ROUNDS:
            samples.append((seconds[0], seconds[1]))
    ratios = sorted(a / b for a, b in samples)
    low, _, _, high = statistics.quantiles(ratios, n=5)
    per_call = 1e6 / CALLS_PER_ROUND
    return {
        "ratio": statistics.median(ratios),
        "ratio_p20": low,
        "ratio_p80": high,
        "limit": comparison.limit,
        "ours_us": statistics.median(a for a, _ in samples) * per_call,
        "theirs_us": statistics.median(b for _, b in samples) * per_call,
    }


def main() -> int:
    """Measure, print one line per comparison, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds of each side (default: %(default)s)")
    parser.add_argument("--only", default="", help="measure only what has these words in its name")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}: against torch.library.custom_op, medians of {options.rounds} rounds")
    results = {}
    for comparison in comparisons():
        if options.only not in comparison.name:
            continue
        results[comparison.name] = r = measure(comparison, options.rounds)
        verdict = "ok" if r["ratio"] <= r["limit"] else "MISSED"
        print(
            f"  {comparison.name:<50} {r['ratio']:.2f}  (p20 {r['ratio_p20']:.2f}, p80 {r['ratio_p80']:.2f}, limit "
            f"{r['limit']:.1f}: {verdict})  {r['ours_us']:.1f} us / {r['theirs_us']:.1f} us",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "modes": results}, indent=2) + "\n")
    return 0 if all(r["ratio"] <= r["limit"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
