"""One call of an operator as functions of flat tensors: what every property is stated in."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any, cast

import optree
import torch

from primitives.core.dtypes import has_derivatives
from primitives.core.errors import MissingRuleError
from primitives.core.primitive import Primitive
from primitives.core.trees.overlay import key_path
from primitives.custom import CustomOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

# What a number that is an argument is changed to: the first is used that is accepted and makes a difference.
CHANGES: dict[type, tuple[Callable, ...]] = {
    float: (lambda v: 1.5 * v + 0.25, lambda v: 0.5 * v + 0.125, lambda v: 0.5 * v, lambda v: 2.0 * v),
    int: (lambda v: v + 1, lambda v: v - 1, lambda v: 2 * v),
    bool: (lambda v: not v,),
}


def clone(x: Tensor) -> Tensor:
    """`x` with memory of its own and the same strides, whatever they are; its version is 0."""
    x = x.detach()
    length = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((length,), (1,), 0).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def widened(x: Tensor) -> Tensor:
    """`x` in double precision, if it holds numbers that have one."""
    return x.to(torch.promote_types(x.dtype, torch.float64)) if has_derivatives(x.dtype) else x


@dataclasses.dataclass(frozen=True)
class Subject:
    """One call: the operator, its positional arguments with the tensors in them, and its keyword arguments.

    Attributes:
        op: A `CustomOp`, a `Primitive` or any function of pytrees of tensors.
        args: Positional arguments.
        static: Keyword arguments.
        namespace: optree namespace of the trees.
    """

    op: Any
    args: tuple
    static: dict[str, Any]
    namespace: str = ""

    @classmethod
    def of(cls, op: Any, args: tuple, static: dict[str, Any], namespace: str) -> Subject:
        """The call `op(*args, **static)`, bound as the operator binds it, with tensors of its own.

        Raises:
            TypeError: If `op` is not callable, or no argument holds a tensor.
        """
        if not callable(op):
            raise TypeError(f"check_rules: op must be a custom_op, a Primitive or a function, got {type(op).__name__}.")
        if isinstance(op, Primitive) and static:
            raise TypeError(f"check_rules: the arguments of {op.qualified_name} are positional, got {sorted(static)}.")
        if isinstance(op, CustomOp):
            namespace = namespace or op.tree_namespace
            args, static = op.signature.bind(*args, **static)
        subject = cls(op, args, static, namespace)
        if not subject.tensors:
            raise TypeError(f"check_rules: the arguments of {subject.name} must hold a tensor, got none.")
        return subject.map(clone)

    @property
    def name(self) -> str:
        """Name of the operator, for people."""
        return getattr(self.op, "qualified_name", None) or getattr(self.op, "__name__", None) or repr(self.op)

    @property
    def primitive(self) -> Primitive | None:
        """The primitive under the operator."""
        if isinstance(self.op, CustomOp):
            return self.op.primitive
        return self.op if isinstance(self.op, Primitive) else None

    # Trees.

    @functools.cached_property
    def _flat(self) -> tuple[list[Any], Any]:
        return optree.tree_flatten(cast("Any", self.args), namespace=self.namespace)

    @functools.cached_property
    def places(self) -> list[int]:
        """Positions of the tensors among the leaves of the arguments."""
        return [i for i, leaf in enumerate(self._flat[0]) if isinstance(leaf, torch.Tensor)]

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors of the arguments."""
        return [self._flat[0][i] for i in self.places]

    @functools.cached_property
    def labels(self) -> list[str]:
        """Key path of each tensor, starting with the name of its argument."""
        accessors = self._flat[1].accessors()
        return [self._label(accessors[i]) for i in self.places]

    def _label(self, accessor: Any) -> str:
        names, position = self._argument_names(), accessor[0].entry
        root = names[position] if position < len(names) else f"args[{position}]"
        return key_path(optree.PyTreeAccessor(accessor[1:]), root)

    def _argument_names(self) -> list[str]:
        if isinstance(self.op, CustomOp):
            return self.op.signature.positional
        if isinstance(self.op, Primitive):
            return list(self.op.spec.arguments)
        try:
            parameters = inspect.signature(self.op).parameters.values()
        except (TypeError, ValueError):
            return []
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in parameters if p.kind in kinds]

    def trees(self, tensors: Sequence[Any]) -> tuple:
        """The positional arguments with other values for the tensors."""
        leaves = list(self._flat[0])
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return cast("tuple", optree.tree_unflatten(self._flat[1], leaves))

    def map(self, function: Callable[[Tensor], Tensor]) -> Subject:
        """The same call with every tensor replaced."""
        return dataclasses.replace(self, args=self.trees([function(x) for x in self.tensors]))

    def double(self) -> Subject:
        """The same call in float64 and complex128, contiguous."""
        return self.map(lambda x: widened(x).contiguous())

    # Calls.

    def call(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All tensors that the operator returns."""
        return self._run(self.runner, tensors)

    @property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments that the operator updates in place."""
        return self.op.signature.mutates if isinstance(self.op, CustomOp) else ()

    @property
    def runner(self) -> Callable:
        """What is checked: the operator; of one that updates arguments, its pure form."""
        return self.op.pure if self.mutates else self.op

    @property
    def definition(self) -> Callable | None:
        """The reference over trees; `None` for a plain function."""
        if isinstance(self.op, CustomOp):
            return self.op.__wrapped__
        return self.op.rule("reference") if isinstance(self.op, Primitive) else None

    def reference(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All tensors that the reference returns."""
        if self.definition is None:
            raise ValueError(f"{self.name} has no reference.")
        return self._run(self._pure_definition if self.mutates else self.definition, tensors)

    def _pure_definition(self, *args: Any, **static: Any) -> tuple:
        """The reference of an operator that updates arguments, as a function: it writes into copies."""
        names = self._argument_names()
        args = tuple(
            optree.tree_map(torch.clone, arg, namespace=self.namespace) if name in self.mutates else arg
            for name, arg in zip(names, args, strict=True)
        )
        output = self.op.__wrapped__(*args, **static)
        return output, *[arg for name, arg in zip(names, args, strict=True) if name in self.mutates]

    def _run(self, function: Callable, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        output = function(*self.trees(tensors), **self.static)
        leaves = optree.tree_leaves(output, namespace=self.namespace)
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    @functools.cached_property
    def output_labels(self) -> list[str]:
        """Key path of each tensor that the operator returns."""
        output = self.runner(*self.map(clone).args, **self.static)
        names = getattr(self.op, "output_names", ())
        if isinstance(self.op, Primitive) and isinstance(output, tuple) and len(output) == len(names):
            return list(names)
        accessors, leaves, _ = optree.tree_flatten_with_accessor(cast("Any", output), namespace=self.namespace)
        return [key_path(a, "output") for a, x in zip(accessors, leaves, strict=True) if isinstance(x, torch.Tensor)]

    # Derivatives.

    @functools.cached_property
    def inputs(self) -> list[int]:
        """Which tensors can be differentiated."""
        cached = self.op.spec.cached if isinstance(self.op, Primitive) else ()
        return [i for i, x in enumerate(self.tensors) if has_derivatives(x.dtype) and self.labels[i] not in cached]

    @functools.cached_property
    def outputs(self) -> list[int]:
        """Which results have derivatives."""
        active = [x.requires_grad_() if i in self.inputs else x for i, x in enumerate(map(clone, self.tensors))]
        if isinstance(self.op, (CustomOp, Primitive)):
            results = self.call(*map(clone, self.tensors))
            constants = self._constants()
            return [
                i for i, y in enumerate(results) if has_derivatives(y.dtype) and i not in constants and y.numel() > 0
            ]
        return [i for i, y in enumerate(self.call(*active)) if y.requires_grad]

    def _constants(self) -> set[int]:
        if isinstance(self.op, CustomOp):
            structure = self.op.table.flatten(self.args, self.static)[1]
            # New values of what is updated have no derivative.
            results = structure.settled
            return {*results.constants, *range(results.num_tensors, results.num_tensors + len(structure.mutated))}
        spec = self.op.spec
        return {i for i, name in enumerate(spec.outputs) if name not in spec.differentiable_outputs}

    @property
    def active(self) -> list[Tensor]:
        """The tensors that can be differentiated."""
        return [self.tensors[i] for i in self.inputs]

    @property
    def active_labels(self) -> list[str]:
        """Their key paths."""
        return [self.labels[i] for i in self.inputs]

    @property
    def result_labels(self) -> list[str]:
        """Key paths of the results that have derivatives."""
        return [self.output_labels[i] for i in self.outputs]

    def function(self, *, reference: bool = False) -> Callable[..., tuple[Tensor, ...]]:
        """The differentiable results as a function of the differentiable tensors; the others stay."""
        run = self.reference if reference else self.call

        def function(*active: Tensor) -> tuple[Tensor, ...]:
            values = list(self.tensors)
            for i, x in zip(self.inputs, active, strict=True):
                values[i] = x
            results = run(*values)
            return tuple(results[i] for i in self.outputs)

        return function

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

    def from_reference(self, kind: str) -> bool:
        """Whether the mode of the rule `kind` is that of the reference itself."""
        op = self.primitive
        return op is not None and not (op.has_rule(kind) or op.has_rule("autograd"))

    # Static arguments.

    def perturbed(self) -> Iterator[tuple[str, Any, Subject]]:
        """For each number that is an argument, or inside one, the calls with that one changed: name, value, call.

        Of a `Primitive` only floats: its other numbers are tied to the shapes of its arguments.
        """
        changes = {float: CHANGES[float]} if isinstance(self.op, Primitive) else CHANGES
        leaves, treespec = self._flat
        for value, i, accessor in _numbers(leaves, treespec, changes):
            args = cast("tuple", optree.tree_unflatten(treespec, [*leaves[:i], value, *leaves[i + 1 :]]))
            yield self._label(accessor), value, dataclasses.replace(self, args=args)
        for root, argument in self.static.items():
            # Only the containers of Python are opened, which are hashable if what is in them is.
            leaves, treespec = optree.tree_flatten(argument)
            for value, i, accessor in _numbers(leaves, treespec, changes):
                other = optree.tree_unflatten(treespec, [*leaves[:i], value, *leaves[i + 1 :]])
                yield key_path(accessor, root), value, dataclasses.replace(self, static={**self.static, root: other})


def _numbers(leaves: list[Any], treespec: Any, changes: dict[type, tuple]) -> Iterator[tuple[Any, int, Any]]:
    """For each leaf of a type in `changes` and each change: the new value, the position of the leaf, its accessor."""
    accessors = treespec.accessors()
    for i, leaf in enumerate(leaves):
        for change in changes.get(type(leaf), ()):
            yield change(leaf), i, accessors[i]
