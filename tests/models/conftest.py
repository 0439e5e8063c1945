"""Runs before a library is imported."""

import importlib.util

import torch

# A torchvision that was built for another build of torch cannot load its operators, and then raises for this one as it
# is imported, by timm and transformers. No model here calls it.
if importlib.util.find_spec("torchvision") is not None:
    try:
        import torchvision  # noqa: F401 - only to see whether it loads
    except RuntimeError:
        _operators = torch.library.Library("torchvision", "FRAGMENT")
        for _name in ("nms", "qnms"):
            _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
