"""Operands of every kind, held to the truth: absent ones, other dtypes, layouts, groups, far offsets, no elements.

Each launcher and plan meets its truth in `test_every_launcher`; here is what that does not vary.
"""

import itertools

import pytest
import torch

from perf.calls import random
from perf.ops.attention import Attention
from perf.ops.batch_norm import BatchNorm
from perf.ops.layer_norm import LayerNorm
from perf.ops.log_softmax import LogSoftmax
from primitives.kernels.batch_norm import _steps
from primitives.kernels.batch_norm._channels import readable
from primitives.kernels.norms import _launch
from primitives.kernels.norms.layer_norm import layer_norm_fwd
from primitives.kernels.rows.sums import add_partial_rows_kernel
from primitives.kernels.rows.view import row_view
from primitives.kernels.runtime.kernel import observe
from primitives.kernels.softmax.log_softmax import log_softmax_fwd
from tests.kernels.calls import DTYPES, ROW_PLANS, channels_last, far_apart, launched_by, short_rows
from tests.kernels.truth import EPS, assert_close, check_values, expected

pytestmark = pytest.mark.usefixtures("on_device")

LOW, HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64


# Several programs that share a row sum nothing over rows.
GIVEN = {
    "layer norm in registers": (LayerNorm.draw((2, 2, 20), batch_ndim=1), "in registers"),
    "layer norm sums apart": (LayerNorm.draw((2, 20)), "sums apart"),
    "layer norm swept": (LayerNorm.draw((2, 1, 20), batch_ndim=1), "swept"),
    "layer norm shared": (LayerNorm.draw((1, 20)), "shared"),
    "batch norm": (BatchNorm.draw((3, 3, 9)), "in registers"),
    **{
        f"log_softmax {dim} {plan}": (LogSoftmax.draw((2, 33) if dim else (33, 2), dim), plan)
        for dim, plan in ((1, "in registers"), (0, "swept"), (1, "shared"))
    },
}


@pytest.mark.parametrize("operands, plan", GIVEN.values(), ids=GIVEN)
def test_what_is_given_and_wanted(operands, plan, use_limits):
    use_limits(**ROW_PLANS[plan])
    operands = operands.here()
    for mode in operands.modes():
        for call in operands.choices(mode):
            check_values(call)


def test_nothing_wanted_launches_nothing():
    call = LogSoftmax.draw((2, 5), 1).call("double_backward", (False,) * 3)
    assert not launched_by(lambda: check_values(call), observe)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_dtype_is_applied_before_anything_else():
    for dtype, x_dtype in itertools.product(DTYPES, DTYPES):
        rows = LogSoftmax.draw((3, 20), 1, dtype).change(x=random(3, 20, dtype=x_dtype), output_dtype=dtype)
        # The interpreter truncates to bfloat16, where a GPU rounds.
        for mode in ("fwd", "bwd") if dtype != LOW or x_dtype == dtype else ("bwd",):
            check_values(rows.call(mode))
    # 1 + 2**-12 is 1 in float16, and 1e5 is infinite.
    y = log_softmax_fwd(torch.tensor([[1.0, 1 + 2**-12], [1.0, 1e5]]), 1, HALF)
    assert y[0, 0] == y[0, 1]
    assert y[1].isnan().all()


# Operands, and whether kernels read them where they lie.
ROWS = {
    "every second column": (random(6, 24)[:, ::2], True),
    "padded outer dim": (random(3, 5, 10)[:, 1:4], True),
    "permuted row dims": (random(4, 3, 10).transpose(0, 1), True),
    "expanded outer dim": (random(4, 10).expand(3, 4, 10), True),
    "no view": (random(2, 3, 4, 10).permute(2, 0, 1, 3)[:, :, 1:], False),
}
IMAGES = {
    "features sliced": (random(19, 11)[::2, 1:8:2], True),
    "sequence transposed": (random(4, 33, 3).transpose(1, 2), True),
    "sliced channels last": (channels_last(random(3, 10, 6, 7))[:, 2:5], True),
    "cropped": (random(3, 3, 8, 9)[:, :, 1:7, 1:8], False),
    "volume channels last": (channels_last(random(2, 3, 4, 3, 5)), True),
}


def test_what_needs_no_copy():
    for x, is_readable in ROWS.values():
        assert (row_view([x, torch.empty(x.shape)], 1, None).tensors[0] is x) == is_readable
    for x, is_readable in IMAGES.values():
        assert (readable(x, 0) is x) == is_readable


def test_more_segments_than_sums_over_rows_take(monkeypatch):
    monkeypatch.setattr(_launch, "LAYER_NORM_MAX_SEGMENTS", 2)
    rows = LayerNorm.draw((3, 3, 10)).change(x=random(3, 5, 10)[:, 1:4])
    for call in rows.calls("bwd", "double_backward", "bwd_jvp"):
        check_values(call)


# In each, a product of a number and a stride that both fit in 32 bits does not.
FAR_ROWS = {
    "rows": (LayerNorm.draw((3, 20), HALF), (1 << 30, 1)),
    "columns": (LayerNorm.draw((2, 20), HALF), (1, 1 << 27)),
    "segments": (LayerNorm.draw((3, 1, 20), HALF, batch_ndim=1), (1 << 30, 32, 1)),
    "log_softmax of rows": (LogSoftmax.draw((3, 17), 1, HALF), (2**30, 1)),
    "log_softmax of columns": (LogSoftmax.draw((3, 3), 1, HALF), (1, 2**30)),
}


@pytest.mark.parametrize(
    "far, plan",
    [
        pytest.param(far, plan, id=f"{far}-{plan}", marks=[pytest.mark.nightly] * ((i + j) % 2))
        for i, far in enumerate(FAR_ROWS)
        for j, plan in enumerate(ROW_PLANS)
    ],
)
def test_offsets_past_two_to_the_31(far, plan, use_limits):
    use_limits(**ROW_PLANS[plan])
    rows, strides = FAR_ROWS[far][0].here(), FAR_ROWS[far][1]
    # Several programs that share a row read it as one does.
    modes = ("fwd", "jvp") if plan == "shared" else rows.modes()
    names = [name for name in ("x", "y_bar", "x_dot", "y_bar_dot", "y") if hasattr(rows, name)]
    for call in rows.change(**{name: far_apart(getattr(rows, name), strides) for name in names}).calls(*modes):
        check_values(call)


# Of batch, heads, and rows or keys: q, k and v lie so, and bias by rows.
@pytest.mark.parametrize("strides", [(2**31, 64, 8, 1), (64, 2**31, 8, 1), (64, 32, 2**30, 1)], ids=str)
def test_offsets_of_attention_past_two_to_the_31(strides):
    bias = far_apart(random(2, 2, 3, 5, dtype=HALF), strides)
    matrices = Attention.draw((2, 2, 3, 4), 5, HALF, bias=bias, bias_dot=bias)
    names = ("q", "k", "v", "q_dot", "k_dot", "v_dot")
    matrices = matrices.change(**{name: far_apart(getattr(matrices, name), strides) for name in names})
    for call in matrices.calls("fwd", "jvp", "bwd"):
        check_values(call)


FAR_STRIDES = {
    "groups": (2**31, 8 * 3 * 20, 20, 1),
    "samples": (320, 2**31 // 3 + 1, 20, 1),
    "channels": (320, 20, 2**30 + 5, 1),
    "spatial": (8, 24, 1, 2**31 // 19 + 3),
}


@pytest.mark.parametrize("far", FAR_STRIDES)
def test_offsets_of_images_past_two_to_the_31(far, monkeypatch):
    images, strides = BatchNorm.draw((2, 4, 3, 20), HALF, batch_ndim=1), FAR_STRIDES[far]
    names = ("x", "y_bar", "x_dot", "y_bar_dot")
    images = images.change(**{name: far_apart(getattr(images, name), strides) for name in names})
    assert readable(images.x, 1) is images.x
    for call in images.calls("train_bwd", "eval_jvp", "double_backward", "bwd_jvp"):
        check_values(call)
    # Results are dense and so cannot be far apart within the memory of a test; these are made to be.
    for call in images.calls("train_fwd", "eval_fwd"):
        exact, y = expected(call)[0], far_apart(torch.empty_like(images.x), strides)
        monkeypatch.setattr(_steps, "new_output", lambda like, batch_ndim, y=y: y)
        assert_close(call.results()[0], exact, SINGLE)


@pytest.mark.parametrize("strides", [(2**30, 1, 3), (1, 2**30, 3), (9, 3, 2**30)])
@pytest.mark.parametrize("limits", [{}, short_rows(2, 1)], ids=["whole", "swept"])
def test_offsets_of_results_past_two_to_the_31(strides, limits, use_limits, monkeypatch):
    """Launchers make their results dense; these are made far apart, where columns are not adjacent."""
    use_limits(**limits)
    x, y = far_apart(random(3, 3, 3, dtype=HALF), strides), far_apart(torch.zeros(3, 3, 3).half(), strides)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: y)
    assert log_softmax_fwd(x, 2, None) is y
    torch.testing.assert_close(y, torch.log_softmax(x.double(), 2).half())


@pytest.mark.usefixtures("only_the_last_programs")
def test_dense_results_past_two_to_the_31():
    """Those of the last rows; of the others no page exists."""
    x = random(1, 2**15, dtype=HALF)
    y = log_softmax_fwd(x.expand(2**16 + 8, -1), 1, None)
    torch.testing.assert_close(y[-1], torch.log_softmax(x.double(), 1).half()[0])


@pytest.mark.usefixtures("only_the_last_programs")
def test_partial_sums_past_two_to_the_31():
    """Those of the last group; of the others no page exists."""
    parts = far_apart(random(2, 64), (2**31, 1))
    sums = far_apart(torch.zeros(2, 64).half(), (2**31, 1))
    grid, blocks = ((2**31 // 64 + 1) * 2,), {"BLOCK_PARTS": 1, "BLOCK_COLS": 32}
    add_partial_rows_kernel[grid](parts, None, None, sums, None, None, 1, num_cols=64, **blocks)
    torch.testing.assert_close(sums[1], parts[1].half(), rtol=0, atol=0)


EMPTY = [
    *(
        LayerNorm.draw(shape, batch_ndim=b)
        for shape, b in (((0, 5), 0), ((3, 0, 5), 1), ((0, 3, 5), 0), ((0, 3, 5), 1))
    ),
    *(BatchNorm.draw(shape) for shape in ((0, 5), (0, 5, 4, 4), (3, 5, 0), (3, 0, 4))),
    *(
        Attention.draw(shape, keys)
        for shape, keys in (((2, 0, 3, 4), 3), ((1, 2, 0, 4), 3), ((0, 2, 3, 4), 3), ((1, 2, 3, 4), 0))
    ),
    *(LogSoftmax.draw(shape, dim) for shape, dim in (((0, 5), 1), ((0, 5), 0), ((3, 0), 1), ((0,), 0))),
]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom.*")
@pytest.mark.parametrize("operands", EMPTY, ids=lambda operands: str(next(iter(vars(operands).values())).shape))
def test_no_elements(operands):
    for call in operands.here().calls():
        for result, exact in zip(call.results(), expected(call), strict=True):
            assert (result.shape, result.dtype) == (exact.value.shape, exact.dtype)
            # Statistics of nothing mean nothing.
            assert torch.equal(result.double(), exact.value) or exact.value.isnan().any()
    y, mean, rstd = layer_norm_fwd(torch.empty(3, 0), None, None, 1, 0, EPS)
    assert (y.shape, mean.tolist(), rstd.isnan().tolist()) == ((3, 0), [0.0] * 3, [True] * 3)
