"""Calls that repeat an earlier one by its recipe, held to what their launchers launch by themselves.

`kernel_calls` runs the checks, in a process without Triton's interpreter.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from perf.calls import Call, random
from perf.ops.attention import Attention
from perf.ops.batch_norm import BatchNorm
from perf.ops.layer_norm import LayerNorm
from perf.ops.log_softmax import LogSoftmax
from primitives.kernels.runtime import launch_cache
from primitives.kernels.runtime.kernel import Kernel
from primitives.kernels.runtime.limits import use_limits
from primitives.kernels.runtime.planned import set_advisor
from tests.kernels.calls import ROW_PLANS, channels_last, copying_calls
from tests.kernels.stand_ins import launched, launches
from tests.kernels.test_launchers_are_covered import some_calls

CALL = LayerNorm.draw((8, 64)).call("jvp")
X, X_DOT = 0, 4


def elsewhere(x: Any) -> Any:
    """A tensor like `x` in every respect, in other memory."""
    is_tensor = isinstance(x, Tensor)
    return x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride()) if is_tensor else x


def with_argument(position: int, value: Any) -> Call:
    """`CALL` with another argument."""
    return CALL._replace(args=(*CALL.args[:position], value, *CALL.args[position + 1 :]))


def plain(call: Call) -> Call:
    """The call of the launcher without its recipes."""
    return call._replace(launcher=vars(call.launcher)["__wrapped__"])


def compare(call: Call) -> None:
    """The call launches what its launcher launches by itself: with new memory, which nothing else is in."""
    (results, first), (others, again) = launched(plain(call).results), launched(call.results)
    assert [(x.shape, x.stride(), x.dtype) for x in results] == [(x.shape, x.stride(), x.dtype) for x in others]
    assert [launch[:3] for launch in first] == [launch[:3] for launch in again]
    # No kernel runs: what is not filled at first has the NaN of unwritten memory.
    assert all(torch.equal(x.isnan(), y.isnan()) for x, y in zip(results, others, strict=True))
    # By how much each storage has moved, and what they take now.
    moved = {x.untyped_storage().data_ptr(): 0 for x in call.tensors()}
    moved |= {x.untyped_storage().data_ptr(): y.data_ptr() - x.data_ptr() for x, y in zip(results, others, strict=True)}
    spans = {(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in (*call.tensors(), *others)}
    for x, y in zip(*([arg for *_, args in found for arg in args] for found in (first, again)), strict=True):
        address = y.data_ptr() if isinstance(y, Tensor) else y
        if isinstance(x, Tensor) and x.numel():
            storage, distance = x.untyped_storage(), address - x.data_ptr()
            assert distance == moved.setdefault(storage.data_ptr(), distance)
            spans.add((storage.data_ptr() + distance, storage.nbytes()))
        else:
            assert address == (0 if isinstance(x, Tensor) else x)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(sorted(spans)))


def check(call: Call, recorded: Call | None = None) -> None:
    """The third of like calls repeats the second, with tensors that lie elsewhere and without the `Kernel`s."""
    for _ in range(2):
        (recorded or call).results()
    call = call._replace(args=tuple(map(elsewhere, call.args)))
    with patch.object(Kernel, "__getitem__", side_effect=RuntimeError("not repeated")):
        call.results()
    compare(call)


def check_every_launcher() -> None:
    """Every mode, with what may be absent, in several layouts and in every plan of rows."""
    rows = LayerNorm.draw((6, 40)), LogSoftmax.draw((6, 40), 1), LogSoftmax.draw((40, 6), 0)
    images, last = BatchNorm.draw((4, 8, 5, 5)), BatchNorm.draw((4, 8, 5, 5), torch.bfloat16, arrange=channels_last)
    pairs = {"bias": random(2, 4, 24, 24), "mask": random(1, 24, 24) > 0, "causal": True}
    noise = {"seed": torch.tensor(3), "offset": torch.tensor(5), "dropout_p": 0.3}
    noisy = Attention.draw((2, 4, 24, 16), 24, key_heads=2, **pairs, **noise)
    choices = (operands.choices(mode) for operands in (*rows, images) for mode in operands.modes())
    for call in itertools.chain(some_calls(), *choices, last.calls(), noisy.calls()):
        check(call)
    for limits, operands in itertools.product(ROW_PLANS.values(), rows):
        with use_limits(**limits):
            for call in operands.calls():
                check(call)
    # What is copied before it is read is copied in every call, and while plans are tuned every call asks for its plan.
    for call in copying_calls(torch.float32):
        compare(call)
    set_advisor(lambda request: (request.default, False))
    compare(CALL)
    set_advisor(None)


def check_keys() -> None:
    """A recipe serves no call that differs in what kernels are compiled or planned for; one that did would be seen."""
    x = CALL.args[X]
    others = random(513)[1:].view(8, 64), random(8, 80)[:, :64], x[:6], x.double(), x.t().contiguous().t()
    calls = [with_argument(X, other) for other in others]
    for call in 2 * [CALL, *calls, with_argument(X_DOT, None)]:
        check(call)

    def keyless(args: tuple) -> tuple:
        return "any", [arg.data_ptr() for arg in args if isinstance(arg, Tensor)]

    # The fault: one recipe of the launcher serves all calls, and is stale for each other one.
    with patch("primitives.kernels.runtime.launch_cache._described", keyless):
        # A recipe that is recorded with one tensor in two places serves two.
        check(CALL, recorded=with_argument(X_DOT, x))
        for call in calls:
            with pytest.raises(AssertionError):
                compare(call)


def check_memory() -> None:
    """Recipes keep no tensor alive, and their number is bounded."""
    call = LayerNorm.draw((7, 64)).call("bwd")
    references = [weakref.ref(x) for x in call.args if isinstance(x, Tensor)]
    references += [weakref.ref(x) for _ in range(3) for x in call.results()]
    del call
    launches.clear()
    assert not any(reference() is not None for reference in references)

    def num_recipes() -> int:
        return sum(isinstance(thing, launch_cache.Recipe) for thing in gc.get_objects())

    before = num_recipes()
    with patch.object(launch_cache, "MAX_RECIPES", 4):
        for size in (n // 2 for n in range(2, 40)):
            LogSoftmax.draw((size, 8), 1).call("fwd").results()
    assert num_recipes() - before <= 4
