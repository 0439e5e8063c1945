"""The support of every operation: writes docs/reference/support.md.

Run: `python -m perf.support`. Each function is called under each pair of transforms, and the primitives that these call
say what they have; arguments and layouts are those of the records (`perf.ops`).
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.func import grad, jvp
from torch.utils._python_dispatch import TorchDispatchMode

from perf.ops import CASES
from perf.ops.samples import DTYPES
from primitives.__main__ import public_functions
from primitives._core import registered_primitives
from primitives._core.spec import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from perf.ops.record import Op
    from primitives._core import Primitive

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "support.md"

TEXT = """# Supported calls

`python -m perf.support` runs every function under each pair of transforms and writes this page from the operators that
these call. [The API](../api/index.md) says what each function computes; a module of
`primitives.nn` calls the function of its name.

## Kernels

**T** is a Triton kernel on CUDA tensors, **A** a kernel of ATen on CPU tensors, **C** a composition of other rows
and of torch's functions, **R** the reference in plain torch, which serves the rest too: other devices, calls that a
kernel does not take, and derivatives from the third order on. Read transforms from the outside in; a cell says what
serves them beside the value.

{kernels}

{notes}

## Arguments

{arguments}

{layouts}
"""


class _Calls(TorchDispatchMode):
    """Names of the primitives that are called, and of the operators that are composed of them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace.startswith("primitives"):
            self.names[func._schema.name] = None
        return func(*args, **(kwargs or {}))


def _modes(function: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Callable[[], Any]]:
    def loss(x: Tensor) -> Tensor:
        return function(x).pow(3).sum()

    def tangent(x: Tensor) -> Tensor:
        return jvp(function, (x,), (x.cos(),))[1]

    return {
        "value": lambda: function(x),
        "`grad`": lambda: grad(loss)(x),
        "`jvp`": lambda: tangent(x),
        "`jvp(jvp)`": lambda: jvp(tangent, (x,), (x.sin(),)),
        "`jvp(grad)`": lambda: jvp(grad(loss), (x,), (x.sin(),)),
        "`grad(jvp)`": lambda: grad(lambda x: tangent(x).pow(2).sum())(x),
        "`grad(grad)`": lambda: grad(lambda x: grad(loss)(x).pow(2).sum())(x),
    }


# The rule that a transform takes of an operator, and the operator that it calls of one that has a name of its own.
RULES, DERIVED = {"grad": "vjp", "jvp": "jvp"}, {"grad": "_bwd", "jvp": "_jvp"}


def cells(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[dict[str, str], set[Primitive]]:
    """The operators that serve each mode beside the value, as the page has it, and all primitives that are called."""
    found, everything, primitives = {}, set(), registered_primitives()
    values: list[Primitive] = []
    for mode, run in _modes(function, x).items():
        with _Calls() as calls:
            run()
        ops = [primitives[name] for name in calls.names]
        everything.update(ops)
        values = values or ops
        outer, _, inner = mode.strip("`)").partition("(")
        # Those of which a second transform takes a derivative; without a rule that is one of the reference.
        taken = [*values, *(primitives.get(f"{op.qualified_name}{DERIVED.get(inner)}") for op in values)]
        has_rules = not inner or all(op.has_rule(RULES[outer]) for op in taken if op is not None)
        is_composed = any(op.spec.namespace != NAMESPACE for op in ops)
        found[mode] = (
            "C" if is_composed else _kernels([op for op in ops if op not in values] or ops) if has_rules else "R"
        )
    return found, everything


def _parts(op: Primitive) -> list[Primitive]:
    """Those whose kernels serve `op`: the value and the jvp of one that joins both."""
    name, primitives = op.qualified_name.removesuffix("_fwd_jvp"), registered_primitives()
    return [op] if name == op.qualified_name else [primitives[name], primitives[f"{name}_jvp"]]


def _kernels(ops: Sequence[Primitive]) -> str:
    kernels = [part.rules.kernels for op in ops for part in _parts(op)]
    letters = [letter for letter, device in (("T", "cuda"), ("A", "cpu")) if all(device in each for each in kernels)]
    return " ".join(letters if len(letters) == 2 else [*letters, "R"])


def operations() -> Iterator[tuple[str, Callable[[Tensor], Tensor], Tensor, Op | None]]:
    """The names of the rows, a function of one tensor, the tensor, and the record where there is one."""
    cpu = torch.device("cpu")
    for case in CASES:
        inputs = case.inputs(case.small, torch.float64, cpu)
        if (x := inputs["x"]) is not None:
            kind = case.name.replace(case.public, "").strip("_")
            yield f"`{case.public}` {kind}".strip(), case.of(["x"], inputs, case.small), x, case
    recorded = {case.public for case in CASES}
    x = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, function in public_functions().items():
        if name not in recorded:
            yield f"`{name}`", function, x, None


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
    kernels, arguments, looped, cast, dtypes, layouts = [], [], [], [], {}, set()
    modes: list[str] = []
    for name, function, x, case in operations():
        found, ops = cells(function, x)
        modes = list(found)
        kernels.append([name, *found.values()])
        looped += [name] * (not all(op.has_rule("vmap") for op in ops))
        cast += [name] * any(op.has_rule("AutocastCUDA") for op in ops)
        if case is not None:
            dtypes[name] = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            samples = [*case.samples, *case.large]
            layouts |= {sample.layout for sample in samples}
            mixed = "yes" if any(sample.mixed for sample in samples) else ""
            absent = dict.fromkeys(argument for sample in samples for argument in sample.absent)
            arguments.append([name, ", ".join(_differentiated(case)), ", ".join(sorted(absent)), mixed])
    vmap = f"samples one by one in {', '.join(looped)}, and a rule of the others" if looped else "whole batches"
    notes = (
        f"`vmap` takes {vmap}. CUDA's autocast casts as in torch for {', '.join(cast)}, and leaves the others alone. "
        "`torch.compile` has the Triton kernels in graphs of CUDA tensors of fixed sizes; in others each primitive is "
        "one operator."
    )
    text = (
        f"{_same_or_each('All take', dtypes)}, and any strides. `tests/test_records.py` compares values and "
        f"derivatives of two orders on every backend, in the layouts of each record: {', '.join(sorted(layouts))}."
    )
    head = ["operations", "derivatives in", "may be absent", "float32 beside half"]
    return TEXT.format(
        kernels=_table(["operations", *modes], _alike(kernels)),
        notes=textwrap.fill(notes, 128, break_on_hyphens=False),
        layouts=textwrap.fill(text, 128, break_on_hyphens=False),
        arguments=_table(head, _alike(arguments)),
    )


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
