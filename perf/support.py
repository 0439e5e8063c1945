"""The support of every operation: writes docs/reference/support.md.

Run: `python -m perf.support`. The primitives of each record (`perf.ops`) say what kernels they have; arguments and
layouts are the record's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perf.ops import CASES
from perf.ops.record import Op
from perf.ops.samples import DTYPES
from primitives.__main__ import public_functions
from primitives._core import Primitive, registered_primitives

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "support.md"

TEXT = """# Supported calls

`python -m perf.support` writes this page from the operators and their records. [The API](../api/index.md) says what
each function computes; a module of `primitives.nn` calls the function of its name.

## Kernels

**T** is a Triton kernel on CUDA tensors, **A** a kernel of ATen on CPU tensors, **R** the reference in plain torch,
which serves the rest too: other devices, calls that a kernel does not take, `jvp(jvp)` of all but softmax, and
derivatives from the third order on. Second derivatives are `jvp(grad)`, `grad(jvp)` and `grad(grad)`.

{kernels}

{notes}

## Arguments

{arguments}

{layouts}
"""


class _Calls(TorchDispatchMode):
    """The primitives that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[Primitive, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if (op := registered_primitives().get(func._schema.name)) is not None:
            self.ops[op] = None
        return func(*args, **(kwargs or {}))


def _second_order(case: Op) -> list[Primitive]:
    """What serves a Hessian-vector product beside the operators of first order."""
    inputs = case.inputs(case.small, torch.float64, torch.device("cpu"))
    function, x = case.of(["x"], inputs, case.small), inputs["x"]
    if x is None or not case.bwd.has_rule("jvp"):
        return []
    with _Calls() as calls:
        torch.func.jvp(torch.func.grad(lambda x: function(x).pow(3).sum()), (x,), (x.sin(),))
    return [op for op in calls.ops if op not in case.first_order] or [case.forward]


def _kernels(ops: Sequence[Primitive]) -> str:
    found = [op.rules.kernels for op in ops]
    letters = [letter for letter, device in (("T", "cuda"), ("A", "cpu")) if found and all(device in k for k in found)]
    return " ".join(letters if len(letters) == 2 else [*letters, "R"])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _alike(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows, in which operations that are alike share one."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    return [[", ".join(found), *cells] for cells, found in names.items()]


def _same_or_each(what: str, of: dict[str, str]) -> str:
    """The common values, said once; of those that differ, each."""
    first = max(of.values(), key=list(of.values()).count)
    others = "; ".join(f"{name} {value}" for name, value in of.items() if value != first)
    return f"{what} {first}{' but ' + others if others else ''}"


def _differentiated(case: Op) -> list[str]:
    """The arguments that a gradient reaches, also where no derivative operator has them for an argument of its own."""
    inputs = {
        name: value.requires_grad_() if value is not None and value.is_floating_point() else value
        for name, value in case.inputs(case.small, torch.float32, torch.device("cpu")).items()
    }
    leaves = {name: value for name, value in inputs.items() if value is not None and value.requires_grad}
    y = case.outputs(inputs, case.small)[0]
    found = dict(zip(leaves, torch.autograd.grad(y.sum(), list(leaves.values()), allow_unused=True), strict=True))
    return [case.first if name == "x" else name for name, slope in found.items() if slope is not None]


def page() -> str:
    """docs/reference/support.md."""
    kernels, arguments, cast, dtypes, layouts = [], [], [], {}, set()
    for case in CASES:
        kind = case.name.replace(case.public, "").strip("_")
        name = f"`{case.public}` {kind}".strip()
        kernels.append([name, *map(_kernels, ([case.forward], [case.bwd, case.jvp], _second_order(case)))])
        cast += [name] * case.forward.has_rule("AutocastCUDA")
        dtypes[name] = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        samples = [*case.samples, *case.large]
        layouts |= {sample.layout for sample in samples}
        mixed = "yes" if any(sample.mixed for sample in samples) else ""
        absent = dict.fromkeys(argument for sample in samples for argument in sample.absent)
        arguments.append([name, ", ".join(_differentiated(case)), ", ".join(sorted(absent)), mixed])
    composed = ", ".join(f"`{name}`" for name in public_functions() if name not in {case.public for case in CASES})
    notes = (
        f"{composed} are composed of these. `vmap` takes whole batches. CUDA's autocast casts as in torch for "
        f"{', '.join(cast)}, and what is composed of them, and leaves the others alone. "
        "`torch.compile` has the Triton kernels in graphs of CUDA tensors of fixed sizes; in others each primitive is "
        "one operator."
    )
    text = (
        f"{_same_or_each('All take', dtypes)}, and any strides. `tests/test_records.py` compares values and "
        f"derivatives of two orders on every backend, in the layouts of each record: {', '.join(sorted(layouts))}."
    )
    head = ["operations", "derivatives in", "may be absent", "float32 beside half"]
    return TEXT.format(
        kernels=_table(["operations", "value", "first derivatives", "second derivatives"], _alike(kernels)),
        notes=textwrap.fill(notes, 128, break_on_hyphens=False),
        layouts=textwrap.fill(text, 128, break_on_hyphens=False),
        arguments=_table(head, _alike(arguments)),
    )


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
