"""Modules as pure functions of their parameters and buffers: `pure_module`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from primitives._core.errors import DtypeError, LeafError, MutationError, ShapeError, TreeError
from primitives.tracing import _torch_private as torch_private
from primitives.tracing._errors import errors_in_trace
from primitives.tracing._memory import bottom
from primitives.tracing._modules.lending import attributes_kept, running


class _Names:
    """The values of a module under the names of its parameters, or of its buffers, and those of a call."""

    def __init__(self, what: str, module: nn.Module, tree: Any, *, strict: bool) -> None:
        self._what, self._tree = what, tree
        # The first name of the same place, and what the module has there, by each name, tied ones included.
        self.of: dict[str, tuple[str, Any]] = {}
        first_names: dict[Any, str] = {}
        for prefix, owner in module.named_modules(remove_duplicate=False):
            first = first_names.setdefault(owner, prefix)
            for leaf, x in (owner._parameters if what == "params" else owner._buffers).items():
                if x is not None or what == "buffers":
                    name, place = (f"{path}.{leaf}" if path else leaf for path in (prefix, first))
                    self.of[name] = place, x
        if not isinstance(tree, Mapping):
            raise TreeError(f"pure_module: {what} must be a dict of tensors by name, got {type(tree).__name__}.")
        given = {name: self._checked(name, tree[name], strict=strict) for name in self.of if name in tree}
        # A buffer that has no value is not tied to others.
        by_tie: dict[Any, Any] = {}
        for name, value in given.items():
            if by_tie.setdefault(self._tie(name), value) is not value:
                raise TreeError(
                    f"pure_module: {what}[{name!r}] is tied to others in the module, and must be given the same "
                    "tensor as they are. Give one of them."
                )
        own = {self._tie(name): (name, x) for name, (_, x) in reversed(self.of.items())}
        lists = {
            "Missing": [name for tie, (name, x) in own.items() if x is not None and tie not in by_tie][::-1],
            "Unexpected": [name for name in tree if name not in self.of],
        }
        if strict and any(lists.values()):
            lines = [f"{kind} in {what}: {', '.join(map(repr, names))}." for kind, names in lists.items() if names]
            requirement = f"pure_module: {what} must have the names that {type(module).__name__} has."
            raise TreeError("\n".join([requirement, *lines]))
        values = {tie: by_tie.get(tie, x) for tie, (_, x) in own.items()}
        if what == "buffers":
            values = {tie: None if x is None else x.clone() for tie, x in values.items()}
        # The value of the call for each place.
        self.values = {place: values[self._tie(name)] for name, (place, _) in self.of.items()}

    def _tie(self, name: str) -> Any:
        place, x = self.of[name]
        return place if x is None else x

    def _checked(self, name: str, value: Any, *, strict: bool) -> Any:
        label, own = f"pure_module: {self._what}[{name!r}]", self.of[name][1]
        if value is None and self._what == "buffers":
            return value
        if not isinstance(value, torch.Tensor):
            hint = " Names are dotted, as in 'layer.weight'." if isinstance(value, Mapping) else ""
            raise LeafError(f"{label} must be a tensor, got {type(value).__name__}.{hint}")
        if strict and own is not None and value.shape != own.shape:
            raise ShapeError(f"{label} must have shape {list(own.shape)}, as in the module, got {list(value.shape)}.")
        if strict and own is not None and value.dtype != own.dtype:
            raise DtypeError(
                f"{label} must have dtype {own.dtype}, as in the module, got {value.dtype}. Pass strict=False to run "
                "the module in another dtype."
            )
        return value

    def current(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The values of the places now, by the names that were given."""
        shown = {self._tie(name): tensors[place] for name, (place, _) in self.of.items() if name in self._tree}
        result: dict[str, Any] = {}
        for name, (place, _) in self.of.items():
            # torch puts an object of its own in the place of a buffer that the module has deleted.
            x = tensors[place] if isinstance(tensors[place], torch.Tensor) else None
            # A tie that the call has broken shows too, and so does a buffer that had no value before.
            if name in self._tree or (x is not None and shown.setdefault(self._tie(name)) is not x):
                shown[self._tie(name)] = result[name] = x
        return result


class PureModule:
    """A module as a pure function of its parameters and buffers; made by `pure_module`.

    Attributes:
        module: The module. Its training mode, and everything about it but parameters and buffers, is read at each call.
        strict: Whether every name must be given, with the shape and dtype that the module has.
    """

    def __init__(self, module: nn.Module, *, strict: bool = True) -> None:
        wrappers = (torch.jit.ScriptModule, torch.nn.DataParallel)
        if not isinstance(module, torch.nn.Module) or isinstance(module, wrappers):
            raise TypeError(
                "pure_module: module must be a torch.nn.Module that holds its own parameters and runs in Python, "
                f"got {type(module).__name__}. Pass the module that was scripted, or wrapped."
            )
        self.module = module
        self.strict = strict

    def init(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the parameters and buffers that the module has, by dotted name: the first trees to call with.

        Returns:
            `(params, buffers)`. A tied tensor stands under the first of its names. None of them requires grad, as the
            transforms of `primitives.func` want them; for `backward`, call `requires_grad_()` on the parameters.

        Example:
            >>> import torch, primitives as pr
            >>> params, buffers = pr.tracing.pure_module(torch.nn.BatchNorm1d(2)).init()
            >>> list(params), list(buffers)
            (['weight', 'bias'], ['running_mean', 'running_var', 'num_batches_tracked'])
        """
        params = {name: value.detach().clone() for name, value in self.module.named_parameters()}
        return params, {name: value.detach().clone() for name, value in self.module.named_buffers()}

    def __call__(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run the module with these parameters and buffers.

        Args:
            params: Parameters by dotted name, as `named_parameters` gives them.
            buffers: Buffers by dotted name, as `named_buffers` gives them.
            *args: Arguments of the module.
            **kwargs: Keyword arguments of the module.

        Returns:
            `(output, new_buffers)`: what the module returns, and every buffer as it is after the call, under the
            names in `buffers`.

        Raises:
            TreeError: If names are missing, unknown, or tied and given different tensors.
            ShapeError: If a tensor has another shape than in the module.
            DtypeError: If it has another dtype, or is not a tensor.
            LeafError: If a value is not a tensor, or the module returns a generator or coroutine, which would run after
                the call.
            MutationError: If the module has written a parameter in place.
            TraceError: In a trace of `make_fx`, if the module branches on a value that the graph does not have.
        """
        given = _Names("params", self.module, params, strict=self.strict)
        state = _Names("buffers", self.module, buffers, strict=self.strict)
        tensors: dict[str, Any] = {**given.values, **state.values}
        is_compiling, owners = torch.compiler.is_dynamo_compiling(), list(self.module.modules())
        # How often each tensor has been written, below all transforms; a compiler knows no versions.
        written = {} if is_compiling else {name: bottom(params[name]) for name in given.of if name in params}
        versions = {name: (x, x._version) for name, x in written.items() if not x.is_inference()}
        errors = contextlib.nullcontext() if is_compiling else errors_in_trace("pure_module")
        with attributes_kept(owners), torch_private.with_tensors(self.module, tensors), running(owners), errors:
            output = self.module(*args, **kwargs)
        new_buffers = state.current(tensors)
        for name, (value, version) in versions.items():
            if value._version != version:
                raise MutationError(
                    f"pure_module: the module writes its parameter {name!r} in place, which the pure function "
                    "cannot return. Make it a buffer, or write it outside the module."
                )
        if isinstance(output, (Iterator, Awaitable, AsyncGenerator)):
            raise LeafError(
                f"pure_module: the module must return what it has computed, got {type(output).__name__}, which "
                "would run after the call, with the module's own parameters. Return a list, or the values."
            )
        return output, new_buffers

    def __repr__(self) -> str:
        return f"pure_module({type(self.module).__name__}, strict={self.strict})"


def pure_module(module: nn.Module, *, strict: bool = True) -> PureModule:
    """A module as a pure function `(params, buffers, *args, **kwargs) -> (output, new_buffers)`.

    `params` and `buffers` are dicts by dotted name, as `named_parameters` and `named_buffers` give them; `init()` of
    the result makes the first ones. Buffers that the module changes, in place or by assignment, come out in
    `new_buffers`, and the others as they are. The module, `params` and `buffers` stay untouched, also when it raises:
    whatever the module assigns to its attributes is taken back. Arguments that the module writes in place are written.
    Running statistics are values there, so that a network with batch norm, in training, works under `vmap`, `jvp`,
    `hessian` and `torch.compile(fullgraph=True)`.
    `primitives.func.functional_call` has torch's contract instead: it returns the output, and writes buffers in place.

    Args:
        module: Module, a `torch.fx.GraphModule` too. It is lent to the call, as in `torch.func.functional_call`: two
            threads take two copies.
        strict: Whether every parameter and buffer must be given, and no other name, with the shape and dtype that the
            module has. If not, what is missing is taken from the module.

    Returns:
        The pure function. Of tied names one suffices, and further ones must be given the same tensor.

    Raises:
        TypeError: If `module` is not a module, or one of TorchScript or `DataParallel`.

    Example:
        >>> import torch, primitives as pr
        >>> net = pr.tracing.pure_module(torch.nn.BatchNorm1d(1, momentum=0.5))
        >>> params, buffers = net.init()
        >>> output, new_buffers = net(params, buffers, torch.tensor([[1.0], [3.0]]))
        >>> new_buffers["running_mean"], buffers["running_mean"]
        (tensor([1.]), tensor([0.]))
    """
    return PureModule(module, strict=strict)
