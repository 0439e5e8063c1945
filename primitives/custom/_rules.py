"""Users' rules over trees, as the rule table of the operator over lists of tensors that torch sees."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core.autograd import below_this_level, is_transforming, tangents_possible
from primitives._core.batching import BatchInfo
from primitives._core.dtypes import has_derivatives
from primitives._core.errors import MissingRuleError, ShapeError, TreeError
from primitives._core.rules import RuleTable
from primitives._core.spec import ResidualLayout, Spec
from primitives._core.statistics import refuse_cotangent, refused_tangent
from primitives._core.trees.leaves import Partition
from primitives._core.trees.overlay import spread
from primitives._core.write_back import shares_memory
from primitives.custom._user_rule import BackwardContext, UserRule, VmapInfo
from primitives.custom.trees.calls import Results, Structure
from primitives.custom.trees.table import StructureTable

SCHEMA = "(Tensor[] leaves, int structure) -> Tensor[] outputs"

operators: dict[str, Any] = {}
"""Every `CustomOp` of this process by qualified name."""


def _meta(x: Tensor) -> tuple:
    return x.shape, x.dtype, x.device


def _is_tuple_of_tensors(value: Any, length: int) -> bool:
    if type(value) is not tuple or len(value) != length:
        return False
    for x in value:  # noqa: SIM110 - this is every call, and a generator costs as much as the rest
        if not isinstance(x, torch.Tensor):
            return False
    return True


def _zeros(meta: tuple) -> Tensor | None:
    """A derivative that is zero; `None` for dtypes that have none."""
    shape, dtype, device = meta
    return torch.zeros(shape, dtype=dtype, device=device) if has_derivatives(dtype) else None


class SavedTree:
    """The result of def_save_for_backward: its tensors in autograd's care, the rest beside them."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def pack(self, args: Sequence[Any], outputs: Sequence[Any]) -> tuple[list, tuple]:
        """The tensors to save, and how to make the tree again."""
        if not self._rules.complete:
            self._rules.require_both()
        (leaves, number), (flat_outputs,) = args, outputs
        structure = self._rules.structures[number]
        if is_transforming():
            with below_this_level():
                tree = self._save(structure, leaves, flat_outputs)
        else:
            tree = self._save(structure, leaves, flat_outputs)
        partition = None
        if type(tree) is tuple and _is_tuple_of_tensors(tree, len(tree)):
            tensors = list(tree)
        else:
            partition = Partition(self._rules.table.namespace)
            tensors = partition.split(tree)
        num_saved, given = len(tensors), {*map(id, leaves), *map(id, flat_outputs)}
        # The rule's results are a function of the inputs that autograd has not seen: a derivative of higher order
        # computes it again, from inputs that it has seen.
        computed = [x for x in tensors if id(x) not in given]
        if computed and any(has_derivatives(x.dtype) for x in computed):
            tensors += leaves
        if structure.mutated:
            tensors = structure.without_written(leaves, tensors)
        # Where one output alone has a derivative, its cotangent is never absent.
        is_single = len(flat_outputs) - len(structure.results.constants) == 1
        output_metas = None if is_single else [(x.shape, x.dtype, x.device) for x in flat_outputs]
        input_metas = [(x.shape, x.dtype, x.device) for x in leaves]
        return tensors, (structure, partition, num_saved, input_metas, output_metas)

    def unpack(self, tensors: Sequence[Any], static: tuple) -> tuple:
        """The structure, the tree, and what cotangents must be like."""
        structure, partition, num_saved, input_metas, output_metas = static
        if len(tensors) > num_saved and (torch.is_grad_enabled() or tangents_possible()):
            leaves = list(tensors[num_saved:])
            tree = self._save(structure, leaves, self._rules.spec.overload(leaves, structure.number))
        else:
            tree = tuple(tensors[:num_saved]) if partition is None else partition.join(tensors[:num_saved])
        return structure, tree, input_metas, output_metas

    def _save(self, structure: Structure, leaves: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        rule = self._rules.users["def_save_for_backward"]
        return rule.function(structure.inputs(leaves), structure.results.tree(outputs))


class Inputs(ResidualLayout):
    """The arguments of the reference that is differentiated in the place of a missing vjp rule."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules.spec, ("leaves",))
        self._rules = rules

    def pack(self, args: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence, tuple]:
        """The arguments, with copies of what the call will write."""
        leaves, number = args
        return super().pack((self._rules.structures[number].without_written(leaves, leaves), number), outputs)


class Rules(RuleTable):
    """The rules that users gave to one operator over trees, where core asks for rules over lists of tensors."""

    # A user's kernel may do anything: only torch's own `triton_op` could trace it.
    kernels_are_traceable = False

    def __init__(self, namespace: str, name: str) -> None:
        super().__init__(Spec.parse(name, namespace, SCHEMA), ("leaves", "outputs"))
        self.layouts = (SavedTree(self), self.layouts[0], Inputs(self))
        self._name = self.spec.qualified_name

    def begin(
        self, table: StructureTable, *, materialize: bool, output_differentiability: Sequence[bool] | None,
        decomposable: bool,
    ) -> None:  # fmt: skip
        """Begin without rules, also where the operator is defined again: torch keeps what refers to this object."""
        self.forget(decomposable=decomposable)
        self.table, self.structures = table, table.by_number
        # By decorator.
        self.users: dict[str, UserRule] = {}
        # Whether reverse mode has both rules that it takes.
        self.complete = False
        self._materialize, self._output_differentiability = materialize, output_differentiability
        self._warned = False

    def add(self, kind: str, rule: Callable) -> None:
        """Take the rule that was given to the decorator `kind`."""
        self.users[kind] = UserRule(self._name, kind, rule, self.table.namespace)
        self.complete = self.users.keys() >= {"def_save_for_backward", "def_backward"}
        if kind in ("reference", "def_fake"):
            self.define(kind.removeprefix("def_"), self.implementation(kind))
        elif kind == "def_autograd":
            self.define("autograd", self.differentiable(kind))
        elif kind in ("def_save_for_backward", "def_backward"):
            self.define("vjp", self.flat_vjp)
        elif kind in ("def_jvp", "def_vmap"):
            self.define(kind.removeprefix("def_"), getattr(self, kind.removeprefix("def_")))

    # Implementations: `(leaves, number) -> outputs`.

    def implementation(self, kind: str) -> Callable[[list[Tensor], int], list[Tensor]]:
        """The function given as `kind`, a whole implementation of the operator, over lists."""
        rule, is_alias_of = self.users[kind], torch._C._is_alias_of  # type: ignore[attr-defined] - no stub
        function = rule.function

        def run(leaves: list[Tensor], number: int) -> list[Tensor]:
            structure = self.structures[number]
            updated: list[Tensor] = []
            if structure.mutated:
                leaves, updated = structure.with_copies(leaves)
            output = function(*(leaves if structure.is_flat else structure.trees(leaves)), **structure.static)
            results = structure.results
            if results is not None and results.is_single and isinstance(output, torch.Tensor):
                outputs = [output]
            elif results is not None and results.is_flat and _is_tuple_of_tensors(output, results.num_tensors):
                outputs = list(output)
            else:
                outputs = self._settle(rule, structure, output)
            known = list(leaves)
            for i, x in enumerate(outputs):
                for y in known:
                    if is_alias_of(x, y):
                        rule.refuse_alias(structure, leaves, outputs, i)
                known.append(x)
            return outputs + updated if updated else outputs

        return run

    def differentiable(self, kind: str) -> Callable[[list[Tensor], int], list[Tensor]]:
        """`implementation` for a function that torch differentiates: what it returns may share memory with inputs."""
        rule = self.users[kind]

        def run(leaves: list[Tensor], number: int) -> list[Tensor]:
            structure = self.structures[number]
            leaves, updated = structure.with_copies(leaves)
            outputs = self._settle(rule, structure, rule.function(*structure.trees(leaves), **structure.static))
            constants = structure.results.constants
            return [x.detach() if i in constants else x for i, x in enumerate(outputs)] + updated

        return run

    def _settle(self, rule: UserRule, structure: Structure, output: Any) -> list[Tensor]:
        """The tensors of a result, whose tree is noted where it is new, and held to what was noted."""
        outputs, treespec = rule.flat_outputs(output)
        if output is None and not structure.mutated:
            raise TreeError(
                f"{rule.where} must return a tree of tensors, got None. Add the `return` that it lacks, or name "
                "the argument that it updates in mutates."
            )
        if structure.results is None:
            structure.results = Results.of(self._name, output, treespec, self._output_differentiability)
        elif treespec != structure.results.treespec:
            raise TreeError(
                f"{rule.where} must return a result with the tree that it had before, {structure.results.treespec}, "
                f"got {treespec}."
            )
        return outputs

    def constant_outputs(self, args: Sequence[Any]) -> Collection[int]:
        """Those that output_differentiability marks."""
        return self.structures[args[1]].results.constants

    def is_decomposed_at_once(self, args: Sequence[Any]) -> bool:
        """Where no kernel gives the value: a reference that draws random numbers must not be run again for them."""
        return not self.has_kernel_for(args[0][0].device.type)

    def require_both(self) -> None:
        """Raise `MissingRuleError` if one of def_backward and def_save_for_backward is given without the other."""
        for kind, missing in (("def_save_for_backward", "def_backward"), ("def_backward", "def_save_for_backward")):
            if kind in self.users and missing not in self.users:
                raise MissingRuleError(
                    f"{self._name}: reverse mode takes both def_save_for_backward and def_backward, but there is only "
                    f"{kind} ({self.users[kind].place}); add {missing}."
                )

    def require_decomposition(self, kind: str) -> Callable:
        """The reference, if it may be differentiated."""
        if self.decomposable:
            return super().require_decomposition(kind)
        self.require_both()
        mode, rules = ("reverse", "def_save_for_backward and def_backward") if kind == "vjp" else ("forward", "def_jvp")
        raise MissingRuleError(
            f"{self._name}: {mode}-mode differentiation was asked for, but it has no rule. "
            f'Register {rules}, or create the operator with differentiate="reference" to differentiate its reference.'
        )

    def flat_vjp(self, residuals: Any, cotangents: Sequence[Any], lengths: Any, output_mask: Any) -> list[Any]:
        """The cotangents of the tensors of a call, from those of the results, by def_backward."""
        structure, saved, input_metas, output_metas = residuals
        results = structure.results
        if structure.mutated:
            for i, cotangent in zip(structure.mutated, cotangents[results.num_tensors :], strict=True):
                if cotangent is not None:
                    refuse_cotangent(self._name, f"new {structure.label(i)}")
        if self._materialize and output_metas is not None:
            cotangents = [
                _zeros(meta) if cotangent is None and i not in results.constants else cotangent
                for i, (cotangent, meta) in enumerate(zip(cotangents, output_metas, strict=False))
            ]
        rule = self.users["def_backward"]
        found = rule.function(BackwardContext(structure, output_mask), saved, *results.entries(cotangents))
        return self._flat_cotangents(rule, structure, found, input_metas)

    def _flat_cotangents(self, rule: UserRule, structure: Structure, result: Any, metas: Sequence[tuple]) -> list:
        if structure.is_flat and type(result) is dict and len(result) == len(metas):
            flat = list(map(result.get, structure.spans))
            for value, meta in zip(flat, metas, strict=True):
                # The checks of `flat_like`, without a call for each.
                if (
                    type(value) is not torch.Tensor
                    or (value.shape, value.dtype, value.device) != meta
                    or not meta[1].is_floating_point
                ):
                    break
            else:
                return flat
        spans = structure.spans
        if not isinstance(result, dict) or result.keys() != spans.keys():
            found = f"keys {sorted(map(str, result))}" if isinstance(result, dict) else type(result).__name__
            raise TreeError(
                f"{rule.where} must return a dict from argument name to cotangent, with the keys {list(spans)}, got "
                f"{found}; None stands for a cotangent of zeros."
            )
        flat = []
        for name, span in spans.items():
            like = metas[span.tensors]
            flat += rule.flat_like("the cotangent of", result[name], span.treespec, name, like, span.is_tensor)
        return flat

    def jvp(self, residuals: Any, tangents: Any) -> tuple[list]:
        """The jvp rule over lists, from def_jvp."""
        leaves, outputs, number = residuals
        structure, rule, dots = self.structures[number], self.users["def_jvp"], tangents.leaves
        results = structure.results
        if self._materialize:
            dots = [_zeros(_meta(x)) if dot is None else dot for x, dot in zip(leaves, dots, strict=True)]
        result = rule.function(structure.inputs(leaves), results.tree(outputs), structure.masks(dots))
        if result is None and results.num_tensors > 1:
            # A rule that forgets its return would make zeros of all of them.
            raise TreeError(
                f"{rule.where} must return a tree like the output, with None for each tangent of zeros, got None alone "
                f"for {results.num_tensors} tensors."
            )
        metas = list(map(_meta, outputs[: results.num_tensors]))
        dots = rule.flat_like("the tangent of", result, results.treespec, "output", metas)
        for i, value in zip(structure.mutated, outputs[results.num_tensors :], strict=True):
            dots.append(refused_tangent(self._name, f"new {structure.label(i)}", value))
        return (dots,)

    def before_loop(self) -> None:
        """Say once that vmap is slow."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._name}: vmap runs a loop over the batch, because the batching rule is missing; "
                "register one with def_vmap.",
                stacklevel=3,
            )

    def vmap(self, batch: BatchInfo, primals: Any) -> tuple[list, list]:
        """The vmap rule over lists, from def_vmap."""
        structure, rule = self.structures[primals.structure], self.users["def_vmap"]
        info = VmapInfo(batch.size, batch.randomness)
        result = rule.function(info, structure.masks(batch.axes[0]), structure.inputs(primals.leaves))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TreeError(f"{rule.where} must return (output, out_dims), got {type(result).__name__}.")
        output, out_dims = result
        is_first = structure.results is None
        if is_first:
            # The reference says what tree a result has, also where this call is the first.
            pairs = zip(primals.leaves, batch.axes[0], strict=True)
            samples = [x if axis is None else x.new_zeros(x.movedim(axis, 0).shape[1:]) for x, axis in pairs]
            self.differentiable("reference")(samples, primals.structure)
        outputs = self._settle(rule, structure, output)
        axes = spread(rule.where, "out_dims", out_dims, "output", output, {"namespace": self.table.namespace})
        for i, (x, axis) in enumerate(zip(outputs, axes, strict=True)):
            if axis is not None and (type(axis) is not int or not -x.dim() <= axis < x.dim()):
                raise TreeError(f"{rule.where}: out_dims must be axes of the output or None, got {axis!r}.")
            if axis is not None and x.shape[axis] != batch.size:
                raise ShapeError(
                    f"{rule.where}: {structure.results.label(i)} must have {batch.size} samples along axis {axis}, got "
                    f"shape {list(x.shape)}."
                )
        # Whoever writes to a result that shares memory with an input would write to the input.
        return [x.clone() if any(shares_memory(x, leaf) for leaf in primals.leaves) else x for x in outputs], axes

    def autocast(self, kind: str) -> Callable[[Any], tuple]:
        """The autocast rule over lists, from def_autocast."""
        rule = self.users[kind]

        def cast_inputs(primals: Any) -> tuple:
            structure = self.structures[primals.structure]
            inputs, signature = structure.inputs(primals.leaves), structure.signature
            result = rule.function(inputs)
            if not isinstance(result, type(inputs)):
                raise TreeError(
                    f"{rule.where} must return its inputs, a namedtuple, with other values; got "
                    f"{type(result).__name__}."
                )
            count = len(signature.positional)
            static = dict(zip(signature.static, result[count:], strict=True))
            leaves, structure.cast = self.table.flatten(tuple(result[:count]), static)
            return leaves, structure.cast.number

        return cast_inputs
