"""Time in the perf suite: limits of calls and units, and what a run that is late drops."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from perf.suite import budget, plan, results, timers, training, unit
from perf.suite.budget import Budget, UnitTimeoutError, time_limit
from perf.suite.contenders import Contender
from perf.suite.plan import GPU_PROVIDERS, Options, make_plan
from perf.workloads import GPU_TRAINING
from tests.perf_fakes import RECORD, FakeClock, FakeLock, FakeTimer, bench_of, layer_norm, measure_with


@pytest.fixture
def measure(tmp_path, monkeypatch):
    return measure_with(monkeypatch, tmp_path)


def test_a_first_call_has_a_limit():
    with pytest.raises(TimeoutError, match=r"a call took more than 0\.02 s"), time_limit(0.02, "a call"):
        time.sleep(5)


def test_limits_nest():
    def call_twice():
        # The inner limit ends later, or has ended: the outer one still holds.
        with time_limit(5, "a call"):
            pass
        with contextlib.suppress(TimeoutError), time_limit(0.01, "a call"):
            time.sleep(5)
        time.sleep(5)

    with pytest.raises(TimeoutError, match=r"the unit took more than 0\.05 s"), time_limit(0.05, "the unit"):
        call_twice()


def test_a_unit_that_hangs_while_it_is_timed_is_skipped_and_not_the_run(measure, monkeypatch):
    class Timer(FakeTimer):
        def device_seconds(self, prepared):
            time.sleep(5)

    monkeypatch.setattr(Budget, "unit_seconds", lambda budget: 0.1)
    start = time.monotonic()
    message = "out of time: the unit took more than 0.1 s."

    def run():
        return list(measure({"primitives": layer_norm()}, Timer(FakeLock())).values())

    rows = unit.guarded(RECORD, ["primitives"], run)
    assert [(row["status"], row["message"]) for row in rows] == [("skipped", message)]
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("seconds_a_unit, complete", [(1.0, True), (6.0, False)])
def test_a_run_that_is_late_drops_samples_and_then_units(seconds_a_unit, complete):
    """Units of a clock of their own: a fixed part each, and the samples that they are given."""
    clock, done, sampled = FakeClock(), [], []
    made = make_plan(Options("cuda"), dict.fromkeys(GPU_PROVIDERS))
    budget = Budget(clock.now + 500, len(made["units"]), lambda: len(done), clock=clock)
    rows = []
    for item in made["units"]:
        if budget.spent:
            rows += unit.skipped(item, ["primitives"])
        else:
            seconds = budget.sampling_seconds(item["seconds"], plan.SAMPLING_SHARE["cuda"])
            sampled.append(seconds / item["seconds"])
            clock.now += seconds_a_unit + seconds
            rows.append(results.row_for(item, "primitives", "ok"))
        done.append(item)
    late = [row for row in rows if results.out_of_time(row)]
    assert clock.now <= 1000 + 500 + seconds_a_unit + plan.MAX_SAMPLING_SECONDS
    assert bool(late) != complete
    assert sampled[0] == 1.0
    if not complete:
        # First fewer samples, then none at all, and the skipped ones are the last of the plan.
        assert sampled[-1] < 0.5
        assert rows[-len(late) :] == late
        assert not any(item["workload"] == row["workload"] for row in late for item in made["units"][:30])


def test_rounds_end_with_the_time_of_the_run():
    spent = iter([False, True])
    found = timers.interleave({"a": lambda: 1.0}, 100.0, max_rounds=60, out_of_time=lambda: next(spent))
    # The first round is always run, then the one before the time is up.
    assert found == {"a": [1.0, 1.0]}


def test_a_unit_whose_turn_comes_too_late_is_skipped_and_waits_for_nothing(measure):
    clock = FakeClock()

    class Timer(FakeTimer):
        def wait(self):
            # While it waited for the device, the time ran out.
            clock.now += 200
            super().wait()

    timer = Timer(FakeLock())
    found = measure({side: layer_norm() for side in ("primitives", "torch")}, timer, clock=clock)
    assert {row["status"] for row in found.values()} == {"skipped"}
    assert all(results.out_of_time(row) for row in found.values())
    assert timer.timed == set()


@pytest.mark.parametrize("error", [TimeoutError, UnitTimeoutError])
def test_a_limit_holds_for_those_who_take_its_error_for_another(monkeypatch, error):
    monkeypatch.setattr(budget, "AGAIN_SECONDS", 0.02)
    start = time.monotonic()

    def swallow():
        # As who tries several ways and drops those that fail.
        with contextlib.suppress(BaseException):
            time.sleep(5)

    def swallow_twice():
        swallow()
        swallow()
        time.sleep(5)

    def wrap():
        try:
            time.sleep(5)
        except BaseException as late:
            raise RuntimeError("the compiler failed") from late

    for block in (swallow, swallow_twice, wrap):
        with pytest.raises(error, match=r"a call took more than 0\.02 s"), time_limit(0.02, "a call", error):
            block()
    assert time.monotonic() - start < 2
    # What fails in time says what it likes, and nothing of the alarms is left.
    with pytest.raises(ZeroDivisionError), time_limit(5, "a call", error):
        raise ZeroDivisionError("a mistake of the call")
    time.sleep(0.05)


class SlowTimer(FakeTimer):
    """Takes so long for a sample of each provider, in turn; the three calibrations come first and take no time."""

    prepared = 0

    def __init__(self, lock, seconds):
        super().__init__(lock)
        self.seconds = seconds

    def prepare(self, steps, seconds):
        self.prepared += 1
        return super().prepare(steps, seconds)._replace(graph=self.prepared - 4)

    def device_seconds(self, prepared):
        if prepared.graph >= 0:
            time.sleep(self.seconds[prepared.graph])
        return 1e-5


SIDES = {name: layer_norm() for name in ("primitives", "torch", "liger")}


def test_who_hangs_is_out_of_time_alone(measure, monkeypatch):
    monkeypatch.setattr(Budget, "unit_seconds", lambda self: 1.0)
    found = measure(SIDES, SlowTimer(FakeLock(), (0.0, 0.0, 5.0)))
    assert {name: row["status"] for name, row in found.items()} == {
        "primitives": "ok",
        "torch": "ok",
        "liger": "skipped",
    }
    assert found["liger"]["message"] == "out of time: a call of liger took more than 0.5 s."
    assert found["primitives"]["device_us"]["median"] == pytest.approx(10.0)


def test_the_limit_of_a_unit_ends_all_of_it(measure, monkeypatch):
    """No call takes too long here, all of them together do: whoever is under way then is not the only one."""
    monkeypatch.setattr(Budget, "unit_seconds", lambda self: 0.4)
    timer = SlowTimer(FakeLock(), (0.1, 0.1, 0.1))
    under_way = []
    start = time.monotonic()
    found = measure({**SIDES, "off": layer_norm(1.001)}, timer, doing=under_way.append)
    assert time.monotonic() - start < 1.5
    message = "out of time: the unit took more than 0.4 s."
    assert {(row["status"], row["message"]) for name, row in found.items() if name != "off"} == {("skipped", message)}
    # What was known before stays known.
    assert found["off"]["status"] == "wrong"
    assert all(row["device_us"] is None and row["call_us"] is None for row in found.values())
    # The device is idle and its memory given back before another worker has it, and nobody is blamed for a death.
    assert (timer.waited[-1], timer.released[-1]) == ("exclusive", "exclusive")
    assert timer.lock.held is None
    assert under_way[-1] == ""


def test_the_limit_of_a_unit_ends_a_training_step_too(tmp_path, monkeypatch):
    monkeypatch.setattr(Budget, "unit_seconds", lambda self: 0.2)
    monkeypatch.setattr(training, "_model", lambda *_: torch.nn.Linear(1, 1))
    monkeypatch.setattr(training, "_gradient_of", lambda *_: lambda: [torch.ones(1)])
    kept = []

    def enter(name, workload, exact, steps, bench):
        steps[name] = lambda: None
        kept.append(steps)
        return Contender(name)

    monkeypatch.setattr(training, "_enter", enter)
    timer = SlowTimer(FakeLock(), ())
    timer.prepared, timer.seconds = 3, (0.05, 0.05)
    start = time.monotonic()
    rows = training.measure(RECORD, GPU_TRAINING[0], ["primitives", "torch"], bench_of(timer, tmp_path))
    assert time.monotonic() - start < 1.5
    assert [row["message"] for row in rows] == ["out of time: the unit took more than 0.2 s."] * 2
    assert kept[0] == {}
