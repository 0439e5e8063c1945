"""Code of several processes: batch norm with the statistics of all of them."""

from collections.abc import Callable
from typing import Any

from primitives._core.rules import handle_with
from primitives._distributed._sync_batch_norm import sync_batch_norm

__all__ = ["sync_batch_norm"]


def _dtensor_handler() -> Callable[..., Any]:
    from primitives._distributed import _sharding

    _sharding.register()
    return _sharding.composed


# A program without DTensor does not import it.
handle_with("torch.distributed.tensor", _dtensor_handler)
