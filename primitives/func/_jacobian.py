"""Whole matrices of derivatives: `jacrev`, `jacfwd`, `hessian`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch._functorch.eager_transforms import _jvp_with_argnums, _vjp_with_argnums

from primitives._core.batching import rewinder
from primitives.func._calls import FlatCall, check_vmap_options, eager_after_break, transformed, wrap_argnums

_P = ParamSpec("_P")


def jacrev(
    func: Callable[_P, Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    randomness: str = "error",
    chunk_size: int | None = None,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Callable[_P, Any]:
    """Jacobian by reverse mode: one vector-Jacobian product for each element of the output.

    Args:
        func: Function of pytrees that returns a pytree of real floating-point tensors; with `has_aux`, a pair of it
            and any tree.
        argnums: Position of the differentiated argument, or a tuple of positions. Every leaf there must be a real
            floating-point tensor.
        has_aux: Whether `func` returns `(output, aux)`.
        randomness: The mode of random operations in the backward pass under the vmap that runs the products: `"error"`,
            the `"same"` numbers in each, as one Jacobian has them, or `"different"` ones. `func` runs once, outside of
            it, whatever it draws.
        chunk_size: Number of products computed at a time, which bounds the memory that they take. `None` computes
            all at once; 1 computes them in a loop, without vmap.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree is a leaf.

    Returns:
        Function of the arguments of `func`. It returns the structure of the output, with the structure of the
        argument (for a tuple `argnums`, a tuple of them) at each leaf, and in that, tensors of shape
        `[*output leaf, *argument leaf]`; with `has_aux`, `(jacobian, aux)`.

    Raises:
        RuntimeError: If `randomness` is none of the three.
        ShapeError: If `chunk_size` is less than 1.
        AxisError: By the returned function, if `argnums` is out of range, empty or names an argument twice.
        LeafError: If a differentiated leaf is not a real floating-point tensor, or an output is not a tensor.
        DtypeError: If an output is not real floating point, or `argnums` or `chunk_size` are not ints.
        TreeError: If the output is empty, nothing to differentiate, or `has_aux` and the output is not a pair.

    Example:
        >>> import torch, primitives as pr
        >>> pr.func.jacrev(lambda tree: {"square": tree["a"] ** 2})({"a": torch.tensor([1.0, 2.0])})
        {'square': {'a': tensor([[2., 0.],
                [0., 4.]])}}
    """
    check_vmap_options("jacrev", randomness, "chunk_size", chunk_size)
    arguments = argnums, has_aux, randomness, chunk_size
    return transformed("jacrev", func, _jacobian, *arguments, namespace=namespace, is_leaf=is_leaf)


def jacfwd(
    func: Callable[_P, Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    randomness: str = "error",
    chunk_size: int | None = None,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Callable[_P, Any]:
    """Jacobian by forward mode: one Jacobian-vector product for each element of the differentiated arguments.

    Arguments, result and errors are those of `jacrev`, but that `randomness` says what random operations in `func` do:
    `"same"` makes it the Jacobian of one draw.

    Example:
        >>> import torch, primitives as pr
        >>> pr.func.jacfwd(lambda x, y: x * y, argnums=(0, 1))(torch.tensor([1.0, 2.0]), torch.tensor(3.0))
        (tensor([[3., 0.],
                [0., 3.]]), tensor([1., 2.]))
    """
    check_vmap_options("jacfwd", randomness, "chunk_size", chunk_size)
    arguments = argnums, has_aux, randomness, chunk_size
    return transformed("jacfwd", func, _jacobian, *arguments, namespace=namespace, is_leaf=is_leaf)


def hessian(
    func: Callable[_P, Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    randomness: str = "error",
    chunk_size: int | None = None,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Callable[_P, Any]:
    """Hessian by forward-over-reverse mode: `jacfwd(jacrev(func))`, with their arguments and errors.

    A network with dropout, in training, takes `randomness="same"`: every column is then of the function that one mask
    makes. A draw from an explicit state (`functionalize_rng`) needs none of the three. `chunk_size` counts columns.

    Returns:
        Function of the arguments of `func`. It returns the structure of the output, with the structure of the
        argument (for a tuple `argnums`, a tuple of them) at each leaf, and at each leaf of that the same structure
        again, with tensors of shape `[*output leaf, *argument leaf, *argument leaf]`.

    Example:
        >>> import torch, primitives as pr
        >>> pr.func.hessian(lambda tree: tree["a"] ** 2 * tree["b"])({"a": torch.tensor(3.0), "b": torch.tensor(5.0)})
        {'a': {'a': tensor(10.), 'b': tensor(6.)}, 'b': {'a': tensor(6.), 'b': tensor(0.)}}
    """
    check_vmap_options("hessian", randomness, "chunk_size", chunk_size)
    keywords: dict[str, Any] = {"randomness": randomness, "namespace": namespace, "is_leaf": is_leaf}
    return jacfwd(jacrev(func, argnums, **keywords), argnums, chunk_size=chunk_size, **keywords)


@eager_after_break
def _jacobian(given: tuple, argnums: Any, has_aux: bool, randomness: str, chunk_size: int | None) -> Any:
    call = FlatCall(*given, has_aux=has_aux, allowed="real")
    positions = call.differentiated(wrap_argnums(call.function, argnums, call.num_args))
    inputs = [call.tensors[i] for i in positions]
    blocks, aux = (_rows if call.function == "jacrev" else _columns)(call, positions, inputs, randomness, chunk_size)
    return call.with_aux((call.output.join([call.in_structure(argnums, row) for row in blocks]),), aux)


def _rows(
    call: FlatCall, positions: tuple[int, ...], inputs: list[Tensor], randomness: str, chunk_size: int | None
) -> tuple[list[list[Tensor]], Any]:
    """One block for each pair of output and input, from vector-Jacobian products; and aux."""
    # The other arguments are inputs of the transform too, which lets a function change its inputs in place, such as the
    # buffers of a module. Torch has this for its own jacrev, and not in public.
    outputs, pull, aux = _vjp_with_argnums(call.flat, *call.tensors, argnums=positions, has_aux=True)  # type: ignore[misc] - as long as has_aux says

    def one(basis: tuple[Tensor, ...]) -> Sequence[Tensor]:
        return [row.unsqueeze(0) for row in pull(tuple([vector.squeeze(0) for vector in basis]))]

    run = one if chunk_size == 1 else torch.func.vmap(pull, randomness=randomness)
    stacked = _of_basis(run, outputs, randomness, chunk_size)
    columns = [column.split([output.numel() for output in outputs]) for column in stacked]
    blocks = [
        [column[i].reshape((*output.shape, *x.shape)) for column, x in zip(columns, inputs, strict=True)]
        for i, output in enumerate(outputs)
    ]
    return blocks, aux


def _columns(
    call: FlatCall, positions: tuple[int, ...], inputs: list[Tensor], randomness: str, chunk_size: int | None
) -> tuple[list[list[Tensor]], Any]:
    aux: list[Tensor] = []

    def pushforward(*tangents: Tensor) -> tuple[Any, Any]:
        return _jvp_with_argnums(call.flat, tuple(call.tensors), tangents, argnums=positions, has_aux=True)[1:]  # type: ignore[return-value] - as above

    mapped = torch.func.vmap(pushforward, randomness=randomness)

    def run(basis: tuple[Tensor, ...]) -> Sequence[Tensor]:
        pushed, own_aux = mapped(*basis)
        aux[:] = [leaf[0] for leaf in own_aux]
        return pushed

    stacked = _of_basis(run, inputs, randomness, chunk_size)
    rows = [row.movedim(0, -1).split([x.numel() for x in inputs], -1) for row in stacked]
    blocks = [
        [block.reshape((*block.shape[:-1], *x.shape)) for block, x in zip(row, inputs, strict=True)] for row in rows
    ]
    return blocks, aux


def _of_basis(
    run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], randomness: str, chunk_size: int | None
) -> list[Tensor]:
    """`run` of the standard basis of `tensors`, taken as one vector, in chunks, along a new first axis."""
    total = sum([tensor.numel() for tensor in tensors])
    if total == 0:
        # The function is still to be called, for the shapes of its results.
        return [result[:0] for result in run(_basis(tensors, 0, 1))]
    step = chunk_size or total
    rewind = rewinder(tensors) if randomness == "same" and step < total else None
    chunks = []
    for start in range(0, total, step):
        if rewind is not None:
            rewind()
        chunks.append(run(_basis(tensors, start, min(start + step, total))))
    return list(chunks[0]) if len(chunks) == 1 else [torch.cat(column) for column in zip(*chunks, strict=True)]


def _basis(tensors: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
    blocks, offset = [], 0
    for tensor in tensors:
        block = tensor.new_zeros(stop - start, tensor.numel())
        block.diagonal(start - offset).fill_(1)
        blocks.append(block.view((stop - start, *tensor.shape)))
        offset += tensor.numel()
    return tuple(blocks)
