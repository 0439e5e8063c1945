"""Torch's own decompositions of operators whose nested derivatives raise or are wrong otherwise."""

import torch
from torch import _decomp

from primitives.core.decomposition import register_decomposition

aten = torch.ops.aten

# Right in every nesting to order 3, by `perf.torch_derivatives`.
for _operator in (
    aten._safe_softmax.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.glu.default,
    aten.grid_sampler_2d.default,
    aten.hardsigmoid.default,
    aten.linalg_vector_norm.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
    aten.native_dropout_backward.default,
    aten.soft_margin_loss.default,
):
    register_decomposition(_operator)(_decomp.decomposition_table[_operator])
