"""A function of tensors whose value and derivatives are programs, made when they are first needed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import _C, fx
from torch._C import _functorch  # type: ignore[attr-defined] - no stub

from primitives._compiled._graphs import LOCK, joint_graph, program_of
from primitives._compiled._saved import Known, Saved, SavedAtLevels, is_here
from primitives._core.errors import ShapeError
from primitives._core.recomputation import Batched, Derived, Pullback, Pushforward, Recomputable
from primitives.tracing._torch_private import bindings, bound_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from primitives._compiled._graphs import Program, Settings
    from primitives.tracing import JointGraph

    Tensors = tuple[Tensor, ...]

__all__ = ["Compiled", "Halves"]


def _meta(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _kind(x: Tensor) -> tuple[Any, ...]:
    """What counts of a tensor where its sizes do not."""
    sizes = tuple(None if n > 1 else n for n in x.shape)
    return sizes, x.is_contiguous() or x.stride(), x.dtype, x.device


def _fits(joint: JointGraph, tensors: Sequence[Tensor]) -> bool:
    """Whether a graph with symbols for sizes is valid for these."""
    fakes = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")[: len(tensors)]]
    symbols = bindings(fakes, tensors)
    if any(bound_sizes(fake.shape, symbols) != [*x.shape] for fake, x in zip(fakes, tensors, strict=True)):
        return False
    with contextlib.suppress(ShapeError):
        joint.require_fit([*tensors], symbols)
        return True
    return False


class Compiled(Derived):
    """A function of tensors, compiled for each set of sizes; its derivatives are functions of the kind.

    Attributes:
        inner: The function, which runs inside a trace.
        settings: How it is compiled.
        name: Which derivative of the user's function it is.
        names: Names of its arguments.
    """

    def __init__(self, inner: Recomputable, settings: Settings, name: str, names: Sequence[str]) -> None:
        super().__init__(inner)
        self.settings, self.name, self.names = settings, name, tuple(names)
        self._derived: dict[Any, Compiled] = {}
        # Programs, or halves, with the graphs that they are made of.
        self._made: dict[Any, list[tuple[JointGraph, Any]]] = {}

    def tangents(self, values: Tensors) -> tuple[Tensor | None, ...]:
        """As the function that is compiled."""
        return self.inner.tangents(values)  # type: ignore[attr-defined] - of a pushforward

    def _derive(self, kind: str, key: Any, make: Callable[[], Recomputable], names: Sequence[str]) -> Any:
        found = self._derived.get((kind, key))
        if found is None:
            found = Compiled(make(), self.settings, f"{kind} of {self.name}", names)
            found = self._derived.setdefault((kind, key), found)
        return found

    def pushforward(self, num_tensors: int, moving: Sequence[int]) -> Compiled:
        """Compiled, as the others."""
        names = [*self.names, *(f"{self.names[i]}_dot" for i in moving)]
        return self._derive("jvp", tuple(moving), lambda: Pushforward(self.inner, num_tensors, moving), names)

    def pullback(self, num_tensors: int, wanted: Sequence[int], given: Sequence[int]) -> Compiled:
        """Of the arguments alone."""
        names = [*self.names, *(f"bar[{k}]" for k in given)]
        key = tuple(wanted), tuple(given)
        return self._derive("vjp", key, lambda: Pullback(self.inner, num_tensors, wanted, given), names)

    def batched(self, in_dims: tuple, randomness: str) -> Compiled:
        """Of batches."""
        return self._derive("vmap", (in_dims, randomness), lambda: Batched(self.inner, in_dims, randomness), self.names)

    def __call__(self, *tensors: Tensor) -> Tensors:
        """The results, by a program where one may run."""
        if not is_here():
            return self.inner(*tensors)
        with torch.no_grad(), _C._DisableAutocast():
            return tuple(self.program(tensors)([*tensors]))

    def program(self, tensors: Sequence[Tensor]) -> Program:
        """The program of the value, for these sizes."""

        def make(joint: JointGraph, seconds: float) -> Program:
            num = joint.signature.num_forward_outputs
            return program_of(joint.module, self.name, self.settings, num_visible=num, seconds=seconds)

        return self._of_sizes(tensors, (), make)

    def halves(self, tensors: Sequence[Tensor], wanted: tuple[int, ...]) -> Halves:
        """Forward and backward pass for these sizes."""
        return self._of_sizes(tensors, wanted, lambda joint, seconds: Halves(self, joint, wanted, seconds))

    def _of_sizes(self, tensors: Sequence[Tensor], wanted: tuple[int, ...], make: Callable[..., Any]) -> Any:
        key = wanted, *map(_kind if self.settings.dynamic else _meta, tensors)
        found = self._fitting(key, tensors)
        if found is None:
            with LOCK:
                found = self._fitting(key, tensors)
                if found is None:
                    joint, seconds = joint_graph(self.inner, self.name, tensors, wanted, self.names, self.settings)
                    found = make(joint, seconds)
                    self._made[key] = [(joint, found), *self._made.get(key, ())]
        return found

    def _fitting(self, key: Any, tensors: Sequence[Tensor]) -> Any:
        for joint, found in self._made.get(key, ()):
            if not self.settings.dynamic or _fits(joint, tensors):
                return found
        return None

    def recorded(self, tensors: Sequence[Tensor]) -> Tensors:
        """The results, with what a backward pass reads saved."""
        interpreter = _functorch.peek_interpreter_stack()
        if _C._len_torch_dispatch_stack():
            return self.inner(*tensors)
        if interpreter is None:
            wanted = tuple(i for i, x in enumerate(tensors) if x.requires_grad)
            return Saved.apply(self.halves(tensors, wanted), *tensors)
        if interpreter.key() != _functorch.TransformType.Grad:
            return super().recorded(tensors)
        level = interpreter.level()
        wanted = tuple(i for i, x in enumerate(tensors) if x.requires_grad and _functorch.maybe_get_level(x) == level)
        if not wanted:
            return super().recorded(tensors)
        halves = self.halves(tensors, wanted)
        if halves.is_random and _functorch.TransformType.Vmap in map(_key, _functorch.get_interpreter_stack()):
            # The graph draws the same numbers for all samples.
            return super().recorded(tensors)
        return SavedAtLevels.apply(halves, *tensors)[: halves.num]


_key = operator.methodcaller("key")


class _Stage(Recomputable):
    """One half of a joint graph, as a value: a program, and inside a trace the graph."""

    def __init__(self, halves: Halves) -> None:
        self.halves = halves

    def batched(self, in_dims: tuple, randomness: str) -> Compiled:
        """Compiled."""
        function, names = self.halves.function, [f"saved[{i}]" for i in range(len(in_dims))]
        name = f"vmap of half of {function.name}"
        return Compiled(Batched(self, in_dims, randomness), function.settings, name, names)


class _Forward(_Stage):
    """Results, and what is saved, of the arguments."""

    def __call__(self, *tensors: Tensor) -> Tensors:
        """The results."""
        halves = self.halves
        if is_here():
            with torch.no_grad(), _C._DisableAutocast():
                return tuple(halves.forward([*tensors]))
        return tuple(halves.module(*tensors))


class _Resumed(_Stage):
    """Cotangents of the wanted arguments, of arguments, cotangents and what was saved."""

    def __init__(self, halves: Halves, needed: tuple[bool, ...], given: tuple[bool, ...]) -> None:
        super().__init__(halves)
        self._flags = needed, given

    def __call__(self, *values: Tensor) -> Tensors:
        """The cotangents."""
        needed, given = self._flags
        num, present = len(needed), iter(values[len(needed) :])
        bars = [next(present) if there else None for there in given]
        ordered = *values[:num], *present, *bars
        if is_here():
            with torch.no_grad(), _C._DisableAutocast():
                found = self.halves.backward(ordered, needed, given)
        else:
            stage = self.halves.stage(needed, given)
            found = stage.spread((None, *stage.module(*stage.inputs(ordered))))
        return tuple(bar for bar in found if bar is not None)


@dataclasses.dataclass
class _Backward:
    """The backward pass for some of the arguments and some cotangents."""

    module: fx.GraphModule
    # Where its inputs are among arguments, saved values and cotangents, and the strides of some.
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    strides: list[tuple[int, tuple[int, ...] | None]]
    # From nothing and its results to one entry for each argument.
    spread: Callable[[Sequence[Any]], tuple[Any, ...]]
    program: Program | None = None

    def inputs(self, values: Sequence[Any]) -> list[Any]:
        """Its inputs, with the strides that it was traced for."""
        found = list(self.pick(values))
        for i, stride in self.strides:
            if stride is None:
                found[i] = found[i].contiguous()
            elif found[i].stride() != stride:
                found[i] = found[i].new_empty_strided(found[i].shape, stride).copy_(found[i])
        return found


class Halves:
    """Forward and backward pass of a function for one set of sizes, and for `wanted` arguments to be differentiated in.

    Attributes:
        function: The function.
        wanted: Places of the arguments that get gradients.
        num: Number of its results; what the forward pass saves, other than arguments, comes after them.
        constants: Places of results without derivative.
        forward: The program of the forward pass.
    """

    def __init__(self, function: Compiled, joint: JointGraph, wanted: tuple[int, ...], seconds: float) -> None:
        self.function, self.wanted, self.joint = function, wanted, joint
        forward = joint.forward_graph()
        self._backward_module = joint.backward_graph().module
        self.num = num = joint.signature.num_forward_outputs
        self.constants = function.constants | (set(range(num)) - set(joint.signature.with_cotangent))
        primals = [node.name for node in joint.graph.find_nodes(op="placeholder")][: len(joint.primal_names)]
        names = [entry.name for entry in forward.saved]
        kept = [i for i, name in enumerate(names) if name not in primals]
        self.num_kept = len(kept)
        self.module = fx.GraphModule(forward.module, copy.deepcopy(forward.module.graph))
        output = self.module.graph.output_node()
        results: list[Any] = list(cast("Any", output.args[0]))
        output.args = ([*results[:num], *(results[num + i] for i in kept)],)
        self.module.recompile()
        name, settings = function.name, function.settings
        self.forward = program_of(
            self.module,
            f"{name}, forward",
            settings,
            # Strides of what is saved are known where they are numbers, after the first run.
            num_visible=num + len(kept) * settings.dynamic,
            seconds=seconds,
            num_bytes=forward.saved_bytes,
        )
        # Where each input of the backward pass comes from: arguments, what was saved, cotangents, one after the other.
        places = {
            name: primals.index(name) if name in primals else len(primals) + kept.index(i)
            for i, name in enumerate(names)
        }
        bars = [name for name, (_, kind) in joint.inputs.items() if kind == "cotangent"]
        start = len(primals) + len(kept)
        self._cotangents = dict(zip(bars, joint.signature.with_cotangent, strict=True))
        self._places = places | {name: start + k for name, k in self._cotangents.items()}
        self._gradients = joint.signature.gradient_places
        self.has_numbers = any(entry.dtype is None for entry in forward.saved)
        seed = joint.graph.find_nodes(op="placeholder")[function.names.index("seed")]
        self.is_random = bool(seed.users)
        self._backwards: dict[Any, _Backward] = {}
        self._resumed: dict[Any, tuple[Known, list[int]]] = {}

    def backward(self, values: Sequence[Any], needed: tuple[bool, ...], given: tuple[bool, ...]) -> tuple[Any, ...]:
        """Cotangents of all arguments, `None` for those not needed, of arguments, saved values and cotangents."""
        stage = self._backwards.get((needed, given)) or self.stage(needed, given)
        inputs = stage.inputs(values)
        if stage.program is None:
            with LOCK:
                stage.program = stage.program or self._compiled(stage.module, inputs)
        return stage.spread((None, *stage.program(inputs)))

    def stage(self, needed: tuple[bool, ...], given: tuple[bool, ...]) -> _Backward:
        """The backward pass for arguments that need cotangents, and cotangents that are given."""
        with LOCK:
            found = self._backwards.get((needed, given))
            if found is None:
                found = self._backwards[needed, given] = self._make_backward(needed, given)
            return found

    def _compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Program:
        for node, x in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            fake = node.meta["val"]
            if isinstance(x, torch.Tensor) and not self.function.settings.dynamic and fake.stride() != x.stride():
                # A compiler chooses the strides of what is saved.
                node.meta["val"] = fake.as_strided(fake.shape, x.stride())
        num = len(module.graph.output_node().args[0])  # type: ignore[arg-type] - a list
        return program_of(module, f"{self.function.name}, backward", self.function.settings, num_visible=num)

    def _make_backward(self, needed: tuple[bool, ...], given: tuple[bool, ...]) -> _Backward:
        module = fx.GraphModule(self._backward_module, copy.deepcopy(self._backward_module.graph))
        graph, output = module.graph, module.graph.output_node()
        kept = [k for k, i in enumerate(self._gradients) if needed[i]]
        results: Any = output.args[0]
        output.args = ([results[k] for k in kept],)
        graph.eliminate_dead_code()
        places, strides = [], []
        for node in graph.find_nodes(op="placeholder"):
            if not node.users:
                graph.erase_node(node)
                continue
            fake, place = node.meta["val"], self._places[node.name]
            if node.name in self._cotangents and not given[self._cotangents[node.name]]:
                with graph.inserting_before(node):
                    zeros = graph.call_function(
                        torch.ops.aten.full.default, ([*fake.shape], 0), {"dtype": fake.dtype, "device": fake.device}
                    )
                zeros.meta["val"] = fake
                node.replace_all_uses_with(zeros)
                graph.erase_node(node)
                continue
            if node.name in self._cotangents:
                strides.append((len(places), None if self.function.settings.dynamic else fake.stride()))
            places.append(place)
        graph.lint()
        module.recompile()
        spread = [0] * len(needed)
        for number, k in enumerate(kept):
            spread[self._gradients[k]] = 1 + number
        return _Backward(module, _getter(places), strides, _getter(spread))

    @functools.cached_property
    def forward_function(self) -> Known:
        """The forward pass, whose derivatives are those of the function."""
        function, count = self.function, len(self.function.names)
        return Known(function, range(count), _Forward(self), self.num, self.num_kept)

    def resumed(self, needed: tuple[bool, ...], given: tuple[bool, ...]) -> tuple[Recomputable, list[int]]:
        """The backward pass as a function of arguments, given cotangents and saved values; its wanted places."""
        found = self._resumed.get((needed, given))
        if found is None:
            # Nothing depends on those that were wanted and have no gradient.
            count, constants = len(needed), set(self.wanted) - set(self._gradients)
            wanted = [i for i, need in enumerate(needed) if need and i not in constants]
            present = [k for k, there in enumerate(given) if there]
            pullback, pick = self.function.pullback(count, wanted, present), range(count + len(present))
            value = _Resumed(self, needed, given) if set(wanted) <= set(self._gradients) else None
            found = self._resumed[needed, given] = Known(pullback, pick, value), wanted
        return found


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple(values[i] for i in places)
