"""Tuning, with a timer of its own: what is chosen, what is refused, and what is kept."""

import concurrent.futures
import importlib
import itertools
import json
import re
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from perf.ops.layer_norm import LayerNorm
from primitives.kernels import tuning
from primitives.kernels.runtime.chips import CHIPS, use_chip
from primitives.kernels.runtime.planned import planned
from tests.kernels.calls import ROW_PLANS
from tests.kernels.truth import check_values

X = torch.arange(6.0)


@dataclass(frozen=True)
class Plan:
    """A plan of nothing but a number, which the launcher below is as slow as."""

    num_warps: int


class Toy:
    """A launcher with a plan function; its default plan is `DEFAULT`, and one of the candidates is the best."""

    DEFAULT = 4

    def __init__(self):
        self.ran, self.timed = [], 0
        self.broken, self.wrong = (), ()
        self.error = RuntimeError("out of resources")

        @planned(lambda plan, device, arguments: [replace(plan, num_warps=n) for n in (1, 2, 3, 8)])
        def plan_toy(size: int, device: torch.device) -> Plan:
            return Plan(self.DEFAULT)

        @tuning.tunable
        def launcher(x):
            num_warps = plan_toy(x.numel(), x.device).num_warps
            self.ran.append(num_warps)
            if num_warps in self.broken:
                raise self.error
            return x + 1.0, (x * 2.0 if num_warps in self.wrong else x * (1 + 1e-7 * num_warps))

        self.launcher = launcher

    def timer(self, run):
        run()
        self.timed += 1
        return float(self.ran[-1])

    def last(self, *sizes):
        """The plan that ran last, once tensors of some sizes have been launched."""
        for size in sizes:
            self.launcher(X[:size])
        return self.ran[-1]

    def tune(self, path, timer=None):
        tuning.enable(path, timer or self.timer, on_any_device=True)


@pytest.fixture
def toy():
    return Toy()


@pytest.fixture
def path(tmp_path):
    """Where choices are kept; tuning is off again after the test."""
    yield tmp_path / "folder" / "plans.json"
    tuning.disable()


def test_the_fastest_plan_is_kept(toy, path):
    toy.tune(path)
    assert toy.launcher(X)[1].equal(X * (1 + 4e-7))
    # The first call is answered by the default plan, which takes part in the timing like any other.
    assert (toy.ran[0], toy.timed) == (4, 5)
    del toy.ran[:]
    toy.last(6, 6)
    assert (toy.ran, toy.timed) == ([1, 1], 5)
    # Another size is another question.
    toy.last(3)
    assert toy.timed == 10


FAULTS = [
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("HIP error: unspecified launch failure"),
    torch.AcceleratorError("CUDA error: misaligned address"),
]
REFUSALS = [
    RuntimeError("Triton Error [CUDA]: too many resources requested for launch"),
    torch.AcceleratorError("CUDA error: out of memory"),
    OutOfResources(1 << 20, 232448, "shared memory"),
]


@pytest.mark.parametrize("error", [*FAULTS, *REFUSALS, "wrong"], ids=str)
def test_plans_that_fail_or_differ_are_refused_and_a_failed_device_is_not_taken_for_a_slow_plan(toy, path, error):
    if error == "wrong":
        toy.wrong = (1,)
    else:
        toy.broken, toy.error = (1,), error
    toy.tune(path)
    if error not in FAULTS:
        assert toy.last(6, 6) == 2
        return
    with pytest.raises(type(error), match=re.escape(str(error))):
        toy.launcher(X)
    assert toy.ran[-1] == 1
    assert not path.exists()


def test_a_gain_within_the_noise_changes_nothing_and_errors_of_the_default_plan_are_the_caller_s(toy, path):
    toy.tune(path, lambda run: (run(), 100.0 - toy.ran[-1] / 10)[1])
    assert toy.last(6, 6) == 4
    toy.broken = (4,)
    with pytest.raises(RuntimeError, match="out of resources"):
        toy.launcher(X)


def test_choices_outlive_the_process_but_not_their_default_and_belong_to_a_chip(toy, path):
    toy.tune(path)
    toy.launcher(X)
    tuning.disable()
    assert toy.last(6) == 4
    tuning.enable(path, toy.timer)
    assert (toy.last(6), toy.timed) == (1, 5)
    with use_chip(CHIPS["sm_80"]):
        tuning.enable(path, toy.timer)
        assert toy.last(6) == 4
    toy.DEFAULT = 8
    toy.tune(path)
    toy.launcher(X)
    assert toy.timed > 5


@pytest.mark.usefixtures("on_device")
def test_a_launcher_is_right_before_and_after_it_is_tuned(device, path, use_limits):
    use_limits(**ROW_PLANS["swept"])
    # Without a device each plan seems faster than the one before it.
    times = itertools.count(1000, -50)
    timer = None if device.type == "cuda" else lambda run: (run(), float(next(times)))[1]
    tuning.enable(path, timer, on_any_device=True)
    call = LayerNorm.draw((3, 24)).call("jvp")
    check_values(call)
    entries = next(iter(json.loads(path.read_text())["choices"].values())).values()
    assert timer is None or any(entry["chosen"] != entry["default"] for entry in entries)
    check_values(call)


def test_choices_made_with_other_sources_are_not_taken(toy, path):
    toy.tune(path)
    toy.launcher(X)
    content = path.read_text()
    assert f"sources {tuning.source_hash()}" in content
    path.write_text(content.replace(tuning.source_hash(), "0" * 12))
    tuning.enable(path, toy.timer)
    assert toy.last(6) == 4
    toy.tune(path)
    assert (toy.last(6, 6), toy.timed) == (1, 10)


def test_every_source_is_in_the_hash(tmp_path):
    file = tmp_path / "launch" / "channels.py"
    file.parent.mkdir()
    hashes = set()
    for text in ("x = 1", "x = 2"):
        file.write_text(text)
        hashes.add(tuning.source_hash(tmp_path))
    assert len(hashes) == 2


def test_files_are_merged_and_the_first_choice_stays(toy, path):
    toy.tune(path)
    toy.launcher(X)
    theirs = path.read_text()
    path.unlink()
    toy.tune(path, lambda run: (run(), -float(toy.ran[-1]))[1])
    toy.launcher(X[:3])
    path.write_text(theirs)
    toy.launcher(X)
    entries = next(iter(json.loads(path.read_text())["choices"].values()))
    assert {key: entry["chosen"]["num_warps"] for key, entry in entries.items()} == {"plan_toy(3)": 8, "plan_toy(6)": 1}
    assert toy.last(6) == 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_process_that_is_interrupted_while_it_writes_leaves_the_file_of_before(toy, path, monkeypatch):
    def dump(content, file, **options):
        file.write(json.dumps(content)[:20])
        raise KeyboardInterrupt

    toy.tune(path)
    toy.launcher(X)
    before = path.read_text()
    monkeypatch.setattr(json, "dump", dump)
    with pytest.raises(KeyboardInterrupt):
        toy.launcher(X[:3])
    assert path.read_text() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


BAD_CHOICE = b'{"format": 1, "choices": {"chip": {"plan_toy(6)": {"default": 3}}}}'


@pytest.mark.parametrize("content", [b"{", b"[]", BAD_CHOICE, b"\x80", None], ids=str)
def test_files_that_cannot_be_read_are_ignored(toy, path, content):
    if content is None:
        path.parent.write_text("a file, not a folder")
    else:
        path.parent.mkdir()
        path.write_bytes(content)
    with pytest.warns(UserWarning, match="cannot be read"):
        toy.tune(path)
    with pytest.warns(UserWarning, match="cannot be read|not kept"):
        toy.launcher(X)
    assert toy.last(6) == 1
    assert content is None or "plan_toy(6)" in path.read_text()


def test_nothing_is_timed_where_it_must_not_be(toy, path, monkeypatch):
    tuning.enable(path, toy.timer)
    toy.launcher(X)
    toy.tune(path)
    monkeypatch.setattr(tuning, "is_tracing", lambda: True)
    toy.launcher(X)
    assert toy.timed == 0
    # A launch of then is still tuned when it can be.
    monkeypatch.undo()
    toy.launcher(X)
    assert toy.timed == 5


def test_threads_wait_for_each_other(toy, path):
    lock = threading.Lock()

    def timer(run):
        assert lock.acquire(blocking=False), "two launches are timed at a time"
        time.sleep(0.002)
        milliseconds = toy.timer(run)
        lock.release()
        return milliseconds

    toy.tune(path, timer)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(result[0].equal(X + 1) for result in pool.map(toy.launcher, [X] * 4))
    assert toy.timed == 5


def test_choices_are_printed_and_cleared(toy, tmp_path, path, monkeypatch, capsys):
    monkeypatch.setenv("PRIMITIVES_CACHE_DIR", str(tmp_path))
    toy.tune(None)
    toy.launcher(X)
    assert tuning.main([]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("plan_toy(6)", "4.0000 ms -> 1.0000 ms, 4.00 x", "num_warps 4 -> 1"))
    assert tuning.main(["--clear"]) == 0
    assert not tuning.cache_path().exists()
    monkeypatch.delenv("PRIMITIVES_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.cache_path() == tmp_path / "torch-training-primitives" / "launch_plans.json"


def test_the_environment_turns_it_on(tmp_path, path, monkeypatch):
    monkeypatch.setenv("PRIMITIVES_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PRIMITIVES_AUTOTUNE", "1")
    assert importlib.reload(tuning).is_enabled()
    monkeypatch.setenv("PRIMITIVES_AUTOTUNE", "yes")
    with pytest.warns(UserWarning, match="got 'yes'"):
        assert not importlib.reload(tuning).is_enabled()


def test_results_that_differ_are_told_apart():
    x, words = torch.tensor([1.0, float("nan"), 1000.0]), torch.tensor([3, 1 << 31])
    # Neighbors among bfloat16 numbers below 1024 are 4 apart.
    for values, near, far in ((x, 0.01, 0.05), (x.bfloat16(), 8.0, 24.0)):
        last = torch.tensor([0.0, 0.0, 1.0], dtype=values.dtype)
        assert tuning.agree((values, words), (values + near * last, words.clone()))
        assert not tuning.agree(values, values + far * last)
    assert not tuning.agree(words, words + torch.tensor([0, 1]))
    assert not tuning.agree(x, torch.tensor([1.0, 2.0, 1000.0]))
    assert not tuning.agree((x, x), (x,))
    assert tuning.agree(x[:0], x[:0])
