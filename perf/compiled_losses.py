"""The training steps that `perf/compiled_steps.py` measures: networks, and losses with derivatives in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import primitives as pr

__all__ = ["CASES", "Case"]


def mlp(sizes: Sequence[int], act: type[nn.Module] = nn.Tanh, *, norm: bool = False) -> nn.Module:
    """Linear layers, activations, and layer norms between them."""
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(i, o), *[nn.LayerNorm(o)] * norm, act()]
    return pr.nn.convert(nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1])))


class Block(nn.Module):
    """A transformer block, causal or not, whose norms may be shifted and scaled by a condition."""

    def __init__(self, width: int, heads: int, *, causal: bool, conditioned: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.condition = nn.Linear(width, 6 * width) if conditioned else None

    def forward(self, x: Tensor, c: Tensor | None = None) -> Tensor:
        """The block of tokens `[N, T, width]`, under a condition `[N, width]`."""
        parts: Any = [None] * 6
        if self.condition is not None and c is not None:
            parts = self.condition(nn.functional.silu(c))[:, None].chunk(6, -1)
        x = x + self._gated(self._attention(self._normed(0, x, *parts[:2])), parts[2])
        return x + self._gated(self.mlp(self._normed(1, x, *parts[3:5])), parts[5])

    def _normed(self, i: int, x: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
        x = self.norms[i](x)
        return x if shift is None or scale is None else x * (1 + scale) + shift

    def _gated(self, x: Tensor, gate: Tensor | None) -> Tensor:
        return x if gate is None else x * gate

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        y = pr.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class DiT(nn.Module):
    """A small diffusion transformer of tokens, with one time for flow and one for its mean."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.times = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width, 4, causal=False, conditioned=True) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """Mean velocity of tokens between two times."""
        c = self.times(torch.stack([r, t], -1))
        for block in self.blocks:
            x = block(x, c)
        return self.head(x)


class Digits(nn.Module):
    """A transformer that classifies images of digits by rows of pixels."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 10)
        self.blocks = nn.Sequential(*[Block(width, 4, causal=False) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images `[N, 8, 8]`."""
        return self.head(self.blocks(self.embed(x)).mean(1))


def burgers_reverse(net: Any, xt: Tensor) -> Tensor:
    """The residual of Burgers' equation, its derivatives by autograd."""
    x, t = (z.clone().requires_grad_() for z in (xt[:, :1], xt[:, 1:]))
    u = net(torch.cat([x, t], 1))
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return (u_t + u * u_x - 0.01 * u_xx).square().mean()


def burgers_forward(net: Any, xt: Tensor) -> Tensor:
    """The same, by forward mode."""
    e_x, e_t = (torch.tensor(e, device=xt.device).expand_as(xt).clone() for e in ([1.0, 0.0], [0.0, 1.0]))
    twice: Any = torch.func.jvp(lambda z: torch.func.jvp(net, (z,), (e_x,)), (xt,), (e_x,))
    (u, u_x), (_, u_xx) = twice
    u_t = torch.func.jvp(net, (xt,), (e_t,))[1]
    return (u_t + u * u_x - 0.01 * u_xx).square().mean()


def penalty(net: Any, x: Tensor) -> Tensor:
    """A critic's gradient penalty."""
    x = x.clone().requires_grad_()
    y = net(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (g.norm(dim=1) - 1).square().mean()


def forces(net: Any, x: Tensor) -> Tensor:
    """Energies of pair distances, and their forces."""
    x = x.clone().requires_grad_()
    d = (x[:, :, None] - x[:, None]).square().sum(-1, keepdim=True).add(0.1).sqrt()
    energy = net(torch.cat([d, 1 / d, (-d).exp()], -1)).sum((1, 2, 3))
    (f,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy.square().mean() + f.square().mean()


def laplacian(net: Any, x: Tensor) -> Tensor:
    """Poisson's equation, by Hessians of samples."""
    hessian = torch.func.vmap(torch.func.hessian(lambda z: net(z).sum()))(x)
    return (hessian.diagonal(dim1=-2, dim2=-1).sum(-1) - 1).square().mean()


def mean_flow(net: Any, x: Tensor) -> Tensor:
    """A MeanFlow step: the target holds a JVP in tokens and time, and is constant."""
    noise, (r, t) = x.flip(0), x[:, 0, :2].sigmoid().unbind(-1)
    z, v = (1 - t)[:, None, None] * x + t[:, None, None] * noise, noise - x
    both: Any = torch.func.jvp(lambda z, t: net(z, r, t), (z, t), (v, torch.ones_like(t)))
    u, u_dot = both
    return (u - (v - (t - r)[:, None, None] * u_dot).detach()).square().mean()


def flow(net: Any, x: Tensor) -> Tensor:
    """The same without the JVP: what a constant target may cost in memory."""
    noise, (r, t) = x.flip(0), x[:, 0, :2].sigmoid().unbind(-1)
    z = (1 - t)[:, None, None] * x + t[:, None, None] * noise
    return (net(z, r, t) - (noise - x)).square().mean()


def curvature(net: Any, x: Tensor) -> Tensor:
    """A loss and its Hessian-vector product in the tokens."""
    v = torch.ones_like(x)
    both: Any = torch.func.jvp(torch.func.grad(lambda z: net(z).square().mean()), (x,), (v,))
    g, hv = both
    return (g * v).sum() + hv.square().sum()


def classify(net: Any, x: Tensor) -> Tensor:
    """Cross entropy, without a derivative in it."""
    labels = torch.arange(len(x), device=x.device) % 10
    return pr.functional.cross_entropy(net(x), labels)


class Case(NamedTuple):
    """A step: its name, network, loss, the shape of its data, and the loss without the derivative that is constant."""

    name: str
    net: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]
    shape: tuple[int, ...]
    plain: Callable[[Any, Tensor], Tensor] | None = None


CASES = (
    Case("Burgers, reverse, 128x32", lambda: mlp([2, 32, 32, 32, 32, 1]), burgers_reverse, (128, 2)),
    Case("Burgers, forward, 128x32", lambda: mlp([2, 32, 32, 32, 32, 1]), burgers_forward, (128, 2)),
    Case("Burgers, reverse, 1024x64", lambda: mlp([2, 64, 64, 64, 64, 1]), burgers_reverse, (1024, 2)),
    Case("gradient penalty, 64x128", lambda: mlp([64, 128, 128, 128, 1], nn.SiLU, norm=True), penalty, (64, 64)),
    Case("forces, 16x8 atoms", lambda: mlp([3, 32, 32, 1], nn.SiLU), forces, (16, 8, 3)),
    Case("Laplacian, 64x32", lambda: mlp([3, 32, 32, 1]), laplacian, (64, 3)),
    Case("MeanFlow, DiT", lambda: pr.nn.convert(DiT()), mean_flow, (8, 16, 64), flow),
    Case("HVP, GPT-2 block", lambda: pr.nn.convert(Block(64, 4, causal=True)), curvature, (4, 32, 64)),
    Case("digits transformer", lambda: pr.nn.convert(Digits()), classify, (64, 8, 8)),
)


# Two small models of digits in plain torch.nn: images `[batch, 1, 8, 8]` to log-probabilities.
IMAGE_SIZE, NUM_CLASSES = 8, 10


def convnet(channels: int = 16) -> nn.Module:
    """Two convolutions, each batch-normalized, and a linear head."""
    layers: list[nn.Module] = []
    for i, o in ((1, channels), (channels, 2 * channels)):
        # Batch norm takes every constant away: a bias before it would only drift on rounding errors.
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.GELU(), nn.AvgPool2d(2)]
    head = nn.Linear(2 * channels * (IMAGE_SIZE // 4) ** 2, NUM_CLASSES)
    return nn.Sequential(*layers, nn.Flatten(), head, nn.LogSoftmax(dim=-1))


def vision_transformer(width: int = 32, num_heads: int = 4, num_blocks: int = 2) -> nn.Module:
    """Sixteen tokens of four pixels through two blocks of torch's own."""
    options: Any = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    block = nn.TransformerEncoderLayer(width, num_heads, 2 * width, **options)
    blocks = nn.TransformerEncoder(block, num_blocks, nn.LayerNorm(width), enable_nested_tensor=False)
    embed = nn.Flatten(), nn.Unflatten(1, (16, 4)), nn.Linear(4, width)
    return nn.Sequential(*embed, blocks, nn.Flatten(), nn.Linear(16 * width, NUM_CLASSES), nn.LogSoftmax(dim=-1))
