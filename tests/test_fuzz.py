"""Drawn calls of the functions: values, gradients and refusals are torch's, or those of the definition in float64.

`make test` draws the same few each time, `make fuzz` others, many of them.
"""

import inspect
import math
import os
import warnings

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

import primitives as pr
from perf.ops import CASES
from perf.ops.samples import DTYPES, LOW_PRECISION
from tests import fuzz_calls, fuzz_definitions
from tests.fuzz_calls import Draw, Given

NAMES = [name for name in pr.functional.__all__ if hasattr(fuzz_calls, name)]
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES or 200,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
# Of the value in float64: so many roundings of a dtype may lie between.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
# And more where half precision rounds weighted targets, logits, or terms of the gradient of a mask or weight.
LOOSE = {
    "cross_entropy": 6,
    "linear_cross_entropy": 20,
    "softmax": 25,
    "softmin": 25,
    "rms_norm": 2.5,
    "add_rms_norm": 2.5,
}


def _tensors(call):
    return {name: x for name, x in call.items() if isinstance(x, Given)}


def _is_empty(call):
    return any(0 in x.shape for x in _tensors(call).values())


def _mixes_dtypes(call):
    """Whether dtypes are not those of the docs: one floating dtype, or float32 of parameters of half precision."""
    given = {name: x.dtype for name, x in _tensors(call).items() if x.kind != "labels"}
    first = next(iter(given.values()), torch.bool)
    allowed = (first, torch.float32) if first in LOW_PRECISION else (first,)
    pairs = [{given[name] for name in pair if name in given} for pair in (("weight", "bias"), STATISTICS)]
    masks = {"attn_mask": torch.bool, "target": given.get("target")}
    wrong = [name for name, dtype in given.items() if dtype not in (*allowed, masks.get(name))]
    wanted = call.get("dtype") or first
    return wanted not in DTYPES or first.is_complex or bool(wrong) or any(len(pair) > 1 for pair in pairs)


def _has_wide_parameters(call):
    dtypes = [x.dtype for x in _tensors(call).values()]
    return dtypes[0] in LOW_PRECISION and torch.float32 in dtypes


def _fits(call):
    """Whether query is as wide as key, which has as many rows as value, and all have as many heads."""
    query, key, value = (call[name].shape for name in ("query", "key", "value"))
    return query[-1] == key[-1] and key[-2] == value[-2] and query[:-2] == key[:-2] == value[:-2]


def _hides_infinity(call):
    hides = any(call.get(name) is not None for name in ("attn_mask", "mask")) or call.get("is_causal")
    return bool(hides) and any(x.special is not None for x in _tensors(call).values())


def _smooths_weights(call):
    """Whether the weight of labels, whose share is smoothed in part, has a gradient."""
    weight, target = call["weight"], call["target"]
    has_grad = isinstance(weight, Given) and weight.has_grad and isinstance(target, Given) and target.kind == "labels"
    return has_grad and 0.0 < call["label_smoothing"] < 1.0


def _repeats_large(call):
    return call["input"].layout == "expanded" and call["input"].special is not None


STATISTICS = ("running_mean", "running_var")
NORMS, LOSSES, SDPA = "batch_norm instance_norm", "cross_entropy nll_loss", "scaled_dot_product_attention"
# Where torch and this package part: the functions, the error, and when it comes.
# Torch takes, and this package refuses:
REFUSED = (
    # Dtypes that the docs leave out.
    ("", pr.DtypeError, _mixes_dtypes),
    # Torch looks at no mask, no widths and no parameters of what has no elements.
    (SDPA, pr.ShapeError, lambda c: _is_empty(c) and (c["attn_mask"] is not None or not _fits(c))),
    (f"nll_loss {NORMS}", pr.ShapeError, lambda c: 0 in c["input"].shape),
    ("nll_loss", pr.ShapeError, lambda c: isinstance(c["weight"], Given) and c["weight"].shape == ()),
    # Torch counts elements, and takes one of the statistics for none.
    (NORMS, pr.ShapeError, lambda c: any(len(x.shape) != 1 for name, x in _tensors(c).items() if name != "input")),
    (NORMS, pr.ShapeError, lambda c: (c["running_mean"] is None) != (c["running_var"] is None)),
    # Torch takes both or refuses both, by its kernel; and probabilities below 0 for 0.
    (SDPA, pr.ShapeError, lambda c: c["is_causal"] and c["attn_mask"] is not None),
    (SDPA, ValueError, lambda c: c["dropout_p"] < 0),
)
# This package takes, and torch refuses:
ACCEPTED = (
    ("", RuntimeError, _has_wide_parameters),
    # Derivatives in the weights of classes, one ignored label of no classes, no channels at all.
    (LOSSES, RuntimeError, lambda c: isinstance(c["weight"], Given) and c["weight"].has_grad),
    (LOSSES, RuntimeError, _is_empty),
    # Smoothing beside `[1]`, which both take for the label of `[C]`.
    ("cross_entropy", RuntimeError, lambda c: len(c["input"].shape) == 1 and c["target"].shape == (1,)),
    (f"{NORMS} batch_norm_relu", IndexError, _is_empty),
    # The gradient of a bias without a weight; bools in another dtype.
    ("group_norm", RuntimeError, lambda c: c["weight"] is None),
    ("softmin", RuntimeError, lambda c: c["input"].dtype == torch.bool),
    # Masks of less than two axes and matrices without heads are broadcast.
    (SDPA, (RuntimeError, IndexError), lambda c: isinstance(c["attn_mask"], Given) and len(c["attn_mask"].shape) < 2),
    (SDPA, IndexError, lambda c: c["enable_gqa"] and any(len(x.shape) < 3 for x in _tensors(c).values())),
)
# Both take, but what comes from this place on, of results, arguments and gradients, does not count:
UNSETTLED = (
    # Torch's sums over nothing are whatever the memory held; it forgets a mask, or says 0 or NaN without keys.
    ("group_norm instance_norm", 0, _is_empty),
    (SDPA, 0, _is_empty),
    # Its flash kernel, which takes four axes, says 0 for some rows that are NaN.
    (SDPA, 0, lambda c: len(c["query"].shape) == 4 and any(x.special is not None for x in _tensors(c).values())),
    # Its norms, of which definitions are made, find a slope of 0 for rows and channels of one large number.
    ("layer_norm ada_layer_norm group_norm instance_norm batch_norm batch_norm_relu", 1, _repeats_large),
    # Torch divides the smoothing by no classes, for ignored rows too.
    ("cross_entropy", 0, lambda c: _is_empty(c) and c["label_smoothing"] > 0),
    # Without a share of the target, 0 times infinity or nothing.
    ("cross_entropy", 0, lambda c: c["label_smoothing"] == 1.0 and c["input"].special is not None),
    # A fault of ours: an ignored row of NaN leaves it in the gradient of smoothed weights. Torch has none.
    ("cross_entropy", -1, lambda c: _smooths_weights(c) and c["input"].special is not None and not _is_empty(c)),
    # What a row that is NaN has to do with what is hidden from it, 0 or NaN, is up to the kernel.
    (f"{SDPA} softmax softmin", 1, _hides_infinity),
)


@st.composite
def calls(draw, name):
    """Arguments, and the definition where it is held to that and not to torch."""
    ours, definition = getattr(pr.functional, name), getattr(fuzz_definitions, name, None)
    # Torch has another one by this name.
    is_torchs = hasattr(F, name) and name != "linear_cross_entropy"
    definition = draw(st.sampled_from((definition, None if is_torchs else definition)))
    call = getattr(fuzz_calls, name)(Draw(draw, is_strict=definition is not None))
    parameters = list(inspect.signature(ours).parameters.values())
    heads = [p.name == key and p.kind is p.POSITIONAL_OR_KEYWORD for p, key in zip(parameters, call, strict=False)]
    count = draw(st.integers(1, [*heads, False].index(False)))
    return list(call.values())[:count], dict(list(call.items())[count:]), definition


def outcome(function, args, kwargs, **options):
    """The results, what was written and all gradients; or what was given and the error."""
    args = [x.made(**options) if isinstance(x, Given) else x for x in args]
    kwargs = {key: x.made(**options) if isinstance(x, Given) else x for key, x in kwargs.items()}
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    torch.manual_seed(0)
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


def _is_told(name, error, call, table):
    rows = [row for row in table if isinstance(error, row[1]) and name in (row[0].split() or [name])]
    return any(is_cause(call) for _, _, is_cause in rows)


def difference(name, args, kwargs, definition=None):
    """How ours differs from torch's or the definition, or nothing."""
    ours = getattr(pr.functional, name)
    bound = inspect.signature(ours).bind(*args, **kwargs)
    if definition is not None:
        bound.apply_defaults()
        for key in {"namespace", "_stacklevel", "size_average", "reduce"} & set(bound.arguments):
            del bound.arguments[key]
    call = dict(bound.arguments)
    theirs = (getattr(F, name), args, kwargs) if definition is None else (definition, [], call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine, error = outcome(ours, args, kwargs, is_strided=True, noise=None)
        others, torchs = outcome(*theirs, is_strided=False, noise=None)
    if error is torchs is None:
        parts = [row for row in UNSETTLED if name in row[0].split() and row[2](call)]
        # The definition says what torch does not of no keys.
        ends = [end for _, end, _ in parts if definition is None or end or name != SDPA]
        return _difference_of_values(name, call, theirs, mine, others, min(ends, default=len(mine)))
    is_typed = isinstance(error, (pr.PrimitivesError, TypeError, ValueError))
    if error is not None and torchs is not None:
        return "" if is_typed or type(error) is type(torchs) else f"untyped: {error!r}, where torch says {torchs!r}"
    if torchs is not None:
        return "" if _is_told(name, torchs, call, ACCEPTED) else f"accepted, where torch says {torchs!r}"
    return "" if is_typed and _is_told(name, error, call, REFUSED) else f"refused: {error!r}"


def _difference_of_values(name, call, theirs, mine, others, end):
    if end and len(mine) != len(others):
        return f"{len(mine)} results and gradients, not {len(others)}"
    dtypes = {call.get("dtype"), *[x.dtype for x in (*mine, *_tensors(call).values())]}
    # Softmaxes beside a mask alone, whose gradient adds up rounded terms.
    has_sums, true = call.get("mask") is not None or not name.startswith("softm"), None
    is_loose = has_sums and not dtypes.isdisjoint(LOW_PRECISION)
    bound = max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes) * (LOOSE.get(name, 1) if is_loose else 1)
    for at, (x, other) in enumerate(zip(mine[:end], others, strict=False)):
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


def _is_near(name, x, other, bound):
    if "norm" in name and x.is_floating_point():
        # Of an infinite number each order of sums makes another one that is not finite.
        x, other = (y.where(y.isfinite(), math.nan) for y in (x, other))
    return torch.allclose(x, other, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_drawn_calls_agree_with_torch(name):
    passed = set()

    @SETTINGS
    @hypothesis.given(calls(name))
    def agree(call):
        # Hypothesis draws many calls again.
        hypothesis.assume(repr(call) not in passed)
        found = difference(name, *call)
        assert not found, found
        passed.add(repr(call))

    agree()


def test_every_op_is_drawn():
    assert {op.public for op in CASES} <= set(NAMES)
