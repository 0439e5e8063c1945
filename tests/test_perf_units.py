"""Units of the perf suite with made-up timers, providers and clocks: what is timed, and when it ends."""

from __future__ import annotations

import contextlib
import json
import math
import time
import types

import pytest
import torch
import torch.nn.functional as F

from perf.suite import plan, results, sampling, timers, training, unit
from perf.suite.bench import Bench
from perf.suite.budget import Budget, time_limit
from perf.suite.bytes import minimum_bytes
from perf.suite.contenders import Contender, DeviceLostError
from perf.suite.plan import GPU_PROVIDERS, Options, make_plan
from perf.suite.providers import CannotError, LeftOutError, Provider
from perf.workloads import GPU_TRAINING, Workload

WORKLOAD = Workload("tiny", "layer_norm", (6, 5), dtype="float32")
RECORD = {
    "id": "0000",
    "workload": WORKLOAD.key,
    "name": "tiny",
    "op": WORKLOAD.op,
    "shape": [6, 5],
    "dtype": "float32",
    "layout": "",
    "columns": 5,
    "mode": "backward",
    "seconds": 0.0,
}


class FakeLock:
    """Says how the device is held."""

    held = None

    def shared(self):
        return self.hold("shared")

    def exclusive(self):
        return self.hold("exclusive")

    @contextlib.contextmanager
    def hold(self, how):
        assert self.held is None
        self.held = how
        yield
        self.held = None


class FakeTimer:
    """Says what each step costs instead of measuring it, and notes how the device was held meanwhile."""

    has_device_time = True
    sample_seconds, max_rounds = 2e-3, 60
    unfit = False
    device = torch.device("cpu")

    def __init__(self, lock):
        self.lock = lock
        self.timed, self.waited, self.released = set(), [], []
        self.obstacle = None
        self.broken_for = None

    def num_sets(self, set_bytes):
        return 2

    def prepare(self, steps, seconds):
        self.timed.add(self.lock.held)
        for step in steps:
            step()
        return timers.Prepared(steps, graph_calls=2, launches=3, obstacle=self.obstacle)

    def device_seconds(self, prepared):
        self.timed.add(self.lock.held)
        prepared.steps[0]()
        return 1e-5

    def call_seconds(self, prepared, calls):
        self.timed.add(self.lock.held)
        return 2e-5

    def peak_bytes(self, prepared):
        return 1000

    def wait(self):
        self.waited.append(self.lock.held)
        if self.broken_for is not None and self.broken_for():
            raise RuntimeError("an illegal memory access was encountered")

    def release(self):
        self.released.append(self.lock.held)


class FakeClock:
    now = 1000.0

    def __call__(self):
        return self.now


def layer_norm(scale=1.0, before=lambda x: None):
    def make(workload):
        def function(x, *params):
            before(x)
            return scale * F.layer_norm(x, workload.shape[-1:], *params)

        return function

    return {"layer_norm": make}


def bench_of(timer, directory, compiled=lambda name: None, clock=None, doing=lambda name: None):
    budget = Budget(1e12 if clock is None else clock.now + 100, 1, lambda: 0, clock=clock or time.time)
    return Bench(timer, timer.lock, directory, budget, compiled, doing)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Measures the tiny layer norm with the providers that are given, as functions of x; returns rows by provider."""
    monkeypatch.setattr(sampling, "WARM_UP_SECONDS", 0.0)

    def run(functions, timer=None, names=None, **options):
        fakes = {name: Provider(name, function) for name, function in functions.items()}
        monkeypatch.setattr(unit, "provider", fakes.__getitem__)
        timer = timer or FakeTimer(FakeLock())
        rows = unit.measure(RECORD, WORKLOAD, names or [*fakes], bench_of(timer, tmp_path, **options))
        json.dumps(rows, allow_nan=False)
        return {row["provider"]: row for row in rows}

    return run


def cannot(workload):
    raise CannotError("no layer norm here.")


def test_a_unit_times_what_is_right_and_says_of_the_rest_why_not(measure):
    sides = {
        "primitives": layer_norm(),
        "torch": layer_norm(),
        "off": layer_norm(1.001),
        "unable": {"layer_norm": cannot},
    }
    timer = FakeTimer(FakeLock())
    late = {"late": "skipped: out of time: not compiled in time"}
    found = measure(sides, timer, [*sides, "late"], compiled=late.get)
    assert {name: row["status"] for name, row in found.items()} == {
        "primitives": "ok",
        "torch": "ok",
        "off": "wrong",
        "unable": "cannot",
        "late": "skipped",
    }
    assert found["late"]["message"] == "out of time: not compiled in time"
    assert found["unable"]["message"] == "CannotError: no layer norm here."
    assert 1e-4 < found["off"]["error"] < 1e-2
    assert found["off"]["device_us"] is None
    assert found["off"]["call_us"] is None
    ours = found["primitives"]
    assert (ours["device_us"]["median"], ours["call_us"]["median"]) == pytest.approx((10.0, 20.0))
    assert ours["vs_torch_device"]["median"] == 1.0
    assert (ours["launches"], ours["peak_bytes"]) == (3, 1000)
    assert ours["gbps"] == pytest.approx(minimum_bytes(WORKLOAD, "backward") / 1e-5 / 1e9)
    assert ours["fraction_of_copy"] == pytest.approx(1.0)
    assert ours["kernel_fraction"] == pytest.approx(ours["kernel_bytes"] / ours["minimum_bytes"])
    assert found["torch"]["kernel_bytes"] is None


def test_nothing_runs_on_the_device_without_its_lock(measure, monkeypatch):
    timer = FakeTimer(FakeLock())
    tried = []
    check = unit.check

    def noted(*arguments):
        check(*arguments)
        timer.waited.append("checked")

    monkeypatch.setattr(unit, "check", noted)
    sides = {name: layer_norm(before=lambda x: tried.append(timer.lock.held)) for name in ("primitives", "torch")}
    measure(sides, timer)
    # First calls and checks beside those of others, what is timed alone; memory goes back before others measure.
    assert tried[0] == "shared"
    assert set(tried) == {"shared", "exclusive"}
    assert timer.timed == {"exclusive"}
    assert timer.released == ["exclusive"]
    assert None not in timer.waited
    # What was begun in company, the check too, has ended before someone measures.
    assert timer.waited[timer.waited.index("checked") + 1] == "shared"


@pytest.mark.parametrize("name, status", [("primitives", "error"), ("torch", "cannot")])
def test_a_provider_that_fails_while_it_is_timed_is_the_only_one_that_fails(measure, name, status):
    class Timer(FakeTimer):
        failing = name
        calls = 0

        def prepare(self, steps, seconds):
            prepared = super().prepare(steps, seconds)
            self.calls += 1
            # The three calibrations come first, then the providers in order.
            owner = {4: "primitives", 5: "torch", 6: "liger"}.get(self.calls)
            return prepared._replace(graph=owner)

        def device_seconds(self, prepared):
            if prepared.graph == self.failing:
                raise RuntimeError("boom")
            return 1e-5

    found = measure({side: layer_norm() for side in ("primitives", "torch", "liger")}, Timer(FakeLock()))
    assert {side: row["status"] for side, row in found.items()} == {
        **dict.fromkeys(("primitives", "torch", "liger"), "ok"),
        name: status,
    }
    assert found[name]["message"] == "RuntimeError: boom"
    assert found[name]["call_us"] is None
    assert found["liger"]["device_us"]["median"] == pytest.approx(10.0)
    assert (found["liger"]["vs_torch_device"] is None) == (name == "torch")


def test_a_peer_without_a_capture_keeps_its_call_time_and_this_package_must_have_one(measure):
    class Timer(FakeTimer):
        calls = 0

        def prepare(self, steps, seconds):
            self.calls += 1
            return super().prepare(steps, seconds)._replace(obstacle=None if self.calls <= 3 else "it waits")

    found = measure({side: layer_norm() for side in ("primitives", "liger")}, Timer(FakeLock()))
    assert (found["primitives"]["status"], found["primitives"]["message"]) == ("error", "CaptureError: it waits")
    peer = found["liger"]
    assert (peer["status"], peer["message"], peer["device_us"]) == ("ok", "no device time: it waits", None)
    assert peer["call_us"]["median"] == pytest.approx(20.0)
    # A bandwidth by the call is none by the device.
    assert peer["gbps"] is None


def test_what_a_failure_means_depends_on_what_it_is():
    def outcome(name, error):
        contender = Contender(name)
        contender.fail(error)
        return contender.status, contender.message.split(":")[0]

    assert outcome("primitives", ZeroDivisionError()) == ("error", "ZeroDivisionError")
    assert outcome("liger", ZeroDivisionError()) == ("cannot", "ZeroDivisionError")
    assert outcome("liger", torch.OutOfMemoryError("none left")) == ("error", "OutOfMemoryError")
    for name in ("primitives", "liger"):
        assert outcome(name, TimeoutError("late")) == ("skipped", "out of time")
        assert outcome(name, LeftOutError("too long")) == ("skipped", "left out")
        assert outcome(name, ModuleNotFoundError("no sklearn")) == ("skipped", "left out")
    rows = unit.guarded(RECORD, ["primitives", "torch"], lambda: 1 // 0)
    assert [row["status"] for row in rows] == ["error", "error"]


def test_tuning_a_model_is_left_out_and_not_said_to_be_impossible():
    with pytest.raises(LeftOutError, match="longer than a run"):
        training.make_step("torch.compile max-autotune", GPU_TRAINING[0], torch.device("cpu"))
    with pytest.raises(CannotError, match="no layer norm"):
        training.make_step("liger", GPU_TRAINING[0], torch.device("cpu"))


# Time.


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


def test_who_loses_the_device_is_named(measure):
    timer = FakeTimer(FakeLock())
    timer.broken_for = lambda: bool(tried)
    tried = []
    sides = {"primitives": layer_norm(), "torch": layer_norm(before=tried.append), "liger": layer_norm()}
    with pytest.raises(DeviceLostError, match="torch: RuntimeError: an illegal memory access"):
        measure(sides, timer)


def test_samples_that_failed_are_no_times():
    contender = Contender("torch")
    bench = types.SimpleNamespace(timer=FakeTimer(FakeLock()))
    take = sampling._guarded(contender, lambda: 1 // 0, bench)
    assert math.isnan(take())
    assert contender.status == "cannot"
    assert math.isnan(take())
