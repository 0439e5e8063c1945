"""Forward mode: `jvp`, `linearize`, and forward over reverse: `hvp`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from primitives.core.errors import TreeError
from primitives.func._calls import FlatCall, check_scalar, split_output, unpack_aux

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["hvp", "jvp", "linearize"]


def jvp(
    func: Callable[..., Any],
    primals: tuple,
    tangents: tuple,
    *,
    strict: bool = False,
    has_aux: bool = False,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
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
        TreeError: If `primals` is no tuple or empty, `tangents` has another structure, there is no output, or
            `has_aux` and the output is no pair.
        LeafError: If a leaf of `primals` is no floating-point or complex tensor, or another one no tensor.
        ShapeError: If a tangent has another shape than its primal.
        DtypeError: If a tangent has another dtype than its primal, which torch lets pass.
        DeviceError: If a tangent is on another device than its primal.
        RuntimeError: If `strict` and an output does not depend on `primals`.

    Example:
        >>> jvp(lambda tree: {"y": tree["x"] ** 3}, ({"x": torch.tensor(2.0)},), ({"x": torch.tensor(1.0)},))
        ({'y': tensor(8.)}, {'y': tensor(12.)})
    """
    call, flat_tangents = _primals_and_tangents("jvp", func, primals, tangents, namespace, is_leaf)
    output_partition, aux_partition = call.partition(), call.partition()

    def flat(*tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        output, aux = unpack_aux("jvp", call(*tensors), has_aux=has_aux)
        return split_output("jvp", output_partition, output), tuple(aux_partition.split(aux))

    outputs, output_tangents, aux = torch.func.jvp(  # type: ignore[misc]
        flat, tuple(call.tensors), tuple(flat_tangents), strict=strict, has_aux=True
    )
    result = output_partition.join(outputs), output_partition.join(output_tangents)
    return (*result, aux_partition.join(aux)) if has_aux else result


def linearize(
    func: Callable[..., Any],
    *primals: Any,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[Any, Callable[..., Any]]:
    """Value of `func` at `primals`, and its derivative there as a linear function.

    What does not depend on the tangents is computed once, so this is the cheaper way to many derivatives at one
    point. `func` is traced: its control flow cannot look at the values of tensors.

    Args:
        func: Function of pytrees that returns a pytree of tensors.
        primals: Arguments of `func`, pytrees of floating-point or complex tensors.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree is a leaf.

    Returns:
        `(output, jvp_fn)`. `jvp_fn(*tangents)` takes trees like the primals, in shapes and dtypes too, and returns
        the tangent of the output.

    Raises:
        TreeError: If there are no primals or no output, or, by `jvp_fn`, a tangent has another structure.
        LeafError: If a leaf of `primals` is no floating-point or complex tensor, or another one no tensor.
        ShapeError: By `jvp_fn`, if a tangent has another shape than its primal.
        DtypeError: By `jvp_fn`, if a tangent has another dtype than its primal.
        DeviceError: By `jvp_fn`, if a tangent is on another device than its primal.

    Example:
        >>> output, jvp_fn = linearize(lambda tree: tree["x"] ** 3, {"x": torch.tensor(2.0)})
        >>> output, jvp_fn({"x": torch.tensor(1.0)}), jvp_fn({"x": torch.tensor(2.0)})
        (tensor(8.), tensor(12.), tensor(24.))
    """
    call = _primals_call("linearize", func, primals, namespace, is_leaf)
    output_partition = call.partition()

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        return split_output("linearize", output_partition, call(*tensors))

    if torch.compiler.is_compiling():
        # Dynamo refuses the tracing in torch's linearize; the compiler itself shares what several derivatives share.
        outputs, flat_jvp_fn = flat(*call.tensors), _pushforward(flat, tuple(call.tensors))
    else:
        with warnings.catch_warnings():
            # torch's constant folder warns about the graph that it is building itself.
            warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node", UserWarning)
            outputs, flat_jvp_fn = torch.func.linearize(flat, *call.tensors)

    def jvp_fn(*tangents: Any) -> Any:
        return output_partition.join(flat_jvp_fn(*call.match_primals("tangents", tangents)))

    return output_partition.join(outputs), jvp_fn


def hvp(
    func: Callable[..., Any],
    primals: tuple,
    tangents: tuple,
    *,
    has_aux: bool = False,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Product of the Hessian of a scalar function with a vector, by forward-over-reverse mode.

    One forward pass, one backward pass, each with its tangent: about the cost of two gradients, whatever the number
    of elements, and no Hessian in memory. Map it over several directions with `vmap`.

    Args:
        func: Function of pytrees that returns a real tensor of shape `[]`; with `has_aux`, a pair of it and any tree.
        primals: Arguments of `func`, a tuple of pytrees of floating-point or complex tensors.
        tangents: The vector: a tree like `primals`, in shapes and dtypes too.
        has_aux: Whether `func` returns `(output, aux)`.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree is a leaf.

    Returns:
        The product alone, in the structure of `primals`; with `has_aux`, `(product, aux)`.

    Raises:
        TreeError: If `primals` is no tuple or empty, `tangents` has another structure, or `has_aux` and the output is
            no pair.
        LeafError: If a leaf of `primals` is no floating-point or complex tensor, or another one no tensor.
        ShapeError: If the output has axes, or a tangent has another shape than its primal.
        DtypeError: If the output is integral or complex, or a tangent has another dtype than its primal.
        DeviceError: If a tangent is on another device than its primal.

    Example:
        >>> primals = (torch.tensor(3.0), {"b": torch.tensor(5.0)})
        >>> hvp(lambda a, tree: a**2 * tree["b"], primals, (torch.tensor(1.0), {"b": torch.tensor(0.0)}))
        (tensor(10.), {'b': tensor(6.)})
    """
    call, flat_tangents = _primals_and_tangents("hvp", func, primals, tangents, namespace, is_leaf)
    aux_partition = call.partition()

    def scalar(*tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, aux = unpack_aux("hvp", call(*tensors), has_aux=has_aux)
        check_scalar("hvp", output)
        return output, tuple(aux_partition.split(aux))

    gradient = torch.func.grad(scalar, tuple(range(len(call.tensors))), has_aux=True)
    _, products, aux = torch.func.jvp(  # type: ignore[misc]
        gradient, tuple(call.tensors), tuple(flat_tangents), has_aux=True
    )
    product = call.in_structure(tuple(range(len(primals))), products)
    return (product, aux_partition.join(aux)) if has_aux else product


def _pushforward(flat: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Callable[..., Any]:
    return lambda *tangents: torch.func.jvp(flat, tensors, tangents)[1]


def _primals_call(function: str, func: Callable, primals: Any, namespace: str, is_leaf: Any) -> FlatCall:
    if not isinstance(primals, tuple):
        raise TreeError(
            f"{function}: primals must be a tuple of the arguments of func, got {type(primals).__name__}. "
            "Write (x,) for a single argument."
        )
    call = FlatCall(function, func, primals, {}, {"namespace": namespace, "is_leaf": is_leaf}, root="primals")
    call.require_some(call.differentiated(tuple(range(len(primals)))))
    return call


def _primals_and_tangents(
    function: str, func: Callable, primals: Any, tangents: Any, namespace: str, is_leaf: Any
) -> tuple[FlatCall, list[Tensor]]:
    call = _primals_call(function, func, primals, namespace, is_leaf)
    return call, call.match_primals("tangents", tangents)
