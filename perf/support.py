"""The support of every operation: writes docs/reference/support.md.

Run: `python -m perf.support`. The primitives of each record (`perf.ops`) say what kernels they have; arguments and
layouts are the record's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import torch

from perf.ops import CASES
from perf.ops.record import Op
from perf.ops.samples import DTYPES
from perf.pages import DOCS, alike, table
from primitives.__main__ import public_functions
from primitives._core import Primitive

PAGE = DOCS / "reference" / "support.md"

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


def _second_order(case: Op) -> tuple[Primitive, ...]:
    """What serves a Hessian-vector product: operators of its own, or those of first order, of which it is composed."""
    return case.second_order or case.first_order if case.bwd.has_rule("jvp") else ()


def _kernels(ops: Sequence[Primitive]) -> str:
    found = [op.rules.kernels for op in ops]
    letters = [letter for letter, device in (("T", "cuda"), ("A", "cpu")) if found and all(device in k for k in found)]
    return " ".join(letters if len(letters) == 2 else [*letters, "R"])


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
    kernels, arguments, cast, layouts = [], [], [], set()
    for case in CASES:
        kind = case.name.replace(case.public, "").strip("_")
        name = f"`{case.public}` {kind}".strip()
        kernels.append([name, *map(_kernels, ([case.forward], [case.bwd, case.jvp], _second_order(case)))])
        cast += [name] * case.forward.has_rule("AutocastCUDA")
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
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    text = (
        f"All take {dtypes}, and any strides. `tests/test_records.py` compares values and "
        f"derivatives of two orders on every backend, in the layouts of each record: {', '.join(sorted(layouts))}."
    )
    head = ["operations", "derivatives in", "may be absent", "float32 beside half"]
    return TEXT.format(
        kernels=table(["operations", "value", "first derivatives", "second derivatives"], alike(kernels)),
        notes=textwrap.fill(notes, 128, break_on_hyphens=False),
        layouts=textwrap.fill(text, 128, break_on_hyphens=False),
        arguments=table(head, alike(arguments)),
    )


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
