"""The joint function as a graph: `trace_joint`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core.errors import DeviceError, LeafError, MutationError, ShapeError, TraceError, check_arguments
from primitives._core.trees.overlay import spread
from primitives.decompositions import decomposition_table
from primitives.tracing import _torch_private as torch_private
from primitives.tracing._errors import typed_errors
from primitives.tracing._graph.joint_graph import JointGraph
from primitives.tracing._graph.rewriting import COTANGENT, SEED, TAG, identifier, tidied
from primitives.tracing._graph.signature import Signature
from primitives.tracing._joint.create import (
    checked_primals,
    outside_inference_mode,
    require_loss,
    run_joint,
    takes_cotangent,
)
from primitives.tracing._joint.writes import Functional, Plain
from primitives.tracing._leaves import Leaves
from primitives.tracing._memory import is_dense, is_wrapped, memories, refuse_sharing
from primitives.tracing._random.rng import PhiloxState, rng_mode
from primitives.tracing._watching import constant_written

_FUNCTION = "trace_joint"
_STATE_NAMES = ("forward_seed", "forward_offset", "backward_seed", "backward_offset")


def trace_joint(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, *,
    no_cotangents: bool = False, functionalize_rng: bool = False, decompose: Any = None, dynamic: Any = False,
    device: torch.device | str | None = None, namespace: str = "",
) -> JointGraph:  # fmt: skip
    """The graph of `create_joint(fn)`: forward and backward pass, with primitives as single nodes.

    The primals are the positional arguments, and then those by keyword, in the order that they are given in.
    Nothing is computed and no memory is taken: the primals may be real tensors, fake ones, or tensors on the device
    `"meta"`, and only their shapes, strides, dtypes, devices and `requires_grad` count. `fn` is called once.
    Leaves that are not tensors are constants of the graph. Tensors that `fn` takes from elsewhere are constants too,
    and must neither require grad nor be written to; for modules, use `pure_module`. Writes in place become pure
    operations: if `fn` writes to inputs, `outs` is `(outs, mutated)`, as with `functionalize_mutations`, with the new
    values of these inputs by key path, in the order of the leaves of `primals`. (`make_fx` of `create_joint(fn)` keeps
    writes in place.)

    Args:
        fn: Function of pytrees.
        args: Tuple of its positional arguments. Tensors that require grad get gradients.
        kwargs: Its keyword arguments; the graph takes them as its last primals, by place.
        no_cotangents: Whether the first leaf of the output is a scalar loss, whose cotangent is 1; the graph has no
            cotangents then.
        functionalize_rng: Whether random operations draw from two states, `rng=(forward, backward)`, each a
            `PhiloxState`. The graph takes them as further inputs, and hands them out advanced.
        decompose: Operators to take apart: a list of operators, of which torch has decompositions; a table from
            operator to function; or `"primitives"`, for the table of `primitives.decompositions`.
        dynamic: Which sizes may differ from call to call: the number of an axis, or `None`, for each leaf, or for
            whole subtrees (a tree prefix of the tuple `primals`); `True` for every axis. An axis of size 0 or 1
            stays fixed, and so does one that `fn` fixes; axes of one size here must be of one size in each call.
        device: Device to trace for, instead of that of the primals.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        The graph, callable as `graph(primals, cotangents)`.

    Raises:
        LeafError: If no primal requires grad, a captured tensor does, a primal is sparse, nested or a wrapper subclass,
            or a leaf of the primals or of the output is an object with a tensor in an attribute.
        TreeError: If `args` is not a tuple, or `dynamic` does not fit.
        MutationError: If `fn` writes to a captured tensor or to one of several inputs that overlap in memory, assigns
            to the `.data` of any tensor, or calls a collective that writes in place.
        TraceError: If `fn` asks for the values of a tensor, as a branch and `.item()` do; or if the backward pass draws
            random numbers, as a checkpoint around dropout does, without `functionalize_rng`.
        DeviceError: If a CUDA device is to be traced for, and there is none.
        ShapeError: If `dynamic` names an axis that is not there.

    Example:
        >>> import torch, primitives as pr
        >>> w = torch.ones(3, requires_grad=True)
        >>> graph = pr.tracing.trace_joint(lambda w, x: (w * x).sum(), (w, torch.ones(3)), no_cotangents=True)
        >>> graph((w, torch.tensor([1.0, 2.0, 3.0])))
        (tensor(6.), (tensor([1., 2., 3.]), None))
        >>> graph.primal_names, graph.gradient_names
        (('w', 'x'), ('w_bar',))
    """
    check_arguments(_FUNCTION, "args", args)
    primals, by_place = args, fn
    if kwargs:
        primals, num, keys = (*args, *kwargs.values()), len(args), tuple(kwargs)

        def by_place(*values: Any) -> Any:
            return fn(*values[:num], **dict(zip(keys, values[num:], strict=True)))

    given = checked_primals(_FUNCTION, fn, args, kwargs, namespace)
    axes = _dynamic_axes(primals, given, dynamic)
    return traced(
        _FUNCTION,
        by_place,
        given,
        axes,
        no_cotangents=no_cotangents,
        functionalize_rng=functionalize_rng,
        table=_table(decompose),
        device=device,
    )


def traced(
    function: str, fn: Callable[..., Any], given: Leaves, axes: Sequence[Sequence[int]], *, no_cotangents: bool = False,
    functionalize_rng: bool = False, table: dict[Any, Any] | None = None, device: torch.device | str | None = None,
    pure: bool = False, functional: bool = True,
) -> JointGraph:  # fmt: skip
    """The joint graph of `fn` at the leaves `given`, which may all be constants, with symbols for the sizes of `axes`.

    With `pure`, `fn` must not write to what it is given, what it returns shares no memory with that, and cotangents are
    contiguous. Where `fn` writes to none but its own memory, and makes no views of that before, the trace may be
    without functionalization, which is faster: unless `functional`.
    """
    places = tuple(i for i, x in enumerate(given.values) if isinstance(x, torch.Tensor))
    tensors = [given.values[i] for i in places]
    for i, x in zip(places, tensors, strict=True):
        if x.layout != torch.strided or x.is_nested or is_wrapped(x):
            raise LeafError(
                f"{function}: {given.label(i)} must be a dense tensor of its own, got {type(x).__name__} of "
                f"{x.layout}. Pass its values and indices; for a wrapper subclass, use unwrap_subclasses."
            )
    mode = torch_private.fake_mode(symbolic=any(axes))
    devices = [x.device if device is None else torch.device(device) for x in tensors]
    if any(on.type == "cuda" for on in devices) and not torch.cuda.is_available():
        # Autograd asks the driver for the stream of every CUDA tensor, fake ones too, and aborts the process.
        raise DeviceError(f"{function}: tracing for a CUDA device needs one, and there is none. Trace on the CPU.")
    constants = given._replace(values=[None if i in places else x for i, x in enumerate(given.values)])
    signature = Signature(constants, places, functionalize_rng)

    def flat(*tensors: Tensor) -> tuple[Any, ...]:
        if not functional:
            return tuple(_run(function, fn, signature, no_cotangents, tensors, set(), pure, functional))
        with torch_private.functional_world() as world:
            wrapped = [torch_private.wrapped(x) for x in tensors]
            results = _run(function, fn, signature, no_cotangents, wrapped, world.copied, pure, functional)
            return tuple(map(torch_private.plain, results))

    states = _STATE_NAMES * functionalize_rng
    with outside_inference_mode(), typed_errors(function):
        fakes = zip(tensors, places, devices, strict=True)
        flat_args = [torch_private.fake_of(mode, x, axes[i], on) for x, i, on in fakes]
        with mode:
            flat_args += [torch.empty((), dtype=torch.int64, device=devices[0]) for _ in states]
        module = torch_private.trace(flat, flat_args, mode, table)
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, str(node.target)), torch_private.FakeTensor):
            lines = (node.stack_trace or "its result").split("\n")
            raise TraceError(
                f"{function}: a trace inside the function, as torch.func.linearize is one, has made a tensor without "
                f"values, used in {lines[0].strip()}. For torch.func.linearize take primitives.func.linearize."
            )
    primal_names = given.labels(places)
    refuse_sharing(function, primal_names, tensors, signature.alone)
    names = [*map(identifier, primal_names), *states]
    cotangent_names = [*map(identifier, signature.outs._replace(roots="cotangents").labels(signature.with_cotangent))]
    module = tidied(module, names, cotangent_names, len(places))
    values = [] if functional else [node.meta.get("val") for node in module.graph.nodes]
    if any(x.device.type == "meta" for x in values if isinstance(x, torch.Tensor)):
        # Autograd has taken a fake tensor for that which it wraps, in the zero of a number.
        raise TraceError(f"{function}: a gradient is on another device.")
    return JointGraph(module, signature, mode)


def _run(
    function: str, fn: Callable[..., Any], signature: Signature, no_cotangents: bool, args: Sequence[Tensor],
    copied: set[int], pure: bool, functional: bool,
) -> list[Any]:  # fmt: skip
    """Outputs, forward state, gradients, backward state of flat tensors; fills the signature."""
    places, given = signature.places, signature.primals
    leaves = list(given.values)
    for place, x in zip(places, args, strict=False):
        leaves[place] = x
    used = [_copy(x) for x in leaves]
    before = {i: (used[i].grad_fn, used[i].shape, used[i].stride()) for i in places}
    states = args[len(places) :]
    random = [rng_mode(PhiloxState(*pair)) for pair in (states[:2], states[2:]) if pair]
    results: list[Any] = []
    calls = Functional() if functional else Plain([*leaves, *used])

    def cotangents_of(outs: Leaves) -> tuple[Leaves, list[Tensor | None]]:
        if calls.refusal is not None:
            raise constant_written(function, *calls.refusal)
        signature.mutated = tuple(
            i
            for i, (_, *geometry) in before.items()
            if torch_private.has_data_mutation(used[i]) or geometry != [used[i].shape, used[i].stride()]
        )
        if pure:
            lines = [calls.lines[n] for i in signature.mutated for n in memories(used[i]) if n in calls.lines]
            _refuse_writes(function, given, signature.mutated, lines)
            outs = outs._replace(values=_apart(outs.values, [used[i] for i in places]))
        written = {i for i in places if i in signature.mutated or not copied.isdisjoint(memories(used[i]))}
        signature.alone = tuple(number for number, i in enumerate(places) if i in written)
        is_differentiated = any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
        taken = [i for i, y in enumerate(outs.values) if is_differentiated and takes_cotangent(y, used)]
        if signature.mutated:
            mutated = OrderedDict((given.label(i), used[i]) for i in signature.mutated)
            outs, num = Leaves.of((outs.join(outs.values), mutated), "outs", given.namespace), len(outs.values)
            # Autograd does not see a write under `no_grad`: a step of an optimizer is not part of the derivative.
            seen = [takes_cotangent(used[i], ()) and used[i].grad_fn is not before[i][0] for i in signature.mutated]
            taken += [num + i for i, flag in enumerate(seen) if flag]
        signature.computed = tuple(i for i, y in enumerate(outs.values) if _is_computed(y))
        signature.outs = outs._replace(values=[None if _is_computed(y) else y for y in outs.values])
        results.extend([*(outs.values[i] for i in signature.computed), *(random[0].state if random else ())])
        for y in results:
            torch_private.plain(y)
        for node in torch_private.recorded_nodes():
            node.meta[TAG] = "is_forward"
        if no_cotangents:
            require_loss(function, outs, taken)
            taken = [0]
        else:
            signature.with_cotangent = tuple(taken)
        layout = torch.contiguous_format if pure else torch.preserve_format
        return outs, [
            _stand_in(y, layout, is_loss=no_cotangents) if i in taken else None for i, y in enumerate(outs.values)
        ]

    with calls:
        _, bars = run_joint(function, fn, given, leaves, used, cotangents_of, captures=False, modes=random)
    signature.gradient_places = tuple(i for i, bar in enumerate(bars) if bar is not None)
    if pure:
        bars = _apart(bars, [*results, *args])
    return [*results, *(bar for bar in bars if bar is not None), *(random[1].state if random else ())]


def _refuse_writes(function: str, given: Leaves, mutated: Sequence[int], lines: Sequence[str]) -> None:
    if mutated:
        where = f", at {lines[0]}" if lines else ""
        raise MutationError(
            f"{function}: the function writes to {', '.join(given.labels(mutated))} in place{where}, and the caller "
            "would not see it. Return the new value."
        )


def _apart(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The values, copied where they share memory with one before or with `others`: autograd wants no views."""
    taken, found = {number for x in others for number in memories(x)}, []
    for y in values:
        numbers = memories(y) if isinstance(y, torch.Tensor) else []
        found.append(y if taken.isdisjoint(numbers) else y.clone())
        taken.update(numbers)
    return found


def _stand_in(y: Tensor, layout: torch.memory_format, *, is_loss: bool) -> Tensor:
    """A tensor whose node becomes an input of the graph, or the cotangent of a loss."""
    with torch.no_grad():
        if is_loss:
            made = torch.full(y.shape, 1, dtype=y.dtype, device=y.device)
        else:
            made = torch.empty_like(y, memory_format=layout)
    torch_private.node_of(made).meta[torch_private.ROLE] = SEED if is_loss else COTANGENT
    return made


def _copy(x: Any) -> Any:
    """The tensor for `fn` to write to: the gradient is that before any write, and autograd lets no leaf be written."""
    if not (isinstance(x, torch.Tensor) and x.requires_grad):
        return x
    # A copy has other strides where elements overlap or lie apart; the graph must not come to rely on these.
    has_no_gaps = is_dense(x)
    with torch_private.unrecorded():
        copy = x.clone() if has_no_gaps else torch.ops.aten.alias.default(x)
    torch_private.record_as(copy, x)
    return copy


def _is_computed(y: Any) -> bool:
    return isinstance(y, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _dynamic_axes(primals: tuple[Any, ...], given: Leaves, dynamic: Any) -> list[list[int]]:
    """Axes of each leaf whose sizes are symbols."""
    options = {"namespace": given.namespace, "is_leaf": None}
    entries = spread(_FUNCTION, "dynamic", False if dynamic is None else dynamic, "primals", primals, options)
    axes = []
    for i, (entry, x) in enumerate(zip(entries, given.values, strict=True)):
        if not isinstance(x, torch.Tensor) or entry is None or entry is False:
            axes.append([])
        elif entry is True or (isinstance(entry, int) and -x.dim() <= entry < x.dim()):
            axes.append([*range(x.dim())] if entry is True else [entry % x.dim()])
        else:
            raise ShapeError(
                f"{_FUNCTION}: dynamic must hold an axis of {given.label(i)}, which has {x.dim()}, a bool or None, got "
                f"{entry!r}."
            )
    return [[axis for axis in found if given.values[i].shape[axis] > 1] for i, found in enumerate(axes)]


def _table(decompose: Any) -> dict[Any, Any]:
    if decompose is None:
        # Without any table, torch 2.15 records no `detach`, and a derivative of the graph would pass it.
        return {}
    if isinstance(decompose, str):
        if decompose != "primitives":
            raise ValueError(f'{_FUNCTION}: decompose must be "primitives", a list or a table, got {decompose!r}.')
        return dict(decomposition_table)
    return dict(decompose) if isinstance(decompose, dict) else torch_private.get_decompositions(list(decompose))
