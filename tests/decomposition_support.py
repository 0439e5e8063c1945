"""Shared by the tests of the decompositions."""

import torch

DOUBLE = {"dtype": torch.float64}


def randn(*shape):
    """Normal numbers in float64."""
    return torch.randn(shape, **DOUBLE)


def plain_layer_norm(x, eps=1e-2):
    """Layer norm over the last axis by the formula."""
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
