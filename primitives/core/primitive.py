"""`Primitive`: one torch operator together with every rule that torch needs to know about it."""

from __future__ import annotations

import functools
import threading
from collections import namedtuple
from typing import TYPE_CHECKING, Any

import torch
from torch import _C

from primitives.core import backend
from primitives.core.autograd import autograd_kernel
from primitives.core.batching import BatchInfo
from primitives.core.decomposition import forget_decompositions, get_decomposition, register_decomposition
from primitives.core.errors import MissingRuleError
from primitives.core.fallbacks import decomposed_vjp, vmap_by_loop
from primitives.core.fast_path import FastPathTensors, fast_path_keys
from primitives.core.implementations import runner
from primitives.core.inductor import register_inductor_lowering
from primitives.core.library import NAMESPACE, library, list_names, names
from primitives.core.lists import flatten, regroup
from primitives.core.residuals import ResidualLayout, Residuals, tuple_getter, tuple_maker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

__all__ = ["Primitive", "registered_primitives"]

# Devices without kernels of their own run the reference.
OTHER_DEVICES = ("MPS", "XPU", "HPU", "PrivateUse1")

# Looked up once: this is asked at every call.
_is_tracing = torch.compiler.is_dynamo_compiling

_registry: dict[str, Primitive] = {}
_registry_lock = threading.Lock()


def registered_primitives() -> dict[str, Primitive]:
    """All primitives by qualified name, in order of definition."""
    return dict(_registry)


class Primitive:
    """One `torch.library` operator and its rules, registered with torch from this one object.

    The reference is the definition: a plain-torch, differentiable function of the schema's arguments. It runs
    wherever there is no kernel, gives shapes, dtypes and strides to tracers, and is the decomposition that is
    differentiated where a derivative rule is missing and `decomposable` allows it. It must not return its inputs or
    views of them.

    Rules are added with the `def_*` decorators, each returning its function unchanged:

    - `def_reference(*args) -> outputs`
    - `def_kernel(device)(*args) -> outputs`, device `"cuda"` (a Triton kernel, also run by the interpreter) or
      `"cpu"`; `None` for a call that it leaves to the reference
    - `def_fake(*args) -> outputs`, by default the reference on tensors without data
    - `def_vjp(residuals, cotangents, wanted) -> {argument: cotangent}`
    - `def_jvp(residuals, tangents) -> tangent of each differentiable output`
    - `def_vmap(batch, primals) -> (outputs, output axes)`, by default a loop over the samples
    - `def_autocast(device)(primals) -> primals`

    `residuals`, `cotangents`, `tangents`, `wanted` and `primals` are namedtuples whose fields are names of the
    schema; `tangents` and `wanted` have those of the arguments that are tensors, or lists of them. A tensor that is
    absent, a tangent of something unperturbed and a cotangent of something unused are all `None`; a vjp rule leaves
    out (or maps to `None`) what is not `wanted`. Rules call primitives or plain torch, so that they can be
    differentiated and batched.

    Args:
        name: Operator name; the operator is `torch.ops.<namespace>.<name>`.
        schema: Arguments and named outputs as in `torch.library`, `"(Tensor x, float eps) -> (Tensor y, Tensor
            rstd)"`.
        residuals: What the forward pass keeps: names of arguments or outputs, or `"x.dtype"` for a dtype alone.
            Arguments that are no tensors are kept always.
        statistics: Outputs that are cached values of the inputs: differentiating one raises.
        state: Outputs that are carried from step to step and are constants to every derivative, as torch's buffers
            are.
        cached: Arguments that are statistics of another argument, such as the mean of x. The reference takes them from
            that argument again, and nothing is ever differentiated with respect to them.
        decomposable: Whether the reference is entered into the decomposition table, which is differentiated where a
            derivative rule is missing.
        namespace: Operator namespace.

    Raises:
        ValueError: If a name in `residuals`, `statistics`, `state` or `cached` is not in the schema.
    """

    # Whether kernels launch through `triton_kernels` alone, so that a compiler can be shown the launches.
    kernels_are_traceable = True

    def __init__(
        self,
        name: str,
        schema: str,
        *,
        residuals: Sequence[str] = (),
        statistics: Sequence[str] = (),
        state: Sequence[str] = (),
        cached: Sequence[str] = (),
        decomposable: bool = False,
        namespace: str = NAMESPACE,
    ) -> None:
        self.name = name
        self.qualified_name = f"{namespace}::{name}"
        parsed = _C.parse_schema(f"{self.qualified_name}{schema}")
        self.argument_names = names(parsed.arguments, "input")
        self.output_names = names(parsed.returns, "output")
        tensors = [n for n, a in zip(self.argument_names, parsed.arguments, strict=True) if "Tensor" in str(a.type)]
        lists = list_names(self.argument_names, parsed.arguments)
        self.list_arguments = [self.argument_names.index(n) for n in lists]
        # What torch differentiates is the arguments that are tensors, or lists of them; these are the lists.
        self.tensor_names, self.list_tensors = tensors, [tensors.index(n) for n in lists]
        self.get_tensors = tuple_getter([self.argument_names.index(n) for n in tensors])
        list_outputs = list_names(self.output_names, parsed.returns)
        if list_outputs and len(self.output_names) > 1:
            raise ValueError(f"{name}: a list of tensors must be the only output, got {schema}.")
        self.returns_list = bool(list_outputs)
        self._check_names("statistics", statistics, "output", self.output_names)
        self._check_names("state", state, "output", self.output_names)
        self._check_names("cached", cached, "tensor argument", tensors)
        for statistic in statistics:
            if statistic not in residuals:
                raise ValueError(f"{name}: statistic {statistic!r} must be a residual, for its tangent to be refused.")
        self.statistics = tuple(statistics)
        self.state = tuple(state)
        self._state_positions = [self.output_names.index(n) for n in state]
        self.decomposable = decomposable
        self.differentiable_outputs = [n for n in self.output_names if n not in (*statistics, *state)]
        sources = (self.argument_names, tensors, self.output_names, [*lists, *list_outputs])
        self._get_differentiable = tuple_getter([self.output_names.index(n) for n in self.differentiable_outputs])
        self._declared_residuals = ResidualLayout(name, residuals, *sources)
        self._every_argument = ResidualLayout(name, [*tensors, *statistics], *sources)
        self.residuals, self.jvp_residuals, self.every_argument = self.residual_layouts()
        self.cached = frozenset(cached)
        self.Primals = namedtuple("Primals", self.argument_names)
        self.Tangents = namedtuple("Tangents", tensors)
        self.Wanted = namedtuple("Wanted", tensors)
        self.Axes = namedtuple("Axes", self.argument_names)
        self.Cotangents = namedtuple("Cotangents", self.differentiable_outputs)
        self._wanted, self._cotangents = tuple_maker(self.Wanted), tuple_maker(self.Cotangents)
        self.tensor_arguments = frozenset(tensors)
        self._rules: dict[str, Callable] = {"decomposed_vjp": functools.partial(decomposed_vjp, self)}
        self._kernels: dict[str, Callable] = {}
        self._autocast_keys: set[str] = set()
        self._on_cpu: dict[str, Callable] = {}
        self._on_cuda: dict[str, Callable] = {}
        self._cpu, self._cuda = runner(self, self._on_cpu), runner(self, self._on_cuda)
        self._choose_implementations()
        self._register(namespace, schema)

    def __call__(self, *args: Any) -> Any:
        """Call the operator: arguments in the order of the schema, outputs as torch returns them."""
        if _is_tracing():
            backend.guard_on_backend()
            return self.overload(*args)
        keyset = fast_path_keys(self._fast_path_tensors[tuple(map(type, args))](args))
        return self.overload(*args) if keyset is None else self.autograd_kernel(keyset, *args)

    def __repr__(self) -> str:
        return f"Primitive({self.qualified_name})"

    def _check_names(self, option: str, names: Sequence[str], what: str, allowed: Sequence[str]) -> None:
        for name in names:
            if name not in allowed:
                raise ValueError(f"{self.name}: {option} names {name!r}, which is no {what} ({allowed}).")

    def _register(self, namespace: str, schema: str) -> None:
        lib = library(namespace)
        lib.define(f"{self.name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, namespace), self.name).default
        lib.impl(self.name, self._cpu, "CPU")
        lib.impl(self.name, self._cuda, "CUDA")
        for device in OTHER_DEVICES:
            lib.impl(self.name, self._elsewhere, device)
        self.autograd_kernel = autograd_kernel(self)
        lib.impl(self.name, self.autograd_kernel, "Autograd", with_keyset=True)
        torch.library.register_fake(self.qualified_name, self._fake, lib=lib)
        torch.library.register_vmap(self.qualified_name, self._vmap, lib=lib)
        self._fast_path_tensors = FastPathTensors(self)
        register_inductor_lowering(self, lib)
        with _registry_lock:
            _registry[self.qualified_name] = self

    # Rules.

    def _define(self, kind: str) -> Callable[[Callable], Callable]:
        def decorator(rule: Callable) -> Callable:
            self._rules[kind] = rule
            self._choose_implementations()
            return rule

        return decorator

    def def_reference(self, rule: Callable) -> Callable:
        """Define the operator: a differentiable plain-torch function of the arguments."""
        if self.decomposable:
            self.decompose_with(rule)
        return self._define("reference")(rule)

    def decompose_with(self, decomposition: Callable) -> None:
        """Enter a function of the same arguments into the decomposition table, in the place of the reference."""
        register_decomposition(self, allow_existing=True)(decomposition)

    def def_fake(self, rule: Callable) -> Callable:
        """Define shapes, dtypes and strides of the outputs, without looking at data."""
        return self._define("fake")(rule)

    def check_device(self, decorator: str, device: str) -> None:
        """Raise `ValueError` unless `decorator` takes `device`."""
        if device not in ("cuda", "cpu"):
            raise ValueError(f'{self.name}: {decorator} takes "cuda" or "cpu", got {device!r}.')

    def def_kernel(self, device: str) -> Callable[[Callable], Callable]:
        """Define the implementation for a device: `"cuda"` or `"cpu"`."""
        self.check_device("def_kernel", device)

        def decorator(kernel: Callable) -> Callable:
            self._kernels[device] = kernel
            self._choose_implementations()
            return kernel

        return decorator

    def def_vjp(self, rule: Callable) -> Callable:
        """Define the reverse-mode rule: `(residuals, cotangents, wanted) -> {argument name: cotangent}`."""
        return self._define("vjp")(rule)

    def def_jvp(self, rule: Callable) -> Callable:
        """Define the forward-mode rule: `(residuals, tangents) -> tangent of each differentiable output`."""
        return self._define("jvp")(rule)

    def def_autograd(self, rule: Callable) -> Callable:
        """Define what is run on the Autograd key in the place of all derivative rules: `(*args) -> outputs`."""
        return self._define("autograd")(rule)

    def def_vmap(self, rule: Callable) -> Callable:
        """Define the batching rule: `(batch, primals) -> (outputs, output axes)`."""
        return self._define("vmap")(rule)

    def def_autocast(self, device: str) -> Callable[[Callable], Callable]:
        """Define what autocast does on `device` (`"cuda"`, `"cpu"`): `primals -> primals`, cast as needed."""
        key = f"Autocast{device.upper()}"

        def decorator(rule: Callable) -> Callable:
            if key not in self._autocast_keys:
                library(self.qualified_name.split("::")[0]).impl(self.name, self._autocast_kernel(key), key)
                self._autocast_keys.add(key)
            self._rules[key] = rule
            return rule

        return decorator

    def _autocast_kernel(self, key: str) -> Callable:
        excluded = _C.DispatchKeySet(getattr(_C.DispatchKey, key))

        def kernel(*args: Any) -> Any:
            rule = self._rules.get(key)
            with _C._ExcludeDispatchKeyGuard(excluded):
                return self.overload(*(args if rule is None else rule(self.Primals(*args))))

        return kernel

    def forget_rules(self, *, decomposable: bool) -> None:
        """Take every rule away, for an operator that is defined again; torch keeps the operator itself."""
        self._rules.clear()
        self._kernels.clear()
        self._rules["decomposed_vjp"] = functools.partial(decomposed_vjp, self)
        self.decomposable = decomposable
        forget_decompositions(self)
        self._choose_implementations()

    @property
    def rule_kinds(self) -> Collection[str]:
        """The kinds of the rules that are defined: a view that follows later definitions."""
        return self._rules.keys()

    def has_rule(self, kind: str) -> bool:
        """Whether the rule `kind` (`"vjp"`, `"jvp"`, `"vmap"`, ...) is defined."""
        return kind in self._rules

    def rule(self, kind: str) -> Callable:
        """The rule `kind`.

        Raises:
            MissingRuleError: If it is not defined.
        """
        try:
            return self._rules[kind]
        except KeyError:
            raise MissingRuleError(
                f"{self.name}: no {kind} rule is defined. Register one with @{self.name}_p.def_{kind}."
            ) from None

    # What the autograd kernel asks.

    def residual_layouts(self) -> tuple[Residuals, Residuals, Residuals]:
        """What is kept for the vjp rule, for the jvp rule, and for the decomposition where there is no vjp rule."""
        return self._declared_residuals, self._declared_residuals, self._every_argument

    def is_decomposed_at_once(self, args: Sequence[Any]) -> bool:
        """Whether a missing vjp rule is replaced by the decomposition at the call, not in the backward pass."""
        return False

    def constant_outputs(self, args: Sequence[Any]) -> Collection[int]:
        """Positions of the outputs (in a list of outputs, of its elements) that are constants to every derivative."""
        return self._state_positions

    def label(self, name: str, index: int, args: Sequence[Any]) -> str:
        """What errors call the tensor `index` of the argument `name` of the call `args`."""
        is_list = self.tensor_names.index(name) in self.list_tensors
        return f"{name}[{index}]" if is_list else name

    def require_decomposition(self, kind: str) -> Callable:
        """The decomposition that is differentiated in place of the missing derivative rule `kind`.

        Raises:
            MissingRuleError: If no table has a decomposition.
        """
        try:
            decomposition = get_decomposition(self, for_jvp=kind == "jvp")
        except MissingRuleError as error:
            mode = "reverse-mode" if kind == "vjp" else "forward-mode"
            raise MissingRuleError(
                f"{self.name}: {mode} differentiation was asked for, but there is no {kind} rule and no decomposition. "
                f"Register a rule with def_{kind}, declare the primitive decomposable, or use register_decomposition."
            ) from error
        return decomposition

    def decompose(self, kind: str, args: tuple) -> Any:
        """Run the decomposition in place of the missing derivative rule `kind`, so that torch differentiates it.

        Raises:
            MissingRuleError: If the primitive may not be decomposed.
        """
        return self.require_decomposition(kind)(*args)

    def flat_vjp(self, vjp: str, residuals: Any, cotangents: Sequence[Any], lengths: Any, wanted: Any) -> list[Any]:
        """Apply the vjp rule of kind `vjp` to flat cotangents and flags; one cotangent per tensor, lists apart."""
        given = [list(cotangents)] if self.returns_list else self._get_differentiable(cotangents)
        wanted = wanted if lengths is None else regroup(wanted, lengths)
        result = self._rules[vjp](residuals, self._cotangents(given), self._wanted(wanted))
        if type(result) is not dict or not self.tensor_arguments.issuperset(result):
            self.check_vjp_result(result)
        bars = list(map(result.get, self.tensor_names))
        if lengths is None:
            return bars
        of_lists = {i: bars[i] or [None] * length for i, length in lengths}
        return flatten([of_lists.get(i, bar) for i, bar in enumerate(bars)], self.list_tensors)[0]

    def check_vjp_result(self, result: Any) -> None:
        """Raise unless a vjp rule returned a dict whose keys are tensor arguments."""
        if not isinstance(result, dict):
            raise TypeError(f"{self.name}: the vjp rule must return a dict, got {type(result).__name__}.")
        if not self.tensor_arguments.issuperset(result):
            unknown = sorted(set(result) - self.tensor_arguments)
            raise ValueError(
                f"{self.name}: the vjp rule returned cotangents for {unknown}, but the tensor arguments are "
                f"{sorted(self.tensor_arguments)}."
            )

    def _elsewhere(self, *args: Any) -> Any:
        return self.rule("reference")(*args)

    def _interpreted(self, *args: Any) -> Any:
        backend.require_interpreter(self.name)
        return self._kernels["cuda"](*args)

    def _choose_implementations(self) -> None:
        """Tabulate which implementation runs on which device under which backend."""
        reference = self._rules.get("reference", self._undefined)
        kernel = self._kernels.get("cuda", reference)
        self._on_cuda.update(auto=kernel, triton=kernel, reference=reference)
        interpreted = self._interpreted if "cuda" in self._kernels else reference
        self._on_cpu.update(auto=self._kernels.get("cpu", reference), triton=interpreted, reference=reference)

    def has_kernel_for(self, device: str) -> bool:
        """Whether something else than the reference runs on `device` under the backend in force."""
        chosen = {"cpu": self._on_cpu, "cuda": self._on_cuda}.get(device)
        return chosen is not None and chosen[backend.current_backend()] is not self._rules.get("reference")

    def _undefined(self, *args: Any) -> Any:
        return self.rule("reference")

    def _fake(self, *args: Any) -> Any:
        return self._rules.get("fake", self.rule("reference"))(*args)

    def _vmap(self, info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        if not self.has_rule("vmap"):
            return self._vmap_by_loop(info.batch_size, info.randomness, in_dims, args)
        batch = BatchInfo(info.batch_size, self.Axes(*in_dims), info.randomness)
        return self.rule("vmap")(batch, self.Primals(*args))

    def _vmap_by_loop(self, size: int, randomness: str, axes: tuple, args: tuple) -> tuple[Any, Any]:
        return vmap_by_loop(self, size, randomness, axes, args)
