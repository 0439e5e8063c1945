"""The rule table of the operator under a custom operator: its rules are over lists of tensors, its errors of trees."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from primitives.core.errors import MissingRuleError
from primitives.core.rules import RuleTable
from primitives.core.spec import Spec
from primitives.custom._residuals import Inputs, InputsAndOutputs, SavedTree

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from primitives.custom._rules import Rules

SCHEMA = "(Tensor[] leaves, int structure) -> Tensor[] outputs"


class TreeRuleTable(RuleTable):
    """The rules that users gave over trees, where core asks for rules over lists.

    Args:
        namespace: Namespace of the operator.
        name: Its name.
        trees: The users' rules.
        decomposable: Whether the reference is differentiated where a rule is missing.
    """

    # A user's kernel may do anything: nobody but torch's own `triton_op` could trace it.
    kernels_are_traceable = False

    def __init__(self, namespace: str, name: str, trees: Rules, *, decomposable: bool) -> None:
        super().__init__(Spec.parse(name, namespace, SCHEMA), decomposable=decomposable)
        self._trees = trees
        self._warned = False
        self.layouts = (SavedTree(trees), InputsAndOutputs(trees), Inputs(trees))

    def flat_vjp(self, residuals: Any, cotangents: Sequence[Any], lengths: Any, wanted: Any) -> list[Any]:
        """The users' rule takes and returns what is flat."""
        return self._trees.flat_vjp(residuals, cotangents, wanted)

    def constant_outputs(self, args: Sequence[Any]) -> Collection[int]:
        """Those that output_differentiability marks."""
        return self._trees.structures[args[1]].constants

    def label(self, name: str, index: int, args: Sequence[Any]) -> str:
        """Key path of an input."""
        return self._trees.structures[args[1]].label(index)

    def require_decomposition(self, kind: str) -> Callable:
        """The reference, if it may be differentiated.

        Raises:
            MissingRuleError: Naming what to register.
        """
        if self.decomposable:
            return super().require_decomposition(kind)
        self._trees.require_both()
        mode, rules = ("reverse", "def_save_for_backward and def_backward") if kind == "vjp" else ("forward", "def_jvp")
        raise MissingRuleError(
            f"{self.spec.qualified_name}: {mode}-mode differentiation was asked for, but there is no rule for it. "
            f'Register {rules}, or create the operator with differentiate="reference" to differentiate its reference.'
        )

    def is_decomposed_at_once(self, args: Sequence[Any]) -> bool:
        """Where no kernel gives the value: a reference that draws random numbers must not be run again for them."""
        return not self.has_kernel_for(args[0][0].device.type)

    def before_loop(self) -> None:
        """Say once that vmap is slow."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.spec.qualified_name}: vmap runs a loop over the batch, because there is no batching rule; "
                "register one with def_vmap.",
                stacklevel=3,
            )
