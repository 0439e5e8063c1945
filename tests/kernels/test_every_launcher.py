"""Every launcher, under each of its plans and in each layout: its results are the truth, on a GPU in every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from perf.calls import EPS, pairwise, random
from perf.ops._row_maps import RowMapOperands
from perf.ops.add_layer_norm import AddLayerNorm
from perf.ops.batch_norm import BatchNorm
from perf.ops.batch_norm_relu import BatchNormRelu
from perf.ops.cross_entropy import CrossEntropy
from perf.ops.layer_norm import LayerNorm
from perf.ops.softmax import Softmax
from primitives.kernels.runtime.arithmetic import cdiv
from primitives.kernels.runtime.kernel import INTERPRETED
from tests.kernels.calls import DTYPES, channels_last, copying_calls, launched_by, short_rows
from tests.kernels.checking import check

pytestmark = pytest.mark.usefixtures("on_device")


ROW_LAYOUTS = ("groups", "strided", "expanded", "not centered")


def layer_norm(layout: str, num_rows: int, num_cols: int, dtype: torch.dtype) -> LayerNorm:
    """Rows one after another, without a mean, or with parameters of their own for each of two groups.

    Or two segments of rows with gaps between them, as many for no two operands, or of rows that stand for several.
    """
    if layout == "not centered":
        return LayerNorm.draw((num_rows, num_cols), dtype).change(centered=False)
    num_rows = (num_rows + 1) // 2
    rows = LayerNorm.draw((2, num_rows, num_cols), dtype, batch_ndim=int(layout == "groups"))
    if layout == "groups":
        return rows
    names = ("x", "y_bar", "x_dot", "y_bar_dot")
    shapes = [(2, num_rows + 1 + seed % 2) for seed in range(4)]
    if layout == "expanded":
        shapes = [(2, num_rows), (2, 1), (1, num_rows), (1, 1)]
    full_size = [random(*shape, num_cols, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    if layout == "strided":
        return rows.change(**{name: rows[:, :num_rows] for name, rows in zip(names, full_size, strict=True)})
    return rows.change(**{name: rows.expand(2, num_rows, -1) for name, rows in zip(names, full_size, strict=True)})


# Of several tiles, the last of which is partial.
TILE, LONG_ROW = 256, 500
# A plan of layer norm: rows and columns to call it on, limits and processors that lead to it, the modes of the launches
# over rows, and whether sums over rows have launches of their own.
SUMMING = {"layer_norm_bwd_kernel", "layer_norm_second_sums_kernel"}
ROW_PLANS: dict[str, tuple[int, int, dict[str, int], int | None, list[str], bool]] = {
    "in registers": (13, 75, {}, None, ["whole"], False),
    # Programs with several blocks of rows each.
    "by turns": (13, 75, {"resident_threads": 64}, 1, ["whole"], False),
    # Sums over rows that do not fit beside them.
    "sums apart": (
        *(5, 75),
        {f"layer_norm_{name}": 32 for name in ("second_summed_cols", "accumulated_cols", "param_cols")},
        *(None, ["whole"], True),
    ),
    "swept": (3, LONG_ROW, short_rows(TILE, 1), None, ["swept"], True),
    "shared": (2, LONG_ROW, short_rows(TILE, 32), None, ["sums", "writes"], True),
}


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("plan", ROW_PLANS)
def test_layer_norm(plan, layout, use_limits, use_processors):
    num_rows, num_cols, limits, processors, modes, is_apart = ROW_PLANS[plan]
    use_limits(**limits)
    if processors is not None:
        use_processors(processors)
    dtype = DTYPES[(list(ROW_PLANS).index(plan) + ROW_LAYOUTS.index(layout)) % len(DTYPES)]
    for call in layer_norm(layout, num_rows, num_cols, dtype).calls():
        check(call)
        launches = launched_by(call.results)
        sums = [one.named for one in launches if one.kernel.__name__ in SUMMING]
        assert [one.named["MODE"] for one in launches if "MODE" in one.named] == (modes if is_apart or not sums else [])
        for args in sums:
            num_blocks = cdiv(args["num_rows"], args["BLOCK_ROWS"])
            assert (args["num_splits"] == 1) == (plan != "in registers")
            assert plan != "by turns" or num_blocks > args["num_splits"]


@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed"])
def test_sums_of_several_long_rows(layout, use_processors):
    """Rows whose second halves lie behind the first ones, the last tile partial along rows and columns."""
    use_processors(1)
    dtype = torch.float32 if layout == "strided" else torch.bfloat16
    rows = LayerNorm.draw((2, 11, 700), dtype, batch_ndim=layout == "strided")
    if layout == "strided":
        rows = rows.change(x=rows.x[:, :9], y_bar=rows.y_bar[:, 2:])
    elif layout == "transposed":
        rows = rows.change(x=random(2, 700, 11, dtype=dtype).transpose(1, 2))
    for call in (rows.call("bwd"), AddLayerNorm.draw((19, 700), dtype).change(seed=None).call("bwd")):
        check(call)
        (args,) = (one.named for one in launched_by(call.results) if one.kernel.__name__.endswith("_bwd_kernel"))
        assert args["BLOCK_ROWS"] > 1
        assert args["num_splits"] < cdiv(args["num_rows"], args["BLOCK_ROWS"])


def add_layer_norm(turn: int, num_rows: int, num_cols: int, dtype: torch.dtype) -> AddLayerNorm:
    """A seed for each of two samples, or one for segments of rows with gaps, or no noise and no mean."""
    shape = (2, (num_rows + 1) // 2, num_cols)
    wide = torch.float32 if dtype.itemsize == 2 else None
    if turn == 0:
        return AddLayerNorm.draw(shape, dtype, wide, batch_ndim=1)
    rows = AddLayerNorm.draw(shape, dtype)
    if turn == 1:
        return rows.change(x=random(2, shape[1] + 1, num_cols, dtype=dtype)[:, 1:])
    return rows.change(seed=None, centered=False, bias=None)


@pytest.mark.parametrize("plan", ROW_PLANS)
def test_add_layer_norm(plan, use_limits, use_processors):
    num_rows, num_cols, limits, processors, *_ = ROW_PLANS[plan]
    use_limits(**limits)
    if processors is not None:
        use_processors(processors)
    number = list(ROW_PLANS).index(plan)
    for turn in (number % 3, (number + 1) % 3):
        rows = add_layer_norm(turn, num_rows, num_cols + turn, DTYPES[(number + turn) % len(DTYPES)])
        for call in rows.calls():
            check(call)
    for mode in ("fwd_jvp", "jvp", "bwd"):
        for choice, call in enumerate(rows.change(centered=True).choices(mode)):
            if choice % len(ROW_PLANS) == number:
                check(call)


# Two groups of channels: of one sample, whose planes have no sums; of several; of two times as many, whose parameters
# are their own; with gaps between the samples.
@pytest.mark.parametrize(
    "splits, layout",
    [
        pytest.param(splits, layout, id=f"{plan}-{layout}", marks=[pytest.mark.nightly] * ((i + j) % 2))
        for i, (plan, splits) in enumerate({"in registers": 0, "swept": 1, "shared": 32}.items())
        for j, layout in enumerate(["one", "several", "of their own", "strided", "channels last"])
    ],
)
def test_group_norm(splits, layout, use_limits):
    if splits:
        use_limits(**short_rows(32, splits))
    lead = {"one": (1,), "of their own": (2, 2)}.get(layout, (2,))
    kinds: Any = {"norm_ndim": 2, "batch_ndim": len(lead) - 1, "grouped": 1 + (layout == "channels last")}
    width, dtype = 33 if layout in ("one", "strided") else 36, DTYPES[(splits + len(layout)) % len(DTYPES)]
    for silu in (False, True) if layout in ("one", "several") else (False,):
        samples = LayerNorm.draw((*lead, 2, 2, width), dtype, silu=silu, **kinds)
        if layout == "strided":
            gaps = {name: torch.cat([getattr(samples, name)] * 2)[::2] for name in ("x", "x_dot", "y_bar_dot")}
            samples = samples.change(**gaps)
        for call in samples.calls(*["fwd", "fwd_jvp", "bwd", "jvp"] * silu):
            check(call)
            modes = {one.named["MODE"] for one in launched_by(call.results) if "MODE" in one.named}
            assert ("whole" in modes) == (splits == 0)
            assert splits < 32 or layout != "one" or "sums" in modes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_x_hat_is_rounded_before_the_weight(dtype):
    rows = LayerNorm.draw((6, 75), dtype).change(centered=False, bias=None)
    x_hat, weight = torch.rms_norm(rows.x.float(), (75,), None, EPS), rows.weight.float()

    def narrow(x: Tensor) -> Tensor:
        # The interpreter cuts bfloat16 off, where a GPU rounds.
        is_cut = INTERPRETED and dtype is torch.bfloat16
        return (x.view(torch.int32) & -(1 << 16)).view(torch.float32) if is_cut else x.to(dtype).float()

    values = {True: narrow(narrow(x_hat) * weight), False: narrow(x_hat * weight)}
    for call in rows.change(rounded=True).calls("fwd", "fwd_jvp"):
        # Sums in another order tip a rounding here and there.
        same = {is_rounded: (call.results()[0] == value).float().mean() for is_rounded, value in values.items()}
        assert same[True] > 0.98 > same[False]


def with_gaps(x: Tensor) -> Tensor:
    """The same between other channels."""
    return torch.cat([x, x.flip(1)], 1)[:, : x.shape[1]]


def expanded_channels(dtype: torch.dtype) -> BatchNorm:
    shape = (4, 2, 16, 24)
    parts = {"y_bar": (1, 2, 16, 24), "x_dot": (4, 2, 1, 1), "y_bar_dot": (1, 1, 1, 1)}
    full_size = {name: random(*part, dtype=dtype, seed=9).expand(shape) for name, part in parts.items()}
    return BatchNorm.draw(shape, dtype).change(**full_size)


# Channels and positions that fill no tile, so that lanes past the last one have to be masked off; parameters of their
# own for each of two groups; samples with gaps between them; a cotangent and tangents that are one for all samples, or
# for all positions.
CHANNEL_LAYOUTS = {
    "channels first": lambda dtype: BatchNorm.draw((3, 3, 17, 19), dtype),
    "channels last": lambda dtype: BatchNorm.draw((2, 9, 11, 13), dtype, arrange=channels_last),
    "features": lambda dtype: BatchNorm.draw((261, 9), dtype),
    "groups": lambda dtype: BatchNorm.draw((2, 2, 2, 16, 24), dtype, batch_ndim=1),
    "strided": lambda dtype: BatchNorm.draw((3, 3, 17, 19), dtype, arrange=with_gaps),
    "expanded": expanded_channels,
}


@pytest.mark.parametrize("layout", CHANNEL_LAYOUTS)
def test_batch_norm(layout, use_limits, use_processors):
    # Few programs, so that tensors of this size are to them what those of a GPU are to its programs.
    use_processors(1)
    turn = list(CHANNEL_LAYOUTS).index(layout)
    # Tiles of another size, so that several programs share a channel.
    use_limits(channel_transform_programs=4, **({"channel_tile_bytes": 4096} if turn % 2 else {}))
    for call in CHANNEL_LAYOUTS[layout](DTYPES[turn % len(DTYPES)]).calls():
        # Layouts of two plans, and their samples.
        check(call)


@pytest.mark.parametrize("layout", CHANNEL_LAYOUTS)
def test_batch_norm_relu(layout, use_processors):
    use_processors(1)
    turn = list(CHANNEL_LAYOUTS).index(layout)
    norm = CHANNEL_LAYOUTS[layout](DTYPES[turn % len(DTYPES)])
    arrange = channels_last if layout == "channels last" else torch.Tensor.contiguous
    # A residual of the stream's dtype beside a narrow x, and a cotangent of the output's layout.
    block = BatchNormRelu.draw(norm.x.shape, norm.x.dtype, None, norm.batch_ndim, arrange)
    wide = random(*norm.x.shape, dtype=torch.promote_types(norm.x.dtype, torch.float32), seed=3)
    block = block.change(x=norm.x, x_dot=norm.x_dot, residual=arrange(wide))
    check(block.call("train_fwd"))
    for mode in ("train_fwd_jvp", "train_bwd", "train_jvp", "eval_fwd", "eval_bwd", "eval_jvp"):
        for number, call in enumerate(block.choices(mode)):
            if number % len(CHANNEL_LAYOUTS) == turn:
                check(call)


# Rows with gaps between them, and operands that stand for several: one row, one number per row, and one number for all,
# as the cotangent of a sum is. Rows one after another take no other code than those with gaps.
REDUCED_LAYOUTS = ("strided", "expanded")
# Rows whose columns are adjacent, and two segments of rows that are adjacent themselves.
DOTS = ("y_bar_dot", "y_dot")
REDUCED_SHAPES = {"columns": ((21, 75), 1), "rows": ((2, 75, 5), 1)}


def with_wide_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x[..., :1]], -1)[..., :-1]


# Softmax has a test of its own, with masks.
ROW_MAPS = [kind for kind in RowMapOperands.__subclasses__() if kind is not Softmax]


def of_row_map(
    kind: type[RowMapOperands], layout: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> RowMapOperands:
    if layout == "expanded":
        row = tuple(size if axis == dim else 1 for axis, size in enumerate(shape))
        column = tuple(1 if axis == dim else size for axis, size in enumerate(shape))
        parts = {"x": row, "y_bar": column, "x_dot": (1,) * len(shape), "y_dot": row}
        full_size = {name: random(*part, dtype=dtype, seed=9).expand(shape) for name, part in parts.items()}
        return kind.draw(shape, dim, dtype).change(**full_size)

    return kind.draw(shape, dim, dtype, with_wide_rows)


@pytest.mark.parametrize("layout", REDUCED_LAYOUTS)
@pytest.mark.parametrize("adjacent", REDUCED_SHAPES)
@pytest.mark.parametrize("splits", [0, 1, 32], ids=["in registers", "swept", "shared"])
@pytest.mark.parametrize("kind", ROW_MAPS, ids=lambda kind: kind.op())
def test_row_maps(kind, splits, adjacent, layout, use_limits):
    (num_segments, *shape), dim = REDUCED_SHAPES[adjacent]
    if splits:
        use_limits(**short_rows(TILE, splits))
        num_segments, shape[dim - 1] = 2, LONG_ROW
    turn = REDUCED_LAYOUTS.index(layout) + list(REDUCED_SHAPES).index(adjacent) + splits
    rows = of_row_map(kind, layout, (num_segments, *shape), dim, DTYPES[turn % len(DTYPES)])
    for call in rows.calls():
        check(call)
    modes = [one.named["MODE"] for call in rows.calls() for one in launched_by(call.results)]
    if layout != "expanded":
        # Where one number stands for a row, it is the rows that are adjacent, and fewer of them fit.
        assert modes == {0: ["whole"], 1: ["swept"], 32: ["sums", "writes"]}[splits] * len(rows.calls())
    # The wanted results decide alike in every layout what is read, and how often.
    if layout == "strided" and splits < 2:
        others = (
            *(rows.call("double_backward", output_mask) for output_mask in pairwise(3)[1:-1]),
            *(rows.change(**{name: None}).call("bwd_jvp") for name in DOTS),
        )
        for call in others:
            check(call)


@pytest.mark.parametrize("adjacent", REDUCED_SHAPES)
@pytest.mark.parametrize("splits", [0, 1, 32], ids=["in registers", "swept", "shared"])
def test_softmax(splits, adjacent, use_limits):
    """With a mask of every kind, broadcast or not, that leaves nothing of a row, and factors of either sign."""
    (num_segments, *shape), dim = REDUCED_SHAPES[adjacent]
    if splits:
        use_limits(**short_rows(TILE, splits))
        num_segments, shape[dim - 1] = 2, LONG_ROW
    turn = list(REDUCED_SHAPES).index(adjacent) + splits
    shape, dtype = (num_segments, *shape), DTYPES[turn % len(DTYPES)]
    seen = random(*shape, seed=7) > 0.5
    seen.movedim(dim, -1)[0] = False
    added = torch.where(seen[:1], random(1, *shape[1:], seed=8, dtype=dtype), -torch.inf).expand(shape)
    masks = (seen, added) if turn % 2 else (added, seen)
    rows = Softmax.draw(shape, dim, dtype, with_wide_rows).change(mask=masks[0], scale=(-0.7, 1.3)[turn % 2])
    others = rows.change(mask=masks[1], scale=1.0), rows.change(mask=None, scale=0.3)
    calls = [*rows.calls(), others[0].call("fwd"), others[1].call("fwd_jvp")]
    if splits < 2:
        calls += [
            *(rows.call("double_backward", output_mask) for output_mask in pairwise(3)[1:-1]),
            *(rows.change(**{name: None}).call("bwd_jvp") for name in DOTS),
        ]
    for call in calls:
        check(call)
    # Another temperature is another number, not another kernel.
    found = [[one.constants for one in launched_by(rows.change(scale=s).call("fwd").results)] for s in (0.5, 2.0)]
    assert found[0] == found[1]


@pytest.mark.parametrize("splits", [0, 1, 32], ids=["in registers", "swept", "shared"])
def test_a_mask_that_heads_share_is_read_where_it_lies(splits, use_limits):
    num_cols = 24
    if splits:
        use_limits(**short_rows(TILE, splits))
        num_cols = LONG_ROW
    shape, dtype = (2, 3, 2, num_cols), DTYPES[splits % 3]
    mask = random(2, 1, 2, num_cols, seed=7) > 0.0 if splits else random(2, 1, 2, num_cols, dtype=dtype, seed=7)
    call = Softmax.draw(shape, 3, dtype).change(mask=mask.expand(shape), scale=0.7).call("fwd_jvp")
    check(call)
    assert {one.named["mask_ptr"].data_ptr() for one in launched_by(call.results)} == {mask.data_ptr()}


@pytest.mark.parametrize("adjacent", REDUCED_SHAPES)
@pytest.mark.parametrize("splits", [0, 1, 32], ids=["in registers", "swept", "shared"])
def test_cross_entropy(splits, adjacent, use_limits):
    (num_segments, *shape), dim = REDUCED_SHAPES[adjacent]
    if splits:
        use_limits(**short_rows(TILE, splits))
        num_segments, shape[dim - 1] = 2, LONG_ROW
    turn = list(REDUCED_SHAPES).index(adjacent) + splits
    labels, smoothing = bool(turn % 2), 0.1 * (turn % 3)
    given = (num_segments, *shape), dim, DTYPES[turn % len(DTYPES)], with_wide_rows
    rows = CrossEntropy.draw(*given, labels=labels, smoothing=smoothing)
    for call in rows.calls():
        check(call)
    if splits < 2:
        others = CrossEntropy.draw(*given, labels=not labels, smoothing=0.1 - smoothing / 2)
        for mode in ("fwd_jvp", "bwd", "bwd_jvp"):
            for number, call in enumerate(others.choices(mode)):
                if number % 2 == turn % 2:
                    check(call)


def test_operands_that_no_view_fits():
    for number, call in enumerate(copying_calls(torch.float32)):
        check(call if number % 2 else copying_calls(torch.float64)[number])
