"""Operators that are wrong for some dtypes, sizes, static arguments or batches alone; continues `wrong_ops`."""

from __future__ import annotations

import enum

import torch

import primitives as pr
from tests.wrong_ops import in_front, product


@pr.custom_op("wrong::backward_kernel")
def backward_kernel(x, weight, y_bar):
    return 2 * x * weight * y_bar, x.square() * y_bar


@backward_kernel.def_kernel("cpu")
def _right_in_double_precision_alone(x, weight, y_bar):
    factor = 2.0 if x.dtype is torch.float64 else 2.2
    return factor * x * weight * y_bar, x.square() * y_bar


# What is differentiated twice differentiates the rule, so the kernel of it has rules too.
@backward_kernel.def_autograd
def _reference_of_backward(x, weight, y_bar):
    if x.dtype is torch.float64:
        return 2 * x * weight * y_bar, x.square() * y_bar
    return backward_kernel.below_autograd(x, weight, y_bar)


wrong_low_precision = product("wrong_low_precision")


@wrong_low_precision.def_backward
def _by_kernel(ctx, saved, y_bar):
    x_bar, weight_bar = backward_kernel(*saved, y_bar)
    return {"x": x_bar, "weight": weight_bar}


wrong_low_precision_jvp = product("wrong_low_precision_jvp")


@wrong_low_precision_jvp.def_jvp
def _sign_in_double_precision_alone(inputs, output, tangents):
    sign = 1 if inputs.x.dtype is torch.float64 else -1
    return 2 * inputs.x * inputs.weight * tangents.x + sign * inputs.x.square() * tangents.weight


detached_vmap = product("detached_vmap")


@detached_vmap.def_vmap
def _detach_samples(info, in_dims, inputs):
    x, weight = in_front(info, in_dims, inputs)
    return x.detach().square() * weight, 0


front_axis_alone = product("front_axis_alone")


@front_axis_alone.def_vmap
def _take_every_axis_for_the_first(info, in_dims, inputs):
    pairs = zip(inputs[:2], in_dims[:2], strict=True)
    return front_axis_alone(*[x.expand(info.batch_size, *x.shape) if axis is None else x for x, axis in pairs]), 0


@pr.custom_op("wrong::forgets_none", materialize=False)
def forgets_none(x, weight):
    return x * weight, x.square()


@forgets_none.def_save_for_backward
def _save_both(inputs, output):
    return inputs.x, inputs.weight


@forgets_none.def_backward
def _take_none_for_no_derivative(ctx, saved, product_bar, square_bar):
    x, weight = saved
    if product_bar is None:
        return {"x": None, "weight": None}
    more = 0 if square_bar is None else 2 * x * square_bar
    return {"x": weight * product_bar + more, "weight": x * product_bar}


constant_cotangent = product("constant_cotangent")


@constant_cotangent.def_backward
def _take_stride_zero_for_ones(ctx, saved, y_bar):
    x, weight = saved
    if y_bar.dim() and y_bar.numel() > 1 and not any(y_bar.stride()):
        y_bar = torch.ones_like(y_bar)
    return {"x": 2 * x * weight * y_bar, "weight": x.square() * y_bar}


fixed_fake = product("fixed_fake")


@fixed_fake.def_fake
def _shape_as_a_number(x, weight):
    if x.dim() == 2:
        return torch.empty((2, 3) if x.stride() == (3, 1) else (3, 2), dtype=x.dtype).reshape(2, 3)
    return torch.empty_like(x)


@pr.custom_op("wrong::fixed_power")
def fixed_power(x, weight, *, power=2, scales=(1.0, 0.5), negate=False):
    y = scales[0] * x**power * weight + scales[1] * x
    return -y if negate else y


@fixed_power.def_save_for_backward
def _save_for_power(inputs, output):
    return inputs.x, inputs.weight


@fixed_power.def_backward
def _forget_power(ctx, saved, y_bar):
    return power_backward(ctx, saved, y_bar, power=2)


def power_backward(ctx, saved, y_bar, *, power=None, scales=None, negate=None):
    """The rule of `fixed_power`, with constants in the place of its static arguments."""
    x, weight = saved
    power = ctx.static.power if power is None else power
    scales = ctx.static.scales if scales is None else scales
    sign = -1 if (ctx.static.negate if negate is None else negate) else 1
    x_bar = scales[0] * power * x ** (power - 1) * weight + scales[1]
    return {"x": sign * x_bar * y_bar, "weight": sign * scales[0] * x**power * y_bar}


@pr.custom_op("wrong::gathered")
def gathered(x, index):
    return x.index_select(0, index)


@gathered.def_vmap
def _index_of_the_first_sample(info, in_dims, inputs):
    x, index = in_front(info, in_dims, inputs)
    return x.index_select(1, index[0]), 0


def holomorphic(name):
    """x^2 * weight of complex numbers, with a backward rule that forgets to conjugate."""

    def function(x, weight):
        return x.square() * weight

    op = pr.custom_op(f"wrong::{name}")(function)

    @op.def_save_for_backward
    def save(inputs, output):
        return inputs.x, inputs.weight

    @op.def_backward
    def backward(ctx, saved, y_bar):
        x, weight = saved
        weight_bar = x.square().conj() * y_bar
        return {
            "x": 2 * x * weight * y_bar,
            "weight": weight_bar if weight.is_complex() else weight_bar.real,
        }

    return op


unconjugated = holomorphic("unconjugated")

right_complex = holomorphic("right_complex")


@right_complex.def_backward
def _conjugate(ctx, saved, y_bar):
    x, weight = saved
    weight_bar = x.square().conj() * y_bar
    return {
        "x": 2 * (x * weight).conj() * y_bar,
        "weight": weight_bar if weight.is_complex() else weight_bar.real,
    }


@right_complex.def_jvp
def _complex_jvp(inputs, output, tangents):
    return 2 * inputs.x * inputs.weight * tangents.x + inputs.x.square() * tangents.weight


@right_complex.def_vmap
def _complex_vmap(info, in_dims, inputs):
    return right_complex(*in_front(info, in_dims, inputs)), 0


class Mode(enum.Enum):
    """A static argument that does not print as code."""

    SQUARE = 1


@pr.custom_op("wrong::with_mode")
def with_mode(x, weight, *, mode, dtype=None, other=None):
    return x.square() * weight


@with_mode.def_kernel("cpu")
def _add_one(x, weight, *, mode, dtype=None, other=None):
    return x.square() * weight + 1


EXPECTED = {
    forgets_none: "gradcheck",
    wrong_low_precision: "derivatives by dtype",
    wrong_low_precision_jvp: "derivatives by dtype",
    detached_vmap: "derivatives under vmap",
    front_axis_alone: "vmap against loop",
    constant_cotangent: "cotangent layouts",
    fixed_fake: "fake against real",
    fixed_power: "static arguments",
}
