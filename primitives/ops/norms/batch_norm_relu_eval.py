"""Batch norm by running statistics, a residual and ReLU, after the formulas of `batch_norm_relu.py`."""

from __future__ import annotations

from primitives._core import Primitive
from primitives.ops.norms import cpu_batch_norm_eval as cpu
from primitives.ops.norms.batch_norm_eval import batch_norm_eval_bwd_p, batch_norm_eval_jvp_p, batch_norm_eval_p
from primitives.ops.norms.batch_norm_relu import bwd_by, forward_by, jvp_by
from primitives.ops.rules import batch_all, bind_kernels, first_order

batch_norm_relu_eval_p = Primitive(
    "batch_norm_relu_eval",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var,"
    " int batch_ndim, float eps) -> Tensor y",
    residuals=("x", "weight", "running_mean", "running_var", "y"),
    recomputable=True,
)
batch_norm_relu_eval_bwd_p = Primitive(
    "batch_norm_relu_eval_bwd",
    "(Tensor y_bar, Tensor y, Tensor x, Tensor? weight, Tensor running_mean, Tensor running_var, int batch_ndim,"
    " float eps, bool[] wanted) -> (Tensor x_bar, Tensor residual_bar, Tensor weight_bar, Tensor bias_bar,"
    " Tensor running_mean_bar, Tensor running_var_bar)",
    decomposable=True,
)
batch_norm_relu_eval_jvp_p = Primitive(
    "batch_norm_relu_eval_jvp",
    "(Tensor y, Tensor x, Tensor? weight, Tensor running_mean, Tensor running_var, Tensor? x_dot,"
    " Tensor? residual_dot, Tensor? weight_dot, Tensor? bias_dot, Tensor? running_mean_dot, Tensor? running_var_dot,"
    " int batch_ndim, float eps) -> Tensor y_dot",
    decomposable=True,
)

# References, made of the norm's, and kernels: Triton's and those for the CPU.

batch_norm_relu_eval_p.def_reference(forward_by(batch_norm_eval_p.rule("reference"), 4))
batch_norm_relu_eval_bwd_p.def_reference(bwd_by(batch_norm_eval_bwd_p.rule("reference")))
batch_norm_relu_eval_jvp_p.def_reference(jvp_by(batch_norm_eval_jvp_p.rule("reference")))

_ON_CPU = forward_by(cpu.forward, 4, in_place=True)
bind_kernels(batch_norm_relu_eval_p, "batch_norm.batch_norm", "batch_norm_eval_fwd", _ON_CPU, relu=True)
bind_kernels(batch_norm_relu_eval_bwd_p, "batch_norm.batch_norm", "batch_norm_eval_bwd", bwd_by(cpu.bwd))
bind_kernels(batch_norm_relu_eval_jvp_p, "batch_norm.batch_norm", "batch_norm_eval_jvp", jvp_by(cpu.jvp))


# Derivatives.

first_order(batch_norm_relu_eval_p, batch_norm_relu_eval_bwd_p, batch_norm_relu_eval_jvp_p)


# Batching: the batch multiplies the channels.

batch_all(batch_norm_relu_eval_p, batch_norm_relu_eval_bwd_p, batch_norm_relu_eval_jvp_p, counter="batch_ndim")
