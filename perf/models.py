"""Two small models of digits in plain torch.nn, which are measured and traced."""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGE_SIZE, NUM_CLASSES = 8, 10


class ConvBlock(nn.Module):
    """Two 3 x 3 convolutions, each batch-normalized, around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        # Batch norm takes every constant away: a bias before it would only drift on rounding errors.
        self.conv_in = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm_in = nn.BatchNorm2d(out_channels)
        self.conv_out = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm_out = nn.BatchNorm2d(out_channels)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Features `[batch, in_channels, H, W]` to `[batch, out_channels, H, W]`."""
        hidden = self.activation(self.norm_in(self.conv_in(x)))
        return self.activation(hidden + self.norm_out(self.conv_out(hidden)))


class ConvNet(nn.Module):
    """Two blocks and a linear head: images `[batch, 1, 8, 8]` to log-probabilities `[batch, 10]`."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            ConvBlock(1, channels), nn.AvgPool2d(2), ConvBlock(channels, 2 * channels), nn.AvgPool2d(2)
        )
        self.head = nn.Linear(2 * channels * (IMAGE_SIZE // 4) ** 2, NUM_CLASSES)
        self.log_softmax = nn.LogSoftmax(dim=-1)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probability of each digit."""
        return self.log_softmax(self.head(self.blocks(images).flatten(1)))


class Attention(nn.Module):
    """Multi-head self-attention, written out: torch's fused CPU attention has no forward mode in every release."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        # Softmax takes a constant away from its row, so a bias of the keys would only drift on rounding errors.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens `[batch, tokens, width]` to the same shape."""
        batch, tokens, width = x.shape
        heads = self.query_key_value(x).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.mT * (width // self.num_heads) ** -0.5, dim=-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, tokens, width))


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens `[batch, tokens, width]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nn.Module):
    """Sixteen patches through two blocks: images `[batch, 1, 8, 8]` to log-probabilities `[batch, 10]`."""

    def __init__(self, width: int = 32, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        # Patches of 4 x 4 pixels that overlap by half.
        self.embed = nn.Conv2d(1, width, 4, stride=2, padding=1)
        num_tokens = (IMAGE_SIZE // 2) ** 2
        self.positions = nn.Parameter(0.02 * torch.randn(num_tokens, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        # Every token in its place: with their mean instead, more of the held-out digits are misread.
        self.head = nn.Linear(num_tokens * width, NUM_CLASSES)
        self.log_softmax = nn.LogSoftmax(dim=-1)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probability of each digit."""
        patches = self.embed(images).flatten(2).mT + self.positions
        return self.log_softmax(self.head(self.norm(self.blocks(patches)).flatten(1)))
