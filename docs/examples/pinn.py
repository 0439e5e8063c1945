"""Physics-informed networks with a layer norm: torch learns another equation than the one in the loss.

    pip install '.[demo]'
    python docs/examples/pinn.py            # about half a minute, as `make demo`; --quick shows that it runs
    python docs/examples/pinn.py soliton    # about 4 minutes

The oscillator is u'' = -u with u(0) = 1 and u'(0) = 0, whose solution is cos t; its loss takes u'' by two nested JVPs.
The soliton is a wave of the Korteweg-de Vries equation that keeps its shape: u''' = (c - 6 u) u' with c = 4, u(0) = 2,
u'(0) = 0 and u''(0) = -4, which 2 / cosh(x)^2 solves. Three nested `torch.autograd.grad` are the usual way to u''', and
three nested JVPs another one.

Torch's JVP of a layer norm keeps mean and deviation constant when it is differentiated, and so does its backward when
it is differentiated twice. Both are right inside `primitives.repair_torch`, and in a loss that `primitives.compile` has
compiled. Nothing else differs. The loss falls in all; steps are the fastest of each way, on a CPU:

    torch    loss 2e-04, u off by 76.4%, u'' by 60.4%, 8.33 ms a step
    repaired loss 7e-05, u off by 0.2%, u'' by 0.0%, 6.06 ms a step
    compiled loss 7e-05, u off by 0.2%, u'' by 0.0%, 0.71 ms a step

Source: Raissi, Perdikaris, Karniadakis, "Physics-informed neural networks", Journal of Computational Physics 378, 2019.
"""

import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib import pyplot
from rich.progress import track
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import jvp

import primitives as pr

NEXT = """
In a model of your own:

    pr.repair_torch()        # torch's operators become right, in models as they are
    step = pr.compile(loss)  # the same loss and its gradients, compiled
"""


def network() -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    layers = [nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1)]
    return nn.Sequential(*layers).double()


def by_reverse_mode(net: Callable[[Tensor], Tensor], x: Tensor, order: int) -> list[Tensor]:
    """A function u and its derivatives to an order at points `[points, 1]`, each by a backward pass of that below."""
    x = x.detach().requires_grad_()
    found = [net(x)]
    for _ in range(order):
        found += grad(found[-1].sum(), x, create_graph=True)
    return found


def by_forward_mode(net: Callable[[Tensor], Tensor], x: Tensor, order: int) -> list[Tensor]:
    """The same by nested JVPs."""
    if order == 0:
        return [net(x)]
    pushed: Any = jvp(lambda x: by_forward_mode(net, x, order - 1), (x,), (torch.ones_like(x),))
    return [*pushed[0], pushed[1][-1]]


class Equation(NamedTuple):
    """How far u and its derivatives are from an equation, what they are at zero, and how networks learn it."""

    residual: Callable[..., Tensor]
    at_zero: Sequence[float]
    solution: Callable[[Tensor], Tensor]
    span: tuple[float, float, int]
    steps: int
    modes: Sequence[Callable[..., list[Tensor]]]

    @property
    def order(self) -> int:
        """Of the highest derivative, as many as there are values at zero."""
        return len(self.at_zero)

    def loss(self, derivatives: Callable[..., list[Tensor]], net: nn.Module, x: Tensor) -> Tensor:
        """How far the network is from the equation, and from the values at zero."""
        found = derivatives(net, x, self.order)
        first, last, points = self.span
        zero = round(-first / (last - first) * (points - 1))
        starts = sum((y[zero] - value).square().sum() for y, value in zip(found, self.at_zero, strict=False))
        return self.residual(*found).square().mean() + 10 * starts


EQUATIONS = {
    "oscillator": Equation(lambda u, du, ddu: ddu + u, (1.0, 0.0), torch.cos, (0.0, 3.0, 32), 1000, [by_forward_mode]),
    "soliton": Equation(
        lambda u, du, ddu, third: third - (4 - 6 * u) * du,
        (2.0, 0.0, -4.0),
        lambda x: 2 * torch.cosh(x) ** -2,
        (-3.0, 3.0, 49),
        1500,
        [by_reverse_mode, by_forward_mode],
    ),
}


def difference(f: Callable[[Tensor], Tensor], x: Tensor, order: int, h: float = 1e-2) -> Tensor:
    """A derivative of f by differences, of error h^4."""
    if order == 0:
        return f(x)
    below = [difference(f, x + k * h, order - 1) for k in (-2, -1, 1, 2)]
    return (below[0] - 8 * below[1] + 8 * below[2] - below[3]) / (12 * h)


def train(name: str, loss_of: Callable, net: nn.Module, x: Tensor, steps: int) -> tuple[list[float], float]:
    """The losses, and the seconds of the fastest step; the weights of `net` change."""
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    losses, times = [], [time.perf_counter()]
    for _ in track(range(steps), name, transient=True):
        loss = loss_of(net, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        times.append(time.perf_counter())
    return losses, min(after - before for before, after in pairwise(times))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train all, print their errors, draw the picture; errors of derivatives, and of losses that were compiled."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("equation", nargs="?", choices=EQUATIONS, default="oscillator")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--output", type=Path, help="the picture; without it a quick run draws none")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # for tensors so small, more only cost time
    equation = EQUATIONS[options.equation]
    first, last, points = equation.span
    given, x = (torch.linspace(first, last, number, dtype=torch.float64)[:, None] for number in (points, 200))
    solution, order = equation.solution(x), equation.order
    figures: dict[str, float] = {}
    logs: dict[str, list[float]] = {}
    derivative = "u" + "'" * order
    # Narrow, for phones.
    figure, axes = pyplot.subplot_mosaic("uu;le", figsize=(5.4, 4.6), layout="constrained")
    axes["l"].set(title="loss", xlabel="step", yscale="log")
    axes["u"].set(title="the solution that was learned", xlabel="x")
    axes["e"].set(title=f"error of {derivative}", xlabel="x", yscale="log")
    axes["u"].plot(x, solution, color="0.7", linewidth=5, label="the solution")
    for mode in equation.modes:
        loss = partial(equation.loss, mode)
        ways = ("torch", nullcontext, loss, "-"), ("repaired", pr.repair_torch, loss, "--")
        ways = *ways, ("compiled", pr.repair_torch, pr.compile(loss), ":")
        suffix = f", {mode.__name__.replace('_', ' ')}" * (len(equation.modes) > 1)
        for library, context, loss, line in ways:
            net, name = network(), library + suffix
            with context():
                logs[name], seconds = train(name, loss, net, given, 3 if options.quick else equation.steps)
                u, *_, found = (y.detach() for y in mode(net, x, order))
            with torch.no_grad():
                truth = difference(net, x, order)
            wrong = ((found - truth).abs() / truth.abs().max()).clamp_min(1e-9)
            figures[name], error = wrong.max().item(), (u - solution).abs().max() / solution.abs().max()
            print(f"{name:{8 + len(suffix)}} loss {logs[name][-1]:.0e}, u off by {error:.1%},", end=" ")
            print(f"{derivative} by {figures[name]:.1%}, {1e3 * seconds:.2f} ms a step")
            for place, xs, ys in (("l", range(len(logs[name])), logs[name]), ("u", x, u), ("e", x, wrong)):
                axes[place].plot(xs, ys, line, label=name)
        pairs = zip(logs[f"compiled{suffix}"], logs[f"repaired{suffix}"][:3], strict=False)
        figures[f"gap{suffix}"] = max(abs(a / b - 1) for a, b in pairs)
    axes["u"].legend(fontsize="x-small")
    if options.output or not options.quick:
        figure.savefig(options.output or f"{options.equation}.png", dpi=100)
    print(NEXT)
    return figures


if __name__ == "__main__":
    main()
