"""Decompositions as graphs, to read and to test."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from primitives._core.decomposition import get_decomposition

# No transform, no mode and no autocast: what is traced under these is the same wherever it is asked for.
_OUTSIDE_EVERYTHING = (
    temporarily_clear_interpreter_stack,
    _disable_current_modes,
    torch._C.DisableTorchFunction,
    torch._C._DisableAutocast,
    lambda: torch.inference_mode(False),
    torch.enable_grad,
)


def decomposition_graph(
    op: Any, *example_args: Any, for_jvp: bool = False, **example_kwargs: Any
) -> torch.fx.GraphModule:
    """The decomposition of `op` as an FX graph of ATen operators.

    It is traced with fake tensors: nothing is computed and no memory is used. Transforms and modes around the call have
    no part in it.

    Args:
        op: As for `get_decomposition`.
        *example_args: Arguments of the operator, in the order of its schema.
        for_jvp: Whether to look in the table for forward mode first.
        **example_kwargs: Arguments of the operator by name. The graph takes them by position, after the others.

    Returns:
        The graph; call it with arguments like the examples, read it as `.code` or `.graph`.

    Raises:
        MissingRuleError: If the operator has none.

    Example:
        >>> import torch, primitives as pr
        >>> graph = pr.decompositions.decomposition_graph(torch.ops.aten.trace.default, torch.ones(3, 3))
        >>> [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
        ['diagonal.default', 'sum.default']
        >>> graph(torch.ones(3, 3))
        tensor(3.)
    """
    decomposition, count = get_decomposition(op, for_jvp=for_jvp), len(example_args)

    def function(*args: Any) -> Any:
        return decomposition(*args[:count], **dict(zip(example_kwargs, args[count:], strict=True)))

    with contextlib.ExitStack() as stack:
        for guard in _OUTSIDE_EVERYTHING:
            stack.enter_context(guard())
        with FakeTensorMode():
            # Only layouts matter, so tensors of a transform and of a mode will do as examples.
            blanks = tree_map_only(
                torch.Tensor,
                lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device),
                (*example_args, *example_kwargs.values()),
            )
        return make_fx(function, tracing_mode="fake")(*blanks)
