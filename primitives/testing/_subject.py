"""One call of an operator: as functions of flat tensors, in which properties are stated, and as text of a program."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import optree
import torch
from torch import Tensor

from primitives._core.dtypes import has_derivatives
from primitives._core.errors import MissingRuleError
from primitives._core.primitive import Primitive
from primitives._core.sequences import in_places
from primitives._core.trees.overlay import key_path
from primitives.custom import CustomOp
from primitives.testing._compare import clone, widened
from primitives.tracing._leaves import Leaves

# Other values for an argument that is a number: the first is used that is accepted and makes a difference.
CHANGES: dict[type, tuple[Callable, ...]] = {
    float: (lambda v: 1.5 * v + 0.25, lambda v: 0.5 * v + 0.125, lambda v: 0.5 * v, lambda v: 2.0 * v),
    int: (lambda v: v + 1, lambda v: v - 1, lambda v: 2 * v),
    bool: (lambda v: not v,),
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """One call of a `CustomOp`, a `Primitive` or any function: its trees of tensors, and its keyword arguments."""

    op: Any
    args: tuple
    static: dict[str, Any]
    namespace: str = ""

    @classmethod
    def of(cls, op: Any, args: tuple, static: dict[str, Any], namespace: str) -> Subject:
        """The call `op(*args, **static)`, bound as the operator binds it, with tensors of its own."""
        if not callable(op):
            raise TypeError(f"check_rules: op must be a custom_op, a Primitive or a function, got {type(op).__name__}.")
        if isinstance(op, Primitive) and static:
            raise TypeError(f"check_rules: the arguments of {op.qualified_name} are positional, got {sorted(static)}.")
        if isinstance(op, CustomOp):
            namespace = namespace or op.namespace
            args, static = op.signature.bind(*args, **static)
        subject = cls(op, args, static, namespace)
        if not subject.tensors:
            raise TypeError(f"check_rules: the arguments of {subject.name} must hold a tensor, got none.")
        return subject.map(clone)

    @property
    def name(self) -> str:
        return getattr(self.op, "qualified_name", None) or getattr(self.op, "__name__", None) or repr(self.op)

    @property
    def primitive(self) -> Primitive | None:
        """The primitive under the operator."""
        if isinstance(self.op, CustomOp):
            return self.op.primitive
        return self.op if isinstance(self.op, Primitive) else None

    @functools.cached_property
    def _leaves(self) -> Leaves:
        """The leaves of all arguments, with the names of these."""
        if isinstance(self.op, Primitive):
            return Leaves.of(self.args, self.op.spec.arguments, self.namespace)
        function = getattr(self.op, "__wrapped__", self.op)
        return Leaves.of_arguments(function, self.args, self.static, self.namespace)

    @functools.cached_property
    def _places(self) -> list[int]:
        """Of the tensors of the positional arguments among the leaves."""
        count = len(optree.tree_leaves(cast("Any", self.args), namespace=self.namespace))
        return [i for i, x in enumerate(self._leaves.values[:count]) if isinstance(x, torch.Tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        return [self._leaves.values[i] for i in self._places]

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """Key path of each tensor, starting with the name of its argument."""
        return self._leaves.labels(self._places)

    def trees(self, tensors: Sequence[Any]) -> tuple:
        """The positional arguments with other values for the tensors."""
        return self._leaves.filled(self._places, tensors)[: len(self.args)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Subject:
        """The same call with every tensor replaced."""
        return dataclasses.replace(self, args=self.trees([function(x) for x in self.tensors]))

    def double(self) -> Subject:
        """The same call in float64 and complex128, contiguous."""
        return self.map(lambda x: widened(x).contiguous())

    def call(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All tensors that the operator returns."""
        return self._run(self.op.pure if self.mutates else self.op, tensors)

    @property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments that the operator updates in place; it is checked in its pure form."""
        return self.op.signature.mutates if isinstance(self.op, CustomOp) else ()

    def reference(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All tensors that the definition returns; that of a plain function is the function itself."""
        if not self.mutates:
            if isinstance(self.op, CustomOp):
                return self._run(self.op.__wrapped__, tensors)
            return self._run(self.op.rule("reference") if isinstance(self.op, Primitive) else self.op, tensors)
        # As the pure form: it writes into copies, and their new values follow the results.
        args = self.trees([x.clone() for x in tensors])
        output = self.op.__wrapped__(*args, **self.static)
        updated = [arg for name, arg in zip(self.op.signature.positional, args, strict=True) if name in self.mutates]
        return self.tensors_of((output, *updated))

    def tried(self, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """The results of the definition, or `None` where it refuses the arguments."""
        try:
            return self.reference(*tensors)
        except Exception:
            return None

    def _run(self, function: Callable, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.tensors_of(function(*self.trees(tensors), **self.static))

    def tensors_of(self, tree: Any) -> tuple[Tensor, ...]:
        return tuple(x for x in optree.tree_leaves(tree, namespace=self.namespace) if isinstance(x, torch.Tensor))

    @functools.cached_property
    def output_labels(self) -> list[str]:
        """Key path of each tensor that the operator returns."""
        output = (self.op.pure if self.mutates else self.op)(*self.map(clone).args, **self.static)
        accessors, leaves, _ = optree.tree_flatten_with_accessor(cast("Any", output), namespace=self.namespace)
        return [key_path(a, "output") for a, x in zip(accessors, leaves, strict=True) if isinstance(x, torch.Tensor)]

    @functools.cached_property
    def inputs(self) -> list[int]:
        """Which tensors can be differentiated."""
        cached = self.op.spec.cached if isinstance(self.op, Primitive) else ()
        return [i for i, x in enumerate(self.tensors) if has_derivatives(x.dtype) and self.labels[i] not in cached]

    @functools.cached_property
    def outputs(self) -> list[int]:
        """Which results have derivatives."""
        if self.primitive is None:
            active = [clone(x).requires_grad_(i in self.inputs) for i, x in enumerate(self.tensors)]
            return [i for i, y in enumerate(self.call(*active)) if y.requires_grad]
        results = self.call(*map(clone, self.tensors))
        if isinstance(self.op, Primitive):
            constants = {
                n for n, name in enumerate(self.op.spec.outputs) if name not in self.op.spec.differentiable_outputs
            }
        else:
            structure = self.op.table.flatten(self.args, self.static)[1]
            # New values of what is updated have no derivative.
            described = structure.settled
            constants = {*described.constants, *range(described.num_tensors, len(results))}
        return [i for i, y in enumerate(results) if has_derivatives(y.dtype) and i not in constants and y.numel()]

    @property
    def active(self) -> list[Tensor]:
        """The tensors that can be differentiated."""
        return [self.tensors[i] for i in self.inputs]

    @property
    def active_labels(self) -> list[str]:
        return [self.labels[i] for i in self.inputs]

    @property
    def result_labels(self) -> list[str]:
        """Key paths of the results that have derivatives."""
        return [self.output_labels[i] for i in self.outputs]

    def function(self, *, reference: bool = False) -> Callable[..., tuple[Tensor, ...]]:
        """The differentiable results as a function of the differentiable tensors; the others stay."""
        run = self.reference if reference else self.call

        def differentiable(*tensors: Tensor) -> tuple[Tensor, ...]:
            results = run(*tensors)
            return tuple(results[i] for i in self.outputs)

        return in_places(differentiable, self.tensors, self.inputs)

    @property
    def has_cached(self) -> bool:
        """Whether arguments are values of other ones, which only the reference computes again."""
        return isinstance(self.op, Primitive) and bool(self.op.spec.cached)

    def missing(self, kind: str) -> str | None:
        """Why the mode of the rule `kind` (`"vjp"`, `"jvp"`) does not exist; `None` if it does."""
        if not self.inputs:
            return "no argument is a floating or complex tensor that can be differentiated"
        if self.primitive is not None and not (self.primitive.has_rule(kind) or self.primitive.has_rule("autograd")):
            try:
                self.primitive.rules.require_decomposition(kind)
            except MissingRuleError:
                return "no def_backward" if kind == "vjp" and isinstance(self.op, CustomOp) else f"no def_{kind}"
        return None if self.outputs else "no result can be differentiated"

    def perturbed(self) -> Iterator[tuple[str, Any, Subject]]:
        """For each number that is an argument, or inside one, the calls with that one changed: name, value, call.

        Of a `Primitive` only floats: its other numbers are tied to the shapes of its arguments.
        """
        changes = {float: CHANGES[float]} if isinstance(self.op, Primitive) else CHANGES
        count = len(self.args)
        for i, leaf in enumerate(self._leaves.values):
            for change in changes.get(type(leaf), ()):
                value = change(leaf)
                trees = self._leaves.filled([i], [value])
                static = dict(zip(self.static, trees[count:], strict=True))
                yield self._leaves.label(i), value, dataclasses.replace(self, args=trees[:count], static=static)


# Tensors up to this size are written out.
MAX_WRITTEN = 8
_PRINT_AS_CODE = (torch.dtype, torch.layout, torch.memory_format, torch.Size)


def program(subject: Subject, property: str, backend: str, options: dict[str, Any]) -> str:
    """The whole program, with the options of `check_rule` that the user has set."""
    writer = _Writer()
    args = [writer.code(subject.args), *([writer.code(subject.static)] if subject.static else [])]
    keywords = [f"{name}={writer.code(value)}" for name, value in options.items()]
    call = f"check_rule({', '.join(['op', repr(property), *args, *keywords])})"
    modules = [f"import {module}" for module in sorted(writer.modules)]
    lines = ["import torch", "", "import primitives as pr", *modules, "from primitives.testing import check_rule"]
    lines += [*_import_of(subject.op), "", "torch.manual_seed(0)"]
    lines += writer.remarks
    lines += [call] if backend == "auto" else [f"with pr.use_backend({backend!r}):", f"    {call}"]
    return "\n".join(lines) + "\n"


def _import_of(op: Any) -> list[str]:
    """Lines that give the operator the name `op`."""
    function = op.rule("reference") if isinstance(op, Primitive) else getattr(op, "__wrapped__", op)
    module, path = function.__module__, getattr(function, "__qualname__", "")
    if isinstance(op, (Primitive, CustomOp)):
        # Defined when its module is imported.
        lines = [] if module == "__main__" or module.startswith("primitives.") else [f"import {module}"]
        if isinstance(op, CustomOp):
            return [*lines, "from primitives.custom import operators", "", f"op = operators[{op.qualified_name!r}]"]
        find = f"op = registered_primitives()[{op.qualified_name!r}]"
        return [*lines, "from primitives._core import registered_primitives", "", find]
    if path and getattr(sys.modules.get(module), path, None) is op and module != "__main__":
        return [f"from {module} import {path}", "", f"op = {path}"]
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)
    return [f"# op is {path} of {place}, which no import reaches."]


class _Writer:
    """Writes trees of tensors as code, and keeps the modules that it needs and a comment for each value without any."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.remarks: list[str] = []

    def code(self, value: Any) -> str:
        """Python code for `value`; `None` stands for what has none."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach())
        kind, text = type(value), repr(value)
        if kind in (list, tuple):
            inside = ", ".join(map(self.code, value))
            return f"[{inside}]" if kind is list else f"({inside}{',' if len(value) == 1 else ''})"
        if kind is dict:
            return "{" + ", ".join(f"{self.code(k)}: {self.code(v)}" for k, v in value.items()) + "}"
        fields = getattr(value, "_fields", None)
        if dataclasses.is_dataclass(value):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
        if fields is not None and not isinstance(value, type):
            self.modules.add(kind.__module__)
            inside = ", ".join(f"{name}={self.code(getattr(value, name))}" for name in fields)
            return f"{kind.__module__}.{kind.__qualname__}({inside})"
        if isinstance(value, _PRINT_AS_CODE):
            return text
        with contextlib.suppress(SyntaxError, ValueError):
            ast.literal_eval(text)
            return text
        try:
            pickled = f"pickle.loads({pickle.dumps(value)!r})"
        except Exception:
            self.remarks.append(f"# None stands for {' '.join(text.split())}, which cannot be written as code.")
            return "None"
        self.modules.add("pickle")
        return pickled

    def _tensor(self, x: Tensor) -> str:
        """Values where there are few, else random ones of the same shape, dtype, device and range."""
        device = "" if x.device.type == "cpu" else f", device={x.device.type!r}"
        if 0 < x.numel() <= MAX_WRITTEN:
            return f"torch.tensor({self.code(x.tolist())}, dtype={x.dtype}{device})"
        shape = f"{tuple(x.shape)}"
        if not has_derivatives(x.dtype):
            low, high = (int(x.min()), int(x.max()) + 1) if x.numel() else (0, 1)
            return f"torch.randint({low}, {high}, {shape}, dtype={x.dtype}{device})"
        if not x.is_complex() and x.numel() and bool((x > 0).all()):
            return f"torch.rand({shape}{device}).to({x.dtype}) + 0.25"
        return f"torch.randn({shape}{device}).to({x.dtype})"
