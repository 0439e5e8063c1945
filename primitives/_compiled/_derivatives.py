"""A function of tensors whose value and derivatives are programs, made when they are first needed.

Reverse mode traces a joint graph and cuts it in two. A backward pass that is differentiated itself gives its value from
what the forward pass has saved, too; its derivative is that of the pullback, a function of the arguments alone.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _C, Tensor, _guards, fx
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._functorch.compile_utils import fx_graph_cse
from torch.autograd import forward_ad

from primitives._compiled._graphs import Settings, compiling, joint_graph, program_of
from primitives._compiled._recorded import Guarded, Recording
from primitives._compiled._simplified import absent_results, cut, from_the_start, of_any_strides, read_by_offset
from primitives._core.errors import MissingRuleError
from primitives._core.recomputation import Batched, Derived, Pullback, Pushforward, Recomputable
from primitives.tracing import JointGraph
from primitives.tracing._sizes import bindings, bound_sizes, failing_guards, num_guards
from primitives.tracing._torch_private import GraphModule

Tensors = tuple[Tensor, ...]

__all__ = ["SEED", "Compiled", "Joint", "Resumed"]

SEED = "random.seed"  # the argument that random numbers are drawn from

_MANY_SIZES = 1000
_is_wrapped = _functorch.is_functorch_wrapped_tensor
_OLDER_VMAP = _C._dispatch_key_parse("VmapMode")


def _is_here() -> bool:
    """Whether programs may run: no trace and no transform is around, nor torch's older vmap."""
    is_traced = _C._len_torch_dispatch_stack() or _functorch.peek_interpreter_stack() is not None
    return not (is_traced or _C._dispatch_tls_is_dispatch_key_included(_OLDER_VMAP))


def _in_a_vmap() -> bool:
    return any(each.key() == _functorch.TransformType.Vmap for each in _functorch.get_interpreter_stack() or ())


def _has_its_memory(x: Any) -> bool:
    """Whether compiled code may read it, which knows no flags, no zero tensors, and no tensors made in transforms."""
    return not (isinstance(x, torch.Tensor) and (x.is_neg() or x._is_zerotensor() or x.is_conj() or _is_wrapped(x)))


def _as_read(x: Tensor) -> Tensor:
    """A copy of the same strides, for which a program was made."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    once = tuple(slice(None, 1) if stride == 0 else slice(None) for stride in x.stride())
    copy[once].copy_(x[once])
    return copy


def _memory(x: Any) -> int | None:
    return x.untyped_storage()._cdata if isinstance(x, torch.Tensor) else None


def _layout(x: Any, settings: Settings) -> Any:
    """What counts of a tensor for a program."""
    if not settings.dynamic:
        return x.shape, x.stride(), x.dtype, x.device
    sizes = tuple(None if n > 1 else n for n in x.shape)
    return sizes, x.is_contiguous() or x.stride(), x.dtype, x.device


class Compiled(Derived):
    """A function of tensors, compiled for each set of sizes; its derivatives are functions of the kind.

    Attributes:
        inner: The function.
        run: What gives its value inside a trace.
        settings: How it is compiled.
        name: Which derivative of the user's function it is.
        names: Names of its arguments.
        seed: Place of the argument that random numbers are drawn from.
        joints: For each set of sizes and of wanted gradients, the joint graphs.
    """

    def __init__(self, inner: Any, settings: Settings, name: str, names: Sequence[str]) -> None:
        super().__init__(inner)
        self.run = inner
        self.settings, self.name, self.names = settings, name, tuple(names)
        self.seed = self.names.index(SEED)
        self.joints: dict[Any, list[Joint]] = {}
        # Functions made of this one.
        self._made: dict[Any, Any] = {}
        # Programs of the value, and joint graphs of what is recorded.
        self._ready, self._recording = Guarded(), Guarded()

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, made once."""
        if key not in self._made:
            self._made.setdefault(key, make())
        return self._made[key]

    def _derived(self, kind: str, more: Sequence[str], made_of: Callable[..., Any], *args: Any) -> Compiled:
        names, name = [*self.names, *more], f"{kind} of {self.name}"
        return self._once((kind, *args), lambda: Compiled(made_of(self.inner, *args), self.settings, name, names))

    def pushforward(self, num_tensors: int, moving: Sequence[int]) -> Compiled:
        """Compiled, as the others."""
        names = [f"{self.names[i]}_dot" for i in moving]
        return self._derived("jvp", names, Pushforward, num_tensors, (*moving,))

    def pullback(self, num_tensors: int, wanted: Sequence[int], given: Sequence[int]) -> Compiled:
        """Of the arguments alone."""
        return self._derived("vjp", [f"bar[{k}]" for k in given], Pullback, num_tensors, (*wanted,), (*given,))

    def batched(self, in_dims: tuple, randomness: str) -> Compiled:
        """Of batches."""
        return self._derived("vmap", (), Batched, in_dims, randomness)

    def __call__(self, *tensors: Tensor) -> Tensors:
        """The results, by a program where one may run."""
        if not _is_here():
            return tuple(self.run(*tensors))
        if torch.is_grad_enabled() or _C._is_any_autocast_enabled():
            with torch.no_grad(), _C._DisableAutocast():
                return self._by_program(tensors)
        return self._by_program(tensors)

    def _by_program(self, tensors: Tensors) -> Tensors:
        program = None if self.settings.dynamic else self._ready.find(tensors)
        if program is None:
            given = tuple([x if _has_its_memory(x) else _as_read(x) for x in tensors])
            program = self.program(given)
            if not self.settings.dynamic and all(map(operator.is_, given, tensors)):
                self._ready.note(tensors, program)
            tensors = given
        return tuple(program(tensors))

    def program(self, tensors: Sequence[Tensor]) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The program of the value, for these sizes."""
        return self.joint(tensors).program(tensors)

    def joint(self, tensors: Sequence[Tensor], wanted: tuple[int, ...] = ()) -> Joint:
        """Forward and backward pass for these sizes, with gradients of those `wanted`."""
        key = wanted, *[_layout(x, self.settings) for x in tensors]
        found = self._fitting(key, tensors)
        if found is None:
            with compiling():
                found = self._fitting(key, tensors)
                if found is None:
                    start = time.perf_counter()
                    graph = joint_graph(self.run, self.name, tensors, wanted, self.names, self.settings)
                    found = Joint(self, graph, wanted, time.perf_counter() - start)
                    self.joints[key] = [found, *self.joints.get(key, ())]
        return found

    def _fitting(self, key: Any, tensors: Sequence[Tensor]) -> Joint | None:
        return next((x for x in self.joints.get(key, ()) if not self.settings.dynamic or x.fits(tensors)), None)

    def recorded(self, tensors: Sequence[Tensor], kept: Sequence[Any] = ()) -> Tensors:
        """The results, with what a backward pass reads saved."""
        if _C._len_torch_dispatch_stack():
            return self.run(*tensors)
        interpreter = _functorch.peek_interpreter_stack()
        if interpreter is None:
            return self._known(tensors)(tensors)
        wanted: tuple[int, ...] = ()
        # In forward mode around it the backward pass is differentiated, so that it would be computed again in any case.
        if interpreter.key() == _functorch.TransformType.Grad and forward_ad._current_level < 0:
            level = interpreter.level()
            at_level = [i for i, x in enumerate(tensors) if _functorch.maybe_get_level(x) == level]
            wanted = tuple(i for i in at_level if tensors[i].requires_grad)
        if not wanted:
            return super().recorded(tensors)
        joint = self.joint(tensors, wanted)
        if joint.draws_or_measures and _in_a_vmap():
            # The graph draws the same numbers for all samples, and saves numbers that have no batch.
            return super().recorded(tensors)
        return joint.recorded(joint.detached(tensors))[: joint.num]

    def _known(self, tensors: Sequence[Tensor]) -> Recording:
        """How to record gradients of all that require any; by guards in C++, where sizes are numbers."""
        found = None if self.settings.dynamic else self._recording.find(tensors)
        if found is None:
            joint = self.joint(tensors, tuple([i for i, x in enumerate(tensors) if x.requires_grad]))
            if self.settings.dynamic or not all(map(_has_its_memory, tensors)):
                return joint.recording
            self._recording.note(tensors, Recording(joint, joint.program(tensors)))
            found = self._recording.find(tensors) or joint.recording
        return found


class Half(Compiled):
    """A function with a better way to its value than to call it: half of a joint graph, or a batch of that.

    Attributes:
        inner: The function, of the first `count` arguments alone, which has the derivatives.
    """

    def __init__(self, whole: Any, count: int, graph: Any, function: Compiled, name: str, names: Sequence[str]) -> None:
        super().__init__(graph, function.settings, name, names)
        self.inner, self.count = whole, count
        self.pushforward, self.pullback = whole.pushforward, whole.pullback
        # What the table shows: seconds to trace and bytes saved.
        self.shown = (0.0, 0)
        self._constants: frozenset[int] = whole.constants
        is_graph = isinstance(graph, fx.GraphModule)
        self._fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")] if is_graph else []
        # That of the trace, and sizes that the graph is known to be valid for.
        self._mode: Any = _guards.detect_fake_mode(self._fakes)
        self._valid: set[Any] = set()
        # Places of arguments that neither half reads.
        self._idle: set[int] = set()

    @property
    def constants(self) -> frozenset[int]:
        """Those of the function; of a forward half also results that depend on nothing wanted, and what is kept."""
        return self._constants

    def batched(self, in_dims: tuple, randomness: str) -> Half:
        """Both, mapped over batch axes."""

        def make() -> Half:
            inner = of_any_strides(self.run) if isinstance(self.run, fx.GraphModule) else self.run
            whole, mapped = self.inner.batched(in_dims[: self.count], randomness), Batched(inner, in_dims, randomness)
            half = Half(whole, self.count, mapped, self, f"vmap of {self.name}", self.names)
            half._idle = self._idle
            return half

        return self._once((in_dims, randomness), make)

    def recorded(self, tensors: Sequence[Tensor], kept: Sequence[Any] = ()) -> Tensors:
        """As of any function that is computed again."""
        if _C._dispatch_tls_is_dispatch_key_included(_OLDER_VMAP):
            raise MissingRuleError(
                "compile: torch.autograd.grad with is_grads_batched=True and create_graph=True has no derivative. "
                "Take torch.func.vmap of torch.func.vjp, or torch.func.jacrev."
            )
        tensors = [x.detach() if i in self._idle else x for i, x in enumerate(tensors)]
        return Recomputable.recorded(self, tensors, kept)

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether a graph with symbols for sizes is valid for these, by what compilers took for granted, too."""
        known = num_guards(self._mode), *[x.shape if isinstance(x, torch.Tensor) else x for x in values]
        if known not in self._valid:
            symbols = bindings(self._fakes, values)
            for fake, x in zip(self._fakes, values, strict=True):
                if isinstance(x, torch.Tensor) and bound_sizes(fake.shape, symbols) != [*x.shape]:
                    return False
            if failing_guards(self._mode, symbols):
                return False
            if len(self._valid) > _MANY_SIZES:  # as when each call has its own
                self._valid.clear()
            self._valid.add(known)
        return True

    def program(self, tensors: Sequence[Tensor]) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """Of the graph, which is of these sizes; a batch is traced."""
        graph = self.run
        if not isinstance(graph, fx.GraphModule):
            return super().program(tensors)
        # A compiler chooses strides of what is kept, and hooks keep copies of other ones.
        layouts = self.settings.layouts_of(self._fakes, tensors)
        key = "program", *layouts
        if key not in self._made:
            with compiling():
                self._once(key, lambda: program_of(graph, self.name, self.settings, *self.shown, layouts))
        run = self._made[key]
        if self.settings.dynamic and not self.fits(tensors):
            # Inductor made it for other sizes, those of the trace. The graph itself is right.
            run = lambda values: graph(*values)  # noqa: E731
        return from_the_start(self._once("absolute", lambda: read_by_offset(graph.graph)), run)


class Resumed(Half):
    """The backward half: cotangents of wanted arguments from arguments, cotangents of results, and what was kept."""

    num_tensors, resumes = 0, True
    _absent: frozenset[int] = frozenset()

    @property
    def zeros(self) -> frozenset[int]:
        """Those that no cotangent given leads to."""
        return self._absent

    def __call__(self, *values: Any) -> Tensors:
        given = [*values]
        for k in range(self.num_tensors, self.count):
            given[k] = given[k].contiguous()
        if self.settings.dynamic and self._reads_strides:
            symbols = bindings(self._fakes, given)
            for k, (fake, x) in enumerate(zip(self._fakes, given, strict=True)):
                strides: Any = bound_sizes(fake.stride(), symbols) if isinstance(x, torch.Tensor) else None
                if strides is not None and strides != [*x.stride()]:
                    # A hook, or a compiler, has kept it in others, and the graph computes with those of the trace.
                    given[k] = x.new_empty_strided(x.shape, strides).copy_(x)
        return super().__call__(*given)

    @functools.cached_property
    def _reads_strides(self) -> bool:
        return any(True for _ in self.run.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_stride.int))


class Joint(Half):
    """The forward half of a joint graph, whose last results are what the backward half reads.

    Attributes:
        num: Number of results of the function.
        num_sizes: How many of the last results are sizes, and no tensors.
        draws_or_measures: Whether it draws random numbers, or reads sizes.
    """

    num_sizes = 0

    def __init__(self, function: Compiled, joint: JointGraph, wanted: tuple[int, ...], seconds: float) -> None:
        signature, self._values = joint.signature, {n.name: n.meta.get("val") for n in joint.graph.nodes}
        names = [*joint.inputs]
        self._primals, bars = names[: len(function.names)], names[len(function.names) :]
        self._bars = dict(zip(signature.with_cotangent, bars, strict=True))
        self._gradients, self._unused = signature.gradient_places, {*wanted} - {*signature.gradient_places}
        self.num, self._kept, self._views = signature.num_forward_outputs, [], {}
        self._has_sizes = any(isinstance(x, torch.SymInt) for x in self._values.values())
        name, num_bytes, places = function.name, 0, [*range(self.num)]
        read: set[str] = set()
        if wanted:
            forward, self._backward = joint.forward_graph(), joint.backward_graph().module
            source, name, num_bytes = forward.module, f"{name}, forward", forward.saved_bytes
            # Views of an argument are made again.
            self._views = _views(forward.graph, [x.name for x in forward.saved if x.is_input])
            own = {*self._primals, *self._views}
            saved = {x.name: self.num + i for i, x in enumerate(forward.saved) if x.name not in own}
            self._kept, self.num_kept, places = [*saved], len(saved), [*places, *saved.values()]
            self.num_sizes = sum(not isinstance(self._values[each], torch.Tensor) for each in saved)
            read = {node.name for node in self._backward.graph.find_nodes(op="placeholder") if node.users}
            read.update(chain[0].all_input_nodes[0].name for chain in self._views.values())
            # Of sizes that are symbols views are kept.
            memory = {_memory(self._values[each]) for each in self._kept}
            is_free = [each not in read and _memory(self._values[each]) not in memory for each in self._primals]
            self.unread = frozenset(i for i, each in enumerate(is_free) if each)
        else:
            # As the partitioner does.
            source = GraphModule(joint.module, fx_graph_cse(joint.graph))
        module: Any = cut(source, {each: self._values[each] for each in self._primals}, places, {}, {})
        super().__init__(function, len(function.names), module, function, name, function.names)
        self.shown = seconds, num_bytes
        self._constants = function.constants | ({*range(self.num + self.num_kept)} - {*signature.with_cotangent})
        inputs = module.graph.find_nodes(op="placeholder")
        self._idle = {i for i, node in enumerate(inputs) if not node.users and node.name not in read}
        self.draws_or_measures = bool(inputs[function.seed].users) or self._has_sizes

    def detached(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The arguments, of which those are constants that are not used: no gradient comes back to them."""
        if not self._unused:
            return tensors
        return [x.detach() if i in self._unused else x for i, x in enumerate(tensors)]

    @functools.cached_property
    def recording(self) -> Recording:
        """How calls are recorded whose tensors are not known to be those that a program was made for."""
        return Recording(self, lambda tensors: self(*tensors))

    def is_mapped(self) -> bool:
        """Whether a backward pass here has batches, and this has sizes, which have none."""
        return self._has_sizes and _in_a_vmap()

    def resumed(self, num_tensors: int, wanted: Sequence[int], given: Sequence[int]) -> Recomputable:
        """The backward half for these arguments and cotangents."""
        if self.is_mapped():
            return self.inner.pullback(num_tensors, wanted, given)

        def make() -> Recomputable:
            pullback = self.inner.pullback(num_tensors, wanted, given)
            bars, is_given = [self._bars[k] for k in given], {name: k in given for k, name in self._bars.items()}
            inputs = {name: self._values[name] for name in (*self._primals, *bars, *self._kept)}
            places = [self._gradients.index(i) for i in wanted]
            module = cut(self._backward, inputs, places, is_given, self._views)
            if module is None:
                return pullback
            names, name = [*pullback.names, *self._kept], f"{self.inner.name}, backward"
            half = Resumed(pullback, num_tensors + len(given), module, self, name, names)
            half.num_tensors, half._idle, half._absent = num_tensors, self._idle, absent_results(module.graph)
            return half

        return self._once((wanted, given), make)


def _views(graph: fx.Graph, names: Sequence[str]) -> dict[str, list[fx.Node]]:
    """For nodes that have the memory of an argument: the views that make them of it."""
    found = {}
    for node in graph.nodes:
        if node.name in names and node.op != "placeholder":
            chain = [node]
            while len(inputs := chain[0].all_input_nodes) == 1 and inputs[0].op != "placeholder":
                chain.insert(0, inputs[0])
            if len(inputs) == 1:
                found[node.name] = chain
    return found
