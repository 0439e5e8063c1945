"""Batching: vmap over every subset of arguments equals the loop, for the ops and their derivative primitives."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from tests.op_cases import CASES
from tests.properties import (
    BATCH,
    alone_and_together,
    batched,
    check_vmap,
    check_vmap_of_call,
    recorded_calls,
)
from tests.support import LAYOUTS, assert_close, like, subsets

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_axis = pytest.mark.parametrize("axis", [0, -1], ids=["first", "last"])


@functools.cache
def calls(case, device, absent=()):
    """Every call of a primitive that the op and its derivatives make, one per subset of perturbed arguments."""
    sample = dataclasses.replace(case.small, absent=(*case.small.absent, *absent))
    return recorded_calls(case, sample, case.inputs(sample, torch.float64, device), every_subset=True)


@every_axis
@every_case
def test_op_over_every_subset_of_arguments(case, axis, device):
    for call in calls(case, device):
        if call.overload is case.forward.overload:
            check_vmap_of_call(call, axis, subsets(range(len(call.tensors))))


@every_axis
@every_case
def test_derivative_primitives_over_every_subset_of_arguments(case, axis, device):
    """The calls that perturb everything."""
    for primitive in (case.bwd, case.jvp):
        call = max(
            (c for c in calls(case, device) if c.overload is primitive.overload),
            key=lambda c: (len(c.tensors), sum(c.argument("wanted")) if "wanted" in c.names else 0),
        )
        check_vmap_of_call(call, axis, subsets(range(len(call.tensors))))


@every_case
def test_derivative_primitives_for_every_mask(case, device):
    """Each subset of wanted cotangents and of present tangents, batched over each argument alone and over all."""
    for call in calls(case, device):
        check_vmap_of_call(call, 0, alone_and_together(call))


@every_case
def test_absent_arguments(case, device):
    """Without parameters there are fewer tensors that could carry the batch axis."""
    optional = [name for name in case.arguments if any(name in sample.absent for sample in case.samples)]
    if not optional:
        pytest.skip(f"{case.name} has no optional argument")
    for absent in [("bias",), ("weight",), ("weight", "bias"), tuple(optional)]:
        for call in calls(case, device, absent):
            check_vmap_of_call(call, 0, alone_and_together(call))


@every_case
def test_vmap_of_vmap_over_every_pair_of_subsets(case, device):
    """The inner and the outer level batch different arguments, some of them both."""
    inputs = case.inputs(case.small, torch.float64, device)
    names = case.differentiable
    values = [inputs[name] for name in names]
    function = case.of(names, inputs, case.small)
    for inner in subsets(range(len(names))):
        for outer in list(subsets(range(len(names))))[::2]:
            twice = [batched(v, 0) if i in inner else v for i, v in enumerate(values)]
            twice = [batched(v, 1) if i in outer else v for i, v in enumerate(twice)]
            inner_dims = tuple(0 if i in inner else None for i in range(len(names)))
            outer_dims = tuple(1 if i in inner and i in outer else 0 if i in outer else None for i in range(len(names)))
            # Arguments that only the outer level batches have one axis more, at the front.
            twice = [v.movedim(1, 0) if i in outer and i not in inner else v for i, v in enumerate(twice)]
            actual = vmap(vmap(function, inner_dims), outer_dims)(*twice)
            for row in range(BATCH):
                selected = [v if d is None else v.select(d, row) for v, d in zip(twice, outer_dims, strict=True)]
                for column in range(BATCH):
                    single = [v if d is None else v[column] for v, d in zip(selected, inner_dims, strict=True)]
                    assert_close(actual[row, column], function(*single), what=f"inner {inner}, outer {outer}")


@every_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_batched_arguments(case, layout, device):
    """The batch axis anywhere in memory, expanded too."""
    sample = dataclasses.replace(case.small, layout=layout)
    inputs = case.inputs(sample, torch.float32, device)
    stack = case.inputs(dataclasses.replace(sample, shape=(*sample.shape, BATCH)), torch.float32, device)["x"]
    actual = vmap(case.of(["x"], inputs, sample), -1, -1)(stack)
    rows = [case.of(["x"], inputs, sample)(x) for x in stack.unbind(-1)]
    assert_close(actual, torch.stack(rows, -1))


def losses(case, inputs, y_bar):
    function = case.of(case.differentiable, inputs, case.small)
    return lambda *values: (function(*values) * y_bar).sum()


@every_case
def test_vmap_of_transforms_over_every_subset_of_arguments(case, device):
    """Per-sample gradients, per-sample parameters, batched tangents: each transform under vmap equals its loop."""
    inputs = case.inputs(case.small, torch.float64, device)
    values = [inputs[name] for name in case.differentiable]
    y_bar = like(inputs["x"], seed=5)
    argnums = tuple(range(len(values)))
    gradient = grad(losses(case, inputs, y_bar), argnums)
    dots = tuple(like(v, seed=8 + i) for i, v in enumerate(values))
    function = case.of(case.differentiable, inputs, case.small)

    def tangent(*values):
        return (jvp(function, values, dots)[1],)

    def hessian_product(*values):
        return jvp(gradient, values, dots)[1]

    for positions in subsets(argnums):
        check_vmap(gradient, values, positions, 0, "grad")
        check_vmap(tangent, values, positions, 0, "jvp")
        check_vmap(hessian_product, values, positions, 0, "jvp of grad")


@every_case
def test_transforms_of_vmap(case, device):
    """The derivative of a batched call is the batch of derivatives."""
    inputs = case.inputs(case.small, torch.float64, device)
    function = case.of(["x"], inputs, case.small)
    stack = batched(inputs["x"], 0)
    y_bar, x_dot = like(stack, seed=5), like(stack, seed=6)
    (x_bar,) = vjp(vmap(function), stack)[1](y_bar)
    _, y_dot = jvp(vmap(function), (stack,), (x_dot,))
    for i in range(BATCH):
        assert_close(x_bar[i], vjp(function, stack[i])[1](y_bar[i])[0], what="vjp of vmap")
        assert_close(y_dot[i], jvp(function, (stack[i],), (x_dot[i],))[1], what="jvp of vmap")


@every_case
def test_batches_of_tangents_and_cotangents(case, device):
    """One primal with many tangents or cotangents, as Jacobians take them."""
    inputs = case.inputs(case.small, torch.float64, device)
    names = case.differentiable
    function, primals = case.of(names, inputs, case.small), tuple(inputs[name] for name in names)
    for i in range(len(names)):
        forward, reverse = jacfwd(function, i)(*primals), jacrev(function, i)(*primals)
        assert_close(forward, reverse, what=f"Jacobian in {names[i]}")


@every_case
def test_empty_and_chunked_batches(case, device):
    inputs = case.inputs(case.small, torch.float64, device)
    function = case.of(["x"], inputs, case.small)
    stack = torch.cat([batched(inputs["x"], 0)] * 2)
    assert_close(vmap(function, chunk_size=3)(stack), vmap(function)(stack))
    x = inputs["x"]
    assert vmap(function)(x.new_empty(0, *x.shape)).shape == (0, *x.shape)
