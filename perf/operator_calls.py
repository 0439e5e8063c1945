"""Calls of torch's operators below autograd: those that its OpInfo database makes, and some that it lacks."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import fold, group_norm, scaled_dot_product_attention, unfold
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from primitives._audit.table import RIGHT_SIDE, name_of

__all__ = ["ELEMENTS", "Call", "Recorder", "as_real", "recorded"]

# Calls of an operator that are kept, the elements that their arguments have at most, and samples of an entry.
CALLS, ELEMENTS, SAMPLES = 24, 3000, 16
_DTYPES = (torch.float64, torch.complex128)


def as_real(x: Any) -> Any:
    """A tensor of complex numbers by their parts."""
    return torch.view_as_real(x) if isinstance(x, torch.Tensor) and x.is_complex() else x


class Call(NamedTuple):
    """A call of an operator, flattened; the tensors at `positions` are differentiated, complex ones by their parts."""

    operator: OpOverload
    values: list[Any]
    spec: Any
    positions: list[int]

    def __call__(self, *xs: Tensor) -> list[Tensor]:
        """Its outputs, with `xs` in the places of the tensors that are differentiated."""
        values = list(self.values)
        for position, x in zip(self.positions, xs, strict=True):
            values[position] = torch.view_as_complex(x) if values[position].is_complex() else x
        args, kwargs = tree_unflatten(values, self.spec)
        # Code that draws numbers draws the same ones each time.
        torch.manual_seed(0)
        out = self.operator(*args, **kwargs)
        if self.operator is torch.ops.aten.linalg_eig.default:
            # Eigenvectors have any phase, these products have none.
            out = out[0], out[1].unsqueeze(-2) * out[1].unsqueeze(-3).conj()
        return [as_real(y) for y in (out if isinstance(out, (tuple, list)) else [out])]


class Recorder(TorchDispatchMode):
    """Shows each call of an operator that is made inside: the operator, its arguments, and those by name."""

    def __init__(self, see: Callable[[OpOverload, tuple, dict[str, Any]], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.see(func, args, kwargs or {})
        return func(*args, **kwargs or {})


def _keep(found: dict[str, list[Call]], func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Keeps a functional call."""
    values, spec = tree_flatten((args, kwargs))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    known = found[name_of(func, args)]
    is_small = 0 < sum(x.numel() for x in tensors) <= ELEMENTS and all(x.layout == torch.strided for x in tensors)
    if is_small and not func._schema.is_mutable and len(known) < CALLS:
        copies = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]
        positions = [n for n, x in enumerate(copies) if isinstance(x, torch.Tensor) and x.dtype in _DTYPES]
        known.append(Call(func, copies, spec, positions))
        if func is torch.ops.aten._linalg_solve_ex.default:
            found[name_of(func, args) + RIGHT_SIDE].append(Call(func, copies, spec, positions[1:]))


def _beside_the_database() -> Iterator[Callable[[], Any]]:
    """Calls that it lacks."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    x = random(2, 4, 3, 3)
    yield lambda: group_norm(x.to(memory_format=torch.channels_last), 2, random(4), random(4))
    yield lambda: torch._weight_norm(random(3, 4), random(3, 1), 0)  # type: ignore[attr-defined] - no stub
    q, k, v = (random(1, 2, 4, 3) for _ in range(3))
    yield lambda: scaled_dot_product_attention(q, k, v)
    yield lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
    # A row that sees nothing.
    mask = torch.tensor([[True, False], [False, False]])
    yield lambda: torch.ops.aten._safe_softmax(torch.where(mask, random(2, 2), -torch.inf), -1)
    yield lambda: torch.linalg.vector_norm(random(2, 3), dim=1)
    yield lambda: torch.where(mask, random(2, 2), 0.0).cumprod(0)
    yield lambda: random(2, 2).abs().pow(torch.where(mask, random(2, 2), 0.0))
    yield lambda: torch.where(mask, random(2, 2), 0.0).pow(torch.arange(2))
    yield lambda: torch.pow(0.0, random(3).abs())
    factor = random(3, 3, 3).tril() + 2 * torch.eye(3)
    yield lambda: torch.cholesky_inverse(factor[0])
    yield lambda: torch.cholesky_solve(random(3, 3), factor)
    yield lambda: torch.sinc(torch.where(mask, random(2, 2), 0.0))
    yield lambda: torch.logaddexp(torch.where(mask, random(2, 2), -torch.inf), random(2, 2))
    yield lambda: random(2).scatter_reduce(0, torch.tensor([0, 1, 1]), random(3), "prod")
    yield lambda: torch.clamp_max(torch.clamp(random(9), -1, 0.5), 0.2)
    yield lambda: fold(unfold(random(1, 2, 4, 4), 2), (4, 4), 2)
    yield lambda: torch.view_as_real(torch.view_as_complex(random(3, 2)))
    yield lambda: torch.fft.irfft(torch.fft.fft(torch.fft.rfft(random(3, 6))))
    yield lambda: torch.polar(random(3).abs(), random(3)).abs()
    labels, count = torch.tensor([0, 3, 1]), torch.tensor(3.0, dtype=torch.float64)
    yield lambda: torch.ops.aten._log_softmax_backward_data(random(3, 4), random(3, 4), 1, torch.float64)
    yield lambda: torch.ops.aten.nll_loss_backward(random(), random(3, 4), labels, None, 1, -100, count)
    images = labels.reshape(3, 1, 1)
    yield lambda: torch.ops.aten.nll_loss2d_backward(random(), random(3, 4, 1, 1), images, None, 1, -100, count)
    yield lambda: torch.view_as_complex(random(3, 2)).sgn()
    yield lambda: torch.linalg.eig(torch.view_as_complex(random(3, 3, 2)))


def recorded(database: Iterable[Any], device: str = "cpu") -> dict[str, list[Call]]:
    """Calls by the name of their operator: those of `database`, and some beside it."""
    found: dict[str, list[Call]] = defaultdict(list)
    recorder = Recorder(functools.partial(_keep, found))
    with torch.device(device):
        for run in _beside_the_database():
            with recorder:
                run()
    for op in database:
        if not op.supports_autograd or torch.float64 not in op.supported_dtypes(device):
            continue
        samples = op.sample_inputs(device, torch.float64, requires_grad=True)
        for _, sample in zip(range(SAMPLES), samples, strict=False):
            try:
                with recorder:
                    op(sample.input, *sample.args, **sample.kwargs)
            # The database has samples of which torch says that it has no kernel for them.
            except (RuntimeError, NotImplementedError):
                continue
    return {name: found[name] for name in sorted(found) if found[name]}
