"""Functional API: the signatures, defaults and errors of `torch.nn.functional`, over tensors and pytrees of tensors.

Each function is differentiable in forward and reverse mode to any order, under every transform of `torch.func`,
`torch.autograd.forward_ad`, and `torch.compile`. A `PyTree` is a tensor or a pytree of tensors; a `Prefix` is a tensor,
or a tree prefix of it.
"""

from __future__ import annotations

import torch

from primitives.ops.attention.functions import attention, scaled_dot_product_attention
from primitives.ops.dropout.dropout import dropout
from primitives.ops.losses.functions import cross_entropy, linear_cross_entropy, nll_loss
from primitives.ops.norms.add_layer_norm import add_layer_norm, add_rms_norm
from primitives.ops.norms.batch_norm_functions import BatchNormOutput, batch_norm, batch_norm_relu, pure_batch_norm
from primitives.ops.norms.group_norm import group_norm, instance_norm
from primitives.ops.norms.layer_norm import ada_layer_norm, layer_norm, rms_norm
from primitives.ops.softmax.log_softmax import log_softmax
from primitives.ops.softmax.softmax import softmax, softmin

__all__ = [
    "BatchNormOutput",
    "ada_layer_norm",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "batch_norm",
    "batch_norm_relu",
    "cross_entropy",
    "dropout",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "nll_loss",
    "pure_batch_norm",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
    "softmin",
]

# torch.fx records a call of these as one node. It swaps the names of this module while it traces, at no cost else.
for _name in __all__[1:]:
    torch.fx.wrap(_name)
