"""The joint function as a graph: `trace_joint`."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch._decomp import get_decompositions

from primitives.core.errors import LeafError, ShapeError
from primitives.core.trees.overlay import align, key_path, spread
from primitives.decompositions import decomposition_table
from primitives.tracing import torch_private as internals
from primitives.tracing.errors import typed_errors
from primitives.tracing.graph.joint_graph import JointGraph
from primitives.tracing.graph.rewriting import identifier, mark_forward, tidied
from primitives.tracing.graph.signature import Signature
from primitives.tracing.joint.create import (
    Leaves,
    gradients,
    loss_tangents,
    match_tangents,
    outside_inference_mode,
    require_some_input,
    run_forward,
)
from primitives.tracing.joint.devices import STAND_IN, missing_device, moved, trace_context
from primitives.tracing.joint.inspection import Inspection, inspected
from primitives.tracing.joint.opaque import refuse_opaque
from primitives.tracing.memory import is_wrapped, refuse_sharing, sharing
from primitives.tracing.random.rng import PhiloxState, rng_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["trace_joint"]

_FUNCTION = "trace_joint"
_STATE_NAMES = ("forward_seed", "forward_offset", "backward_seed", "backward_offset")


@outside_inference_mode
def trace_joint(
    fn: Callable[..., Any],
    *primals: Any,
    tangents: Any = None,
    no_tangents: bool = False,
    functionalize: bool = True,
    functionalize_rng: bool = False,
    decompose: Any = None,
    dynamic: Any = False,
    device: torch.device | str | None = None,
) -> JointGraph:
    """The graph of `create_joint(fn)`: forward and backward pass, with primitives as single nodes.

    Nothing is computed and no memory is taken: the primals may be real tensors, fake ones, or tensors on the device
    `"meta"`, and only their shapes, strides, dtypes, devices and `requires_grad` count. `fn` is called twice.
    Leaves that are no tensors are constants of the graph. Tensors that `fn` takes from elsewhere are constants too,
    and must neither require grad nor be written to; for modules, use `functional_call`.

    Args:
        fn: Function of pytrees.
        *primals: Its positional arguments. Tensors that require grad get gradients. For keyword arguments of `fn`, pass
            a function that takes them by place: `lambda w, x: fn(w, x, scale=2.0)`.
        tangents: What the cotangents will look like: a tree with the structure of the output, `None` where an output
            is to get none. By default, every output that takes one gets one.
        no_tangents: Whether the first leaf of the output is a scalar loss, whose cotangent is 1; the graph has no
            tangents then.
        functionalize: Whether writes in place become pure operations. If `fn` writes to inputs, `outs` is
            `(outs, mutated)`, as with `functionalize_mutations`: the new values of these inputs by key path, in the
            order of the leaves of `primals`.
        functionalize_rng: Whether random operations draw from two states, `rng=(forward, backward)`, each a
            `PhiloxState`. The graph takes them as further inputs, and hands them out advanced.
        decompose: Operators to take apart: a list of operators, of which torch has decompositions; a table from
            operator to function; or `"primitives"`, for the table of `primitives.decompositions`.
        dynamic: Which sizes may differ from call to call: the number of an axis, or `None`, for each leaf, or for
            whole subtrees (a tree prefix of the tuple `primals`); `True` for every axis. An axis of size 0 or 1 is
            fixed, and axes that are of one size here must be of one size in each call.
        device: Device to trace for, instead of that of the primals. It need not be there.

    Returns:
        The graph, callable as `graph(primals, tangents)`.

    Raises:
        LeafError: If no primal requires grad, a captured tensor does, a primal is sparse, nested or a wrapper subclass,
            a leaf of the primals or of the output is an object with a tensor inside, or `tangents` has a leaf where
            it must not.
        TreeError: If `tangents` or `dynamic` does not fit.
        MutationError: If `fn` writes to a captured tensor, to one of several inputs that overlap in memory, or, hidden
            from autograd, to an input that requires grad; assigns to the `.data` of any tensor; or has to do with the
            `.grad` of an input.
        TraceError: If `fn` asks for the values of a tensor, as a branch and `.item()` do; seeds torch's generator, or
            passes one; stores a tensor that it computes; or calls a collective that writes in place; or if the
            backward pass draws random numbers, as a checkpoint around dropout does, without `functionalize_rng`.
        ShapeError: If a size was to be dynamic and `fn` fixes it.

    Example:
        >>> w = torch.ones(3, requires_grad=True)
        >>> graph = trace_joint(lambda w, x: (w * x).sum(), w, torch.ones(3), no_tangents=True)
        >>> graph((w, torch.tensor([1.0, 2.0, 3.0])))
        (tensor(6.), (tensor([1., 2., 3.]), None))
        >>> graph.primal_names, graph.gradient_names
        (('w', 'x'), ('w_bar',))
    """
    given = Leaves.of(primals, "primals")
    refuse_opaque(_FUNCTION, given.values, given.label)
    require_some_input(_FUNCTION, given.values)
    places = [i for i, x in enumerate(given.values) if isinstance(x, torch.Tensor)]
    devices = [given.values[i].device if device is None else torch.device(device) for i in places]
    missing = missing_device(devices)
    _require_strided(given, places)
    labels = dict(zip(places, _primal_labels(fn, primals, places), strict=True))
    axes = _dynamic_axes(primals, given, dynamic)
    mode = internals.fake_mode(symbolic=any(axes))
    fakes = list(given.values)
    for i, where in zip(places, devices, strict=True):
        stands_in = missing is not None and where.type == missing.type
        fakes[i] = internals.fake_of(mode, given.values[i], axes[i], STAND_IN if stands_in else where)
    with mode, trace_context(missing):
        found = inspected(fn, given, fakes, functionalize=functionalize)
        alone = [places.index(i) for i in found.alone]
        overlapping = sharing([given.values[i] for i in places], alone)
        refuse_sharing(_FUNCTION, [given.label(places[i]) for i in overlapping])
        result, taken = (found.outs, found.taken)
        if functionalize and found.mutated:
            result, taken = _with_mutated(found, labels)
        cotangents = _example_tangents(result, taken, tangents, no_tangents=no_tangents)
        where = fakes[places[0]].device
        states = [torch.empty((), dtype=torch.int64, device=where) for _ in _STATE_NAMES * functionalize_rng]
        seed = [torch.empty_like(result.values[0], requires_grad=False)] if no_tangents else []
    flat = _Flat(fn, given, places, found.mutated, [y is not None for y in cotangents], functionalize, no_tangents)
    args = [*(fakes[i] for i in places), *(y for y in cotangents if y is not None), *states, *seed]
    with trace_context(missing), typed_errors(_FUNCTION):
        module = internals.trace(flat, args, mode, _table(decompose))
    signature = Signature(
        primals=given._replace(values=[None if i in set(places) else x for i, x in enumerate(given.values)]),
        places=tuple(places),
        primal_names=tuple(labels.values()),
        outs=result._replace(values=[None if _is_computed(y) else y for y in result.values]),
        computed=tuple(i for i, y in enumerate(result.values) if _is_computed(y)),
        output_names=tuple(result.label(i) for i, y in enumerate(result.values) if _is_computed(y)),
        taken=tuple(taken),
        with_tangent=tuple(i for i, y in enumerate(cotangents) if y is not None),
        gradient_places=tuple(flat.gradient_places),
        mutated=tuple(found.mutated) if functionalize else (),
        alone=tuple(alone),
        has_states=functionalize_rng,
        has_seed=no_tangents,
    )
    names = [*signature.primal_names, *signature.tangent_names, *_STATE_NAMES * functionalize_rng]
    names = [identifier(name) for name in names]
    module = tidied(module, names, pure=functionalize)
    if missing is not None:
        moved(module, missing)
    graph = JointGraph(module, signature, mode, functionalize=functionalize)
    _require_dynamic(graph, [(i, axis) for i, place in enumerate(places) for axis in axes[place]], given, dynamic)
    return graph


class _Flat:
    """The joint function over flat tensors, as it is traced, and what tracing it found out.

    Attributes:
        gradient_places: Places of the primals that get a gradient.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        given: Leaves,
        places: Sequence[int],
        mutated: Sequence[int],
        has_tangent: Sequence[bool],
        functionalize: bool,
        no_tangents: bool,
    ) -> None:
        self._fn, self._given, self._places, self._mutated = fn, given, places, mutated
        self._has_tangent, self._functionalize, self._no_tangents = has_tangent, functionalize, no_tangents
        self.gradient_places: list[int] = []

    def __call__(self, *args: Tensor) -> tuple:
        """Outputs, forward state, gradients, backward state."""
        if not self._functionalize:
            return tuple(self._run(args))
        with internals.functional_world():
            return tuple(internals.plain(x) for x in self._run([internals.wrapped(x) for x in args]))

    def _run(self, args: Sequence[Tensor]) -> list[Any]:
        leaves = list(self._given.values)
        for place, x in zip(self._places, args, strict=False):
            leaves[place] = x
        rest = iter(args[len(self._places) :])
        cotangents = [next(rest) if flag else None for flag in self._has_tangent]
        states = list(rest)
        if self._no_tangents:
            cotangents = [states.pop(), *cotangents[1:]]
        # The gradient is that with respect to the value before any write.
        written = set(self._mutated) if self._functionalize else set()
        used = [x.clone() if i in written and x.requires_grad else x for i, x in enumerate(leaves)]
        with _drawing_from(states[:2]) as forward_state:
            outs = Leaves.of(run_forward(_FUNCTION, self._fn, self._given.join(used)), "outs")
            values = [*outs.values, *(used[i] for i in sorted(written))]
            results = [*(y for y in values if _is_computed(y)), *forward_state()]
        for y in results:
            internals.plain(y)
        mark_forward(internals.recorded_nodes())
        with _drawing_from(states[2:]) as backward_state:
            bars = gradients(_FUNCTION, leaves, values, cotangents)
            self.gradient_places = [i for i, bar in enumerate(bars) if bar is not None]
            return [*results, *(bar for bar in bars if bar is not None), *backward_state()]


@contextlib.contextmanager
def _drawing_from(state: Sequence[Tensor]) -> Any:
    """Context in which random numbers come from a state, if there is one; gives a function for the state after it."""
    if not state:
        yield lambda: ()
        return
    with rng_mode(PhiloxState(*state)) as random:
        yield lambda: tuple(random.state)


def _is_computed(y: Any) -> bool:
    return isinstance(y, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _with_mutated(found: Inspection, labels: dict[int, str]) -> tuple[Leaves, list[bool]]:
    mutated = OrderedDict((labels[i], found.clones[i]) for i in found.mutated)
    result = Leaves.of((found.outs.join(found.outs.values), mutated), "outs")
    return result, [*found.taken, *found.mutated_taken]


def _example_tangents(
    result: Leaves, taken: Sequence[bool], tangents: Any, *, no_tangents: bool
) -> list[Tensor | None]:
    """A cotangent without memory for each leaf of the output that will have one."""
    if no_tangents:
        if tangents is not None:
            raise TypeError(f"{_FUNCTION}: with no_tangents=True there are no tangents to pass.")
        loss_tangents(_FUNCTION, result, taken)
        return [None] * len(taken)
    wanted = list(taken)
    if tangents is not None:
        likes = result._replace(values=[_as_traced(y) for y in result.values])
        options = {"namespace": "", "is_leaf": None}
        pieces = align(_FUNCTION, "tangents", tangents, "outs", likes.join(likes.values), options)
        described = likes.join([_as_traced(piece) for piece in pieces])
        wanted = [piece is not None for piece in match_tangents(_FUNCTION, likes, taken, described)]
    with torch.no_grad():
        return [torch.empty_like(y) if flag else None for y, flag in zip(result.values, wanted, strict=True)]


def _as_traced(y: Any) -> Any:
    """A tensor on no device, of the sizes of the example."""
    if not isinstance(y, torch.Tensor):
        return y
    sizes, strides = ([internals.hinted_size(n) for n in part] for part in (y.shape, y.stride()))
    return internals.bare(sizes, strides, y.dtype)


def _require_strided(given: Leaves, places: Sequence[int]) -> None:
    for i in places:
        x = given.values[i]
        if x.layout != torch.strided or x.is_nested or is_wrapped(x):
            raise LeafError(
                f"{_FUNCTION}: {given.label(i)} must be a dense tensor of its own, got {type(x).__name__} of "
                f"{x.layout}. Pass its values and indices; for a wrapper subclass, use unwrap_subclasses."
            )


def _dynamic_axes(primals: tuple, given: Leaves, dynamic: Any) -> list[list[int]]:
    """Axes of each leaf whose sizes are symbols."""
    options = {"namespace": "", "is_leaf": None}
    entries = spread(_FUNCTION, "dynamic", False if dynamic is None else dynamic, "primals", primals, options)
    axes = []
    for i, (entry, x) in enumerate(zip(entries, given.values, strict=True)):
        if not isinstance(x, torch.Tensor) or entry is None or entry is False:
            axes.append([])
        elif entry is True:
            axes.append([axis for axis in range(x.dim()) if x.shape[axis] > 1])
        elif isinstance(entry, int) and -x.dim() <= entry < x.dim():
            axes.append([entry % x.dim()])
        else:
            raise ShapeError(
                f"{_FUNCTION}: dynamic must hold an axis of {given.label(i)}, which has {x.dim()}, a bool or None, got "
                f"{entry!r}."
            )
    return axes


def _require_dynamic(graph: JointGraph, axes: Sequence[tuple[int, int]], given: Leaves, dynamic: Any) -> None:
    """Raise if an axis that was named as dynamic has got a fixed size."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    for i, axis in axes if dynamic is not True else ():
        size = internals.settled_size(placeholders[i].meta["val"].shape[axis])
        if size is not None:
            raise ShapeError(
                f"{_FUNCTION}: axis {axis} of {graph.primal_names[i]} cannot be dynamic: the function, or torch for "
                f"sizes 0 and 1, fixes its size to {size}."
            )


def _primal_labels(fn: Callable[..., Any], primals: tuple, places: Sequence[int]) -> list[str]:
    """Key paths of the tensors, which begin with the names of the parameters of `fn`."""
    try:
        parameters = [
            p
            for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        parameters = []
    roots = [p.name for p in parameters] + [f"args[{i}]" for i in range(len(primals) - len(parameters))]
    paths = [
        key_path(accessor, root)
        for root, primal in zip(roots, primals, strict=False)
        for accessor in optree.tree_accessors(primal)
    ]
    return [paths[i] for i in places]


def _table(decompose: Any) -> dict[Any, Any] | None:
    if decompose is None:
        return None
    if isinstance(decompose, str):
        if decompose != "primitives":
            raise ValueError(f'{_FUNCTION}: decompose must be "primitives", a list or a table, got {decompose!r}.')
        return dict(decomposition_table)
    return dict(decompose) if isinstance(decompose, dict) else get_decompositions(list(decompose))
