"""The rules of an operator: which there are, which implementation runs where, and how a derivative is taken by them."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from primitives._core import backend
from primitives._core.contexts import run_as_written
from primitives._core.decomposition import forget_decompositions, get_decomposition
from primitives._core.errors import MissingRuleError
from primitives._core.sequences import flatten, in_places, regroup, tuple_getter, tuple_maker
from primitives._core.spec import ResidualLayout, Spec

_handlers: dict[str, Callable[[], Callable[[RuleTable, tuple], Any]]] = {}
_are_tensors = frozenset([torch.Tensor]).issuperset
_is_view: Any = torch.Tensor._is_view


def _own(outputs: Sequence[Any]) -> list[Any]:
    """The outputs, none of them a view to autograd, which lets a caller write into nothing that a function made so."""
    return [x.data if _is_view(x) else x for x in outputs]


def _runner(spec: Spec, implementations: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """`(*args) -> outputs`, by the implementation for the backend in force.

    Its results are held to the schema here, since the fast path has no dispatcher that would. A kernel that returns
    `None` leaves the call to the reference.
    """
    count, returns_list = len(spec.outputs), spec.returns_list

    @run_as_written
    def run(*args: Any) -> Any:
        implementation = implementations[backend.selected]
        out = implementation(*args)
        kind = type(out)
        if returns_list:
            # A copy: the list is the caller's, who may change it.
            if kind is list and _are_tensors(map(type, out)):
                return _own(out)
        elif count == 1:
            if kind is torch.Tensor:
                return _own((out,))[0]
        elif kind is tuple and len(out) == count and _are_tensors(map(type, out)):
            return tuple(_own(out))
        if out is None and count and implementation is not implementations["reference"]:
            out = implementations["reference"](*args)
        return _conformed(spec, out)

    return run


def _conformed(spec: Spec, out: Any) -> Any:
    """Outputs as the dispatcher returns them: a tensor, a tuple, a list, or nothing; raises `TypeError` for others."""
    count = len(spec.outputs)
    if count == 0 and out is None:
        return None
    if count == 1 and not spec.returns_list and isinstance(out, torch.Tensor):
        return _own([out])[0]
    if isinstance(out, (tuple, list)) and all(isinstance(x, torch.Tensor) for x in out):
        if spec.returns_list:
            return _own(out)
        if len(out) == count != 1:
            return tuple(_own(out))
    wanted = "a list of tensors" if spec.returns_list else "a tensor" if count == 1 else f"a tuple of {count} tensors"
    found = type(out).__name__
    if isinstance(out, (tuple, list)):
        found = f"a {found} of {', '.join(type(x).__name__ for x in out) or 'nothing'}"
    raise TypeError(f"{spec.name}: an implementation must return {wanted}, got {'None' if out is None else found}.")


class RuleTable:
    """The rules of one operator, and everything that is asked about them at a call.

    Attributes:
        spec: The operator.
        given: The rules by kind: `"reference"`, `"vjp"`, `"jvp"`, `"vmap"`, ...;
            `"autograd"` runs in the place of all derivatives, and `"value_and_jvp"`, `(args, tangents) -> (*outputs,
            *tangents)`, gives both by one call, or `None` where there is nothing to gain; `"composition"` is what
            Inductor sees of the operator.
        kernels: Implementations by device, beside the reference.
        decomposable: As above.
        layouts: The values kept for the vjp rule, for the jvp rule, and for the decomposition in place of a vjp rule;
            each a `ResidualLayout`, or what packs and unpacks as that does.
        cpu: `(*args) -> outputs` on CPU tensors, by the implementation for the backend in force.
        cuda: The same on CUDA tensors.
        implementations: The implementations themselves, by device and backend.
    """

    # Whether kernels launch through our kernels alone, so that a compiler can be shown the launches.
    kernels_are_traceable = True

    def __init__(self, spec: Spec, residuals: Sequence[str] = (), *, decomposable: bool = False) -> None:
        self.spec = spec
        self.decomposable: bool = decomposable
        self.given: dict[str, Callable[..., Any]] = {}
        self.kernels: dict[str, Callable[..., Any]] = {}
        declared = ResidualLayout(spec, (*residuals, *[s for s in spec.statistics if s not in residuals]))
        every_argument = ResidualLayout(spec, (*spec.tensors, *spec.statistics))
        self.layouts: tuple[Any, Any, Any] = (declared, declared, every_argument)
        self.implementations: dict[str, dict[str, Callable[..., Any]]] = {"cpu": {}, "cuda": {}}
        self.cpu: Callable[..., Any]
        self.cuda: Callable[..., Any]
        self.cpu, self.cuda = (_runner(spec, table) for table in self.implementations.values())
        self._tensor_names = frozenset(spec.tensors)
        self._get_differentiable = tuple_getter([spec.outputs.index(name) for name in spec.differentiable_outputs])
        self._output_mask = tuple_maker(namedtuple("OutputMask", spec.tensors))
        self._cotangents = tuple_maker(namedtuple("Cotangents", spec.differentiable_outputs))
        self._choose_implementations()

    def define(self, kind: str, rule: Callable[..., Any]) -> None:
        """Take a rule."""
        self.given[kind] = rule
        self._choose_implementations()

    def define_kernel(self, device: str, kernel: Callable[..., Any]) -> None:
        """Take an implementation for `"cuda"` or `"cpu"`."""
        self.kernels[device] = kernel
        self._choose_implementations()

    def forget(self, *, decomposable: bool) -> None:
        """Take every rule away, for an operator that is defined again; torch keeps the operator itself."""
        self.given.clear()
        self.kernels.clear()
        self.decomposable = decomposable
        forget_decompositions(self.spec.overload)
        self._choose_implementations()

    def rule(self, kind: str) -> Callable[..., Any]:
        """The rule `kind`."""
        try:
            return self.given[kind]
        except KeyError:
            name = self.spec.name
            raise MissingRuleError(
                f"{name}: no {kind} rule is defined. Register one with @{name}_p.def_{kind}."
            ) from None

    def _choose_implementations(self) -> None:
        """Tabulate which implementation runs on which device under which backend."""
        reference = self.given.get("reference", self._undefined)
        kernel = self.kernels.get("cuda", reference)
        self.implementations["cuda"].update(auto=kernel, triton=kernel, reference=reference)
        interpreted = self._interpreted if "cuda" in self.kernels else reference
        kernel = self.kernels.get("cpu", reference)
        self.implementations["cpu"].update(auto=kernel, triton=interpreted, reference=reference)

    def _undefined(self, *args: Any) -> Any:
        return self.rule("reference")

    def _interpreted(self, *args: Any) -> Any:
        backend.require_interpreter(self.spec.name)
        return self.kernels["cuda"](*args)

    def has_kernel_for(self, device: str) -> bool:
        """Whether something else than the reference runs on `device` under the backend in force."""
        chosen = self.implementations.get(device)
        return chosen is not None and chosen[backend.current_backend()] is not self.given.get("reference")

    def constant_outputs(self, args: Sequence[Any]) -> Collection[int]:
        """Positions of the outputs (in a list of outputs, of its elements) that are constants to every derivative."""
        return self.spec.state_positions

    def is_decomposed_at_once(self, args: Sequence[Any]) -> bool:
        """Whether a missing vjp rule is replaced by the decomposition at the call, not in the backward pass."""
        return False

    def require_decomposition(self, kind: str) -> Callable[..., Any]:
        """The decomposition that is differentiated in place of the missing derivative rule `kind`."""
        try:
            return get_decomposition(self.spec.overload, for_jvp=kind == "jvp")
        except MissingRuleError as error:
            mode = "reverse-mode" if kind == "vjp" else "forward-mode"
            raise MissingRuleError(
                f"{self.spec.name}: {mode} differentiation was asked for, but the operator has no {kind} rule and no "
                f"decomposition. Register a rule with def_{kind}, declare the primitive decomposable, or use "
                "register_decomposition."
            ) from error

    def decomposed_vjp(self, residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Any]:
        """The vjp rule of an operator that has none: that of its decomposition."""
        spec, decomposition = self.spec, self.require_decomposition("vjp")
        args = {name: getattr(residuals, name) for name in spec.arguments}
        # A pullback may run after its level has ended: what it saved is wrapped for one that another level takes.
        flat, lengths = flatten([args[name] for name in spec.tensors], spec.list_tensors)
        tensors = [_alive(x) for x in flat]
        mask = output_mask._replace(**dict.fromkeys(spec.cached, False))
        active = [i for i, want in enumerate(flatten(mask, spec.list_tensors)[0]) if want]
        places = range(len(cotangents[0])) if spec.returns_list else map(spec.outputs.index, cotangents._fields)
        by_place = zip(places, cotangents[0] if spec.returns_list else cotangents, strict=True)
        given = {place: _alive(cotangent) for place, cotangent in by_place if cotangent is not None}

        def function(*tensors: Any) -> tuple[Any, ...]:
            substitutes = zip(spec.tensors, regroup(tensors, lengths), strict=True)
            outputs = decomposition(*{**args, **dict(substitutes)}.values())
            flat = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
            return tuple(flat[place] for place in given)

        pullback = torch.func.vjp(in_places(function, tensors, active), *[tensors[i] for i in active])[1]
        result: list[Any] = [None] * len(tensors)
        for i, cotangent in zip(active, pullback(tuple(given.values())), strict=True):
            result[i] = cotangent
        return dict(zip(spec.tensors, regroup(result, lengths), strict=True))

    def flat_vjp(self, residuals: Any, cotangents: Sequence[Any], lengths: Any, output_mask: Any) -> list[Any]:
        """Apply the vjp rule to flat cotangents and flags; one cotangent per tensor, lists taken apart."""
        return self.apply_flat(self.given["vjp"], residuals, cotangents, lengths, output_mask)

    def apply_flat(
        self, rule: Callable[..., Any], residuals: Any, cotangents: Sequence[Any], lengths: Any, output_mask: Any
    ) -> list[Any]:
        """`flat_vjp` with a rule that is given."""
        spec = self.spec
        given = [list(cotangents)] if spec.returns_list else self._get_differentiable(cotangents)
        output_mask = output_mask if lengths is None else regroup(output_mask, lengths)
        result = rule(residuals, self._cotangents(given), self._output_mask(output_mask))
        if type(result) is not dict or not self._tensor_names.issuperset(result):
            is_dict = isinstance(result, dict)
            raise (ValueError if is_dict else TypeError)(
                f"{spec.name}: the vjp rule must return a dict of cotangents by argument, {spec.tensors}, got "
                f"{list(result) if is_dict else type(result).__name__}."
            )
        found = list(map(result.get, spec.tensors))
        if lengths is None:
            return found
        for i, length in lengths:
            found[i] = found[i] or [None] * length
        return flatten(found, spec.list_tensors)[0]

    def before_loop(self) -> None:
        """Called before vmap loops over the samples, for want of a batching rule."""


def _alive(value: Any) -> Any:
    return torch._C._functorch.unwrap_if_dead(value) if isinstance(value, torch.Tensor) else value  # type: ignore[attr-defined] - no stub


def handle_with(module: str, loader: Callable[[], Callable[[RuleTable, tuple], Any]]) -> None:
    """Have calls below autograd handled by what `loader` returns, as soon as somebody has imported `module`.

    A handler is `(rules, args) -> outputs`, or `NotImplemented` for a call that goes on as it is.
    """
    _handlers[module] = loader


def handled(rules: RuleTable, args: tuple) -> Any:
    """Outputs of a call by a handler of the class of its tensors; `NotImplemented` without one."""
    if any(isinstance(x, FunctionalTensor) for x in args):
        # In a trace, whose compiler may have imported the module: such classes are above functionalization.
        return NotImplemented
    for module, loader in _handlers.items():
        if module in sys.modules and (outputs := loader()(rules, args)) is not NotImplemented:
            return outputs
    return NotImplemented
