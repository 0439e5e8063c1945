"""A tiny unit, and what it is measured with: a lock, a timer and a clock that are made up."""

from __future__ import annotations

import contextlib
import json
import time

import torch
import torch.nn.functional as F

from perf.suite import sampling, timers, unit
from perf.suite.bench import Bench
from perf.suite.budget import Budget
from perf.suite.providers import Provider
from perf.workloads import Workload

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
        try:
            yield
        finally:
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


def measure_with(monkeypatch, directory):
    """Measures the tiny layer norm with the providers that are given, as functions of x; returns rows by provider."""
    monkeypatch.setattr(sampling, "WARM_UP_SECONDS", 0.0)

    def run(functions, timer=None, names=None, **options):
        fakes = {name: Provider(name, function) for name, function in functions.items()}
        monkeypatch.setattr(unit, "provider", fakes.__getitem__)
        timer = timer or FakeTimer(FakeLock())
        rows = unit.measure(RECORD, WORKLOAD, names or [*fakes], bench_of(timer, directory, **options))
        json.dumps(rows, allow_nan=False)
        return {row["provider"]: row for row in rows}

    return run
