"""A BERT of Hugging Face is tuned by Newton's method: products of the Hessian, conjugate gradients.

    pip install '.[demo]' 'transformers>=5'
    python docs/examples/fine_tune.py        # about 4 minutes; --quick shows that it runs

The network, small and with random weights, learns whether a sequence has more of one token than of another. A step
solves (H + damping) s = -gradient by conjugate gradients, which need products of the Hessian H alone. Two orders of
derivatives give them: forward over reverse, jvp(grad(loss)), and reverse over forward, grad(jvp(loss)).

Torch's fused attention has no forward mode, so both orders raise; `attn_implementation="eager"` writes it out. Then the
first order is right in torch, and the second is silently wrong, because of the layer norms: Newton's method still gets
down, later. Inside `primitives.repair_torch` both are right on the attention that Hugging Face chooses.

    repaired, sdpa, forward over reverse product off by 3e-10, loss 7.0e-05, accuracy 0.973, 74 ms a product
    repaired, sdpa, reverse over forward product off by 3e-10, loss 7.0e-05, accuracy 0.973, 81 ms a product
    torch, sdpa, forward over reverse    raises NotImplementedError
    torch, sdpa, reverse over forward    raises NotImplementedError
    torch, eager, forward over reverse   product off by 3e-10, loss 7.0e-05, accuracy 0.973, 63 ms a product
    torch, eager, reverse over forward   product off by 2e-01, loss 5.1e-04, accuracy 0.976, 60 ms a product

(25 steps, on a CPU. At this size torch is the faster where it is right.)

Source: Martens, "Deep learning via Hessian-free optimization", ICML 2010.
"""

import itertools
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from matplotlib import pyplot
from optree.integrations.torch import tree_ravel
from rich.progress import track
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn import functional as F

import primitives as pr

# Transformers imports torchvision where it is, which fails beside another build of torch, and which BERT does not need.
try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    sys.modules["torchvision"] = None  # as though it were not installed
from transformers import BertConfig, BertForSequenceClassification

VOCABULARY, LENGTH = 8, 12

ORDERS = {
    "forward over reverse": lambda loss, w, v: jvp(grad(loss), (w,), (v,))[1],
    "reverse over forward": lambda loss, w, v: grad(lambda w: jvp(loss, (w,), (v,))[1])(w),
}


def network(attention: str) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "initializer_range": 0.2}
    config = BertConfig(**sizes, **no_dropout, attn_implementation=attention)
    return BertForSequenceClassification(config).double()


def sequences(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens `[number, length]`, and whether there are more of token 1 than of token 2."""
    tokens = torch.randint(VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(seed))
    return tokens, ((tokens == 1).sum(1) > (tokens == 2).sum(1)).long()


def newton_step(loss: Callable, product: Callable, w: Tensor, damping: float, iterations: int) -> Tensor:
    """A step that conjugate gradients find; they stop where the curvature is negative."""
    residual = -grad(loss)(w)
    step, along = torch.zeros_like(w), residual
    for _ in range(iterations):
        image = product(loss, w, along) + damping * along
        curvature = along @ image
        if curvature <= 0:
            break
        length = residual @ residual / curvature
        step, new = step + length * along, residual - length * image
        along, residual = new + (new @ new) / (residual @ residual) * along, new
    return step


def train(net: nn.Module, product: Callable, steps: int) -> tuple[Tensor, list[float], float, float]:
    """Parameters, losses, the error of a product against a difference of gradients, and its seconds."""
    tokens, labels = sequences(256, 1)
    params = {name: p.detach() for name, p in net.named_parameters()}
    w, unravel = tree_ravel(params)

    def loss(w: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, unravel(w), tokens).logits, labels)

    v = F.normalize(torch.randn(len(w), dtype=w.dtype, generator=torch.Generator().manual_seed(2)), dim=0)
    difference = (grad(loss)(w + 1e-5 * v) - grad(loss)(w - 1e-5 * v)) / 2e-5
    error = (product(loss, w, v) - difference).norm() / difference.norm()
    times = [time.perf_counter()]
    for _ in range(5):
        product(loss, w, v)
        times.append(time.perf_counter())
    losses, damping = [loss(w).item()], 1.0
    for _ in track(range(steps), "Newton steps", transient=True):
        proposed = w + newton_step(loss, product, w, damping, 15)
        value = loss(proposed).item()
        if value < losses[-1]:
            w, damping = proposed, damping / 2
        else:
            damping *= 4
        losses.append(min(value, losses[-1]))
    return unravel(w), losses, error.item(), min(after - before for before, after in itertools.pairwise(times))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train in all ways, print, draw; the errors of the products."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a step")
    parser.add_argument("--output", type=Path, help="the picture; without it a quick run draws none")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # for tensors so small, more only cost time
    tokens, labels = sequences(1000, 3)
    figures: dict[str, float] = {}
    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    repaired, plain = pr.repair_torch, nullcontext
    ways = [("repaired", "sdpa", repaired), ("torch", "sdpa", plain), ("torch", "eager", plain)]
    for library, attention, context in ways:
        for (order, product), line in zip(ORDERS.items(), ("-", "--"), strict=True):
            net, name = network(attention), f"{library}, {attention}, {order}"
            try:
                with context():
                    params, losses, figures[name], seconds = train(net, product, 1 if options.quick else 25)
            except NotImplementedError as error:
                print(f"{name:36} raises {type(error).__name__}")
                continue
            with torch.no_grad():
                right = (functional_call(net, params, tokens).logits.argmax(1) == labels).double().mean()
            print(f"{name:36} product off by {figures[name]:.0e}, loss {losses[-1]:.1e},", end=" ")
            print(f"accuracy {right:.3f}, {1e3 * seconds:.0f} ms a product")
            color, width = ("tab:orange", 4) if library == "repaired" else ("tab:blue", 1.5)
            axis.plot(losses, line, color=color, linewidth=width, label=name)
    axis.set(xlabel="step", ylabel="loss", yscale="log")
    axis.legend(fontsize="small")
    if options.output or not options.quick:
        figure.savefig(options.output or Path(__file__).with_suffix(".png").name, dpi=80)
    return figures


if __name__ == "__main__":
    main()
