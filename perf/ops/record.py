"""Records of ops: `perf.ops` has one for each, and all that asks for an op asks its record.

Tests, the bench and the table of machine code take from it whatever they need to know of an op.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import primitives as pr
from perf.calls import Call, steps
from perf.ops.samples import DTYPES, LOW_PRECISION, Sample, arranged, normal
from perf.ops.workload import KERNEL_MODES, RECORDS, Workload, workloads_of
from primitives._core import Primitive, registered_primitives

# How often a mode touches tensors of the size of x at least: x, y_bar and x_dot are read; y, x_bar, tangents written.
PASSES = {"forward": 2, "backward": 3, "jvp": 4, "hvp": 5, "double_backward": 5, "forward_backward": 5}
# Arguments that are positive.
POSITIVE = ("running_var", "target")


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op and all that tests and measurements need to know of it.

    Names and order tie a record to its primitives: the outputs of the backward primitive are the cotangents of the
    differentiable arguments in their order, and the jvp primitive takes the tangent of an argument `x` as `x_dot`.

    Attributes:
        name: Of the op, as its primitives and its file in `primitives.ops` have it.
        call: The op by the functions of a module like `torch.nn.functional`, `(module, *arguments, **options) -> y`.
        truth: `y`, or a tuple that begins with it, by the definition, in plain torch operations, of float64 arguments.
        arguments: Names of the tensor arguments, `x` first.
        differentiable: Arguments that have derivatives, by default all.
        parameter_shape: Shape of every argument but `x`, given a sample and the argument's name.
        samples: The inputs that reference and kernels are tested on.
        small: A few elements, for derivatives by differences, compilers and vmap.
        tiny: Fewer still, for derivatives of order four.
        large: Past the sizes up to which kernels hold rows, tiles and sums at once, in float64 on every chip.
        not_kept: Arguments, or `"y"`, that the forward pass must not keep for the backward pass.
        function: The op of this package with all of its outputs; by default `call` with `primitives.functional`.
        torch_function: `y` of torch's own; by default `call` with `torch.nn.functional`.
        is_linear: Whether the op is its own derivative: primitives of the vjp and jvp are that of the op.
        first: The argument that the primitives call `x`.
        like_first: Arguments that have the dtype of `x` in a mixed sample too.
        num_kept: Tensors of the size of `y` that the forward pass keeps for the backward pass.
        rounds_once: Whether what its derivatives are given has been rounded in no way that sums of theirs show.
        rounds_twice: Primitives whose outputs need not be rounded once: the input of the value was rounded before, as a
            sum, or the tangent is taken from the rounded value.
        operands: Random operands of the launchers for a workload, whose `steps` are the calls of its modes.
        passes: By the bench's mode, how often tensors of the size of x are touched at least; empty where a copy is
            nothing to compare with.
        products: By the bench's mode, how many products of matrices it takes over all pairs; empty where memory binds.
        options: Keyword arguments of `call` and `truth` for a workload.
        has_channels: Whether statistics belong to channels, in dim 1.
        num_params: How many parameters it has, of which the bench takes derivatives.
        constants: Makes the arguments behind these, of which it takes none, by a function that draws normal numbers of
            a shape and a dtype.
        formula: `truth` of the bench's arguments, where that is another function.
        kink: The input of a ReLU, of the same arguments: near 0 a rounding decides whether a derivative is 0.
        family: Name of the op whose primitives it calls, where not its own. The work of torch and compilers on a
            primitive is tested with the op of that name alone.
        function_name: Of the public function, where that is not the name of the op.
        like: Name of the op whose lines of the tables of calls and workloads it has too, instead of its own.
    """

    name: str
    call: Callable[..., Any]
    truth: Callable[..., Any]
    arguments: tuple[str, ...]
    samples: tuple[Sample, ...]
    small: Sample
    tiny: Sample
    large: tuple[Sample, ...]
    not_kept: tuple[str, ...]
    differentiable: tuple[str, ...] = ()
    operands: Callable[[Workload], Any] = lambda workload: None
    passes: Mapping[str, int] = dataclasses.field(default_factory=lambda: PASSES)
    products: Mapping[str, int] = dataclasses.field(default_factory=dict)
    options: Callable[[Workload], dict[str, Any]] = lambda workload: {}
    has_channels: bool = False
    num_params: int = 0
    constants: Callable[[Workload, Callable[..., Tensor]], tuple[Tensor, ...]] = lambda workload, draw: ()
    formula: Any = None
    kink: Any = None
    parameter_shape: Callable[[Sample, str], tuple[int, ...]] = lambda sample, name: ()
    function: Any = None
    torch_function: Any = None
    is_linear: bool = False
    rounds_once: bool = True
    rounds_twice: tuple[str, ...] = ()
    first: str = "x"
    like_first: tuple[str, ...] = ()
    num_kept: int = 1
    family: str = ""
    function_name: str = ""
    like: str = ""

    def __post_init__(self) -> None:
        for name, functions in (("function", pr.functional), ("torch_function", F)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, functools.partial(self.call, functions))
        object.__setattr__(self, "differentiable", self.differentiable or self.arguments)
        RECORDS.setdefault(self.name, self)

    @property
    def modes(self) -> tuple[str, ...]:
        """Those whose calls are known; the bench's of an op that has no kernels of its own."""
        return tuple(steps().get(self.like or self.name, KERNEL_MODES))

    def calls(self, workload: Workload, mode: str) -> list[Call]:
        """The calls of launchers that a mode of a workload makes, on random numbers."""
        return self.operands(workload).steps(self.like or self.name, mode)

    def workloads(self, use: str) -> tuple[Workload, ...]:
        """Those that the table has for a use."""
        found = workloads_of(self.like or self.name, use, self.modes)
        return tuple(dataclasses.replace(workload, op=self.name) for workload in found)

    def sibling(self, name: str, arguments: tuple[str, ...], **changes: Any) -> Op:
        """The record of another op on the same primitives, with these of the arguments, and few of the samples."""
        absent = set(self.arguments) - set(arguments)
        samples = {
            (s.shape, s.options, kept, s.mixed): dataclasses.replace(s, absent=kept)
            for s in self.samples
            for kept in [tuple(argument for argument in s.absent if argument not in absent)]
        }
        family = {
            "family": self.family or self.name,
            "arguments": arguments,
            "differentiable": tuple(argument for argument in self.differentiable if argument not in absent),
            "not_kept": tuple(argument for argument in self.not_kept if argument not in absent),
            "samples": tuple(samples.values()),
        }
        own = dict.fromkeys(("function", "torch_function")) | {"function_name": ""}
        return dataclasses.replace(self, name=name, **{**family, **own, **changes})

    @property
    def public(self) -> str:
        """Name of the public function."""
        return self.function_name or self.name

    @property
    def narrower(self) -> tuple[torch.dtype, ...]:
        """Supported dtypes but float64."""
        return tuple(dtype for dtype in DTYPES if dtype is not torch.float64)

    def primitive(self, suffix: str) -> Primitive:
        """That of the name of the op with a suffix."""
        return registered_primitives()[f"primitives::{self.family or self.name}{'' if self.is_linear else suffix}"]

    @property
    def forward(self) -> Primitive:
        """That of the value."""
        return self.primitive("")

    @property
    def bwd(self) -> Primitive:
        """That of the cotangents."""
        return self.primitive("_bwd")

    @property
    def jvp(self) -> Primitive:
        """That of the tangent."""
        return self.primitive("_jvp")

    @property
    def fwd_jvp(self) -> Primitive | None:
        """That which forward mode calls instead of `forward` and `jvp` where it is outermost, if the op has one."""
        return registered_primitives().get(f"primitives::{self.family or self.name}_fwd_jvp")

    @property
    def first_order(self) -> tuple[Primitive, ...]:
        """Primitives of the value and the first derivatives, each once."""
        found = (self.forward, self.bwd, self.jvp, self.fwd_jvp)
        return tuple(dict.fromkeys(primitive for primitive in found if primitive is not None))

    def is_rounded_once(self, overload: Any) -> bool:
        """Whether the outputs of a primitive are what `rounds_once` says."""
        twice = (getattr(self, name) for name in self.rounds_twice)
        return self.rounds_once and all(overload is not primitive.overload for primitive in twice)

    @property
    def second_order(self) -> tuple[Primitive, ...]:
        """Primitives of the derivatives of `bwd` and `jvp`; without any, these are decomposed."""
        names = [f"primitives::{self.family or self.name}_{suffix}" for suffix in ("double_backward", "bwd_jvp")]
        return tuple(registered_primitives()[name] for name in names if name in registered_primitives())

    def perturbable(self, sample: Sample) -> list[str]:
        """Differentiable arguments that are tensors in `sample`."""
        return [name for name in self.differentiable if name not in sample.absent]

    def inputs(self, sample: Sample, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
        """Arguments by name, in the layout of the sample."""
        parameter_dtype = torch.float32 if sample.mixed and dtype in LOW_PRECISION else dtype
        made: dict[str, Tensor | None] = {}
        for position, name in enumerate(self.arguments):
            shape = sample.shape if position == 0 else self.parameter_shape(sample, name)
            values = normal(shape, position, mean=0.5)
            if name in POSITIVE:
                values = 0.5 + values.abs()
            values = values.to(device, dtype if position == 0 or name in self.like_first else parameter_dtype)
            made[name] = None if name in sample.absent else arranged(values, sample.layout)
        return made

    def outputs(self, inputs: dict[str, Tensor | None], sample: Sample) -> tuple[Tensor, ...]:
        """All tensors that the public function returns, `y` first."""
        return _as_tuple(self.function(*inputs.values(), **dict(sample.options)))

    def true_outputs(self, inputs: dict[str, Tensor | None], sample: Sample) -> tuple[Tensor, ...]:
        """The same by the definition, in float64."""
        wide = [None if value is None else value.double() for value in inputs.values()]
        return _as_tuple(self.truth(*wide, **dict(sample.options)))

    def of(
        self, names: Sequence[str], inputs: dict[str, Tensor | None], sample: Sample, *, true: bool = False
    ) -> Callable[..., Tensor]:
        """`y` as a function of the arguments `names` alone, the others as in `inputs`."""
        outputs = self.true_outputs if true else self.outputs

        def y(*values: Tensor) -> Tensor:
            return outputs({**inputs, **dict(zip(names, values, strict=True))}, sample)[0]

        return y


def _as_tuple(out: Any) -> tuple[Tensor, ...]:
    return tuple(value for value in out if value is not None) if isinstance(out, tuple) else (out,)
