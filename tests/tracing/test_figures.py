"""Joint graphs of two models: the bits of eager autograd, less saved for the backward pass, and the time to trace."""

import optree
import pytest
import torch
from torch._functorch import partitioners

import primitives as pr
from perf.compiled_losses import IMAGE_SIZE, NUM_CLASSES, convnet, vision_transformer
from perf.measuring import saved_bytes
from primitives.tracing import pure_module, trace_joint

# The most that the partition may save, as a part of what eager autograd does; docs/reference/tracing/index.md says so.
MOST = {convnet: 0.40, vision_transformer: 0.73}


def loss_and_primals(model, batch=32):
    """`(params, buffers, images, labels) -> (loss, new_buffers)`, and its arguments."""
    generator = torch.Generator().manual_seed(1)
    params, buffers = pure_module(model).init()
    images = torch.randn(batch, 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    labels = torch.randint(NUM_CLASSES, (batch,), generator=generator)

    def loss(params, buffers, images, labels):
        output, new_buffers = pure_module(model)(params, buffers, images)
        return torch.nn.functional.nll_loss(output, labels), new_buffers

    return loss, ({name: p.requires_grad_() for name, p in params.items()}, buffers, images, labels)


def graph_saved_bytes(graph, *, min_cut):
    """What a joint graph saves, parameters and their views excluded."""
    values = {node.name: node.meta.get("val") for node in graph.graph.nodes}
    memory = {name: x.untyped_storage()._cdata for name, x in values.items() if isinstance(x, torch.Tensor)}
    parameters = {number for name, number in memory.items() if name.startswith("params")}
    saved = graph.forward_graph(min_cut=min_cut).saved
    return sum(entry.num_bytes for entry in saved if memory.get(entry.name) not in parameters)


@pytest.mark.parametrize("make", MOST, ids=lambda make: make.__name__)
def test_bits_are_those_of_eager_autograd_and_less_is_saved(make):
    original = partitioners.get_default_op_list
    loss, primals = loss_and_primals(pr.nn.convert(make()))
    graph = trace_joint(loss, primals, no_cotangents=True)
    outs, (grads, *_) = graph(primals)
    # The two parts, one after the other.
    parts_outs, saved = graph.forward_graph()(primals)
    parts_grads, *_ = graph.backward_graph()(saved)
    expected = loss(*primals)
    bars = torch.autograd.grad(expected[0], [*primals[0].values()])
    leaves, treespec = optree.tree_flatten((expected, dict(zip(primals[0], bars, strict=True))))
    for found in ((outs, grads), (parts_outs, parts_grads)):
        values, spec = optree.tree_flatten(found)
        assert spec == treespec
        assert all(map(torch.equal, values, leaves))
    assert "primitives.log_softmax.default" in {str(node.target) for node in graph.graph.nodes}
    eager = saved_bytes(loss(*primals)[0], primals[0].values())
    assert graph_saved_bytes(graph, min_cut=True) <= MOST[make] * eager
    assert graph_saved_bytes(graph, min_cut=False) <= eager
    # Torch's partitioner is left as it was.
    assert partitioners.get_default_op_list is original
    assert torch.ops.primitives.layer_norm not in original().recomputable_ops
