"""Operators with one planted fault each, and the property of `check_rules` that names it."""

import torch
from torch._guards import TracingContext

import primitives as pr
from primitives._core import Primitive

X, WEIGHT = torch.linspace(-1.5, 2.0, 6).reshape(2, 3), torch.linspace(0.5, 1.5, 6).reshape(2, 3)
LARGEST = torch.iinfo(torch.int64).max
BLOCKS = {2: 16, 3: 32}


def right_backward(ctx, saved, y_bar):
    x, weight = saved
    weight_bar = x.square().conj() * y_bar
    return {"x": 2 * (x * weight).conj() * y_bar, "weight": weight_bar if weight.is_complex() else weight_bar.real}


def right_jvp(inputs, output, tangents):
    return 2 * inputs.x * inputs.weight * tangents.x + inputs.x.square() * tangents.weight


def in_front(info, in_dims, inputs):
    """Both arguments with the batch axis in front."""
    pairs = zip(inputs[:2], in_dims[:2], strict=True)
    return [x.expand(info.batch_size, *x.shape) if axis is None else x.movedim(axis, 0) for x, axis in pairs]


def product(name, *, backward=right_backward, jvp=right_jvp, vmap=None, front=in_front, fake=None, kernel=None):
    """x^2 * weight, by rules that are right but for those that are given; a vmap rule makes the batched result."""

    @pr.custom_op(f"wrong::{name}")
    def op(x, weight):
        return x.square() * weight

    op.def_vmap(lambda info, in_dims, inputs: ((vmap or op)(*front(info, in_dims, inputs)), 0))
    op.def_jvp(jvp)
    if backward is not None:
        op.def_save_for_backward(lambda inputs, output: (inputs.x, inputs.weight))
        op.def_backward(backward)
    if fake is not None:
        op.def_fake(fake)
    if kernel is not None:
        op.def_kernel("cpu")(kernel)
    return op


def read_as_contiguous(x):
    """As a kernel sees it that takes no strides."""
    memory = x.as_strided((x.untyped_storage().size() // x.element_size(),), (1,), 0)
    return memory[: x.numel()].reshape(x.shape) if memory.numel() >= x.numel() else memory[:1].expand(x.shape)


def wrong_sign(inputs, output, tangents):
    return 2 * inputs.x * inputs.weight * tangents.x - inputs.x.square() * tangents.weight


def detach_x(inputs, output, tangents):
    return 2 * inputs.x.detach() * inputs.weight * tangents.x + inputs.x.square() * tangents.weight


def forget_to_conjugate(ctx, saved, y_bar):
    x, weight = saved
    return {**right_backward(ctx, saved, y_bar), "x": 2 * x * weight * y_bar}


def of_another_cotangent(change):
    """The right rule, for a cotangent that is changed first."""
    return lambda ctx, saved, y_bar: right_backward(ctx, saved, change(y_bar))


def take_stride_zero_for_ones(y_bar):
    ones = y_bar.dim() and y_bar.numel() > 1 and not any(y_bar.stride())
    return torch.ones_like(y_bar) if ones else y_bar


def right_in_double_precision(y_bar):
    return y_bar if y_bar.dtype is torch.float64 else 1.1 * y_bar


def wrong_sign_where(condition):
    return lambda inputs, output, tangents: (wrong_sign if condition(inputs.x) else right_jvp)(inputs, output, tangents)


def forget_weight_alone(ctx, saved, y_bar):
    return right_backward(ctx, saved, y_bar) if ctx.needs_input_grad.x else {"x": None, "weight": None}


def weight_bar_by_a_kernel_without_strides(ctx, saved, y_bar):
    return {**right_backward(ctx, saved, y_bar), "weight": stride_ignoring_times(saved[0], y_bar)}


def ignore_strides(x, weight):
    return torch.empty_like(x).copy_(read_as_contiguous(x).square() * weight)


def round_at_random(x, weight):
    return x.square() * weight * (1 + torch.finfo(x.dtype).eps * torch.randint(-1, 2, x.shape))


def take_every_axis_for_the_first(info, in_dims, inputs):
    return in_front(info, [None if axis is None else 0 for axis in in_dims], inputs)


def leave_the_last_out(x, weight):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    y.view(-1)[:-1] = (x.square() * weight).reshape(-1)[:-1]
    return y


def depend_on_unwritten_memory(x, weight):
    y = x.square() * weight
    y[torch.empty(x.shape, dtype=torch.int64) == LARGEST] = float("nan")
    return y


@pr.custom_op("wrong::forgets_none", materialize=False)
def forgets_none(x, weight):
    return x * weight, x.square()


forgets_none.def_save_for_backward(lambda inputs, output: (inputs.x, inputs.weight))


@forgets_none.def_backward
def _take_none_for_no_derivative(ctx, saved, product_bar, square_bar):
    x, weight = saved
    if product_bar is None:
        return {"x": None, "weight": None}
    more = 0 if square_bar is None else 2 * x * square_bar
    return {"x": weight * product_bar + more, "weight": x * product_bar}


@pr.custom_op("wrong::constant_statistics", output_differentiability=(True, False))
def constant_statistics(x, weight):
    rstd = (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    return x * rstd * weight, rstd


constant_statistics.def_save_for_backward(lambda inputs, output: (inputs.x, inputs.weight, output[1]))


@constant_statistics.def_backward
def _take_statistics_as_constants(ctx, saved, y_bar, _):
    x, weight, rstd = saved
    v = y_bar * weight
    x_bar = rstd * (v - x * rstd.square() * (v * x).mean(-1, keepdim=True))
    return {"x": x_bar, "weight": x * rstd * y_bar}


@pr.custom_op("wrong::gathered")
def gathered(x, index):
    return x.index_select(0, index)


@gathered.def_vmap
def _index_of_the_first_sample(info, in_dims, inputs):
    x, index = in_front(info, in_dims, inputs)
    return x.index_select(1, index[0]), 0


def power(name, wrong):
    """An operator with static arguments, and a rule with a constant in the place of those that `wrong` names."""

    @pr.custom_op(f"wrong::powers_{name}")
    def op(x, weight, *, power=2.0, scales=(1, 0.5), negate=False):
        y = scales[0] * x.abs() ** power * weight + scales[1] * x
        return -y if negate else y

    def backward(ctx, saved, y_bar):
        x, weight = saved
        static = {**ctx.static._asdict(), **wrong}
        power, scales, sign = static["power"], static["scales"], -1 if static["negate"] else 1
        x_bar = scales[0] * power * x.abs() ** (power - 1) * x.sign() * weight + scales[1]
        return {"x": sign * x_bar * y_bar, "weight": sign * scales[0] * x.abs() ** power * y_bar}

    op.def_save_for_backward(lambda inputs, output: (inputs.x, inputs.weight))
    op.def_backward(backward)
    return op


stride_ignoring_times = product("times", kernel=lambda x, weight: x.square() * read_as_contiguous(weight))

aliased_p = Primitive("aliased", "(Tensor x) -> Tensor y", namespace="wrong", decomposable=True)
aliased_p.def_reference(lambda x: x.clone(memory_format=torch.contiguous_format))
aliased_p.def_kernel("cpu")(lambda x: x.view(x.shape))

right_product = product("right_product", kernel=lambda x, weight: x * x * weight)
unconjugated = product("unconjugated", backward=forget_to_conjugate)

# One for each property that no other property notices.
ALONE = {
    product("kernel", kernel=lambda x, weight: x.square() * (weight + 1e-3)): "reference against kernel",
    product("alone", backward=forget_weight_alone): "gradcheck",
    product("sign", backward=None, jvp=wrong_sign): "jvp against differences",
    # A constant that was rounded to float32.
    product("constant", backward=of_another_cotangent(lambda y_bar: y_bar * (1 + 3e-8))): "transpose identity",
    product("detached_cotangent", backward=of_another_cotangent(torch.Tensor.detach)): "nestings",
    product("detached_jvp", jvp=detach_x): "nestings",
    constant_statistics: "nestings",
    product("bfloat16", backward=of_another_cotangent(right_in_double_precision)): "derivatives by dtype",
    product("bfloat16_jvp", jvp=wrong_sign_where(lambda x: x.dtype is not torch.float64)): "derivatives by dtype",
    product("front_axis_alone", front=take_every_axis_for_the_first): "vmap against loop",
    product("stride_zero", backward=of_another_cotangent(take_stride_zero_for_ones)): "cotangent layouts",
    product("strides", kernel=ignore_strides, vmap=lambda x, weight: x.square() * weight): "non-contiguous inputs",
    product("detached_vmap", vmap=lambda x, weight: x.detach().square() * weight): "derivatives under vmap",
    product("fake", fake=lambda x, weight: x.new_empty(x.shape)): "fake against real",
    product("sizes", fake=lambda x, weight: torch.empty_like(x) if BLOCKS.get(x.shape[0], 64) else x): "opcheck",
    product("compiled", jvp=wrong_sign_where(lambda x: TracingContext.try_get() is not None)): "compile against eager",
    product("random", kernel=round_at_random): "determinism",
    product("unwritten", kernel=depend_on_unwritten_memory): "uninitialized outputs",
    product("clamped", kernel=lambda x, weight: x * x * weight.contiguous().clamp_(min=-9.0)): "aliasing and mutation",
    power("alone", {"power": 2.0}): "static arguments",
}
# Others notice these too.
OTHERS = {
    forgets_none: "gradcheck",
    product("kernel_of_backward", backward=weight_bar_by_a_kernel_without_strides): "cotangent layouts",
    product("last", kernel=leave_the_last_out): "uninitialized outputs",
    aliased_p: "aliasing and mutation",
}
