"""`Kernel` launches what Triton would launch, with less work, and lets launches be watched and replaced.

What is compiled runs in a process of its own (`kernel_calls`), because this one has Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest
import torch

from triton_kernels import layer_norm, log_softmax
from triton_kernels._kernel import intercept, is_tracing, observe, tracing

REPOSITORY = pathlib.Path(__file__).parents[2]

# About a half is measured, on a host whose launcher does nothing; the margin is for a busy one.
MAX_OVERHEAD = 0.85


@pytest.fixture(scope="module")
def compiled() -> dict:
    """What the checks of `kernel_calls` found."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.kernels.kernel_calls"]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_same_kernel_is_launched_with_the_same_arguments_as_by_triton(compiled):
    assert compiled["same_as_triton"]["wrong"] == []


def test_triton_is_left_out_once_a_kernel_is_compiled(compiled):
    assert compiled["same_as_triton"]["slow"] == []


def test_grids_have_three_numbers(compiled):
    assert compiled["grids"] == [[2, 1, 1], [2, 3, 1], [2, 3, 4], [32, 1, 1]]


def test_each_device_has_its_kernels_and_its_stream(compiled):
    assert compiled["devices"] == [[100, 101, 100], 2]


def test_hooks_of_triton_see_every_launch(compiled):
    for name, (by_triton, by_kernel) in compiled["hooks"].items():
        # Triton also calls some when it compiles.
        assert (by_kernel >= 2) == (by_triton >= 2), name
    assert compiled["hooks"]["launch_enter_hook"] == [2, 2]


def test_a_hook_may_refuse_to_compile(compiled):
    assert compiled["refusing_hook"] == [0, 0]


def test_triton_launches_everything_where_it_is_not_as_expected(compiled):
    assert len(compiled["other_releases"]) > 4
    for name, found in compiled["other_releases"].items():
        assert found == [[False] * 3, 3], name


def test_many_threads_may_launch_at_once(compiled):
    assert compiled["threads"] == 64


def test_the_key_knows_how_far_offsets_reach_on_amd(compiled):
    assert compiled["offsets_on_amd"]


def test_every_launch_of_the_package_has_a_key(compiled):
    count, keyless = compiled["keyless_launches"]
    assert count > 8
    assert keyless == []


def test_launching_costs_less_than_by_triton(compiled):
    assert max(compiled["overhead"]) < MAX_OVERHEAD


def test_compiled_launches_are_watched_and_replaced(compiled):
    seen, launched = compiled["watched"]
    assert seen == [[[5], 5, {"SCALE": 2}], "taken"]
    assert launched == 1


X = torch.arange(8.0).reshape(2, 4)


def normalize():
    return layer_norm.layer_norm_fwd(X, None, None, 1, 0, 1e-5)[0]


def test_an_observer_sees_launches_and_changes_nothing():
    expected, seen = normalize(), []
    with observe(lambda *launch: seen.append(launch)):
        actual = normalize()
    normalize()

    ((kernel, grid, args, constants),) = seen
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert kernel.__name__ == "layer_norm_fwd_kernel"
    assert grid == (1,)
    assert args[0] is X
    assert constants["num_cols"] == 4


def test_an_interceptor_takes_the_place_of_launches():
    seen = []
    with intercept(lambda *launch: seen.append(launch[0].__name__)):
        y = normalize()
    assert seen == ["layer_norm_fwd_kernel"]
    # The memory of the tests is poisoned before it is written.
    assert y.isnan().all()


def test_the_innermost_watcher_comes_first_and_an_interceptor_hides_those_outside():
    seen = []

    def note(name):
        return lambda *launch: seen.append(name)

    with observe(note("outer")), intercept(note("taken")), observe(note("inner")), observe(note("innermost")):
        normalize()
    assert seen == ["innermost", "inner", "taken"]


def test_what_a_callback_raises_reaches_the_caller_and_ends_the_watch():
    def refuse(*launch):
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"), intercept(refuse):
        normalize()
    assert not normalize().isnan().any()


def test_watchers_of_other_threads_may_end_in_any_order():
    seen = []
    first, second = observe(lambda *launch: seen.append(1)), observe(lambda *launch: seen.append(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    # Launches of every thread are seen.
    thread = threading.Thread(target=normalize)
    thread.start()
    thread.join()
    second.__exit__(None, None, None)
    normalize()
    assert seen == [2]


def test_tracing_belongs_to_the_thread():
    answers = []
    with tracing(), tracing():
        thread = threading.Thread(target=lambda: answers.append(is_tracing()))
        thread.start()
        thread.join()
        answers.append(is_tracing())
    assert [*answers, is_tracing()] == [False, True, False]


def test_launches_of_several_kernels_are_counted():
    seen = []
    with observe(lambda *launch: seen.append(launch[0].__name__)):
        y = log_softmax.log_softmax_fwd(X, 1, None)
        normalize()
    assert y.shape == X.shape
    assert seen == ["log_softmax_fwd_kernel", "layer_norm_fwd_kernel"]
