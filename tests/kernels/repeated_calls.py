"""Calls that repeat an earlier one by its recipe, beside the same calls without: what they launch, and the host's time.

`kernel_calls` runs the checks; `python -m tests.kernels.repeated_calls` prints the times of each launcher, in times of
Triton's own launches of the same kernels.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import statistics
import time
import unittest.mock
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perf.calls import Call, random
from perf.ops.add_layer_norm import AddLayerNorm
from perf.ops.attention import Attention
from perf.ops.batch_norm import BatchNorm
from perf.ops.batch_norm_relu import BatchNormRelu
from perf.ops.cross_entropy import CrossEntropy
from perf.ops.layer_norm import LayerNorm
from perf.ops.log_softmax import LogSoftmax
from perf.ops.softmax import Softmax
from primitives import functional, use_backend
from tests.kernels.calls import ROW_PLANS, channels_last, dropout_calls, launched_by
from tests.kernels.stand_ins import Driver, launched, launches, stand_ins
from triton_kernels.runtime.kernel import Kernel, intercept, observe
from triton_kernels.runtime.launch_cache import Recipe, repeatable
from triton_kernels.runtime.limits import use_limits
from triton_kernels.runtime.planned import set_advisor


@contextlib.contextmanager
def only_repeated() -> Iterator[None]:
    """Context in which a launch that does not repeat an earlier one is an error."""
    with unittest.mock.patch.object(Kernel, "__getitem__", side_effect=AssertionError("not repeated")):
        yield


def elsewhere(x: Any) -> Any:
    """A tensor like `x` in every respect, in other memory."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone(), x.storage_offset(), x.size(), x.stride())


def check_same(
    call: Call, expected: tuple[list[Tensor], list[tuple]], actual: tuple[list[Tensor], list[tuple]]
) -> None:
    """The same kernels with the same arguments: of new memory, whatever takes its place, which nothing else is in."""
    (results, launched), (others, again) = expected, actual
    assert [(x.shape, x.stride(), x.dtype) for x in results] == [(x.shape, x.stride(), x.dtype) for x in others]
    assert [launch[:3] for launch in launched] == [launch[:3] for launch in again]
    # No kernel runs: what is not filled at first has the NaN of unwritten memory.
    assert all(torch.equal(x.isnan(), y.isnan()) for x, y in zip(results, others, strict=True))
    # By how much each storage has moved, and what they take now.
    moved = {x.untyped_storage().data_ptr(): 0 for x in call.tensors()}
    moved |= {x.untyped_storage().data_ptr(): y.data_ptr() - x.data_ptr() for x, y in zip(results, others, strict=True)}
    spans = {(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in (*call.tensors(), *others)}
    for (*_, args), (*_, addresses) in zip(launched, again, strict=True):
        for x, y in zip(args, addresses, strict=True):
            address = y.data_ptr() if isinstance(y, torch.Tensor) else y
            if not isinstance(x, torch.Tensor) or not x.numel():
                assert address == (0 if isinstance(x, torch.Tensor) else x)
                continue
            storage, distance = x.untyped_storage(), address - x.data_ptr()
            assert distance == moved.setdefault(storage.data_ptr(), distance)
            spans.add((storage.data_ptr() + distance, storage.nbytes()))
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(sorted(spans)))


def compare(call: Call) -> None:
    """The call launches what its launcher launches by itself."""
    plain: Any = call.launcher.__wrapped__  # pyright: ignore[reportFunctionMemberAccess] - a decorated function
    check_same(call, launched(lambda: plain(*call.args)), launched(call.results))


def check_repeated(call: Call) -> None:
    """The call launches the same without its `Kernel`s."""
    with only_repeated():
        call.results()
    compare(call)


def check(call: Call) -> None:
    """The third of like calls repeats the second, with tensors that lie elsewhere."""
    for _ in range(2):
        call.results()
    check_repeated(call._replace(args=tuple(map(elsewhere, call.args))))


def check_every_launcher() -> None:
    """Every mode, with what may be absent, in several layouts and in every plan of rows."""
    rows = LayerNorm.draw((6, 40)), LogSoftmax.draw((6, 40), 1), LogSoftmax.draw((40, 6), 0)
    images, last = BatchNorm.draw((4, 8, 5, 5)), BatchNorm.draw((4, 8, 5, 5), torch.bfloat16, arrange=channels_last)
    pairs = {"bias": random(2, 4, 24, 24), "mask": random(1, 24, 24) > 0, "causal": True}
    noise = {"seed": torch.tensor(3), "offset": torch.tensor(5), "dropout_p": 0.3}
    attention = [Attention.draw((2, 4, 24, 16), 24, key_heads=2, **options) for options in ({}, pairs | noise)]
    choices = (operands.choices(mode) for operands in (*rows, images) for mode in operands.modes())
    for call in itertools.chain(*choices, last.calls(), *(each.calls() for each in attention), dropout_calls()):
        check(call)
    for limits in ROW_PLANS.values():
        with use_limits(**limits):
            for call in itertools.chain(*(operands.calls() for operands in rows)):
                check(call)


@repeatable
def inner(x: Tensor) -> Tensor:
    """A launcher within another one."""
    y = torch.empty_like(x)
    TOY_KERNEL[(1,)](x, y, None)
    return y


@repeatable
def outer(x: Tensor) -> tuple[Tensor, Tensor]:
    """Launches on parts of an argument, of a result and of scratch, and on a result of its own launcher."""
    small, large, other, y = x.new_empty(5), x.new_empty(40), x.new_empty(5), torch.empty_like(x)
    TOY_KERNEL[(2,)](x[2:], small[1:], large[10:])
    TOY_KERNEL[(3,)](inner(x), small[1:], y[1:])
    TOY_KERNEL[(4,)](other, None, None)
    return y, x.new_zeros(0)


@repeatable
def late_zeros(x: Tensor) -> Tensor:
    """Fills a result with zeros, but not at first."""
    y = torch.empty_like(x)
    TOY_KERNEL[(1,)](x, y, None)
    return y.zero_()


def _toy_kernel(x_ptr, y_ptr, z_ptr):
    pass


TOY_KERNEL = Kernel(_toy_kernel)


def check_never_repeated(call: Call) -> None:
    """The call launches through its `Kernel`s however often it was made."""
    for _ in range(3):
        call.results()
    with unittest.mock.patch.object(Kernel, "__getitem__") as launch:
        call.results()
    assert launch.called


def check_toys_and_threads() -> None:
    """Things that no launcher of today does, and many threads that record and repeat at once."""
    calls = [Call(outer, (random(4, 4),)), *(LogSoftmax.draw((size, 24), 1).call("bwd") for size in range(1, 8))]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        shapes = pool.map(lambda n: (calls[n % 8].results()[0].shape, calls[n % 8].args[0].shape), range(200))
    assert all(found == expected for found, expected in shapes)
    for call in calls:
        check(call)
    check_never_repeated(Call(late_zeros, calls[0].args))
    # While plans are being tuned.
    set_advisor(lambda request: (request.default, False))
    check_never_repeated(calls[1])
    set_advisor(None)


CALL = LayerNorm.draw((8, 64)).call("jvp")
X, X_DOT = 0, 4


def with_argument(call: Call, position: int, value: Any) -> Call:
    """The call with another argument."""
    return call._replace(args=(*call.args[:position], value, *call.args[position + 1 :]))


def check_keys() -> None:
    """A recipe serves no call that differs in what kernels are compiled or planned for."""
    x = CALL.args[X]
    others = random(8 * 64 + 1)[1:].view(8, 64), random(8, 80)[:, :64], random(6, 64), x.double(), x.t().clone().t()
    calls = [CALL, *(with_argument(CALL, X, other) for other in others), with_argument(CALL, X_DOT, None)]
    for call in 2 * calls:
        check(call)
    # A recipe that is recorded with one tensor in two places serves two.
    call = LayerNorm.draw((5, 64)).call("jvp")
    for _ in range(2):
        with_argument(call, X_DOT, call.args[X]).results()
    check_repeated(call)


def check_who_comes_between(driver: Driver) -> None:
    """Who watches launches sees them, other plans are followed, and the device of the tensors is the one in use."""
    check(CALL)
    seen = []
    for watch in (intercept, observe):
        with watch(lambda *launch: seen.append(launch)):
            CALL.results()
    kernel = seen[0][0].function
    kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(args))
    CALL.results()
    kernel.pre_run_hooks.clear()
    assert len(seen) == 3
    check(CALL)
    with use_limits(**ROW_PLANS["shared"]):
        compare(CALL)
        check(CALL)
    compare(CALL)
    check(CALL)
    driver.device = 1
    with unittest.mock.patch("torch.cuda.device", lambda device: unittest.mock.patch.object(driver, "device", device)):
        assert [launch[2] for launch in launched(CALL.results)[1]] == [100]
    driver.device = 0


def check_memory() -> None:
    """Recipes keep no tensor alive, and their number is bounded."""

    def num_recipes() -> int:
        return sum(isinstance(thing, Recipe) for thing in gc.get_objects())

    call, results = LayerNorm.draw((7, 64)).call("bwd"), []
    args = list(call.args)
    call = call._replace(args=())
    for _ in range(3):
        results += call._replace(args=tuple(args)).results()
    references = [weakref.ref(x) for x in (*args, *results) if isinstance(x, torch.Tensor)]
    for held in (args, results, launches):
        held.clear()
    assert not any(reference() is not None for reference in references)
    before = num_recipes()
    with unittest.mock.patch("triton_kernels.runtime.launch_cache.MAX_RECIPES", before + 4):
        for size in range(1, 20):
            for _ in range(2):
                LogSoftmax.draw((size, 8), 1).call("fwd").results()
    assert 0 < num_recipes() - before <= before + 4


def check_all() -> None:
    """All checks."""
    with stand_ins() as driver:
        # Fills new memory.
        torch.use_deterministic_algorithms(True)
        check_every_launcher()
        check_toys_and_threads()
        check_keys()
        check_who_comes_between(driver)
        check_memory()
        torch.use_deterministic_algorithms(False)


# The most that a launcher may take, of the time of Triton's own launches of the same kernels. Calls take 0.4 to 1 by a
# recipe and 2.5 to 7 without. With dispatch and autograd, of which torch's engine alone takes a launch's time or two,
# `steps_of_users` have bounds of their own.
MOST_OF_TRITON = 1.5
ROUNDS, CALLS_PER_ROUND = 15, 10


def timed_calls() -> list[Call]:
    """A call of each launcher, as rules call it."""
    attention = Attention.draw((2, 4, 64, 32), 64)
    groups = LayerNorm.draw((8, 4, 4, 196), norm_ndim=2, grouped=1, silu=True)
    rows = [draw((64, 512), 1) for draw in (LogSoftmax.draw, Softmax.draw, CrossEntropy.draw)]
    images = BatchNorm.draw((8, 16, 14, 14)), BatchNormRelu.draw((8, 16, 14, 14))
    operands = *images, LayerNorm.draw((64, 512)), AddLayerNorm.draw((64, 512)), groups, *rows, attention
    return [*(call for each in operands for call in each.calls()), dropout_calls()[0]]


def steps_of_users() -> Iterator[tuple[str, Callable[[], Any], float]]:
    """Calls of functions, dispatched and differentiated: a value, value and gradients, and second order."""
    rows, images = random(64, 512).requires_grad_(), random(8, 16, 14, 14).requires_grad_()
    running = torch.zeros(16), torch.ones(16)
    norm = [random(512, seed=seed).requires_grad_() for seed in (1, 2)]
    channels = [random(16, seed=seed).requires_grad_() for seed in (1, 2)]
    functions: dict[str, tuple[Callable[..., Tensor], list[Tensor], float]] = {
        "layer_norm": (lambda x, *params: functional.layer_norm(x, (512,), *params), [rows, *norm], 5),
        "batch_norm": (
            lambda x, *params: functional.batch_norm(x, *running, *params, training=True),
            [images, *channels],
            3,
        ),
        "log_softmax": (lambda x: functional.log_softmax(x, 1), [rows], 5),
    }
    for name, (function, inputs, most) in functions.items():
        value = partial(function, *inputs)
        first = partial(_gradients, value, inputs)

        def second(first: Any = first, inputs: Any = inputs) -> Any:
            return _gradients(lambda: first(create_graph=True)[0], inputs)

        yield f"{name}, value", value, most
        yield f"{name}, with gradients", first, most
        yield f"{name}, second order", second, most


def _gradients(value: Callable[[], Tensor], inputs: list[Tensor], create_graph: bool = False) -> Any:
    y = value()
    return torch.autograd.grad(y, inputs, y.detach(), create_graph=create_graph, allow_unused=True)


def time_in_launches(run: Callable[[], Any], launching: Callable[[], Any]) -> float:
    """Median time of `run`, in times of Triton's own launches of what `launching` launches."""
    made = launched_by(launching)

    def launch_all() -> None:
        for kernel, grid, args, constants in made:
            kernel.function[grid](*args, **constants)

    def processor_time(function: Callable[[], Any]) -> float:
        start = time.process_time()
        for _ in range(CALLS_PER_ROUND):
            function()
        return time.process_time() - start

    for function in (launch_all, run, run):
        function()
    return statistics.median(processor_time(run) / processor_time(launch_all) for _ in range(ROUNDS))


def on_stand_ins() -> Any:
    """Context in which functions launch on tensors of the CPU, though Triton is not its interpreter."""
    stack = contextlib.ExitStack()
    stack.enter_context(unittest.mock.patch("primitives._core.backend.require_interpreter", str))
    stack.enter_context(use_backend("triton"))
    return stack


def check_host_time() -> None:
    """A call takes little more than Triton takes to find its kernels."""
    gc.disable()
    with stand_ins():
        found = [(c.launcher.__name__, time_in_launches(c.results, c.results), MOST_OF_TRITON) for c in timed_calls()]
        call = timed_calls()[0]
        without: Any = call.launcher.__wrapped__  # pyright: ignore[reportFunctionMemberAccess] - decorated
        plain = time_in_launches(partial(without, *call.args), call.results)
        assert plain > MOST_OF_TRITON, "a call without a recipe passes"
        with on_stand_ins():
            found += [(name, time_in_launches(run, run), most) for name, run, most in steps_of_users()]
    gc.enable()
    slow = [(name, ratio, most) for name, ratio, most in found if ratio > most]
    assert not slow, slow


if __name__ == "__main__":
    gc.disable()
    with stand_ins():
        for timed in timed_calls():
            plain: Any = timed.launcher.__wrapped__  # pyright: ignore[reportFunctionMemberAccess] - decorated
            runs = partial(plain, *timed.args), timed.results
            before, after = (time_in_launches(run, timed.results) for run in runs)
            print(f"{timed.launcher.__name__:<22} without a recipe {before:.2f}, with it {after:.2f}")  # noqa: T201 - what a user asked for
        with on_stand_ins():
            for name, step, _ in steps_of_users():
                print(f"{name:<27} {time_in_launches(step, step):.2f}")  # noqa: T201 - likewise
