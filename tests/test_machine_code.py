"""The committed table of machine code is of these kernels, keeps the rules, and is what the compiler makes of them.

No GPU takes part and little is compiled: `docs/developers/gates.md` says how.
"""

# Compile-time constants are upper case, as in the kernels of the package.
# ruff: noqa: N803

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl

from perf.machine_code import rules
from perf.machine_code.__main__ import main
from perf.machine_code.assembly import loads_ahead
from perf.machine_code.compiling import Launch, try_compile, watch_launches
from perf.machine_code.rules import Exempt, all_broken, broken_rules
from perf.machine_code.table import Row, read_table, read_version
from perf.ops import CASES
from perf.ops.batch_norm import BatchNorm
from perf.ops.layer_norm import LAYER_NORM, LayerNorm
from perf.ops.workload import Workload
from perf.workloads import launch_mode
from primitives.kernels.runtime.chips import CHIPS
from primitives.kernels.runtime.kernel import INTERPRETED
from primitives.testing._ptx.launching import StandInDriver

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

OUT_OF_DATE = "the table of machine code is out of date: run `make machine-code` and commit what it changes"

# Programs of 256 threads of a reduction over channels that run at once on a processor: of tensors of 2-byte elements in
# the modes whose reductions are all alike, along the spatial axis, and across channels. At least two in the others. It
# is written out here, so that a plan and a budget cannot go wrong together.
REDUCTIONS = {"bfloat16 forward": (4, 3), "bfloat16 backward": (4, 3)}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Compiling sets a driver, and a cache of its own."""
    with patch.dict(os.environ):
        yield
    triton.runtime.driver.set_active(None)


# By day the keys of one chip: seconds each.
@pytest.mark.parametrize(
    "chip_name, how",
    [
        ("sm_90", "--keys"),
        *(pytest.param(chip_name, "--check", marks=pytest.mark.nightly) for chip_name in CHIPS),
    ],
)
def test_kernels_and_table_agree(chip_name: str, how: str) -> None:
    assert main([how, "--jobs", "1", "--chip", chip_name]) == 0, OUT_OF_DATE
    if triton.__version__ != read_version():
        pytest.skip(f"the table is of Triton {read_version()}; with another release no keys are compared")


@pytest.mark.nightly
def test_several_processes() -> None:
    command = [sys.executable, "-m", "perf.machine_code", "--keys", "--op", "dropout", "--jobs", "2"]
    ended = subprocess.run(
        [*command, "--chip", "sm_80", "--chip", "sm_90"], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stdout.count("0 compiled")) == (0, 2), ended.stderr


def launches(chip_name: str, workload: Workload, launch: Callable[[], object]) -> list[Launch]:
    """The launches on a chip."""
    found: list[Launch] = []
    with watch_launches(chip_name, [workload], found.append):
        launch()
    return found


def in_groups(num_rows: int) -> None:
    """Norms with parameters of their own for each of three groups, of `num_rows` rows or samples each."""
    # Columns that are a multiple of 8 alone: whether the distance of two groups is one of 16 depends on the rows.
    rows = LayerNorm.draw((3, num_rows, 200), torch.bfloat16, batch_ndim=1)
    images = BatchNorm.draw((3, num_rows, 16, 4, 4), torch.bfloat16, batch_ndim=1)
    for call in (*rows.calls(), *images.calls("train_fwd", "train_bwd", "double_backward")):
        call.results()


def launch_all(workload: Workload, num_rows: int) -> None:
    for mode in workload.record.modes:
        launch_mode(dataclasses.replace(workload, shape=(num_rows, *workload.shape[1:])), mode)


RESIZED = {w.case: (w, (w.shape[0], *w.resized), launch_all) for op in CASES for w in op.workloads("resized")}
RESIZED["groups"] = LAYER_NORM.workloads("resized")[0], (640, 639, 600), lambda workload, num_rows: in_groups(num_rows)


@pytest.mark.parametrize("name", RESIZED)
def test_another_number_of_rows_compiles_no_kernel_anew(name: str) -> None:
    workload, sizes, launch = RESIZED[name]

    def described(num_rows: int) -> list[tuple[str, dict[str, str]]]:
        found = launches("sm_100", workload, functools.partial(launch, workload, num_rows))
        return [(one.kernel.__name__, one.described_arguments()) for one in found]

    first, *again = map(described, sizes)
    assert again == [first] * len(again)


@triton.jit
def _sums(x_ptr, y_ptr, num_rows, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over rows."""
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=STAGES):
        total += tl.load(x_ptr + row * BLOCK + cols)
    tl.store(y_ptr + tl.program_id(0) * BLOCK + cols, total)


@pytest.mark.parametrize("chip_name, ahead", [("sm_90", ("-", "0", "1", "2")), ("gfx942", ("-", "1"))])
def test_a_loop_says_how_many_steps_are_under_way_with_one_to_four_stages(chip_name: str, ahead: tuple) -> None:
    triton.runtime.driver.set_active(StandInDriver(chip_name))  # pyright: ignore[reportArgumentType] - it quacks
    x = torch.empty(1 << 20)
    for num_stages, expected in enumerate(ahead, 1):
        compiled = _sums.warmup(x, x, 1023, STAGES=num_stages, BLOCK=1024, num_warps=4, grid=(8,))
        assert loads_ahead(chip_name, compiled.asm["ttgir"]) == expected, (chip_name, num_stages)


def test_mistakes_of_plans_break_the_rules() -> None:
    """A layer norm backward with too few warps, or no alignment."""
    chip_name, workload = "sm_90", Workload("", (8192, 4096), op="layer_norm")
    (launch, *_) = launches(chip_name, workload, lambda: launch_mode(workload, "backward"))
    # The compiler takes no more registers than leave room for the other programs.
    mistakes = ({"num_warps": launch.constants["num_warps"] // 2}, "registers"), ({"ALIGN": 1}, "narrow")
    with watch_launches(chip_name, [workload], lambda launch: None):
        for change, complaint in mistakes:
            changed_launch = launch._replace(constants={**launch.constants, **change})
            row = try_compile(chip_name, changed_launch, f"{workload.case} with {change}")
            assert not isinstance(row, str), row
            assert any(complaint in problem for problem in broken_rules(chip_name, row)), row


def test_every_row_keeps_the_rules_and_every_exception_is_needed(monkeypatch) -> None:
    tables = {chip_name: read_table(chip_name) for chip_name in CHIPS}
    for rows in tables.values():
        assert rows == sorted(rows)
        for op, least in (("layer_norm", 50), ("batch_norm", 50), ("log_softmax", 50), ("attention", 30)):
            assert sum(row.case.startswith(op) for row in rows) > least
    broken = list(all_broken(tables))
    assert not broken, "\n".join(broken)
    for entry in rules.EXCEPTIONS:
        less = [each._replace(most=each.most - (each is entry)) for each in rules.EXCEPTIONS]
        covered = {c: [r for r in rows if entry._replace(chip=c).covers(c, r)] for c, rows in tables.items()}
        with monkeypatch.context() as patch:
            patch.setattr(rules, "EXCEPTIONS", less)
            assert next(all_broken(covered), None), f"{entry} is needed no more, or not so much of it"


@pytest.mark.parametrize("chip_name", CHIPS)
def test_reductions_over_channels_leave_room_for_each_other(chip_name: str) -> None:
    chip = CHIPS[chip_name]
    rows = [row for row in read_table(chip_name) if row.kernel == "batch_norm_sums_kernel"]
    assert all(any(kind in row.case for row in rows) for kind in REDUCTIONS)
    for row in rows:
        threads = row.num_warps * chip.warp_size
        fitting = chip.registers // (threads * (row.registers + -row.registers % 8))
        across = "channels_last" in row.case or row.case.split()[1].count("x") == 1
        kind = " ".join(word for word in row.case.split() if word in {"bfloat16", "forward", "backward"})
        wanted = REDUCTIONS.get(kind, (2, 2))[across]
        assert fitting >= wanted, f"{chip_name}: of {row} {fitting} programs fit a processor"


CASE, KEY = "layer_norm 8192x4096 bfloat16 forward", "0123456789ab"
ROW = Row("layer_norm_bwd_kernel", CASE, 8, 40, 255, 0, 0, 1024, "16x2", "16x2", 0, "2", KEY)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"spills": 8}, "spills 8"),
        ({"local_bytes": 16}, "local memory"),
        ({"registers": 256}, "registers"),
        ({"shared_bytes": 1 << 20}, "shared memory"),
        ({"loads": "16x1 2x8", "narrow": 8}, "narrow"),
        ({"ahead": "0"}, "waits for all"),
        ({"ahead": "-"}, "copies nothing ahead"),
        ({"kernel": "kernel", "ahead": "- 2"}, "copies nothing ahead"),
        ({"kernel": "kernel", "ahead": "-", "stores": ""}, "copies nothing ahead"),
    ],
    ids=str,
)
def test_rules_reject(change: dict, complaint: str) -> None:
    assert not broken_rules("sm_90", ROW)
    (found,) = broken_rules("sm_90", ROW._replace(**change))
    assert complaint in found


def test_amd_loads_ahead_what_nvidia_copies_ahead_case_by_case() -> None:
    other = ROW._replace(case="layer_norm 8192x2048 bfloat16 forward")
    tables = {"sm_90": [ROW, other], "gfx942": [ROW, other._replace(ahead="-")]}
    (problem,) = all_broken(tables)
    assert "x2048 bfloat16 forward): nothing is loaded ahead" in problem
    tables["gfx942"].append(other)
    assert not list(all_broken(tables))


LONG, SHORT = ("layer_norm_fwd_kernel", "layer_norm 4096x16384 bfloat16"), "layer_norm 4096x8192 bfloat16"


@pytest.mark.parametrize(
    "chip_name, kernel, case, allowed",
    [("sm_90", *LONG, 8), ("sm_80", *LONG, 0), ("sm_90", "another", LONG[1], 0), ("sm_90", LONG[0], SHORT, 0)],
)
def test_spills_that_are_known_are_of_one_chip_kernel_and_case(chip_name, kernel, case, allowed, monkeypatch) -> None:
    monkeypatch.setattr(rules, "EXCEPTIONS", [Exempt("spills", "sm_90", rf"{' '.join(LONG)} \w+", 8, "")])
    for spills in (allowed, allowed + 4):
        row = ROW._replace(kernel=kernel, case=f"{case} all_results", spills=spills)
        assert bool(broken_rules(chip_name, row)) == (spills > allowed)
