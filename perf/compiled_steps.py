"""Training steps with derivatives in the loss: eager torch, `primitives.compile`, `torch.compile` and `jax.jit`.

One thread, all of them in one process and in turns, the least time of each; first calls in processes of their own, with
an empty folder for Inductor's files. JAX takes part where it is installed. `python -m perf.compiled_steps NAME ours` is
such a process: it prints the seconds of a first call, with Inductor's files where `TORCHINDUCTOR_CACHE_DIR` says.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

import primitives as pr
from perf.memory import peak
from primitives.tracing._torch_private import bottom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

__all__ = ["CASES", "Case", "first_call", "lines", "measure", "results", "saved", "steps", "write"]

CONTESTANTS = ("eager", "ours", "torch.compile", "jax.jit")


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


# The losses.


def burgers_reverse(net: Any, xt: Tensor) -> Tensor:
    """The residual of Burgers' equation, its derivatives by autograd."""
    x, t = (z.clone().requires_grad_() for z in (xt[:, :1], xt[:, 1:]))
    u = net(torch.cat([x, t], 1))
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return (u_t + u * u_x - 0.01 * u_xx).square().mean()


def burgers_forward(net: Any, xt: Tensor) -> Tensor:
    """The same, by forward mode."""
    e_x, e_t = (torch.tensor(e).expand_as(xt).clone() for e in ([1.0, 0.0], [0.0, 1.0]))
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
    labels = torch.arange(len(x)) % 10
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


def _step(net: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    for p in net.parameters():
        p.grad = None
    value = loss(x)
    value.backward()
    return [value, *(p.grad for p in net.parameters() if p.grad is not None)]


def least(functions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The least milliseconds of each, called in turns."""
    best, end = dict.fromkeys(functions, math.inf), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, run in functions.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def steps(case: Case) -> dict[str, Callable[[], Any]]:
    """The step by contestant; nothing is compiled yet."""
    torch.manual_seed(0)
    net, x = case.net(), torch.rand(case.shape)
    ways: dict[str, Callable[..., Any]] = {"eager": lambda f: f, "ours": pr.compile, "torch.compile": torch.compile}
    loss = functools.partial(case.loss, net)
    found: dict[str, Any] = {name: functools.partial(_step, net, way(loss), x) for name, way in ways.items()}
    return found | ({"jax.jit": _jax_steps()[case.name]()} if case.name in _jax_steps() else {})


def saved(step: Any) -> int:
    """Bytes that the graph of a loss keeps for the backward pass, besides weights and data."""
    net, loss, x = step.args
    own = {y.untyped_storage().data_ptr() for y in (*net.parameters(), x)}
    value = loss(x)
    stack, seen, kept = [value.grad_fn], set(), {}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [each for each, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")] or ["saved_tensors"]
        for y in pytree.tree_leaves([getattr(node, name, ()) for name in names]):
            # Zero tangents have no memory.
            with contextlib.suppress(AttributeError, RuntimeError):
                storage = (bottom(y) if isinstance(y, torch.Tensor) else y).untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
    return sum(size for number, size in kept.items() if number not in own)


def first_calls(case: Case, names: Iterable[str]) -> dict[str, float]:
    """Seconds of the first step in a fresh process, for each contestant, and for ours in one more process."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (*names, "ours again"):
            contestant = name.removesuffix(" again")
            place = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, contestant))}
            command = [sys.executable, "-m", "perf.compiled_steps", case.name, contestant]
            ended = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, check=True)
            found[name] = float(ended.stdout.split()[-1])
    return found


def first_call(name: str, contestant: str) -> float:
    """Seconds of a first step, here and now, after one in eager torch."""
    torch.set_num_threads(1)
    found = steps(next(case for case in CASES if case.name == name))
    found["eager"]()
    start = time.perf_counter()
    found[contestant]()
    return time.perf_counter() - start


def measure(case: Case, seconds: float = 3.0) -> dict[str, Any]:
    """By contestant: milliseconds, seconds of first calls, bytes; and the largest relative difference from eager."""
    runs, failed = steps(case), []
    truth = [y.clone() for y in runs["eager"]()]
    pairs = zip(truth, runs["ours"](), strict=True)
    difference = max(((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in pairs)
    for name in [*runs][2:]:
        try:
            runs[name]()
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:70]}")
            del runs[name]
    times, plain = least(runs, seconds), {}
    if case.plain is not None:
        plain = {"plain": saved(steps(case._replace(loss=case.plain))["eager"])}
    return {
        "case": case.name,
        "ms": times,
        "first": first_calls(case, [name for name in runs if name != "eager"]),
        "failed": failed,
        "difference": difference,
        "saved": {name: saved(runs[name]) for name in ("eager", "ours")} | plain,
        "peak": {name: peak(run) for name, run in runs.items() if name != "jax.jit"},
    }


def lines(results: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A table, one line for each step as it is measured, and the geometric means."""
    ratios: dict[str, list[float]] = {}
    heads = ("step", "eager, ms", *CONTESTANTS[1:], "ours / eager", "difference", "first call, s", "again, s")
    yield f"| {' | '.join([*heads, 'saved, kB', 'peak, kB'])} |"
    yield "|" + (len(heads) + 2) * "---|"
    for found in results:
        ms, first = found["ms"], dict(found["first"])
        for name in ms:
            ratios.setdefault(name, []).append(ms["ours"] / ms[name])
        for name in first.keys() & {"torch.compile"}:
            ratios.setdefault(f"{name}, first calls", []).append(first["ours"] / first[name])
        ratios.setdefault("eager, saved bytes", []).append(found["saved"]["ours"] / found["saved"]["eager"])
        cells = [f"{ms[name]:.2f}" if name in ms else "-" for name in CONTESTANTS]
        again = f"{first.pop('ours again'):.1f}"
        seconds = " / ".join(f"{first[name]:.1f}" if name in first else "-" for name in CONTESTANTS[1:])
        bytes_ = [" / ".join(f"{n / 1e3:.0f}" for n in found[kind].values()) for kind in ("saved", "peak")]
        ratio = ms["ours"] / ms["eager"]
        row = [found["case"], *cells, f"{ratio:.2f}", f"{found['difference']:.0e}", seconds, again, *bytes_]
        yield f"| {' | '.join(row)} |"
    yield ""
    for name, values in ratios.items():
        if name != "ours":
            mean = math.exp(sum(map(math.log, values)) / len(values))
            yield f"- ours / {name}: {mean:.2f} in the geometric mean of {len(values)}, {max(values):.2f} at most"


def results(only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """What `measure` finds for each step, or for those whose name contains one of these words."""
    torch.set_num_threads(1)
    for case in CASES:
        if not only or any(word in case.name for word in only):
            yield measure(case)


def write(found: Sequence[dict[str, Any]], folder: Path) -> None:
    """The page of the docs with its picture, and the figures that both are made of."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # Gray letters on no ground are read on white and on black, and a narrow picture on a phone.
    gray = "#7f7f7f"
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), gray)
    mpl.rcParams.update({**colors, "svg.fonttype": "none", "font.size": 11, "svg.hashsalt": ""})
    figure, axes = plt.subplots(figsize=(5.2, 0.62 * len(found) + 1))
    shown = [name for name in CONTESTANTS if name != "eager" and any(name in each["ms"] for each in found)]
    for k, name in enumerate(shown):
        pairs = [(i, each["ms"][name] / each["ms"]["eager"]) for i, each in enumerate(found) if name in each["ms"]]
        places = [i + 0.8 * (k + 0.5) / len(shown) - 0.4 for i, _ in pairs]
        label = "primitives.compile" if name == "ours" else name
        axes.barh(places, [y for _, y in pairs], 0.75 / len(shown), label=label, color=f"C{k}")
    axes.axvline(1, color=gray, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(found)), [each["case"].replace(", ", "\n", 1) for each in found])
    axes.invert_yaxis()
    axes.set_xlabel("time / time of eager torch")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.35, 1), frameon=False)
    figure.tight_layout()
    figure.savefig(folder / "compile.svg", transparent=True, metadata={"Date": None})
    (folder / "compile.json").write_text(json.dumps(list(found), indent=1) + "\n", encoding="utf-8")
    (folder / "compile.md").write_text(_PAGE.format(table="\n".join(lines(found))), encoding="utf-8")


_PAGE = """# Compiled training steps

Loss and gradients of all weights, float32, one CPU thread: eager torch, `primitives.compile` ("ours"), `torch.compile`
and `jax.jit` in one process and in turns, the least time of each; a dash means that it raises, or that there is no such
step. The other columns: the largest relative difference of ours from eager; the first call in a fresh process
without Inductor's files (ours / torch.compile / jax.jit), and ours once more in a process that finds them; bytes kept
for the backward pass besides weights and data (eager / ours / the step without the JVP, where its target is constant);
the peak memory of a step besides its arguments (eager / ours / torch.compile).
`python -m perf compile --write` makes this page.

{table}

![Times of the steps beside those of eager torch](compile.svg)
"""


@functools.cache
def _jax_steps() -> dict[str, Callable[[], Callable[[], Any]]]:  # noqa: C901 - the losses, once more
    """For each of the first six steps, what makes the same step in JAX; nothing where JAX is not installed."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    try:
        import jax  # type: ignore[import-not-found] - no dependency
        import jax.numpy as jnp  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        return {}

    def init(sizes: Sequence[int], *, norm: bool) -> list[tuple[Any, ...]]:
        key, params = jax.random.PRNGKey(0), []
        for k, (i, o) in enumerate(itertools.pairwise(sizes)):
            key, use = jax.random.split(key)
            scale = [jnp.ones(o), jnp.zeros(o)] if norm and k < len(sizes) - 2 else []
            params.append((jax.random.uniform(use, (i, o), minval=-1, maxval=1) / i**0.5, jnp.zeros(o), *scale))
        return params

    def net(params: list[tuple[Any, ...]], x: Any, act: Any) -> Any:
        for w, b, *norm in params[:-1]:
            x = x @ w + b
            if norm:
                c = x - x.mean(-1, keepdims=True)
                x = c * jax.lax.rsqrt((c**2).mean(-1, keepdims=True) + 1e-5) * norm[0] + norm[1]
            x = act(x)
        w, b = params[-1][:2]
        return x @ w + b

    def burgers_reverse(f: Any, xt: Any) -> Any:
        x, t = xt[:, :1], xt[:, 1:]

        def u(x: Any, t: Any) -> Any:
            return f(jnp.concatenate([x, t], 1))

        u_x = jax.grad(lambda x, t: u(x, t).sum(), 0)
        u_xx = jax.grad(lambda x, t: u_x(x, t).sum(), 0)(x, t)
        g_x, g_t = jax.grad(lambda x, t: u(x, t).sum(), (0, 1))(x, t)
        return jnp.mean((g_t + u(x, t) * g_x - 0.01 * u_xx) ** 2)

    def burgers_forward(f: Any, xt: Any) -> Any:
        e_x, e_t = jnp.zeros_like(xt).at[:, 0].set(1), jnp.zeros_like(xt).at[:, 1].set(1)
        (u, u_x), (_, u_xx) = jax.jvp(lambda z: jax.jvp(f, (z,), (e_x,)), (xt,), (e_x,))
        return jnp.mean((jax.jvp(f, (xt,), (e_t,))[1] + u * u_x - 0.01 * u_xx) ** 2)

    def penalty(f: Any, x: Any) -> Any:
        y, back = jax.vjp(f, x)
        (g,) = back(jnp.ones_like(y))
        return y.mean() + ((jnp.sqrt((g**2).sum(1)) - 1) ** 2).mean()

    def forces(f: Any, x: Any) -> Any:
        def energy(x: Any) -> Any:
            d = jnp.sqrt(((x[:, :, None] - x[:, None]) ** 2).sum(-1, keepdims=True) + 0.1)
            return f(jnp.concatenate([d, 1 / d, jnp.exp(-d)], -1)).sum((1, 2, 3))

        e, back = jax.vjp(energy, x)
        return (e**2).mean() + (back(jnp.ones_like(e))[0] ** 2).mean()

    def laplacian(f: Any, x: Any) -> Any:
        hessian = jax.vmap(jax.hessian(lambda z: f(z).sum()))(x)
        return ((jnp.trace(hessian, axis1=1, axis2=2) - 1) ** 2).mean()

    def maker(loss: Any, sizes: Sequence[int], norm: bool, act: Any, shape: tuple[int, ...]) -> Any:
        def make() -> Callable[[], Any]:
            params, x = init(sizes, norm=norm), jax.random.uniform(jax.random.PRNGKey(1), shape)
            run = jax.jit(jax.value_and_grad(lambda p, x: loss(lambda z: net(p, z, act), x)))
            return lambda: jax.block_until_ready(run(params, x))

        return make

    tanh, silu = jnp.tanh, jax.nn.silu
    specifications = (
        (burgers_reverse, [2, 32, 32, 32, 32, 1], False, tanh),
        (burgers_forward, [2, 32, 32, 32, 32, 1], False, tanh),
        (burgers_reverse, [2, 64, 64, 64, 64, 1], False, tanh),
        (penalty, [64, 128, 128, 128, 1], True, silu),
        (forces, [3, 32, 32, 1], False, silu),
        (laplacian, [3, 32, 32, 1], False, tanh),
    )
    return {
        case.name: maker(*specification, case.shape) for case, specification in zip(CASES, specifications, strict=False)
    }


if __name__ == "__main__":
    print(first_call(*sys.argv[1:]))
