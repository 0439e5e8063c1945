"""Train two models on handwritten digits with torch.nn and with this package: `python -m perf.demo`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import primitives as pr
from perf.demo import data, derivatives, report
from perf.demo.models import ConvNet, VisionTransformer
from perf.demo.train import Contest, num_steps, run_duel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.demo.data import Digits
    from perf.demo.derivatives import Errors
    from perf.demo.train import Duel

CONV_EPOCHS, TRANSFORMER_EPOCHS = 8, 20
QUICK_CONV_EPOCHS, QUICK_TRANSFORMER_EPOCHS = 2, 2
FLOAT64_STEPS, QUICK_FLOAT64_STEPS = 50, 10
# Images whose features the derivatives are taken at.
DERIVATIVE_IMAGES = 16
# Where the output goes to a file, rich would break the table at 80 columns.
FILE_WIDTH = 120


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder of the pictures")
    parser.add_argument("--epochs", type=int, help="passes over the training images, for both models")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the order of the images")
    parser.add_argument("--quick", action="store_true", help="a few steps with lower bounds on the accuracy")
    arguments = parser.parse_args(argv)
    if arguments.epochs is not None and arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    return arguments


def _contests(quick: bool, epochs: int | None) -> tuple[Contest, Contest]:
    conv_epochs = epochs or (QUICK_CONV_EPOCHS if quick else CONV_EPOCHS)
    transformer_epochs = epochs or (QUICK_TRANSFORMER_EPOCHS if quick else TRANSFORMER_EPOCHS)
    # A quick run must still have learned something: guessing is right once in ten.
    return (
        Contest("conv net", ConvNet, 5e-3, conv_epochs, 0.5 if quick else 0.97),
        Contest("transformer", VisionTransformer, 3e-3, transformer_epochs, 0.5 if quick else 0.95),
    )


def _train_all(
    contests: Sequence[Contest], digits: Digits, device: torch.device, seed: int, float64_steps: int, console: Console
) -> list[Duel]:
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    duels = []
    with Progress(*columns, console=console) as progress:
        # Each model trains twice in either dtype.
        tasks = [
            progress.add_task(contest.name, total=2 * (num_steps(contest, digits) + float64_steps))
            for contest in contests
        ]
        for contest, task in zip(contests, tasks, strict=True):
            duels.append(
                run_duel(contest, digits, device, seed, float64_steps, lambda task=task: progress.advance(task))
            )
    return duels


def _compare_derivatives(duels: Sequence[Duel], digits: Digits, seed: int) -> dict[str, dict[str, Errors]]:
    images = digits.test_images[:DERIVATIVE_IMAGES]
    return {
        f"{duel.contest.name} block": derivatives.compare(model.blocks[0], model.block_input(images), seed)
        for duel in duels
        for model in (duel.our_run.model,)
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every bound holds, 1 if one is missed."""
    arguments = _arguments(argv)
    start = time.perf_counter()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # The tensors are so small that handing them to more threads costs more than it gains.
    torch.set_num_threads(1)
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    console.print(
        f"torch {torch.__version__}, primitives {pr.__version__}, "
        f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'}, seed {arguments.seed}"
    )

    digits = data.load(arguments.seed)
    contests = _contests(arguments.quick, arguments.epochs)
    shortest = min(num_steps(contest, digits) for contest in contests)
    float64_steps = min(QUICK_FLOAT64_STEPS if arguments.quick else FLOAT64_STEPS, shortest)
    duels = _train_all(contests, digits, device, arguments.seed, float64_steps, console)
    moved = digits.to(device, torch.float32)
    errors = _compare_derivatives(duels, moved, arguments.seed)

    console.print(report.training_table(duels))
    console.print(report.derivative_table(errors))
    arguments.output.mkdir(parents=True, exist_ok=True)
    pictures = arguments.output / "loss_curves.png", arguments.output / "digits.png"
    report.save_loss_curves(duels, pictures[0])
    report.save_digits(duels, moved, pictures[1])
    missed = report.failures(duels, errors)
    for sentence in missed:
        console.print(f"[bold red]Missed:[/bold red] {sentence}")
    console.print(
        f"{time.perf_counter() - start:.0f} s. Pictures in {arguments.output}: {', '.join(p.name for p in pictures)}",
        highlight=False,
        soft_wrap=True,
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
