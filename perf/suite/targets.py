"""The targets, and what a result says of each: met, not met, or not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from perf.suite.results import OK, geometric_mean
from perf.suite.tables import COMPILED, OURS, by_case, speedup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.suite.results import Row

# Of a tensor; smaller ones are bound by launches and caches.
LARGE_BYTES = 32e6
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
COPY_FRACTIONS = {"forward": 0.92, "jvp": 0.92, "hvp": 0.92, "double_backward": 0.92, "backward": 0.90}
MIN_OVER_FASTEST = 1.0
MIN_OVER_COMPILED = 1.15
# Of a CPU: time over that of torch.nn.
MAX_OVER_TORCH = {"forward": 1.15, "forward_backward": 1.15, "jvp": 1.0, "hvp": 1.0}
FULL_OVERHEAD = 1.0


class Verdict(NamedTuple):
    """What became of a target.

    Attributes:
        target: The target in words.
        figure: What was measured.
        met: True or false; None if it was not measured.
    """

    target: str
    figure: str
    met: bool | None

    @property
    def text(self) -> str:
        """The verdict in words."""
        return "not measured" if self.met is None else "met" if self.met else "NOT MET"


def verdicts(result: dict[str, Any]) -> Iterator[Verdict]:
    """Every target of the kind of device that `result` is of."""
    if result["device"] and result["device"]["type"] == "cuda":
        yield from _gpu(result)
    else:
        yield from _cpu(result)


def _gpu(result: dict[str, Any]) -> Iterator[Verdict]:
    rows = [row for row in result["rows"] if row["provider"] == OURS]
    for mode, least in COPY_FRACTIONS.items():
        found = [row for row in rows if row["mode"] == mode and row["kernel_fraction"] is not None]
        fractions = [row["kernel_fraction"] for row in found if _tensor_bytes(row) >= LARGE_BYTES]
        yield _least(f"{mode}: at least {least} of copy speed at every shape of 32 MB and more", fractions, least)
    cases = by_case(result["rows"])
    over_fastest = [value for case in cases.values() if (value := speedup(case, "fastest")) is not None]
    yield _least("as fast as the fastest peer at each shape", over_fastest, MIN_OVER_FASTEST)
    over_compiled = [value for case in cases.values() if (value := speedup(case, COMPILED)) is not None]
    mean = geometric_mean(over_compiled)
    figure = "" if mean is None else f"{mean:.2f} over {len(over_compiled)} cases"
    target = f"{MIN_OVER_COMPILED} times as fast as torch.compile in the geometric mean"
    yield Verdict(target, figure, None if mean is None else mean >= MIN_OVER_COMPILED)


def _cpu(result: dict[str, Any]) -> Iterator[Verdict]:
    for mode, most in MAX_OVER_TORCH.items():
        found = {
            row["workload"]: row["vs_torch_call"]["median"]
            for row in result["rows"]
            if row["provider"] == OURS and row["mode"] == mode and row["status"] == OK and row["vs_torch_call"]
        }
        target = f"{mode}: at most {most} of the time of torch.nn" if most != 1 else f"{mode}: faster than torch's"
        if not found:
            yield Verdict(target, "", None)
            continue
        worst = max(found, key=lambda workload: found[workload])
        figure = f"{geometric_mean(list(found.values())):.2f} in the mean, at most {found[worst]:.2f} ({worst})"
        yield Verdict(target, figure, found[worst] <= most)
    modes = (result["overhead"] or {}).get("modes", {})
    missed = [name for name, found in modes.items() if found["ratio"] > found["limit"]]
    figure = f"{len(modes) - len(missed)} of {len(modes)} comparisons" if modes else ""
    yield Verdict("front-end overhead within its limits", figure, None if not modes else not missed)


def _tensor_bytes(row: Row) -> int:
    size = ITEMSIZES[row["dtype"]]
    for length in row["shape"]:
        size *= length
    return size


def _least(target: str, values: list[float], limit: float) -> Verdict:
    if not values:
        return Verdict(target, "", None)
    reached = sum(value >= limit for value in values)
    return Verdict(target, f"{reached} of {len(values)} shapes, least {min(values):.2f}", reached == len(values))
