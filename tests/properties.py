"""What every op has to satisfy, as functions of one record: the reference and the kernels are held to the same."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import LAYOUTS, assert_close, coarsest, like, subsets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from tests.op_cases import OpCase, Sample

BATCH = 2


# Against the definition.


def leaves(inputs: dict[str, Tensor | None], names: Sequence[str]) -> dict[str, Tensor | None]:
    """`inputs` with the named ones requiring grad; strides stay."""
    return {n: v.detach().requires_grad_() if n in names and v is not None else v for n, v in inputs.items()}


def output_dtype(case: OpCase, sample: Sample, x: Tensor) -> torch.dtype:
    """Dtype of `y`: the `dtype` option where there is one, else that of `x`."""
    return dict(sample.options).get("dtype") or x.dtype


def check_outputs(case: OpCase, sample: Sample, inputs: dict[str, Tensor | None]) -> None:
    """All outputs have the value of the definition; `y` has the dtype asked for, state that of the state given."""
    actual, expected = case.outputs(inputs, sample), case.true_outputs(inputs, sample)
    assert len(actual) == len(expected)
    state_dtypes = [v.dtype for n, v in inputs.items() if n not in case.differentiable and v is not None]
    dtypes = [output_dtype(case, sample, inputs["x"]), *state_dtypes]
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert_close(got, want, dtype=dtypes[i], what=f"output {i}")


def cotangent_layout(sample: Sample) -> str:
    """Another layout than that of the arguments."""
    return LAYOUTS[(LAYOUTS.index(sample.layout) + 1) % len(LAYOUTS)]


def check_vjp(case: OpCase, sample: Sample, inputs: dict[str, Tensor | None], names: Sequence[str]) -> None:
    """Cotangents of the arguments `names` have the value of the definition's, in the dtypes of the arguments."""
    ours, theirs = leaves(inputs, names), leaves({n: _double(v) for n, v in inputs.items()}, names)
    y, true_y = case.outputs(ours, sample)[0], case.true_outputs(theirs, sample)[0]
    y_bar = like(y, seed=7, layout=cotangent_layout(sample))
    actual = torch.autograd.grad(y, [ours[n] for n in names], y_bar)
    expected = torch.autograd.grad(true_y, [theirs[n] for n in names], y_bar.to(true_y.dtype))
    for name, got, want in zip(names, actual, expected, strict=True):
        dtype = inputs[name].dtype
        # Through dtype= the cotangent passes the coarser of two dtypes.
        narrow = [y.dtype] if "dtype" in dict(sample.options) else []
        assert_close(got, want, dtype=dtype, precision=coarsest(dtype, *narrow), what=f"{name}_bar")


def check_jvp(case: OpCase, sample: Sample, inputs: dict[str, Tensor | None], names: Sequence[str]) -> None:
    """The tangent of `y` for tangents of the arguments `names` alone has the value of the definition's."""
    # torch refuses a dense tangent of an expanded primal, so tangents share the layout of their primals.
    dots = {n: like(inputs[n], seed=11 + i, layout=sample.layout) for i, n in enumerate(names)}
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(v, dots[n]) if n in dots else v for n, v in inputs.items()}
        y, y_dot = forward_ad.unpack_dual(case.outputs(duals, sample)[0])
    primals = tuple(inputs[n].double() for n in names)
    tangents = tuple(dots[n].double() for n in names)
    _, expected = torch.func.jvp(case.of(names, inputs, sample, true=True), primals, tangents)
    assert_close(y_dot, expected, dtype=y.dtype, what="y_dot")


def _double(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.double()


# Calls of the primitives that lie under a public function.


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a primitive as the dispatcher saw it."""

    overload: Any
    args: tuple

    def __str__(self) -> str:
        return self.overload._schema.name.split("::")[1]

    @property
    def names(self) -> list[str]:
        """Names of the arguments."""
        return [argument.name for argument in self.overload._schema.arguments]

    def argument(self, name: str) -> Any:
        """Argument `name`."""
        return self.args[self.names.index(name)]

    @property
    def tensors(self) -> list[int]:
        """Positions of the arguments that are tensors in this call."""
        return [i for i, value in enumerate(self.args) if isinstance(value, torch.Tensor)]

    def outputs(self, args: Sequence[Any] | None = None) -> tuple[Tensor, ...]:
        """Outputs of the primitive, for other arguments if some are given."""
        out = self.overload(*(self.args if args is None else args))
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)


class CallRecorder(TorchDispatchMode):
    """Collects the calls of this package's primitives that are made inside it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Note the call and run it."""
        if func.namespace == "primitives":
            plain = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
            padding = [a.default_value for a in func._schema.arguments[len(plain) :]]
            self.calls.append(Call(func, (*plain, *padding)))
        return func(*args, **(kwargs or {}))


def vjp_call(case: OpCase, sample: Sample, inputs: dict[str, Tensor | None], names: Sequence[str]) -> Call:
    """The call of the backward primitive for cotangents of the arguments `names`."""
    wanted = leaves(inputs, names)
    y = case.outputs(wanted, sample)[0]
    with CallRecorder() as recorder:
        torch.autograd.grad(y, [wanted[n] for n in names], like(y, seed=7, layout=cotangent_layout(sample)))
    (call,) = recorder.calls
    return call


def jvp_call(case: OpCase, sample: Sample, inputs: dict[str, Tensor | None], names: Sequence[str]) -> Call:
    """The call of the jvp primitive for tangents of the arguments `names`."""
    with forward_ad.dual_level(), CallRecorder() as recorder:
        dots = {n: like(inputs[n], seed=3, layout=sample.layout) for n in names}
        duals = {n: forward_ad.make_dual(v, dots[n]) if n in dots else v for n, v in inputs.items()}
        case.outputs(duals, sample)
    # The forward call comes first; of a linear op it is one of the same primitive.
    *_, call = [c for c in recorder.calls if c.overload is case.jvp.overload]
    return call


def recorded_calls(
    case: OpCase, sample: Sample, inputs: dict[str, Tensor | None], *, every_subset: bool = False
) -> list[Call]:
    """Forward, vjp and jvp calls, for each perturbable argument alone and all together, or for every subset of them."""
    with CallRecorder() as recorder:
        case.outputs(inputs, sample)
    names = case.perturbable(sample)
    chosen = [s for s in subsets(names) if every_subset or len(s) in (1, len(names))]
    vjps = [vjp_call(case, sample, inputs, subset) for subset in chosen]
    return [*recorder.calls, *vjps, *[jvp_call(case, sample, inputs, subset) for subset in chosen]]


def layout_of(x: Tensor) -> tuple:
    """Shape, dtype and the strides that mean something: axes of one element, and empty tensors, have any."""
    strides = [s for size, s in zip(x.shape, x.stride(), strict=True) if size > 1] if x.numel() else []
    return tuple(x.shape), x.dtype, strides


def check_fake(call: Call) -> None:
    """A call on tensors without data has the shapes, dtypes and strides of the real call."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in call.args]
        fakes = call.outputs(args)
    for i, (fake, real) in enumerate(zip(fakes, call.outputs(), strict=True)):
        assert layout_of(fake) == layout_of(real), f"{call}: output {i}"


# Batching.


def batched(value: Tensor, axis: int) -> Tensor:
    """`BATCH` different versions of `value` along a new axis; positive values stay positive, integers integers."""
    if not value.is_floating_point():
        return torch.stack([value + i for i in range(BATCH)], dim=axis)
    return torch.stack([value * (1 + 0.25 * i) + 0.125 * i for i in range(BATCH)], dim=axis)


def check_vmap(
    function: Callable[..., tuple[Tensor, ...]], args: Sequence[Any], positions: Sequence[int], axis: int, what: str
) -> None:
    """`vmap` over the arguments at `positions` equals the loop over samples; the axis lies at `axis` in all of them."""
    in_dims = tuple(axis if i in positions else None for i in range(len(args)))
    full = [batched(a, axis) if i in positions else a for i, a in enumerate(args)]
    actual = torch.vmap(function, in_dims)(*full)
    rows = [
        function(*[a.select(axis, i) if dim is not None else a for a, dim in zip(full, in_dims, strict=True)])
        for i in range(BATCH)
    ]
    for number, (got, *want) in enumerate(zip(actual, *rows, strict=True)):
        assert_close(got, torch.stack(want), what=f"{what}, batched {positions}, output {number}")


def with_its_statistics(call: Call, args: list) -> list:
    """`args` of `call` with mean and rstd, where it takes them, those of x: implementations may recompute them."""
    if "rstd" not in call.names:
        return args
    options = dict(zip(call.names, args, strict=True))
    x, norm_ndim = options["x"], options.get("norm_ndim")
    axes = [i for i in range(x.dim()) if i != 1] if norm_ndim is None else list(range(-norm_ndim, 0))
    variance, mean = torch.var_mean(x, axes, correction=0)
    true = {"mean": mean, "rstd": (variance + options["eps"]).rsqrt()}
    # What is given still counts as batched or not.
    return [true[n] + 0 * arg if n in true else arg for n, arg in zip(call.names, args, strict=True)]


def check_vmap_of_call(call: Call, axis: int, chosen: Iterable[Sequence[int]]) -> None:
    """`check_vmap` of a primitive for the tensors of `call`, batched over each of the chosen sets of them."""

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        args = list(call.args)
        for position, tensor in zip(call.tensors, tensors, strict=True):
            args[position] = tensor
        return call.outputs(with_its_statistics(call, args))

    tensors = [call.args[i] for i in call.tensors]
    for positions in chosen:
        names = [call.names[call.tensors[i]] for i in positions]
        check_vmap(function, tensors, positions, axis, f"{call} over {names}")


def alone_and_together(call: Call) -> list[tuple[int, ...]]:
    """Each tensor of `call` by itself, and all of them."""
    count = len(call.tensors)
    return [*[(i,) for i in range(count)], tuple(range(count))]
