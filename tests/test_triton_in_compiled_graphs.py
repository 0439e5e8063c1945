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

KERNELS = {
    "layer_norm": [["layer_norm_fwd_kernel"], ["layer_norm_bwd_kernel", "param_reduce_kernel"]],
    "batch_norm": [
        ["batch_norm_statistics_kernel", "batch_norm_statistics_merge_kernel", "batch_norm_transform_kernel"],
        ["batch_norm_product_sums_kernel", "batch_norm_product_sums_merge_kernel", "batch_norm_transform_kernel"],
    ],
    "log_softmax": [["log_softmax_fwd_kernel"], ["log_softmax_linear_kernel"]],
    "hessian-vector product": [
        [
            "layer_norm_fwd_kernel",
            "layer_norm_jvp_kernel",
            "layer_norm_bwd_kernel",
            "layer_norm_second_kernel",
            "param_reduce_kernel",
        ]
    ],
    "jvp in vmap": [["layer_norm_fwd_kernel", "layer_norm_jvp_kernel"]],
}
OPAQUE = ("symbolic sizes", "another compiler", "make_fx", "reference", "untraceable", "export")

# Launches outside of graphs whose results nobody uses: the first-order cotangent of the weight.
UNUSED = {"hessian-vector product": ["param_reduce_kernel"]}

# What a launch writes, of which a graph makes the results of a kernel.
WRITTEN = {
    "layer_norm_fwd_kernel": ["mean_ptr", "rstd_ptr", "y_ptr"],
    "layer_norm_bwd_kernel": ["bias_part_ptr", "weight_part_ptr", "x_bar_ptr"],
    "layer_norm_jvp_kernel": ["y_dot_ptr"],
    "batch_norm_statistics_kernel": ["partials_ptr"],
    "batch_norm_statistics_merge_kernel": ["mean_ptr", "new_running_mean_ptr", "new_running_var_ptr", "rstd_ptr"],
    "batch_norm_transform_kernel": ["out_ptr"],
    "batch_norm_product_sums_kernel": ["partials_ptr"],
    "batch_norm_product_sums_merge_kernel": ["bias_bar_ptr", "product_mean_ptr", "u_mean_ptr", "weight_bar_ptr"],
    "log_softmax_fwd_kernel": ["y_ptr"],
    "log_softmax_linear_kernel": ["out_ptr"],
}


@pytest.fixture(scope="module")
def found() -> dict:
    """What `compiled_graphs` printed."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PRIMITIVES_BACKEND")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.compiled_graphs"]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def kernels(graphs):
    return [[launch["name"] for launch in graph["kernels"]] for graph in graphs]


def primitives_in(graph):
    return [name for name in graph["operators"] if name.startswith("primitives.")]


@pytest.mark.parametrize("program", KERNELS)
def test_graphs_hold_kernels_and_no_primitive(found, program):
    graphs = found["programs"][program]["graphs"]
    assert [sorted(names) for names in kernels(graphs)] == [sorted(names) for names in KERNELS[program]]
    assert [primitives_in(graph) for graph in graphs] == [[]] * len(graphs)


@pytest.mark.parametrize("program", KERNELS)
def test_kernels_in_graphs_are_launched_as_outside(found, program):
    """The same grids, constants, strides and warps: the values are those that the kernel tests hold to the truth."""
    graphs, outside = found["programs"][program]["graphs"], found["programs"][program]["outside"]
    inside = [{k: v for k, v in launch.items() if k != "written"} for graph in graphs for launch in graph["kernels"]]
    rest = [json.dumps(launch, sort_keys=True) for launch in outside]
    for launch in inside:
        rest.remove(json.dumps(launch, sort_keys=True))
    assert inside
    assert [json.loads(launch)["name"] for launch in rest] == UNUSED.get(program, [])


@pytest.mark.parametrize("program", KERNELS)
def test_only_what_a_kernel_writes_is_its_result(found, program):
    for graph in found["programs"][program]["graphs"]:
        for launch in graph["kernels"]:
            expected = WRITTEN.get(launch["name"])
            if expected is not None:
                unwanted = "bias_part_ptr" if launch["arguments"].get("WANT_BIAS") is False else None
                assert launch["written"] == [name for name in expected if name != unwanted], launch["name"]


@pytest.mark.parametrize("program", KERNELS)
def test_no_scratch_is_copied(found, program):
    """A kernel that writes into views would have their whole base copied around it."""
    for graph in found["programs"][program]["graphs"]:
        assert not [name for name in graph["operators"] if "scatter" in name or "copy" in name or "clone" in name]


@pytest.mark.parametrize("program", KERNELS)
def test_running_statistics_get_what_the_kernel_wrote(found, program):
    """Without a launch for it that Inductor could not fuse."""
    forward, *others = [graph["updates"] for graph in found["programs"][program]["graphs"]]
    names = ["running_mean_ptr", "running_var_ptr"] if program == "batch_norm" else []
    assert forward == {name: f"new_{name}" for name in names}
    assert not any(others)


def test_numbers_that_are_one_may_be_constants(found):
    """Inductor makes every 1 a constant, which has no methods, and every float a float32."""
    assert len(found["ones"]) > 20
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


def test_another_backend_compiles_anew_and_is_remembered(found):
    """A third call under the first backend runs the first graph again."""
    assert found["another_backend"] == [1, 0]


def test_cached_graphs_are_told_apart_by_backend(found):
    single, same, other = found["cache_keys"]
    assert single
    assert same
    assert other
