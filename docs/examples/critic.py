"""A critic with a gradient penalty and layer norm, on points in the plane, against the exact distance of two clouds.

    pip install '.[demo]'
    python docs/examples/critic.py        # about a minute; --quick shows that it runs

A WGAN-GP critic f learns the Wasserstein distance of two clouds, mean f(right) - mean f(left), where (|grad f| - 1)^2
between them is punished. Its gradient is taken in two ways:

    reverse mode: `grad(f)`, whose training is a double backward; torch's layer norm is right there
    forward mode: one JVP along each axis, whose training is one backward; torch's layer norm is wrong there, silently

The distance of clouds of equal size is that of the best pairing, which scipy finds. Nothing differs but the way to the
gradient, and `primitives.repair_torch` around it, or `primitives.compile`, which repairs too. Steps are the fastest of
each way:

    exact distance 2.151
    torch, by reverse mode    distance 2.11, |grad f| 1.01 +- 0.03, gradient off by 4e-09, 2.05 ms a step
    repaired, by reverse mode distance 2.11, |grad f| 1.01 +- 0.03, gradient off by 4e-09, 3.79 ms a step
    compiled, by reverse mode distance 2.11, |grad f| 1.01 +- 0.03, gradient off by 4e-09, 1.25 ms a step
    torch, by forward mode    distance 1.94, |grad f| 1.00 +- 0.04, gradient off by 2e-01, 10.92 ms a step
    repaired, by forward mode distance 2.11, |grad f| 1.01 +- 0.03, gradient off by 4e-09, 12.74 ms a step
    compiled, by forward mode distance 2.11, |grad f| 1.01 +- 0.03, gradient off by 4e-09, 1.47 ms a step

Source: Gulrajani, Ahmed, Arjovsky, Dumoulin, Courville, "Improved Training of Wasserstein GANs", arXiv:1704.00028,
2017; their critic has layer norm, because batch norm couples the points.
"""

import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib import pyplot
from rich.progress import track
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

import primitives as pr

NUMBER, PENALTY = 128, 100.0


def clouds() -> tuple[Tensor, Tensor]:
    """Points `[number, 2]` on a ring, and about its center and a corner."""
    torch.manual_seed(0)
    angles = torch.rand(NUMBER, dtype=torch.float64) * 2 * torch.pi
    ring = 2 * torch.stack([angles.cos(), angles.sin()], 1)
    centers = torch.tensor([[0.0, 0.0], [2.5, 2.5]], dtype=torch.float64).repeat(NUMBER // 2, 1)
    return ring, centers + 0.3 * torch.randn(NUMBER, 2, dtype=torch.float64)


def network() -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(1)
    first, second = (nn.Linear(2, 16), nn.LayerNorm(16), nn.Tanh()), (nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())
    return nn.Sequential(*first, *second, nn.Linear(16, 1)).double()


def by_reverse_mode(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Gradients `[points, 2]` at points of the same shape."""
    return grad(lambda x: f(x).sum())(x)


def by_forward_mode(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The same."""
    return torch.cat([jvp(f, (x,), (axis.expand_as(x),))[1] for axis in torch.eye(2, dtype=x.dtype)], 1)


def loss_of(f: Callable[[Tensor], Tensor], gradient: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    """The loss of a critic on pairs of points and shares `[points, 1]`, of which the points between them are made."""
    left, right, share = batch
    between = share * left + (1 - share) * right
    penalty = (gradient(f, between).norm(dim=1) - 1).square().mean()
    return f(left).mean() - f(right).mean() + PENALTY * penalty


def error_of_training(net: nn.Module, gradient: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> float:
    """Of the derivative of the loss along a random direction of the parameters, against a central difference."""
    torch.manual_seed(3)
    params = {name: p.detach() for name, p in net.named_parameters()}
    direction = {name: torch.randn_like(p) for name, p in params.items()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return loss_of(lambda x: functional_call(net, params, x), gradient, batch)

    derivative = sum((g * direction[name]).sum() for name, g in grad(loss)(params).items())
    below, above = (loss({name: p + h * direction[name] for name, p in params.items()}) for h in (-1e-6, 1e-6))
    return abs(derivative / (above - below) * 2e-6 - 1).item()


def train(name: str, loss_of: Callable, net: nn.Module, gradient: Callable, steps: int) -> tuple[list[float], float]:
    """The losses, and the seconds of the fastest step; the weights of `net` change."""
    left, right = clouds()
    optimizer = torch.optim.Adam(net.parameters(), betas=(0.5, 0.9))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(2)
    losses, times = [], [time.perf_counter()]
    for _ in track(range(steps), name, transient=True):
        order = torch.randperm(NUMBER, generator=generator)
        share = torch.rand(NUMBER, 1, dtype=left.dtype, generator=generator)
        loss = loss_of(net, gradient, (left, right[order], share))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        times.append(time.perf_counter())
    return losses, min(after - before for before, after in pairwise(times))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train all, print what they found, draw the picture; errors of derivatives of the loss, and compiled losses."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--output", type=Path, help="the picture; without it a quick run draws none")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # for tensors so small, more only cost time
    left, right = clouds()
    costs = torch.cdist(left, right)
    exact = costs[linear_sum_assignment(costs.numpy())].mean().item()
    print(f"exact distance {exact:.3f}")
    span = torch.linspace(-3, 4, 60, dtype=torch.float64)
    plane = torch.cartesian_prod(span, span)
    figures: dict[str, float] = {}
    logs: dict[str, list[float]] = {}
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    axes[0].axhline(-exact, color="0.7", linewidth=4, label="minus the exact distance")
    fields = iter(axes[1:])
    ways = ("torch", nullcontext, loss_of, "tab:blue"), ("repaired", pr.repair_torch, loss_of, "tab:orange")
    ways = *ways, ("compiled", pr.repair_torch, pr.compile(loss_of), "tab:green")
    for gradient, line in ((by_reverse_mode, "--"), (by_forward_mode, "-")):
        for library, context, loss, color in ways:
            net = network()
            name = f"{library}, {gradient.__name__.replace('_', ' ')}"
            with context():
                losses, seconds = train(name, loss, net, gradient, 3 if options.quick else 1000)
                figures[name] = error_of_training(net, gradient, (left, right, torch.full_like(left[:, :1], 0.4)))
            with torch.no_grad():
                told = (net(right).mean() - net(left).mean()).item()
            size = by_reverse_mode(net, 0.4 * left + 0.6 * right).norm(dim=1).detach()
            print(f"{name:25} distance {told:.2f}, |grad f| {size.mean():.2f} +- {size.std():.2f},", end=" ")
            print(f"gradient off by {figures[name]:.0e}, {1e3 * seconds:.2f} ms a step")
            logs[name] = losses
            means = torch.tensor(losses).unfold(0, window := min(20, len(losses)), 1).mean(1)
            axes[0].plot(range(window, len(losses) + 1), means, line, color=color, label=name, linewidth=1)
            if gradient is by_forward_mode and library != "compiled":
                axis = next(fields)
                with torch.no_grad():
                    axis.contourf(span, span, net(plane).view(60, 60).T, levels=24)
                for points, mark in ((left, "w."), (right, "r.")):
                    axis.plot(*points.T, mark, markersize=3)
                axis.set(title=f"critic of {name}", xticks=[], yticks=[], aspect="equal")
    for mode in ("reverse", "forward"):
        pairs = zip(logs[f"compiled, by {mode} mode"], logs[f"repaired, by {mode} mode"][:3], strict=False)
        figures[f"gap, by {mode} mode"] = max(abs(a / b - 1) for a, b in pairs)
    axes[0].set(xlabel="step", title="loss", ylim=(-1.5 * exact, exact))
    axes[0].legend(fontsize="small")
    if options.output or not options.quick:
        figure.savefig(options.output or Path(__file__).with_suffix(".png").name, dpi=80)
    return figures


if __name__ == "__main__":
    main()
