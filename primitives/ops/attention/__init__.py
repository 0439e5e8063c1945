"""Attention; importing the package registers its primitives."""

from primitives.ops.attention import attention as attention
