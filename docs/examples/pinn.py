"""A soliton of the Korteweg-de Vries equation by a physics-informed network with a layer norm.

    pip install '.[demo]'
    python docs/examples/pinn.py        # about 4 minutes; --quick shows that it runs

A wave of speed c that keeps its shape solves u''' = (c - 6 u) u'. With c = 4, u(0) = 2, u'(0) = 0 and u''(0) = -4 that
is the soliton u = 2 / cosh(x)^2. The loss of the network is its error in these four equations.

Three nested `torch.autograd.grad` are the usual way to u'''. Torch's backward of a layer norm keeps mean and deviation
constant when it is differentiated twice, so that u''' is wrong there, and in three nested JVPs as well. Both are right
inside `primitives.repair_torch`, and in a loss that `primitives.compile` has compiled. Nothing else differs. The loss
falls in all, but torch learns another equation. Steps are the fastest of each way, on a CPU:

    torch, by reverse mode    loss 8e-03, u off by 1e-01, u''' by 1e-01, 5.03 ms a step
    torch, by forward mode    loss 3e-02, u off by 9e-02, u''' by 1e-01, 92.65 ms a step
    repaired, by reverse mode loss 4e-04, u off by 2e-03, u''' by 4e-07, 11.08 ms a step
    repaired, by forward mode loss 4e-04, u off by 2e-03, u''' by 4e-07, 24.67 ms a step
    compiled, by reverse mode loss 4e-04, u off by 2e-03, u''' by 4e-07, 1.43 ms a step
    compiled, by forward mode loss 4e-04, u off by 2e-03, u''' by 4e-07, 1.09 ms a step

Source: Raissi, Perdikaris, Karniadakis, "Physics-informed neural networks", Journal of Computational Physics 378, 2019.
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
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import jvp

import primitives as pr

SPEED, END, POINTS = 4.0, 3.0, 49


def soliton(x: Tensor) -> Tensor:
    """The solution."""
    return 2 * torch.cosh(x) ** -2


def network() -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    layers = [nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1)]
    return nn.Sequential(*layers).double()


def by_reverse_mode(net: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """u, u', u'' and u''' at points `[points, 1]`, each by a backward pass of the one before."""
    x = x.detach().requires_grad_()
    found = [net(x)]
    for _ in range(3):
        found += grad(found[-1].sum(), x, create_graph=True)
    return found


def by_forward_mode(net: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The same by three nested JVPs."""
    one = torch.ones_like(x)

    def along(f: Callable) -> Callable:
        return lambda x: jvp(f, (x,), (one,))

    ((u, du), (_, ddu)), (_, (_, third)) = along(along(along(net)))(x)
    return [u, du, ddu, third]


def loss_of(net: nn.Module, derivatives: Callable[..., list[Tensor]], x: Tensor) -> Tensor:
    """How far the network is from the equation, and from the three values at zero."""
    u, du, ddu, third = derivatives(net, x)
    at_zero = torch.cat([y[POINTS // 2] for y in (u, du, ddu)])
    center = torch.tensor([2.0, 0.0, -SPEED], dtype=torch.float64)
    return (third - (SPEED - 6 * u) * du).square().mean() + 10 * (at_zero - center).square().sum()


def train(name: str, loss_of: Callable, net: nn.Module, derivatives: Callable, steps: int) -> tuple[list[float], float]:
    """The losses, and the seconds of the fastest step; the weights of `net` change."""
    x = torch.linspace(-END, END, POINTS, dtype=torch.float64)[:, None]
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    losses, times = [], [time.perf_counter()]
    for _ in track(range(steps), name, transient=True):
        loss = loss_of(net, derivatives, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        times.append(time.perf_counter())
    return losses, min(after - before for before, after in pairwise(times))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train all, print their errors, draw the picture; errors of u''', and of losses that were compiled."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--output", type=Path, help="the picture; without it a quick run draws none")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # for tensors so small, more only cost time
    x = torch.linspace(-END, END, 200, dtype=torch.float64)[:, None]
    figures: dict[str, float] = {}
    logs: dict[str, list[float]] = {}
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    axes[0].plot(x, soliton(x), color="0.8", linewidth=6, label="soliton")
    ways = ("torch", nullcontext, loss_of), ("repaired", pr.repair_torch, loss_of)
    ways = *ways, ("compiled", pr.repair_torch, pr.compile(loss_of))
    for (library, context, loss), color in zip(ways, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        for derivatives, line in ((by_reverse_mode, "-"), (by_forward_mode, "--")):
            net, name = network(), f"{library}, {derivatives.__name__.replace('_', ' ')}"
            with context():
                losses, seconds = train(name, loss, net, derivatives, 3 if options.quick else 1500)
                u, _, _, third = (y.detach() for y in derivatives(net, x))
            with torch.no_grad():
                h = 1e-2  # a seven-point formula, of error h^4
                weights = dict(zip(range(-3, 4), (1, -8, 13, 0, -13, 8, -1), strict=True))
                difference = sum(weight * net(x + k * h) for k, weight in weights.items()) / (8 * h**3)
            wrong = ((third - difference).abs() / difference.abs().max()).clamp_min(1e-9)
            error = (u - soliton(x)).abs()
            figures[name], logs[name] = wrong.max().item(), losses
            print(f"{name:25} loss {losses[-1]:.0e}, u off by {error.max():.0e}, u''' by {wrong.max():.0e},", end=" ")
            print(f"{1e3 * seconds:.2f} ms a step")
            for axis, xs, ys in ((axes[0], x, u), (axes[1], range(len(losses)), losses), (axes[2], x, wrong)):
                axis.plot(xs, ys, line, color=color, label=name)
    for mode in ("reverse", "forward"):
        pairs = zip(logs[f"compiled, by {mode} mode"], logs[f"repaired, by {mode} mode"][:3], strict=False)
        figures[f"gap, by {mode} mode"] = max(abs(a / b - 1) for a, b in pairs)
    axes[0].set(xlabel="x", title="the soliton (gray), and what was learned")
    axes[1].set(xlabel="step", yscale="log", title="loss")
    axes[2].set(xlabel="x", yscale="log", title="error of u''', against differences of u")
    axes[2].legend(loc="center", fontsize="x-small")
    if options.output or not options.quick:
        figure.savefig(options.output or Path(__file__).with_suffix(".png").name, dpi=80)
    return figures


if __name__ == "__main__":
    main()
