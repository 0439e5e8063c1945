"""Drawn calls of every record: sizes, options, layouts, dtypes and absent arguments as they come together in no sample.

`make test` draws the same few each time, `make fuzz` others, many of them.
"""

import dataclasses
import math
import os

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import primitives as pr
from perf.ops import CASES
from perf.ops.samples import DTYPES, LAYOUTS
from tests.properties import check_jvp, check_outputs, check_second_order, check_vjp

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES or 16,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
SIZES = st.sampled_from((2, 3, 4, 1, 0, 17))
MOST = 2000


def attention_options(draw, shape):
    """What a sample of attention says of the arguments beside q."""
    *batch, heads, rows, _ = shape
    keys, causal = draw(SIZES), draw(st.booleans())
    of_bias = [(*batch, heads, rows, keys), (1,) * (len(shape) - 1) + (keys,), (*[1] * len(batch), heads, rows, 1)]
    return {
        "keys": rows if causal else keys,
        "key_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0] or [heads])),
        "bias_shape": draw(st.sampled_from(of_bias)) if not causal else (*batch, heads, rows, rows),
        "causal": causal,
        "masked": not causal and draw(st.booleans()),
        "p": draw(st.sampled_from((0.0, 0.4, 1.0))),
        "lse": draw(st.booleans()),
    }


@st.composite
def samples(draw, case):
    """One of the record's samples at other sizes, and in what else the samples have."""
    first = draw(st.sampled_from(case.samples))
    shape, options = tuple(draw(SIZES) for _ in first.shape), dict(first.options)
    # A loss needs a class: without any the function does not call its primitive.
    hypothesis.assume(math.prod(shape) <= MOST and ("cross_entropy" not in case.name or shape[options["dim"]]))
    options = attention_options(draw, shape) if "keys" in options else options
    absent = draw(st.sampled_from(sorted({sample.absent for sample in case.samples})))
    return dataclasses.replace(
        first,
        shape=shape,
        options=tuple(options.items()),
        absent=absent,
        layout=draw(st.sampled_from(LAYOUTS)),
        mixed=draw(st.booleans()),
    )


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_drawn_calls_have_the_values_and_derivatives_of_the_definition(case):
    cpu = torch.device("cpu")

    @SETTINGS
    @hypothesis.given(samples(case), st.sampled_from(DTYPES), st.data())
    def agree(sample, dtype, data):
        inputs = case.inputs(sample, dtype, cpu)
        try:
            case.outputs(inputs, sample)
        except pr.ShapeError:
            # Groups that do not divide the channels.
            hypothesis.reject()
        # The unbiased variance divides by the number of values less one.
        hypothesis.assume(all(y.isfinite().all() for y in case.true_outputs(inputs, sample)))
        check_outputs(case, sample, inputs)
        names = case.perturbable(sample)
        names = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        check_vjp(case, sample, inputs, names)
        check_jvp(case, sample, inputs, names)
        if dtype is torch.float64:
            check_second_order(case, sample, dtype, cpu, tuple(names))

    agree()
