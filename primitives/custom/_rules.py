"""Users' rules over trees, as the rules over lists of tensors that a `Primitive` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch

from primitives.core.dtypes import has_derivatives
from primitives.core.errors import MissingRuleError, TreeError
from primitives.custom._mistakes import Meta, RuleErrors, place_of
from primitives.custom._mutation import refuse_cotangents, refused_tangents, shares_memory, with_copies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from primitives.core.batching import BatchInfo
    from primitives.core.trees.calls import Structure
    from primitives.core.trees.table import StructureTable


def _meta(x: Tensor) -> Meta:
    return x.shape, x.dtype, x.device


def _is_tuple_of_tensors(value: Any, length: int) -> bool:
    if type(value) is not tuple or len(value) != length:
        return False
    for x in value:  # noqa: SIM110 - this is every call, and a generator costs as much as the rest
        if not isinstance(x, torch.Tensor):
            return False
    return True


def _zeros(meta: Meta) -> Tensor | None:
    """A derivative that is zero; `None` for dtypes that have none."""
    shape, dtype, device = meta
    return torch.zeros(shape, dtype=dtype, device=device) if has_derivatives(dtype) else None


class BackwardContext:
    """What a backward rule is told beside what was saved."""

    __slots__ = ("_structure", "_wanted")

    def __init__(self, structure: Structure, wanted: Sequence[bool]) -> None:
        self._structure = structure
        self._wanted = wanted

    @property
    def needs_input_grad(self) -> Any:
        """By argument name, a tree like the argument with a bool in the place of every tensor.

        What is not needed may be `None`.
        """
        return self._structure.masks(self._wanted)

    @property
    def static(self) -> Any:
        """The keyword-only arguments by name."""
        return self._structure.static_values


class VmapInfo(NamedTuple):
    """What a vmap rule is told beside its arguments.

    Attributes:
        batch_size: Length of the batch axis.
        randomness: `"error"`, `"same"` or `"different"`.
    """

    batch_size: int
    randomness: str


class Rules:
    """The rules that users gave to one operator, and their translation.

    Args:
        op_name: Qualified name of the operator.
        table: Its structures.
        namespace: optree namespace of custom nodes.
        materialize: Whether rules get zeros for absent cotangents and tangents.
        output_differentiability: For each output whether it has derivatives; `None` for all that can.
    """

    def __init__(
        self,
        op_name: str,
        table: StructureTable,
        namespace: str,
        materialize: bool,
        output_differentiability: Sequence[bool] | None,
    ) -> None:
        self.op_name = op_name
        self.table = table
        self.structures = table.by_number
        self.materialize = materialize
        self.given: dict[str, Callable] = {}
        # The operator itself, over lists; set when it is registered.
        self.overload: Callable[..., Any] = self._unregistered
        self.complete = False
        self._errors: dict[str, RuleErrors] = {}
        self.namespace = namespace
        self._output_differentiability = output_differentiability

    def replace(self, other: Rules) -> None:
        """Become `other`, for an operator that is defined again: torch keeps what refers to these rules."""
        vars(self).update(vars(other))

    def _unregistered(self, *args: Any) -> Any:
        raise MissingRuleError(f"{self.op_name}: the operator is not registered yet.")

    def add(self, kind: str, rule: Callable) -> None:
        """Take the rule that was given to the decorator `kind`."""
        if not callable(rule):
            raise TypeError(f"{self.op_name}: {kind} takes a function, got {type(rule).__name__}.")
        self.given[kind] = rule
        self.complete = "def_backward" in self.given and "def_save_for_backward" in self.given
        self._errors[kind] = RuleErrors(self.op_name, kind, rule, self.namespace)

    def errors(self, kind: str) -> RuleErrors:
        """Checks of what the rule `kind` returned."""
        return self._errors[kind]

    # Implementations: `(leaves, number) -> outputs`.

    def implementation(self, kind: str) -> Callable[[list[Tensor], int], list[Tensor]]:
        """The function given as `kind`, a whole implementation of the operator, over lists."""
        function, errors, is_alias_of = self.given[kind], self._errors[kind], torch._C._is_alias_of  # type: ignore[attr-defined] - no stub

        def run(leaves: list[Tensor], number: int) -> list[Tensor]:
            structure = self.structures[number]
            updated: list[Tensor] = []
            if structure.mutated:
                leaves, updated = with_copies(structure, leaves)
            trees = leaves if structure.is_flat else structure.trees(leaves)
            output = function(*trees, **structure.static)
            if structure.single_output and isinstance(output, torch.Tensor):
                outputs = [output]
            elif structure.tuple_output and _is_tuple_of_tensors(output, structure.num_outputs):
                outputs = list(output)
            else:
                outputs, treespec = errors.flat_outputs(output)
                self._hold_to_reference(kind, structure, output, treespec, leaves)
            known = list(leaves)
            for x in outputs:
                for y in known:
                    if is_alias_of(x, y):
                        errors.refuse_alias(outputs, x, leaves, structure)
                known.append(x)
            return outputs + updated if updated else outputs

        return run

    def differentiable(self, kind: str) -> Callable[[list[Tensor], int], list[Tensor]]:
        """`implementation` for a function that torch differentiates: what it returns may share memory with inputs."""
        function, errors = self.given[kind], self._errors[kind]

        def run(leaves: list[Tensor], number: int) -> list[Tensor]:
            structure = self.structures[number]
            leaves, updated = with_copies(structure, leaves)
            output = function(*structure.trees(leaves), **structure.static)
            outputs, treespec = errors.flat_outputs(output)
            self._hold_to_reference(kind, structure, output, treespec, leaves)
            return [x.detach() if i in structure.constants else x for i, x in enumerate(outputs)] + updated

        return run

    def _hold_to_reference(
        self, kind: str, structure: Structure, output: Any, treespec: Any, leaves: Sequence[Tensor]
    ) -> None:
        """Note the tree of the results where it is new, and hold it to the reference's."""
        if structure.output is None and kind not in ("reference", "def_fake"):
            self._learn_from_reference(structure, leaves)
        if structure.output is None:
            structure.settle(output, treespec, self._output_differentiability)
        elif treespec != structure.settled.treespec:
            self._errors[kind].same_tree("a result", treespec, structure.settled.treespec, "the reference's")

    def _learn_from_reference(self, structure: Structure, leaves: Sequence[Tensor]) -> None:
        """Run the reference on tensors without data, to know the tree that a kernel has to return."""
        from torch._subclasses import FakeTensorMode

        kind = "def_fake" if "def_fake" in self.given else "reference"
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fakes = [mode.from_tensor(leaf.detach()) for leaf in leaves]
                output = self.given[kind](*structure.trees(fakes), **structure.static)
        except Exception:
            # What needs data fails without them, in many ways.
            kind = "reference"
            output = self.given[kind](*structure.trees([leaf.detach().clone() for leaf in leaves]), **structure.static)
        _, treespec = self._errors[kind].flat_outputs(output)
        structure.settle(output, treespec, self._output_differentiability)

    # Derivatives.

    def require_both(self) -> None:
        """Raise `MissingRuleError` if one of def_backward and def_save_for_backward is given without the other."""
        pair = ("def_save_for_backward", "def_backward")
        found = [kind for kind in pair if kind in self.given]
        if len(found) == 1:
            (missing,) = set(pair) - set(found)
            raise MissingRuleError(
                f"{self.op_name}: reverse mode takes both def_save_for_backward and def_backward, but there is only "
                f"{found[0]} ({place_of(self.given[found[0]])}); add {missing}."
            )

    def flat_vjp(self, residuals: Any, cotangents: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        """The cotangents of the tensors of a call, from those of the results, by def_backward."""
        structure, saved, input_metas, output_metas = residuals
        errors = self._errors["def_backward"]
        if structure.mutated:
            refuse_cotangents(self.op_name, structure, cotangents[structure.num_outputs :])
            cotangents = cotangents[: structure.num_outputs]
        if self.materialize and output_metas is not None:
            cotangents = [
                _zeros(meta) if cotangent is None and i not in structure.constants else cotangent
                for i, (cotangent, meta) in enumerate(zip(cotangents, output_metas, strict=False))
            ]
        ctx = BackwardContext(structure, wanted)
        result = self.given["def_backward"](ctx, saved, *structure.output_entries(cotangents))
        return self._flat_cotangents(errors, structure, result, input_metas)

    def _flat_cotangents(self, errors: RuleErrors, structure: Structure, result: Any, metas: Sequence[Meta]) -> list:
        if structure.is_flat and type(result) is dict and len(result) == len(metas):
            flat = list(map(result.get, structure.spans))
            for value, meta in zip(flat, metas, strict=True):
                # What `flat_like` asks, without a call for each.
                if (
                    type(value) is not torch.Tensor
                    or (value.shape, value.dtype, value.device) != meta
                    or not meta[1].is_floating_point
                ):
                    break
            else:
                return flat
        if not isinstance(result, dict):
            raise TreeError(
                f"{errors.where} must return a dict from argument name to cotangent, got {type(result).__name__}."
            )
        spans = structure.spans
        if result.keys() != spans.keys():
            missing, extra = sorted(spans.keys() - result.keys()), sorted(map(str, result.keys() - spans.keys()))
            found = [f"lacks {missing}"] * bool(missing) + [f"has {extra}"] * bool(extra)
            raise TreeError(
                f"{errors.where} must return a dict with the keys {list(spans)}, but what it returned "
                f"{' and '.join(found)}; None stands for a cotangent of zeros."
            )
        flat = []
        for name, span in spans.items():
            value = result[name]
            if value is None:
                flat += [None] * (span.stop - span.start)
            else:
                like = metas[span.start : span.stop]
                flat += errors.flat_like("the cotangent of", value, span.treespec, name, like, span.is_tensor)
        return flat

    def jvp(self, residuals: Any, tangents: Any) -> tuple[list]:
        """The jvp rule over lists, from def_jvp."""
        structure, leaves, outputs = residuals
        errors = self._errors["def_jvp"]
        dots = tangents.leaves
        if self.materialize:
            dots = [_zeros(_meta(x)) if dot is None else dot for x, dot in zip(leaves, dots, strict=True)]
        output = structure.output_tree(outputs)
        result = self.given["def_jvp"](structure.inputs(leaves), output, structure.masks(dots))
        count = structure.num_outputs
        metas = list(map(_meta, outputs[:count]))
        flat = errors.flat_like("the tangent of", result, structure.settled.treespec, "output", metas)
        # Torch takes no absent tangent of an output that has one.
        dots = [_zeros(meta) if dot is None else dot for dot, meta in zip(flat, metas, strict=True)]
        return (dots + refused_tangents(self.op_name, structure, outputs[count:]),)

    # Batching and casting.

    def vmap(self, batch: BatchInfo, primals: Any) -> tuple[list, list]:
        """The vmap rule over lists, from def_vmap."""
        structure = self.structures[primals.structure]
        errors = self._errors["def_vmap"]
        in_dims = structure.masks(batch.axes[0])
        info = VmapInfo(batch.size, batch.randomness)
        result = self.given["def_vmap"](info, in_dims, structure.inputs(primals.leaves))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TreeError(f"{errors.where} must return (output, out_dims), got {type(result).__name__}.")
        output, out_dims = result
        outputs, treespec = errors.flat_outputs(output)
        samples = [
            x if axis is None else x.movedim(axis, 0).new_zeros(x.movedim(axis, 0).shape[1:])
            for x, axis in zip(primals.leaves, batch.axes[0], strict=True)
        ]
        self._hold_to_reference("def_vmap", structure, output, treespec, samples)
        axes = self._flat_axes(errors, out_dims, output, outputs)
        for i, (x, axis) in enumerate(zip(outputs, axes, strict=True)):
            if axis is not None and x.shape[axis] != batch.size:
                errors.refuse_batch(structure, i, axis, batch.size, x.shape)
        # What shares memory with an input would be written by whoever writes to the result.
        return [x.clone() if any(shares_memory(x, leaf) for leaf in primals.leaves) else x for x in outputs], axes

    def _flat_axes(self, errors: RuleErrors, out_dims: Any, output: Any, outputs: Sequence[Tensor]) -> list:
        options: dict[str, Any] = {"none_is_leaf": True, "namespace": self.namespace}
        try:
            axes = optree.broadcast_prefix(out_dims, output, **options)
        except ValueError:
            raise TreeError(
                f"{errors.where}: out_dims must be an int, None or a tree prefix of the output, "
                f"{optree.tree_structure(output, **options)}, got {out_dims!r}."
            ) from None
        leaves = optree.tree_leaves(output, **options)
        flat = [axis for axis, leaf in zip(axes, leaves, strict=True) if leaf is not None]
        for axis, x in zip(flat, outputs, strict=True):
            if axis is not None and (type(axis) is not int or not -x.dim() <= axis < x.dim()):
                raise TreeError(f"{errors.where}: out_dims must be axes of the output or None, got {axis!r}.")
        return flat

    def autocast(self, kind: str) -> Callable[[Any], tuple]:
        """The autocast rule over lists, from def_autocast."""
        rule, errors = self.given[kind], self._errors[kind]

        def cast_inputs(primals: Any) -> tuple:
            structure = self.structures[primals.structure]
            inputs = structure.inputs(primals.leaves)
            result = rule(inputs)
            if not isinstance(result, type(inputs)):
                raise TreeError(
                    f"{errors.where} must return its inputs, a namedtuple, with other values; got "
                    f"{type(result).__name__}."
                )
            count = structure.signature.num_positional
            static = dict(zip(structure.signature.static, result[count:], strict=True))
            leaves, structure.cast = self.table.flatten(tuple(result[:count]), static)
            return leaves, structure.cast.number

        return cast_inputs
