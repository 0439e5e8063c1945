"""Properties of every call of a primitive, whoever serves it."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import primitives as pr
from tests.support import assert_close, assert_rounded, coarsest

BATCH = 2


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a primitive as the dispatcher saw it."""

    overload: Any
    args: tuple

    def __str__(self) -> str:
        return self.overload._schema.name.split("::")[1]

    @property
    def names(self) -> list[str]:
        return [argument.name for argument in self.overload._schema.arguments]

    def argument(self, name: str) -> Any:
        return self.args[self.names.index(name)]

    @property
    def output_mask(self) -> tuple:
        """Which outputs are wanted, where a call can choose."""
        return tuple(self.argument("output_mask")) if "output_mask" in self.names else ()

    @property
    def tensors(self) -> list[int]:
        """Positions of the arguments that are tensors in this call."""
        return [i for i, value in enumerate(self.args) if isinstance(value, torch.Tensor)]

    def outputs(self, args: Sequence[Any] | None = None) -> tuple[Tensor, ...]:
        """Outputs of the primitive, for other arguments if some are given."""
        out = self.overload(*(self.args if args is None else args))
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def parts(call: Call, value: pr._core.Primitive, jvp: pr._core.Primitive) -> tuple[Call, Call]:
    """The calls of `value` and of `jvp` for which a call of the operator of both stands."""
    given = dict(zip(call.names, call.args, strict=True))
    first = Call(value.overload, tuple(given[name] for name in value.spec.arguments))
    given |= zip(value.spec.outputs, first.outputs(), strict=True)
    return first, Call(jvp.overload, tuple(given[name] for name in jvp.spec.arguments))


class CallRecorder(TorchDispatchMode):
    """Collects the calls of this package's primitives that are made inside it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    @property
    def names(self) -> set[str]:
        return {str(call) for call in self.calls}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace.startswith("primitives"):
            plain = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
            padding = [a.default_value for a in func._schema.arguments[len(plain) :]]
            self.calls.append(Call(func, (*plain, *padding)))
        return func(*args, **(kwargs or {}))


def layout_of(x: Tensor) -> tuple:
    """Shape, dtype and the strides that mean something: axes of one element, and empty tensors, have any."""
    strides = [s for size, s in zip(x.shape, x.stride(), strict=True) if size > 1] if x.numel() else []
    return tuple(x.shape), x.dtype, strides


def distinct(calls: Iterable[Call]) -> list[Call]:
    """One call for each primitive, set of present arguments and set of wanted outputs."""
    found: dict[tuple, Call] = {}
    for call in calls:
        found.setdefault((call.overload, tuple(call.tensors), call.output_mask), call)
    return list(found.values())


def fullest(calls: Iterable[Call], primitive: Any) -> Call:
    """Of the calls of `primitive`, the one with the most tensors and the most wanted outputs."""
    candidates = [call for call in calls if call.overload is primitive.overload]
    return max(candidates, key=lambda call: (len(call.tensors), sum(call.output_mask)))


def in_float64(call: Call) -> tuple[Tensor, ...]:
    """Outputs of the reference in float64, for the same numbers."""
    args = list(call.args)
    for i, value in enumerate(call.args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            # dtype= means a cast before the operation.
            cast = call.argument("output_dtype") if "output_dtype" in call.names else None
            args[i] = value.to(cast or value.dtype).double()
        elif isinstance(value, torch.dtype):
            args[i] = torch.float64
    with pr.use_backend("reference"):
        return call.outputs(args)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all numbers are the same, NaN among them."""
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def check_call(call: Call, *, fake: bool = True, roundings: int = 1, rounds_once: bool = True) -> None:
    """Outputs are sums in the accumulation dtype, rounded once, in memory of their own; no argument is written.

    With `fake`, they are laid out as a compiler is told. `check_rules` holds each operator to more, at one point.
    """
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in call.args]
    outputs, expected = call.outputs(), in_float64(call)
    tensors = [call.args[i] for i in call.tensors]
    dtypes = {t.dtype for t in tensors if t.is_floating_point()} | {d for d in call.args if isinstance(d, torch.dtype)}
    # Derivatives through dtype= are rounded to the coarser of two dtypes, and cast.
    crosses = len(dtypes) > 1 and "y_dtype" not in call.names and any(isinstance(a, torch.dtype) for a in call.args)
    wide = torch.float64 if dtypes == {torch.float64} else torch.float32
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    if not tensors[0].numel():
        # Statistics of nothing mean nothing.
        expected = [want.where(~want.isnan(), got) for got, want in zip(outputs, expected, strict=True)]
    for i, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        via = coarsest(got.dtype, *dtypes) if crosses else got.dtype
        if rounds_once:
            assert_rounded(got, want, via, wide, roundings + crosses, f"{call}, output {i}")
        else:
            assert_close(got, want, dtype=got.dtype, precision=coarsest(*dtypes), order=2, what=f"{call}, output {i}")
        assert not got.numel() or got.untyped_storage().data_ptr() not in storages, f"{call}: output {i} is not a copy"
        assert not got._is_view(), f"{call}: output {i} is a view, which torch refuses to write to"
        storages.add(got.untyped_storage().data_ptr())
    for a, b in zip(call.args, before, strict=True):
        assert not isinstance(a, torch.Tensor) or same(a, b), f"{call} writes into an argument"
    if fake:
        check_fake(call, outputs)


def check_fake(call: Call, outputs: Sequence[Tensor]) -> None:
    """A call on tensors without data has the shapes, dtypes and strides of the real call."""
    args = [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, torch.Tensor) else a
        for a in call.args
    ]
    assert list(map(layout_of, outputs)) == list(map(layout_of, call.outputs(args))), str(call)


def batched(value: Tensor, axis: int) -> Tensor:
    """`BATCH` different versions of `value` along a new axis; positive values stay positive, integers integers."""
    if value.dtype == torch.bool:
        return torch.stack([value.roll(i, -1) for i in range(BATCH)], dim=axis)
    if not value.is_floating_point():
        return torch.stack([value + i for i in range(BATCH)], dim=axis)
    return torch.stack([value * (1 + 0.25 * i) + 0.125 * i for i in range(BATCH)], dim=axis)


def check_vmap_of_call(call: Call, axis: int, chosen: Iterable[Sequence[int]]) -> None:
    """`vmap` of a primitive over each of the chosen sets of its tensors equals the loop; the axis lies at `axis`."""
    tensors = [call.args[i] for i in call.tensors]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(call.tensors, tensors, strict=True))
        return call.outputs([given.get(i, a) for i, a in enumerate(call.args)])

    # The first version of each argument is itself, whatever is batched.
    first = function(*tensors)
    for positions in chosen:
        in_dims = tuple(axis if i in positions else None for i in range(len(tensors)))
        full = [batched(x, axis) if i in positions else x for i, x in enumerate(tensors)]
        actual = torch.vmap(function, in_dims)(*full)
        each = ([x.select(axis, k) if i in positions else x for i, x in enumerate(full)] for k in range(1, BATCH))
        rows = (first, *(function(*values) for values in each))
        for number, (got, *want) in enumerate(zip(actual, *rows, strict=True)):
            assert_close(got, torch.stack(want), what=f"{call}, batched {positions}, output {number}")


def alone_and_together(call: Call) -> list[tuple[int, ...]]:
    """Each tensor of `call` by itself, and all of them."""
    return [*[(i,) for i in range(len(call.tensors))], tuple(range(len(call.tensors)))]
