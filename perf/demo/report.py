"""The results of the demo: the two tables, and the two pictures."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from perf.demo.train import predict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from perf.demo.data import Digits
    from perf.demo.derivatives import Errors
    from perf.demo.train import Duel

FLOAT64_BOUND = 1e-9
# Rounding of a few hundred float64 operations stays far below; a wrong formula lies far above.
DERIVATIVE_BOUND = 1e-9

TORCH_COLOR = "#e8a33d"
OUR_COLOR = "#1f4e79"
WRONG_COLOR = "#c0392b"
DPI = 150
DIGIT_ROWS, DIGIT_COLS = 4, 9
# Differences of exactly zero are drawn at the floor of the logarithmic axis.
DIFFERENCE_FLOOR = 1e-17
# Leaves room for the legend above the largest differences.
DIFFERENCE_CEILING = 1e1


def _mark(text: str, good: bool) -> str:
    return f"[green]{text}[/green]" if good else f"[bold red]{text}[/bold red]"


def training_table(duels: Sequence[Duel]) -> Table:
    """One row per model: accuracies, largest differences of the loss curves, times."""
    steps = len(duels[0].torch_run_float64.losses)
    headings = [f"accuracy\n{what}" for what in ("required", "torch.nn", "converted")]
    headings += [f"loss difference\n{what}" for what in (f"float64, {steps} steps", "float32, all steps")]
    headings += [f"ms/step\n{who}" for who in ("torch.nn", "converted")]
    table = _table("torch.nn and the same model after primitives.nn.convert", "model", headings)
    for duel in duels:
        bound = duel.contest.min_accuracy
        float64 = max(duel.differences(float64=True))
        float32, step = max(zip(duel.differences(float64=False), itertools.count(1), strict=False))
        table.add_row(
            duel.contest.name,
            f"{bound:.2f}",
            *(_mark(f"{value:.4f}", value >= bound) for value in (duel.torch_accuracy, duel.our_accuracy)),
            _mark(f"{float64:.1e}", float64 <= FLOAT64_BOUND),
            f"{float32:.1e} at step {step}",
            *(f"{1e3 * run.step_seconds:.2f}" for run in (duel.torch_run, duel.our_run)),
        )
    return table


def derivative_table(errors: Mapping[str, Mapping[str, Errors]]) -> Table:
    """One row per derivative: the relative errors (by block, by derivative) of torch.nn and of this package."""
    title = "relative error of derivatives, against the norms written out in float64"
    table = _table(title, "derivative", [f"{block}\n{who}" for block in errors for who in ("torch.nn", "converted")])
    for case in next(iter(errors.values())):
        found = [value for by_case in errors.values() for value in by_case[case]]
        table.add_row(case, *(_mark(f"{value:.1e}", value <= DERIVATIVE_BOUND) for value in found))
    return table


def _table(title: str, first: str, headings: Sequence[str]) -> Table:
    table = Table(f"\n{first}", title=title, box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def failures(duels: Sequence[Duel], errors: Mapping[str, Mapping[str, Errors]]) -> list[str]:
    """A sentence for each bound that was missed."""
    missed = []
    for duel in duels:
        name, bound = duel.contest.name, duel.contest.min_accuracy
        for who, accuracy in (("torch.nn", duel.torch_accuracy), ("converted", duel.our_accuracy)):
            if accuracy < bound:
                missed.append(f"{name}, {who}: accuracy {accuracy:.4f} is below {bound}.")
        # Written so that a NaN counts as missed.
        if not (difference := max(duel.differences(float64=True))) <= FLOAT64_BOUND:
            missed.append(f"{name}: float64 loss curves differ by {difference:.1e}.")
    for block, by_case in errors.items():
        for case, error in by_case.items():
            if not error.ours <= DERIVATIVE_BOUND:
                missed.append(f"{block}: {case} has a relative error of {error.ours:.1e}.")
    return missed


def save_loss_curves(duels: Sequence[Duel], path: Path) -> None:
    """Loss curves of both float32 runs and, below, how far apart the two are in float32 and in float64."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(5.5 * len(duels), 6.5), layout="constrained")
        axes = figure.subplots(2, len(duels), squeeze=False, sharey="row", height_ratios=(3, 2))
        for (curves, gaps), duel in zip(axes.T, duels, strict=True):
            for run, color, width, label in (
                (duel.torch_run, TORCH_COLOR, 4, "torch.nn"),
                (duel.our_run, OUR_COLOR, 1, "converted"),
            ):
                curves.semilogy(range(1, len(run.losses) + 1), run.losses, color=color, linewidth=width, label=label)
            curves.set(title=f"{duel.contest.name} (held-out accuracy {duel.our_accuracy:.3f})", xlabel="training step")
            curves.legend()
            for float64, color, label in ((False, OUR_COLOR, "float32"), (True, TORCH_COLOR, "float64")):
                found = [max(difference, DIFFERENCE_FLOOR) for difference in duel.differences(float64=float64)]
                gaps.semilogy(range(1, len(found) + 1), found, ".", markersize=3, color=color, label=label)
            gaps.axhline(FLOAT64_BOUND, color=WRONG_COLOR, linewidth=1, linestyle="--", label="bound for float64")
            gaps.set(xlabel="training step", ylim=(DIFFERENCE_FLOOR / 10, DIFFERENCE_CEILING))
            gaps.legend(loc="upper center", ncols=3, markerscale=3, fontsize="small")
        axes[0, 0].set_ylabel("training loss (nats per image)")
        axes[1, 0].set_ylabel("|difference| of the losses\n(nats per image; 1e-17: none)")
        figure.savefig(path, dpi=DPI)


def save_digits(duels: Sequence[Duel], digits: Digits, path: Path) -> None:
    """Held-out digits with their label and what each converted model says, its mistakes first and in red."""
    predictions = [predict(duel.our_run.model, digits.test_images).cpu() for duel in duels]
    labels = digits.test_labels.cpu()
    wrong = torch.stack([prediction != labels for prediction in predictions]).any(0)
    # Mistakes fill at most half of the picture, so that it shows what the models usually do.
    shown = torch.cat([wrong.nonzero()[:, 0][: DIGIT_ROWS * DIGIT_COLS // 2], (~wrong).nonzero()[:, 0]])
    figure = Figure(figsize=(1.25 * DIGIT_COLS, 1.75 * DIGIT_ROWS + 0.6), layout="constrained")
    all_shown = wrong.sum() <= DIGIT_ROWS * DIGIT_COLS // 2
    mistakes = f"all mistakes among {len(labels)} come first, in red" if all_shown else "mistakes first, in red"
    figure.suptitle(f"Held-out digits as the converted models read them; {mistakes}")
    images = digits.test_images.cpu().float()
    for axes, index in zip(figure.subplots(DIGIT_ROWS, DIGIT_COLS).flat, shown.tolist(), strict=False):
        readings = [f"{duel.contest.name} {p[index]}" for duel, p in zip(duels, predictions, strict=True)]
        axes.imshow(images[index, 0].numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        title = "\n".join([f"true {labels[index]}", *readings])
        axes.set_title(title, fontsize=7, color=WRONG_COLOR if wrong[index] else "black")
        for spine in axes.spines.values():
            spine.set_color(WRONG_COLOR if wrong[index] else "0.7")
    figure.savefig(path, dpi=DPI)
