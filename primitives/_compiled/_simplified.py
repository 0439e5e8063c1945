"""Algebra on graphs: tangents and cotangents that are zero are left out, and products that no library need compute."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from primitives._core.errors import LeafError
from primitives._core.inductor import ZERO
from primitives.decompositions import decomposition_table
from primitives.decompositions._linalg import det_of_factors
from primitives.tracing._torch_private import GraphModule

__all__ = [
    "DECOMPOSITIONS",
    "FACTORED",
    "absent_results",
    "cut",
    "from_the_start",
    "inductor_mended",
    "of_any_strides",
    "read_by_offset",
    "simplify",
    "with_plain_zeros",
]

_aten = torch.ops.aten
# Marks zeros that `moving` inputs do not lead to.
_ABSENT = "is absent"
# Zero where one of two arguments is.
_PRODUCTS = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.mm.default, _aten.bmm.default}
# Zero where all tensors among the arguments are.
_LINEAR = {
    *(_aten.neg.default, _aten.sum.default, _aten.sum.dim_IntList),
    *(_aten.permute.default, _aten.view.default, _aten.expand.default),
    *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.slice.Tensor, _aten.select.int),
    *(_aten.clone.default, _aten.cat.default, _aten.slice_scatter.default, _aten.select_scatter.default),
    *(_aten.diagonal.default, torch.ops.prims.convert_element_type.default),
}
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)
_AVERAGES = _aten.avg_pool2d_backward.default, _aten.avg_pool3d_backward.default
_PERMUTE, _WIDE = _aten.permute.default, (torch.float32, torch.float64)


class _NegativeZero(float):
    """What is equal to itself alone: torch takes 1 / -0.0 and 1 / 0.0 for one expression."""

    __eq__, __hash__ = object.__eq__, object.__hash__  # type: ignore[assignment] - of a float


def _apart(x: Any) -> Any:
    return _NegativeZero(x) if isinstance(x, float) and x == 0 and math.copysign(1, x) < 0 else x


def _map_arguments(graph: fx.Graph, function: Callable[[Any], Any]) -> None:
    for node in graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, function), map_aggregate(node.kwargs, function)


def with_plain_zeros(graph: fx.Graph) -> None:
    """Give a graph that is simplified, in place, the numbers that compilers know."""
    _map_arguments(graph, lambda x: float(x) if isinstance(x, _NegativeZero) else x)


def simplify(module: fx.GraphModule) -> None:
    """Change a joint graph in place to one of fewer operations.

    Left out are tangents of what does not move, which torch makes as zeros where a sum of products has another term,
    and transpositions back and forth. The product of a column and a row becomes elementwise.
    """
    graph = module.graph
    _map_arguments(graph, _apart)
    _without_zeros(graph, {node for node in graph.nodes if node.meta.get(ZERO)})
    for node in graph.find_nodes(op="call_function", target=_PERMUTE):
        (x, axes), num = node.args, len(node.args[1])
        if x.target is _PERMUTE:
            node.args = x, axes = x.args[0], [x.args[1][k] % num for k in axes]
        if [*axes] == [*range(num)]:
            node.replace_all_uses_with(x)
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        num = node.args[0].meta["val"].shape[1]
        if isinstance(num, int) and num == 1:
            node.target = _aten.mul.Tensor
    for node in graph.find_nodes(op="call_function", target=_aten.copy.default):
        source: Any = node.args[1]
        if _alike(source, node) and source.meta["val"].stride() == node.meta["val"].stride():
            # Batches have no rule for a copy.
            node.target, node.args = _aten.clone.default, (source,)
    graph.eliminate_dead_code()
    module.recompile()


def _without_zeros(graph: fx.Graph, zeros: Set[fx.Node], moving: Set[fx.Node] | None = None) -> bool:
    """Leave out what is zero with `zeros`, in place; `False` where sizes that are symbols keep some of it.

    `moving` are the other inputs in which, as in `zeros`, all is linear that depends on any.
    """
    zeros, depends = set(zeros), set(moving or ())
    for node in graph.nodes if zeros else ():
        inputs = node.all_input_nodes
        others = [x for x in inputs if x not in zeros and (moving is None or x in depends)]
        if node.op == "call_function" and not zeros.isdisjoint(inputs):
            is_sum = node.target in _SUMS and isinstance(node.args[1], fx.Node)
            is_linear = moving is not None or is_sum or node.target in _LINEAR
            if node.target in _PRODUCTS or (is_linear and not others):
                zeros.add(node)
            elif is_sum and not node.kwargs and _alike(others[0], node):
                _keep_term(node, others[0])
        if node not in zeros and not depends.isdisjoint(inputs):
            depends.add(node)
    graph.eliminate_dead_code()
    # What others need has a value again.
    kept = [node for node in graph.nodes if node in zeros and any(user not in zeros for user in node.users)]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    symbolic = [node for node in kept if not all(type(n) is int for n in node.meta["val"].shape)]
    for node in kept:
        if node not in symbolic:
            value = node.meta["val"]
            with graph.inserting_before(first):
                like = {"dtype": value.dtype, "device": value.device}
                made = graph.call_function(_aten.full.default, ([*value.shape], 0), like)
            made.meta = {**node.meta, _ABSENT: moving is not None}
            node.replace_all_uses_with(made)
    graph.eliminate_dead_code()
    return not symbolic


def cut(
    module: fx.GraphModule,
    inputs: Mapping[str, Any],
    places: Sequence[int],
    cotangents: Mapping[str, bool],
    views: Mapping[str, Sequence[fx.Node]],
) -> fx.GraphModule | None:
    """Those results of a graph that are at `places`, as a function of `inputs`, names with values in the trace.

    `views` are inputs of the graph that nodes of another one make of `inputs`.
    `cotangents` that are not given stand for zeros; `None` where these are needed and have symbols for sizes.
    """
    graph, nodes, made = fx.Graph(), {}, {}
    by_name = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    for name, value in inputs.items():
        nodes[by_name.get(name, name)] = made[name] = graph.placeholder(name)
        made[name].meta["val"] = value
    for name, chain in views.items():
        for node in chain:
            nodes[by_name[name]] = made[node.name] = graph.node_copy(node, lambda x: made[x.name])
    results: Any = graph.graph_copy(module.graph, nodes)
    graph.output([results[k] for k in places])
    graph.eliminate_dead_code()
    given = {node: cotangents[node.name] for node in graph.nodes if node.name in cotangents}
    absent = {node for node, is_given in given.items() if not is_given}
    if not _without_zeros(graph, absent, given.keys() - absent):
        return None
    for node in graph.find_nodes(op="placeholder"):
        if node.name not in inputs:
            graph.erase_node(node)
    return GraphModule(module, graph)


def absent_results(graph: fx.Graph) -> frozenset[int]:
    """Places of results that none of the `moving` inputs leads to, for which autograd has `None`."""
    results: Any = graph.output_node().args[0]
    return frozenset(k for k, node in enumerate(results) if node.meta.get(_ABSENT))


def of_any_strides(module: fx.GraphModule) -> fx.GraphModule:
    """A graph that reshapes where it viewed: in a batch, or of one term of a sum, operators return other strides."""
    graph = copy.deepcopy(module.graph)
    for node in graph.find_nodes(op="call_function", target=_aten.view.default):
        node.target = _aten.reshape.default
    for node in graph.find_nodes(op="call_function", target=_aten.as_strided_scatter.default):
        if node.args[0].meta["val"].is_contiguous():
            node.target = _scattered
    return GraphModule(module, graph)


def _scattered(x: Tensor, source: Tensor, size: Any, stride: Any, offset: int | None = None) -> Tensor:
    """`as_strided_scatter` into contiguous memory by numbers of elements: it has no rule for batches itself."""
    places = torch.arange(x.numel(), device=x.device).as_strided(size, stride, offset)
    return x.flatten().index_put((places.flatten(),), source.flatten()).view(x.shape)


def read_by_offset(graph: fx.Graph) -> dict[int, str]:
    """Inputs that `as_strided` reads at places which count from where their memory begins, and their names."""
    found, inputs = {}, graph.find_nodes(op="placeholder")
    for target, place in ((_aten.as_strided.default, 3), (_aten.as_strided_scatter.default, 4)):
        for node in graph.find_nodes(op="call_function", target=target):
            base = node.args[0]
            while getattr(base.target, "is_view", False):
                base = base.args[0]
            if base.op == "placeholder" and node.args[place:] not in ((), (None,)):
                found[inputs.index(base)] = base.name
    return found


def from_the_start(places: dict[int, str], run: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """`run`, for inputs that begin where their memory does, at these places."""

    def checked(values: Sequence[Any]) -> Any:
        for k, name in places.items():
            if begin := values[k].storage_offset():
                raise LeafError(
                    f"compile: as_strided with a storage_offset reads the memory of {name}, which must begin where the "
                    f"tensor does, got a view at {begin} of it. Pass a clone, or leave storage_offset out to begin at "
                    "the tensor."
                )
        return run(values)

    return checked if places else run


def _keep_term(node: fx.Node, term: fx.Node) -> None:
    """Make one term of a sum of two."""
    is_negative = node.target is _aten.sub.Tensor and node.args[1] is term
    if is_negative or any(user.op == "output" for user in node.users):
        # A result shares memory with nothing.
        node.target, node.args = (_aten.neg.default if is_negative else _aten.clone.default), (term,)
    else:
        node.replace_all_uses_with(term)


def _alike(x: fx.Node, y: fx.Node) -> bool:
    a, b = x.meta["val"], y.meta["val"]
    return a.shape == b.shape and a.dtype == b.dtype


def _product_and_sum(bias: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`addmm` as two operators, of which Inductor fuses the sum with what is around; not where it would round twice."""
    if bias.dtype not in _WIDE or beta != 1 or alpha != 1:
        return NotImplemented
    return x @ y + bias


def _diagonal_of_copy(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """`diagonal_scatter` into one of many elements in one place, which Inductor would write to, and raises."""
    return x.contiguous().diagonal_scatter(source, offset, dim1, dim2) if 0 in x.stride() else NotImplemented


def _complex_scatter(x: Tensor, source: Tensor, size: Any, stride: Any, offset: int | None = None) -> Any:
    """`as_strided_scatter` of real parts: into complex memory Inductor writes by a view, and may read it before."""
    if not x.is_complex():
        return NotImplemented
    parts, sources = torch.view_as_real(x.resolve_conj()), torch.view_as_real(source.resolve_conj())
    start = offset if offset is None else 2 * offset
    return torch.view_as_complex(parts.as_strided_scatter(sources, (*size, 2), (*(2 * n for n in stride), 1), start))


def _conjugate(x: Any) -> Any:
    """In memory, which Inductor's loops read without the flag of a conjugate; autograd asks for numbers, too."""
    return _aten.conj_physical.default(x) if isinstance(x, torch.Tensor) else NotImplemented


def _factored(x: Tensor) -> Tensor:
    """What ATen factors for a determinant: the transpose of a contiguous matrix.

    Derivatives in the graph rely on what it was in the trace. In a run strides may be others: Inductor and batches
    change them, and ATen's operator would factor the other matrix.
    """
    return x.mT if x.is_contiguous() and not x.is_complex() else x


def _det(x: Tensor) -> tuple[Tensor, ...]:
    factors, pivots, _ = torch.linalg.lu_factor_ex(_factored(x))
    return det_of_factors(factors, pivots), factors, pivots


def _slogdet(x: Tensor) -> tuple[Tensor, ...]:
    return decomposition_table[_aten._linalg_slogdet.default](_factored(x))


def _pooled_back(pool: Any, bar: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, *rest: Any) -> Any:
    """The cotangent of averages of which windows hang over the end, by whose whole size Inductor divides."""
    if rest != (True, True, None):
        return NotImplemented
    for axis, (size, step, pad) in enumerate(zip(kernel, stride or kernel, padding, strict=True), -len(kernel)):
        start = torch.arange(bar.shape[axis], device=bar.device) * step - pad
        inside = (start + size).clamp(max=x.shape[axis] + pad) - start
        bar = bar / inside.view(-1, *[1] * (-1 - axis))
    return pool(bar, x, kernel, stride, padding, True, True, 1)


def _to_dtype(x: Tensor, dtype: torch.dtype, non_blocking: bool = False, copy: bool = False, memory: Any = None) -> Any:
    """Shorter than the way through autograd for what torch's decompositions ask of each argument."""
    return x if x.dtype == dtype and not copy and memory is None else NotImplemented


# For every backend, and for Inductor alone.
FACTORED = {_aten._linalg_det.default: _det, _aten._linalg_slogdet.default: _slogdet}
DECOMPOSITIONS = {
    _aten.to.dtype: _to_dtype,
    _aten.addmm.default: _product_and_sum,
    _aten.diagonal_scatter.default: _diagonal_of_copy,
    _aten.as_strided_scatter.default: _complex_scatter,
    _aten._conj.default: _conjugate,
    # It adds real parts as of the strides in the trace.
    _aten.add.Tensor: lambda *args, **kwargs: NotImplemented,
    **{pool: functools.partial(_pooled_back, pool) for pool in _AVERAGES},
}


@contextlib.contextmanager
def inductor_mended() -> Iterator[None]:
    """Context in which Inductor leaves sums and matrix products apart on the CPU too, as it does on a GPU.

    And what is read of a scatter is read behind it. Where loops of two operators are made alike, Inductor forgets under
    which name it knows memory that was written to, and may read it first. Where it looks for the place in a loop that
    reads such memory, it takes the name that is not used there, and raises: without a place it goes on. A stride
    of symbols with comparisons in it, as of a mask, stays as it is where sympy raises as it simplifies that.
    """
    from torch._inductor import loop_body, scheduler, sizevars
    from torch._inductor.fx_passes import post_grad

    fuses_better, node_type = post_grad.should_prefer_unfused_addmm, scheduler.SchedulerNode
    recompute, read_at = node_type.recompute_size_and_body, loop_body.LoopBody.get_read_expr
    stride_at: Any = getattr(sizevars, "stride_at", None)  # not in torch 2.11

    def prefers(match: Any) -> bool:
        value = match.kwargs["inp"].meta["val"]
        return (value.device.type == "cpu" and value.dtype in _WIDE) or fuses_better(match)

    def recomputed(node: Any, *args: Any, **kwargs: Any) -> None:
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    def place(body: Any, name: str) -> Any:
        with contextlib.suppress(KeyError):
            return read_at(body, name)
        return None

    def stride(index: Any, var: Any) -> Any:
        with contextlib.suppress(AttributeError):
            return stride_at(index, var)
        return index.subs(var, var + 1) - index

    with (
        mock.patch.object(sizevars, "stride_at", stride, create=True),
        mock.patch.object(loop_body.LoopBody, "get_read_expr", place),
        mock.patch.object(post_grad, "should_prefer_unfused_addmm", prefers),
        mock.patch.object(node_type, "recompute_size_and_body", recomputed),
    ):
        yield
