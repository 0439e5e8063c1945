"""Workers of the perf suite: who holds a device, what becomes of a unit in which a process dies, what is compiled."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import pytest
import torch._functorch.config as functorch_config

from perf.suite import driver, locks, results, worker
from perf.suite.calibration import calibrate
from perf.suite.contenders import DeviceLostError
from perf.suite.locks import DeviceLock
from perf.suite.plan import GPU_PROVIDERS, Options, make_plan
from perf.suite.providers import CannotError
from tests.perf_fakes import FakeLock, FakeTimer


def test_many_may_try_on_a_device_but_who_measures_is_alone(tmp_path):
    locks = [DeviceLock("gpu-2", tmp_path) for _ in range(3)]
    log, inside = [], threading.Barrier(2)

    def share(lock, name):
        with lock.shared():
            inside.wait(5)
            log.append(f"{name} in")
            time.sleep(0.05)
            log.append(f"{name} out")

    def measure_alone():
        with locks[2].exclusive():
            log.append("alone")
            time.sleep(0.02)
            log.append("alone out")

    threads = [threading.Thread(target=share, args=(locks[i], f"shared {i}")) for i in range(2)]
    for thread in threads:
        thread.start()
    while len(log) < 2:
        time.sleep(0.001)
    threads.append(threading.Thread(target=measure_alone))
    threads[-1].start()
    time.sleep(0.01)
    # Nobody enters any more while someone waits to be alone.
    late = DeviceLock("gpu-2", tmp_path)
    with late.shared():
        log.append("late")
    with DeviceLock("gpu-5", tmp_path).exclusive():
        pass
    for thread in threads:
        thread.join(5)
    assert {log[0], log[1]} == {"shared 0 in", "shared 1 in"}
    assert log[4:] == ["alone", "alone out", "late"]


def test_everybody_may_open_a_lock_whoever_made_it(tmp_path, monkeypatch):
    mask = os.umask(0o077)
    try:
        with DeviceLock("gpu-2", tmp_path).shared(), DeviceLock("gpu-2", tmp_path).tuning():
            assert os.umask(0o077) == 0o077
    finally:
        os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666}
    assert len(list(tmp_path.iterdir())) == 3
    real = os.open

    def as_somebody_else(path, flags, mode=0o777):
        # What Linux refuses of somebody else's file in a sticky directory, and of one that only its owner may write.
        if Path(path).exists() and flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise PermissionError(path)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", as_somebody_else)
    with DeviceLock("gpu-2", tmp_path).exclusive():
        pass
    with DeviceLock("gpu-2", tmp_path).shared(), DeviceLock("gpu-2", tmp_path).tuning():
        pass


def test_all_users_look_for_locks_in_one_place(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(locks, "COMMON_DIRECTORY", tmp_path / "common")
    assert locks.common_directory() == tmp_path
    (tmp_path / "common").mkdir()
    assert locks.common_directory() == tmp_path / "common"


def test_tuning_is_one_at_a_time_and_may_nest(tmp_path):
    first, second = (DeviceLock("gpu-2", tmp_path) for _ in range(2))
    log = []

    def tune_later():
        with second.tuning():
            log.append("second")

    def tune_twice():
        with first.tuning():
            with first.tuning():
                later.start()
            time.sleep(0.05)
            log.append("first")

    # Whoever waits for itself waits for ever, and must not keep the tests from ending.
    now, later = (threading.Thread(target=target, daemon=True) for target in (tune_twice, tune_later))
    now.start()
    now.join(5)
    assert log[:1] == ["first"]
    later.join(5)
    assert log == ["first", "second"]


def test_whatever_times_candidates_does_so_alone(monkeypatch):
    """Inductor chooses by several functions, which depend on its version; Triton's own tuner is beside them."""
    from torch._inductor.runtime import benchmarking

    autotuner = pytest.importorskip("triton.runtime.autotuner", reason="Triton's tuner needs triton").Autotuner
    it = benchmarking.benchmarker
    public = {name for name in dir(it) if name.startswith("benchmark") and callable(getattr(it, name))}
    assert public - {"benchmark_cpu"} <= set(worker.BENCHMARKS)
    held, seen = [], []

    class Lock:
        @contextlib.contextmanager
        def tuning(self):
            held.append(True)
            yield
            held.pop()

    sides = [(type(it), name) for name in sorted(public - {"benchmark_cpu"})] + [(autotuner, "_bench")]
    for owner, name in sides:
        monkeypatch.setattr(owner, name, lambda self, name=name: seen.append((name, bool(held))))
    tuner = object.__new__(autotuner)
    before = dict(vars(it))
    for alone in (True, False):
        with worker.tuning_alone(Lock()) if alone else contextlib.nullcontext():
            for _, name in sides:
                getattr(tuner if name == "_bench" else it, name)()
        assert seen == [(name, alone) for _, name in sides]
        seen.clear()
    assert vars(it) == before


# Workers.


@pytest.fixture(autouse=True)
def own_settings():
    """A worker changes settings of its process, which here is that of other tests too."""
    with functorch_config.patch(donated_buffer=functorch_config.donated_buffer):
        yield


def made_worker(tmp_path, monkeypatch, **values):
    made = make_plan(Options("cpu", modes=("forward",), only=("BatchNorm1d",)), dict.fromkeys(GPU_PROVIDERS))
    made.update(gpus=[], deadline=time.time() + 100, compile_deadline=time.time() + 100)
    made.update(values)
    results.write_json(tmp_path / "plan.json", made)
    left = []
    monkeypatch.setattr(worker, "leave", lambda: left.append(True))
    it = worker.Worker(tmp_path)
    it._lock = DeviceLock("cpu", tmp_path)
    return it, made["units"][0], left


def test_a_process_that_lost_its_device_makes_room_and_says_who_it_was(tmp_path, monkeypatch):
    it, record, left = made_worker(tmp_path, monkeypatch)

    def lose(*_):
        raise DeviceLostError("torch", "an illegal memory access")

    monkeypatch.setattr(it, "_rows", lose)
    with pytest.raises(DeviceLostError):
        it.measure(record)
    assert left == [True]
    assert not (tmp_path / "rows").exists()
    # The next process leaves the culprit out, and says why.
    assert it._verdict(record, "torch") == "error: the device was lost: an illegal memory access"
    assert it._verdict(record, "primitives") is None


@pytest.mark.parametrize(
    "unfit, wait, replaced", [(True, int, True), (False, lambda: 1 // 0, True), (False, int, False)]
)
def test_an_unfit_process_is_replaced_and_its_rows_are_kept(tmp_path, monkeypatch, unfit, wait, replaced):
    it, record, left = made_worker(tmp_path, monkeypatch)
    it._timer = types.SimpleNamespace(unfit=unfit, wait=wait)
    monkeypatch.setattr(it, "_rows", lambda *_: [{"status": "ok"}])
    it.measure(record)
    assert left == [True] * replaced
    assert json.loads((tmp_path / "rows" / f"{record['id']}.json").read_text()) == [{"status": "ok", "gpu": None}]


def test_gpus_of_one_run_share_no_calibration_and_rows_say_where_they_were_measured(tmp_path, monkeypatch):
    gpus = ["GPU-b0/1", "3"]
    copies = {"GPU-b0/1": 1e-3, "3": 5e-4}
    monkeypatch.setattr(worker, "DeviceLock", lambda name: DeviceLock(name, tmp_path))
    monkeypatch.setattr(worker.machine, "gpu_identity", lambda gpu: f"of-{len(gpu)}")
    monkeypatch.setattr(worker.machine, "device_description", lambda gpu: {"type": "cuda", "name": "A"})
    made = make_plan(Options("cuda", quick=True, modes=("forward",)), dict.fromkeys(GPU_PROVIDERS))
    made.update(gpus=gpus, deadline=time.time() + 100, to_measure=[])
    results.write_json(tmp_path / "plan.json", made)

    def measure(record, workload, names, bench):
        copy_gbps = calibrate(bench.timer, 1_000_000, bench.calibrations)["copy_gbps"]
        return [results.row_for(record, "primitives", "ok", copy_gbps=copy_gbps)]

    monkeypatch.setattr(worker.unit, "measure", measure)
    for gpu, record in zip(gpus, made["units"], strict=False):
        monkeypatch.setenv("PERF_GPU", gpu)
        it = worker.Worker(tmp_path)
        it._timer = FakeTimer(FakeLock())
        it._timer.device_seconds = lambda prepared, seconds=copies[gpu]: seconds
        it._describe()
        it.measure(record)
    result = results.merge(made, tmp_path)
    rows = [row for row in result["rows"] if row["status"] == "ok"]
    assert [(row["gpu"], row["copy_gbps"]) for row in rows] == [("GPU-b0/1", 1.0), ("3", 2.0)]
    assert {gpu: speeds["1000000"]["copy_gbps"] for gpu, speeds in result["calibration"].items()} == {
        "GPU-b0/1": 1.0,
        "3": 2.0,
    }
    assert result["device"] == {"type": "cuda", "name": "A", "gpus": gpus}
    # Of units that nobody came to it is not known where they would have been measured.
    assert {row["gpu"] for row in result["rows"] if row["status"] == "skipped"} == {None}


def test_units_in_which_a_worker_died_are_tried_again_without_who_was_under_way(tmp_path):
    units = [{"id": f"000{i}"} for i in range(4)]
    for folder, ids in {"crashed": ("0000", "0001", "0002"), "started": ("0000", "0001", "0002", "0003")}.items():
        (tmp_path / folder).mkdir()
        for unit_id in ids:
            (tmp_path / folder / unit_id).write_text("quack" if folder == "started" and unit_id != "0002" else "")
    results.write_json(tmp_path / "rows" / "0001.json", [])
    # 0001 left its rows before it died, of 0002 nobody knows who it was, and 0003 is merely not done.
    assert driver.lost_units({"units": units}, tmp_path) == ["0000"]
    note = json.loads(worker.note_path(tmp_path, "0000", "quack").read_text())
    assert note == "error: the worker died in a call of quack, see the log"
    assert driver.lost_units({"units": units}, tmp_path) == []


def test_a_compiled_provider_leaves_what_came_of_it_and_nothing_if_its_time_was_up(tmp_path, monkeypatch):
    it, record, _ = made_worker(tmp_path, monkeypatch)
    outcomes = {"torch.compile": None, "quack": CannotError("no batch norm."), "liger": TimeoutError("late")}

    def first_call(record, workload, name):
        if outcomes[name] is not None:
            raise outcomes[name]

    monkeypatch.setattr(it, "_first_call", first_call)
    for name in outcomes:
        it.compile(record, name)
    record["compiling"] = [*outcomes, "max-autotune"]
    assert it._verdict(record, "torch.compile") is None
    assert it._verdict(record, "quack") == "cannot: CannotError: no batch norm."
    record["left_out"] = {"max": "by design"}
    assert it._verdict(record, "max") == "skipped: left out: by design"
    for name in ("liger", "max-autotune"):
        assert it._verdict(record, name).startswith("skipped: out of time: not compiled in time")


def test_kernels_are_compiled_without_a_launch():
    kernels = pytest.importorskip("triton_kernels._kernel", reason="kernels need triton")
    warmed = []

    def nothing(x_ptr, num_rows, block):
        pass

    kernel = kernels.Kernel(nothing)
    kernel.warmup = lambda *args, grid, **constants: warmed.append((args, grid, constants))
    with worker.compile_only():
        kernel[(1, 2)]("x", 3, block=4)
    assert warmed == [(("x", 3), (1, 2), {"block": 4})]


FAULTS = """
import resource, torch
from perf.suite.timers import keep_freed_memory
kept = keep_freed_memory()
for count in (30, 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.empty(40_000_000, dtype=torch.uint8).fill_(1)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_stays_with_the_process_where_the_c_library_is_glibc():
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    assert kept == str(platform.libc_ver()[0] == "glibc")
    # Twenty times 9,766 pages where memory goes back to the system.
    assert kept == "False" or int(faults) < 20_000
