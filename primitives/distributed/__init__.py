"""What runs in several processes: batch norm with the statistics of all of them."""

from primitives.distributed._training import sync_batch_norm

__all__ = ["sync_batch_norm"]
