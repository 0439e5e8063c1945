"""`torch.autograd.backward` and `torch.autograd.grad` over pytrees of tensors and gradient edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, ValuesView
from typing import Any, cast, overload

import optree
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from primitives._core.errors import DtypeError, LeafError, ShapeError, TreeError
from primitives._core.trees.leaves import Meta, check_like
from primitives._core.typing import PyTree
from primitives.tracing._leaves import Leaves

__all__ = ["backward", "grad"]


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *,
    inputs: Any = None,
    namespace: str = "",
) -> None:
    """Add the gradient of `tensors` to the `.grad` of the leaves of their graph.

    Args:
        tensors: Pytree of tensors and `GradientEdge`s to differentiate.
        grad_tensors: Their cotangents: a tree of the structure of `tensors`, in shapes and dtypes too, with `None` for
            a real tensor of one element, which means 1. `None` stands for such a tree of `None`s.
        retain_graph: Whether the graph can be used again. `None` means what `create_graph` says.
        create_graph: Whether the gradients can be differentiated. They then refer to the graph that refers to them:
            use `grad`, or set `.grad` to `None` afterwards.
        inputs: Pytree of tensors and `GradientEdge`s: gradients are added to these and to nothing else. `None` means
            all leaves of the graph. Here and in `tensors`, an iterable that is not a pytree node, such as
            `module.parameters()`, stands for the tuple of its elements.
        namespace: optree namespace of custom pytree nodes.

    Raises:
        RuntimeError: If a transform of `torch.func` is active, or the graph was freed.
        TreeError: If `tensors` or `inputs` is empty, or `grad_tensors` has another structure than `tensors`.
        LeafError: If a leaf is neither a tensor that requires grad nor a `GradientEdge`, or a cotangent no tensor.
        ShapeError: If a cotangent has another shape than its tensor, or is missing for a tensor of several elements.
        DtypeError: If a cotangent has another dtype than its tensor, or is missing for a complex one.
        DeviceError: If a cotangent is on another device than its tensor.

    Example:
        >>> import torch, primitives as pr
        >>> params = {"w": torch.ones(2, requires_grad=True), "b": torch.ones((), requires_grad=True)}
        >>> losses = {"fit": (params["w"] * 3).sum(), "penalty": params["b"] ** 2}
        >>> pr.autograd.backward(losses)
        >>> params["w"].grad, params["b"].grad
        (tensor([3., 3.]), tensor(2.))
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "backward: it must be called outside of the transforms of torch.func and primitives.func, which track "
            "gradients on their own and have no .grad to add to. Use primitives.func.grad or vjp inside them."
        )
    outputs = _leaves("backward", "tensors", tensors, namespace)
    cotangents = _cotangents("backward", outputs, "grad_tensors", grad_tensors, batched=False)
    targets = None if inputs is None else _leaves("backward", "inputs", inputs, namespace).values
    torch.autograd.backward(outputs.values, cotangents, retain_graph, create_graph, inputs=targets)


@overload
def grad(
    outputs: Any, inputs: Tensor | GradientEdge, grad_outputs: Any = None,
    retain_graph: bool | None = None, create_graph: bool = False, *, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False, namespace: str = "",
) -> tuple[Tensor]: ...  # fmt: skip


@overload
def grad(
    outputs: Any, inputs: Iterator[Tensor] | ValuesView[Tensor] | tuple[GradientEdge, ...], grad_outputs: Any = None,
    retain_graph: bool | None = None, create_graph: bool = False, *, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False, namespace: str = "",
) -> tuple[Tensor, ...]: ...  # fmt: skip


@overload
def grad(
    outputs: Any, inputs: PyTree, grad_outputs: Any = None,
    retain_graph: bool | None = None, create_graph: bool = False, *, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False, namespace: str = "",
) -> PyTree: ...  # fmt: skip


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
    namespace: str = "",
) -> Any | tuple[Tensor, ...]:
    """Gradient of `outputs` with respect to `inputs`, as a tree; adds nothing to `.grad`.

    Args:
        outputs: Pytree of tensors and `GradientEdge`s to differentiate. Their gradients are added up.
        inputs: Pytree of tensors and `GradientEdge`s to differentiate with respect to. Here and in `outputs`, an
            iterable that is not a pytree node, such as `module.parameters()`, stands for the tuple of its elements.
        grad_outputs: Cotangents of the outputs: a tree of their structure, in shapes and dtypes too, with `None` for a
            real output of one element, which means 1. `None` stands for such a tree of `None`s.
        retain_graph: Whether the graph can be used again. `None` means what `create_graph` says.
        create_graph: Whether the result can be differentiated.
        allow_unused: Whether an input that the outputs do not depend on has the gradient `None`, and is not an error.
            `None` means what `materialize_grads` says.
        is_grads_batched: Whether each cotangent has one more axis, the first, of the same size in all. The result has
            it too: one gradient for each entry, computed together.
        materialize_grads: Whether an input that the outputs do not depend on has a gradient of zeros.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        The gradients in the structure of `inputs`; a tuple of one, as torch returns it, where `inputs` is a tensor or a
        `GradientEdge` itself.

    Raises:
        ValueError: If `materialize_grads` and `allow_unused` is `False`.
        RuntimeError: If an input is unused and that is not allowed, or `materialize_grads` meets an unused
            `GradientEdge`.
        ShapeError: If batch axes differ in size.
        Exception: As `backward` raises it.

    Example:
        >>> import torch, primitives as pr
        >>> params = {"w": torch.ones(2, requires_grad=True), "b": torch.ones((), requires_grad=True)}
        >>> pr.autograd.grad((params["w"] * 3).sum() + params["b"] ** 2, params)
        {'w': tensor([3., 3.]), 'b': tensor(2.)}
        >>> pr.autograd.grad((params["w"] ** 2).sum(), params["w"])[0]
        tensor([2., 2.])
    """
    if materialize_grads and allow_unused is False:
        raise ValueError(
            "grad: allow_unused must be True or not given with materialize_grads=True, which replaces the gradients "
            "of unused inputs, got False."
        )
    roots = _leaves("grad", "outputs", outputs, namespace, batched=is_grads_batched)
    targets = _leaves("grad", "inputs", inputs, namespace, batched=is_grads_batched)
    cotangents = _cotangents("grad", roots, "grad_outputs", grad_outputs, batched=is_grads_batched)
    batch = cast("Tensor", cotangents[0]).shape[:1] if is_grads_batched else ()
    # torch cannot map over an empty axis: one gradient, of zeros, is computed and cut off.
    empty = 0 in batch
    if empty:
        cotangents = [value.new_zeros(value.shape[1:]) for value in cast("list[Tensor]", cotangents)]
    gradients: Any = torch.autograd.grad(
        roots.values,
        targets.values,
        cotangents,
        retain_graph,
        create_graph,
        allow_unused=True,
        is_grads_batched=is_grads_batched and not empty,
    )
    if empty:
        gradients = [None if gradient is None else gradient[None][:0] for gradient in gradients]
    unused = [i for i, gradient in enumerate(gradients) if gradient is None]
    if unused and not (allow_unused or materialize_grads):
        raise RuntimeError(
            f"grad: every one of inputs must be used to compute outputs, but {', '.join(map(targets.label, unused))} "
            "is not. Pass allow_unused=True for a gradient of None, or materialize_grads=True for zeros."
        )
    if unused and materialize_grads:
        gradients = list(gradients)
        for i in unused:
            leaf = targets.values[i]
            if _is_edge(leaf):
                raise RuntimeError(
                    "grad: materialize_grads=True must have tensors for unused inputs, got a GradientEdge at "
                    f"{targets.label(i)}."
                )
            # torch would give zeros without the batch axis.
            zeros = torch.zeros_like(leaf)
            zeros = zeros.expand((*batch, *leaf.shape)).clone() if batch else zeros
            gradients[i] = zeros.requires_grad_(create_graph)
    # A bare gradient would make `[0]`, which everybody writes after torch's function, its first row.
    return (gradients[0],) if isinstance(targets.skeleton, int) else targets.join(gradients)


def _is_edge(node: Any) -> bool:
    # A GradientEdge is a namedtuple, hence a node to optree.
    return isinstance(node, GradientEdge)


def _collected(tree: Any, namespace: str) -> Any:
    """`tree`, or the tuple of its elements if it is an iterable that is not a node, such as `module.parameters()`."""
    single = isinstance(tree, (torch.Tensor, GradientEdge, str)) or not isinstance(tree, Iterable)
    return tree if single or not optree.tree_is_leaf(cast("Any", tree), namespace=namespace) else tuple(tree)


def _leaves(function: str, name: str, tree: Any, namespace: str, *, batched: bool = False) -> Leaves:
    """Leaves of `outputs` or `inputs`, each a gradient edge or a tensor that requires grad."""
    leaves = Leaves.of(_collected(tree, namespace), name, namespace, _is_edge)
    if not leaves.values:
        raise TreeError(f"{function}: {name} must hold at least one tensor, got none.")
    for i, leaf in enumerate(leaves.values):
        if not isinstance(leaf, (torch.Tensor, GradientEdge)):
            raise LeafError(
                f"{function}: {leaves.label(i)} must be a tensor or a GradientEdge, got {type(leaf).__name__}."
            )
        if isinstance(leaf, torch.Tensor) and not leaf.requires_grad:
            raise LeafError(
                f"{function}: {leaves.label(i)} must require grad, or result from tensors that do, got one that does "
                "not. Call requires_grad_() on a tensor before it is used, and compute outside of no_grad."
            )
        if batched and _meta(leaf).shape is None:
            # Torch would raise an internal error.
            raise LeafError(
                f"{function}: {leaves.label(i)} must not be a nested tensor with is_grads_batched=True, which torch "
                "has no batches of. Call it once for each cotangent."
            )
    return leaves


def _meta(leaf: Any) -> Meta:
    """The form that a cotangent must have; a nested tensor has no shape of its own."""
    source = leaf.node._input_metadata[leaf.output_nr] if _is_edge(leaf) else leaf
    is_nested = source.is_nested_tensor if _is_edge(leaf) else source.is_nested
    return Meta(None if is_nested else torch.Size(source.shape), source.dtype, source.device)  # type: ignore[arg-type] - checked by name


def _cotangents(function: str, outputs: Leaves, name: str, tree: Any, *, batched: bool) -> list[Tensor | None]:
    """The cotangent of each output, `None` where it is implicit."""
    values: list[Any] = [None] * len(outputs.values)
    if tree is not None:
        values = outputs.aligned(function, name, _collected(tree, outputs.namespace), str(outputs.roots))
    given = outputs._replace(roots=name)
    for i, (output, value) in enumerate(zip(outputs.values, values, strict=True)):
        meta = _meta(output)
        if batched or value is not None or not _is_implicit(meta):
            check = _check_implicit if value is None else _check_cotangent
            check(function, given.label(i), outputs.label(i), value, meta, batched=batched)
    if batched and len({value.shape[0] for value in values}) > 1:
        listed = ", ".join(f"{given.label(i)} has {value.shape[0]}" for i, value in enumerate(values))
        raise ShapeError(f"{function}: all batch axes must have the same size, but {listed}.")
    return values


def _is_implicit(meta: Meta) -> bool:
    """Whether a cotangent of 1 goes without saying."""
    return meta.shape is not None and meta.shape.numel() == 1 and meta.dtype.is_floating_point


def _check_implicit(function: str, label: str, output_label: str, _: None, meta: Meta, *, batched: bool) -> None:
    if batched:
        raise ShapeError(f"{function}: {label} must be given with is_grads_batched=True, got None.")
    given = "is a nested tensor" if meta.shape is None else f"has shape {list(meta.shape)} and dtype {meta.dtype}"
    raise (ShapeError if meta.shape is None or meta.shape.numel() != 1 else DtypeError)(
        f"{function}: {label} must be given, got None: it is implicitly 1 only for a real output of one element, "
        f"and {output_label} {given}."
    )


def _check_cotangent(function: str, label: str, output_label: str, value: Any, meta: Meta, *, batched: bool) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_nested != (meta.shape is None):
            kinds = ("a nested", "a plain") if meta.shape is None else ("a plain", "a nested")
            raise ShapeError(f"{function}: {label} must be {kinds[0]} tensor ({output_label}), got {kinds[1]} one.")
        if value.is_nested:
            # Torch itself compares what is inside.
            return
        if batched:
            meta = meta._replace(shape=torch.Size([*(value.shape[:1] or (1,)), *meta.shape]))
    check_like(function, label, value, output_label, meta)
