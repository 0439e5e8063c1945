"""The committed table of machine code is of these kernels, keeps the rules, and is what the compiler makes of them.

No GPU takes part and little is compiled: `docs/developers/gates.md` says how. The compiler runs in processes of its
own, because the interpreter, in which the other kernel tests run, and the compiler exclude each other.
"""

from __future__ import annotations

import dataclasses

import pytest
import triton

from perf.machine_code import rules, shares
from perf.machine_code.compare import compared, figures_of
from perf.machine_code.known import needless
from perf.machine_code.rules import broken_rules
from perf.machine_code.shares import Called, Launched, broken_shares
from perf.machine_code.table import Row, read_table, read_version
from tests.kernels.interpreting import run_compiled
from triton_kernels.launch.chips import CHIPS

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


def test_every_row_keeps_the_rules_and_needs_what_they_excuse() -> None:
    tables = {chip_name: read_table(chip_name) for chip_name in CHIPS}
    for rows in tables.values():
        assert rows == sorted(rows)
        for op, least in (("layer_norm", 50), ("batch_norm", 50), ("log_softmax", 50), ("attention", 30)):
            assert sum(row.case.startswith(op) for row in rows) > least
    checks = list(rules.checks(tables))
    broken = [*(problem for check in checks for problem in check.problems()), *needless(rules, checks)]
    assert not broken, "\n".join(broken)


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


STRAIGHT, LOOP = "0:1:1 r2 i300 b4 l32 c900", "0:num_rows:num_splits r2 i200 b4 l32 c800 a2 u0"
SWEEP = "0:(num_splits*32768):4096 r0 i200 b2 l32 c800 a2 u0"
CASE, KEY = "layer_norm 8192x4096 bfloat16 forward", "0123456789ab"
ROW = Row("kernel", CASE, 8, 40, 255, 0, 0, 1024, "16x2", "16x2", 0, f"{STRAIGHT}; {LOOP}", KEY)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"spills": 8}, "spills 8"),
        ({"local_bytes": 16}, "local memory"),
        ({"registers": 256}, "registers"),
        ({"shared_bytes": 1 << 20}, "shared memory"),
        ({"loads": "16x1 2x8", "narrow": 8}, "narrow"),
        ({"regions": f"{STRAIGHT}; {LOOP.replace('a2', 'a0')}"}, "waits for all"),
        ({"regions": f"{STRAIGHT}; {LOOP.replace(' a2 u0', '')}"}, "copies nothing ahead"),
        ({"regions": f"{STRAIGHT}; 0:num_cols:8 r0 l16; {SWEEP}"}, "copies nothing ahead"),
        ({"regions": f"{STRAIGHT}; 0:num_cols:8 r0 l16", "stores": ""}, "copies nothing ahead"),
        ({"regions": f"{STRAIGHT}; {LOOP.replace('u0', 'u1')}"}, "copies over"),
        ({"regions": STRAIGHT.replace("r2", "r3")}, "3 reductions"),
        ({"regions": f"{STRAIGHT.replace('r2', 'r4')}; {SWEEP}"}, "4 reductions"),
        ({"regions": f"{STRAIGHT}; {SWEEP.replace('r0', 'r1')}"}, "1 reductions"),
    ],
    ids=str,
)
def test_rules_reject(change: dict, complaint: str) -> None:
    assert not broken_rules("sm_90", ROW)
    (found,) = broken_rules("sm_90", dataclasses.replace(ROW, **change))
    assert complaint in found


def test_amd_loads_ahead_what_nvidia_copies_ahead_case_by_case() -> None:
    other = dataclasses.replace(ROW, case="layer_norm 8192x2048 bfloat16 forward")
    late = dataclasses.replace(other, regions="0:1:1 r2; 0:num_rows:num_splits r2")
    tables = {"sm_90": [ROW, other], "gfx942": [ROW, late]}
    (problem,) = (problem for check in rules.checks(tables) for problem in check.problems())
    assert "x2048 bfloat16 forward): nothing is loaded ahead" in problem
    tables["gfx942"].append(other)
    assert not any(check.problems() for check in rules.checks(tables))


# Sums of 2,112 partial rows of 256 columns of float32, of which a program adds 64 rows at a time up, after a backward
# of 8,192 * 4,096 elements of bfloat16; and that backward.
ADDING = "0:1:1 r1 i200 b2 l0 c1500; 0:num_parts:64 r0 i117 b0 l128 c1000"
LATE = "0:1:1 r0 i300 b1 l32 c2000; program_x:num_rows:num_splits r1 i360 b2 l64 c1100"
SUMMING = "0:1:1 r0 i300 b1 l32 c2000; program_x:num_rows:num_splits r1 i360 b2 l64 c1100 a4 u0"


@pytest.mark.parametrize(
    "regions, grid, values, complaint",
    [
        (ADDING, (8,), {"num_parts": 2112}, "waits 19.7 us in 33 steps of 0.06 programs"),
        (ADDING, (8,), {"num_parts": 264}, None),
        (SUMMING, (264,), {"num_rows": 8192, "num_splits": 264}, None),
        (SUMMING, (132,), {"num_rows": 8192, "num_splits": 132}, "0.50 of the programs that fit"),
        (SUMMING, (528,), {"num_rows": 8192, "num_splits": 528}, "4.00 programs per processor, of which 2 fit"),
        (SUMMING.replace(" c1100", ""), (264,), {"num_rows": 8192, "num_splits": 264}, "no cycles"),
        (SUMMING.replace("l64", "l16"), (264,), {"num_rows": 8192, "num_splits": 264}, "8 KiB under way"),
        (SUMMING.replace("i360", "i900"), (264,), {"num_rows": 8192, "num_splits": 264}, "issues for 0.99 of the time"),
        # Loads one behind the other, of which a third is under way.
        (LATE.replace("c1100", "c3000"), (264,), {"num_rows": 8192, "num_splits": 264}, "10 KiB under way"),
        (LATE, (264,), {"num_rows": 8192, "num_splits": 264}, None),
    ],
)
def test_shares_reject(regions: str, grid: tuple[int, ...], values: dict[str, int], complaint: str | None) -> None:
    row = dataclasses.replace(ROW, registers=96, regions=regions)
    called = Called("layer_norm 8192x4096 bfloat16 backward", 3 * 2 * 8192 * 4096, (Launched(KEY, grid, values),))
    problems = broken_shares([called], [row])
    assert [complaint in problem for problem in problems] == ([] if complaint is None else [True]), problems


@pytest.mark.parametrize("loaded, complaint", [(64, "16 KiB under way on a processor, 8 warps"), (96, None)])
def test_half_of_the_threads_with_twice_the_registers_load_as_much(loaded: int, complaint: str | None) -> None:
    row = dataclasses.replace(ROW, registers=254, regions=SUMMING.replace("l64", f"l{loaded}"))
    launched = Launched(KEY, (132,), {"num_rows": 8192, "num_splits": 132})
    problems = broken_shares([Called("layer_norm 8192x4096 bfloat16 hvp", 3 * 2 * 8192 * 4096, (launched,))], [row])
    assert [complaint in problem for problem in problems] == ([] if complaint is None else [True]), problems


@pytest.mark.parametrize("shared, broken", [(65536, True), (131072, False)])
def test_rows_that_overrun_the_cache_together_are_found(shared: int, broken: bool) -> None:
    loop = "0:(num_splits*131072):8192 r0 i100 b0 l32 c900"
    row = dataclasses.replace(ROW, num_warps=32, registers=32, shared_bytes=shared, regions="; ".join([loop] * 3))
    launched = (Launched(KEY, (1024,), {"num_splits": 1}),)
    problems = broken_shares([Called("softmax 1024x131072", 8 * 1024 * 131072, launched, swept_bytes=1 << 18)], [row])
    assert ["66 MiB of rows under way" in problem for problem in problems] == [True] * broken, problems


@pytest.mark.parametrize(
    "known, complaint",
    [
        (("layer_norm 1x", 0.75, "by hand"), None),
        (("layer_norm 1x", 0.95, "by hand"), "allow no more than 0.1 above"),
        (("layer_norm ", 0.75, "by hand"), "leave out layer_norm 2x4096 bfloat16"),
        (("dropout ", 0.75, "by hand"), "leave out it"),
        ({("sm_90", "kernel", "layer_norm 3x4096 bfloat16"): 8}, None),
        ({("sm_90", "kernel", "layer_norm 3x4096 bfloat16"): 16}, "allow no more than 1 above"),
        ({("sm_90", "kernel", "layer_norm 1x4096 bfloat16"): 8}, "leave out it"),
    ],
)
def test_entries_that_nobody_needs_are_found(known: tuple | dict, complaint: str | None, monkeypatch) -> None:
    module, name = (rules, "KNOWN_SPILLS") if isinstance(known, dict) else (shares, "KNOWN_SHARES")
    for other, entries in vars(module).copy().items():
        if other.startswith("KNOWN_"):
            monkeypatch.setattr(module, other, type(entries)())
    monkeypatch.setattr(module, name, known if isinstance(known, dict) else (known,))
    # The first call issues for 0.66 of its time, the second one for half of that.
    row = dataclasses.replace(ROW, registers=96, regions=SUMMING.replace("i360", "i600"))
    launched, num_bytes = Launched(KEY, (264,), {"num_rows": 8192, "num_splits": 264}), 3 * 2 * 8192 * 4096
    calls = [Called(f"layer_norm {size}x4096 bfloat16 backward: x", size * num_bytes, (launched,)) for size in (1, 2)]
    spilling = dataclasses.replace(row, spills=8, case="layer_norm 3x4096 bfloat16 forward")
    checks = {shares: shares.checks(calls, [row]), rules: rules.checks({"sm_90": [row, spilling]})}
    problems = needless(module, checks[module])
    assert [complaint in problem for problem in problems] == ([] if complaint is None else [True]), problems


@pytest.mark.parametrize("num_parts, rows, broken", [(1056, 8192, True), (264, 8192, False), (1056, 262144, False)])
def test_partial_rows_that_cost_much_are_found(num_parts: int, rows: int, broken: bool, monkeypatch) -> None:
    added = Launched(KEY, (24,), {"num_parts": num_parts, "num_cols": 768, "BLOCK_COLS": 32, "BLOCK_PARTS": 128})
    part_bytes = num_parts * 768 * 4 * 2
    called = Called("layer_norm 768", 3 * 2 * rows * 768 + 2 * part_bytes, (added,), part_bytes)
    problems = broken_shares([called], [])
    assert ["8.0 partial rows per processor, 0.26 of its bytes" in problem for problem in problems] == [True] * broken
    # A call that needs no entry must have none.
    monkeypatch.setattr(shares, "KNOWN_SHARES", ())
    monkeypatch.setattr(shares, "KNOWN_FEW", ())
    monkeypatch.setattr(shares, "KNOWN_PARTS", (("layer_norm 768", 0.3, "by hand"),))
    assert not broken_shares([called], [])
    assert len(needless(shares, shares.checks([called], []))) == (not broken)


def test_a_comparison_counts_what_is_worse_in_the_variant_that_has_most() -> None:
    old = ["kernel,case,registers,spills,narrow", "a,x 1 forward,40,0,0", "b,x 1 forward,40,8,0", "c,x 1 forward,9,0,0"]
    rows = [
        "a,x 1 forward,32,0,0,0:1:1 i9",
        "a,x 1 forward,48,0,0,0:1:1 i9 b2; 0:n:1 i8",
        "b,x 1 forward,41,0,0,0:1:1 i9",
    ]
    new = figures_of(["kernel,case,registers,spills,narrow,regions", *rows])
    found = compared(figures_of(old), new)
    assert list(found.values()) == ["2 of 3", "0 / 1 / 1", "1 / 1 / 0", "0 / 2 / 0", "", "", ""]
    assert new["a", "x 1 forward"]["instructions, each loop once"] == 17


LONG, SHORT = ("layer_norm_fwd_kernel", "layer_norm 4096x16384 bfloat16"), "layer_norm 4096x8192 bfloat16"


@pytest.mark.parametrize(
    "chip_name, kernel, case, allowed",
    [("sm_90", *LONG, 8), ("sm_80", *LONG, 0), ("sm_90", "another", LONG[1], 0), ("sm_90", LONG[0], SHORT, 0)],
)
def test_spills_that_are_known_are_of_one_chip_kernel_and_case(chip_name, kernel, case, allowed, monkeypatch) -> None:
    monkeypatch.setattr(rules, "KNOWN_SPILLS", {("sm_90", *LONG): 8})
    for spills in (allowed, allowed + 4):
        row = dataclasses.replace(ROW, kernel=kernel, case=f"{case} all_results", spills=spills)
        assert bool(broken_rules(chip_name, row)) == (spills > allowed)
