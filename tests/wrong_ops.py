"""Operators with one planted fault each, and the property of `check_rules` that names it."""

from __future__ import annotations

import torch

import primitives as pr
from primitives.core import Primitive

X, WEIGHT = torch.linspace(-1.5, 2.0, 6).reshape(2, 3), torch.linspace(0.5, 1.5, 6).reshape(2, 3)


def product(name, **options):
    """x^2 * weight with rules that are right, to be spoiled: a rule that is given again replaces the first."""

    def function(x, weight):
        return x.square() * weight

    op = pr.custom_op(f"wrong::{name}", **options)(function)

    @op.def_save_for_backward
    def save(inputs, output):
        return inputs.x, inputs.weight

    @op.def_backward
    def backward(ctx, saved, y_bar):
        x, weight = saved
        return {"x": 2 * x * weight * y_bar, "weight": x.square() * y_bar}

    @op.def_jvp
    def jvp(inputs, output, tangents):
        return 2 * inputs.x * inputs.weight * tangents.x + inputs.x.square() * tangents.weight

    @op.def_vmap
    def vmap(info, in_dims, inputs):
        return op(*in_front(info, in_dims, inputs)), 0

    return op


def in_front(info, in_dims, inputs):
    """Both arguments with the batch axis in front."""
    pairs = zip(inputs[:2], in_dims[:2], strict=True)
    return [x.expand(info.batch_size, *x.shape) if axis is None else x.movedim(axis, 0) for x, axis in pairs]


def read_as_contiguous(x):
    """What a kernel sees that takes no strides."""
    memory = x.as_strided((x.untyped_storage().size() // x.element_size(),), (1,), 0)
    return memory[: x.numel()].reshape(x.shape) if memory.numel() >= x.numel() else memory[:1].expand(x.shape)


right_product = product("right_product")


@right_product.def_kernel("cpu")
def _right_kernel(x, weight):
    return x * x * weight


# Derivatives.

wrong_jvp_sign = product("wrong_jvp_sign")


@wrong_jvp_sign.def_jvp
def _wrong_sign(inputs, output, tangents):
    return 2 * inputs.x * inputs.weight * tangents.x - inputs.x.square() * tangents.weight


dropped_cotangent = product("dropped_cotangent")


@dropped_cotangent.def_backward
def _forget_weight_alone(ctx, saved, y_bar):
    x, weight = saved
    both = ctx.needs_input_grad.x
    return {"x": 2 * x * weight * y_bar, "weight": x.square() * y_bar if both else None}


nan_cotangent = product("nan_cotangent")


@nan_cotangent.def_backward
def _square_by_logarithms(ctx, saved, y_bar):
    x, weight = saved
    return {"x": 2 * x * weight * y_bar, "weight": (2 * x.log()).exp() * y_bar}


detached_jvp = product("detached_jvp")


@detached_jvp.def_jvp
def _detach(inputs, output, tangents):
    return 2 * inputs.x.detach() * inputs.weight * tangents.x + inputs.x.square() * tangents.weight


@pr.custom_op("wrong::constant_statistics", output_differentiability=(True, False))
def constant_statistics(x, weight):
    rstd = (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    return x * rstd * weight, rstd


@constant_statistics.def_save_for_backward
def _save_statistics(inputs, output):
    return inputs.x, inputs.weight, output[1]


@constant_statistics.def_backward
def _take_statistics_as_constants(ctx, saved, y_bar, _):
    x, weight, rstd = saved
    v = y_bar * weight
    x_bar = rstd * (v - x * rstd.square() * (v * x).mean(-1, keepdim=True))
    return {"x": x_bar, "weight": x * rstd * y_bar}


@pr.custom_op("wrong::fixed_eps")
def fixed_eps(x, weight, *, eps=1e-3):
    return x * weight * (x.square() + eps).rsqrt()


@fixed_eps.def_save_for_backward
def _save_without_eps(inputs, output):
    return inputs.x, inputs.weight


@fixed_eps.def_backward
def _forget_eps(ctx, saved, y_bar):
    x, weight = saved
    rstd = (x.square() + 1e-3).rsqrt()
    return {"x": y_bar * weight * rstd**3 * 1e-3, "weight": y_bar * x * rstd}


# Batching and tracers.

mixing_vmap = product("mixing_vmap")


@mixing_vmap.def_vmap
def _mix_samples(info, in_dims, inputs):
    x, weight = in_front(info, in_dims, inputs)
    return mixing_vmap(x, weight.roll(1, 0)), 0


wrong_fake_stride = product("wrong_fake_stride")


@wrong_fake_stride.def_fake
def _transposed_fake(x, weight):
    return torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device).permute(*reversed(range(x.dim())))


# Kernels.

wrong_kernel = product("wrong_kernel")


@wrong_kernel.def_kernel("cpu")
def _off_by_a_little(x, weight):
    return x.square() * (weight + 1e-3)


stride_ignoring_kernel = product("stride_ignoring_kernel")


@stride_ignoring_kernel.def_kernel("cpu")
def _ignore_strides(x, weight):
    return read_as_contiguous(x).square() * weight


times = product("times")


@times.def_kernel("cpu")
def _times_ignoring_strides(x, weight):
    return x.square() * read_as_contiguous(weight)


stride_ignoring_backward = product("stride_ignoring_backward")


@stride_ignoring_backward.def_backward
def _read_cotangent_as_contiguous(ctx, saved, y_bar):
    x, weight = saved
    return {"x": 2 * x * weight * y_bar, "weight": times(x, y_bar)}


writes_to_input = product("writes_to_input")


@writes_to_input.def_kernel("cpu")
def _write_to_input(x, weight):
    y = x.square() * weight
    weight.mul_(0.5)
    return y


nondeterministic = product("nondeterministic")


@nondeterministic.def_kernel("cpu")
def _round_at_random(x, weight):
    return x.square() * weight * (1 + torch.finfo(x.dtype).eps * torch.randint(-1, 2, x.shape))


unwritten_output = product("unwritten_output")


@unwritten_output.def_kernel("cpu")
def _leave_the_last_out(x, weight):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    y.view(-1)[:-1] = (x.square() * weight).reshape(-1)[:-1]
    return y


aliased_p = Primitive("aliased", "(Tensor x) -> Tensor y", namespace="wrong", decomposable=True)


@aliased_p.def_reference
def _copy(x):
    return x.clone(memory_format=torch.contiguous_format)


@aliased_p.def_kernel("cpu")
def _return_the_input(x):
    return x.view(x.shape)


EXPECTED = {
    wrong_kernel: "reference against kernel",
    dropped_cotangent: "gradcheck",
    nan_cotangent: "gradcheck",
    wrong_jvp_sign: "jvp against differences",
    constant_statistics: "gradgradcheck",
    detached_jvp: "nestings",
    mixing_vmap: "vmap against loop",
    stride_ignoring_backward: "cotangent layouts",
    stride_ignoring_kernel: "non-contiguous inputs",
    wrong_fake_stride: "fake against real",
    nondeterministic: "determinism",
    unwritten_output: "uninitialized outputs",
    writes_to_input: "aliasing and mutation",
    fixed_eps: "static arguments",
}
