"""Forward mode: `jvp`; forward over reverse: `hvp`; and the derivative at a point, as a function: `linearize`.

    out, pull = vjp(func, primals)        pull: out_bar -> J^T out_bar
    _, push   = vjp(pull, 0)              push: x_dot -> (J^T)^T x_dot = J x_dot

The pullback is linear, so the point at which it is transposed does not matter. `func` runs once, and both steps are
transforms of `torch.func`: what they keep is differentiable from outside and may be batched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch._functorch.eager_transforms import _jvp_with_argnums

from primitives._core.dtypes import has_derivatives
from primitives._core.errors import TreeError
from primitives._core.levels import version_of
from primitives._core.recomputation import nodes_of
from primitives._repair.switch import repaired_thread
from primitives.func._calls import eager_after_break, primals_call
from primitives.tracing._memory import bottom

_R = TypeVar("_R")
_Aux = TypeVar("_Aux")
_Primals = TypeVar("_Primals", bound="tuple[Any, ...]")


@overload
def jvp(
    func: Callable[..., _R], primals: tuple[Any, ...], tangents: tuple[Any, ...], *, strict: bool = ...,
    has_aux: Literal[False] = False, namespace: str = ..., is_leaf: Callable[[Any], bool] | None = ...,
) -> tuple[_R, _R]: ...  # fmt: skip


@overload
def jvp(
    func: Callable[..., tuple[_R, _Aux]], primals: tuple[Any, ...], tangents: tuple[Any, ...], *, strict: bool = ...,
    has_aux: Literal[True], namespace: str = ..., is_leaf: Callable[[Any], bool] | None = ...,
) -> tuple[_R, _R, _Aux]: ...  # fmt: skip


@eager_after_break
def jvp(
    func: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    strict: bool = False,
    has_aux: bool = False,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[Any, ...]:
    """Value of `func` at `primals` and its derivative along `tangents`.

    Args:
        func: Function of pytrees that returns a pytree of tensors; with `has_aux`, a pair of it and any tree.
        primals: Arguments of `func`, a tuple of pytrees of floating-point or complex tensors.
        tangents: Direction: a tree like `primals`, in shapes and dtypes too.
        strict: Whether an output that does not depend on `primals` is an error, and not one with a zero tangent.
        has_aux: Whether `func` returns `(output, aux)`.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree is a leaf.

    Returns:
        `(output, tangent of the output)`, two trees of one structure; with `has_aux`, `(output, tangent, aux)`.

    Raises:
        TreeError: If `primals` is not a tuple or empty, `tangents` has another structure, the output is empty, or
            `has_aux` and the output is not a pair.
        LeafError: If a leaf of `primals` is not a floating-point or complex tensor, or another one not a tensor.
        ShapeError: If a tangent has another shape than its primal.
        DtypeError: If a tangent has another dtype than its primal, which torch lets pass.
        DeviceError: If a tangent is on another device than its primal.
        RuntimeError: If `strict` and an output does not depend on `primals`.

    Example:
        >>> import torch, primitives as pr
        >>> pr.func.jvp(lambda tree: {"y": tree["x"] ** 3}, ({"x": torch.tensor(2.0)},), ({"x": torch.tensor(1.0)},))
        ({'y': tensor(8.)}, {'y': tensor(12.)})
    """
    call = primals_call("jvp", func, primals, {"namespace": namespace, "is_leaf": is_leaf}, has_aux=has_aux)
    call.differentiated(range(call.num_args))
    flat_tangents = call.match("tangents", tangents).values()
    outputs, output_tangents, aux = torch.func.jvp(  # type: ignore[misc] - as long as has_aux says
        call.flat, tuple(call.tensors), tuple(flat_tangents), strict=strict, has_aux=True
    )
    return call.with_aux((call.output.join(outputs), call.output.join(output_tangents)), aux)


@overload
def hvp(
    func: Callable[..., Any], primals: _Primals, tangents: tuple[Any, ...], *, has_aux: Literal[False] = False,
    namespace: str = ..., is_leaf: Callable[[Any], bool] | None = ...,
) -> _Primals: ...  # fmt: skip


@overload
def hvp(
    func: Callable[..., tuple[Any, _Aux]], primals: _Primals, tangents: tuple[Any, ...], *, has_aux: Literal[True],
    namespace: str = ..., is_leaf: Callable[[Any], bool] | None = ...,
) -> tuple[_Primals, _Aux]: ...  # fmt: skip


@eager_after_break
def hvp(
    func: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    has_aux: bool = False,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[Any, ...]:
    """Product of the Hessian of a scalar function with a vector, by forward-over-reverse mode.

    One forward pass, one backward pass, each with its tangent: about the cost of two gradients, whatever the number
    of elements, and no Hessian in memory. Map it over several directions with `vmap`.

    Args:
        func: Function of pytrees that returns a real tensor of shape `[]`; with `has_aux`, a pair of it and any tree.
        primals: Arguments of `func`, a tuple of pytrees.
        tangents: The vector: a tree like `primals`, in shapes and dtypes too. `None` for a leaf or for a whole argument
            holds it constant: the Hessian is that of the rest. It is the only choice for all but a floating-point or
            complex tensor, and for what `func` changes in place, such as the buffers of a module.
        has_aux: Whether `func` returns `(output, aux)`.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree is a leaf.

    Returns:
        The product alone, in the structure of `primals`, with `None` where `tangents` has it; with `has_aux`,
        `(product, aux)`.

    Raises:
        TreeError: If `tangents` has no tensor.
        ShapeError: If the output has axes.
        DtypeError: If the output is integral or complex.
        Exception: As `jvp` raises it.

    Example:
        >>> import torch, primitives as pr
        >>> primals = (torch.tensor(3.0), {"b": torch.tensor(5.0)})
        >>> pr.func.hvp(lambda a, tree: a**2 * tree["b"], primals, (torch.tensor(1.0), {"b": torch.tensor(0.0)}))
        (tensor(10.), {'b': tensor(6.)})
        >>> pr.func.hvp(lambda a, tree: a**2 * tree["b"], primals, (torch.tensor(1.0), None))
        (tensor(10.), None)
    """
    call = primals_call("hvp", func, primals, {"namespace": namespace, "is_leaf": is_leaf}, has_aux=has_aux)
    by_position = call.match("tangents", tangents, some=True)
    if not by_position:
        raise TreeError("hvp: tangents must hold a tensor, got none.")
    positions = tuple(by_position)

    def differentiable(*tensors: Any) -> Any:
        # Torch's own jvp of the backward of `mse_loss` raises on the zero tangent of a target.
        with repaired_thread():
            return call.flat(*tensors)

    gradient = torch.func.grad(differentiable, positions, has_aux=True)
    tangents_given = tuple(by_position.values())
    _, products, aux = _jvp_with_argnums(gradient, tuple(call.tensors), tangents_given, argnums=positions, has_aux=True)  # type: ignore[misc] - as long as has_aux says
    found = dict(zip(positions, products, strict=True))
    values = [found.get(i) for i in range(len(call.tensors))]
    product = tuple(
        [None if tangent is None else call.parts[i].join(call.own(i, values)) for i, tangent in enumerate(tangents)]
    )
    return call.with_aux((product,), aux)


@eager_after_break
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
    call = primals_call("linearize", func, primals, {"namespace": namespace, "is_leaf": is_leaf})
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
    for name in _saving_attributes(type(node)):
        value = getattr(node, name)
        entries = value if isinstance(value, (tuple, list)) else (value,)
        yield from (entry for entry in entries if isinstance(entry, torch.Tensor))


@functools.cache
def _saving_attributes(node_type: type) -> tuple[str, ...]:
    return tuple([name for name in dir(node_type) if name == "saved_tensors" or name.startswith("_saved_")])
