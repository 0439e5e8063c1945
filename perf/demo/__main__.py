"""Train two models on handwritten digits with torch.nn and with this package: `python -m perf.demo`."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import primitives as pr
from perf.demo import data, derivatives, report
from perf.demo.models import ConvNet, VisionTransformer
from perf.demo.train import Contest, run_duel

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTESTS = (
    Contest("conv net", ConvNet, learning_rate=5e-3, epochs=8, min_accuracy=0.97),
    Contest("transformer", VisionTransformer, learning_rate=3e-3, epochs=20, min_accuracy=0.95),
)
# A quick run must still have learned something: guessing is right once in ten.
QUICK = {"epochs": 2, "min_accuracy": 0.5}
FLOAT64_STEPS, QUICK_FLOAT64_STEPS = 50, 10
# Images whose features the derivatives are taken at.
DERIVATIVE_IMAGES = 16
# Where the output goes to a file, rich would break the table at 80 columns.
FILE_WIDTH = 120


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every bound holds, 1 if one is missed."""
    parser = argparse.ArgumentParser(prog="python -m perf.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder of the pictures")
    parser.add_argument("--epochs", type=int, help="passes over the training images, for both models")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the order of the images")
    parser.add_argument("--quick", action="store_true", help="a few steps with lower bounds on the accuracy")
    arguments = parser.parse_args(argv)
    if arguments.epochs is not None and arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    start = time.perf_counter()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # The tensors are so small that handing them to more threads costs more than it gains.
    torch.set_num_threads(1)
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    console.print(f"torch {torch.__version__}, primitives {pr.__version__}, {name}, seed {arguments.seed}")

    digits = data.load(arguments.seed)
    changes = (QUICK if arguments.quick else {}) | ({"epochs": arguments.epochs} if arguments.epochs else {})
    contests = [contest._replace(**changes) for contest in CONTESTS]
    shortest = min(contest.num_steps(digits) for contest in contests)
    float64_steps = min(QUICK_FLOAT64_STEPS if arguments.quick else FLOAT64_STEPS, shortest)
    duels, errors = [], {}
    moved = digits.to(device, torch.float32)
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        # Each model trains twice in either dtype.
        tasks = [progress.add_task(c.name, total=2 * (c.num_steps(digits) + float64_steps)) for c in contests]
        for contest, task in zip(contests, tasks, strict=True):
            advance = partial(progress.advance, task)
            duels.append(run_duel(contest, digits, device, arguments.seed, float64_steps, advance))
    for duel in duels:
        model = duel.our_run.model
        x = model.block_input(moved.test_images[:DERIVATIVE_IMAGES])
        errors[f"{duel.contest.name} block"] = derivatives.compare(model.blocks[0], x, arguments.seed)
    console.print(report.training_table(duels))
    console.print(report.derivative_table(errors))
    arguments.output.mkdir(parents=True, exist_ok=True)
    report.save_loss_curves(duels, arguments.output / "loss_curves.png")
    report.save_digits(duels, moved, arguments.output / "digits.png")
    missed = report.failures(duels, errors)
    for sentence in missed:
        console.print(f"[bold red]Missed:[/bold red] {sentence}")
    seconds = time.perf_counter() - start
    pictures = f"Pictures in {arguments.output}: loss_curves.png, digits.png"
    console.print(f"{seconds:.0f} s. {pictures}", highlight=False, soft_wrap=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
