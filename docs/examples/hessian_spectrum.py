"""The spectrum of a Hessian by Lanczos's method, of a network with batch norm in training and layer norm.

    pip install '.[demo]'
    python docs/examples/hessian_spectrum.py        # about a minute

A product of the Hessian H with a vector v can be taken in two orders, which are equal by calculus:

    forward over reverse, jvp(grad(loss))
    reverse over forward, grad(jvp(loss)), without a backward pass that forward mode must know

Lanczos's method needs only such products. Its Ritz values and weights, from several random vectors under one `vmap`,
are the density of the eigenvalues (stochastic Lanczos quadrature). This network is small enough for all of H, so that
both can be compared with its eigenvalues, and H with differences of gradients.

Forward over reverse, torch's norms are right too. Reverse over forward they give, silently, another matrix, and so does
`torch.func.hessian`, whose backward pass is batched. Inside `primitives.repair_torch` all are right, and so are
products that `primitives.compile` has compiled. Printed on a CPU, with the seconds of 60 products, the first left out:

    repaired, torch.func.hessian   off by 2e-08, 714 eigenvalues -0.6059 to 4.6119
    repaired, forward over reverse product off by 2e-08, eigenvalues -0.6059 to 4.6119, 6.3 s
    repaired, reverse over forward product off by 2e-08, eigenvalues -0.6059 to 4.6119, 7.4 s
    compiled, torch.func.hessian   off by 2e-08, 714 eigenvalues -0.6059 to 4.6119
    compiled, forward over reverse product off by 2e-08, eigenvalues -0.6059 to 4.6119, 1.4 s
    compiled, reverse over forward product off by 2e-08, eigenvalues -0.6059 to 4.6119, 1.5 s
    torch, torch.func.hessian      off by 5e-02, 714 eigenvalues -0.6109 to 4.6128
    torch, forward over reverse    product off by 2e-08, eigenvalues -0.6059 to 4.6119, 4.6 s
    torch, reverse over forward    product off by 2e-01, eigenvalues -0.4698 to 5.0323, 4.1 s

Source: Ghorbani, Krishnan, Xiao, "An Investigation into Neural Net Optimization via Hessian Eigenvalue Density",
arXiv:1901.10159, 2019.
"""

import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from matplotlib import pyplot
from optree.integrations.torch import tree_ravel
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn import functional as F

import primitives as pr

ORDERS = {
    "forward over reverse": lambda loss, w, v: jvp(grad(loss), (w,), (v,))[1],
    "reverse over forward": lambda loss, w, v: grad(lambda w: jvp(loss, (w,), (v,))[1])(w),
}


def trained_network(x: Tensor, y: Tensor) -> nn.Module:
    """A classifier after ten steps, in training mode, the same at every call."""
    torch.manual_seed(0)
    # Without running statistics, which torch writes in place: `vmap` refuses that.
    first = nn.Linear(64, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Tanh()
    second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()
    net = nn.Sequential(*first, *second, nn.Linear(8, 10)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The loss as a function of all parameters as one vector, and that vector."""
    w, unravel = tree_ravel(dict(net.named_parameters()))
    return lambda w: F.cross_entropy(functional_call(net, unravel(w), x), y), w.detach()


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Ritz values and their weights `[probes, steps]` of a symmetric matrix, from vectors `start: [probes, size]`."""
    basis, diagonal, off_diagonal = [F.normalize(start, dim=1)], [], []
    for _ in range(steps):
        image = product(basis[-1])
        diagonal.append((basis[-1] * image).sum(1))
        for _ in range(2):  # of all earlier ones, twice: rounding would bring copies of eigenvalues
            image = image - sum((q * image).sum(1, keepdim=True) * q for q in basis)
        off_diagonal.append(image.norm(dim=1))
        basis.append(F.normalize(image, dim=1))
    side = torch.stack(off_diagonal[:-1], 1)
    matrix = torch.stack(diagonal, 1).diag_embed() + side.diag_embed(1) + side.diag_embed(-1)
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors[:, 0].square() / len(start)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Compute the spectra, print how far they are off, draw the picture; these errors."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer digits, steps and vectors")
    parser.add_argument("--output", type=Path, help="the picture; without it a quick run draws none")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # for tensors so small, more only cost time
    number, steps, probes = (100, 25, 2) if options.quick else (200, 60, 8)
    data = load_digits()
    x, y = torch.tensor(data.data[:number] / 8 - 1, dtype=torch.float64), torch.tensor(data.target[:number])
    net = trained_network(x, y)
    figures: dict[str, float] = {}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
    loss, w = loss_of(net, x, y)
    start = torch.randn(probes, len(w), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step = 1e-5 * start[0]
    difference = (grad(loss)(w + step) - grad(loss)(w - step)) / 2e-5
    truth = torch.empty(0)
    spectra: dict[str, Tensor] = {}
    ways = ("repaired", pr.repair_torch), ("compiled", pr.repair_torch), ("torch", nullcontext)
    for library, context in ways:
        with context():
            matrix = hessian(loss)(w)
        eigenvalues = torch.linalg.eigvalsh(matrix)
        truth = eigenvalues if library == "repaired" else truth
        off = (matrix @ start[0] - difference).norm() / difference.norm()
        figures[f"{library}, torch.func.hessian"] = off.item()
        found = f"{len(truth)} eigenvalues {eigenvalues[0]:.4f} to {eigenvalues[-1]:.4f}"
        print(f"{library + ', torch.func.hessian':30} off by {off:.0e}, {found}")
        for axis, (order, product) in zip(axes, ORDERS.items(), strict=True):
            name = f"{library}, {order}"
            with context():
                off = (product(loss, w, start[0]) - difference).norm() / difference.norm()
                products = vmap(lambda v: product(loss, w, v))  # noqa: B023
                if library == "compiled":
                    products = pr.compile(products)
                products(start)
                begin = time.perf_counter()
                values, weights = lanczos(products, start, steps)
                seconds = time.perf_counter() - begin
            spectra[name], figures[f"{name}: product"] = values, off.item()
            figures[f"{name}: eigenvalue"] = (values.max() / truth[-1] - 1).abs().item()
            found = f"eigenvalues {values.min():.4f} to {values.max():.4f}"
            print(f"{name:30} product off by {off:.0e}, {found}, {seconds:.1f} s")
            grid = torch.linspace(1.3 * truth[0], 1.1 * max(truth[-1], values.max()), 600, dtype=torch.float64)
            width = 0.01 * truth[-1]
            bells = (-0.5 * ((grid[:, None] - values.flatten()) / width).square()).exp() / (width * 2.5066)
            if library != "compiled":
                axis.plot(grid, bells @ weights.flatten(), "-" if library == "repaired" else "--", label=library)
    for axis, order in zip(axes, ORDERS, strict=True):
        gap = spectra[f"compiled, {order}"].max() / spectra[f"repaired, {order}"].max() - 1
        figures[f"gap, {order}"] = gap.abs().item()
        axis.plot(truth, torch.full_like(truth, 2e-4), "|", color="gray", label="eigenvalues of the Hessian")
        axis.set(yscale="log", ylim=(1e-4, 50), xlabel="eigenvalue", title=order)
    axes[0].set_ylabel("density")
    axes[1].legend()
    if options.output or not options.quick:
        figure.savefig(options.output or Path(__file__).with_suffix(".png").name, dpi=80)
    return figures


if __name__ == "__main__":
    main()
