"""Drop-in modules: subclasses of those of `torch.nn`, with the same arguments, state and behavior."""

from primitives.nn._convert import convert, converted, register_converter, revert
from primitives.nn._modules import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    ConversionWarning,
    CrossEntropyLoss,
    Dropout,
    LayerNorm,
    LogSoftmax,
    MultiheadAttention,
    NLLLoss,
    RMSNorm,
    Softmax,
    Softmax2d,
    Softmin,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "ConversionWarning",
    "CrossEntropyLoss",
    "Dropout",
    "LayerNorm",
    "LogSoftmax",
    "MultiheadAttention",
    "NLLLoss",
    "RMSNorm",
    "Softmax",
    "Softmax2d",
    "Softmin",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "convert",
    "converted",
    "register_converter",
    "revert",
]
