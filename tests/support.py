"""Shared by the generic tests: tolerances, comparisons, nestings of transforms."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from perf.ops.samples import arranged, normal
from primitives._audit.nestings import difference
from primitives._audit.nestings import nested as directional

DOUBLE = {"dtype": torch.float64}
# Errors of torch for wrong calls. A mistake in a test itself is none of these, so it cannot pass for one.
TORCH_ERRORS = (RuntimeError, ValueError, TypeError, IndexError)

# Allowed error in units in the last place of the largest expected element (or of 1, the size of the inputs). Results in
# low precision are sums in float32 that are rounded once; the second unit is for log-softmax, whose derivatives see the
# rounded output. In float32 and float64 the sums themselves round: the longest sample has 257 terms, and rstd
# multiplies what they lose by up to a few tens.
ULPS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 64, torch.float64: 64}
# Each further order of derivative multiplies sums by sums, and by another rstd. In low precision it also sees what came
# before it rounded: there the calls of primitives are held to one rounding each (`assert_rounded`).
ULPS_PER_ORDER = 8


def dtype_id(dtype: torch.dtype) -> str:
    """Short name of a dtype, for test ids."""
    return str(dtype).removeprefix("torch.")


def tolerance(dtype: torch.dtype, order: int = 1) -> float:
    """Allowed error of a derivative of the given order, relative to the largest element."""
    return ULPS[dtype] * ULPS_PER_ORDER ** max(order - 1, 0) * torch.finfo(dtype).eps


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype with the largest unit in the last place."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def assert_close(
    actual: Tensor,
    expected: Tensor,
    *,
    dtype: torch.dtype | None = None,
    precision: torch.dtype | None = None,
    order: int = 1,
    what: str = "result",
) -> None:
    """Compare shape, dtype, NaNs and values.

    `actual` must have the dtype `dtype` (default: that of `expected`) and the accuracy of `precision` (`dtype`).
    """
    dtype = dtype or expected.dtype
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == dtype, f"{what}: dtype {actual.dtype}, expected {dtype}"
    scale = expected.detach().nan_to_num().abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.detach().double(),
        expected.detach().double(),
        rtol=0.0,
        atol=tolerance(precision or dtype, order) * max(scale, 1.0),
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def assert_rounded(
    actual: Tensor, expected: Tensor, via: torch.dtype, wide: torch.dtype, roundings: int = 1, what: str = "result"
) -> None:
    """`actual` is `expected`, in float64, to the accuracy of sums in `wide`, and rounded to `via` once, or as told."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    scale = expected.nan_to_num().abs().max().item() if expected.numel() else 0.0
    before = (roundings - 1) * torch.finfo(via).eps / 2 * expected.abs()
    slack = tolerance(wide) * max(scale, 1.0) + before
    ends = torch.stack([expected - slack, expected + slack])
    ends = torch.cat([ends, ends.to(via).double()])
    got = actual.detach().double()
    inside = ((ends.amin(0) <= got) & (got <= ends.amax(0))) | (expected.isnan() & got.isnan())
    if not inside.all():
        worst = (got - expected)[~inside].abs().max().item()
        raise AssertionError(f"{what}: off by {worst:.2e} of at most {scale:.2e}, rounded to {via} more than that")


def assert_raises(
    error: type, words: Iterable[str], call: Callable[[], Any], torchs: Callable[[], Any] | None = None
) -> None:
    """`call` raises `error`, which says `words`, and is what a call of torch raises that fails for the same reason."""
    with pytest.raises(error) as raised:
        call()
    assert raised.value.__cause__ is None
    assert all(word in str(raised.value) for word in words), str(raised.value)
    if torchs is not None:
        with pytest.raises(TORCH_ERRORS) as theirs:
            torchs()
        assert isinstance(raised.value, theirs.type), f"torch raises {theirs.type.__name__}: {theirs.value}"


def noting(note: Callable[[torch.fx.GraphModule], Any]) -> Any:
    """A backend of `torch.compile` that tells `note` of each graph, forward and backward, and runs it as it is."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        note(module)
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def in_another_thread(run: Callable[[], Any]) -> Any:
    """What a function returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def torchs_module(name: str) -> Any:
    """Torch's entry of a module of its own: the table takes seconds to make, and few processes run such tests."""
    from torch.testing._internal.common_modules import module_db

    return next(info for info in module_db if info.module_cls.__name__ == name)


def torchs_samples(info: Any, dtype: torch.dtype, *, requires_grad: bool = True) -> Iterable[Any]:
    """Torch's samples of an operator, as `info.sample_inputs` has them after it has looked for its caller, a second."""
    torch.manual_seed(0)
    return info.sample_inputs_func(info, "cpu", dtype, requires_grad)


def data(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, those of a seed the same in every dtype."""
    return normal(shape, seed).to(dtype)


def randn(*shape: int) -> Tensor:
    """Normal numbers in float64, of torch's own generator."""
    return torch.randn(shape, **DOUBLE)


def plain_layer_norm(x: Tensor, eps: float = 1e-2) -> Tensor:
    """Layer norm over the last axis by the formula."""
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()


def like(x: Tensor, seed: int, layout: str = "contiguous") -> Tensor:
    """Normal numbers with the shape, dtype and device of `x`."""
    return arranged(normal(x.shape, seed).to(x.device, x.dtype), layout)


def subsets(items: Iterable[Any]) -> Iterator[tuple]:
    """All non-empty subsets."""
    items = list(items)
    return itertools.chain.from_iterable(itertools.combinations(items, r) for r in range(1, len(items) + 1))


MODES = {"f": torch.func.jacfwd, "r": torch.func.jacrev}


def nestings(*orders: int) -> list[str]:
    """All words over f (jacfwd) and r (jacrev) of the given lengths; the first letter is the outermost transform."""
    return ["".join(word) for order in orders for word in itertools.product("fr", repeat=order)]


def nested(function: Any, word: str, argnums: int | Sequence[int] = 0) -> Any:
    """`function` differentiated once per letter of `word`; `argnums` may give an argument for each letter."""
    positions = [argnums] * len(word) if isinstance(argnums, int) else argnums
    for letter, position in zip(reversed(word), reversed(positions), strict=True):
        function = MODES[letter](function, argnums=position)
    return function


def right_nestings(
    function: Callable[..., Tensor], xs: Sequence[Tensor], directions: Sequence[Tensor]
) -> Iterator[tuple[str, float]]:
    """Each nesting to order 3, held to differences of the nesting below and to the others, and what it gives."""
    below = function
    for order in (1, 2, 3):
        truth, scale = difference(below, directions)(*xs).item(), max(abs(below(*xs).item()), 1.0)
        first = directional(function, directions, "f" * order)(*xs).item()
        for nesting in nestings(order):
            found = first if nesting == "f" * order else directional(function, directions, nesting)(*xs).item()
            assert found == pytest.approx(truth, rel=1e-6, abs=1e-7 * scale), nesting
            assert found == pytest.approx(first, rel=1e-10, abs=1e-10 * scale), nesting
            yield nesting, found
        below = directional(function, directions, "f" * order)
