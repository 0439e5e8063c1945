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

from triton_kernels import layer_norm
from triton_kernels._kernel import intercept, is_tracing, observe, tracing

REPOSITORY = pathlib.Path(__file__).parents[2]


def run_compiled() -> dict:
    """What the checks of `kernel_calls` found."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.kernels.kernel_calls"]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def hooks_are_called(hooks: dict[str, list[int]]) -> bool:
    """Whether `Kernel` calls the hooks that Triton calls at every launch; it also calls some when it compiles."""
    agree = all((by_kernel >= 2) == (by_triton >= 2) for by_triton, by_kernel in hooks.values())
    return agree and hooks["launch_enter_hook"] == [2, 2]


# What each check of `kernel_calls` must have found.
COMPILED = {
    "same_as_triton": (
        "the same kernels are launched with the same arguments as by Triton, which is left out once one is compiled",
        lambda found: found == {"wrong": [], "slow": []},
    ),
    "grids": ("grids have three numbers", lambda found: found == [[2, 1, 1], [2, 3, 1], [2, 3, 4], [32, 1, 1]]),
    "devices": ("each device has its kernels and its stream", lambda found: found == [[100, 101, 100], 2]),
    "hooks": ("hooks of Triton see every launch", hooks_are_called),
    "other_releases": (
        "Triton launches everything where it is not as expected",
        lambda found: len(found) > 4 and all(seen == [[False] * 3, 3] for seen in found.values()),
    ),
    "threads": ("many threads may launch at once", lambda found: found == 64),
    "offsets_on_amd": ("the key knows how far offsets reach on AMD", bool),
    "keyless_launches": ("every launch of the package has a key", lambda found: found[0] > 8 and found[1] == []),
}


# One test, because a worker of the test run that took only a part of them would compile for it all the same.
def test_compiled_launches() -> None:
    found = run_compiled()
    assert found.keys() == COMPILED.keys()
    failed = [f"{what}: {found[name]}" for name, (what, holds) in COMPILED.items() if not holds(found[name])]
    assert not failed, "\n".join(failed)


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
