"""Drawn calls of the functions that bear torch's names: values, gradients and refusals are torch's.

`make test` draws the same few each time, `make fuzz` others, many of them.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

import primitives as pr

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES or 100,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
HALF = (torch.float16, torch.bfloat16)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
SIZES = st.sampled_from((2, 3, 4, 1, 0))
FLOATS = st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16))
DTYPES = FLOATS | st.sampled_from((torch.int64, torch.bool, torch.complex64))


@dataclasses.dataclass
class Given:
    """A tensor to be made: twice, as each function may write into its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    seed: int
    kind: str = "normal"
    top: int = 1
    has_grad: bool = False

    def made(self, is_wide: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind == "labels":
            return torch.randint(-1, self.top, self.shape, generator=generator).to(self.dtype)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        x = x.abs() + 0.5 if self.kind == "positive" else x
        x = (x > 0 if self.dtype == torch.bool else x).to(self.dtype)
        x = x.double() if is_wide and self.dtype.is_floating_point else x
        if self.seed % 10 == 9 and x.numel() and self.dtype.is_floating_point and self.kind == "special":
            x.view(-1)[0] = (torch.inf, -torch.inf, torch.nan, 1e4)[self.seed // 10 % 4]
        if self.layout == "transposed" and x.dim() > 1:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        elif self.layout == "strided" and x.dim():
            x = torch.stack([x, x], -1)[..., 0]
        elif self.layout == "channels_last" and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x.requires_grad_(self.has_grad)


class Draw:
    """What the calls below are made of; one choice in ten is not what the function asks for."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.dtype = draw(FLOATS if draw(st.integers(0, 9)) else DTYPES)

    def one(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def is_odd(self) -> bool:
        return self.draw(st.integers(0, 19)) == 19

    def shape(self, least: int, most: int) -> tuple[int, ...]:
        bounds = (0, 6) if self.is_odd() else (least, most)
        return tuple(self.draw(st.lists(SIZES, min_size=bounds[0], max_size=bounds[1])))

    def tensor(self, shape: tuple[int, ...], dtype: Any = None, **options: Any) -> Any:
        dtype = dtype or self.dtype
        if self.is_odd():
            return self.one(None, 1.0, "x", 2, True)
        if self.is_odd():
            shape = self.shape(0, 4)
        if self.is_odd():
            dtype = self.draw(DTYPES)
        # Torch's gradient in evaluation is wrong beside a strided variance.
        is_state = options.get("kind") in ("plain", "positive")
        layout = "contiguous" if is_state else self.one("contiguous", "transposed", "strided", "channels_last")
        has_grad = dtype.is_floating_point and options.get("kind", "special") == "special" and self.draw(st.booleans())
        return Given(tuple(shape), dtype, layout, self.draw(st.integers(0, 99)), has_grad=has_grad, **options)

    def maybe(self, shape: tuple[int, ...], **options: Any) -> Given | None:
        return self.tensor(shape, **options) if self.draw(st.booleans()) else None


def layer_norm(d: Draw) -> list:
    shape = d.shape(1, 4)
    last = shape[len(shape) - d.one(1, 2, 1, 0, 3) :]
    own = torch.float32 if d.dtype in HALF and d.draw(st.booleans()) else d.dtype
    return [
        ("input", d.tensor(shape)),
        ("normalized_shape", list(last)),
        ("weight", d.maybe(last, dtype=own)),
        ("bias", d.maybe(last, dtype=own)),
        ("eps", d.one(1e-5, 0.5, 1, 0.0, None, "x")),
    ]


def rms_norm(d: Draw) -> list:
    pairs = [pair for pair in layer_norm(d) if pair[0] != "bias"]
    return [*pairs[:3], ("eps", d.one(1e-5, None, 0.5))]


def group_norm(d: Draw) -> list:
    shape = d.shape(2, 5)
    channels = shape[1:2]
    return [
        ("input", d.tensor(shape)),
        ("num_groups", d.one(1, 2, 3, channels[0] if channels else 1, 0)),
        ("weight", d.maybe(channels)),
        ("bias", d.maybe(channels)),
        ("eps", d.one(1e-5, 0.5)),
    ]


def batch_norm(d: Draw) -> list:
    shape = d.shape(2, 5)
    channels = shape[1:2]
    own = torch.float32 if d.dtype in HALF and d.draw(st.booleans()) else d.dtype
    mean = d.maybe(channels, dtype=own, kind="plain")
    var = d.tensor(channels, dtype=own, kind="positive") if mean or d.is_odd() else None
    return [
        ("input", d.tensor(shape)),
        ("running_mean", mean),
        ("running_var", var),
        ("weight", d.maybe(channels, dtype=own)),
        ("bias", d.maybe(channels, dtype=own)),
        ("training", d.one(True, False)),
        ("momentum", d.one(0.1, 0.0, 1)),
        ("eps", d.one(1e-5, 0.5)),
    ]


def instance_norm(d: Draw) -> list:
    return [("use_input_stats" if name == "training" else name, value) for name, value in batch_norm(d)]


def softmax(d: Draw) -> list:
    dim = d.draw(st.integers(-4, 4)) if d.is_odd() else d.one(-1, 0, 1)
    dtype = d.draw(DTYPES) if d.draw(st.integers(0, 4)) == 4 else None
    return [("input", d.tensor(d.shape(1, 4), kind="special")), ("dim", dim), ("dtype", dtype)]


def _loss(d: Draw, has_probabilities: bool) -> list:
    shape = d.shape(1, 4)
    axis = min(len(shape) - 1, 1)
    classes = shape[axis] if shape else 1
    rows = shape[:axis] + shape[axis + 1 :] if shape else ()
    labels = d.tensor(rows, dtype=torch.int64, kind="labels", top=max(classes, 0) + d.is_odd() or 1)
    target = d.tensor(shape) if has_probabilities else labels
    ignored = -100 if has_probabilities else d.one(-1, -1, 0, -100)
    return [
        ("input", d.tensor(shape, kind="special")),
        ("target", target),
        ("weight", d.maybe((classes,))),
        ("ignore_index", ignored),
        ("reduction", d.one("mean", "sum", "none", "avg")),
    ]


def nll_loss(d: Draw) -> list:
    return _loss(d, has_probabilities=False)


def cross_entropy(d: Draw) -> list:
    return [*_loss(d, d.draw(st.booleans())), ("label_smoothing", d.one(0.0, 0.1, 1.0, 1.5))]


def dropout(d: Draw) -> list:
    p, training = d.one((0.0, True), (1.0, True), (0.3, False), (1.5, True), (-0.5, False))
    return [("input", d.tensor(d.shape(0, 4))), ("p", p), ("training", training)]


def scaled_dot_product_attention(d: Draw) -> list:
    *batch, rows, keys, width, width_v = (*d.one((), (2,), (2, 3)), *(d.draw(SIZES) for _ in range(4)))
    mask = d.one(None, (rows, keys), (1, keys), (rows, 1), (*batch, rows, keys))
    mask = mask and d.tensor(mask, dtype=d.one(torch.bool, d.dtype))
    return [
        ("query", d.tensor((*batch, rows, width))),
        ("key", d.tensor((*batch, keys, width))),
        ("value", d.tensor((*batch, keys, width_v))),
        ("attn_mask", mask),
        ("dropout_p", d.one(0.0, 0.0, -1.0)),
        ("is_causal", d.one(False, False, True)),
        ("scale", d.one(None, 0.5)),
    ]


# Where torch and this package part, by words of the message. Torch takes, and this package does not:
REFUSED = {
    "must have dtype": "its documented dtypes are floating ones, those of parameters go with that of the input",
    "result must have dtype": "likewise",
    "must have the same dtype": "likewise",
    "must have the dtype": "likewise",
    "must have 2 to 5 axes": "a documented limit, with a test of its own",
    "must have shape": "torch counts elements, or looks at nothing where there are none",
    "must both be given": "torch counts them as none",
    "must be given together": "likewise",
    "must be given in evaluation mode": "torch looks at nothing where there are no elements",
    "must have the": "torch looks at nothing where there are no elements: keys and values that do not go together",
    "must be as wide": "likewise",
    "must broadcast to": "likewise: masks",
    "mask and causal": "torch takes both or refuses both, by the kernel that it happens to choose",
    "must be a probability": "torch takes negative ones for 0",
    "must be real": "torch drops the imaginary part",
    "must be a number": "torch takes bools and strings for some numbers",
}
# This package takes, and torch does not:
ACCEPTED = {
    "not differentiable with respect to argument 'weight'": "derivatives in the weights of classes",
    "select(): index 0 out of range": "no channels at all",
    "mixed dtype (CPU)": "some parameters in float32 beside others that are None",
    "Negation, the `-` operator": "softmin of bools in another dtype",
    "but tensor has no dimensions": "a mask without axes is broadcast",
}
CALLS = {
    **{f.__name__: f for f in (layer_norm, rms_norm, group_norm, batch_norm, instance_norm, nll_loss, cross_entropy)},
    **{f.__name__: f for f in (dropout, scaled_dot_product_attention)},
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), softmax),
}
KEYWORD_ONLY = ("dtype", "scale")


@st.composite
def calls(draw: Any, name: str) -> tuple[list, dict]:
    pairs = CALLS[name](Draw(draw))
    head = draw(st.integers(1, len(pairs)))
    if name in ("nll_loss", "cross_entropy"):  # `size_average` and `reduce` stand between.
        head = min(head, 3)
    args = [value for key, value in pairs[:head] if key not in KEYWORD_ONLY]
    return args, dict(pairs[len(args) :])


def outcome(function: Any, args: list, kwargs: dict, *, is_wide: bool = False) -> tuple[Any, list]:
    """The value, or the error, and what was written and all gradients; of the same numbers in float64 on demand."""
    args = [x.made(is_wide) if isinstance(x, Given) else x for x in args]
    kwargs = {key: x.made(is_wide) if isinstance(x, Given) else x for key, x in kwargs.items()}
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    try:
        y = function(*args, **kwargs)
    except Exception as error:
        return error, given
    leaves = [x for x in given if x.requires_grad]
    written = [x.detach() for x in given]
    if leaves and y.requires_grad:
        weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.dtype)
        try:
            written += torch.autograd.grad(y, leaves, weights, allow_unused=True, materialize_grads=True)
        except RuntimeError as error:
            written.append(error)
    return y, written


def _is_told(error: Exception, table: dict[str, str]) -> bool:
    return any(words in str(error) for words in table)


def difference(name: str, args: list, kwargs: dict) -> str:
    """How ours differs from torch's, or nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, of_theirs = outcome(getattr(F, name), args, kwargs)
        ours, of_ours = outcome(getattr(pr.functional, name), args, kwargs)
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        if not isinstance(theirs, Exception):
            return "" if _is_told(ours, REFUSED) else f"refused: {ours!r}"
        if not isinstance(ours, Exception):
            return "" if _is_told(theirs, ACCEPTED) else f"accepted, where torch says {theirs!r}"
        is_typed = isinstance(ours, (pr.PrimitivesError, TypeError, ValueError))
        return "" if is_typed else f"untyped: {ours!r}, where torch says {theirs!r}"
    return _difference_of_values(name, args, kwargs, (ours, of_ours), (theirs, of_theirs))


def _difference_of_values(name: str, args: list, kwargs: dict, own: tuple, torchs: tuple) -> str:
    (ours, of_ours), (theirs, of_theirs) = own, torchs
    if ours.requires_grad != theirs.requires_grad and (theirs.requires_grad or ours.numel()):
        return f"requires_grad is {ours.requires_grad}"  # Torch forgets a mask beside values without elements.
    if isinstance(of_theirs[-1], Exception):
        return ""  # Torch's backward has no kernel for it.
    if isinstance(of_ours[-1], Exception):
        return f"backward raises {of_ours[-1]!r}"
    bound = max(TOLERANCES.get(x.dtype, 0) for x in (ours, *of_ours))
    all_true = None
    for at, (mine, other) in enumerate(zip([ours, *of_ours], [theirs, *of_theirs], strict=False)):
        if name in ("group_norm", "instance_norm") and not ours.numel():
            continue  # Torch's sums over nothing are whatever the memory held, and so are running statistics.
        try:
            torch.testing.assert_close(mine, other, rtol=bound, atol=bound, equal_nan=True)
        except AssertionError as error:
            if (mine.shape, mine.dtype) != (other.shape, other.dtype) or mine.dtype == torch.float64:
                return f"{at}: {error}"
            # Where rounding decides, ours must be as near to the truth as torch's.
            if all_true is None:
                true, of_true = outcome(getattr(F, name), args, {**kwargs}, is_wide=True)
                all_true = [true, *of_true]
            far = [(x.double() - all_true[at]).abs().max() for x in (mine, other)]
            if not far[0] <= 2 * far[1]:
                return f"{at}: {error}"
    return ""


@pytest.mark.parametrize("name", CALLS)
def test_drawn_calls_agree_with_torch(name):
    @SETTINGS
    @hypothesis.given(calls(name))
    def agree(call):
        found = difference(name, *call)
        assert not found, found

    agree()
