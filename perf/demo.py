"""A minute that shows what the package is for: `make demo`, or `python -m perf.demo`.

A network learns to read handwritten digits, also those that lie a little to the side: the loss holds the derivative of
the network along a shift of the image, and should be small in it (Simard and others, "Tangent Prop", 1991). The same
network, data and loss are trained by torch, by torch repaired, and by the repaired step compiled.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.functional import cross_entropy

import primitives as pr
from primitives._audit.nestings import difference

Loss = Callable[..., Tensor]

BATCH_SIZE, WIDTH, LEARNING_RATE, PENALTY = 64, 64, 3e-3, 0.3
STEPS, QUICK_STEPS = 300, 40
# Rounding stays far below, and a formula that is wrong lies far above.
GRADIENT_BOUND = 1e-4
# Between the losses of two runs that differ by roundings alone, which training enlarges.
LOSS_BOUND = 1e-4
NEXT = """
In a model of your own:

    pr.repair_torch()        # torch's operators become right, in models as they are
    step = pr.compile(loss)  # the same loss and its gradients, compiled
"""


class Outcome(NamedTuple):
    """The error of the loss's gradient before training, and what training came to."""

    gradient_error: float
    accuracy: float
    shifted_accuracy: float
    last_loss: float
    step_seconds: float


def load() -> tuple[Tensor, ...]:
    """The 1,797 digits that ship with scikit-learn, `[number, 8, 8]` between 0 and 1, and labels; in float64.

    They come as images and labels to train on, and every fifth held out.
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images, labels = torch.as_tensor(digits.images) / 16, torch.as_tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def network() -> nn.Module:
    """A perceptron with layer norms, the same each time."""
    torch.manual_seed(0)
    hidden = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    first = [nn.Flatten(), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(*first, *hidden, nn.Linear(WIDTH, 10)).double()


def digit_loss(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, shift: Tensor) -> Tensor:
    """Cross-entropy, and the mean square of the derivative of the logits along `shift`."""
    primals_and_tangents: Any = jvp(model, (images,), (shift,))
    logits, moved = primals_and_tangents
    return cross_entropy(logits, labels) + PENALTY * moved.square().sum(-1).mean()


def shift_of(images: Tensor) -> Tensor:
    """The derivative of images that move to the right."""
    return (images.roll(1, -1) - images.roll(-1, -1)) / 2


def batches(images: Tensor, labels: Tensor, steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Images, labels and shifts of each step, the same each time."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(len(labels), (BATCH_SIZE,), generator=generator) for _ in range(steps))
    return [(images[at], labels[at], shift_of(images[at])) for at in drawn]


def gradient_error(loss: Loss, batch: tuple[Tensor, Tensor, Tensor]) -> float:
    """How far a derivative of the loss along a direction of the weights is from central differences, relatively."""
    model = network()
    params = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss(model, *batch), list(params.values()))
    directions = [torch.randn_like(param) for param in params.values()]
    found = sum((one * other).sum() for one, other in zip(gradients, directions, strict=True))

    def at(*values: Tensor) -> Tensor:
        weights = dict(zip(params, values, strict=True))
        return digit_loss(lambda images: functional_call(model, weights, (images,)), *batch)

    # Torch has the loss right, and its gradient wrong.
    return abs(found / difference(at, directions)(*params.values()) - 1).item()


def run(loss: Loss, digits: Sequence[Tensor], steps: int) -> Outcome:
    """Train a network on `loss`."""
    images, labels, held_out_images, held_out_labels = digits
    fed = batches(images, labels, steps)
    error, model = gradient_error(loss, fed[0]), network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    value, seconds = torch.zeros(()), []
    for batch in fed:
        start = time.perf_counter()
        optimizer.zero_grad()
        value = loss(model, *batch)
        value.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        moved = (held_out_images.roll(pixels, -1) for pixels in (0, 1, -1))
        right = [(model(images).argmax(-1) == held_out_labels).double().mean().item() for images in moved]
    return Outcome(error, right[0], statistics.mean(right[1:]), value.item(), statistics.median(seconds))


def table(found: dict[str, Outcome]) -> str:
    """The outcomes, one a column."""
    rows = {
        "the loss's gradient is off by": [f"{one.gradient_error:.4%}" for one in found.values()],
        "digits it has not seen, read rightly": [f"{one.accuracy:.0%}" for one in found.values()],
        "the same, one pixel to the side": [f"{one.shifted_accuracy:.0%}" for one in found.values()],
        "milliseconds a step": [f"{1e3 * one.step_seconds:.1f}" for one in found.values()],
    }
    lines = [["", *found], *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"{first:38}" + "".join(f"{cell:>22}" for cell in cells) for first, *cells in lines)


def failures(found: dict[str, Outcome]) -> list[str]:
    """A sentence for everything that the package promises and did not keep; torch promises nothing."""
    _, *ours = found.items()
    # Written so that a NaN counts.
    off = {name: one.gradient_error for name, one in ours if not one.gradient_error <= GRADIENT_BOUND}
    missed = [f"{name}: the gradient is off by {error:.1e}." for name, error in off.items()]
    (_, eager), (name, compiled) = ours
    if not abs(compiled.last_loss / eager.last_loss - 1) <= LOSS_BOUND:
        missed.append(f"{name}: the last loss is {compiled.last_loss:.6f}, and {eager.last_loss:.6f} in eager mode.")
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Train three times and print the table; 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(prog="python -m perf.demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, and no compiler of C++")
    options = parser.parse_args(arguments)
    # The tensors are so small that handing them to more threads costs more than it gains.
    torch.set_num_threads(1)
    steps, digits = QUICK_STEPS if options.quick else STEPS, load()
    print(f"torch {torch.__version__}, primitives {pr.__version__}: {steps} steps on digits, with a JVP in the loss")
    # The line that says "compiled ..." is notice enough that it takes a while.
    logging.getLogger("primitives.compile").setLevel(logging.ERROR)
    compiled = pr.compile(digit_loss, backend="eager" if options.quick else "inductor")
    found, start = {}, time.perf_counter()
    for name, each in {"torch": digit_loss, "repaired": digit_loss, "repaired and compiled": compiled}.items():
        print(f"  {name} ...", end="", flush=True)
        switch = pr.repair_torch() if name != "torch" else None
        found[name] = run(each, digits, steps)
        if switch is not None:
            switch.undo()
        print(f" {time.perf_counter() - start:.0f} s", flush=True)
    print(f"\n{table(found)}\n{NEXT}")
    missed = failures(found)
    print("".join(f"Missed: {sentence}\n" for sentence in missed), end="")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
