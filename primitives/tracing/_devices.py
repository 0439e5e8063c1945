"""Tracing for a CUDA device that this machine lacks.

Autograd asks the driver for the stream of every CUDA tensor, fake ones too. Where there is none, tensors on the device
`"meta"` stand in, and the finished graph is moved to the device that was meant.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from primitives.core.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

__all__ = ["missing_device", "moved", "standing_in", "trace_context"]

STAND_IN = torch.device("meta")


def missing_device(devices: Sequence[torch.device]) -> torch.device | None:
    """The CUDA device among these that is not there, if one is not.

    Raises:
        DeviceError: If several are not, or tensors on `"meta"` are among the inputs as well.
    """
    if torch.cuda.is_available():
        return None
    missing = {_indexed(device) for device in devices if device.type == "cuda"}
    if len(missing) > 1 or (missing and any(device.type == "meta" for device in devices)):
        raise DeviceError(
            "trace_joint: without a GPU, one CUDA device can be traced for, with no primal on meta beside it, got "
            f"{', '.join(sorted({str(device) for device in devices}))}."
        )
    return missing.pop() if missing else None


def _indexed(device: torch.device) -> torch.device:
    return torch.device(device.type, device.index or 0)


class standing_in(TorchFunctionMode):  # noqa: N801 - used like a function, as torch.no_grad is
    """Context in which what asks for a missing CUDA device gets the stand-in."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Replace devices among the arguments."""
        if func is torch.Tensor.cuda:
            func, args, kwargs = torch.Tensor.to, (args[0], STAND_IN), {}
        return func(*map_aggregate(args, _replaced), **map_aggregate(kwargs or {}, _replaced))  # type: ignore[arg-type] - containers of anything


def _replaced(value: Any) -> Any:
    is_device = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    )
    return STAND_IN if is_device else value


def trace_context(device: torch.device | None) -> contextlib.AbstractContextManager:
    """The context to trace in for a device that is missing, or for none."""
    return contextlib.nullcontext() if device is None else standing_in()


def moved(module: fx.GraphModule, device: torch.device) -> None:
    """Move a graph from the stand-in to `device`, the descriptions of its values included."""
    for node in module.graph.nodes:
        node.args, node.kwargs = (
            map_aggregate(part, lambda value: _moved(value, device)) for part in (node.args, node.kwargs)
        )  # type: ignore[assignment]
        for value in optree.tree_leaves(node.meta.get("val")):  # type: ignore[arg-type] - a tree of values
            if isinstance(value, FakeTensor) and value.fake_device == STAND_IN:
                # In place: an operation on a CUDA tensor, were it only a view, asks for the driver.
                value.fake_device = device
    module.recompile()


def _moved(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) and value == STAND_IN else value
