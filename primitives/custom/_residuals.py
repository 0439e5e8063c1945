"""What custom operators keep for their derivative rules: the layouts that core asks for, over trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import optree
import torch

from primitives.core.autograd import below_this_level, is_transforming, tangents_possible
from primitives.core.dtypes import has_derivatives
from primitives.custom._mutation import without_written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from primitives.core.trees.calls import Structure
    from primitives.custom._rules import Rules


class SavedTree:
    """What def_save_for_backward returns: its tensors in autograd's care, the rest beside them."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def pack(self, args: Sequence[Any], outputs: Sequence[Any]) -> tuple[list, tuple]:
        """The tensors to save, and how to make the tree again."""
        rules = self._rules
        if not rules.complete:
            rules.require_both()
        (leaves, number), (flat_outputs,) = args, outputs
        structure = rules.structures[number]
        if is_transforming():
            with below_this_level():
                tree = self._save(structure, leaves, flat_outputs)
        else:
            tree = self._save(structure, leaves, flat_outputs)
        tensors, rest = _taken_apart(tree, rules.namespace)
        num_saved = len(tensors)
        # What the rule computed is a function of the inputs that autograd has not seen: a derivative of higher order
        # computes it again, from inputs that it has seen.
        if _computed_any(tensors, leaves, flat_outputs):
            tensors += leaves
        if structure.mutated:
            tensors = without_written(structure, leaves, tensors)
        input_metas = [(x.shape, x.dtype, x.device) for x in leaves]
        # Where one output alone has a derivative, its cotangent is never absent.
        is_single = len(flat_outputs) - len(structure.constants) == 1
        output_metas = None if is_single else [(x.shape, x.dtype, x.device) for x in flat_outputs]
        return tensors, (structure, rest, num_saved, input_metas, output_metas)

    def unpack(self, tensors: Sequence[Any], static: tuple) -> tuple:
        """The structure, the tree, and what cotangents must be like."""
        structure, rest, num_saved, input_metas, output_metas = static
        if len(tensors) > num_saved and (torch.is_grad_enabled() or tangents_possible()):
            leaves = list(tensors[num_saved:])
            tree = self._save(structure, leaves, self._rules.overload(leaves, structure.number))
        elif rest is None:
            tree = tuple(tensors) if len(tensors) == num_saved else tuple(tensors[:num_saved])
        else:
            treespec, template, places = rest
            values = list(template)
            for place, x in zip(places, tensors, strict=False):
                values[place] = x
            tree = treespec.unflatten(values)
        return structure, tree, input_metas, output_metas

    def _save(self, structure: Structure, leaves: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        return self._rules.given["def_save_for_backward"](structure.inputs(leaves), structure.output_tree(outputs))


def _taken_apart(tree: Any, namespace: str) -> tuple[list[Tensor], tuple | None]:
    """The tensors of a tree, and what makes it of them again: nothing for a tuple of tensors."""
    if type(tree) is tuple:
        for x in tree:
            if not isinstance(x, torch.Tensor):
                break
        else:
            return list(tree), None
    template, treespec = optree.tree_flatten(cast("Any", tree), namespace=namespace)
    places = [i for i, leaf in enumerate(template) if isinstance(leaf, torch.Tensor)]
    tensors = [cast("Tensor", template[i]) for i in places]
    for i in places:
        template[i] = None
    return tensors, (treespec, template, places)


def _computed_any(tensors: Sequence[Tensor], leaves: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether one of `tensors`, of a dtype that has derivatives, is neither an input nor an output."""
    given = (*leaves, *outputs)
    for x in tensors:
        for y in given:
            if x is y:
                break
        else:
            if has_derivatives(x.dtype):
                return True
    return False


class FlatInputs(NamedTuple):
    """The arguments of the operator under a custom operator."""

    leaves: list[Tensor]
    structure: int


class Inputs:
    """What the reference takes that is differentiated in the place of a missing vjp rule."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def pack(self, args: Sequence[Any], outputs: Sequence[Any]) -> tuple[list, tuple]:
        """The tensors to save, and the number of the structure."""
        leaves, number = args
        return without_written(self._rules.structures[number], leaves, leaves), (number,)

    def unpack(self, tensors: Sequence[Any], static: tuple) -> FlatInputs:
        """The arguments."""
        return FlatInputs(list(tensors), *static)


class InputsAndOutputs:
    """What a jvp rule takes: everything."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def pack(self, args: Sequence[Any], outputs: Sequence[Any]) -> tuple[list, tuple]:
        """The tensors to save, and the structure."""
        (leaves, number), (flat_outputs,) = args, outputs
        return [*leaves, *flat_outputs], (self._rules.structures[number],)

    def unpack(self, tensors: Sequence[Any], static: tuple) -> tuple:
        """The structure, the tensors of the inputs, and those of the outputs."""
        (structure,) = static
        count = structure.num_tensors
        return structure, list(tensors[:count]), list(tensors[count:])
