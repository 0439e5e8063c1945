"""A call over pytrees as a function of flat tensors, and the checks that all transforms share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from primitives._core.contexts import run_as_written
from primitives._core.errors import (
    AxisError,
    DtypeError,
    LeafError,
    MissingRuleError,
    ShapeError,
    TreeError,
    check_arguments,
    check_callable,
    remedy_noted,
)
from primitives._core.trees.leaves import Partition

# In older releases, silently.
_INFERENCE_GIVES_ZEROS = torch.__version__ < "2.13"

F = TypeVar("F", bound="FunctionType")


def eager_after_break(function: F) -> F:
    """Decorator of everything that a transform does: `torch.compile` traces through it, and never starts a graph in it.

    After a graph break Dynamo goes on with the functions that were called around it. Between two levels of a transform
    it fails on an assertion there, and what it makes of a treespec does not work outside of a graph. Marked, the code
    and all that it calls run eagerly then. The root of `torch.compile` must not be marked, as it would never be traced.

    In eager mode, errors of torch that a derivative is missing get a note of the remedy.
    """

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        with remedy_noted():
            return function(*args, **kwargs)

    run_as_written(function)
    return run_as_written(noted)  # type: ignore[return-value] - it has the signature of `function`


class FlatCall:
    """`func(*args, **kwargs)` as a function of the tensors among its arguments.

    `function` is the name of the public function and `root` that of the arguments, for errors. `allowed` says which
    leaves the output may have: tensors of `"any"` dtype, only `"differentiable"` ones, only `"real"` ones, or one real
    number, the `"scalar"` that is the root of a gradient. `output` and `aux` put the results together after a call.
    """

    def __init__(
        self, function: str, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], options: dict[str, Any], *,
        root: str = "args", has_aux: bool = False, allowed: str = "any",
    ) -> None:  # fmt: skip
        self.function = function
        self.root = root
        self.num_args = len(args)
        self._func, self._has_aux, self._allowed = func, has_aux, allowed
        self._wanted = "real floating point" if allowed == "real" else "floating point or complex"
        self.parts = [Partition(**options) for _ in (*args, kwargs)]
        self.output, self.aux = Partition(**options), Partition(**options)
        split = [part.split(tree) for part, tree in zip(self.parts, (*args, kwargs), strict=True)]
        self.tensors: list[Tensor] = [tensor for tensors in split for tensor in tensors]
        stops = list(accumulate(len(tensors) for tensors in split))
        self._spans = list(zip([0, *stops], stops, strict=False))

    def __call__(self, *tensors: Any) -> Any:
        """The user's function of the arguments, with `tensors` in place of theirs."""
        *args, kwargs = (part.join(self.own(i, tensors)) for i, part in enumerate(self.parts))
        return self._func(*args, **kwargs)

    def flat(self, *tensors: Any) -> tuple[Any, tuple[Tensor, ...]]:
        """The tensors of the output, checked, and those of aux; of a `"scalar"` the output itself."""
        output: Any = self(*tensors)
        aux: Any = ()
        if self._has_aux:
            if not isinstance(output, tuple) or len(output) != 2:
                raise TreeError(
                    f"{self.function}: with has_aux=True, func must return a tuple (output, aux), got "
                    f"{kind_of(output)}."
                )
            output, aux = output
        checked = self._scalar(output) if self._allowed == "scalar" else self._split(output)
        return checked, tuple(self.aux.split(aux))

    def _scalar(self, output: Any) -> Tensor:
        if not isinstance(output, torch.Tensor):
            raise LeafError(f"{self.function}: func must return a tensor, got {type(output).__name__}.")
        if output.dim() != 0:
            raise ShapeError(
                f"{self.function}: func must return a tensor of shape [], got {list(output.shape)}. "
                "Reduce it, or use vjp or jacrev."
            )
        if not output.is_floating_point():
            raise DtypeError(f"{self.function}: func must return a real floating point tensor, got {output.dtype}.")
        return output

    def _split(self, output: Any) -> tuple[Tensor, ...]:
        tensors = tuple(self.output.split(output))
        self.output.require_tensors(self.function, "output")
        if not tensors:
            raise TreeError(f"{self.function}: func must return at least one tensor, got {output}.")
        for i, tensor in enumerate(tensors):
            if self._allowed != "any" and not self._admits(tensor):
                label = self.output.label(i, "output")
                raise DtypeError(f"{self.function}: {label} must be {self._wanted}, got {tensor.dtype}.")
        return tensors

    def _admits(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() or (tensor.is_complex() and self._allowed != "real")

    def with_aux(self, result: tuple[Any, ...], aux: Sequence[Any]) -> Any:
        """The result of a transform: `result`, with the tree of aux as one entry more if there is one."""
        result = (*result, self.aux.join(aux)) if self._has_aux else result
        return result[0] if len(result) == 1 else result

    def own(self, argnum: int, values: Sequence[Any]) -> Sequence[Any]:
        """Those of `values`, one for each tensor of the call, that belong to one argument."""
        start, stop = self._spans[argnum]
        return values[start:stop]

    def labels(self) -> list[str]:
        """Key path of each tensor."""
        roots = [*(f"{self.root}[{i}]" for i in range(self.num_args)), "kwargs"]
        counts = [stop - start for start, stop in self._spans]
        pairs = zip(self.parts, roots, counts, strict=True)
        return [part.label(i, root) for part, root, count in pairs for i in range(count)]

    def differentiated(self, argnums: Sequence[int], *, some: bool = True) -> tuple[int, ...]:
        """Positions of the tensors of some arguments, whose leaves must be differentiable and, with `some`, exist."""
        if _INFERENCE_GIVES_ZEROS and not torch.compiler.is_dynamo_compiling() and torch.is_inference_mode_enabled():
            raise MissingRuleError(
                f"{self.function}: torch {torch.__version__} gives derivatives of zero in inference mode. "
                "Use torch.no_grad()."
            )
        positions: list[int] = []
        for argnum in argnums:
            part, label = self.parts[argnum], f"{self.root}[{argnum}]"
            part.require_tensors(self.function, label, " to be differentiated")
            for i, tensor in enumerate(self.own(argnum, self.tensors)):
                if not self._admits(tensor):
                    raise LeafError(
                        f"{self.function}: {part.label(i, label)} must be {self._wanted} to be differentiated, got "
                        f"{tensor.dtype}."
                    )
                self._refuse_nested(tensor, part, i, label)
            positions += range(*self._spans[argnum])
        if some and not positions:
            raise TreeError(f"{self.function}: {self.root} must hold a tensor to differentiate, got none.")
        return tuple(positions)

    def _refuse_nested(self, tensor: Tensor, part: Partition, index: int, root: str) -> None:
        if tensor.is_nested:
            raise LeafError(
                f"{self.function}: {part.label(index, root)} must not be a nested tensor to be differentiated: the "
                "transforms of torch have no derivatives of those. Use primitives.autograd.grad, or pad it with "
                "torch.nested.to_padded_tensor."
            )

    def match(self, name: str, tangents: Any, *, some: bool = False) -> dict[int, Tensor]:
        """Tangents by position of their tensor, checked; with `some`, `None` may stand for a leaf or an argument."""
        if not isinstance(tangents, tuple) or len(tangents) != self.num_args:
            raise TreeError(
                f"{self.function}: {name} must be a tuple of {self.num_args}, one for each of {self.root}, got "
                f"{kind_of(tangents)}."
            )
        found: dict[int, Tensor] = {}
        for i, tangent in enumerate(tangents):
            part, own, (start, _) = self.parts[i], self.own(i, self.tensors), self._spans[i]
            if some and tangent is None:
                continue
            for j, tensor in enumerate(own):
                self._refuse_nested(tensor, part, j, f"{self.root}[{i}]")
            matched = part.match(self.function, f"{name}[{i}]", tangent, f"{self.root}[{i}]", own, some=some)
            found.update({start + j: value for j, value in enumerate(matched) if value is not None})
        return found

    def in_structure(self, argnums: Any, values: Sequence[Any]) -> Any:
        """`values`, one for each differentiated tensor: one tree for an int `argnums`, a tuple of trees for a tuple."""
        remaining = list(values)
        trees = []
        for argnum in wrap_argnums(self.function, argnums, self.num_args):
            start, stop = self._spans[argnum]
            trees.append(self.parts[argnum].join(remaining[: stop - start]))
            remaining = remaining[stop - start :]
        return tuple(trees) if isinstance(argnums, tuple) else trees[0]


def kind_of(value: Any) -> str:
    """A value in the words of an error about a tuple."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def primals_call(
    function: str, func: Callable[..., Any], primals: Any, options: dict[str, Any], *, has_aux: bool = False
) -> FlatCall:
    """`func(*primals)` as a function of flat tensors."""
    check_callable(function, func)
    check_arguments(function, "primals", primals)
    allowed = {"vjp": "differentiable", "hvp": "scalar"}.get(function, "any")
    return FlatCall(function, func, primals, {}, options, root="primals", has_aux=has_aux, allowed=allowed)


def transformed(
    function: str, func: Callable[..., Any], run: Callable[..., Any], *arguments: Any, **options: Any
) -> Callable[..., Any]:
    """What the transform named `function` makes of `func`: `run(given, *arguments)`, `given` as `FlatCall` takes it.

    It has the name and documentation of `func`. Attributes are left behind: those of `torch.compile` belong to one
    function and not to what wraps it.
    """
    check_callable(function, func)

    @functools.wraps(func, updated=())
    def result(*args: Any, **kwargs: Any) -> Any:
        return run((function, func, args, kwargs, options), *arguments)

    return result


def wrap_argnums(function: str, argnums: Any, num_args: int) -> tuple[int, ...]:
    """`argnums` as non-negative positions."""
    positions = argnums if isinstance(argnums, tuple) else (argnums,)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in positions):
        raise DtypeError(f"{function}: argnums must be an int or a tuple of ints, got {argnums!r}.")
    if not num_args:
        raise AxisError(f"{function}: func must be called with at least one positional argument, got none.")
    if any(not -num_args <= i < num_args for i in positions):
        raise AxisError(
            f"{function}: argnums must be in [{-num_args}, {num_args - 1}] for a call with {num_args} positional "
            f"argument{'s' * (num_args != 1)}, got {argnums}."
        )
    wrapped = tuple(i % num_args for i in positions)
    if not wrapped or len(set(wrapped)) != len(wrapped):
        raise AxisError(f"{function}: argnums must name at least one argument, and each one once, got {argnums}.")
    return wrapped


def check_vmap_options(function: str, randomness: str, name: str, number: Any) -> None:
    """Raise unless vmap knows `randomness`, and `number`, of chunks or of their size, is positive or `None`."""
    if randomness not in ("error", "same", "different"):
        raise RuntimeError(f"{function}: randomness must be 'error', 'same' or 'different', got {randomness!r}.")
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int):
        raise DtypeError(f"{function}: {name} must be an int, got {type(number).__name__}.")
    if number < 1:
        raise ShapeError(f"{function}: {name} must be at least 1, got {number}.")


def no_torchscript() -> LeafError:
    """The error for a module that no call can lend other parameters."""
    return LeafError(
        "a module of TorchScript (torch.jit.script or trace) is reached, which runs outside of Python and cannot be "
        "given the parameters of one call. Use the original module."
    )
