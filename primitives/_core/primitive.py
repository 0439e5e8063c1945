"""`Primitive`: one torch operator together with every rule that torch needs to know about it."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import _C

from primitives._core import backend
from primitives._core.autograd import autograd_kernel
from primitives._core.batching import BatchInfo, legacy_vmap_kernel, vmap_by_loop
from primitives._core.contexts import run_as_written
from primitives._core.decomposition import register_decomposition
from primitives._core.fast_path import FastPathTensors, fast_path_keys
from primitives._core.inductor import register_inductor_lowering
from primitives._core.rules import RuleTable
from primitives._core.spec import NAMESPACE, Spec, library

# Devices without kernels of their own run the reference.
OTHER_DEVICES = ("MPS", "XPU", "HPU", "PrivateUse1")

# Looked up once: this is asked at every call.
_is_tracing = torch.compiler.is_dynamo_compiling

_registry: dict[str, Primitive] = {}
_registry_lock = threading.Lock()

_Rule = TypeVar("_Rule", bound="Callable")


def registered_primitives() -> dict[str, Primitive]:
    """All primitives by qualified name, in order of definition."""
    return dict(_registry)


class Primitive:
    """One `torch.library` operator and its rules, registered with torch from this one object.

    The reference is the definition: a plain-torch, differentiable function of the schema's arguments. It runs
    wherever a kernel is missing, gives shapes, dtypes and strides to tracers, and is the decomposition that is
    differentiated where a derivative rule is missing and `decomposable` allows it. It must not return its inputs or
    views of them.

    Rules are added with the `def_*` decorators, each returning its function unchanged:

    - `def_reference(*args) -> outputs`
    - `def_kernel(device)(*args) -> outputs`, device `"cuda"` (a Triton kernel, also run by the interpreter) or
      `"cpu"`; `None` for a call that it leaves to the reference
    - `def_fake(*args) -> outputs`, by default the reference on tensors without data
    - `def_vjp(residuals, cotangents, output_mask) -> {argument: cotangent}`
    - `def_jvp(residuals, tangents) -> tangent of each differentiable output`
    - `def_vmap(batch, primals) -> (outputs, output axes)`, by default a loop over the samples
    - `def_autocast(device)(primals) -> primals`

    `residuals`, `cotangents`, `tangents`, `output_mask` and `primals` are namedtuples whose fields are names of the
    schema; `tangents` and `output_mask` have those of the arguments that are tensors, or lists of them. A tensor that
    is absent, a tangent of something unperturbed and a cotangent of something unused are all `None`; a vjp rule leaves
    out (or maps to `None`) what `output_mask` does not ask for. Rules call primitives or plain torch, so that they can
    be differentiated and batched.

    Args:
        name: Operator name; the operator is `torch.ops.<namespace>.<name>`.
        schema: Arguments and named outputs as in `torch.library`, `"(Tensor x, float eps) -> (Tensor y, Tensor
            rstd)"`.
        residuals: Values that the forward pass keeps: names of arguments or outputs, or `"x.dtype"` for a dtype alone.
            Arguments that are not tensors, and statistics, are kept always.
        statistics: Outputs that are cached values of the inputs: differentiating one raises.
        state: Outputs that are carried from step to step and are constants to every derivative, as torch's buffers
            are.
        cached: Arguments that are statistics of another argument, such as the mean of x. The reference takes them from
            that argument again, and nothing is ever differentiated with respect to them.
        decomposable: Whether the reference is entered into the decomposition table, which is differentiated where a
            derivative rule is missing.
        recomputable: Whether a joint graph may compute it again instead of keeping its results: it reads its inputs
            once or twice, draws nothing, and two runs give the same bits.
        namespace: Operator namespace.

    Raises:
        ValueError: If a name in `residuals`, `statistics`, `state` or `cached` is not in the schema.

    Attributes:
        spec: Names of the arguments and outputs, and the declarations above.
        rules: The rules, and what is asked about them at a call.
        overload: The operator as torch knows it.
        autograd_kernel: `(keyset, *args) -> outputs`, what the dispatcher calls on the Autograd key.
    """

    recomputable: bool = False

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
        recomputable: bool = False,
        namespace: str = NAMESPACE,
    ) -> None:
        spec = Spec.parse(name, namespace, schema, statistics=statistics, state=state, cached=cached)
        self._assemble(RuleTable(spec, residuals, decomposable=decomposable))
        self.recomputable = recomputable

    @classmethod
    def of(cls, rules: RuleTable) -> Primitive:
        """The operator with this table of rules."""
        primitive = cls.__new__(cls)
        primitive._assemble(rules)
        return primitive

    def _assemble(self, rules: RuleTable) -> None:
        """Register with torch all that it has to know."""
        self.rules: RuleTable = rules
        self.spec: Spec = rules.spec
        name, lib = self.spec.name, library(self.spec.namespace)
        lib.define(f"{name}{self.spec.schema}", tags=(torch.Tag.pt2_compliant_tag,))
        self.overload: Any = self.spec.overload
        self.autograd_kernel: Callable[..., Any] = autograd_kernel(rules)
        self._fast_path_tensors = FastPathTensors(self.overload)
        self._autocast_keys: set[str] = set()
        self._primals = namedtuple("Primals", self.spec.arguments)
        self._axes = namedtuple("Axes", self.spec.arguments)
        lib.impl(name, rules.cpu, "CPU")
        lib.impl(name, rules.cuda, "CUDA")
        for device in OTHER_DEVICES:
            lib.impl(name, self._elsewhere, device)
        lib.impl(name, self.autograd_kernel, "Autograd", with_keyset=True)
        if self.spec.outputs:
            lib.impl(name, legacy_vmap_kernel(self.overload), "Batched")
        torch.library.register_fake(self.qualified_name, self._fake, lib=lib)
        torch.library.register_vmap(self.qualified_name, self._vmap, lib=lib)
        register_inductor_lowering(rules, lib)
        with _registry_lock:
            _registry[self.qualified_name] = self

    @run_as_written
    def __call__(self, *args: Any) -> Any:
        """Call the operator: arguments in the order of the schema, outputs as torch returns them."""
        if _is_tracing():
            backend.guard_on_backend()
            return self.overload(*args)
        keyset = fast_path_keys(self._fast_path_tensors[tuple(map(type, args))](args))
        return self.overload(*args) if keyset is None else self.autograd_kernel(keyset, *args)

    def __repr__(self) -> str:
        return f"Primitive({self.qualified_name})"

    @property
    def name(self) -> str:
        """Name without the namespace."""
        return self.spec.name

    @property
    def qualified_name(self) -> str:
        """Namespace and name."""
        return self.spec.qualified_name

    def has_rule(self, kind: str) -> bool:
        """Whether the rule `kind` (`"vjp"`, `"jvp"`, `"vmap"`, ...) is defined."""
        return kind in self.rules.given

    def rule(self, kind: str) -> Callable[..., Any]:
        """The rule `kind`; raises `MissingRuleError` if it is not defined."""
        return self.rules.rule(kind)

    def _define(self, kind: str, rule: _Rule) -> _Rule:
        self.rules.define(kind, rule)
        return rule

    def def_reference(self, rule: _Rule) -> _Rule:
        """Define the operator: a differentiable plain-torch function of the arguments."""
        if self.rules.decomposable:
            self.decompose_with(rule)
        return self._define("reference", rule)

    def decompose_with(self, decomposition: Callable[..., Any]) -> None:
        """Enter a function of the same arguments into the decomposition table, in the place of the reference."""
        register_decomposition(self, allow_existing=True)(decomposition)

    def def_fake(self, rule: _Rule) -> _Rule:
        """Define shapes, dtypes and strides of the outputs, without looking at data."""
        return self._define("fake", rule)

    def def_vjp(self, rule: _Rule) -> _Rule:
        """Define the reverse-mode rule: `(residuals, cotangents, output_mask) -> {argument name: cotangent}`."""
        return self._define("vjp", rule)

    def def_jvp(self, rule: _Rule) -> _Rule:
        """Define the forward-mode rule: `(residuals, tangents) -> tangent of each differentiable output`."""
        return self._define("jvp", rule)

    def def_vmap(self, rule: _Rule) -> _Rule:
        """Define the batching rule: `(batch, primals) -> (outputs, output axes)`."""
        return self._define("vmap", rule)

    def check_device(self, decorator: str, device: str) -> None:
        """Raise `ValueError` unless `decorator` takes `device`."""
        if device not in ("cuda", "cpu"):
            raise ValueError(f'{self.spec.name}: {decorator} takes "cuda" or "cpu", got {device!r}.')

    def def_kernel(self, device: str) -> Callable[[_Rule], _Rule]:
        """Define the implementation for a device: `"cuda"` or `"cpu"`."""
        self.check_device("def_kernel", device)

        def decorator(kernel: _Rule) -> _Rule:
            self.rules.define_kernel(device, kernel)
            return kernel

        return decorator

    def def_autocast(self, device: str) -> Callable[[_Rule], _Rule]:
        """Define what autocast does on `device` (`"cuda"`, `"cpu"`): `primals -> primals`, cast as needed."""
        key = f"Autocast{device.upper()}"

        def decorator(rule: _Rule) -> _Rule:
            if key not in self._autocast_keys:
                library(self.spec.namespace).impl(self.spec.name, self._autocast_kernel(key), key)
                self._autocast_keys.add(key)
            return self._define(key, rule)

        return decorator

    def _autocast_kernel(self, key: str) -> Callable[..., Any]:
        excluded = _C.DispatchKeySet(getattr(_C.DispatchKey, key))

        @run_as_written
        def kernel(*args: Any) -> Any:
            rule = self.rules.given.get(key)
            with _C._ExcludeDispatchKeyGuard(excluded):
                return self.overload(*(args if rule is None else rule(self._primals(*args))))

        return kernel

    @run_as_written
    def _elsewhere(self, *args: Any) -> Any:
        return self.rules.rule("reference")(*args)

    def _fake(self, *args: Any) -> Any:
        return self.rules.rule("fake" if self.has_rule("fake") else "reference")(*args)

    @run_as_written
    def _vmap(self, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        if not self.has_rule("vmap"):
            self.rules.before_loop()
            return vmap_by_loop(self.spec, info.batch_size, info.randomness, in_dims, args)
        batch = BatchInfo(info.batch_size, self._axes(*in_dims), info.randomness)
        return self.rule("vmap")(batch, self._primals(*args))
