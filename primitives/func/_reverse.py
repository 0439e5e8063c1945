"""Reverse mode: `grad`, `grad_and_value`, `vjp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from primitives.func._calls import FlatCall, eager_after_break, primals_call, transformed, wrap_argnums

_P = ParamSpec("_P")


def grad(
    func: Callable[_P, Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Callable[_P, Any]:
    """Gradient of a scalar function with respect to pytrees.

    Args:
        func: Function of pytrees that returns a real tensor of shape `[]`; with `has_aux`, a pair of it and any tree.
            Arguments that are not tensors pass through.
        argnums: Position of the differentiated argument, or a tuple of positions. Every leaf there must be a
            floating-point or complex tensor.
        has_aux: Whether `func` returns `(output, aux)`.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree of an argument or of aux is a leaf.

    Returns:
        Function of the arguments of `func`. It returns the gradient in the structure of the argument, for a tuple
        `argnums` a tuple of them; with `has_aux`, `(gradient, aux)`.

    Raises:
        AxisError: By the returned function, if `argnums` is out of range, empty or names an argument twice.
        LeafError: If a differentiated leaf is not a floating-point or complex tensor, or the output is not a tensor.
        ShapeError: If the output has axes.
        DtypeError: If the output is integral or complex.
        TreeError: If `has_aux` and the output is not a pair.

    Example:
        >>> import torch, primitives as pr
        >>> params = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0), "unused": None}
        >>> pr.func.grad(lambda params, x: params["w"] @ x + params["b"] ** 2)(params, torch.tensor([5.0, 7.0]))
        {'w': tensor([5., 7.]), 'b': tensor(6.), 'unused': None}
    """
    return transformed("grad", func, _grad, argnums, has_aux, namespace=namespace, is_leaf=is_leaf)


def grad_and_value(
    func: Callable[_P, Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Callable[_P, tuple[Any, Any]]:
    """Gradient and value of a scalar function, from one evaluation. Arguments and errors are those of `grad`.

    Returns:
        Function of the arguments of `func` that returns `(gradient, value)`; with `has_aux`,
        `(gradient, (value, aux))`.

    Example:
        >>> import torch, primitives as pr
        >>> pr.func.grad_and_value(lambda x: (x**2).sum())(torch.tensor([1.0, 2.0]))
        (tensor([2., 4.]), tensor(5.))
    """
    return transformed("grad_and_value", func, _grad, argnums, has_aux, namespace=namespace, is_leaf=is_leaf)


@eager_after_break
def _grad(given: tuple, argnums: Any, has_aux: bool) -> Any:
    call = FlatCall(*given, has_aux=has_aux, allowed="scalar")
    positions = call.differentiated(wrap_argnums(call.function, argnums, call.num_args), some=False)
    if positions:
        gradients, (value, aux) = torch.func.grad_and_value(call.flat, positions, has_aux=True)(*call.tensors)
    else:
        gradients, (value, aux) = (), call.flat(*call.tensors)
    gradient = call.in_structure(argnums, gradients)
    return call.with_aux((gradient,), aux) if call.function == "grad" else (gradient, call.with_aux((value,), aux))


@eager_after_break
def vjp(
    func: Callable[..., Any],
    *primals: Any,
    has_aux: bool = False,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Value of `func` at `primals`, and the function that pulls cotangents of the output back to them.

    Args:
        func: Function of pytrees that returns a pytree of floating-point or complex tensors; with `has_aux`, a pair
            of it and any tree.
        primals: Arguments of `func`, pytrees of floating-point or complex tensors.
        has_aux: Whether `func` returns `(output, aux)`.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree is a leaf.

    Returns:
        `(output, vjp_fn)`, with `has_aux` `(output, vjp_fn, aux)`. `vjp_fn(cotangents, retain_graph=True,
        create_graph=None)` takes a tree like the output, in shapes and dtypes too, and returns a tuple with one
        cotangent tree for each primal. `create_graph=None` means whether grad mode is on.

    Raises:
        LeafError: If a leaf of `primals`, of the output or of the cotangents is not a tensor to differentiate.
        DtypeError: If an output is integral, or a cotangent has another dtype than its output.
        TreeError: If the cotangents have another structure than the output, the output is empty, or `has_aux` and the
            output is not a pair.
        ShapeError: If a cotangent has another shape than its output.
        DeviceError: If a cotangent is on another device than its output.

    Example:
        >>> import torch, primitives as pr
        >>> output, vjp_fn = pr.func.vjp(lambda x, y: {"product": x * y}, torch.tensor(2.0), torch.tensor(3.0))
        >>> output
        {'product': tensor(6.)}
        >>> vjp_fn({"product": torch.tensor(1.0)})
        (tensor(3.), tensor(2.))
    """
    call = primals_call("vjp", func, primals, {"namespace": namespace, "is_leaf": is_leaf}, has_aux=has_aux)
    argnums = tuple(range(len(primals)))
    call.differentiated(argnums, some=False)
    outputs, flat_vjp_fn, aux = torch.func.vjp(call.flat, *call.tensors, has_aux=True)  # type: ignore[misc] - as long as has_aux says

    def vjp_fn(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> tuple:
        matched = call.output.match("vjp", "cotangents", cotangents, "output", outputs)
        pulled = flat_vjp_fn(tuple(matched), retain_graph=retain_graph, create_graph=create_graph)
        return call.in_structure(argnums, pulled)

    return call.with_aux((call.output.join(outputs), vjp_fn), aux)
