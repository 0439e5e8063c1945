"""The kernels of a map by a statistic, which are those of a map that keeps x and numbers of its rows."""

import dataclasses
import itertools

import pytest
import torch

from perf.calls import random
from primitives.kernels.rows.by_statistic import map_by_statistic
from tests.kernels.calls import ROW_PLANS
from tests.row_maps import UNIT, summand, value
from tests.support import assert_close

KERNELS = map_by_statistic("unit", summand, value, "square", ["eps"])
JVP, BWD, DOUBLE_BACKWARD, BWD_JVP, FWD, FWD_JVP = KERNELS.launchers()


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("plan", ROW_PLANS)
@pytest.mark.parametrize("shape, dim, eps", [((3, 40), 1, 0.3), ((40, 3), 0, 0.0)], ids=str)
def test_every_result_is_that_of_the_formulas(plan, shape, dim, eps, use_limits):
    use_limits(**ROW_PLANS[plan])
    x, y_bar, x_dot, y_bar_dot = (random(*shape, dtype=torch.float64, seed=seed) for seed in range(4))
    x.select(1 - dim, 1).zero_()
    ops = {name: op.overload for name, op in UNIT.ops.items()}
    found, true = FWD_JVP(x, x_dot, dim, eps), ops["fwd_jvp"](x, dim, eps, x_dot)
    square = true[1]
    pairs = [*zip(found, true, strict=True), *zip(FWD(x, dim, eps), true, strict=False)]
    pairs += [(JVP(x_dot, x, square, dim, eps), true[2])]
    pairs += [(BWD(y_bar, x, square, dim, eps), ops["bwd"](y_bar, x, square, dim, eps))]
    for output_mask in set(itertools.product((False, True), repeat=3)) - {(False,) * 3}:
        given = y_bar, x, square, x_dot, dim, eps, output_mask
        pairs += zip(DOUBLE_BACKWARD(*given), ops["double_backward"](*given), strict=True)
    for dots in ((y_bar_dot, None), (None, x_dot), (y_bar_dot, x_dot)):
        given = y_bar, x, square, *dots, dim, eps
        pairs += [(BWD_JVP(*given), ops["bwd_jvp"](*given))]
    for got, want in pairs:
        assert_close(got, want)
    assert not found[0].select(1 - dim, 1).any()


def test_rows_without_columns_sum_up_to_zero():
    y, square = FWD(torch.ones(2, 0), 1, 0.3)
    assert y.shape == (2, 0)
    assert square.tolist() == [0, 0]


def test_a_missing_device_function_is_named():
    functions = {name: function for name, function in KERNELS.functions.items() if name != "bwd_jvp_emit"}
    with pytest.raises(TypeError, match="unit_bwd_jvp_kernel needs the device functions emit: it has terms"):
        dataclasses.replace(KERNELS, functions=functions)
