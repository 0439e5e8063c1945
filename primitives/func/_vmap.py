"""Vectorization: `vmap`, `chunk_vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined] - no stub

from primitives._core.batching import rewinder
from primitives._core.errors import AxisError, LeafError, ShapeError, TreeError
from primitives._core.trees.leaves import Partition
from primitives._core.trees.overlay import spread
from primitives.func._calls import FlatCall, check_vmap_options, eager_after_break, kind_of, transformed

_P = ParamSpec("_P")
_R = TypeVar("_R")


def vmap(
    func: Callable[_P, _R],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Callable[_P, _R]:
    """Vectorizing map: `func` over an axis of the leaves of its arguments.

    Args:
        func: Function of pytrees that returns a pytree of tensors.
        in_dims: Mapped axis of each leaf of the positional arguments, `None` for a leaf that every call sees whole
            (the only choice for what is not a tensor): an int, or a tree prefix of the tuple of arguments. Keyword
            arguments are never mapped.
        out_dims: Where the mapped axis goes in each leaf of the output: an int, or a tree prefix of the output. `None`
            is for leaves that are the same in every call, and for what is not a tensor.
        randomness: The mode of random operations in `func`: `"error"`, the `"same"` numbers in each call, or
            `"different"` ones.
        chunk_size: Number of calls run at a time, which bounds the memory that they take. `None` runs all at once.
        namespace: optree namespace of custom pytree nodes.
        is_leaf: Where it returns true, a subtree of an argument or of the output is a leaf.

    Returns:
        Function of the arguments of `func` with the mapped axes, whose output has one too. A leaf of the output whose
        `out_dims` is `None` is the one of the last chunk.

    Raises:
        RuntimeError: If `randomness` is none of the three.
        ShapeError: If `chunk_size` is less than 1, or, by the returned function, mapped axes differ in size.
        TreeError: If `in_dims` or `out_dims` is not a tree prefix or holds something else than ints and `None`, or
            nothing is mapped.
        AxisError: If a leaf has no such axis.
        LeafError: If a leaf with an axis to map is not a tensor.

    Example:
        >>> import torch, primitives as pr
        >>> batch = {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "scale": torch.tensor(10.0)}
        >>> pr.func.vmap(lambda batch: batch["x"].sum() * batch["scale"], in_dims=({"x": 0, "scale": None},))(batch)
        tensor([30., 70.])
    """
    check_vmap_options("vmap", randomness, "chunk_size", chunk_size)
    arguments = in_dims, out_dims, randomness, lambda batch_size: chunk_size or batch_size
    return transformed("vmap", func, _run, *arguments, namespace=namespace, is_leaf=is_leaf)


def chunk_vmap(
    func: Callable[_P, _R],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    chunks: int = 2,
    *,
    namespace: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Callable[_P, _R]:
    """`vmap` in a given number of `chunks`, run one after the other.

    All are of the same size but for the last; there are fewer if the mapped axis is shorter. The other arguments, the
    result and the errors are those of `vmap`; `chunks` less than 1 is a `ShapeError`.

    Example:
        >>> import torch, primitives as pr
        >>> pr.func.chunk_vmap(lambda x: x.sum(), chunks=3)(torch.ones(5, 2))
        tensor([2., 2., 2., 2., 2.])
    """
    check_vmap_options("chunk_vmap", randomness, "chunks", chunks)
    arguments = in_dims, out_dims, randomness, lambda batch_size: -(-batch_size // chunks)
    return transformed("chunk_vmap", func, _run, *arguments, namespace=namespace, is_leaf=is_leaf)


@eager_after_break
def _run(given: tuple, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Callable[[int], int]) -> Any:
    """Call a mapped function, a chunk at a time, of a size that depends on the length of the mapped axes."""
    call = FlatCall(*given)
    dims = _argument_dims(call, given[2], in_dims)
    batch_size = _common_size(call, dims)
    # Filled while the function runs; torch looks at `mapped_dims` after that.
    output_dims: list[int | None] = []
    mapped_dims: Any = []
    whole: list[Tensor] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        """The function on one entry. Its unmapped results are set aside: they need no unwrapping."""
        output, partition = call(*tensors), call.output
        leaves = partition.split(output)
        # torch takes a 1-tuple for the axis of a single tensor too.
        single = isinstance(output, torch.Tensor) and isinstance(out_dims, tuple) and len(out_dims) == 1
        own_dims = out_dims[0] if single else out_dims
        names = "out_dims", "output"
        output_dims[:] = _leaf_dims(call.function, names, own_dims, output, partition, leaves, 1)
        mapped_dims[:] = [dim for dim in output_dims if dim is not None]
        whole[:], mapped = [], []
        for i, (leaf, dim) in enumerate(zip(leaves, output_dims, strict=True)):
            if dim is None and _is_mapped(leaf):
                raise TreeError(
                    f"{call.function}: out_dims of {partition.label(i, 'output')} must be an int, as it is mapped, got "
                    "None."
                )
            (whole if dim is None else mapped).append(leaf)
        return mapped

    vectorized = torch.func.vmap(flat, tuple(dims), mapped_dims, randomness)
    # Of one chunk the tensors as they are, not views: what the function writes to, or returns, is the argument.
    chunks = [call.tensors]
    if (size := chunk_size(batch_size)) < batch_size:
        starts = range(0, batch_size, size)
        chunks = zip(*[_pieces(call, i, dim, starts, batch_size) for i, dim in enumerate(dims)], strict=True)
    rewind = rewinder(call.tensors) if randomness == "same" and size < batch_size else None
    results = []
    for chunk in chunks:
        if rewind is not None:
            rewind()
        results.append(vectorized(*chunk))
    # Chunks are let go of column by column, so that one leaf is in memory twice, and not all of them.
    columns = [list(column) for column in zip(*results, strict=True)]
    results.clear()
    leaves: list[Tensor] = []
    for dim in output_dims:
        pieces = [whole.pop(0)] if dim is None else columns.pop(0)
        leaves.append(pieces[0] if dim is None or len(pieces) == 1 else torch.cat(pieces, dim))
    return call.output.join(leaves)


def _pieces(call: FlatCall, index: int, dim: int | None, starts: range, batch_size: int) -> Sequence[Tensor]:
    """One tensor of a call for each chunk."""
    tensor = call.tensors[index]
    if dim is None:
        return [tensor] * len(starts)
    if tensor.is_nested:
        raise LeafError(
            f"{call.function}: {call.labels()[index]} must not be a nested tensor to be mapped in chunks, as torch "
            "cannot split it. Map it in one."
        )
    # One by one, unlike those of `split`, the pieces may be written to where they are differentiated.
    return [tensor.narrow(dim, start, min(starts.step, batch_size - start)) for start in starts]


def _argument_dims(call: FlatCall, args: tuple, in_dims: Any) -> list[int | None]:
    """Mapped axis of each tensor of a call; those of keyword arguments have none."""
    if not args:
        raise TreeError(f"{call.function}: func must be called with at least one positional argument, got none.")
    if in_dims is None or _is_axis(in_dims):
        in_dims = (in_dims,) * len(args)
    if not isinstance(in_dims, tuple) or len(in_dims) != len(args):
        raise TreeError(
            f"{call.function}: in_dims must be an int, None or a tree prefix of args, a tuple of {len(args)}, "
            f"got {kind_of(in_dims)}."
        )
    dims: list[int | None] = []
    for i, (arg, own_dims) in enumerate(zip(args, in_dims, strict=True)):
        names = f"in_dims[{i}]", f"args[{i}]"
        dims += _leaf_dims(call.function, names, own_dims, arg, call.parts[i], call.own(i, call.tensors), 0)
    return dims + [None] * (len(call.tensors) - len(dims))


def _leaf_dims(
    function: str, names: tuple[str, str], dims: Any, tree: Any, partition: Partition, tensors: Sequence[Tensor],
    extra_axes: int,
) -> list[int | None]:  # fmt: skip
    """The entry of `dims`, a prefix of `tree`, for each of its tensors, which are to have some `extra_axes`."""
    dims_name, tree_name = names
    if dims is None or _is_axis(dims):
        values = [dims] * partition.num_leaves
    else:
        values = spread(function, dims_name, dims, tree_name, tree, partition.options)
    for label, dim, leaf in partition.others(values, tree_name):
        if dim is not None:
            raise LeafError(
                f"{function}: {label} must be a tensor where {dims_name} is {dim}, got {type(leaf).__name__}. "
                f"Pass None as its {dims_name}."
            )
    own_dims = partition.own(values)
    for i, (tensor, dim) in enumerate(zip(tensors, own_dims, strict=True)):
        if dim is None:
            continue
        ndim = tensor.dim() + extra_axes
        if not _is_axis(dim):
            label = partition.label(i, tree_name)
            raise TreeError(f"{function}: {dims_name} of {label} must be an int or None, got {dim!r}.")
        if not -ndim <= dim < ndim:
            label = partition.label(i, tree_name)
            allowed = f"in [{-ndim}, {ndim - 1}]" if ndim else "None"
            raise AxisError(
                f"{function}: {dims_name} of {label} must be {allowed} for shape {list(tensor.shape)}, got {dim}."
            )
    return own_dims


def _is_axis(dim: Any) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool)


def _common_size(call: FlatCall, dims: Sequence[int | None]) -> int:
    sizes = [None if dim is None else tensor.size(dim) for tensor, dim in zip(call.tensors, dims, strict=True)]
    found = [size for size in sizes if size is not None]
    if not found:
        raise TreeError(f"{call.function}: in_dims must map at least one tensor, got none.")
    if any(size != found[0] for size in found):
        labels = call.labels()
        listed = [
            f"{label} has {size} (axis {dim})"
            for label, size, dim in zip(labels, sizes, dims, strict=True)
            if size is not None
        ]
        raise ShapeError(f"{call.function}: all mapped axes must have the same size, but {', '.join(listed)}.")
    return found[0]


def _is_mapped(tensor: Tensor) -> bool:
    """Whether the innermost vmap maps over `tensor`."""
    return _functorch.is_batchedtensor(tensor) and (
        _functorch.maybe_get_level(tensor) == _functorch.maybe_current_level()
    )
