"""Units of the perf suite with made-up timers and providers: what is timed, and what becomes of who fails."""

from __future__ import annotations

import math

import pytest
import torch

from perf.suite import sampling, training, unit
from perf.suite.bytes import minimum_bytes
from perf.suite.contenders import Contender, DeviceLostError
from perf.suite.providers import CannotError, LeftOutError
from perf.workloads import GPU_TRAINING
from tests.perf_fakes import RECORD, WORKLOAD, FakeLock, FakeTimer, bench_of, layer_norm, measure_with


@pytest.fixture
def measure(tmp_path, monkeypatch):
    return measure_with(monkeypatch, tmp_path)


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


def test_who_loses_the_device_is_named(measure):
    timer = FakeTimer(FakeLock())
    timer.broken_for = lambda: bool(tried)
    tried = []
    sides = {"primitives": layer_norm(), "torch": layer_norm(before=tried.append), "liger": layer_norm()}
    with pytest.raises(DeviceLostError, match="torch: RuntimeError: an illegal memory access"):
        measure(sides, timer)


def test_samples_that_failed_are_no_times():
    contender = Contender("torch")
    bench = bench_of(FakeTimer(FakeLock()), None)
    take = sampling._guarded(contender, lambda: 1 // 0, bench)
    assert math.isnan(take())
    assert contender.status == "cannot"
    assert math.isnan(take())
