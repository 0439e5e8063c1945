"""Every launcher, compiled for each chip and emulated: its values, what is wrong, and how often it touches memory."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.kernels.calls import dropout_calls, short_rows
from tests.ptx.emulating import EMULATED, emulate

BF16 = torch.bfloat16


class Case(NamedTuple):
    """Operands or calls of a plan; how often operands of full size are read, in whole vectors, where that is held."""

    make: Callable[[], Any]
    limits: dict[str, int] = {}  # noqa: RUF012
    reads: int = 0

    def calls(self) -> list[Call]:
        made = self.make()
        return made if isinstance(made, list) else made.calls()


def noisy_attention() -> Attention:
    bias, bias_dot = (random(1, 2, 70, 70, seed=seed, dtype=BF16) for seed in range(2))
    noise = {"seed": torch.tensor([3]), "offset": torch.tensor([7]), "dropout_p": 0.3}
    mask = random(1, 2, 70, 70) > -1
    return Attention.draw((1, 2, 70, 64), 70, BF16, bias=bias, bias_dot=bias_dot, mask=mask, **noise)


SWEPT, SHARED = short_rows(256, 1), short_rows(256, 4)
CASES = {
    "layer_norm": Case(lambda: LayerNorm.draw((13, 1024), BF16), reads=1),
    "layer_norm of short rows": Case(lambda: LayerNorm.draw((2, 2, 36), batch_ndim=1)),
    "layer_norm swept": Case(lambda: LayerNorm.draw((3, 1000), BF16), SWEPT),
    "layer_norm shared": Case(lambda: LayerNorm.draw((2, 1000), BF16), SHARED),
    "group_norm": Case(lambda: LayerNorm.draw((2, 2, 2, 33), BF16, norm_ndim=2, grouped=1)),
    "group_norm and silu": Case(lambda: [*silu().calls("fwd", "fwd_jvp", "bwd", "jvp")]),
    "add_layer_norm": Case(lambda: AddLayerNorm.draw((9, 512), BF16), reads=1),
    "add_layer_norm swept": Case(lambda: AddLayerNorm.draw((3, 1000)), SWEPT),
    "batch_norm": Case(lambda: BatchNorm.draw((4, 3, 16, 32), BF16), reads=2),
    "batch_norm of odd planes": Case(lambda: BatchNorm.draw((3, 3, 17, 19), BF16)),
    "batch_norm of features": Case(lambda: BatchNorm.draw((261, 9))),
    "batch_norm_relu": Case(lambda: BatchNormRelu.draw((3, 3, 17, 19), BF16, None, 0, torch.Tensor.contiguous)),
    "log_softmax": Case(lambda: LogSoftmax.draw((9, 1024), 1, BF16), reads=1),
    "log_softmax of columns": Case(lambda: LogSoftmax.draw((2, 75, 5), 1)),
    "softmax": Case(lambda: Softmax.draw((9, 1024), 1, BF16), reads=1),
    "softmax with a mask": Case(lambda: Softmax.draw((9, 100), 1).change(mask=random(9, 100) > 0, scale=0.7)),
    "cross_entropy": Case(lambda: CrossEntropy.draw((9, 1000), 1, BF16, labels=True, smoothing=0.1)),
    "attention": Case(lambda: Attention.draw((1, 2, 70, 64), 70, BF16)),
    "attention with everything": Case(noisy_attention),
    "attention of doubles": Case(lambda: Attention.draw((1, 2, 20, 16), 40, torch.float64, 1, causal=True)),
    "attention of narrow heads": Case(lambda: Attention.draw((1, 1, 18, 12), 37, value_width=20)),
    "dropout": Case(lambda: dropout_calls(BF16)),
}


def silu() -> LayerNorm:
    return LayerNorm.draw((2, 2, 2, 36), norm_ndim=2, grouped=1, silu=True)


@pytest.mark.parametrize("chip", EMULATED)
@pytest.mark.parametrize("name", CASES)
def test_launcher(name, chip):
    case = CASES[name]
    for call in case.calls():
        report = emulate(call, chip, case.limits)
        if case.reads:
            hold_traffic(call, report, case.reads)


def hold_traffic(call: Call, report: KernelReport, reads: int) -> None:
    """Operands of full size are read so often at most, 16 bytes at a time, and results written once, so too."""
    name = call.launcher.__name__
    largest = max(x.nbytes for x in call.tensors())
    loaded: dict[str, int] = {}
    for launch in report.launches:
        for is_store, traffic in enumerate((launch.loads, launch.stores)):
            for argument, each in traffic.items():
                if each.distinct_bytes < largest // 2:
                    continue
                assert each.widths == {16}, f"{name}: {argument} in parts of {sorted(each.widths)} bytes"
                assert 32 * each.sectors == each.num_bytes, f"{name}: {argument} takes {each.sectors} sectors"
                if is_store:
                    assert each.num_bytes == each.distinct_bytes, f"{name} stores {argument} twice"
                else:
                    loaded[argument] = loaded.get(argument, 0) + each.num_bytes
                    most = reads * each.distinct_bytes
                    assert loaded[argument] <= most, f"{name} loads {loaded[argument]} bytes of {argument}, not {most}"
