"""Launches through `Kernel` beside Triton's own, and calls that repeat an earlier one by its recipe.

There is neither a GPU nor a compiler: in place of each compiled kernel stands what notes its launches.
"""

import concurrent.futures
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

from perf.calls import Call
from perf.calls import random as normal
from perf.ops.attention import Attention
from perf.ops.batch_norm import BatchNorm
from perf.ops.layer_norm import LayerNorm
from perf.ops.log_softmax import LogSoftmax
from primitives.kernels.runtime import launch_cache
from primitives.kernels.runtime.chips import CHIPS, use_chip, use_limits
from primitives.kernels.runtime.kernel import INTERPRETED, Kernel, intercept, is_tracing, observe, tracing
from primitives.kernels.runtime.launch_cache import repeatable
from primitives.kernels.runtime.planned import set_advisor
from primitives.testing._ptx.launching import StandInDriver
from tests.kernels.calls import ROW_PLANS, channels_last, copying_calls, some_calls
from tests.support import in_another_thread

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has launches of its own")

# What was launched: a description of the kernel, the grid, the stream and the arguments.
launches: list[tuple] = []


class Driver(StandInDriver):
    """Stands in for the driver of a machine with several sm_90, the first of which is in use."""

    FIRST = device = 2000

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device - self.FIRST

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""


@pytest.fixture(autouse=True)
def driver() -> Iterator[Driver]:
    """Launches are planned for sm_90 and noted, and new memory is filled with NaN."""
    functions, driver = set(), Driver("sm_90")

    def compile_nothing(source: Any, options: Any = None, **_: Any) -> CompiledKernel:
        functions.add(source.fn)
        known = repr((driver.device, source.fn.__name__, source.signature, source.constants, source.attrs, options))

        def run(x, y, z, stream, function, packed, metadata, enter_hook, exit_hook, *args):
            if enter_hook is not None:
                enter_hook(metadata)
            launches.append((known, (x, y, z), stream, args))
            if exit_hook is not None:
                exit_hook(metadata)

        compiled = CompiledKernel.__new__(CompiledKernel)
        vars(compiled).update(src=source, name=source.fn.__name__, hash=known, metadata=None, packed_metadata=None)
        vars(compiled).update(module=1, function=2, _module_pid=None, _run=run)
        return compiled

    triton.runtime.driver.set_active(driver)
    torch.use_deterministic_algorithms(True)
    with use_chip(CHIPS["sm_90"]), patch("triton.compiler.compile", compile_nothing):
        yield driver
    torch.use_deterministic_algorithms(False)
    triton.runtime.driver.set_active(None)
    for function in functions:
        # Its binders hold the stand-in.
        function.device_caches.clear()


def launched(run: Callable[[], object]) -> list[tuple]:
    """What `run` launches."""
    launches.clear()
    run()
    return launches.copy()


# ruff: noqa: N803 - constants of a kernel are capitals
def _sample_kernel(
    x_ptr, y_ptr, num_rows, size, strides, SCALE: tl.constexpr, BLOCK: tl.constexpr = 32, FLAG: tl.constexpr = False
):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets * strides[0] + strides[1], mask=offsets < size, other=0.0)
    if y_ptr is not None:
        x += num_rows
    tl.store(x_ptr + offsets, x * SCALE)


@pytest.fixture
def kernel() -> Kernel:
    """A kernel that nothing was compiled of yet."""
    return new_kernel()


def new_kernel() -> Kernel:
    return Kernel(_sample_kernel, unspecialized={"num_rows"})


memory = torch.zeros(64)
assert memory.data_ptr() % 16 == 0
X, UNALIGNED, DOUBLE = memory[:32], memory[1:33], torch.zeros(32, dtype=torch.float64)
ARGS, CONSTANTS = (X, X, 7, 32, (1, 0)), {"SCALE": 2}

# Calls that differ from these: arguments by position, or constants.
CHANGES = [
    {}, {0: UNALIGNED}, {0: DOUBLE}, {1: UNALIGNED}, {1: None},
    {2: 1}, {2: 16}, {2: 2**31}, {2: 2**63}, {2: 7.0}, {2: True},
    {3: 1}, {3: 17}, {3: 2**31}, {3: 16.0},
    {4: (1, 1)}, {4: (2, 16)}, {4: (1, 0, 5)}, {4: (2**31 + 1, 0)},
    {"SCALE": 3}, {"BLOCK": 16}, {"num_warps": 1},
]  # fmt: skip
VARIATIONS: list[tuple[tuple, dict]] = [
    (
        tuple(change.get(i, arg) for i, arg in enumerate(ARGS)),
        CONSTANTS | {name: value for name, value in change.items() if isinstance(name, str)},
    )
    for change in CHANGES
]
# A constant by position, and a later one alone; an argument by keyword, which is left to Triton.
VARIATIONS += [((*ARGS, 2), {}), ((*ARGS, 2), {"FLAG": True}), (ARGS[:4], {"strides": (1, 0), "SCALE": 2})]


def test_the_same_kernels_are_launched_with_the_same_arguments_as_by_triton(kernel):
    reference = new_kernel().function
    # The first round fills the dictionary; afterwards every variation has to find its own entry among all others.
    for seed in range(3):
        for variation in random.Random(seed).sample(VARIATIONS, len(VARIATIONS)):
            args, constants = variation
            (expected,) = launched(lambda args=args, constants=constants: reference[(3,)](*args, **constants))
            (actual,) = launched(lambda args=args, constants=constants: kernel[(3,)](*args, **constants))
            assert expected[:3] == actual[:3], (variation, seed)
            assert all(a is b or a == b for a, b in zip(expected[3], actual[3], strict=True)), (variation, seed)


def test_grids_have_three_numbers_and_each_device_its_kernels_and_its_stream(kernel, driver):
    grids = (2,), (2, 3), (2, 3, 4), lambda meta: (meta["BLOCK"],)
    found = [launched(lambda grid=grid: kernel[grid](*ARGS, **CONSTANTS))[0] for grid in grids]
    assert [launch[1] for launch in found] == [(2, 1, 1), (2, 3, 1), (2, 3, 4), (32, 1, 1)]
    check_repeated(CALL)
    driver.device = driver.FIRST + 1
    ((compiled, _, stream, _),) = launched(lambda: kernel[(1,)](*ARGS, **CONSTANTS))
    assert (compiled != found[0][0], stream) == (True, 101)
    # A recipe launches on the device of its tensors.
    with patch("torch.cuda.device", lambda device: patch.object(driver, "device", device)):
        assert [launch[2] for launch in launched(CALL.results)] == [100]


def test_hooks_of_triton_see_every_launch():
    runtime: Any = knobs.runtime
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        kernel, calls = new_kernel(), []
        for change in (lambda hook: None, chain.add, chain.remove):
            change(calls.append)
            kernel[(1,)](*ARGS, **CONSTANTS)
        assert len(calls) == 1


def test_multiplications_are_fused_with_additions_whatever_tritons_default_is(kernel):
    with patch.object(knobs.language, "default_fp_fusion", False):
        compiled = kernel.warmup(*ARGS, grid=(1,), **CONSTANTS)
        assert "'enable_fp_fusion': True" in compiled.hash
        pinned, default = (
            launched(lambda one=one: one[(1,)](*ARGS, **CONSTANTS))[0] for one in (kernel, kernel.function)
        )
    assert pinned[0] == compiled.hash != default[0]


def test_many_threads_may_launch_at_once(kernel):
    mixed = random.Random(0).sample(8 * VARIATIONS[:8], 64)

    def launch_all():
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda variation: kernel[(1,)](*variation[0], **variation[1]), mixed))

    assert len(launched(launch_all)) == 64


def test_observers_see_launches_from_the_inside_out_and_an_interceptor_takes_them(kernel):
    def note(name):
        return lambda *launch: names.append(name)

    def launch():
        kernel[(1,)](*ARGS, **CONSTANTS)

    seen, names = [], []
    with observe(lambda *launch: seen.append(launch)):
        assert len(launched(launch)) == 1
        with intercept(note("taken")), observe(note("inner")), observe(note("innermost")):
            assert not launched(launch)
    assert seen == [(kernel, (1,), ARGS, CONSTANTS)]
    assert names == ["innermost", "inner", "taken"]

    def refuse(*launch):
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"), intercept(refuse):
        launch()
    assert len(launched(launch)) == 1


def test_watchers_of_other_threads_may_end_in_any_order_and_tracing_belongs_to_the_thread(kernel):
    seen, answers = [], []
    first, second = (observe(lambda *launch, number=number: seen.append(number)) for number in (1, 2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    # Launches of every thread are seen.
    in_another_thread(lambda: kernel[(1,)](*ARGS, **CONSTANTS))
    second.__exit__(None, None, None)
    kernel[(1,)](*ARGS, **CONSTANTS)
    assert seen == [2]
    with tracing(), tracing():
        in_another_thread(lambda: answers.append(is_tracing()))
        answers.append(is_tracing())
    assert [*answers, is_tracing()] == [False, True, False]


CALL = LayerNorm.draw((8, 64)).call("jvp")
X_PLACE, X_DOT_PLACE = 0, 4


def elsewhere(x: Any) -> Any:
    """A tensor like `x` in every respect, in other memory."""
    is_tensor = isinstance(x, Tensor)
    return x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride()) if is_tensor else x


def with_argument(position: int, value: Any) -> Call:
    """`CALL` with another argument."""
    return CALL._replace(args=(*CALL.args[:position], value, *CALL.args[position + 1 :]))


def compare(call: Call) -> None:
    """The call launches what its launcher launches by itself: with new memory, which nothing else is in."""
    results, others = [], []
    without_recipe = call._replace(launcher=vars(call.launcher)["__wrapped__"])
    first = launched(lambda: results.extend(without_recipe.results()))
    again = launched(lambda: others.extend(call.results()))
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


def check_repeated(call: Call, recorded: Call | None = None) -> None:
    """The third of like calls repeats the second, with tensors that lie elsewhere and without the `Kernel`s."""
    for _ in range(2):
        (recorded or call).results()
    call = call._replace(args=tuple(map(elsewhere, call.args)))
    with patch.object(Kernel, "__getitem__", side_effect=RuntimeError("not repeated")):
        call.results()
    compare(call)


def test_every_launcher_is_repeated():
    """Every mode, with what may be absent, in several layouts and in every plan of rows."""
    rows = LayerNorm.draw((6, 40)), LogSoftmax.draw((6, 40), 1), LogSoftmax.draw((40, 6), 0)
    images, last = BatchNorm.draw((4, 8, 5, 5)), BatchNorm.draw((4, 8, 5, 5), torch.bfloat16, arrange=channels_last)
    pairs = {"bias": normal(2, 4, 24, 24), "mask": normal(1, 24, 24) > 0, "causal": True}
    noise = {"seed": torch.tensor(3), "offset": torch.tensor(5), "dropout_p": 0.3}
    noisy = Attention.draw((2, 4, 24, 16), 24, key_heads=2, **pairs, **noise)
    choices = (operands.choices(mode) for operands in (*rows, images) for mode in operands.modes())
    for call in itertools.chain(some_calls(), *choices, last.calls(), noisy.calls()):
        check_repeated(call)
    for limits, operands in itertools.product(ROW_PLANS.values(), rows):
        with use_limits(**limits):
            for call in operands.calls():
                check_repeated(call)


def test_what_is_copied_is_copied_in_every_call_and_while_plans_are_tuned_every_call_asks_for_its_plan():
    for call in copying_calls(torch.float32):
        compare(call)
    asked: list[Any] = []
    set_advisor(lambda request: (asked.append(request) or request.default, False))
    for calls in range(1, 5):
        compare(CALL)
        # With the recipe and without.
        assert len(asked) == 2 * calls
    set_advisor(None)


def test_watchers_see_repeated_calls_and_other_plans_are_followed():
    check_repeated(CALL)
    seen: list[Any] = []
    for watch in (intercept, observe):
        with watch(lambda *launch: seen.append(launch)):
            CALL.results()
    hooks = seen[0][0].function.pre_run_hooks
    hooks.append(lambda *args, **kwargs: seen.append(args))
    CALL.results()
    hooks.clear()
    assert len(seen) == 3
    with use_limits(**ROW_PLANS["shared"]):
        compare(CALL)


def test_several_scratch_tensors_and_parts_of_all():
    kernel = new_kernel()

    @repeatable
    def launch(x: Tensor, is_late: bool) -> Tensor:
        small, large, y = x.new_empty(5), x.new_empty(40), torch.empty_like(x)
        for parts in ((x[2:], small[1:]), (large[10:], small[1:]), (y[1:], None)):
            kernel[(1,)](*parts, *ARGS[2:], **CONSTANTS)
        return y.zero_() if is_late else y

    check_repeated(Call(launch, (X, False)))

    @repeatable
    def launch_and_cut(x: Tensor) -> Tensor:
        y = x.new_empty(40)
        kernel[(1,)](y, None, *ARGS[2:], **CONSTANTS)
        return y[8:]

    # Zeros that come after a launch, and a result that is a part of its memory, have no recipe.
    for call in (Call(launch, (X, True)), Call(launch_and_cut, (X,))):
        with pytest.raises(RuntimeError, match="not repeated"):
            check_repeated(call)


def test_a_recipe_serves_no_call_that_differs_in_what_kernels_are_compiled_or_planned_for():
    x = CALL.args[X_PLACE]
    others = normal(513)[1:].view(8, 64), normal(8, 80)[:, :64], x[:6], x.double(), x.t().contiguous().t()
    calls = [with_argument(X_PLACE, other) for other in others]
    # A recipe that is recorded with one tensor in two places serves two.
    check_repeated(CALL, recorded=with_argument(X_DOT_PLACE, x))
    for call in 2 * [CALL, *calls, with_argument(X_DOT_PLACE, None)]:
        check_repeated(call)


def test_recipes_keep_no_tensor_alive_and_their_number_is_bounded():
    call = LayerNorm.draw((7, 64)).call("bwd")
    references = [weakref.ref(x) for x in call.args if isinstance(x, Tensor)]
    references += [weakref.ref(x) for _ in range(3) for x in call.results()]
    del call
    launches.clear()
    assert not any(reference() is not None for reference in references)

    def num_recipes() -> int:
        # Not by isinstance, which asks weak proxies that other tests have left behind.
        return sum(type(thing) is launch_cache.Recipe for thing in gc.get_objects())

    before = num_recipes()
    with patch.object(launch_cache, "MAX_RECIPES", 4):
        for size in (n // 2 for n in range(2, 40)):
            LogSoftmax.draw((size, 8), 1).call("fwd").results()
    assert num_recipes() - before <= 4
