"""Forward mode: `jvp`, and forward over reverse: `hvp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import torch
from torch._functorch.eager_transforms import _jvp_with_argnums

from primitives._core.errors import TreeError
from primitives._repair.switch import repaired_thread
from primitives.func._calls import eager_after_break, primals_call

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
    return _jvp(func, primals, tangents, strict, has_aux, {"namespace": namespace, "is_leaf": is_leaf})


@eager_after_break
def _jvp(
    func: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...], strict: bool, has_aux: bool,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    call = primals_call("jvp", func, primals, options, has_aux=has_aux)
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
    return _hvp(func, primals, tangents, has_aux, {"namespace": namespace, "is_leaf": is_leaf})


@eager_after_break
def _hvp(
    func: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...], has_aux: bool,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    call = primals_call("hvp", func, primals, options, has_aux=has_aux)
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
