"""Drawn calls of the functions: values, gradients and refusals are torch's, or those of the definition in float64.

`make test` draws the same few each time, `make fuzz` others, many of them.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

import primitives as pr
from perf.ops import CASES
from perf.ops.samples import DTYPES, LOW_PRECISION
from tests.fuzz_calls import CALLS, DEFINITIONS, Draw, Given

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES or 100,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
# Of the value in float64: so many roundings of a dtype may lie between.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def _tensors(call: dict) -> dict[str, Given]:
    return {name: x for name, x in call.items() if isinstance(x, Given)}


def _is_empty(call: dict) -> bool:
    return any(0 in x.shape for x in _tensors(call).values())


def _mixes_dtypes(call: dict) -> bool:
    """Whether dtypes are not those of the docs: one floating dtype, or float32 of parameters of half precision."""
    given = {name: x.dtype for name, x in _tensors(call).items() if x.kind != "labels"}
    first = next(iter(given.values()), torch.bool)
    allowed = (first, torch.float32) if first in LOW_PRECISION else (first,)
    pairs = [{given[name] for name in pair if name in given} for pair in (("weight", "bias"), STATISTICS)]
    masks = {"attn_mask": torch.bool, "target": given.get("target")}
    wrong = [name for name, dtype in given.items() if dtype not in (*allowed, masks.get(name))]
    wanted = call.get("dtype") or first
    return wanted not in DTYPES or first.is_complex or bool(wrong) or any(len(pair) > 1 for pair in pairs)


def _has_other_shape(call: dict) -> bool:
    """Whether parameters of channels or classes are not vectors."""
    return any(len(call[name].shape) != 1 for name in ("weight", "bias", *STATISTICS) if name in _tensors(call))


def _has_wide_parameters(call: dict) -> bool:
    dtypes = [x.dtype for x in _tensors(call).values()]
    return dtypes[0] in LOW_PRECISION and torch.float32 in dtypes


def _weighs_with_gradient(call: dict) -> bool:
    return isinstance(call["weight"], Given) and call["weight"].has_grad


def _lacks_a_statistic(call: dict) -> bool:
    return (call["running_mean"] is None) != (call["running_var"] is None)


def _is_masked_twice(call: dict) -> bool:
    return call["is_causal"] and call["attn_mask"] is not None


def _is_mask_short(call: dict) -> bool:
    return isinstance(call["attn_mask"], Given) and len(call["attn_mask"].shape) < 2


def _smooths_nothing(call: dict) -> bool:
    return _is_empty(call) and call["label_smoothing"] > 0


def _multiplies_infinity(call: dict) -> bool:
    return call["label_smoothing"] == 1.0 and call["input"].special is not None


def _lacks_heads(call: dict) -> bool:
    return call["enable_gqa"] and any(len(call[name].shape) < 3 for name in ("query", "key", "value"))


STATISTICS = ("running_mean", "running_var")
NORMS, LOSSES, SDPA = "batch_norm instance_norm", "cross_entropy nll_loss", "scaled_dot_product_attention"
# Where torch and this package part: the functions, the error, when it comes, and why it does.
# Torch takes, and this package refuses:
REFUSED = (
    ("", pr.DtypeError, _mixes_dtypes, "dtypes that the docs leave out"),
    ("", pr.ShapeError, _is_empty, "torch looks at nothing where there are no elements"),
    (NORMS, pr.ShapeError, _has_other_shape, "torch counts elements"),
    (NORMS, pr.ShapeError, _lacks_a_statistic, "torch takes one of the two for none"),
    (
        SDPA,
        pr.ShapeError,
        _is_masked_twice,
        "torch takes both or refuses both, by its kernel",
    ),
    (SDPA, ValueError, lambda call: call["dropout_p"] < 0, "torch takes these for 0"),
)
# This package takes, and torch refuses:
ACCEPTED = (
    ("", RuntimeError, _has_wide_parameters, "parameters in float32 beside half precision"),
    (LOSSES, RuntimeError, _weighs_with_gradient, "derivatives in the weights of classes"),
    (LOSSES, RuntimeError, _is_empty, "one ignored label of no classes"),
    (f"{NORMS} batch_norm_relu", IndexError, _is_empty, "no channels at all"),
    ("group_norm", RuntimeError, lambda call: call["weight"] is None, "the gradient of a bias without a weight"),
    ("softmin", RuntimeError, lambda call: call["input"].dtype == torch.bool, "bools in another dtype"),
    (SDPA, (RuntimeError, IndexError), _is_mask_short, "a mask of less than two axes is broadcast"),
    (SDPA, IndexError, _lacks_heads, "matrices without heads are broadcast"),
)
# Both take, but the values of torch are no measure:
UNSETTLED = (
    ("group_norm instance_norm", _is_empty, "torch's sums over nothing are whatever the memory held"),
    (SDPA, _is_empty, "torch forgets a mask, or says 0 or NaN without keys, by its kernel"),
    ("cross_entropy", _smooths_nothing, "torch divides the smoothing by no classes, for ignored rows too"),
    ("cross_entropy", _multiplies_infinity, "without a share of the target, 0 times infinity or nothing"),
)


@st.composite
def calls(draw: Any, name: str) -> tuple[list, dict]:
    call = CALLS[name](Draw(draw, is_strict=name in DEFINITIONS))
    parameters = list(inspect.signature(getattr(pr.functional, name)).parameters.values())
    heads = [p.name == key and p.kind is p.POSITIONAL_OR_KEYWORD for p, key in zip(parameters, call, strict=False)]
    count = draw(st.integers(1, [*heads, False].index(False)))
    return list(call.values())[:count], dict(list(call.items())[count:])


def outcome(function: Any, args: list, kwargs: dict, **options: Any) -> tuple[list, Any]:
    """The results, what was written and all gradients; or what was given and the error."""
    args = [x.made(**options) if isinstance(x, Given) else x for x in args]
    kwargs = {key: x.made(**options) if isinstance(x, Given) else x for key, x in kwargs.items()}
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    try:
        y = function(*args, **kwargs)
    except Exception as error:
        return given, error
    results = list(y) if isinstance(y, tuple) else [y]
    leaves, found = [x for x in given if x.requires_grad], [*results, *[x.detach() for x in given]]
    roots = [y for y in results if y.requires_grad]
    if leaves and roots:
        # On a grid that every dtype has: rounded ones would give others than the truth has.
        weights = [((torch.arange(y.numel()) % 9 + 4) / 8).reshape(y.shape).to(y.dtype) for y in roots]
        try:
            found += torch.autograd.grad(roots, leaves, weights, allow_unused=True, materialize_grads=True)
        except RuntimeError as error:
            return found, error
    return found, None


def _is_told(name: str, error: Exception, call: dict, table: tuple) -> bool:
    for functions, kind, is_cause, _ in table:
        if isinstance(error, kind) and name in (functions.split() or [name]) and is_cause(call):
            return True
    return False


def difference(name: str, args: list, kwargs: dict) -> str:
    """How ours differs from torch's, or nothing."""
    ours = getattr(pr.functional, name)
    bound = inspect.signature(ours).bind(*args, **kwargs)
    if name in DEFINITIONS:
        bound.apply_defaults()
        bound.arguments.pop("namespace", None)
    call = dict(bound.arguments)
    theirs = (DEFINITIONS[name], [], call) if name in DEFINITIONS else (getattr(F, name), args, kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine, error = outcome(ours, args, kwargs, is_strided=True, noise=None)
        others, torchs = outcome(*theirs, is_strided=False, noise=None)
    if error is torchs is None:
        if any(name in functions.split() and is_cause(call) for functions, is_cause, _ in UNSETTLED):
            return ""
        return _difference_of_values(name, call, theirs, mine, others)
    is_typed = isinstance(error, (pr.PrimitivesError, TypeError, ValueError))
    if error is not None and torchs is not None:
        return "" if is_typed or type(error) is type(torchs) else f"untyped: {error!r}, where torch says {torchs!r}"
    if torchs is not None:
        return "" if _is_told(name, torchs, call, ACCEPTED) else f"accepted, where torch says {torchs!r}"
    return "" if is_typed and _is_told(name, error, call, REFUSED) else f"refused: {error!r}"


def _difference_of_values(name: str, call: dict, theirs: tuple, mine: list, others: list) -> str:
    if len(mine) != len(others):
        return f"{len(mine)} results and gradients, not {len(others)}"
    # The backward of attention takes products with rounded results; a loss rounds weighted targets and linear logits.
    dtypes = [call.get("dtype"), *[x.dtype for x in (*mine, *_tensors(call).values())]]
    bound = (10 if name.endswith(("attention", "entropy")) else 1) * max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)
    true = None
    for at, (x, other) in enumerate(zip(mine, others, strict=True)):
        # All results of an operator require grad, or none.
        if x.numel() and (x.requires_grad < other.requires_grad or (at == 0 and x.requires_grad > other.requires_grad)):
            return f"{at}: requires_grad is {x.requires_grad}"
        if (x.shape, x.dtype) != (other.shape, other.dtype):
            return f"{at}: {x.shape}, {x.dtype}, not {other.shape}, {other.dtype}"
        if _is_near(name, x, other, bound):
            continue
        # Ours must be near the truth, or as near as a few roundings of the arguments leave it.
        true = true or [outcome(*theirs, is_strided=False, noise=noise)[0] for noise in (0.0, 1e-7)]
        exact, moved = (each[at].to(x.dtype) for each in true)
        if not _is_near(name, x, exact, bound + 8 * (moved - exact).abs().nan_to_num(0.0, 0.0).max().item()):
            return f"{at}: {x}, not {other}, nor {exact}"
    return ""


def _is_near(name: str, x: torch.Tensor, other: torch.Tensor, bound: float) -> bool:
    if "norm" in name and x.is_floating_point():
        # Of an infinite number each order of sums makes another one that is not finite.
        x, other = (y.where(y.isfinite(), math.nan) for y in (x, other))
    return torch.allclose(x, other, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_drawn_calls_agree_with_torch(name):
    @SETTINGS
    @hypothesis.given(calls(name))
    def agree(call):
        found = difference(name, *call)
        assert not found, found

    agree()


def test_every_op_is_drawn():
    assert {op.public for op in CASES} <= set(CALLS)
