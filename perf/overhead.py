"""What a call through the front end costs beside `torch.library.custom_op`, as ratios measured in one run.

Both operators multiply two small tensors, so that the time is the front end's and not the arithmetic's. Rounds of the
two alternate, and the median of the per-round ratios is reported: absolute times on a shared machine mean little.

Run: `python -m perf.overhead [--rounds N] [--json FILE]`. The exit status is 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from primitives.core import Primitive

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CALLS_PER_ROUND = 300
WARM_UP_ROUNDS = 5
# Upper limits of (this package / torch.library.custom_op), from the design.
LIMITS = {"call with grad": 1.0, "call without grad": 1.1, "forward + backward": 1.0}

scale_p = Primitive(
    "scale", "(Tensor x, Tensor weight) -> Tensor y", residuals=("x", "weight"), namespace="perf_overhead"
)


@scale_p.def_reference
def _scale_reference(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


@scale_p.def_vjp
def _scale_vjp(residuals: Any, cotangents: Any, wanted: Any) -> dict[str, Tensor]:
    return {"x": cotangents.y * residuals.weight, "weight": cotangents.y * residuals.x}


@torch.library.custom_op("perf_overhead::library_scale", mutates_args=())
def library_scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same operator through torch.library."""
    return x * weight


def _library_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _library_backward(ctx: Any, y_bar: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return y_bar * weight, y_bar * x


library_scale.register_autograd(_library_backward, setup_context=_library_setup)


def _seconds(function: Callable[[], object]) -> float:
    # Processor time of this process: what other processes do on the machine does not count.
    start = time.process_time()
    for _ in range(CALLS_PER_ROUND):
        function()
    return time.process_time() - start


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Median ratio and its 20 % and 80 % quantiles for each mode, with the microseconds of both sides."""
    ours, theirs = scale_p.overload, torch.ops.perf_overhead.library_scale.default
    plain = torch.ones(8), torch.ones(8)
    tracked = tuple(t.clone().requires_grad_() for t in plain)
    y_bar = torch.ones(8)

    def forward_backward(op: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(op(*tracked), tracked, y_bar)

    modes: dict[str, Callable[[Any], Callable[[], object]]] = {
        "call with grad": lambda op: lambda: op(*tracked),
        "call without grad": lambda op: lambda: op(*plain),
        "forward + backward": lambda op: lambda: forward_backward(op),
    }
    results = {}
    for mode, build in modes.items():
        pair = build(ours), build(theirs)
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
        results[mode] = {
            "ratio": statistics.median(ratios),
            "ratio_p20": low,
            "ratio_p80": high,
            "limit": LIMITS[mode],
            "ours_us": statistics.median(a for a, _ in samples) * per_call,
            "custom_op_us": statistics.median(b for _, b in samples) * per_call,
        }
    return results


def main() -> int:
    """Measure, print one line per mode, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds per mode (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(options.rounds)
    print(f"torch {torch.__version__}: front end against torch.library.custom_op, medians of {options.rounds} rounds")
    for mode, r in results.items():
        verdict = "ok" if r["ratio"] <= r["limit"] else "MISSED"
        print(
            f"  {mode:<20} {r['ratio']:.2f} of custom_op  (p20 {r['ratio_p20']:.2f}, p80 {r['ratio_p80']:.2f}, "
            f"limit {r['limit']:.1f}: {verdict})  {r['ours_us']:.1f} us / {r['custom_op_us']:.1f} us"
        )
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "modes": results}, indent=2) + "\n")
    return 0 if all(r["ratio"] <= r["limit"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
