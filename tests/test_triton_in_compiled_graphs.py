"""`torch.compile` is shown the kernels inside primitives, below every transform, and launches what would be launched.

The graphs are made in a process of its own (`compiled_graphs`), because this one may have Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")

REPOSITORY = pathlib.Path(__file__).parents[1]

# How many graphs each program has.
PROGRAMS = {"layer_norm": 2, "batch_norm": 2, "log_softmax": 2, "add_layer_norm": 2, "hessian-vector product": 1}
OPAQUE = ("symbolic sizes", "reference", "export")

# Launches outside of graphs whose results go unused: the first-order cotangent of the weight.
UNUSED = {"hessian-vector product": ["add_partial_rows_kernel"]}

# A tensor that no kernel writes: a graph would copy it for the result.
READ_ONLY = {"x_ptr", "weight_ptr", "bias_ptr", "y_bar_ptr", "x_dot_ptr", "weight_dot_ptr", "bias_dot_ptr"}
READ_ONLY |= {"residual_ptr", "s_bar_ptr", "seed_ptr"}


@pytest.fixture(scope="module")
def found() -> dict:
    """The output of `compiled_graphs`."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PRIMITIVES_BACKEND")}
    # Nothing is compiled to code: workers for it would each import torch.
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.compiled_graphs"]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def kernels(graphs):
    return [[launch["name"] for launch in graph["kernels"]] for graph in graphs]


def primitives_in(graph):
    return [name for name in graph["operators"] if name.startswith("primitives.")]


@pytest.mark.parametrize("program", PROGRAMS)
def test_graphs_hold_kernels_and_no_primitive(found, program):
    graphs, outside = found["programs"][program]["graphs"], found["programs"][program]["outside"]
    assert len(graphs) == PROGRAMS[program]
    for graph in graphs:
        assert graph["kernels"]
        assert primitives_in(graph) == []
        # A kernel that writes into views would have their whole base copied around it.
        assert not [name for name in graph["operators"] if "scatter" in name or "copy" in name or "clone" in name]
        for launch in graph["kernels"]:
            assert launch["written"], launch["name"]
            assert not READ_ONLY.intersection(launch.pop("written")), launch["name"]
            # The same grids, constants, strides and warps as outside: there kernel tests hold the values to the truth.
            outside.remove(launch)
    assert [launch["name"] for launch in outside] == UNUSED.get(program, [])


def test_numbers_that_are_one_may_be_constants(found):
    """Inductor makes every 1 a constant, which has no methods, and every float a float32."""
    assert len(found["ones"]) > 10
    assert {name: complaints for name, complaints in found["ones"].items() if complaints} == {}


def test_cuda_tensors_without_memory_or_device_are_enough(found):
    (graph,) = found["on_fake_cuda"]
    assert kernels([graph]) == [["layer_norm_fwd_kernel"]]
    assert graph["devices"] == ["cuda:0"]


@pytest.mark.parametrize("reason", OPAQUE)
def test_the_operator_stays_opaque(found, reason):
    graphs = found["opaque"][reason]
    assert graphs
    for graph in graphs:
        assert graph["kernels"] == []
        assert primitives_in(graph) == ["primitives.layer_norm.default"]


def test_graphs_are_told_apart_by_backend(found):
    """Another backend compiles anew, a third call under the first runs the first graph; so do graphs in the cache."""
    assert found["another_backend"] == [1, 0]
    assert found["cache_keys"] == [True, True, True]
