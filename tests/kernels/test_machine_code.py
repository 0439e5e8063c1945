"""The committed table of machine code is of these kernels, keeps the rules, and is what the compiler makes of them.

No GPU takes part and little is compiled: `docs/developers/gates.md` says how. The compiler runs in processes of its
own, because the interpreter, in which the other kernel tests run, and the compiler exclude each other.
"""

from __future__ import annotations

import dataclasses

import pytest
import triton

from perf.machine_code import rules
from perf.machine_code.rules import Exempt, all_broken, broken_rules
from perf.machine_code.table import Row, read_table, read_version
from primitives.kernels.runtime.chips import CHIPS
from tests.kernels.interpreting import run_compiled

OUT_OF_DATE = "the table of machine code is out of date: run `make machine-code` and commit what it changes"

# Programs of 256 threads of a reduction over channels that run at once on a processor: of tensors of 2-byte elements in
# the modes whose reductions are all alike, along the spatial axis, and across channels. At least two in the others. It
# is written out here, so that a plan and a budget cannot go wrong together.
REDUCTIONS = {"bfloat16 forward": (4, 3), "bfloat16 backward": (4, 3)}


def test_kernels_and_table_agree() -> None:
    run_compiled("perf.machine_code", "--keys", "--jobs", "1", failure=OUT_OF_DATE)
    if triton.__version__ != read_version():
        pytest.skip(f"the table is of Triton {read_version()}; with another release no keys are compared")


@pytest.mark.nightly
@pytest.mark.parametrize("chip_name", CHIPS)
def test_all_kernels_and_table_agree(chip_name: str) -> None:
    run_compiled("perf.machine_code", "--check", "--jobs", "1", "--chip", chip_name, failure=OUT_OF_DATE)


def test_another_batch_size_compiles_nothing_and_mistakes_of_plans_are_caught() -> None:
    run_compiled("tests.kernels.compiled_cases")


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
    (found,) = broken_rules("sm_90", dataclasses.replace(ROW, **change))
    assert complaint in found


def test_amd_loads_ahead_what_nvidia_copies_ahead_case_by_case() -> None:
    other = dataclasses.replace(ROW, case="layer_norm 8192x2048 bfloat16 forward")
    tables = {"sm_90": [ROW, other], "gfx942": [ROW, dataclasses.replace(other, ahead="-")]}
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
        row = dataclasses.replace(ROW, kernel=kernel, case=f"{case} all_results", spills=spills)
        assert bool(broken_rules(chip_name, row)) == (spills > allowed)
