"""A twin of a module, on which `_proof` runs what somebody wrote."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["OF_ANY_MODULE", "Twin", "epsilons", "own", "random"]

OF_ANY_MODULE = frozenset(vars(torch.nn.Module()))
_HOOKS = [name for name in OF_ANY_MODULE if "hooks" in name]


def epsilons(module: torch.nn.Module) -> list[str]:
    """Names of attributes that are added to a variance."""
    return [name for name, value in vars(module).items() if "eps" in name.lower() and type(value) is float]


def own(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if value is not None}


def random(shape: Sequence[int], seed: int) -> Tensor:
    """Normal numbers, by no generator but their own."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64, device="cpu")


class Twin:
    """An object that computes as a module does, with parameters of a dtype and without anything of the module."""

    def __init__(self, module: torch.nn.Module, cls: type, dtype: torch.dtype, eps: float = 0.0) -> None:
        state = {name: copy.copy(v) if isinstance(v, (dict, list, set)) else v for name, v in vars(module).items()}
        state |= {name: type(state[name])() for name in _HOOKS if isinstance(state.get(name), dict)}
        state["_parameters"] = {
            name: None if value is None else torch.nn.Parameter((1.2 + 0.4 * random(value.shape, i)).to(dtype))
            for i, (name, value) in enumerate(module._parameters.items())
        }
        state["_buffers"] = {name: self._buffer(value, dtype) for name, value in module._buffers.items()}
        state["_modules"] = {name: self._part(value, dtype) for name, value in vars(module)["_modules"].items()}
        for i, name in enumerate(epsilons(module) if eps else ()):
            state[name] = eps * (i + 1)
        self.module: torch.nn.Module = object.__new__(cls)
        vars(self.module).update(state)
        self.cls = cls

    @staticmethod
    def _buffer(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if value is None or not value.is_floating_point():
            return None if value is None else torch.zeros(value.shape, dtype=value.dtype, device="cpu")
        return (0.5 + random(value.shape, 7).square()).to(dtype)

    @staticmethod
    def _part(value: torch.nn.Module | None, dtype: torch.dtype) -> torch.nn.Module | None:
        if value is None:
            return None
        part = copy.deepcopy(value).to(device="cpu", dtype=dtype)
        for module in part.modules():
            vars(module).update({name: type(vars(module)[name])() for name in _HOOKS if vars(module).get(name)})
        return part

    def __call__(self, x: Tensor, *, training: bool = False) -> Tensor:
        self.module.training = training
        torch.default_generator.manual_seed(0)
        y = self.cls.forward(self.module, x)
        if not isinstance(y, torch.Tensor):
            raise TypeError(f"its forward returns {type(y).__name__}")
        return y

    def parameters(self) -> list[Tensor]:
        return [value for value in self.module._parameters.values() if value is not None]
