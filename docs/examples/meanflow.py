"""MeanFlow on handwritten digits: a small diffusion transformer learns to draw a digit in one step.

    python docs/examples/meanflow.py [--steps 3000] [--compile]

The network predicts the mean velocity u(z, r, t) of the flow from t to r, and its loss has a JVP in it:

    u = v - (t - r) d/dt u(z, r, t),     d/dt = the JVP along (v, 0, 1),     v = noise - image

torch's fused attention has no JVP, so plain torch has to take its math backend, which stores every weight of every row.
The same network on this package needs two lines: `convert` and `override_torch`. Both are trained from the same seed;
losses, time and memory are printed, and the digits that each draws in one step go into a picture.

Source: Geng, Deng, Bai, Kolter, He, "Mean Flows for One-step Generative Modeling", arXiv:2505.13447, 2025.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import pathlib
import time
from typing import TYPE_CHECKING

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import primitives as pr

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGE_SIZE, PATCH, NUM_CLASSES = 8, 2, 10
TOKENS = (IMAGE_SIZE // PATCH) ** 2


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm that the condition shifts, scales and gates."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def attend(self, x: Tensor) -> Tensor:
        """Tokens `[batch, tokens, width]` to the same shape."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Tokens to the same shape, under a condition `[batch, width]`."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(condition)[:, None].chunk(6, -1)
        x = x + gate * self.attend(self.norms[0](x) * (1 + scale) + shift)
        return x + gate_mlp * self.mlp(self.norms[1](x) * (1 + scale_mlp) + shift_mlp)


class Transformer(nn.Module):
    """u(z, r, t) of images `[batch, 1, 8, 8]`, times `[batch]` and classes `[batch]`."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Linear(PATCH**2, width)
        self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        self.times = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(NUM_CLASSES, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, PATCH**2)

    def waves(self, time: Tensor) -> Tensor:
        """A time `[batch]` as sines and cosines `[batch, width]`."""
        angles = time[:, None] * torch.logspace(0, 1.5, self.width // 2, device=time.device)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, digits: Tensor) -> Tensor:
        """The mean velocity from t to r."""
        side = IMAGE_SIZE // PATCH
        patches = z.reshape(-1, side, PATCH, side, PATCH).permute(0, 1, 3, 2, 4).reshape(-1, TOKENS, PATCH**2)
        x = self.embed(patches) + self.positions
        condition = self.times(torch.cat([self.waves(t), self.waves(t - r)], -1)) + self.classes(digits)
        for block in self.blocks:
            x = block(x, condition)
        patches = self.head(self.norm(x)).reshape(-1, side, side, PATCH, PATCH)
        return patches.permute(0, 1, 3, 2, 4).reshape(z.shape)


def loss_of(net: Callable[..., Tensor], images: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
    """The MeanFlow loss of one batch, whose samples are weighted by their errors, and the mean squared error."""
    noise, batch = torch.randn_like(images), images.shape[0]
    r, t = (torch.randn(2, batch) - 0.4).sigmoid().sort(0).values
    r = torch.where(torch.rand(batch) < 0.5, t, r)
    along = t[:, None, None, None]
    z, v = (1 - along) * images + along * noise, noise - images
    u, u_dot = jvp(lambda z, r, t: net(z, r, t, digits), (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (along - r[:, None, None, None]) * u_dot
    error = (u - target.detach()).square().mean((1, 2, 3))
    return (error / (error.detach() + 1e-3)).mean(), error.mean()


def train(
    net: nn.Module, context: Callable[[], contextlib.AbstractContextManager], options: argparse.Namespace
) -> list:
    """Train `net` in place; returns the mean squared error of each step."""
    data = load_digits()
    images, digits = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(data.target)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=options.steps)

    def compute(images: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
        with context():
            return loss_of(net, images, digits)

    step, curve = torch.compile(compute) if options.compile else compute, []
    torch.manual_seed(0)
    for _ in range(options.steps):
        rows = torch.randint(len(images), (options.batch,))
        loss, error = step(images[rows], digits[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        curve.append(error.item())
    return curve


@torch.no_grad()
def draw(net: nn.Module) -> Tensor:
    """Ten digits of each class in one step from noise: one image `[80, 80]`."""
    torch.manual_seed(1)
    noise, digits = torch.randn(100, 1, IMAGE_SIZE, IMAGE_SIZE), torch.arange(NUM_CLASSES).repeat(10)
    images = noise - net(noise, torch.zeros(100), torch.ones(100), digits)
    return images.reshape(10, 10, IMAGE_SIZE, IMAGE_SIZE).transpose(1, 2).reshape(80, 80)


def peak_of_attention(context: Callable[[], contextlib.AbstractContextManager], tokens: int = 2048) -> float:
    """Largest tensor, in MiB, of one attention of `tokens` rows in a loss with a JVP."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            nonlocal largest
            out = func(*args, **(kwargs or {}))  # type: ignore[operator]
            for x in out if isinstance(out, (tuple, list)) else (out,):
                largest = max(largest, x.nbytes if isinstance(x, Tensor) else 0)
            return out

    q = torch.randn(1, 4, tokens, 16, requires_grad=True)
    with context(), Watch():
        jvp(lambda q: F.scaled_dot_product_attention(q, q, q), (q,), (torch.ones_like(q),))[1].sum().backward()
    return largest / 2**20


def main() -> None:
    """Train both, print the figures, and write `meanflow.png`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("meanflow.png"))
    options = parser.parse_args()
    torch.manual_seed(0)
    net = Transformer()
    runs = {
        "torch.nn, math backend": (net, lambda: sdpa_kernel(SDPBackend.MATH)),
        "primitives": (pr.nn.convert(copy.deepcopy(net)), pr.override_torch),
    }
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    for (name, (model, context)), axis in zip(runs.items(), axes[1:], strict=True):
        start = time.perf_counter()
        curve = torch.tensor(train(model, context, options))
        seconds = (time.perf_counter() - start) / options.steps
        smooth = curve[: len(curve) // 50 * 50].reshape(-1, 50).mean(1)
        print(
            f"{name:24} error {smooth[0]:.4f} -> {smooth[-1]:.4f}, {seconds * 1e3:.1f} ms a step, "
            f"largest tensor at 2048 tokens {peak_of_attention(context):.1f} MiB"
        )  # fmt: skip - one line of output
        axes[0].plot(torch.arange(len(smooth)) * 50, smooth, label=name, linestyle="-" if axis is axes[1] else "--")
        axis.imshow(draw(model), cmap="gray", vmin=-1, vmax=1)
        axis.set_title(f"one step, {name}")
        axis.axis("off")
    axes[0].set(xlabel="step", ylabel="mean squared error", yscale="log")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(options.output, dpi=110)


if __name__ == "__main__":
    main()
