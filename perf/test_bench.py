"""Times of every workload in every mode beside its peers: `pytest perf -n <gpus>`, one worker to a GPU.

A test is a workload in a mode. Each provider's results are compared with formulas in float64, and who is wrong gets no
time; the others take turns, so that a clock that drifts favors none. `perf/conftest.py` writes the result file.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import primitives as pr
from perf.calls import EPS
from perf.conftest import providers_of
from perf.measuring import in_turns, timer
from perf.ops.workload import Workload
from perf.steps import TOLERANCES, errors, make_sample, make_step
from perf.workloads import COMPILED, EAGER, FLEX, LIBRARIES, ONLY_OP, OURS, SDPA_BACKENDS, TUNED

Function = Callable[..., Any]
Step = Callable[[], Any]
Row = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore")

# Of samples of all providers in turn, and of one sample.
SECONDS, MIN_ROUNDS, MAX_ROUNDS, SAMPLE_SECONDS = 1.0, 5, 60, 5e-3
# Of Inductor's modes those that leave CUDA graphs to the caller, as they would keep results of earlier calls.
COMPILE_MODES = {COMPILED: "default", TUNED: "max-autotune-no-cudagraphs", FLEX: "default"}
# Who takes turns with the providers: a copy of the least bytes that the mode could move.
COPY = "copy"
# How a process ends whose device can measure nothing more.
UNFIT = 70


def function_of(name: str, workload: Workload, device: torch.device) -> Function:
    """The op of `workload` by a provider, which raises if it has none; peers as they are documented."""
    op, options = workload.record, workload.record.options(workload)
    if name in LIBRARIES:
        module, call = importlib.import_module(LIBRARIES[name][0]), LIBRARIES[name][1]
        if not workload.affine:
            raise NotImplementedError(f"{name} has only a layer norm with a weight and a bias.")
        return lambda x, weight, bias: call(module, x, weight, bias, EPS)
    if name == FLEX:
        tokens = workload.shape[-2]
        causal = (lambda b, h, row, key: row >= key) if workload.causal else None
        mask = causal and create_block_mask(causal, None, None, tokens, tokens, device=device)
        return lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=workload.key_heads > 0)
    source = pr.functional if name == OURS else F
    if name in SDPA_BACKENDS:
        # A backend that cannot do a call raises.
        kept: Any = sdpa_kernel(getattr(SDPBackend, SDPA_BACKENDS[name]))
        return kept(lambda *tensors: op.call(source, *tensors, **options))
    return lambda *tensors: op.call(source, *tensors, **options)


def compiler_of(name: str) -> Callable[[Function], Function]:
    """How a provider compiles a function: not at all, or by `torch.compile`."""
    if name not in COMPILE_MODES:
        return lambda function: function
    return functools.partial(torch.compile, mode=COMPILE_MODES[name], dynamic=False)


def samplers(step: Step, device: torch.device) -> dict[str, Callable[[], float]]:
    """What takes one sample of the microseconds of a step: as a user calls it, and on a GPU with caches emptied."""
    clock = timer(step, device)
    number = max(1, int(SAMPLE_SECONDS / clock.timeit(2).mean))
    found: dict[str, Callable[[], float]] = {"call_us": lambda: 1e6 * clock.timeit(number).mean}
    if device.type == "cuda":
        from triton.testing import do_bench

        milliseconds = 1e3 * SAMPLE_SECONDS
        found["device_us"] = lambda: 1e3 * do_bench(step, milliseconds, milliseconds, return_mode="median")  # type: ignore[arg-type, operator]
    return found


def measure(
    rows: Mapping[str, Row],
    device: torch.device,
    make: Callable[[str], Step],
    judge: Callable[[dict[str, Any]], dict[str, float]],
    copied_bytes: int = 0,
    flops: int = 0,
) -> None:
    """Fill the rows of the providers of one unit: `make` a step of each, `judge` the results, time who is right.

    It fails if this package is wrong or raises; a peer may.
    """
    steps = {}
    for name, step in _right(rows, make, judge).items():
        with _laid_at(rows[name]):
            steps[name] = samplers(step, device)
    if copied_bytes:
        source, target = (torch.ones(copied_bytes // 8, device=device) for _ in range(2))
        steps[COPY] = samplers(lambda: target.copy_(source), device)
    each = {(name, kind): sample for name, kinds in steps.items() for kind, sample in kinds.items()}
    taken = in_turns(each, SECONDS, MIN_ROUNDS, MAX_ROUNDS)
    # The device's own time, where it has one.
    us = {name: found for (name, _), found in taken.items()}
    for name in us.keys() - {COPY}:
        medians = {kind: statistics.median(taken[name, kind]) for kind in steps[name]}
        rows[name].update(medians, status="ok", message="")
        if name != EAGER and EAGER in us:
            # Round by round, which a drifting clock does not touch.
            rows[name]["vs_torch"] = statistics.median(a / b for a, b in zip(us[name], us[EAGER], strict=True))
        median = statistics.median(us[name])
        if copied_bytes:
            rows[name].update(gbps=copied_bytes / median * 1e-3, of_copy=statistics.median(us[COPY]) / median)
        if flops:
            rows[name]["tflops"] = flops / median * 1e-6
    if (ours := rows.get(OURS)) is not None and ours["status"] != "ok":
        pytest.fail(f"{ours['workload']}, {ours['mode']}: {ours['status']}: {ours['message']}", pytrace=False)


def _right(rows: Mapping[str, Row], make: Callable[[str], Step], judge: Function) -> dict[str, Step]:
    """The steps whose results are right."""
    steps, results = {}, {}
    for name, row in rows.items():
        with _laid_at(row):
            steps[name] = make(name)
            results[name] = steps[name]()
    for name, error in judge(results).items():
        rows[name]["error"] = error if math.isfinite(error) else None
        if not error <= rows[name]["tolerance"]:
            rows[name].update(status="wrong", message=f"error {error:.1e} above {rows[name]['tolerance']:.0e}")
            del results[name]
    return {name: steps[name] for name in results}


@contextlib.contextmanager
def _laid_at(row: Row) -> Iterator[None]:
    """Whatever a peer raises says what it cannot do."""
    try:
        yield
    except Exception as error:
        row.update(status="cannot", message=f"{type(error).__name__}: {error}".strip().split("\n")[0][:300])


@pytest.fixture
def rows(unit: tuple[Workload, str], pytestconfig: pytest.Config, record_property: Any, device: torch.device) -> Any:
    """The rows of a unit, which are handed to the controller after the test."""
    workload, mode = unit
    fixed = {"workload": workload.key, "mode": mode, "tolerance": TOLERANCES[workload.dtype]}
    names = [name for name in providers_of(pytestconfig) if ONLY_OP.get(name, workload.op) == workload.op]
    made = {n: {**fixed, "provider": n, "status": "error", "message": "it came to no time"} for n in names}
    # Backward passes are run more than once, which buffers that Inductor gives away would not survive.
    with functorch_config.patch(donated_buffer=False):
        yield made
    is_gpu = device.type == "cuda"
    record_property("rows", list(made.values()))
    record_property("device", torch.cuda.get_device_name() if is_gpu else "cpu")
    torch._dynamo.reset()
    gc.collect()
    if is_gpu:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        # Errors of kernels stay with the process: xdist goes on with another one.
        except RuntimeError:
            os._exit(UNFIT)


def test_operation(unit: tuple[Workload, str], rows: dict[str, Row], device: torch.device) -> None:
    """One operation at a shape of a model."""
    workload, mode = unit
    sample = make_sample(workload, device)

    def make(name: str) -> Step:
        return make_step(mode, function_of(name, workload, device), sample, compiler_of(name))

    copied = workload.record.passes.get(mode, 0) * workload.pass_bytes
    products = workload.record.products.get(mode, 0)
    judge = functools.partial(errors, workload, mode, sample)
    measure(rows, device, make, judge, copied, products * workload.matmul_flops if products else 0)
