"""`custom_op`: a user's function of pytrees as one torch operator, with every rule that transforms need."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from primitives._core.autograd import below_this_level
from primitives._core.errors import MutationError
from primitives._core.fast_path import fast_path_keys
from primitives._core.primitive import Primitive
from primitives._core.write_back import write_back
from primitives.custom._rules import Rules, operators
from primitives.custom._user_rule import check_signature
from primitives.custom.trees.calls import Signature
from primitives.custom.trees.table import StructureTable

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Rule = TypeVar("_Rule", bound="Callable[..., Any]")

# Looked up once: this is asked at every call.
_is_tracing = torch.compiler.is_dynamo_compiling


class CustomOp(Generic[_P, _R]):
    """A torch operator over pytrees, and its rules; made by `custom_op`.

    Calling it is calling the function that it was made from: the reference on the CPU, a kernel of `def_kernel` on the
    device that has one. Every rule is optional, and they may be added in any order. In what rules take, `inputs`,
    `tangents` and `in_dims` are namedtuples whose fields are the names of the arguments.

    Attributes:
        qualified_name: `"library::name"`.
        primitive: The operator itself, over lists of tensors.
        signature: The arguments of the function.
        table: The structures that it was called with.
        namespace: optree namespace of custom pytree nodes.
    """

    def __init__(
        self, qualified_name: str, function: Callable[..., Any], *, differentiate: Literal["reference"] | None,
        output_differentiability: Sequence[bool] | None, materialize: bool, mutates: Sequence[str], namespace: str,
    ) -> None:  # fmt: skip
        library, name = _split(qualified_name, (function.__module__, function.__qualname__))
        if differentiate not in (None, "reference"):
            raise ValueError(f'{qualified_name}: differentiate must be None or "reference", got {differentiate!r}.')
        self.qualified_name = qualified_name
        self.__name__ = name
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.__wrapped__ = function
        self._path = (function.__module__, function.__qualname__)
        self.namespace = namespace
        self.signature: Signature = Signature(qualified_name, function, mutates)
        self.table: StructureTable = StructureTable(qualified_name, self.signature, namespace)
        self.primitive: Primitive
        if qualified_name in operators:
            self.primitive = operators[qualified_name].primitive
        else:
            self.primitive = Primitive.of(Rules(library, name))
        self._rules: Any = self.primitive.rules
        self._rules.begin(
            self.table,
            materialize=materialize,
            output_differentiability=output_differentiability,
            decomposable=differentiate == "reference",
        )
        self._rules.add("reference", function)
        if differentiate == "reference":
            self.primitive.decompose_with(self._rules.differentiable("reference"))

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call the operator as the function is called."""
        if _is_tracing():
            from primitives.custom import _compiled

            return _compiled.call(self.qualified_name, "__call__", args, kwargs)
        trees, static = self.signature.bind(*args, **kwargs)
        leaves, structure = self.table.flatten(trees, static)
        if structure.mutated:
            structure.check_targets(leaves)
        values = self._call(leaves, structure.number)
        results = structure.results or structure.settled
        if structure.mutated:
            new = [value.detach() for value in values[results.num_tensors :]]
            write_back([leaves[i] for i in structure.mutated], new)
        return results.tree(values)

    def _call(self, leaves: list[Tensor], number: int) -> list[Tensor]:
        """As `Primitive.__call__`, for arguments whose types are known."""
        keyset, primitive = fast_path_keys(leaves), self.primitive
        if keyset is None:
            return primitive.overload(leaves, number)
        return primitive.autograd_kernel(keyset, leaves, number)

    def pure(self, *args: _P.args, **kwargs: _P.kwargs) -> tuple[Any, ...]:
        """The pure form of an operator that updates arguments: nothing is written.

        Returns:
            The result, and the new value of each argument that `mutates` names, in its tree.

        Raises:
            MutationError: If the operator updates nothing.
        """
        if not self.signature.mutates:
            raise MutationError(f"{self.qualified_name}: pure is for operators that update an argument; see mutates.")
        if _is_tracing():
            from primitives.custom import _compiled

            return _compiled.call(self.qualified_name, "pure", args, kwargs)
        trees, static = self.signature.bind(*args, **kwargs)
        leaves, structure = self.table.flatten(trees, static)
        values = self._call(leaves, structure.number)
        results = structure.results or structure.settled
        return results.tree(values), *structure.new_trees(values[results.num_tensors :])

    def __repr__(self) -> str:
        return f"CustomOp({self.qualified_name})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name: the module that defines the operator is imported again."""
        return _load, (self.qualified_name, *self._path)

    def _add(self, decorator: str, rule: _Rule) -> _Rule:
        check_signature(decorator, rule, self.signature)
        self._rules.add(decorator, rule)
        return rule

    def def_kernel(self, device: str) -> Callable[[_Rule], _Rule]:
        """Decorator for the implementation on `"cuda"` or `"cpu"`: a function with the signature of the reference."""
        self.primitive.check_device("def_kernel", device)

        def decorator(kernel: _Rule) -> _Rule:
            kind = f"def_kernel({device!r})"
            self._add(kind, kernel)
            self.primitive.def_kernel(device)(self._rules.implementation(kind))
            return kernel

        return decorator

    def def_fake(self, rule: _Rule) -> _Rule:
        """Decorator for a function with the signature of the reference, run on tensors without data.

        It gives shapes, dtypes and strides of the results. By default the reference does.
        """
        return self._add("def_fake", rule)

    def def_save_for_backward(self, rule: _Rule) -> _Rule:
        """Decorator for `(inputs, output) -> tree`: what `def_backward` gets as `saved`."""
        return self._add("def_save_for_backward", rule)

    def def_backward(self, rule: _Rule) -> _Rule:
        """Decorator for `(ctx, saved, *cotangents) -> dict`: by argument name, a cotangent tree or `None`."""
        return self._add("def_backward", rule)

    def def_jvp(self, rule: _Rule) -> _Rule:
        """Decorator for `(inputs, output, tangents) -> tree`: the tangent of the output, `None` for each of zeros."""
        return self._add("def_jvp", rule)

    def def_vmap(self, rule: _Rule) -> _Rule:
        """Decorator for `(info, in_dims, inputs) -> (output, out_dims)`; without one, `vmap` is a loop."""
        if self.signature.mutates:
            raise MutationError(
                f"{self.qualified_name}: an operator that updates arguments takes no def_vmap; vmap runs a loop."
            )
        return self._add("def_vmap", rule)

    def def_autograd(self, rule: _Rule) -> _Rule:
        """Decorator for a function with the signature of the reference that is differentiated in its place.

        It wins over every other derivative rule. `below_autograd` calls what it stands for.
        """
        return self._add("def_autograd", rule)

    def def_autocast(self, device: str) -> Callable[[_Rule], _Rule]:
        """Decorator for `inputs -> inputs`: what autocast does on `"cuda"` or `"cpu"`, usually a cast."""
        self.primitive.check_device("def_autocast", device)

        def decorator(rule: _Rule) -> _Rule:
            kind = f"def_autocast({device!r})"
            self._add(kind, rule)
            self.primitive.def_autocast(device)(self._rules.autocast(kind))
            return rule

        return decorator

    def below_autograd(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call the operator below the level that is being differentiated, from inside `def_autograd`."""
        with below_this_level():
            return self(*args, **kwargs)


def custom_op(
    name: str,
    *,
    differentiate: Literal["reference"] | None = None,
    output_differentiability: Sequence[bool] | None = None,
    materialize: bool = True,
    mutates: Sequence[str] = (),
    namespace: str = "",
) -> Callable[[Callable[_P, _R]], CustomOp[_P, _R]]:
    """Decorator that makes a torch operator of a plain-torch function of pytrees.

    Args:
        name: `"library::name"`; the operator is `torch.ops.library.name`.
        differentiate: `"reference"` differentiates the function itself wherever a rule is missing; by default that
            raises `MissingRuleError`.
        output_differentiability: For each output whether it has derivatives. A tuple is several outputs, anything else
            is one. By default everything floating or complex has.
        materialize: Whether `def_backward` and `def_jvp` get zeros for absent cotangents and tangents (of floating
            dtypes), or `None`.
        mutates: Names of arguments that the function updates in place. The operator does not: it gets copies, whose new
            values are written to the arguments after it, as constants to every derivative. `pure` returns them.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        The decorator, which returns a `CustomOp`. The function's positional arguments hold tensors, in any trees;
        leaves that are not tensors, and the keyword-only arguments, are static: they must be hashable. The tree of
        the result depends on trees and static arguments alone.

    Raises:
        TypeError: If `name` is missing, as in `@custom_op` alone, or the function takes `*args` or `**kwargs`.
        ValueError: If `name` names no library, or the operator exists; defining the same function again, as a notebook
            does, replaces the operator and all its rules.

    Example:
        >>> import torch, primitives as pr
        >>> @pr.custom_op("docstrings::scaled_sine")
        ... def scaled_sine(tree, *, scale=1.0):
        ...     return scale * tree["x"].sin()
        >>> @scaled_sine.def_save_for_backward
        ... def save(inputs, output):
        ...     return inputs.tree["x"]
        >>> @scaled_sine.def_backward
        ... def backward(ctx, x, y_bar):
        ...     return {"tree": {"x": ctx.static.scale * x.cos() * y_bar}}
        >>> torch.func.grad(lambda x: scaled_sine({"x": x}, scale=3.0))(torch.tensor(0.0))
        tensor(3.)
    """
    if not isinstance(name, str):
        function = f"the function {name.__qualname__}" if hasattr(name, "__qualname__") else repr(name)
        raise TypeError(
            f'custom_op: name must be the name of the operator, as in @custom_op("library::name"), got {function}.'
        )

    def decorator(function: Callable[_P, _R]) -> CustomOp[_P, _R]:
        op: CustomOp[_P, _R] = CustomOp(
            name,
            function,
            differentiate=differentiate,
            output_differentiability=output_differentiability,
            materialize=materialize,
            mutates=mutates,
            namespace=namespace,
        )
        operators[name] = op
        return op

    return decorator


def _split(qualified_name: str, path: tuple[str, str]) -> tuple[str, str]:
    """Library and name of an operator that may be defined by the function at `path`."""
    library, separator, name = qualified_name.partition("::")
    if not (separator and library.isidentifier() and name.isidentifier()):
        raise ValueError(f'custom_op: the name must be "library::name", got {qualified_name!r}.')
    previous = operators.get(qualified_name)
    # The same function again: a cell of a notebook that is run once more, a module that is reloaded.
    is_redefined = previous is not None and previous._path == path
    if not is_redefined and hasattr(getattr(torch.ops, library), name):
        raise ValueError(f"custom_op: the operator {qualified_name} exists already.")
    return library, name


def _load(qualified_name: str, module: str, path: str) -> CustomOp:
    """The operator of that name, whose module is imported if need be."""
    if qualified_name not in operators:
        importlib.import_module(module)
    try:
        return operators[qualified_name]
    except KeyError:
        raise ImportError(f"{qualified_name}: importing {module} did not define the operator ({path}).") from None
