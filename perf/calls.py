"""Calls of launchers: what the operands of all ops have in common, and the modes that can be called on them.

The tests call launchers on random numbers; the table of machine code on tensors of the device meta, which have none.
Triton is imported with the first launcher that is asked for, so that records (`perf.ops`) can be read without it.
"""

from __future__ import annotations

import csv
import functools
import importlib
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from primitives import use_backend
from primitives._core import Primitive, registered_primitives

# Large enough that the mean square of x_hat is visibly not 1, and far enough from a float32 number that rounding it to
# one shows in float64.
EPS = 1e-2 + 1e-10
MOMENTUM = 0.1


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers, shifted so that the mean matters."""
    if torch.get_default_device().type == "meta":
        return torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    return numbers.to(torch.get_default_device(), dtype)


def randoms(names: str, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Random numbers for each of these names, from this seed on."""
    return {name: random(*shape, dtype=dtype, seed=seed + i) for i, name in enumerate(names.split())}


def pairwise(count: int) -> list[tuple[bool, ...]]:
    """Few choices of `count` flags in which any two flags meet in all four ways, and the choice of all.

    Each flag is up in half of the choices but the first one, which has none, and no two flags in the same ones.
    """
    size = next(size for size in itertools.count(4, 2) if math.comb(size - 1, size // 2) >= count)
    ups = list(itertools.islice(itertools.combinations(range(1, size), size // 2), count))
    return [*(tuple(number in up for up in ups) for number in range(size)), (True,) * count]


class Step(NamedTuple):
    """A call in a mode of an operation: a launcher, the operands that are absent, and those of which it differentiates.

    With `x:seed`, it differentiates of x where there is a seed; without any names, of all.
    """

    launcher: str
    absent: list[str]
    results: list[str]


@functools.cache
def steps() -> dict[str, dict[str, list[Step]]]:
    """The table `perf/ops/calls.csv`: steps by operation and mode.

    Beside the modes of the bench it has kernels without sums for parameters (`x_only`), the double backward of all
    gradients, a Hessian-vector product in reverse (`gradient_backward`), all results, which derivatives of third order
    take, and batch norm by given statistics, which are differentiated too (`evaluation`).
    """
    found: dict[str, dict[str, list[Step]]] = {}
    with (Path(__file__).parent / "ops" / "calls.csv").open(newline="", encoding="utf-8") as file:
        for ops, modes, launcher, absent, results, _ in itertools.islice(csv.reader(file), 1, None):
            for op, mode in itertools.product(ops.split(), modes.split()):
                step = Step(launcher, absent.split(), results.split())
                found.setdefault(op, {}).setdefault(mode, []).append(step)
    return found


def launchers_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions of a module of kernels, by name."""
    own = inspect.getmembers(module, lambda each: inspect.isfunction(each) and each.__module__ == module.__name__)
    return {name: function for name, function in own if not name.startswith("_")}


def operator_of(launcher: str, given: Mapping[str, Any]) -> Primitive:
    """The operator that a launcher of this name serves, with what it is given by name."""
    name = launcher.replace("_train", "").removesuffix("_fwd").removesuffix("_words")
    if given.get("silu"):
        name = name.replace("layer_norm", "group_norm_silu")
    if given.get("relu") or (name.startswith("batch_norm") and given.get("y") is not None):
        name = name.replace("batch_norm", "batch_norm_relu")
    return registered_primitives()[f"primitives::{name}"]


class Call(NamedTuple):
    """A launcher and its arguments."""

    launcher: Callable[..., Any]
    args: tuple[Any, ...]

    def results(self) -> tuple[Tensor, ...]:
        """Its results; empty tensors stand for those that are not wanted."""
        results = self.launcher(*self.args)
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [arg for arg in self.args if isinstance(arg, torch.Tensor)]


class Operands:
    """Base of the operands of all ops: each attribute is named as the argument of launchers, None for what is absent.

    A mode is a launcher, which takes its arguments by their names from here, or from the results of the reference.
    """

    # The modules of kernels that have the launchers of the op, the one of its name first.
    MODULES: ClassVar[tuple[str, ...]]
    # Operands that are there if they are drawn, though a launcher can do without.
    NEVER_ABSENT: ClassVar[tuple[str, ...]] = ()
    # Arguments that a draw need not give.
    DEFAULTS: ClassVar[dict[str, Any]] = {}

    def __init__(self, **given: Any) -> None:
        vars(self).update(given | {"eps": EPS, "momentum": MOMENTUM, **self.DEFAULTS} | given)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def op(cls) -> str:
        """Name of the operation."""
        return cls.MODULES[0].rpartition(".")[2]

    @classmethod
    def launchers(cls) -> dict[str, Callable[..., Any]]:
        """The launchers of the op, in their order, by name."""
        modules = [importlib.import_module(f"primitives.kernels.{name}") for name in cls.MODULES]
        return {name: launcher for module in modules for name, launcher in launchers_of(module).items()}

    @classmethod
    @functools.cache
    def modes(cls) -> dict[str, Callable[..., Any]]:
        """The launchers by their names without that of the op."""
        return {name.removeprefix(f"{cls.op()}_"): launcher for name, launcher in cls.launchers().items()}

    def call(self, mode: str, output_mask: Sequence[bool] | None = None) -> Call:
        """A call of one mode, by default of all its results."""
        launcher = self.modes()[mode]
        output_mask = [True] * len(self.results(mode)) if output_mask is None else output_mask
        given = {**vars(self), **self.derived(), "output_mask": output_mask}
        return Call(launcher, tuple(given[name] for name in inspect.signature(launcher).parameters))

    def results(self, mode: str) -> list[str]:
        """The operands of which a launcher gives derivatives, by name; the result that a map keeps is y."""
        launcher = self.modes()[mode]
        given = {name: vars(self).get(name) for name in inspect.signature(launcher).parameters}
        outputs = operator_of(launcher.__name__, given).spec.outputs
        return [re.sub("_bar(_dot)?$", "", name).replace("output", "y") for name in outputs]

    def calls(self, *modes: str) -> list[Call]:
        """A call of each of these modes, by default of all."""
        return [self.call(mode) for mode in modes or self.modes()]

    def choices(self, mode: str) -> Iterator[Call]:
        """Calls in which any two of the operands that may be absent and the results meet in all four ways."""
        parameters = inspect.signature(self.modes()[mode]).parameters
        names = [name for name, parameter in parameters.items() if parameter.annotation == "Tensor | None"]
        names = [name for name in names if getattr(self, name) is not None and name not in self.NEVER_ABSENT]
        num_results = len(self.results(mode)) if "output_mask" in parameters else 0
        for choice in pairwise(len(names) + num_results):
            absent = [name for name, is_there in zip(names, choice, strict=False) if not is_there]
            # A launcher of tangents is called for one at least.
            if not mode.endswith("jvp") or any(name.endswith("_dot") and name not in absent for name in names):
                yield self.change(**dict.fromkeys(absent)).call(mode, choice[len(names) :])

    def steps(self, op: str, mode: str) -> list[Call]:
        """The calls of a mode, as the table has them; nobody wants the derivative of what is absent."""
        return [self.change(**dict.fromkeys(step.absent))._step(step) for step in steps()[op][mode]]

    def _step(self, step: Step) -> Call:
        if not step.results:
            return self.call(step.launcher)
        needs = {name: needed or name for name, _, needed in (text.partition(":") for text in step.results)}
        there = (getattr(self, needs.get(name, ""), None) for name in self.results(step.launcher))
        return self.call(step.launcher, tuple(operand is not None for operand in there))

    def derived(self) -> dict[str, Any]:
        """Arguments that follow from others: results of the forward pass, but for those that were drawn."""
        results = self.value(self.op(), **vars(self))
        return {name: value for name, value in results.items() if name not in vars(self)}

    @staticmethod
    def value(op: str, **given: Any) -> dict[str, Tensor]:
        """The results of an operation by its reference, by name."""
        primitive = registered_primitives()[f"primitives::{op}"]
        with use_backend("reference"):
            found = primitive.overload(*(given[name] for name in primitive.spec.arguments))
        return dict(zip(primitive.spec.outputs, found if isinstance(found, tuple) else (found,), strict=True))

    def change(self, **fields: Any) -> Any:
        """The same with other tensors; None for one that is absent."""
        return type(self)(**{**vars(self), **fields})

    def here(self) -> Any:
        """The same where a test makes its tensors, for operands that were drawn before it began."""
        device = torch.get_default_device()
        return self.change(**{n: x.to(device) for n, x in vars(self).items() if isinstance(x, torch.Tensor)})
