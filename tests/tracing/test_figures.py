"""The figures of joint graphs: bytes against eager autograd's, the page that says so, and time to trace."""

import pathlib
import time

import pytest
import torch
from torch._functorch import partitioners

import primitives as pr
from perf import joint_graphs
from perf.demo.models import ConvNet, VisionTransformer
from primitives.tracing import trace_joint

ROOT = pathlib.Path(__file__).parents[2]
# The most that the partition may save, as a part of what eager autograd does.
MOST = {ConvNet: 0.40, VisionTransformer: 0.72}


@pytest.mark.parametrize("make", MOST, ids=lambda make: make.__name__)
def test_models_of_the_demo(make):
    """Bits are those of eager autograd, bytes those of the page; torch's partitioner is left as it was."""
    original = partitioners.get_default_op_list
    model = pr.nn.convert(make())
    loss, primals = joint_graphs.training_loss(model), joint_graphs.example(model, 32, torch.float32)
    graph = trace_joint(loss, primals, no_cotangents=True)
    assert joint_graphs.agrees_with_eager(loss, graph, primals)
    assert "primitives.log_softmax.default" in {str(node.target) for node in graph.graph.nodes}
    eager = joint_graphs.eager_saved_bytes(loss, primals)
    everything, min_cut = (joint_graphs.graph_saved_bytes(graph, min_cut=flag) for flag in (False, True))
    assert min_cut <= MOST[make] * eager
    assert everything <= eager
    row = f"| {make.__name__}, primitives | same | {eager:,} | {everything:,} | {min_cut:,} |"
    assert row in (ROOT / "docs/reference/tracing/figures.md").read_text(encoding="utf-8")
    assert partitioners.get_default_op_list is original
    assert torch.ops.primitives.layer_norm not in original().recomputable_ops


def test_figures_that_are_bad_say_so():
    good = joint_graphs.Figures("net", True, 10, 10, 10, 0.1)
    assert [f.good for f in (good, good._replace(same=False), good._replace(min_cut=11))] == [True, False, False]
    assert "DIFFERENT" in joint_graphs.table([good._replace(same=False)], 1, "")


def test_time_to_trace_twelve_blocks():
    """A block takes what the difference of two transformers takes; how wide they are does not matter."""
    seconds = []
    for num_blocks in (1, 3):
        # Of the processor, which tracing keeps busy: others may run at the same time.
        start = time.process_time()
        joint_graphs.traced_blocks(num_blocks, width=8)
        seconds.append(time.process_time() - start)
    assert seconds[0] + 11 * (seconds[1] - seconds[0]) / 2 < joint_graphs.TRACING_LIMIT
