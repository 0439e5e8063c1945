"""From a function of tensors to its joint graph, and from a graph to a program: what a compiler makes of it."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import gc
import itertools
import logging
import operator
import os
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import _C, Tensor, _guards, fx
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils._python_dispatch import _disable_current_modes

from primitives._compiled._simplified import (
    DECOMPOSITIONS,
    FACTORED,
    inductor_mended,
    of_any_strides,
    simplify,
    with_plain_zeros,
)
from primitives._core.errors import LeafError
from primitives._core.inductor import tracing_a_program
from primitives._core.recomputation import Recomputable
from primitives.tracing import JointGraph
from primitives.tracing._joint.trace import traced
from primitives.tracing._leaves import Leaves
from primitives.tracing._memory import is_dense
from primitives.tracing._sizes import bindings, bound_sizes
from primitives.tracing._subclasses.made_inside import subclasses_made
from primitives.tracing._torch_private import GraphModule, is_wrapper_subclass

__all__ = ["Program", "Settings", "check_dense", "compiling", "joint_graph", "program_of"]

# What ends with the trace that runs.
until_traced: contextvars.ContextVar[contextlib.ExitStack | None] = contextvars.ContextVar("until_traced", default=None)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_log = logging.getLogger("primitives.compile")
# Torch's compilers are not made for several threads at once.
_LOCK = threading.RLock()
os.register_at_fork(after_in_child=_LOCK._at_fork_reinit)  # type: ignore[attr-defined] - of every lock of Python


@dataclasses.dataclass
class Settings:
    """The wishes of a user, and the programs that came of them, with names of tensors whose sizes are numbers.

    `writes` says whether the function writes to tensors of which there are views.
    """

    backend: Any
    options: dict[str, Any]
    dynamic: bool
    fixed: set[str] = dataclasses.field(default_factory=set)
    programs: list[Program] = dataclasses.field(default_factory=list)
    graphs: dict[str, JointGraph] = dataclasses.field(default_factory=dict)
    writes: bool = False

    def layouts_of(self, fakes: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """For each tensor, what makes one of its strides, or of its order of axes; `None` for those of the trace."""
        symbols, found = bindings(fakes, tensors) if self.dynamic else {}, []
        for fake, x in zip(fakes, tensors, strict=True):
            if not isinstance(x, torch.Tensor) or bound_sizes(fake.stride(), symbols) == [*x.stride()]:
                found.append(None)
            elif self.dynamic and is_dense(x):
                # One program for all sizes.
                axes = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
                found.append((torch.empty_permuted, tuple(axes)))
            else:
                found.append((torch.empty_strided, x.stride()))
        return found

    def fresh(self) -> Settings:
        """The wishes alone."""
        return Settings(self.backend, self.options, self.dynamic)

    def table(self, name: str) -> str:
        """One line for each program."""
        rows: list[tuple[str, ...]] = [("program", "inputs", "nodes", "saved bytes", "trace s", "compile s", "calls")]
        for p in self.programs:
            seconds, sizes = (f"{x:.1f}" for x in (p.trace_seconds, p.compile_seconds)), textwrap.shorten(p.sizes, 40)
            rows.append((p.name, sizes, str(p.num_nodes), str(p.saved_bytes), *seconds, str(p.num_calls)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([f"compiled {name}, {len(self.programs)} programs", *lines])


@dataclasses.dataclass(eq=False)
class Program:
    """A compiled graph: `run(values) -> results`, both lists; `run` empties the list that it gets.

    Its last inputs are `constants`, tensors from elsewhere that the graph reads, and the sizes for which it has
    `symbols`, each by the place of a tensor and of its axis. The rest is for the table.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    constants: list[Tensor]
    symbols: list[tuple[int, int]]
    name: str
    sizes: str
    num_nodes: int
    saved_bytes: int
    trace_seconds: float
    compile_seconds: float
    num_calls: int = 0

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        """The results."""
        self.num_calls += 1
        given = [*values, *self.constants]
        for k, axis in self.symbols:
            given.append(values[k].shape[axis])
        return self.run(given)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Context of what makes programs: in one thread at a time, and a user hears once if it takes long."""
    timer = threading.Timer(_PATIENCE, _say_slow)
    timer.daemon = True
    with _LOCK:
        thresholds = gc.get_threshold()
        timer.start()
        # A trace makes objects by the million, and most of them stay: looking for garbage takes a tenth of its time.
        gc.set_threshold(thresholds[0] and max(thresholds[0], 20_000), *thresholds[1:])
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)
            timer.cancel()


def _say_slow() -> None:
    if _said.acquire(blocking=False):  # once, whichever thread comes first
        _log.warning(
            "compile: a first call traces and compiles, which takes seconds, and minutes for large models. The logger "
            '"primitives.compile" names each program that takes as long, all at level INFO, and none at level ERROR.'
        )


def _say(seconds: float, *message: Any) -> None:
    """Show a user whom it kept waiting that it goes on."""
    _log.log(logging.WARNING if seconds > _PATIENCE else logging.INFO, *message)


_said = threading.Lock()
# Seconds until then.
_PATIENCE = 5.0


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


def _unlogged() -> Any:
    """Context in which torch logs no frames, in C++ too, of an operator that raises: the error says enough."""
    return mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


# Torch's words for some operators that want numbers for sizes.
_NO_SYMBOLS = "on tensor with symbolic sizes/strides"


def check_dense(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that have no strides, or whose class says what operators do."""
    for label, x in zip(names, tensors, strict=True):
        is_dense = x.layout == torch.strided and not (x.is_nested or x.is_quantized)
        if not (is_dense and (type(x) in _PLAIN or _functorch.is_functorch_wrapped_tensor(x))):
            advice = "Pass its parts, or compile what runs on them; for a DTensor or a model in FSDP, torch.compile."
            if is_dense and not is_wrapper_subclass(x):
                advice = "Pass x.as_subclass(torch.Tensor), and make the other type inside where it is needed."
            what = f"a {'nested ' * x.is_nested or 'quantized ' * x.is_quantized}{type(x).__name__} of {x.layout}"
            raise LeafError(f"compile: {label} must be a dense tensor of torch's own type, got {what}. {advice}")


def joint_graph(
    function: Recomputable,
    name: str,
    tensors: Sequence[Tensor],
    wanted: Sequence[int],
    names: Sequence[str],
    settings: Settings,
) -> JointGraph:
    """The joint graph of a function for these sizes, with gradients of those `wanted`."""
    check_dense(names, tensors)
    table: dict[Any, Any] = dict(FACTORED)
    if settings.backend == "inductor":
        from torch._inductor.decomposition import select_decomp_table

        table = {**select_decomp_table(), **DECOMPOSITIONS, **FACTORED}
        __import__("torch._inductor.lowering")  # The decomposition of max_pool2d reads it, and imports it nowhere.
        _asked_ahead()
    with _outside_everything(), torch.inference_mode(False), tracing_a_program(), subclasses_made(), _unlogged():
        blanks = tuple(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(i in wanted)
            for i, x in enumerate(tensors)
        )
        is_fixed = [not settings.dynamic or name.split("_dot")[0] in settings.fixed for name in names]
        pairs = zip(blanks, is_fixed, strict=True)
        axes = [[] if fixed else [k for k, n in enumerate(x.shape) if n > 1] for x, fixed in pairs]
        given, call = Leaves.of(blanks, (*names,), ""), lambda *xs: tuple(function(*xs))
        may_be_plain = not settings.writes and not any(axes) and all(x.device.type == "cpu" for x in blanks)
        joint: Any = None
        while joint is None:
            try:
                with contextlib.ExitStack() as stack:
                    stack.callback(until_traced.reset, until_traced.set(stack))
                    joint = traced("compile", call, given, axes, table=table, pure=True, functional=not may_be_plain)
            except Exception as error:
                if may_be_plain:
                    _log.debug("compile: %s is traced again, with functionalization: %s", name, error)
                    settings.writes, may_be_plain = True, False
                elif any(axes) and (isinstance(error, UnsupportedOperatorException) or _NO_SYMBOLS in str(error)):
                    # Some operators want numbers for sizes: they get a program for each set of them.
                    axes = [[] for _ in axes]
                else:
                    raise
    simplify(joint.module)
    number = sum(key.split(" #")[0] == name for key in settings.graphs)
    settings.graphs[f"{name} #{number + 1}" if number else name] = joint
    return joint


def program_of(
    module: fx.GraphModule, name: str, settings: Settings, seconds: float, num_bytes: int, layouts: Sequence[Any]
) -> Program:
    """The program of a graph for inputs of these layouts."""
    start = time.perf_counter()
    _say(seconds, "compile: %s, %d nodes, traced in %.1f s", name, len(module.graph.nodes), seconds)
    # Another one, which constants and the compiler change.
    graph = copy.deepcopy(module.graph)
    with_plain_zeros(graph)
    module = GraphModule(module, graph)
    mode: Any = _guards.detect_fake_mode([node.meta["val"] for node in graph.find_nodes(op="placeholder")])
    for node, layout in zip(graph.find_nodes(op="placeholder"), layouts, strict=True):
        if layout is not None:
            fake, (make, strides) = node.meta["val"], layout
            with mode:
                node.meta["val"] = make(fake.shape, strides, dtype=fake.dtype, device=fake.device)
    constants, symbols = _lifted(module, mode), _sized(graph)
    fakes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    num_nodes = sum(node.op == "call_function" for node in graph.nodes)
    with _outside_everything(), torch.no_grad(), _guards.tracing(_guards.TracingContext(mode)):
        run = _run_by(settings, module, fakes, mode)
    sizes = ", ".join(str([*x.shape]) for x in fakes if isinstance(x, torch.Tensor))
    found = Program(run, constants, symbols, name, sizes, num_nodes, num_bytes, seconds, time.perf_counter() - start)
    settings.programs.append(found)
    _say(found.compile_seconds, "compile: %s compiled in %.1f s", name, found.compile_seconds)
    return found


def _lifted(module: fx.GraphModule, mode: Any) -> list[Tensor]:
    """Make inputs of the tensors from elsewhere that a graph reads, so that writes to them are seen."""
    inputs: dict[Any, fx.Node] = {}
    last = module.graph.find_nodes(op="placeholder")[-1]
    for node in module.graph.find_nodes(op="get_attr"):
        value, is_literal = getattr(module, str(node.target)), all(user.target is _LITERAL for user in node.users)
        if not isinstance(value, torch.Tensor) or is_literal:
            continue
        if node.target not in inputs:
            with module.graph.inserting_after(last):
                last = inputs[node.target] = module.graph.placeholder(f"constant_{len(inputs)}")
            inputs[node.target].meta["val"] = mode.from_tensor(value, static_shapes=True)
        node.replace_all_uses_with(inputs[node.target])
        module.graph.erase_node(node)
    module.recompile()
    return [getattr(module, name) for name in inputs]


_LITERAL = torch.ops.aten.lift_fresh_copy.default


def _sized(graph: fx.Graph) -> list[tuple[int, int]]:
    """Make inputs of the symbols in sizes: Inductor keeps with a program what it assumes of inputs that are numbers."""
    places: dict[str, tuple[int, int]] = {}
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        for k, node in enumerate(placeholders):
            for axis, n in enumerate(getattr(node.meta["val"], "shape", ())):
                if isinstance(n, torch.SymInt) and n.node.expr.is_symbol and str(n) not in places:
                    places[str(n)] = k, axis
    # Before torch 2.15 Inductor takes no remainder of two numbers.
    for node in graph.find_nodes(op="call_function", target=operator.mod):
        if (known := node.meta["val"].node.maybe_as_int()) is not None:
            for user in [*node.users]:
                user.replace_input_with(node, known)
            graph.erase_node(node)
    first = placeholders[-1].next
    for name, (k, axis) in places.items():
        with graph.inserting_before(first):
            graph.placeholder(name).meta["val"] = placeholders[k].meta["val"].shape[axis]
    return [*places.values()]


def _run_by(settings: Settings, module: fx.GraphModule, fakes: list[Any], mode: Any) -> Callable[[list], Any]:
    backend = settings.backend
    if backend == "inductor":
        return _by_inductor(settings.options, module, fakes, mode)
    from torch._dynamo.backends.registry import lookup_backend

    compiled = (lookup_backend(backend) if isinstance(backend, str) else backend)(of_any_strides(module), fakes)
    return lambda values: compiled(*values)


def _by_inductor(options: dict[str, Any], module: fx.GraphModule, fakes: list[Any], mode: Any) -> Callable[[list], Any]:
    from torch._inductor import compile_fx, config
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for thread in _asked_ahead():
        thread.join()
    # Without symbols Inductor looks for no graph on disk.
    mode.shape_env = mode.shape_env or ShapeEnv()
    # A program is called with what it was made for.
    with config.patch({"size_asserts": False, **options}), V.set_fake_mode(mode), inductor_mended():
        device = next((x.device for x in fakes if isinstance(x, torch.Tensor)), torch.device("cpu"))
        module = compile_fx._recursive_joint_graph_passes(module, input_device=device)
        output = module.graph.output_node()
        results: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = [i for i, x in enumerate(results) if isinstance(x, fx.Node)]
        code = compile_fx.compile_fx_inner(module, fakes, graph_id=next(_numbers), is_inference=True)
    # Around it torch counts calls, for as long as a small program runs.
    return getattr(code, "current_callable", None) or code


@functools.cache
def _asked_ahead() -> list[threading.Thread]:
    """What Inductor would ask for after the trace: vector instructions, headers, hashes of all of torch and Triton.

    Processes, files and hashing: two seconds that do not wait for the trace. In this process the vector instructions
    would take a moment, but the trace would wait for the interpreter's lock, for more than that.
    """
    from torch._inductor import codecache, cpu_vec_isa

    def compiler() -> None:
        """Vector instructions, and headers, which each process preprocesses that loads a kernel; none is loaded."""
        cpu_vec_isa.valid_vec_isa_list()
        with contextlib.suppress(Exception):  # no compiler, where nothing may need one
            codecache.CppPythonBindingsCodeCache.load_pybinding_async([], "", submit_fn=lambda work: None)

    questions = compiler, codecache.torch_key, codecache.CacheBase.get_system
    threads = [threading.Thread(target=ask, daemon=True) for ask in questions]
    for thread in threads:
        thread.start()
    return threads


_numbers = itertools.count()
