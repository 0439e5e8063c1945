"""Drop-in modules: subclasses of those of `torch.nn`, with the same arguments, state and behavior."""

from primitives.nn._convert import convert, convert_sync_batchnorm, converted, register_converter, revert
from primitives.nn._modules import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    CrossEntropyLoss,
    Dropout,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    LogSoftmax,
    NLLLoss,
    RMSNorm,
    Softmax,
    Softmax2d,
    Softmin,
)
from primitives.nn._sync_batch_norm import SyncBatchNorm

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CrossEntropyLoss",
    "Dropout",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LogSoftmax",
    "NLLLoss",
    "RMSNorm",
    "Softmax",
    "Softmax2d",
    "Softmin",
    "SyncBatchNorm",
    "convert",
    "convert_sync_batchnorm",
    "converted",
    "register_converter",
    "revert",
]
