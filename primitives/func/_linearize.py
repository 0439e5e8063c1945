"""The derivative of a function at a point, as a function: `linearize`.

    out, pull = vjp(func, primals)        pull: out_bar -> J^T out_bar
    _, push   = vjp(pull, 0)              push: x_dot -> (J^T)^T x_dot = J x_dot

The pullback is linear, so the point at which it is transposed does not matter. `func` runs once, and both steps are
transforms of `torch.func`: what they keep is differentiable from outside and may be batched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from primitives._core.dtypes import has_derivatives
from primitives._core.recomputation import nodes_of, version_of
from primitives.func._calls import eager_after_break, primals_call
from primitives.tracing._memory import bottom

_R = TypeVar("_R")


def linearize(
    func: Callable[..., _R], *primals: Any, namespace: str = "", is_leaf: Callable[[Any], bool] | None = None
) -> tuple[_R, Callable[..., _R]]:
    """Value of `func` at `primals`, and its derivative there as a linear function.

    `func` runs once, with one backward pass, and what the derivative needs is kept: each call of the derivative then
    costs about one forward pass. Random numbers are those of that one run. The derivative is the transpose of the
    pullback of `vjp`, so `func` needs reverse mode to second order, and no rules for forward mode; what it computes
    under `torch.no_grad()` is constant, which `jvp` does not heed.

    Args:
        func: Function of pytrees that returns a pytree of tensors.
        primals: Arguments of `func`, pytrees of floating-point or complex tensors.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree is a leaf.

    Returns:
        `(output, jvp_fn)`. `jvp_fn(*tangents)` takes trees like the primals, in shapes and dtypes too, and returns
        the tangent of the output, zeros for integral tensors. It can itself be transformed, and differentiated with
        respect to whatever `primals` and the variables of `func` were computed from.

    Raises:
        Exception: As `jvp` raises it, by `jvp_fn` for its tangents.
        RuntimeError: By `jvp_fn`, if a tensor that it needs was changed in place.

    Example:
        >>> import torch, primitives as pr
        >>> output, jvp_fn = pr.func.linearize(lambda tree: tree["x"] ** 3, {"x": torch.tensor(2.0)})
        >>> output, jvp_fn({"x": torch.tensor(1.0)}), jvp_fn({"x": torch.tensor(2.0)})
        (tensor(8.), tensor(12.), tensor(24.))
    """
    return _linearize(func, primals, {"namespace": namespace, "is_leaf": is_leaf})


@eager_after_break
def _linearize(func: Callable, primals: tuple, options: dict[str, Any]) -> tuple[Any, Callable[..., Any]]:
    call = primals_call("linearize", func, primals, options)
    call.differentiated(range(call.num_args))

    def differentiable(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        outputs, _ = call.flat(*tensors)
        # vjp wants an output: an argument stands in where there is none to differentiate.
        return tuple([y for y in outputs if has_derivatives(y.dtype)]) or tensors[:1], outputs

    results, pull, outputs = torch.func.vjp(differentiable, *call.tensors, has_aux=True)  # type: ignore[misc] - as long as has_aux says
    kept = _Versions()

    def pullback(*cotangents: Tensor) -> tuple[Tensor, ...]:
        pulled = pull(cotangents)
        if not torch.compiler.is_dynamo_compiling():
            kept.record(pulled)
        return pulled

    _, push = torch.func.vjp(pullback, *[torch.zeros_like(result) for result in results])  # type: ignore[misc] - as long as has_aux says

    def jvp_fn(*tangents: Any) -> Any:
        matched = call.match("tangents", tangents).values()
        kept.check()
        pushed = iter(push(tuple(matched)))
        found = [next(pushed) if has_derivatives(output.dtype) else torch.zeros_like(output) for output in outputs]
        return call.output.join(found)

    return call.output.join(outputs), jvp_fn


class _Versions:
    """The tensors that a graph keeps, and how often each had been changed in place.

    Autograd looks for that itself, but inside a transform only at a tensor's wrapper, which a change passes by.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, int]] = []

    def record(self, outputs: Sequence[Tensor]) -> None:
        """Take note of what the graph of `outputs` keeps."""
        for node in nodes_of(outputs):
            self._kept += [(tensor, version_of(tensor)) for tensor in map(bottom, _kept_by(node))]

    def check(self) -> None:
        """Raise what autograd raises if one of the tensors has been changed since."""
        for tensor, version in self._kept:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"linearize: no tensor that the derivative needs may be changed in place, but one of shape "
                    f"{list(tensor.shape)} and dtype {tensor.dtype} was. Call linearize again."
                )


def _kept_by(node: Any) -> Iterator[Tensor]:
    """The tensors that one node of a graph has saved."""
    for name in _saving_attributes(type(node)):
        value = getattr(node, name)
        entries = value if isinstance(value, (tuple, list)) else (value,)
        yield from (entry for entry in entries if isinstance(entry, torch.Tensor))


@functools.cache
def _saving_attributes(node_type: type) -> tuple[str, ...]:
    return tuple([name for name in dir(node_type) if name == "saved_tensors" or name.startswith("_saved_")])
