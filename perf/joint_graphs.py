"""Joint graphs of the demo's models: the same numbers as eager, what is saved for the backward pass, time to trace.

Run: `python -m perf.joint_graphs [--batch N] [--write FILE]`. The exit status is 1 if a bit differs from eager
autograd, the partition saves more than it, or tracing the transformer takes longer than `TRACING_LIMIT`. Bytes are
counted by memory. `--write` puts the figures into a page: `docs/reference/tracing/figures.md` is made so.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch

import primitives as pr
from perf.demo.data import IMAGE_SIZE, NUM_CLASSES
from perf.demo.models import ConvNet, VisionTransformer
from primitives.tracing import pure_module, trace_joint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from primitives.tracing import JointGraph

TRACING_LIMIT = 20.0
"""Seconds, for 12 blocks on two cores."""


def training_loss(model: nn.Module, *, primitives: bool = True) -> Callable[..., Any]:
    """`(params, buffers, images, labels) -> (loss, new_buffers)`, on the primitives or on torch's own operators."""

    def loss(params: Any, buffers: Any, images: Tensor, labels: Tensor) -> Any:
        if primitives:
            output, new_buffers = pure_module(model)(params, buffers, images)
        else:
            new_buffers = {name: value.clone() for name, value in buffers.items()}
            output = torch.func.functional_call(model, (params, new_buffers), (images,))
        return torch.nn.functional.nll_loss(output, labels), new_buffers

    return loss


def example(model: nn.Module, batch: int, dtype: torch.dtype) -> tuple:
    """Primals of `training_loss`: parameters, which require grad, buffers, images and labels."""
    generator = torch.Generator().manual_seed(1)
    params, buffers = pure_module(model).init()
    images = torch.randn(batch, 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator, dtype=dtype)
    labels = torch.randint(NUM_CLASSES, (batch,), generator=generator)
    return {name: p.requires_grad_() for name, p in params.items()}, buffers, images, labels


def agrees_with_eager(loss: Callable[..., Any], graph: JointGraph, primals: tuple) -> bool:
    """Whether the joint graph, and its two parts one after the other, give every bit that eager autograd gives."""
    outs, (grads, *_) = graph(primals)
    parts_outs, saved = graph.forward_graph()(primals)
    parts_grads, *_ = graph.backward_graph()(saved)
    expected = loss(*primals)
    bars = torch.autograd.grad(expected[0], [*primals[0].values()])
    pairs: list[Any] = [(expected, dict(zip(primals[0], bars, strict=True))), (outs, grads), (parts_outs, parts_grads)]
    (leaves, treespec), *found = map(optree.tree_flatten, pairs)
    return all(spec == treespec and all(map(torch.equal, values, leaves)) for values, spec in found)


def eager_saved_bytes(loss: Callable[..., Any], primals: tuple) -> int:
    """Bytes that eager autograd keeps for the backward pass, counted by memory, parameters excluded."""
    excluded = {p.untyped_storage().data_ptr() for p in primals[0].values()}
    kept: dict[int, Any] = {}

    def hold(x: Tensor) -> Any:
        # No other memory can take its address. Nothing runs backward, and asks for the tensor.
        return kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage())

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda storage: storage):
        loss(*primals)
    return sum(storage.nbytes() for address, storage in kept.items() if address not in excluded)


def graph_saved_bytes(graph: JointGraph, *, min_cut: bool) -> int:
    """The same for a joint graph: what it saves, parameters and their views excluded."""
    values = {node.name: node.meta.get("val") for node in graph.graph.nodes}
    memory = {name: x.untyped_storage()._cdata for name, x in values.items() if isinstance(x, torch.Tensor)}
    parameters = {number for name, number in memory.items() if name.startswith("params")}
    saved = graph.forward_graph(min_cut=min_cut).saved
    return sum(entry.num_bytes for entry in saved if memory.get(entry.name) not in parameters)


class Figures(NamedTuple):
    """The figures of one model: whether its bits are eager autograd's, and what `saved` says."""

    name: str
    same: bool
    eager: int
    everything: int
    min_cut: int
    seconds: float

    @property
    def good(self) -> bool:
        """Whether the bits agree, and no more is saved than by eager autograd."""
        return self.same and self.min_cut <= self.eager


def saved(model: nn.Module, batch: int, *, primitives: bool) -> tuple[int, int, int, float]:
    """Bytes saved by eager autograd, by the graph if nothing is computed again, and by the min-cut; tracing seconds."""
    primals = example(model.float(), batch, torch.float32)
    loss = training_loss(model, primitives=primitives)
    start = time.perf_counter()
    graph = trace_joint(loss, primals, no_cotangents=True)
    seconds = time.perf_counter() - start
    everything, min_cut = (graph_saved_bytes(graph, min_cut=flag) for flag in (False, True))
    return eager_saved_bytes(loss, primals), everything, min_cut, seconds


def all_figures(batch: int) -> Iterator[Figures]:
    """The figures of every model, with `torch.nn` and with the primitives."""
    for make in (ConvNet, VisionTransformer):
        model = make()
        for side, own in (("torch.nn", False), ("primitives", True)):
            model = pr.nn.convert(model) if own else model
            loss, primals = training_loss(model.double(), primitives=own), example(model, batch, torch.float64)
            same = agrees_with_eager(loss, trace_joint(loss, primals, no_cotangents=True), primals)
            yield Figures(f"{make.__name__}, {side}", same, *saved(model, batch, primitives=own))


def traced_blocks(num_blocks: int, batch: int = 2, **options: int) -> tuple[int, float]:
    """Nodes of the graph of the transformer with so many blocks, and the seconds that tracing it took."""
    model = VisionTransformer(num_blocks=num_blocks, **options)
    primals, start = example(model, batch, torch.float32), time.perf_counter()
    graph = trace_joint(training_loss(model), primals, no_cotangents=True)
    return len(graph.graph.nodes), time.perf_counter() - start


def table(found: Sequence[Figures], batch: int, blocks: str) -> str:
    """The figures as a table in Markdown."""
    rows = [
        f"| {f.name} | {'same' if f.same else 'DIFFERENT'} | {f.eager:,} | {f.everything:,} | {f.min_cut:,} | "
        f"{f.min_cut / f.eager:.0%} | {f.seconds:.1f} s |"
        for f in found
    ]
    return HEAD.format(batch=batch) + "\n".join([*rows, "", blocks])


HEAD = """Bytes saved for the backward pass at batch {batch}, float32, parameters excluded; bits compared in float64.

| model | bits | eager autograd | graph, nothing computed again | min-cut partition | of eager | tracing |
|---|---|---:|---:|---:|---:|---:|
"""
PAGE = """# Figures of joint graphs

Printed by `python -m perf.joint_graphs` (`--write docs/reference/tracing/figures.md` writes this page), with torch
{torch} on a CPU; the seconds are those of that machine. `tests/tracing/test_figures.py` holds the bytes of this page,
the comparison with eager autograd, and the time.

{table}

The bits are those of outputs and gradients, of the joint graph and of its two parts one after the other, against eager
autograd. The partition keeps what matrix products and convolutions gave and computes again what costs a pass over
memory: normalizations, activations, dropout, sums of branches.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, and return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--write", type=pathlib.Path, help="file to write as a page, besides printing")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    found = list(all_figures(options.batch))
    nodes, seconds = traced_blocks(12, options.batch)
    time_taken = f"traced in {seconds:.1f} s of {TRACING_LIMIT:.0f} s allowed"
    blocks = f"VisionTransformer with 12 blocks: {nodes} nodes, {time_taken}."
    printed = table(found, options.batch, blocks)
    print(printed)
    if options.write is not None:
        options.write.write_text(PAGE.format(torch=torch.__version__, table=printed), encoding="utf-8")
    return 0 if all(f.good for f in found) and seconds <= TRACING_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
