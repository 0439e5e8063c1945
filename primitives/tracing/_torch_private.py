"""The parts of torch used here that torch does not promise, where releases differ; `_sizes` has those of symbols."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import _C, Tensor, _decomp, _ops, fx, nn, overrides
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import config as functorch_config
from torch._functorch import pyfunctorch
from torch._subclasses import fake_tensor, functional_tensor
from torch.autograd import forward_ad
from torch.fx import _lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.nn.utils import stateless
from torch.utils import _python_dispatch, _pytree

from primitives._core import registered_primitives

get_decompositions, TorchDispatchMode = _decomp.get_decompositions, _python_dispatch.TorchDispatchMode
is_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
leaves_of, mapped_tensors = _pytree.arg_tree_leaves, _pytree.tree_map_only
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
without_modes, without_functions = _python_dispatch._disable_current_modes, _C.DisableTorchFunctionSubclass
function_modes = overrides._get_current_function_mode_stack
FakeTensor, FunctionalTensor = fake_tensor.FakeTensor, functional_tensor.FunctionalTensor
with_tensors = stateless._reparametrize_module
# It writes its code when somebody asks for it: most graphs are copied to the next one, and never run.
GraphModule = _lazy_graph_module._LazyGraphModule
_without_code = functools.partial(_lazy_graph_module._use_lazy_graph_module, True)
# The names by which `torch.utils.checkpoint` looks up its machinery, of a region and of one of the reentrant kind.
CHECKPOINT_NAMES = ("_CheckpointFrame", "CheckpointFunction")
ROLE = "joint_role"  # where the metadata of a node says that it stands for a cotangent


def _of_tracers() -> tuple[Any, Any]:
    """Symbolic sizes and functionalization, imported when something is traced: with sympy, they take half a second."""
    from torch._functorch._aot_autograd import functional_utils
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes, functional_utils


def is_data_dependent(error: Exception) -> bool:
    """Whether a value or a size was asked for where tensors have no memory."""
    kinds = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
    return isinstance(error, (*kinds, _of_tracers()[0].GuardOnDataDependentSymNode))


def schema_of(func: Any) -> Any:
    """The schema of an operator; `None` for anything else, operators of higher order included."""
    return func._schema if isinstance(func, _ops.OpOverload) else None


@functools.cache
def needs_values(func: Any) -> bool:
    """Whether the result of an operator, or its shape, depends on values, which tensors without memory do not have."""
    tags = func.tags if isinstance(func, _ops.OpOverload) else ()
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def is_tracing(*, pre_dispatch: bool = False) -> bool:
    """Whether `make_fx` is recording; with `pre_dispatch`, whether it records what autograd is given."""
    mode = proxy_tensor.get_proxy_mode()
    return mode is not None and (not pre_dispatch or bool(getattr(mode, "pre_dispatch", False)))


def recorded_nodes() -> list[fx.Node]:
    """The nodes that `make_fx` has recorded up to here."""
    mode: Any = proxy_tensor.get_proxy_mode()
    return list(mode.tracer.graph.nodes)


def node_of(x: Tensor) -> fx.Node:
    """The node that computes `x` in the graph that is recorded."""
    mode: Any = proxy_tensor.get_proxy_mode()
    return proxy_tensor.get_proxy_slot(plain(x), mode.tracer).proxy.node


def record_as(copy: Tensor, x: Tensor) -> None:
    """Take `copy`, which was made `unrecorded`, for `x` in the graph that is recorded."""
    mode: Any = proxy_tensor.get_proxy_mode()
    slot = proxy_tensor.get_proxy_slot(plain(x), mode.tracer)
    proxy_tensor.set_proxy_slot(plain(copy), mode.tracer, slot)
    with unrecorded():  # views are of the memory of the copy
        slot.proxy.node.meta["val"] = plain(copy).detach()


@contextlib.contextmanager
def nodes_seen(see: Callable[[fx.Node, Callable[[fx.Node], Any]], None]) -> Iterator[None]:
    """Context in which `see` gets each node that is recorded, before it runs, and what tells its constant."""
    mode: Any = proxy_tensor.get_proxy_mode()
    if mode is None or "create_node" in vars(mode.tracer):
        # Outside a trace, or within a joint function that is traced.
        yield
        return
    tracer, create_node = mode.tracer, mode.tracer.create_node

    def create_and_see(*args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(*args, **kwargs)
        see(node, lambda node: getattr(tracer.root, str(node.target), None))
        return node

    tracer.create_node = create_and_see
    try:
        yield
    finally:
        del tracer.create_node


def mapped_constants(function: Callable[[Tensor], Any], values: Any) -> Any:
    """A tree of values inside functionalization, with what `function` makes of each tensor from elsewhere."""

    def mapped(x: Tensor) -> Any:
        is_constant = type(x) is torch.Tensor and not (x.requires_grad or x._is_zerotensor())
        return function(x) if is_constant and not torch._is_functional_tensor(x) else x

    return _pytree.tree_map_only(torch.Tensor, mapped, values)


def running_number() -> int | None:
    """Number of the autograd node whose backward is running."""
    running: Any = _C._current_autograd_node()
    return None if running is None else running._sequence_nr()


def last_number() -> int:
    """Number of the autograd node that was made last."""
    return torch.autograd._get_sequence_nr() - 1


def fake_mode(*, symbolic: bool) -> fake_tensor.FakeTensorMode:
    """Mode in which tensors have no memory; with `symbolic`, they may have symbolic sizes."""
    options: dict[str, Any] = {"allow_scalar_outputs": False, "allow_dynamic_output_shape_ops": False}
    shape_env = _of_tracers()[0].ShapeEnv(**options) if symbolic else None
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)


def fake_of(mode: fake_tensor.FakeTensorMode, x: Tensor, dynamic_axes: Sequence[int], device: torch.device) -> Tensor:
    """A tensor without memory like `x`, on `device`, a leaf of its own."""
    sizes, strides = [int(n) for n in x.shape], [int(n) for n in x.stride()]
    with fake_tensor.unset_fake_temporarily(), torch.no_grad():
        like = torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta")
    symbolic_shapes = _of_tracers()[0]
    either = symbolic_shapes.DimDynamic
    kinds = [either.DYNAMIC if axis in dynamic_axes else either.STATIC for axis in range(x.dim())]
    context = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=kinds) if mode.shape_env is not None else None
    fake = mode.from_tensor(like, symbolic_context=context)
    with mode, torch.no_grad():
        fake = torch.empty_strided(fake.shape, fake.stride(), dtype=x.dtype, device=device)
    return fake.requires_grad_(x.requires_grad)


def wrapped(x: Any) -> Any:
    """`x` as functionalization wants it."""
    return _of_tracers()[1].to_fun(x)


def plain(x: Any) -> Any:
    """The tensor that functionalization has wrapped, with all writes done; of a wrapper subclass, that inside."""
    return _of_tracers()[1].from_fun(x)


def has_data_mutation(x: Any) -> bool:
    """Whether the values of a tensor in a trace were written to."""
    return _of_tracers()[1].has_data_mutation(x) if is_functional(x) else getattr(x, "is_written", False)


is_in_a_transform = _functorch.is_functorch_wrapped_tensor
# In it, `make_fx` records nothing.
unrecorded = proxy_tensor.disable_proxy_modes_tracing


def functional_world() -> Any:
    """Context in which writes to `wrapped` tensors are recorded as new tensors.

    Functions of `functionalize_mutations` in it note in `copied` whose memory they have written to copies of.
    """
    # Operators have rules for this class, and for none that is derived from it.
    mode: Any = functional_tensor.FunctionalTensorMode()
    mode.copied = set()
    return mode


def is_functionalizing() -> bool:
    """Whether a functional world is around."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FUNCTIONAL) is not None  # type: ignore[attr-defined] - no stub


@functools.cache
def _has_effects(func: Any) -> bool:
    from torch._higher_order_ops import effects

    return effects.has_effects(func)


def called(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of an operator. One with an effect, as a check that raises, is recorded as it is, and stays.

    Torch would ask for a token that orders effects, which nothing but ahead-of-time autograd hands through a graph.
    """
    if not (_has_effects(func) and any(isinstance(x, FunctionalTensor) for x in leaves_of(args, kwargs))):
        return func(*args, **kwargs)
    world = functional_tensor.PythonFunctionalizeAPI()
    args, kwargs = world.unwrap_tensors((args, kwargs))  # type: ignore[arg-type,assignment] - any tree
    with functional_tensor.disable_functional_mode():
        return world.wrap_tensors(func(*args, **kwargs))


def memory_of(x: Tensor) -> int:
    """Identity of the memory behind a tensor, as long as it is held."""
    return x.untyped_storage()._cdata


def parts(x: Any) -> list[Tensor]:
    """The tensors inside a wrapper subclass."""
    inner = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    return [y for y in inner if isinstance(y, torch.Tensor)]


def is_functional(x: Any) -> bool:
    """Whether functionalization has wrapped `x`, or what is inside of a wrapper subclass."""
    inner = parts(x) if is_wrapper_subclass(x) else []
    return isinstance(x, FunctionalTensor) or any(map(is_functional, inner))


def has_other_storage(x: Any) -> bool:
    """Whether a functional tensor was given other memory, by `set_` or `.data`."""
    return isinstance(x, FunctionalTensor) and torch._functionalize_was_storage_changed(x.elem)  # type: ignore[attr-defined] - no stub


def is_computed(x: Tensor) -> bool:
    """Whether a graph computes the value of `x`, and it is not a constant."""
    x = plain(bottom(x))
    if isinstance(x, FakeTensor):
        return x.constant is None
    mode: Any = proxy_tensor.get_proxy_mode()
    slot = None if mode is None else proxy_tensor.get_proxy_slot(x, mode.tracer, None)
    return slot is not None and slot.constant is None


def constant_value(x: Tensor) -> Tensor | None:
    """The values of `x`, no batch, where a graph computes them of constants alone, nothing random and no cotangent."""
    x, mode, levels = plain(bottom(x)), proxy_tensor.get_proxy_mode(), unbatched(x)[1]
    slot = None if mode is None else proxy_tensor.get_proxy_slot(x, mode.tracer, None)  # type: ignore[attr-defined] - no stub
    if slot is None or levels:
        return None if levels or mode is None or isinstance(x, FakeTensor) else x
    values: dict[fx.Node, Any] = {}
    tracer: Any = mode.tracer  # type: ignore[union-attr] - there is one

    def compute(node: fx.Node) -> Any:
        if node not in values:
            if node.op == "get_attr":
                values[node] = getattr(tracer.root, str(node.target))
            elif node.op == "call_function" and schema_of(node.target) is not None and not _is_unknown(node):
                args, kwargs = fx.map_arg((node.args, node.kwargs), compute)
                target: Any = node.target
                values[node] = target(*args, **kwargs)
            else:
                raise LookupError
        return values[node]

    with contextlib.suppress(LookupError), without_modes(), torch.no_grad():
        return compute(slot.proxy.node)
    return None


def _is_unknown(node: fx.Node) -> bool:
    return ROLE in node.meta or torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr] - of an operator


def bottom(x: Tensor) -> Tensor:
    """The tensor that the transforms of `torch.func` have wrapped."""
    return unbatched(x)[0]


def unbatched(x: Tensor) -> tuple[Tensor, list[int]]:
    """The tensor that transforms of `torch.func` have wrapped, and the levels of its batch axes, outermost first."""
    levels = []
    while is_in_a_transform(x):
        if _functorch.is_batchedtensor(x):
            levels.insert(0, _functorch.maybe_get_level(x))
        x = _functorch.get_unwrapped(x)
    return x, levels


def levels_that_draw_differently() -> list[int]:
    """Levels of the `vmap`s with `randomness="different"`, the outermost first."""
    vmaps = [i for i in pyfunctorch.retrieve_all_functorch_interpreters() if isinstance(i, pyfunctorch.VmapInterpreter)]
    return sorted(i.level() for i in vmaps if i.randomness() == "different")


def differentiated_outside(values: Sequence[Any]) -> bool:
    """Whether a caller differentiates in one of these, beside the gradients that a joint function gives itself."""
    tensors = [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return False
    if any(is_in_a_transform(x) or x.grad_fn is not None for x in tensors):
        return True
    # It hands out leaves, and takes an output without a history for a constant.
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.autograd.functional.__file__:
        frame = frame.f_back
    return frame is not None


def detached(x: Any) -> Any:
    """`x`, out of the history of autograd; anything without one as it is."""
    if not (isinstance(x, torch.Tensor) and x.requires_grad):
        return x
    if forward_ad._current_level < 0:
        return x.detach()
    with torch.no_grad():
        # It keeps the tangent of forward mode, which `detach` does not.
        return torch.ops.aten.alias.default(x)


def trace(
    function: Callable[..., Any], args: Sequence[Any], mode: fake_tensor.FakeTensorMode, table: dict[Any, Any] | None
) -> fx.GraphModule:
    """Graph of a function of flat tensors, which are fake."""
    make = proxy_tensor.make_fx(function, decomposition_table=table, tracing_mode="real")
    excluded = _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_C.DispatchKey.Functionalize))
    # As ahead-of-time autograd does: threads of the engine know nothing of modes.
    engine = torch.autograd.set_multithreading_enabled(False)
    # In C++ the rules of some operators (`constant_pad_nd`, `upsample_nearest2d`) ask for numbers, in Python for none.
    symbols = contextlib.nullcontext() if mode.shape_env is None else enable_python_dispatcher()
    # In anomaly mode torch asks for the values of gradients.
    with excluded, _without_code(), engine, torch.autograd.set_detect_anomaly(False), mode, symbols:
        return make(*args)


def definition_of(func: Any) -> Callable[..., Any] | None:
    """The function that torch composes an operator of, or `None`."""
    from torch import _refs  # noqa: F401 - it fills the table

    return func.decompose if func._can_decompose() else _decomp.decomposition_table.get(func)


def as_one_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of pytrees, with a list of tensors for a result, which `torch.compile` does not look into."""
    from torch import _dynamo

    return _dynamo.nonstrict_trace(function)


# Besides torch's elementwise operators and views, and our primitives that say so, these may be computed again.
_ONE_PASS = ("native_layer_norm", "_native_batch_norm_legit_functional", "_log_softmax")
# Rules by which torch's partitioner keeps what its compiler could not fuse into the backward pass: they look to time.
_RULES_FOR_TIME = [
    f"ban_recompute_{name}" for name in ("materialized_backward", "used_far_apart", "long_fusible_chains")
]
_partitioner_lock = threading.Lock()


def partition(module: fx.GraphModule, num_forward_outputs: int, *, min_cut: bool) -> tuple[Any, Any]:
    """Forward and backward module, out of a joint module whose placeholders have torch's names."""
    from torch._functorch import partitioners

    split = partitioners.min_cut_rematerialization_partition if min_cut else partitioners.default_partition
    ours = [op.overload.overloadpacket for op in registered_primitives().values() if op.recomputable]
    also = [getattr(torch.ops.aten, name) for name in _ONE_PASS] + ours
    # The partitioner takes no list: it looks its own up by this name.
    rules = functorch_config.patch(dict.fromkeys((*_RULES_FOR_TIME, "functionalize_rng_ops"), False))
    with _partitioner_lock, rules, _without_code():
        kinds = partitioners.get_default_op_list()
        # What it reads depends on strides, and a value that was saved may have others.
        banned = {torch.ops.aten.as_strided}
        allowed = type(kinds.recomputable_ops)([*kinds.recomputable_ops, *also]) - banned
        kinds = dataclasses.replace(kinds, recomputable_ops=allowed, view_ops=kinds.view_ops - banned)
        with mock.patch.object(partitioners, "get_default_op_list", return_value=kinds):
            return split(module, None, num_fwd_outputs=num_forward_outputs)


def dumped(module: fx.GraphModule) -> tuple[bytes, dict[str, Any]]:
    """A graph as bytes, and its constants, of which torch's pickler for graphs would keep the shapes alone."""
    from torch.fx._graph_pickler import GraphPickler, Options

    constants = {str(n.target): getattr(module, str(n.target)) for n in module.graph.find_nodes(op="get_attr")}
    bare = GraphModule(dict.fromkeys(constants, nn.Module()), copy.deepcopy(module.graph))
    options = Options(ops_filter=None, node_metadata_key_filter={"val", "stack_trace", "partitioner_tag"}.__contains__)
    return GraphPickler.dumps(bare, options), constants


def loaded(data: bytes, constants: dict[str, Any], mode: fake_tensor.FakeTensorMode) -> fx.GraphModule:
    """The graph again, its values without memory in `mode`."""
    from torch.fx._graph_pickler import GraphPickler

    graph: Any = GraphPickler.loads(data, mode)
    return GraphModule(constants, copy.deepcopy(graph.graph), "JointGraph")
