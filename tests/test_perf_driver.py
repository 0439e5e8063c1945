"""The perf suite from outside: what is asked for before a run, what ends one, and what is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from perf import __main__ as command_line
from perf.__main__ import main
from perf.suite import driver, processes, results
from perf.suite.results import row_for
from tests.perf_results import gpu_result, spread

NARROW = ("--device", "cpu", "--only", "BatchNorm1d", "--modes", "forward", "backward")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs with made-up workers: shell lines, and rows that are there when they start; returns the exit status."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(driver, "POLL_SECONDS", 0.02)

    def start(lines="exit 0", status="ok", units=100, arguments=NARROW, out=tmp_path / "out" / "result.json"):
        def workers(phase, directory, count):
            plan = json.loads((directory / "plan.json").read_text())
            for unit in plan["units"][:units]:
                timed = {"call_us": spread(1.0)} if status == "ok" else {}
                rows = [row_for(unit, name, status, None, **timed) for name in plan["providers"]]
                results.write_json(directory / "rows" / f"{unit['id']}.json", rows)
            return ["sh", "-c", lines]

        monkeypatch.setattr(driver, "pytest_command", workers)
        with heard():
            return main(["run", *arguments, "--out", str(out)])

    return start


@pytest.fixture
def interruptible():
    """Ctrl-C as it is outside of the processes that tests run in; other signals fail a test that does not hear them."""

    def unheard(number, frame):
        raise AssertionError(f"nobody heard signal {number}.")

    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: unheard, signal.SIGHUP: unheard}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def heard():
    """Ctrl-C that gets out of the block fails the test, and not the tests."""
    try:
        yield
    except KeyboardInterrupt:
        pytest.fail("Ctrl-C got through")


def left(tmp_path):
    return [path.name for path in (tmp_path / "temporary").iterdir()]


# What ends a run.


def is_alive(pid):
    """Whether a process still runs; one that has ended may wait for its parent to look."""
    found = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        return subprocess.run(["ps", "-p", str(pid)], capture_output=True, check=False).returncode == 0
    return found.exists() and found.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_what_asks_a_run_to_end_ends_its_workers_and_keeps_their_rows(run, tmp_path, capsys, interruptible, name):
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]
    # A worker that hears nothing outlives the process that started it.
    deaf = f"sh -c 'trap \"\" INT; echo $$ > {tmp_path}/deaf; exec sleep 60' &"
    lines = f"{deaf} while [ ! -s {tmp_path}/deaf ]; do sleep 0.01; done; kill -{name[3:]} $PPID; exec sleep 60"
    start = time.monotonic()
    assert run(lines, units=1) == 0
    assert time.monotonic() - start < 20
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [row["status"] for row in result["rows"]] == ["ok", "ok", "skipped", "skipped"]
    assert result["complete"] is False
    assert "Stopped: what was measured is kept." in capsys.readouterr().err
    assert left(tmp_path) == []
    pid = int((tmp_path / "deaf").read_text())
    deadline = time.monotonic() + 2
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)] == handlers


def test_ctrl_c_while_the_front_end_is_measured_keeps_everything_else(run, tmp_path, monkeypatch, interruptible):
    bench = tmp_path / "python"
    bench.write_text("#!/bin/sh\nkill -INT $PPID\nexec sleep 60\n")
    bench.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bench))
    start = time.monotonic()
    assert run(arguments=("--device", "cpu", "--quick", "--modes", "forward")) == 0
    assert time.monotonic() - start < 20
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {row["status"] for row in result["rows"]} == {"ok"}
    assert (result["overhead"], result["complete"]) == (None, False)


def test_an_overhead_bench_that_left_half_a_file_costs_nothing_else(tmp_path, monkeypatch):
    bench = tmp_path / "python"
    bench.write_text(f'#!/bin/sh\nprintf "{{" > {tmp_path}/overhead.json\n')
    bench.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bench))
    assert driver._overhead(tmp_path, True, 10.0) is None


def test_ctrl_c_while_a_process_is_started_ends_it(monkeypatch, interruptible):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(processes.subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt), processes.running(["sleep", "60"]):
        pytest.fail("it went on")
    assert started[0].returncode == -signal.SIGINT


def test_who_ignores_a_closed_terminal_goes_on_ignoring_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with heard(), processes.stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# What is asked for before anything is measured.


@pytest.mark.parametrize("module", ["pytest", "xdist"])
def test_a_run_says_at_once_what_is_not_installed(run, tmp_path, monkeypatch, capsys, module):
    out = tmp_path / "result.json"
    out.write_text("the last result")
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, module, None)
        status = run("exit 1", out=out)
    assert status == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m perf run needs {module} (")
    assert "pip install 'torch-training-primitives[perf]'" in said
    assert out.read_text() == "the last result"
    assert left(tmp_path) == []


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for out in (tmp_path / "file" / "result.json", tmp_path / "folder"):
        assert run(f"touch {tmp_path}/measured", out=out) == 2
        assert capsys.readouterr().err.startswith(f"--out must name a file that can be written, got {out}: ")
    assert not (tmp_path / "measured").exists()
    result = tmp_path / "result.json"
    results.write_json(result, gpu_result())
    assert main(["report", str(result), "--out", str(tmp_path / "file")]) == 2
    assert f"got {tmp_path / 'file' / 'imaginary-gpu.json'}: " in capsys.readouterr().err
    # Looking leaves nothing behind.
    results.check_writable(tmp_path / "new" / "result.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_what_cannot_be_written_in_the_end_goes_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    path = command_line._write(tmp_path / "file" / "result.json", {"rows": []})
    assert json.loads(path.read_text()) == {"rows": []}
    assert "cannot be written" in capsys.readouterr().err


# What is left of a run.


@pytest.mark.parametrize("status, units, code", [("ok", 0, 1), ("skipped", 9, 1), ("wrong", 9, 1), ("ok", 9, 0)])
def test_a_run_in_which_nothing_was_right_fails_and_leaves_the_last_result_alone(
    run, tmp_path, capsys, status, units, code
):
    out = tmp_path / "result.json"
    out.write_text("the last result")
    assert run(status=status, units=units, out=out) == code
    rejected = tmp_path / "result.failed.json"
    assert rejected.exists() == (code == 1)
    assert (out.read_text() == "the last result") == (code == 1)
    if code:
        assert f"Written to {rejected}, {out} is left as it was." in capsys.readouterr().out
        assert json.loads(rejected.read_text())["rows"]


def test_the_directory_of_a_run_is_kept_where_its_logs_say_something(run, tmp_path, capsys):
    assert run() == 0
    assert left(tmp_path) == []
    assert "What the workers said" not in capsys.readouterr().err
    for arguments in ({"status": "error"}, {"units": 0}):
        run(**arguments)
        (kept,) = left(tmp_path)
        said = capsys.readouterr().err
        assert f"What the workers said is kept in {tmp_path / 'temporary' / kept}." in said
        assert (tmp_path / "temporary" / kept / "measure.log").exists()
        (tmp_path / "temporary" / kept).rename(tmp_path / f"seen-{len(list(tmp_path.iterdir()))}")
