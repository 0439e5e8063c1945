"""A physics-informed network with a layer norm: torch learns another equation than the one in its loss.

    pip install '.[demo]'
    python docs/examples/oscillator.py              # about half a minute; --quick shows that it runs

The network learns u'' = -u with u(0) = 1 and u'(0) = 0, whose solution is cos t. Its loss takes u'' by two nested JVPs.
Torch's JVP of a layer norm keeps mean and deviation constant when it is differentiated, so u'' is wrong; inside
`primitives.repair_torch` it is right, and so it is in a loss that `primitives.compile` has compiled. Nothing else
differs. A picture shows the solutions, and how well each u'' fits. Steps are the fastest of each way, on a CPU:

    torch    loss 2e-04, u off by 8e-01, u'' by 6e-01, 32.51 ms a step
    repaired loss 7e-05, u off by 2e-03, u'' by 7e-07, 14.16 ms a step
    compiled loss 7e-05, u off by 2e-03, u'' by 7e-07, 0.72 ms a step
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
from torch.func import jvp

import primitives as pr

END, POINTS = 3.0, 32


def network() -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    layers = [nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1)]
    return nn.Sequential(*layers).double()


def derivatives(net: nn.Module, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u, u' and u'' at times `[points, 1]`."""
    one = torch.ones_like(t)
    (u, du), (_, ddu) = jvp(lambda t: jvp(net, (t,), (one,)), (t,), (one,))
    return u, du, ddu


def loss_of(net: nn.Module, t: Tensor) -> Tensor:
    """How far the network is from the equation and from both initial values."""
    u, du, ddu = derivatives(net, t)
    return (ddu + u).square().mean() + 10 * (u[0] - 1).square().sum() + 10 * du[0].square().sum()


def train(name: str, loss_of: Callable, net: nn.Module, steps: int) -> tuple[list[float], float]:
    """The losses, and the seconds of the fastest step; the weights of `net` change."""
    t = torch.linspace(0, END, POINTS, dtype=torch.float64)[:, None]
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    losses, times = [], [time.perf_counter()]
    for _ in track(range(steps), name, transient=True):
        loss = loss_of(net, t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        times.append(time.perf_counter())
    return losses, min(after - before for before, after in pairwise(times))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train all, print their errors, draw the picture; errors of u'', and of losses that were compiled."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--output", type=Path, help="the picture; without it a quick run draws none")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # for tensors so small, more only cost time
    t = torch.linspace(0, END, 200, dtype=torch.float64)[:, None]
    figures: dict[str, float] = {}
    logs: dict[str, list[float]] = {}
    # Narrow, for phones.
    figure, places = pyplot.subplot_mosaic("uu;le", figsize=(5.4, 4.6), layout="constrained")
    titles = {"l": "loss", "u": "the solution that was learned", "e": "error of u''"}
    axes = [places[place] for place in titles]
    for axis, title in zip(axes, titles.values(), strict=True):
        axis.set_title(title)
    axes[1].plot(t, t.cos(), color="0.7", linewidth=5, label="cos t")
    ways = ("torch", nullcontext, loss_of, "-"), ("repaired", pr.repair_torch, loss_of, "--")
    ways = *ways, ("compiled", pr.repair_torch, pr.compile(loss_of), ":")
    for name, context, loss, line in ways:
        net = network()
        with context():
            logs[name], seconds = train(name, loss, net, 3 if options.quick else 1000)
            u, _, ddu = (x.detach() for x in derivatives(net, t))
        with torch.no_grad():
            differences = (net(t + 1e-3) - 2 * u + net(t - 1e-3)) / 1e-6
        wrong = (ddu - differences).abs().clamp_min(1e-9)
        figures[name] = wrong.max().item()
        off = f"u off by {(u - t.cos()).abs().max():.0e}, u'' by {wrong.max():.0e}"
        print(f"{name:8} loss {logs[name][-1]:.0e}, {off}, {1e3 * seconds:.2f} ms a step")
        for axis, xs, ys in ((axes[0], range(len(logs[name])), logs[name]), (axes[1], t, u), (axes[2], t, wrong)):
            axis.plot(xs, ys, line, label=name)
    pairs = zip(logs["compiled"], logs["repaired"][:3], strict=False)
    figures["gap"] = max(abs(a / b - 1) for a, b in pairs)
    axes[0].set(yscale="log", xlabel="step")
    axes[1].set(xlabel="t")
    axes[2].set(yscale="log", xlabel="t")
    axes[1].legend()
    if options.output or not options.quick:
        figure.savefig(options.output or Path(__file__).with_suffix(".png").name, dpi=100)
    return figures


if __name__ == "__main__":
    main()
