"""Which nested derivatives of torch's own operators are right: writes the table that `primitives.audit` reads.

Every operator that torch's OpInfo database reaches below autograd is differentiated along a random direction in every
nesting of forward and reverse mode up to order 3, and compared with central differences of the nesting below, its
values under a transform with those of plain code: as torch is, and repaired by `repair_torch`, which reads in the table
what torch has wrong or lacks. Six calls of each operator are judged, repaired one call of those that torch has right;
under `vmap` the first call, and each of an operator that is repaired.

Run: `python -m perf.torch_derivatives`, once for each version of torch. It takes some twenty minutes; with the names of
operators behind it, `aten.sgn.default`, it judges these and keeps the other rows. `--device cuda` judges operators on a
GPU, by default those that only a GPU has or that are repaired, and prints their rows: the table is the CPU's. `--page`
prints the page of the docs out of the table.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import primitives as pr
from perf.operator_calls import ELEMENTS, Call, as_real, recorded
from perf.pages import alike, table
from primitives._audit.nestings import STEP, difference, nested, nested_by_autograd, nestings, perturbed_sum, plain
from primitives._audit.table import MAX_ORDER, forget_table, name_of, read_table, table_path, tabled_version
from primitives._repair.kernels import repairs
from primitives._repair.nodes import backward_operators

# Calls of an operator that are judged.
JUDGED = 6
COLUMNS: tuple[str, ...] = ("operator", "wrong", "raises", "repaired_wrong", "repaired_raises")
# Relative errors of central differences, and of differences of differences, where torch has no nesting that is right.
TOLERANCE, LOOSE_TOLERANCE = 1e-5, 1e-3
# Whose outputs behind the first are statistics, which are seldom differentiated: the first alone counts.
WITH_STATISTICS = ("aten.native_group_norm.default", "torch_nn._linear_cross_entropy_batch_chunked.default")
_TORCHS = ThreadPoolExecutor(1)


def _moving(call: Call) -> list[int]:
    """The outputs that depend on the tensors that are differentiated, none if torch cannot differentiate these."""
    try:
        outputs = call(*[as_real(call.values[n]).clone().requires_grad_() for n in call.positions])
    except (RuntimeError, NotImplementedError):
        return []
    moving = [n for n, y in enumerate(outputs) if isinstance(y, torch.Tensor) and y.requires_grad]
    return [n for n in moving if outputs[n].dtype == torch.float64 and outputs[n].layout == torch.strided]


def _differentiable(call: Call) -> tuple[Call, list[int]] | None:
    """The call with the tensors that torch differentiates, and the outputs that depend on them; None without any."""
    for positions in (call.positions, [n for n in call.positions if _moving(call._replace(positions=[n]))]):
        call = call._replace(positions=positions)
        if positions and (moving := _moving(call)):
            return call, moving
    return None


def _of_the_structure(direction: Tensor, x: Tensor) -> Tensor:
    """A direction along which a symmetric or triangular matrix stays one: such operators read a half of it."""
    if x.dim() >= 2 and x.shape[-1] == x.shape[-2]:
        if torch.equal(x, x.mT):
            return (direction + direction.mT) / 2
        for half in (torch.tril, torch.triu):
            if torch.equal(x, half(x)):
                return half(direction)
    return direction


def _symmetric(call: Call) -> Call:
    """The call with symmetric matrices, of which some operators read a half and take the other half for granted."""
    values = list(call.values)
    for n in call.positions:
        if values[n].dim() >= 2 and values[n].shape[-1] == values[n].shape[-2] and not values[n].is_complex():
            values[n] = (values[n] + values[n].mT) / 2
    return call._replace(values=values)


def _by_torch(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns where nothing is repaired: `with repair_torch()` is of one thread."""
    return _TORCHS.submit(function, *args).result()


def _error(
    ways: Sequence[Callable[..., Any]],
    function: Callable[..., Tensor],
    directions: Sequence[Tensor],
    nesting: str,
    xs: Sequence[Tensor],
    truth: float,
) -> float | None:
    """How far the ways to take a nested derivative are off at most; None if one raises."""
    try:
        found = [abs(way(function, directions, nesting)(*xs).item() - truth) for way in ways]
    except (RuntimeError, NotImplementedError, IndexError, ValueError):
        return None
    return max(found, key=lambda error: (error != error, error))


def _verdict(error: float | None, allowed: float) -> str:
    return "raises" if error is None else "right" if error <= allowed else "wrong"


def _has_value(
    call: Call, xs: Sequence[Tensor], directions: Sequence[Tensor], mode: str, beside: Sequence[int]
) -> bool:
    """Whether outputs but those `beside` have the plain values where the call is differentiated, or it raises."""

    def tensors(*xs: Tensor) -> list[Tensor]:
        return [y for n, y in enumerate(call(*xs)) if isinstance(y, torch.Tensor) and n not in beside]

    def outputs(*xs: Tensor) -> tuple[Tensor, list[Tensor]]:
        found = tensors(*xs)
        return perturbed_sum([y for y in found if y.is_floating_point()]), found

    try:
        if mode == "f":
            *_, found = torch.func.jvp(outputs, tuple(xs), tuple(directions), has_aux=True)
        else:
            *_, found = torch.func.vjp(outputs, *xs, has_aux=True)
    except (RuntimeError, NotImplementedError):
        return True
    try:
        assert_close(found, _by_torch(tensors, *xs), equal_nan=True, check_stride=False)
    except AssertionError:
        return False
    return True


def judged(
    call: Call, moving: Sequence[int], beside: Sequence[int] = (), *, under_vmap: bool = False
) -> dict[str, str] | None:
    """Of each nesting whether a call is `"right"`, `"wrong"` or `"raises"`; None if it has no first derivative.

    Of the outputs that are differentiated `moving` are judged, and those `beside` not.

    The truth is torch's plain value, and what differences say of the nesting below. Of nestings under `vmap`, in
    capitals, those count that are silently wrong where the nesting is right without.
    """
    generator = torch.Generator().manual_seed(0)
    xs = [as_real(call.values[n]) for n in call.positions]
    random = [torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device) for x in xs]
    directions = [_of_the_structure(v, x) for v, x in zip(random, xs, strict=True)]

    def below(*xs: Tensor) -> Tensor:
        outputs = call(*xs)
        return perturbed_sum([outputs[n] for n in moving])

    function, verdicts, tolerance = below, {}, TOLERANCE
    for order in range(1, MAX_ORDER + 1):
        truth, by_wider = (difference(below, directions, step)(*xs).item() for step in (STEP, 2 * STEP))
        allowed = tolerance * max(abs(truth), abs(function(*xs).item()), 1e-3)
        if not abs(by_wider - truth) <= allowed or (order == 1 and beside and truth == 0.0):
            # The call is too near to where its derivatives grow without bound, or this part is constant.
            return None
        errors = {}
        for nesting in nestings(order):
            # Plain reverse mode takes another way through the repair.
            ways = [nested, nested_by_autograd] if "f" not in nesting else [nested]
            errors[nesting] = _error(ways, function, directions, nesting, xs, truth)
            verdicts[nesting] = _verdict(errors[nesting], allowed)
            if order == 1 and not _has_value(call, xs, directions, nesting, beside):
                verdicts[nesting] = "wrong"
            elif verdicts[nesting] == "right":
                if nesting.count("f") == 1:
                    by_dual = _error([nested_by_autograd], function, directions, nesting, xs, truth)
                    verdicts[nesting.replace("f", "d")] = _verdict(by_dual, allowed)
                batched = _error([nested], function, directions, nesting.upper(), xs, truth) if under_vmap else 0.0
                verdicts.update({nesting.upper(): "wrong"} if _verdict(batched, allowed) == "wrong" else {})
        if order == 1 and "wrong" in verdicts.values() and verdicts["r"] != "right":
            torchs = _by_torch(_error, [nested_by_autograd], function, directions, "r", xs, truth)
            if None not in (torchs, errors["r"]) and abs(torchs - errors["r"]) <= allowed:
                # There it has no derivative, or reads less of its arguments than it is given.
                return None
        # That of the least error, which a small mistake may lie below.
        right = min((n for n in errors if verdicts[n] == "right"), key=lambda n: errors[n] or 0.0, default=None)
        tolerance = TOLERANCE if right else LOOSE_TOLERANCE
        below = nested(function, directions, right) if right else difference(below, directions, 1e-3)
    return verdicts


def verdicts_of(calls: Sequence[Call], most: int = JUDGED, *, under_vmap: bool = True) -> dict[str, str] | None:
    """The verdict on each nesting for all calls; None if none could be judged.

    One call that is silently wrong makes a nesting wrong. A call that raises tells by itself: the first of them, which
    is the plainest, has to, or half of all. Of the first call each argument is differentiated alone, too.
    """
    first, found = calls[0], []
    alone = [first._replace(positions=[n]) for n in first.positions] if first.positions[1:] else []
    for call, moving in filter(None, map(_differentiable, [first, *alone, *calls[1:]])):
        if len(found) == most:
            break
        count = 1 if name_of(call.operator) in WITH_STATISTICS else len(moving)
        options = {"moving": moving[:count], "beside": moving[count:], "under_vmap": under_vmap or not found}
        judgment = judged(call, **options) or judged(_symmetric(call), **options)
        if judgment is not None:
            found.append(judgment)
    verdicts: dict[str, str] = {}
    words = {nesting for judgment in found for nesting in judgment}
    for nesting in sorted(words, key=lambda word: (word != plain(word), len(word), word)):
        counts = Counter(judgment.get(nesting, "right") for judgment in found)
        raises = found[0].get(nesting) == "raises" or 2 * counts["raises"] >= len(found)
        if verdicts.get(plain(nesting), "right") == "right":
            verdicts[nesting] = "wrong" if counts["wrong"] else "raises" if raises else "right"
    return verdicts or None


def _measured(
    calls: dict[str, list[Call]], touched: Container[str] | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Names of operators, and the nestings of each that are silently wrong and that raise."""
    for name, of_name in calls.items():
        is_touched = touched is not None and of_name[0].operator.name() in touched
        most = JUDGED if touched is None or is_touched else 1
        verdicts = verdicts_of(of_name, most, under_vmap=is_touched)
        if verdicts is not None:
            kinds = {kind: " ".join(n for n, v in verdicts.items() if v == kind) for kind in ("wrong", "raises")}
            print(name, *kinds.values(), sep=" | ", flush=True)
            yield name, kinds


def _write(rows: dict[str, dict[str, str]]) -> None:
    with table_path().open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**rows[name], "operator": name} for name in sorted(rows))


def counts(rows: Sequence[dict[str, str]]) -> Iterator[tuple[str, int, int, int, int]]:
    """Of torch and of torch repaired: rows, those silently wrong, those raising to order 2, and to order 3."""
    for who, prefix in (("torch", ""), ("repaired", "repaired_")):
        wrong = sum(bool(row[f"{prefix}wrong"]) for row in rows)
        raising = [row[f"{prefix}raises"].split() for row in rows if row[f"{prefix}raises"]]
        early = sum(any(len(nesting) < MAX_ORDER for nesting in found) for found in raising)
        yield who, len(rows), wrong, early, len(raising)


def _touches(row: dict[str, str]) -> bool:
    """Whether torch has an operator wrong, or lacks some derivative of it."""
    return bool(row["wrong"] or row["raises"])


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
raise, repaired or not: `ctc_loss` in forward mode and at second order, `special.zeta` and `conv_tbc` in forward mode.

Repaired beside the table: `nn.LSTM` in float32 on the CPU and `embedding_bag` of frozen rows have no forward mode in
torch, batches of cotangents (`is_grads_batched`) keep their axes where a backward pass changes them in place, as group
norm's does, and a group norm in channels_last with a frozen input ends torch's process.

Written by `python -m perf.torch_derivatives --page > docs/reference/torch_derivatives.md`.
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


def main() -> None:
    """Write the table: of torch, and of torch repaired."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("operators", nargs="*", help="those to judge; all by default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to judge them")
    parser.add_argument("--page", action="store_true", help="print the page of the table, and judge none")
    options = parser.parse_args()
    chosen = options.operators
    if options.page:
        print(page(), end="")
        return
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    calls = recorded(op_db, options.device)
    known = {row["operator"]: row for row in read_table()}
    if options.device != "cpu" and not chosen:
        chosen = [name.partition(" ")[0] for name in calls if name not in known or _touches(known[name])]
    if chosen:
        calls = {name: of_name for name, of_name in calls.items() if name.partition(" ")[0] in chosen}
        if missing := {*chosen} - {name.partition(" ")[0] for name in calls}:
            parser.error(f"no calls of {', '.join(sorted(missing))}, expected names such as aten.sgn.default")
    print("torch: operator | silently wrong | raises")
    torchs, is_tabled = dict(_measured(calls)), options.device == "cpu"
    rows = {name: row for name, row in known.items() if chosen and name not in calls}
    rows |= {name: {**known.get(name, dict.fromkeys(COLUMNS, "")), **row} for name, row in torchs.items()}
    if is_tabled:
        # The repair reads them: its own columns are those of before until they are judged.
        _write(rows)
        forget_table()
    print("repaired:")
    with pr.repair_torch():
        repaired = dict(_measured({name: calls[name] for name in torchs}, {*repairs(), *backward_operators()}))
    if is_tabled:
        for name in torchs:
            kinds = repaired.get(name, dict.fromkeys(("wrong", "raises"), ""))
            rows[name].update({f"repaired_{kind}": nestings for kind, nestings in kinds.items()})
        _write(rows)
        for who, total, wrong, early, late in counts(read_table()):
            print(
                f"{who}: {total} rows, {wrong} silently wrong to order 3, {early} raise to order 2, {late} to order 3"
            )


if __name__ == "__main__":
    main()
