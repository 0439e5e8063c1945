"""MeanFlow on handwritten digits: a small diffusion transformer learns to draw a digit in one step.

    pip install '.[demo]'
    python docs/examples/meanflow.py              # about 7 minutes; --quick shows that it runs

The network predicts the mean velocity u(z, r, t) of the flow from time t back to time r. Its loss has a JVP in it:

    target = v - (t - r) du/dt,    du/dt = the JVP of u along (v, 0, 1),    v = noise - image

`F.scaled_dot_product_attention` has a JVP in torch's math backend alone, which stores the weight of every row for every
key. Inside `pr.repair_torch()` the same network has a JVP without them, and `pr.compile` makes programs of the loss.
All learn from the same batches. Losses, time and memory are printed; a picture shows them, and what two draw.

Source: Geng, Deng, Bai, Kolter, He, "Mean Flows for One-step Generative Modeling", arXiv:2505.13447, 2025.
"""

import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from matplotlib import pyplot
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile

import primitives as pr

PATCH, NUM_CLASSES, BATCH = 2, 10, 64


class Transformer(nn.Module):
    """u(z, r, t) of images `[batch, side, side]`, times `[batch]` and classes `[batch]`, by torch's own blocks."""

    def __init__(self, side: int = 8, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.grid, self.width = side // PATCH, width
        self.embed, self.head = nn.Linear(PATCH**2, width), nn.Linear(width, PATCH**2)
        self.positions = nn.Parameter(0.02 * torch.randn(self.grid**2, width))
        self.times = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(NUM_CLASSES, width)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, **options)
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)

    def waves(self, time: Tensor) -> Tensor:
        """A time `[batch]` as sines and cosines `[batch, width]`."""
        angles = time[:, None] * torch.logspace(0, 1.5, self.width // 2)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, digits: Tensor) -> Tensor:
        """The mean velocity from t to r."""
        patches = z.unflatten(2, (self.grid, PATCH)).unflatten(1, (self.grid, PATCH)).transpose(2, 3)
        condition = self.times(torch.cat([self.waves(t), self.waves(t - r)], -1)) + self.classes(digits)
        x = self.blocks(self.embed(patches.flatten(3).flatten(1, 2)) + self.positions + condition[:, None])
        patches = self.head(x).unflatten(2, (PATCH, PATCH)).unflatten(1, (self.grid, self.grid))
        return patches.transpose(2, 3).flatten(3).flatten(1, 2)


def batch_of(images: Tensor, digits: Tensor) -> tuple[Tensor, ...]:
    """Images `[batch, side, side]` and their classes, with noise and times `r <= t`, of which half are the same."""
    first, second = (torch.randn(2, len(images)) - 0.4).sigmoid()
    t, is_same = torch.maximum(first, second), torch.rand(len(images)) < 0.5
    return images, digits, torch.randn_like(images), torch.where(is_same, t, torch.minimum(first, second)), t


def loss_of(net: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The MeanFlow loss, which weights every image by its error, and the mean squared error."""
    images, digits, noise, r, t = batch
    time, span = t[:, None, None], (t - r)[:, None, None]
    z, v = (1 - time) * images + time * noise, noise - images
    u, du_dt = jvp(lambda z, r, t: net(z, r, t, digits), (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    error = (u - (v - span * du_dt).detach()).square().mean((1, 2))
    return (error / (error.detach() + 1e-3)).mean(), error.mean()


class Run:
    """One network in training, and the average of its weights, which draws."""

    def __init__(self, name: str, context: Callable, options: Namespace, loss_of: Callable = loss_of) -> None:
        torch.manual_seed(0)
        self.loss_of = loss_of
        self.name, self.context, self.net, self.log = name, context, Transformer(), []
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.998))
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=options.steps)

    def step(self, batch: tuple[Tensor, ...]) -> None:
        """Learn from a batch."""
        start = time.perf_counter()
        with self.context():
            loss, error = self.loss_of(self.net, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.average.update_parameters(self.net)
        self.log.append((error.item(), time.perf_counter() - start))

    @torch.no_grad()
    def draw(self) -> Tensor:
        """Ten digits of each class, a row for each, in one step from noise."""
        torch.manual_seed(1)
        noise, digits = torch.randn(100, 8, 8), torch.arange(NUM_CLASSES).repeat_interleave(10)
        images = noise - self.average(noise, torch.zeros(100), torch.ones(100), digits)
        return F.pad(images, (1, 1, 1, 1), value=-1.0).unflatten(0, (10, 10)).transpose(1, 2).reshape(100, 100)

    def peak_memory(self, side: int) -> float:
        """MiB that the loss of one image and its gradient hold at most at a time, temporaries of operators included."""
        net, batch = Transformer(side), batch_of(torch.randn(1, side, side), torch.tensor([0]))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, self.context():
            loss_of(net, batch)[0].backward()
        changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        sizes = [e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns())]
        return max(accumulate(sizes)) / 2**20


def main(argv: Sequence[str] | None = None) -> None:
    """Train both networks, print the figures, and write the picture."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--quick", action="store_true", help="10 steps: it runs, and draws nothing yet")
    parser.add_argument("--output", type=Path, help="the picture; without it a quick run draws none")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # for tensors so small, more only cost time
    options.steps, sides = (10, (8, 16)) if options.quick else (options.steps, (8, 16, 32, 64, 96))
    plain = Run("torch, math attention", lambda: sdpa_kernel(SDPBackend.MATH), options)
    runs = [plain, Run("repaired", pr.repair_torch, options)]
    compiled = Run("compiled", pr.repair_torch, options, pr.compile(loss_of))
    data = load_digits()
    images, digits = torch.tensor(data.images / 8 - 1, dtype=torch.get_default_dtype()), torch.tensor(data.target)
    for _ in track(range(options.steps), transient=True):
        rows = torch.randint(len(images), (BATCH,))
        batch = batch_of(images[rows], digits[rows])
        for run in (*runs, compiled):
            run.step(batch)
    figure, axes = pyplot.subplots(1, 4, figsize=(14, 3.6), layout="constrained")
    (theirs, _), (ours, _) = logs = [torch.tensor(run.log).unbind(1) for run in runs]
    window = min(options.steps, 50)
    for run, (errors, seconds), axis, style in zip(runs, logs, axes[2:], ("-", "--"), strict=True):
        means = errors.unfold(0, window, window).mean(1)
        peaks = {(side // PATCH) ** 2: run.peak_memory(side) for side in sides}
        axes[0].plot(range(window, options.steps + 1, window), means.tolist(), style, label=run.name)
        axes[1].plot(list(peaks), list(peaks.values()), style, marker="o", label=run.name)
        axis.imshow(run.draw().numpy(), cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
        axis.set(title=f"one step: {run.name}", xticks=[], yticks=[])
        print(f"{run.name:21} error {means[-1]:.4f}, {seconds.median() * 1e3:.1f} ms a step, MiB at", end="")
        print(",".join(f" {tokens} tokens {peak:.1f}" for tokens, peak in peaks.items()))
    own, seconds = torch.tensor(compiled.log).unbind(1)
    print(f"compiled              error {own[-window:].mean():.4f}, {seconds.median() * 1e3:.1f} ms a step")
    gaps = torch.stack([ours - theirs, own - ours]).abs() / theirs
    print(f"errors differ by at most {gaps[:, :100].max():.1e} in the first 100 steps; later rounding grows")
    axes[0].set(xlabel="step", title="mean squared error", yscale="log")
    axes[1].set(xlabel="tokens", title="MiB of a step, at its peak", xscale="log", yscale="log")
    axes[0].legend()
    if options.output or not options.quick:
        figure.savefig(options.output or Path(__file__).with_suffix(".png").name, dpi=80)


if __name__ == "__main__":
    main()
