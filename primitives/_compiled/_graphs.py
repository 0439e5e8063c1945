"""From a function of tensors to its joint graph, and from a graph to a program: what a compiler makes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import _C, _guards, fx
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from primitives._core.errors import LeafError
from primitives._core.inductor import tracing_a_program
from primitives.tracing._joint.trace import traced
from primitives.tracing._leaves import Leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from primitives._core.recomputation import Recomputable
    from primitives.tracing import JointGraph

__all__ = ["LOCK", "Program", "Settings", "joint_graph", "program_of"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_log = logging.getLogger("primitives.compile")
# Torch's compilers are not made for several threads at once.
LOCK = threading.RLock()
os.register_at_fork(after_in_child=LOCK._at_fork_reinit)  # type: ignore[attr-defined] - of every lock of Python


@dataclasses.dataclass
class Settings:
    """The wishes of a user, and the programs that came of them.

    Attributes:
        backend: As in `torch.compile`.
        options: Inductor's options.
        dynamic: Whether sizes are symbols.
        fixed: Names of parameters and buffers, whose sizes are numbers.
        programs: What has been compiled, in order.
        graphs: The joint graphs that it was made of, by name.
    """

    backend: Any
    options: dict[str, Any]
    dynamic: bool
    fixed: set[str] = dataclasses.field(default_factory=set)
    programs: list[Program] = dataclasses.field(default_factory=list)
    graphs: dict[str, JointGraph] = dataclasses.field(default_factory=dict)

    def fresh(self) -> Settings:
        """The wishes alone."""
        return Settings(self.backend, self.options, self.dynamic)


@dataclasses.dataclass(eq=False)
class Program:
    """A compiled graph: `run(values) -> results`, both lists; `run` empties the list that it gets.

    Attributes:
        run: The compiled code.
        constants: Tensors from elsewhere that the graph reads: its last inputs.
        name: Which derivative of the function it computes.
        sizes: Sizes of the inputs, as text.
        num_nodes: Operations of the graph that was compiled.
        saved_bytes: Memory that the backward pass keeps, besides the arguments.
        trace_seconds: Time to trace; 0 where a graph was there.
        compile_seconds: Time to compile.
        num_calls: How often it ran.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    constants: list[Tensor]
    name: str
    sizes: str
    num_nodes: int
    saved_bytes: int
    trace_seconds: float
    compile_seconds: float
    num_calls: int = 0

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        """The results."""
        self.num_calls += 1
        return self.run(values + self.constants)


@contextlib.contextmanager
def _outside_everything() -> Iterator[None]:
    """Context without the transforms, modes and autocast of the caller, on which no program depends."""
    hooks = []
    # Those of a checkpoint would compute again what is only traced.
    while (pair := _C._autograd._top_saved_tensors_default_hooks(True)) is not None:  # type: ignore[attr-defined] - no stub
        hooks.append(pair)
        _C._autograd._pop_saved_tensors_default_hooks()  # type: ignore[attr-defined] - as above
    try:
        with temporarily_clear_interpreter_stack(), _disable_current_modes(), _C._DisableAutocast():
            yield
    finally:
        for pair in reversed(hooks):
            _C._autograd._push_saved_tensors_default_hooks(*pair)  # type: ignore[attr-defined] - as above


def joint_graph(
    function: Recomputable,
    name: str,
    tensors: Sequence[Tensor],
    wanted: Sequence[int],
    names: Sequence[str],
    settings: Settings,
) -> tuple[JointGraph, float]:
    """The joint graph of a function for these sizes, with gradients of those `wanted`; seconds that it took."""
    start = time.perf_counter()
    for x, label in zip(tensors, names, strict=True):
        if x.layout != torch.strided or not (type(x) in _PLAIN or _functorch.is_functorch_wrapped_tensor(x)):
            raise LeafError(
                f"compile: {label} must be a dense tensor of torch's own type, got {type(x).__name__} of {x.layout}. "
                "Pass its parts, or compile what runs on them; for a DTensor, or a model in FSDP, use torch.compile."
            )
    table: dict[Any, Any] = {}
    if settings.backend == "inductor":
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
    with _outside_everything(), torch.inference_mode(False), tracing_a_program():
        blanks = tuple(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(i in wanted)
            for i, x in enumerate(tensors)
        )
        is_fixed = [not settings.dynamic or name.split("_dot")[0] in settings.fixed for name in names]
        axes = [
            [] if fixed else [k for k, n in enumerate(x.shape) if n > 1]
            for x, fixed in zip(blanks, is_fixed, strict=True)
        ]
        counts = [names[:i].count(name) for i, name in enumerate(names)]
        roots = tuple(f"{name}_{n}" if n else name for name, n in zip(names, counts, strict=True))
        given = Leaves.of(blanks, roots, "")
        joint = traced("compile", lambda *xs: tuple(function(*xs)), given, axes, table=table, pure=True)
    number = sum(key.split(" #")[0] == name for key in settings.graphs)
    settings.graphs[f"{name} #{number + 1}" if number else name] = joint
    return joint, time.perf_counter() - start


def program_of(
    module: fx.GraphModule, name: str, settings: Settings, *, num_visible: int, seconds: float = 0.0, num_bytes: int = 0
) -> Program:
    """The program of a graph, whose first results keep the strides that they were traced with."""
    start = time.perf_counter()
    _log.info("compile: %s, %d nodes, traced in %.1f s", name, len(module.graph.nodes), seconds)
    graph = fx_graph_cse(module.graph)
    graph.eliminate_dead_code()
    module = fx.GraphModule(module, graph)
    constants = _lifted(module)
    fakes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    num_nodes = sum(node.op == "call_function" for node in graph.nodes)
    with _outside_everything(), torch.no_grad():
        run = _run_by(settings, module, fakes, num_visible)
    sizes = ", ".join(str([*x.shape]) for x in fakes if isinstance(x, torch.Tensor))
    found = Program(run, constants, name, sizes, num_nodes, num_bytes, seconds, time.perf_counter() - start)
    settings.programs.append(found)
    _log.info("compile: %s compiled in %.1f s", name, found.compile_seconds)
    return found


def _lifted(module: fx.GraphModule) -> list[Tensor]:
    """Make inputs of the tensors from elsewhere that a graph reads, so that writes to them are seen."""
    found: dict[str, Tensor] = {}
    graph, made = module.graph, {}
    inputs = graph.find_nodes(op="placeholder")
    first = next(node for node in graph.nodes if node not in inputs)
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        is_literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if not isinstance(value, torch.Tensor) or is_literal:
            continue
        if node.target not in made:
            found[str(node.target)] = value
            with graph.inserting_before(first):
                made[node.target] = graph.placeholder(f"constant_{len(found)}")
            mode = _guards.detect_fake_mode([n.meta["val"] for n in graph.nodes if "val" in n.meta])
            made[node.target].meta["val"] = value if mode is None else mode.from_tensor(value, static_shapes=True)
        node.replace_all_uses_with(made[node.target])
        graph.erase_node(node)
    module.recompile()
    return list(found.values())


_numbers = itertools.count()


def _run_by(settings: Settings, module: fx.GraphModule, fakes: list[Any], num_visible: int) -> Callable[[list], Any]:
    if settings.backend == "eager":
        return lambda values: module(*values)
    mode = _guards.detect_fake_mode(fakes)
    with _guards.tracing(_guards.TracingContext(mode)):
        if settings.backend == "inductor":
            return _by_inductor(settings, module, fakes, num_visible)
        from torch._dynamo.backends.registry import lookup_backend

        compiled = (lookup_backend(settings.backend) if isinstance(settings.backend, str) else settings.backend)(
            module, fakes
        )
    return lambda values: compiled(*values)


def _by_inductor(
    settings: Settings, module: fx.GraphModule, fakes: list[Any], num_visible: int
) -> Callable[[list], Any]:
    from torch._inductor import compile_fx, config
    from torch._inductor.virtualized import V

    with config.patch(settings.options), V.set_fake_mode(_guards.detect_fake_mode(fakes)):
        device = next((x.device for x in fakes if isinstance(x, torch.Tensor)), torch.device("cpu"))
        module = compile_fx._recursive_joint_graph_passes(module, input_device=device)
        output = module.graph.output_node()
        results: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = [
            i for i, node in enumerate(results) if i < num_visible and isinstance(node, fx.Node)
        ]
        code = compile_fx.compile_fx_inner(module, fakes, graph_id=next(_numbers), is_inference=True)
    # Around it torch counts calls, for as long as a small program runs.
    return getattr(code, "current_callable", None) or code
