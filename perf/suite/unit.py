"""One unit: every provider at one workload in one mode, checked, then timed against each other."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from typing import TYPE_CHECKING, Any

from perf.suite import modes, reference
from perf.suite.budget import OUT_OF_TIME, UnitTimeoutError
from perf.suite.bytes import kernel_bytes, minimum_bytes
from perf.suite.calibration import calibrate
from perf.suite.contenders import Contender, DeviceLostError, describe
from perf.suite.plan import SAMPLING_SHARE
from perf.suite.providers import OURS, provider
from perf.suite.results import ERROR, OK, SKIPPED, WRONG, Row, finite, row_for
from perf.suite.sampling import forget_times, prepare_all, time_prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from perf.suite.bench import Bench
    from perf.suite.modes import Sample
    from perf.suite.timers import Step, Timer
    from perf.workloads import Workload

# A first call is from the caches on disk by the time that a unit is measured; one that is not holds everybody up.
FIRST_CALL_SECONDS = 20.0


def measure(unit: Mapping[str, Any], workload: Workload, names: list[str], bench: Bench) -> list[Row]:
    """The rows of a unit.

    Args:
        unit: Its record in the plan, with `seconds`, the sampling time.
        workload: What it measures.
        names: Providers.
        bench: What it is measured with.
    """
    mode, timer = unit["mode"], bench.timer
    tolerance = reference.TOLERANCES[workload.dtype]
    with bench.lock.shared():
        sample = modes.make_sample(workload, mode, timer.device)
        contenders = [_enter(name, workload, mode, sample, bench) for name in names]
        check(contenders, workload, mode, sample, tolerance)
        # What still runs would run beside what another worker times.
        timer.wait()
    total_bytes = minimum_bytes(workload, mode)
    for contender in contenders:
        contender.values.update(minimum_bytes=total_bytes, tolerance=tolerance)
        if contender.name == OURS and timer.has_device_time:
            # Outside of the limit: an import that it ends would leave half a module behind.
            contender.values["kernel_bytes"] = kernel_bytes(workload, mode, timer.device)
    with all_out_of_time(contenders, bench), bench.alone():
        if not skip_if_spent(contenders, bench):
            copy_gbps = calibrate(timer, total_bytes, bench.calibrations)["copy_gbps"]
            for contender in contenders:
                contender.values["copy_gbps"] = copy_gbps
            _time(contenders, sample, unit, bench, total_bytes, copy_gbps)
            for contender in contenders:
                _rate(contender, timer)
        timer.release()
    return [row_for(dict(unit), c.name, c.status, c.message, **c.values) for c in contenders]


def _cloned(tensor: Any) -> Any:
    return tensor.clone()


def _enter(name: str, workload: Workload, mode: str, sample: Sample, bench: Bench) -> Contender:
    """A provider's first call, which may compile for a while, and its result."""
    contender = Contender(name)
    verdict = bench.compiled(name)
    if verdict is not None:
        contender.status, contender.message = verdict.split(": ", 1)
        return contender
    if bench.budget.spent:
        contender.skip(f"{OUT_OF_TIME}; see --seconds")
        return contender
    bench.doing(name)
    contender.attempt(lambda: _first_call(contender, workload, mode, sample), bench.timer, FIRST_CALL_SECONDS)
    bench.doing("")
    return contender


def _first_call(contender: Contender, workload: Workload, mode: str, sample: Sample) -> None:
    contender.make_step = step_maker(contender.name, workload, mode)
    contender.result = contender.make_step(sample)()


def step_maker(name: str, workload: Workload, mode: str) -> Callable[[Sample], Step]:
    """What makes a provider's steps of samples.

    Raises:
        CannotError: If the provider lacks the op.
    """
    side = provider(name)
    make = modes.make_steps(mode, side.function(workload), side.wrap)
    dtype = side.param_dtype
    return make if dtype is None else lambda sample: make(sample.with_params(dtype))


def check(contenders: list[Contender], workload: Workload, mode: str, sample: Sample, tolerance: float) -> None:
    """Take out every contender whose result is wrong, and drop the results."""
    results = {contender.name: contender.result for contender in contenders if contender.status == OK}
    errors = reference.errors(workload, mode, sample, results) if results else {}
    for contender in contenders:
        contender.result = None
        if contender.name in errors:
            judge(contender, errors[contender.name], tolerance)


def judge(contender: Contender, error: float, tolerance: float) -> None:
    """Note the error of a contender, and take it out if that is too large."""
    contender.values["error"] = finite(error)
    if not error <= tolerance:
        contender.status = WRONG
        contender.message = f"error {error:.1e}, at most {tolerance:.0e} is right"
        contender.make_step = None


@contextlib.contextmanager
def all_out_of_time(contenders: list[Contender], bench: Bench) -> Iterator[None]:
    """Skip every contender that is still in the run if the block has had the device for too long."""
    try:
        yield
    except UnitTimeoutError as error:
        bench.doing("")
        for contender in contenders:
            contender.skip(f"{OUT_OF_TIME}: {error}")
        forget_times(contenders)


def skip_if_spent(contenders: list[Contender], bench: Bench) -> bool:
    """Skip every contender that is still in the run if the run has no time left, and say whether it has none."""
    if bench.budget.spent:
        for contender in contenders:
            contender.skip(f"{OUT_OF_TIME}; see --seconds")
    return bench.budget.spent


def _time(
    contenders: list[Contender],
    sample: Sample,
    unit: Mapping[str, Any],
    bench: Bench,
    total_bytes: int,
    copy_gbps: float,
) -> None:
    """Time what is right over a rotation of samples, which live no longer than this call."""
    samples = [sample, *(sample.map(_cloned) for _ in range(bench.timer.num_sets(total_bytes) - 1))]

    def steps(contender: Contender) -> list[Step]:
        make_step = contender.make_step
        return [] if make_step is None else [make_step(sample) for sample in samples]

    prepared = prepare_all(contenders, steps, total_bytes / copy_gbps * 1e-9, bench)
    share = SAMPLING_SHARE["cuda" if bench.timer.has_device_time else "cpu"]
    time_prepared(contenders, prepared, bench, bench.budget.sampling_seconds(unit["seconds"], share))


def _rate(contender: Contender, timer: Timer) -> None:
    """Bandwidth and its parts of a copy's, from the time that memory traffic shows in."""
    values = contender.values
    times = values.get("device_us" if timer.has_device_time else "call_us")
    if contender.status == OK and times:
        values["gbps"] = values["minimum_bytes"] / times["median"] * 1e-3
        values["fraction_of_copy"] = values["gbps"] / values["copy_gbps"]
        if "kernel_bytes" in values:
            values["kernel_fraction"] = values["fraction_of_copy"] * values["kernel_bytes"] / values["minimum_bytes"]


@contextlib.contextmanager
def cleaned() -> Iterator[None]:
    """Leave no compiled function behind for the next unit."""
    try:
        yield
    finally:
        # Each unit compiles the same functions anew, of which Dynamo keeps only so many versions.
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()
        gc.collect()


def guarded(unit: Mapping[str, Any], names: list[str], run: Callable[[], list[Row]]) -> list[Row]:
    """The rows that `run` makes; if it fails, a row for each provider that says how.

    Raises:
        DeviceLostError: If the process cannot measure anything any more; another one may.
    """
    try:
        return run()
    except DeviceLostError:
        raise
    # The unit is lost, the run is not.
    except Exception as error:
        traceback.print_exc()
        status = SKIPPED if isinstance(error, TimeoutError) else ERROR
        message = f"{OUT_OF_TIME}: {error}" if status == SKIPPED else describe(error)
        return [row_for(dict(unit), name, status, message) for name in names]


def skipped(unit: Mapping[str, Any], names: list[str]) -> list[Row]:
    """Rows for a unit whose turn comes after the deadline."""
    return [row_for(dict(unit), name, SKIPPED, f"{OUT_OF_TIME}; see --seconds") for name in names]
