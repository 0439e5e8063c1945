"""A call over pytrees as a function of flat tensors, and the checks that all transforms share."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.eager_transforms import _jvp_with_argnums, _vjp_with_argnums

from primitives.core.errors import AxisError, DtypeError, LeafError, ShapeError, TreeError
from primitives.core.trees.leaves import Partition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class FlatCall:
    """`func(*args, **kwargs)` as a function of the tensors among its arguments.

    Args:
        function: Name of the public function, for errors.
        func: The user's function.
        args: Positional arguments, each a pytree.
        kwargs: Keyword arguments.
        options: `namespace` and `is_leaf`.
        root: Name of the positional arguments in errors.

    Attributes:
        num_args: Number of positional arguments.
        tensors: All tensors of the arguments, positional ones first.
    """

    def __init__(
        self,
        function: str,
        func: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        options: dict[str, Any],
        root: str = "args",
    ) -> None:
        self.function = function
        self.root = root
        self.num_args = len(args)
        self.options = options
        self._func = func
        self.parts = [Partition(**options) for _ in (*args, kwargs)]
        split = [part.split(tree) for part, tree in zip(self.parts, (*args, kwargs), strict=True)]
        self.tensors: list[Tensor] = [tensor for tensors in split for tensor in tensors]
        stops = list(accumulate(len(tensors) for tensors in split))
        self._spans = list(zip([0, *stops], stops, strict=False))

    def __call__(self, *tensors: Any) -> Any:
        """The user's function of the arguments, with `tensors` in place of theirs."""
        *args, kwargs = (part.join(self.own(i, tensors)) for i, part in enumerate(self.parts))
        return self._func(*args, **kwargs)

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

    def partition(self) -> Partition:
        """A partition with the options of this call, for its output."""
        return Partition(**self.options)

    def differentiated(self, argnums: Sequence[int], *, real: bool = False) -> tuple[int, ...]:
        """Positions of the tensors of some arguments, all of whose leaves must be differentiable.

        Raises:
            LeafError: If a leaf is no floating-point tensor (nor a complex one, unless `real`), naming its key path.
        """
        positions: list[int] = []
        for argnum in argnums:
            part, label = self.parts[argnum], f"{self.root}[{argnum}]"
            part.require_tensors(self.function, label, " to be differentiated")
            for i, tensor in enumerate(self.own(argnum, self.tensors)):
                if not (tensor.is_floating_point() or (tensor.is_complex() and not real)):
                    allowed = "real floating point" if real else "floating point or complex"
                    raise LeafError(
                        f"{self.function}: {part.label(i, label)} must be {allowed} to be differentiated, "
                        f"got {tensor.dtype}."
                    )
            positions += range(*self._spans[argnum])
        return tuple(positions)

    def require_some(self, positions: Sequence[int]) -> None:
        """Raise unless there is something to differentiate."""
        if not positions:
            raise TreeError(f"{self.function}: {self.root} must hold a tensor to differentiate, got none.")

    def match_primals(self, name: str, tangents: Any) -> list[Tensor]:
        """The leaves of `tangents`, checked to be trees like the positional arguments, in shapes and dtypes too."""
        self._check_number(name, tangents)
        matched: list[Tensor] = []
        for i, tangent in enumerate(tangents):
            names = f"{name}[{i}]", tangent, f"{self.root}[{i}]"
            matched += self.parts[i].match(self.function, *names, self.own(i, self.tensors))
        return matched

    def match_variables(self, name: str, tangents: Any) -> dict[int, Tensor]:
        """Tangents by position of their tensor, checked as by `match_primals`, where some are given as `None`.

        `None` stands for a leaf or for a whole argument.
        """
        self._check_number(name, tangents)
        found: dict[int, Tensor] = {}
        for i, tangent in enumerate(tangents):
            if tangent is None:
                continue
            names = f"{name}[{i}]", tangent, f"{self.root}[{i}]"
            matched = self.parts[i].match_some(self.function, *names, self.own(i, self.tensors))
            start, _ = self._spans[i]
            found.update({start + j: value for j, value in enumerate(matched) if value is not None})
        return found

    def _check_number(self, name: str, tangents: Any) -> None:
        if not isinstance(tangents, tuple) or len(tangents) != self.num_args:
            given = f"a tuple of {len(tangents)}" if isinstance(tangents, tuple) else type(tangents).__name__
            raise TreeError(
                f"{self.function}: {name} must be a tuple of {self.num_args}, one for each of {self.root}, got {given}."
            )

    def in_structure(self, argnums: Any, values: Sequence[Any]) -> Any:
        """`values`, one for each differentiated tensor: one tree for an int `argnums`, a tuple of trees for a tuple."""
        remaining = list(values)
        trees = []
        for argnum in wrap_argnums(self.function, argnums, self.num_args):
            start, stop = self._spans[argnum]
            trees.append(self.parts[argnum].join(remaining[: stop - start]))
            remaining = remaining[stop - start :]
        return tuple(trees) if isinstance(argnums, tuple) else trees[0]


def primals_call(
    function: str,
    func: Callable[..., Any],
    primals: Any,
    namespace: str,
    is_leaf: Callable[[Any], bool] | None,
) -> FlatCall:
    """`func(*primals)` as a function of flat tensors, all of which must be differentiable, and at least one.

    Raises:
        TreeError: If `primals` is no tuple, or holds no tensor.
        LeafError: If a leaf is no floating-point or complex tensor.
    """
    check_primals(function, primals)
    call = FlatCall(function, func, primals, {}, {"namespace": namespace, "is_leaf": is_leaf}, root="primals")
    call.require_some(call.differentiated(tuple(range(len(primals)))))
    return call


def check_primals(function: str, primals: Any) -> None:
    """Raise unless `primals` is a tuple."""
    if not isinstance(primals, tuple):
        raise TreeError(
            f"{function}: primals must be a tuple of the arguments of func, got {type(primals).__name__}. "
            "Write (x,) for a single argument."
        )


def vjp_of(flat: Callable[..., Any], tensors: Sequence[Tensor], positions: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The `vjp` of torch, of a function with aux, with respect to some of its arguments.

    The other arguments are inputs of the transform too, not captured: it lets a function change its inputs in place,
    such as the buffers of a module. torch has this for its own `jacrev`, and not in public.
    """
    return _vjp_with_argnums(flat, *tensors, argnums=positions, has_aux=True)  # type: ignore[return-value] - as long as has_aux says


def jvp_of(
    flat: Callable[..., Any], tensors: Sequence[Tensor], tangents: Sequence[Tensor], positions: tuple[int, ...]
) -> tuple[Any, Any, Any]:
    """The `jvp` of torch, of a function with aux, with respect to some of its arguments; as `vjp_of`."""
    return _jvp_with_argnums(  # type: ignore[return-value] - as long as has_aux says
        flat, tuple(tensors), tuple(tangents), argnums=positions, has_aux=True
    )


def named_like(func: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that gives a transformed function the name and documentation of `func`.

    Attributes are left behind: those of `torch.compile` belong to one function and not to what wraps it.
    """
    return functools.wraps(func, updated=())


def wrap_argnums(function: str, argnums: Any, num_args: int) -> tuple[int, ...]:
    """`argnums` as non-negative positions.

    Raises:
        DtypeError: If it is neither an int nor a tuple of ints.
        AxisError: If a position is out of range, named twice, or none is named.
    """
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


def unpack_aux(function: str, output: Any, *, has_aux: bool) -> tuple[Any, Any]:
    """Output and auxiliary output of a function.

    Raises:
        TreeError: If `has_aux` and `output` is no pair.
    """
    if not has_aux:
        return output, ()
    if not isinstance(output, tuple) or len(output) != 2:
        given = f"a tuple of {len(output)}" if isinstance(output, tuple) else type(output).__name__
        raise TreeError(f"{function}: with has_aux=True, func must return a tuple (output, aux), got {given}.")
    return output


def check_scalar(function: str, output: Any) -> None:
    """Raise unless `output` can be the root of a gradient: one real number, in a tensor without axes."""
    if not isinstance(output, torch.Tensor):
        raise LeafError(f"{function}: func must return a tensor, got {type(output).__name__}.")
    if output.dim() != 0:
        raise ShapeError(
            f"{function}: func must return a tensor of shape [], got {list(output.shape)}. "
            "Reduce it, or use vjp or jacrev."
        )
    if not output.is_floating_point():
        raise DtypeError(f"{function}: func must return a real floating point tensor, got {output.dtype}.")


def split_output(function: str, partition: Partition, output: Any, *, allowed: str = "any") -> tuple[Tensor, ...]:
    """The tensors of a function's output, split by `partition`.

    Args:
        function: Name of the public function, for errors.
        partition: Remembers the structure.
        output: Pytree of tensors.
        allowed: `"any"` dtype, only `"differentiable"` ones, or only `"real"` ones.

    Raises:
        LeafError: If a leaf is no tensor.
        DtypeError: If a dtype is not allowed.
        TreeError: If there is no leaf.
    """
    tensors = tuple(partition.split(output))
    partition.require_tensors(function, "output")
    if not tensors:
        raise TreeError(f"{function}: func must return at least one tensor, got {output}.")
    for i, tensor in enumerate(tensors):
        fits = tensor.is_floating_point() or (allowed == "differentiable" and tensor.is_complex())
        if allowed != "any" and not fits:
            wanted = "real floating point" if allowed == "real" else "floating point or complex"
            raise DtypeError(f"{function}: {partition.label(i, 'output')} must be {wanted}, got {tensor.dtype}.")
    return tensors


def check_randomness(function: str, randomness: str) -> None:
    """Raise unless `randomness` is one of the three that vmap knows; what torch raises."""
    if randomness not in ("error", "same", "different"):
        raise RuntimeError(f"{function}: randomness must be 'error', 'same' or 'different', got {randomness!r}.")


def check_positive(function: str, name: str, value: Any) -> None:
    """Raise unless `value` is a positive int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DtypeError(f"{function}: {name} must be an int, got {type(value).__name__}.")
    if value < 1:
        raise ShapeError(f"{function}: {name} must be at least 1, got {value}.")


class Generators:
    """State of the random number generators that a function of `tensors` draws from."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def rewind(self) -> None:
        """Go back to the state at construction."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)
