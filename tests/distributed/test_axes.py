"""The axes along which a call of a primitive may be cut: parts give parts of the results, or terms of their sums."""

import pytest
import torch

from perf.ops import CASES
from primitives._core import registered_primitives
from tests.properties import second_order, with_parts
from tests.support import assert_close


def cut(x, axes, axis, part):
    if x is None or axis not in axes:
        return x
    at = axes.index(axis)
    return x.tensor_split(2, at)[part]


def in_parts(op, call, axes, axis):
    """Results of a call, of those of its parts."""
    names = op.spec.arguments
    given = [(value, axes.inputs.get(name, ())) for name, value in zip(names, call.args, strict=True)]
    found = [call.outputs([cut(value, of, axis, part) for value, of in given]) for part in range(2)]
    for first, second, kinds in zip(*found, axes.outputs, strict=True):
        if kinds is None:
            yield first
        elif axis in kinds:
            yield torch.cat([first, second], kinds.index(axis))
        else:
            yield first + second


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_of_a_call_give_parts_or_terms_of_its_results(case):
    ops, tried = registered_primitives(), set()
    for sample in (case.small, *case.samples[:2]):
        _, calls = second_order(case, sample, torch.float64, torch.device("cpu"), case.perturbable(sample))
        for call in with_parts(case, calls):
            op = ops[call.overload._schema.name]
            axes = op.rule("axes")(call.args)
            whole = call.outputs()
            sizes = {}
            for name, names in axes.inputs.items():
                sizes.update(zip(names, call.argument(name).shape, strict=True))
            for y, names in zip(whole, axes.outputs, strict=True):
                assert names is None or list(y.shape) == [sizes.get(name, 1) for name in names], (call, names)
            for axis in axes.free:
                if sizes.get(axis, 0) < 2:
                    continue
                tried.add(axis)
                for i, (y, of_parts) in enumerate(zip(whole, in_parts(op, call, axes, axis), strict=True)):
                    assert_close(of_parts, y, order=2, what=f"{call}, output {i}, along {axis}")
    assert tried or case.name in ("dropout",)
