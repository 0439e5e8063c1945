"""Two small models of digits in plain torch.nn, which are measured and traced: images `[batch, 1, 8, 8]` to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGE_SIZE, NUM_CLASSES = 8, 10


class Residual(nn.Module):
    """Two 3 x 3 convolutions, each batch-normalized, around a shortcut."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        # Batch norm takes every constant away: a bias before it would only drift on rounding errors.
        self.first = nn.Sequential(nn.Conv2d(in_channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.last = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Features `[batch, in_channels, H, W]` to `[batch, channels, H, W]`."""
        hidden = self.activation(self.first(x))
        return self.activation(hidden + self.last(hidden))


class ConvNet(nn.Sequential):
    """Two blocks and a linear head."""

    def __init__(self, channels: int = 16) -> None:
        blocks = [Residual(1, channels), nn.AvgPool2d(2), Residual(channels, 2 * channels), nn.AvgPool2d(2)]
        head = nn.Linear(2 * channels * (IMAGE_SIZE // 4) ** 2, NUM_CLASSES)
        super().__init__(*blocks, nn.Flatten(), head, nn.LogSoftmax(dim=-1))


class VisionTransformer(nn.Module):
    """Sixteen patches of 4 x 4 pixels, which overlap by half, through two blocks of torch's own."""

    def __init__(self, width: int = 32, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 4, stride=2, padding=1)
        self.positions = nn.Parameter(0.02 * torch.randn((IMAGE_SIZE // 2) ** 2, width))
        block = nn.TransformerEncoderLayer(
            width, num_heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(self.positions.numel(), NUM_CLASSES), nn.LogSoftmax(dim=-1))

    def forward(self, images: Tensor) -> Tensor:
        """Log-probability of each digit, `[batch, 10]`."""
        return self.head(self.blocks(self.embed(images).flatten(2).mT + self.positions))
