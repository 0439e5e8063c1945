"""`warm_up`: compile and load what a training step launches, before a CUDA graph captures it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from primitives._core.errors import BackendError, LeafError, check_arguments
from primitives._core.levels import version_of
from primitives._core.trees.nodes import leaves_of_nodes, mapped_nodes
from primitives.tracing._modules.lending import attributes_kept

# As often as torch's documentation of CUDA graphs has it: libraries choose and allocate in the first runs.
_RUNS = 3


def warm_up(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    step: Callable[..., Any] | None = None,
    namespace: str = "",
) -> None:
    """Run a training step three times, and leave the model as it was.

    Triton compiles a kernel at its first launch and loads it onto the device, which no CUDA graph can capture; tuning,
    where it is on, times plans then, and never in a capture. After `warm_up`, a capture of the same step finds
    everything in place. On a CUDA device it runs on a stream of its own, as torch asks of what precedes a capture.

    These come back bit for bit, also if the step raises: parameters and buffers, their gradients, whatever modules
    assign to their attributes (training mode included), the tensors among the arguments, and torch's random states. A
    step had better end with the gradients: an optimizer's own state is not kept, nor are hooks that the step registers,
    nor tensors inside arguments that are not pytrees. Arguments with a history are detached from it.

    Kernels are compiled for dtypes, strides and what is asked of them. Take a batch of the right layout, the modes of
    grad and autocast of the capture, and pass the step that is captured if it is not a plain forward and backward: with
    a forward-mode derivative in it, say, or one of second order.

    Args:
        model: The module. It is lent to the call: no other thread may use it meanwhile.
        args: Tuple of the arguments of the step after the model, pytrees of tensors and anything else.
        kwargs: Keyword arguments of the step.
        step: Called as `step(model, *args, **kwargs)`. By default, `model(*args, **kwargs)` and the backward of
            all that it returns, along ones.
        namespace: optree namespace of custom pytree nodes.

    Raises:
        TypeError: If `model` is not a module, or `args` not a tuple.
        BackendError: If a CUDA graph is being captured.
        LeafError: If a parameter is lazy, or `step` is missing and no result of the model requires grad.

    Example:
        >>> import torch, primitives as pr
        >>> model = pr.nn.convert(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
        >>> x = torch.randn(4, 8)
        >>> pr.warm_up(model, (x,))
        >>> model[1].num_batches_tracked, model[0].weight.grad
        (tensor(0), None)
        >>> def step(model, x):
        ...     y, y_dot = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        ...     (y * y_dot).sum().backward()
        >>> pr.warm_up(model, (x,), step=step)
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"warm_up: model must be a torch.nn.Module, got {type(model).__name__}. Pass it first.")
    check_arguments("warm_up", "args", args)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise BackendError("warm_up: a CUDA graph is being captured, in which nothing can be loaded. Call it before.")
    given = mapped_nodes(_as_leaf, (args, dict(kwargs or {})), namespace)
    leaves = [*model.parameters(), *model.buffers(), *leaves_of_nodes(given, namespace)]
    # Other leaves need not have a hash.
    tensors = list(dict.fromkeys(x for x in leaves if isinstance(x, torch.Tensor)))
    if any(map(is_lazy, tensors)):
        raise LeafError(
            f"warm_up: all parameters of {type(model).__name__} must have their shapes, got some that are lazy. Call "
            "the model once before."
        )
    devices = sorted({x.device for x in tensors if x.is_cuda}, key=str)
    run = functools.partial(_forward_and_backward, namespace) if step is None else step
    random_states = torch.random.fork_rng([device.index for device in devices])
    with attributes_kept(list(model.modules())), tensors_kept(tensors), random_states, _side_streams(devices):
        for _ in range(_RUNS):
            run(model, *given[0], **given[1])


def _as_leaf(x: Any) -> Any:
    """An argument that has no history, which a backward pass would free."""
    if isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf:
        return x.detach().requires_grad_()
    return x


def _forward_and_backward(namespace: str, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    with torch.enable_grad():
        returned = leaves_of_nodes(model(*args, **kwargs), namespace)
    outputs = [y for y in returned if isinstance(y, torch.Tensor) and y.requires_grad]
    if not outputs:
        raise LeafError(
            f"warm_up: {type(model).__name__} must return tensors that require grad, got "
            f"{', '.join(type(y).__name__ for y in returned)}. Pass what is to run instead, as in "
            "step=lambda model, x: model(x)."
        )
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])


@contextlib.contextmanager
def tensors_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context that begins without gradients, and after which tensors and their gradients are what they were."""
    values = [(x, x.detach().clone(), version_of(x)) for x in tensors if not x.is_meta]
    grads = [(x, x.grad) for x in tensors if x.is_leaf]
    for x, _ in grads:
        x.grad = None
    try:
        yield
    finally:
        for x, grad in grads:
            x.grad = grad
        with torch.no_grad():
            for x, value, version in values:
                # Only what was written: what autograd has saved elsewhere must not look changed.
                if version_of(x) != version or not _is_same(x, value):
                    if x.shape != value.shape:
                        x.resize_(value.shape)
                    x.copy_(value)


def _is_same(x: Tensor, value: Tensor) -> bool:
    """Whether values are equal, NaN to NaN; of layouts that cannot be compared, writes show in the version alone."""
    if x.shape != value.shape:
        return False
    return x.layout != torch.strided or torch.allclose(x, value, rtol=0.0, atol=0.0, equal_nan=True)


@contextlib.contextmanager
def _side_streams(devices: Sequence[torch.device]) -> Iterator[None]:
    if not devices:
        yield
        return
    before = torch.cuda.current_device()
    with contextlib.ExitStack() as stack:
        for device in devices:
            current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
            side.wait_stream(current)
            stack.callback(current.wait_stream, side)
            stack.enter_context(torch.cuda.stream(side))
        # A stream brings its device along.
        stack.enter_context(torch.cuda.device(before))
        yield
