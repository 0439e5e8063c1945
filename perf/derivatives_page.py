"""The page of the table of torch's derivatives, with the repair and without: printed out of the table.

Run: `python -m perf.derivatives_page > docs/reference/torch_derivatives.md`, after `python -m perf.torch_derivatives`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perf.torch_derivatives import counts
from primitives._audit.table import MAX_ORDER, read_table, tabled_version

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = """# Torch's derivatives, operator by operator

Every operator of torch {version} that has a derivative and that torch's own test samples reach, differentiated on the
CPU in float64 by every nesting of forward and reverse mode to order {order}, and compared with central differences of
the order below. The table has the operators with which torch is silently **wrong**, or raises, in some nesting, and
what becomes of them inside `primitives.repair_torch()`. Torch has the {right} others right, and the repair leaves them
alone.

| | operators | silently wrong to order 3 | raise to order 2 | raise to order 3 |
|---|---|---|---|---|
{counts}

"2 of 4" counts the nestings of an order: `jvp` and `vjp` at order 1, four at order 2, eight at order 3. Some are right
alone, and wrong where the inner derivative is taken under `vmap`, as `torch.func.hessian`, `jacfwd` and `jacrev` do.
Values count too: a call that is differentiated has to have those of plain torch. What stands
after a name is special about the input: `masked_rows` have no entry that is seen, and `zeros`, `infinite` and
`channels_last` say what some of the numbers are, and how they lie in memory; `right_side` is a system whose matrix is
a constant. Written by `python -m perf.derivatives_page > docs/reference/torch_derivatives.md`.

| operator | torch, order 1 | order 2 | order 3 | repaired |
|---|---|---|---|---|
{rows}
{reasons}"""

# Why an operator is not right in every nesting with the repair on, too.
REASONS = {
    "aten.binary_cross_entropy_with_logits.default": (
        "functorch has a kernel of its own for it, before that of the repair, and it raises where target and input "
        "both move in three nested `jvp`."
    ),
    "aten.convolution.default": (
        "reversed three times, torch's convolution raises where it is transposed and has an `output_padding`. A kernel "
        "before it would cost every convolution time, at every order."
    ),
}


def _cell(row: dict[str, str], order: int, prefix: str = "") -> str:
    found = []
    for kind in ("wrong", "raises"):
        words = [nesting for nesting in row[f"{prefix}{kind}"].split() if len(nesting) == order]
        alone = sum(word.islower() for word in words)
        if words:
            text = f"{kind} {alone} of {2**order}" + f", {len(words) - alone} more under vmap" * (alone < len(words))
            found.append(f"**{text}**" if kind == "wrong" else text)
    return ", ".join(found) or "right"


def _lines(rows: list[dict[str, str]]) -> Iterator[str]:
    for row in rows:
        name, _, special = row["operator"].partition(" ")
        base, overload = name.split(".")[1:]
        name = base if overload == "default" else f"{base}.{overload}"
        torchs = [_cell(row, order) for order in range(1, MAX_ORDER + 1)]
        left = " ".join(f"{row['repaired_wrong']} {row['repaired_raises']}".split())
        repaired = "right" if not left else ("**wrong**: " if row["repaired_wrong"] else "raises: ") + f"`{left}`"
        yield f"| `{name}`{f', {special}' if special else ''} | {' | '.join(torchs)} | {repaired} |"


def page() -> str:
    """The page, in Markdown."""
    rows = read_table()
    shown = [row for row in rows if row["wrong"] or row["raises"]]
    left = [row["operator"] for row in rows if row["repaired_wrong"] or row["repaired_raises"]]
    reasons = "".join(f"\n`{name.split('.')[1]}`: {REASONS[name]}\n" for name in left)
    return PAGE.format(
        version=tabled_version(),
        order=MAX_ORDER,
        right=len(rows) - len(shown),
        counts="\n".join(f"| {who} | {' | '.join(map(str, numbers))} |" for who, *numbers in counts(rows)),
        rows="\n".join(_lines(shown)),
        reasons=reasons,
    )


if __name__ == "__main__":
    print(page(), end="")
