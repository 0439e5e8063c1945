"""`Kernel` launches what Triton would launch, with less work, and lets launches be watched and replaced."""

import threading

import pytest
import torch

from primitives.kernels.norms import layer_norm
from primitives.kernels.runtime.kernel import intercept, is_tracing, observe, tracing
from tests.kernels.interpreting import run_compiled


def test_compiled_launches():
    run_compiled("tests.kernels.kernel_calls")


X = torch.arange(8.0).reshape(2, 4)


def normalize():
    return layer_norm.layer_norm_fwd(X, None, None, 1, 0, 1e-5)[0]


def in_another_thread(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_observers_see_launches_from_the_inside_out_and_an_interceptor_takes_them():
    expected, seen, names = normalize(), [], []

    def note(name):
        return lambda *launch: names.append(name)

    with observe(lambda *launch: seen.append(launch)):
        torch.testing.assert_close(normalize(), expected, rtol=0, atol=0)
        with intercept(note("taken")), observe(note("inner")), observe(note("innermost")):
            # The memory of the tests is poisoned before it is written.
            assert normalize().isnan().all()
    ((kernel, grid, args, constants),) = seen
    assert (kernel.__name__, grid, constants["num_cols"]) == ("layer_norm_fwd_kernel", (1,), 4)
    assert args[0] is X
    assert names == ["innermost", "inner", "taken"]


def test_what_a_callback_raises_reaches_the_caller_and_ends_the_watch():
    def refuse(*launch):
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"), intercept(refuse):
        normalize()
    assert not normalize().isnan().any()


def test_watchers_of_other_threads_may_end_in_any_order():
    seen = []
    first, second = (observe(lambda *launch, number=number: seen.append(number)) for number in (1, 2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    # Launches of every thread are seen.
    in_another_thread(normalize)
    second.__exit__(None, None, None)
    normalize()
    assert seen == [2]


def test_tracing_belongs_to_the_thread():
    answers = []
    with tracing(), tracing():
        in_another_thread(lambda: answers.append(is_tracing()))
        answers.append(is_tracing())
    assert [*answers, is_tracing()] == [False, True, False]
