"""The page of the table of torch's derivatives, with the repair and without: printed out of the table.

Run: `python -m perf.derivatives_page > docs/reference/torch_derivatives.md`, after `python -m perf.torch_derivatives`.
"""

from __future__ import annotations

from perf.operator_calls import ELEMENTS
from perf.pages import alike, table
from perf.torch_derivatives import counts
from primitives._audit.nestings import plain
from primitives._audit.table import MAX_ORDER, read_table, tabled_version

PAGE = """# Torch's derivatives, operator by operator

`python -m perf.torch_derivatives` takes every operator of torch {version} that has a derivative and that torch's own
test samples reach, differentiates it on the CPU in float64 by every nesting of `jvp` and `vjp`, two at order 1, four at
order 2, eight at order {order}, and compares with central differences of the order below. A call that is differentiated
must also have the values of a plain one.

{counts}

Torch has {right} operators right, and `primitives.repair_torch()` leaves them alone. The others, in how many nestings
they are silently **wrong** or raise:

{rows}

"Under vmap" means that the inner derivative is, as in `torch.func.hessian`, `jacfwd` and `jacrev`, "by forward_ad" that
`torch.autograd` takes the others. A word after a name says which input: `masked_rows` see no entry, `zeros` and
`infinite` are among the numbers, which may be `complex`, `channels_last` is a layout. Eigenvectors of `linalg_eig` have
any phase: what is judged are products of their numbers, which have none.

Repaired, all are right in every nesting but these:

{reasons}
Torch's samples do not reach every operator, or only with more numbers than the {elements} that are judged. Known to
raise, repaired or not: `ctc_loss` in forward mode and at second order, `special.zeta` and `conv_tbc` in forward mode,
`scatter_reduce` and `index_reduce` by products with two zeros at one place at second order of plain `backward`.

Repaired beside the table: `nn.LSTM` in float32 on the CPU and `embedding_bag` of frozen rows have no forward mode in
torch, batches of cotangents (`is_grads_batched`) keep their axes where a backward pass changes them in place, as group
norm's does, and a group norm in channels_last with a frozen input ends torch's process.

Written by `python -m perf.derivatives_page > docs/reference/torch_derivatives.md`.
"""

COUNTED = ("", "operators", "silently wrong to order 3", "raise to order 2", "raise to order 3")
# Why an operator is not right in every nesting with the repair on, too.
REASONS = {
    "aten.lift_fresh.default": (
        "it stands for a literal, as `torch.tensor(1.0)` makes one, and no literal has a tangent by `forward_ad`."
    ),
    "aten.binary_cross_entropy_with_logits.default": (
        "functorch's own kernel runs before the repair's, and raises in three nested `jvp` of both target and input."
    ),
    "aten.convolution.default": (
        "a transposed one with an `output_padding` raises when it is reversed three times. A kernel before torch's "
        "would slow every convolution."
    ),
}


def _cell(row: dict[str, str], order: int) -> str:
    found = []
    for kind in ("wrong", "raises"):
        words = [nesting for nesting in row[kind].split() if len(nesting) == order]
        found_in = {
            "": sum(word == plain(word) for word in words),
            " under vmap alone": sum(map(str.isupper, words)),
            " by forward_ad alone": sum("d" in word for word in words),
        }
        if words:
            text = f"{kind} " + ", ".join(f"{count}{how}" for how, count in found_in.items() if count)
            found.append(f"**{text}**" if kind == "wrong" else text)
    return ", ".join(found) or "right"


def _name(row: dict[str, str]) -> str:
    name, _, special = row["operator"].partition(" ")
    base, overload = name.split(".")[1:]
    return f"`{base if overload == 'default' else f'{base}.{overload}'}`{f' {special}' if special else ''}"


def page() -> str:
    """The page, in Markdown."""
    rows, orders = read_table(), range(1, MAX_ORDER + 1)
    shown = [row for row in rows if row["wrong"] or row["raises"]]
    left = [row["operator"] for row in rows if row["repaired_wrong"] or row["repaired_raises"]]
    reasons = "".join(f"- `{name.split('.')[1]}`: {REASONS[name]}\n" for name in left)
    return PAGE.format(
        version=tabled_version(),
        order=MAX_ORDER,
        elements=ELEMENTS,
        right=len(rows) - len(shown),
        counts=table(COUNTED, (map(str, row) for row in counts(rows))),
        rows=table(
            ["torch's operators", *(f"order {order}" for order in orders)],
            alike([_name(row), *(_cell(row, order) for order in orders)] for row in shown),
        ),
        reasons=reasons,
    )


if __name__ == "__main__":
    print(page(), end="")
