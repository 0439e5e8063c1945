"""Every launcher, compiled for each chip and emulated: its values, what is wrong, and how often it touches memory."""

import types
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from perf.calls import Call, random
from perf.ops.add_layer_norm import AddLayerNorm
from perf.ops.attention import Attention
from perf.ops.batch_norm import BatchNorm
from perf.ops.batch_norm_relu import BatchNormRelu
from perf.ops.cross_entropy import CrossEntropy
from perf.ops.layer_norm import LayerNorm
from perf.ops.log_softmax import LogSoftmax
from perf.ops.softmax import Softmax
from primitives.testing import KernelReport
from primitives.testing._ptx.memory import SECTOR_BYTES
from tests.kernels.calls import channels_last, dropout_calls, short_rows
from tests.ptx.emulating import EMULATED, emulate

BF16 = torch.bfloat16


class Case(NamedTuple):
    """Operands or calls of a plan, and what the reason `why` allows it to do with operands of full size.

    Without one it reads each once, 16 bytes at a time.
    """

    make: Callable[[], Any]
    limits: Mapping[str, int] = types.MappingProxyType({})
    why: str = ""
    reads: float = 1
    width: int = 16

    def calls(self) -> list[Call]:
        made = self.make()
        return made if isinstance(made, list) else made.calls()


def noisy_attention() -> Attention:
    bias, bias_dot = (random(1, 2, 70, 70, seed=seed, dtype=BF16) for seed in range(2))
    noise = {"seed": torch.tensor([3]), "offset": torch.tensor([7]), "dropout_p": 0.3}
    mask = random(1, 2, 70, 70) > -1
    return Attention.draw((1, 2, 70, 64), 70, BF16, bias=bias, bias_dot=bias_dot, mask=mask, **noise)


SWEPT, SHARED = short_rows(256, 1), short_rows(256, 4)
PAIRS = "rows and keys are read for each block of the others"
SWEEPS = "a row that does not fit in registers is read for its sums, and again"
ODD = "rows begin at odd addresses"
CHANNELS = "channels are read for their sums, and again"
CASES = {
    "layer_norm": Case(lambda: LayerNorm.draw((13, 1024), BF16)),
    "layer_norm of short rows": Case(lambda: LayerNorm.draw((2, 2, 36), batch_ndim=1)),
    # Rows of which a thread has one element, whose sums it has a copy of.
    "layer_norm of few columns": Case(lambda: LayerNorm.draw((35, 31)), {}, ODD, 1, 4),
    "layer_norm of rows with gaps": Case(lambda: apart(LayerNorm.draw((2, 5, 75))), SHARED, "as many gaps", 1, 4),
    "layer_norm swept": Case(lambda: LayerNorm.draw((3, 1000), BF16), SWEPT, SWEEPS + ", and by columns", 4),
    "layer_norm shared": Case(lambda: LayerNorm.draw((2, 1000), BF16), SHARED, SWEEPS + ", and by columns", 4),
    "group_norm": Case(lambda: LayerNorm.draw((9, 2, 2, 5), BF16, norm_ndim=2, grouped=1), {}, ODD, 2, 2),
    "group_norm and silu": Case(lambda: [*silu().calls("fwd", "fwd_jvp", "bwd", "jvp")], {}, CHANNELS, 2),
    "add_layer_norm": Case(lambda: AddLayerNorm.draw((9, 512), BF16)),
    "add_layer_norm swept": Case(lambda: AddLayerNorm.draw((3, 1000)), SWEPT, SWEEPS + ", and by columns", 3),
    "batch_norm": Case(lambda: BatchNorm.draw((4, 3, 16, 32), BF16), {}, CHANNELS, 2),
    "batch_norm of odd planes": Case(lambda: BatchNorm.draw((3, 3, 17, 19), BF16), {}, f"{CHANNELS}; {ODD}", 2, 2),
    "batch_norm of tiny planes": Case(lambda: BatchNorm.draw((3, 5, 4)), {}, f"{CHANNELS}; {ODD}", 2, 4),
    "batch_norm of small tiles": Case(
        lambda: BatchNorm.draw((2, 2, 8, 16)).calls("train_fwd"), {"channel_tile_bytes": 256}, CHANNELS, 2, 4
    ),
    "batch_norm of features": Case(lambda: BatchNorm.draw((261, 9)), {}, f"{CHANNELS}; {ODD}", 2, 4),
    # A stride that is a multiple of 16 beside an odd number of channels: a thread holds what the plan says.
    "batch_norm of padded features": Case(lambda: padded(BatchNorm.draw((13, 5))), {}, f"{CHANNELS}; {ODD}", 2, 4),
    "batch_norm of channels last": Case(
        lambda: BatchNorm.draw((4, 16, 9, 11), BF16, arrange=channels_last), {}, CHANNELS, 2
    ),
    "batch_norm_relu": Case(
        lambda: BatchNormRelu.draw((3, 3, 17, 19), BF16),
        *({}, f"{CHANNELS}; {ODD}", 2, 2),
    ),
    "log_softmax": Case(lambda: LogSoftmax.draw((9, 1024), 1, BF16)),
    "log_softmax of columns": Case(lambda: LogSoftmax.draw((2, 75, 5), 1), {}, ODD, 1, 4),
    "log_softmax of rows with gaps": Case(lambda: apart(LogSoftmax.draw((3, 1000), 1)), SWEPT, ODD, 2, 4),
    "log_softmax swept": Case(lambda: LogSoftmax.draw((3, 1000), 1), SWEPT, SWEEPS, 2),
    "log_softmax shared": Case(lambda: LogSoftmax.draw((2, 1000), 1), SHARED, SWEEPS, 2),
    "softmax": Case(lambda: Softmax.draw((9, 1024), 1, BF16)),
    "softmax with a mask": Case(lambda: Softmax.draw((9, 100), 1).change(mask=random(9, 100) > 0, scale=0.7)),
    "softmax swept": Case(lambda: Softmax.draw((3, 1000), 1, BF16), SWEPT, SWEEPS, 2, 8),
    "cross_entropy": Case(
        lambda: CrossEntropy.draw((9, 1000), 1, BF16, labels=True, smoothing=0.1),
        *({}, "the class of a label is read by itself, again", 1.01, 2),
    ),
    "cross_entropy of few classes": Case(lambda: CrossEntropy.draw((35, 5), 1), {}, ODD, 2, 4),
    "cross_entropy swept": Case(
        lambda: CrossEntropy.draw((3, 1000), 1, BF16, labels=True, smoothing=0.1), SWEPT, SWEEPS, 2, 2
    ),
    "cross_entropy shared": Case(lambda: CrossEntropy.draw((2, 1000), 1), SHARED, SWEEPS, 2, 8),
    "attention": Case(lambda: Attention.draw((1, 2, 70, 64), 70, BF16), {}, PAIRS, 4),
    "attention with everything": Case(noisy_attention, {}, PAIRS, 4, 1),
    "attention of doubles": Case(
        lambda: Attention.draw((1, 2, 20, 16), 40, torch.float64, 1, causal=True), {}, PAIRS, 5
    ),
    "attention of narrow heads": Case(lambda: Attention.draw((1, 1, 18, 12), 37, value_width=20), {}, PAIRS, 4, 8),
    # Rows whose sums of products several threads have copies of.
    "attention of small tiles": Case(
        lambda: Attention.draw((1, 1, 18, 16), 37, causal=True), {"attention_tile": 16}, PAIRS, 5, 4
    ),
    "dropout": Case(lambda: dropout_calls(BF16), {}, "slices of a tensor begin at odd addresses", 1, 2),
}


def apart(operands: Any) -> Any:
    """The same between other columns."""
    names = ("x", "y_bar", "x_dot", "y_bar_dot", "y", "y_dot")
    full_size = {name: getattr(operands, name) for name in names if getattr(operands, name, None) is not None}
    return operands.change(**{name: torch.cat([x, x], -1)[..., : x.shape[-1]] for name, x in full_size.items()})


def padded(operands: Any) -> Any:
    """The same with 16 columns from row to row."""
    return operands.change(
        x=torch.nn.functional.pad(operands.x, (0, 16 - operands.x.shape[1]))[:, : operands.x.shape[1]]
    )


def silu() -> LayerNorm:
    return LayerNorm.draw((2, 2, 2, 36), norm_ndim=2, grouped=1, silu=True)


@pytest.mark.parametrize("chip", EMULATED)
@pytest.mark.parametrize("name", CASES)
def test_launcher(name, chip):
    case = CASES[name]
    assert case.why or (case.reads, case.width) == (1, 16)
    for call in case.calls():
        hold_traffic(call, emulate(call, chip, case.limits), case)


def hold_traffic(call: Call, report: KernelReport, case: Case) -> None:
    """Operands of full size are read as a case says, and results of that size are written once."""
    name = call.launcher.__name__
    largest = max(call.tensors(), key=lambda x: x.nbytes)
    is_whole = largest.shape[-1] * largest.itemsize % SECTOR_BYTES == 0
    loaded: Counter[str] = Counter()
    # A sum, a merge of its parts, and what takes that.
    assert len(report.launches) <= 3, f"{name} launches {len(report.launches)} kernels"
    for launch in report.launches:
        for is_store, traffic in enumerate((launch.loads, launch.stores)):
            for argument, each in traffic.items():
                if each.distinct_bytes <= max(largest.nbytes // 2, SECTOR_BYTES):
                    continue
                assert min(each.widths) >= case.width, f"{name}: {argument} in parts of {sorted(each.widths)} bytes"
                least = each.num_bytes // SECTOR_BYTES + (0 if is_whole else each.requests)
                assert case.width < 16 or each.sectors <= least, f"{name}: {argument} takes {each.sectors} sectors"
                if is_store:
                    assert each.num_bytes == each.distinct_bytes, f"{name} stores {argument} twice"
                else:
                    loaded[argument] += each.num_bytes
                    most = case.reads * each.distinct_bytes
                    assert loaded[argument] <= most, f"{name} loads {loaded[argument]} bytes of {argument}, not {most}"
