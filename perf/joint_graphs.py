"""Joint graphs of the demo's models: the same numbers as eager, what is saved for the backward pass, time to trace.

Run: `python -m perf.joint_graphs [--batch N] [--blocks N]`. For each model, with `torch.nn` and converted to the
primitives, one training step in float64 by the joint graph, and by forward and backward graph one after the other, is
compared with eager autograd bit by bit. Then the bytes between the two passes are counted for float32, by memory and
not by tensor, parameters excluded: those that eager autograd saves, those that the graph saves if the backward pass
computes nothing again, and those of torch's min-cut partition. The exit status is 1 if a bit differs, or tracing the
transformer takes longer than `TRACING_LIMIT`.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

import optree
import torch

import primitives as pr
from perf.demo.data import IMAGE_SIZE, NUM_CLASSES
from perf.demo.models import ConvNet, VisionTransformer
from primitives.tracing import functional_call, trace_joint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from primitives.tracing import JointGraph

TRACING_LIMIT = 20.0
"""Seconds, for 12 blocks on two cores."""


def torch_call(model: nn.Module) -> Callable[..., Any]:
    """What `functional_call` gives, in terms of torch alone: it replaces no function of torch."""

    def net(params: Any, buffers: Any, images: Tensor) -> Any:
        new_buffers = {name: value.clone() for name, value in buffers.items()}
        return torch.func.functional_call(model, (params, new_buffers), (images,)), new_buffers

    return net


def training_loss(model: nn.Module, *, primitives: bool = True) -> Callable[..., Any]:
    """`(params, buffers, images, labels) -> (loss, new_buffers)`, on the primitives or on torch's own operators."""
    net = functional_call(model) if primitives else torch_call(model)

    def loss(params: Any, buffers: Any, images: Tensor, labels: Tensor) -> Any:
        output, new_buffers = net(params, buffers, images)
        return torch.nn.functional.nll_loss(output, labels), new_buffers

    return loss


def example(model: nn.Module, batch: int, dtype: torch.dtype) -> tuple:
    """Primals of `training_loss`: parameters, which require grad, buffers, images and labels."""
    generator = torch.Generator().manual_seed(1)
    params, buffers = functional_call(model).init()
    images = torch.randn(batch, 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator, dtype=dtype)
    labels = torch.randint(NUM_CLASSES, (batch,), generator=generator)
    return {name: p.requires_grad_() for name, p in params.items()}, buffers, images, labels


def eager_step(loss: Callable[..., Any], primals: tuple) -> tuple:
    """Outputs and gradients by eager autograd."""
    outs = loss(*primals)
    grads = torch.autograd.grad(outs[0], [*primals[0].values()])
    return optree.tree_map(torch.Tensor.detach, outs), dict(zip(primals[0], grads, strict=True))


def same_bits(actual: Any, expected: Any) -> bool:
    """Whether two trees of tensors agree in structure and in every bit."""
    if optree.tree_structure(actual) != optree.tree_structure(expected):
        return False
    return all(map(torch.equal, optree.tree_leaves(actual), optree.tree_leaves(expected)))


def agrees_with_eager(loss: Callable[..., Any], graph: JointGraph, primals: tuple) -> bool:
    """Whether the joint graph, and its two parts one after the other, give what eager autograd gives."""
    outs, grads = eager_step(loss, primals)
    joint_outs, joint_grads = graph(primals)
    parts_outs, saved = graph.forward_graph()(primals)
    parts_grads = graph.backward_graph()(saved)
    return all(
        same_bits(actual, expected)
        for actual, expected in (
            (joint_outs, outs),
            (joint_grads[0], grads),
            (parts_outs, outs),
            (parts_grads[0], grads),
        )
    )


def eager_saved_bytes(loss: Callable[..., Any], primals: tuple) -> int:
    """Bytes that eager autograd keeps for the backward pass, counted by memory, parameters excluded."""
    excluded = {p.untyped_storage().data_ptr() for p in primals[0].values()}
    kept: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        # The memory itself is held, so that no other can take its address.
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outs = loss(*primals)
    del outs
    return sum(storage.nbytes() for address, storage in kept.items() if address not in excluded)


def graph_saved_bytes(graph: JointGraph, *, min_cut: bool) -> int:
    """The same for a joint graph: what it saves, parameters excluded."""
    saved = graph.forward_graph(min_cut=min_cut).saved
    parameters = {node.name for node in graph.graph.find_nodes(op="placeholder") if node.name.startswith("params")}
    return sum(entry.num_bytes for entry in saved if not is_parameter(graph, entry.name, parameters))


def is_parameter(graph: JointGraph, name: str, parameters: set[str]) -> bool:
    """Whether a saved value is a parameter, or a view of one."""
    nodes = {node.name: node for node in graph.graph.nodes}
    if name in parameters or name not in nodes:
        return name in parameters
    value = nodes[name].meta["val"]
    if not isinstance(value, torch.Tensor):
        return False
    storages = {nodes[p].meta["val"].untyped_storage()._cdata for p in parameters}
    return value.untyped_storage()._cdata in storages


def timed_trace(loss: Callable[..., Any], primals: tuple) -> tuple[JointGraph, float]:
    """The joint graph, and the seconds that tracing it took."""
    start = time.perf_counter()
    graph = trace_joint(loss, *primals, no_tangents=True)
    return graph, time.perf_counter() - start


def report(name: str, model: nn.Module, batch: int, *, primitives: bool) -> bool:
    """Print the figures of one model; returns whether every bit agrees."""
    double = model.double()
    loss = training_loss(double, primitives=primitives)
    primals = example(double, batch, torch.float64)
    same = agrees_with_eager(loss, timed_trace(loss, primals)[0], primals)
    single = model.float()
    primals = example(single, batch, torch.float32)
    loss = training_loss(single, primitives=primitives)
    graph, seconds = timed_trace(loss, primals)
    figures = (
        eager_saved_bytes(loss, primals),
        graph_saved_bytes(graph, min_cut=False),
        graph_saved_bytes(graph, min_cut=True),
    )
    bits = "same bits" if same else "DIFFERENT BITS"
    print(f"{name:36} {bits:14} {figures[0]:>12,} {figures[1]:>12,} {figures[2]:>12,} {seconds:>8.2f} s")
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report.

    Args:
        arguments: Command line, without the name of the program.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=12, help="of the transformer whose tracing is timed")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    header = ("float64", "eager", "no recompute", "min-cut", "tracing")
    print(f"saved bytes at batch {options.batch}, float32")
    print(f"{'model':36} {header[0]:14} {header[1]:>12} {header[2]:>12} {header[3]:>12} {header[4]:>10}")
    good = True
    for make in (ConvNet, VisionTransformer):
        model = make()
        good &= report(f"{make.__name__}, torch.nn", model, options.batch, primitives=False)
        pr.nn.convert(model)
        good &= report(f"{make.__name__}, primitives", model, options.batch, primitives=True)
    model = VisionTransformer(num_blocks=options.blocks)
    graph, seconds = timed_trace(training_loss(model), example(model, options.batch, torch.float32))
    nodes = len(graph.graph.nodes)
    print(
        f"VisionTransformer with {options.blocks} blocks: {nodes} nodes, traced in {seconds:.1f} s of {TRACING_LIMIT} s"
    )
    return 0 if good and seconds <= TRACING_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
