"""The committed table of machine code is of these kernels, keeps the rules, and is what the compiler makes of them.

No GPU takes part and little is compiled: `docs/gates.md` says how. What compiles runs in processes of its own, because
the interpreter, in which the other kernel tests run, and the compiler exclude each other.
"""

from __future__ import annotations

import dataclasses
import importlib
import uuid
from typing import TYPE_CHECKING

import pytest
import triton

from perf.machine_code.assembly import Access, accesses, unseen_pointers
from perf.machine_code.rules import broken_rules
from perf.machine_code.sources import UnknownGlobalError, source_text
from perf.machine_code.table import Row, read_table, read_version, write_table
from tests.kernels.interpreting import run_compiled
from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    import pathlib

OUT_OF_DATE = "the table of machine code is out of date: run `make machine-code` and commit what it changes"

# Programs of 256 threads of each reduction over channels that run at once on a processor: along the spatial axis, and
# across channels. What is here of the plan is written out, so that a plan and a budget cannot go wrong together.
REDUCTIONS = {
    "batch_norm_statistics_kernel": (4, 3),
    "batch_norm_product_sums_kernel": (3, 2),
    "batch_norm_second_sums_kernel": (2, 2),
}


def test_kernels_and_table_agree() -> None:
    run_compiled("perf.machine_code", "--keys", "--jobs", "1", failure=OUT_OF_DATE)
    if triton.__version__ != read_version():
        pytest.skip(f"the table is of Triton {read_version()}; with another release no keys are compared")


@pytest.mark.nightly
@pytest.mark.parametrize("chip_name", CHIPS)
def test_all_kernels_and_table_agree(chip_name: str) -> None:
    run_compiled("perf.machine_code", "--check", "--jobs", "1", "--chip", chip_name, failure=OUT_OF_DATE)


@pytest.mark.parametrize("what, chip_name", [("anew", "sm_100"), ("faults", "sm_90")])
def test_another_batch_size_compiles_nothing_and_mistakes_of_plans_are_caught(what: str, chip_name: str) -> None:
    run_compiled("tests.kernels.compiled_cases", what, chip_name)


@pytest.mark.parametrize("chip_name", CHIPS)
def test_every_row_keeps_the_rules(chip_name: str) -> None:
    rows = read_table(chip_name)
    assert rows == sorted(rows)
    for op in ("layer_norm", "batch_norm", "log_softmax"):
        assert sum(row.case.startswith(op) for row in rows) > 50
    broken = [problem for row in rows for problem in broken_rules(chip_name, row)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("chip_name", CHIPS)
def test_reductions_over_channels_leave_room_for_each_other(chip_name: str) -> None:
    chip = CHIPS[chip_name]
    rows = [row for row in read_table(chip_name) if row.kernel in REDUCTIONS]
    assert {row.kernel for row in rows} == set(REDUCTIONS)
    for row in rows:
        threads = row.num_warps * chip.warp_size
        fitting = chip.registers // (threads * (row.registers + -row.registers % 8))
        across = "channels_last" in row.case or row.case.split()[1].count("x") == 1
        assert fitting >= REDUCTIONS[row.kernel][across], f"{chip_name}: of {row} {fitting} programs fit a processor"


ROW = Row("kernel", "layer_norm 8192x4096 bfloat16 forward", 8, 40, 255, 0, 0, 1024, "16x2", "16x2", 0, "0123456789ab")


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"spills": 8}, "spills 8"),
        ({"local_bytes": 16}, "local memory"),
        ({"registers": 256}, "registers"),
        ({"shared_bytes": 1 << 20}, "shared memory"),
        ({"loads": "16x1 2x8", "narrow": 8}, "narrow"),
    ],
    ids=str,
)
def test_rules_reject(change: dict, complaint: str) -> None:
    assert not broken_rules("sm_90", ROW)
    (found,) = broken_rules("sm_90", dataclasses.replace(ROW, **change))
    assert complaint in found


def test_figures_that_are_written_by_hand_are_found(tmp_path: pathlib.Path) -> None:
    other = dataclasses.replace(ROW, kernel="another", spills=3)
    write_table("sm_90", [ROW, other], tmp_path)
    assert read_table("sm_90", tmp_path) == [other, ROW]
    text = (tmp_path / "sm_90.csv").read_text()
    assert text.count(",8,40,255,3,") == 1
    (tmp_path / "sm_90.csv").write_text(text.replace(",8,40,255,3,", ",8,40,255,0,"))
    assert read_table("sm_90", tmp_path) == [ROW]


def test_exceptions_are_of_one_kernel_and_case() -> None:
    row = dataclasses.replace(
        ROW, kernel="layer_norm_second_kernel", case="layer_norm 8192x8192 bfloat16 all_results", spills=8
    )
    assert not broken_rules("sm_100", row)
    assert broken_rules("sm_90", row)
    for change in (
        {"spills": 12},
        {"kernel": "layer_norm_bwd_kernel"},
        {"case": "layer_norm 8192x4096 bfloat16 all_results"},
    ):
        assert broken_rules("sm_100", dataclasses.replace(row, **change))


LLVM = """
define ptx_kernel void @kernel(ptr addrspace(1) %x_ptr, ptr addrspace(1) %y_ptr, ptr addrspace(1) %z_ptr, i32 %n) {{
  %1 = getelementptr bfloat, ptr addrspace(1) %x_ptr, i64 8
  %2 = tail call {{ i32, i32 }} asm sideeffect "{assembly}", "=r,=r,l"(ptr addrspace(1) %1) #1
  {store}
  ret void
}}
"""
VECTOR_STORE = "store <4 x i32> zeroinitializer, ptr addrspace(1) %y_ptr, align 16"


@pytest.mark.parametrize(
    "assembly, num_bytes",
    [
        ("ld.global.v4.b32 { $0, $1 }, [ $2 + 0 ];", 16),
        ("@$3 ld.volatile.global.b16 { $0 }, [ $2 + 0 ];", 2),
        ("ld.relaxed.gpu.global.v2.b32 { $0, $1 }, [ $2 + 0 ];", 8),
        ("cp.async.cg.shared.global [ $0 + 0 ], [ $2 + 0 ], 0x10, 0x10;", 16),
    ],
)
def test_accesses_are_found_whatever_their_qualifiers(assembly: str, num_bytes: int) -> None:
    text = LLVM.format(assembly=assembly, store=VECTOR_STORE)
    assert accesses(text) == [Access("load", num_bytes, 0), Access("store", 16, 1)]
    assert unseen_pointers(text) == set()


def test_a_tensor_that_is_used_in_an_unknown_way_is_noticed() -> None:
    call = "call void @llvm.unknown.copy(ptr addrspace(1) %y_ptr, i32 %n)"
    assert unseen_pointers(LLVM.format(assembly="ld.global.b32 $0, [ $2 + 0 ];", store=call)) == {1}
    with pytest.raises(ValueError, match="got 'tensormap"):
        accesses(LLVM.format(assembly="tensormap.replace.global [ $2 + 0 ];", store=VECTOR_STORE))


HELPERS = "LIMIT = 3\nUNUSED = 4\n"
KERNELS = """
import triton
import triton.language as tl
from {helpers} import LIMIT
import {helpers} as helpers
SCALE = 2
TABLE = {{"x": 1}}

@triton.jit
def device_function(x):
    return x * {constant}

@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr):
    \"\"\"{docstring}\"\"\"
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(x_ptr + tl.arange(0, BLOCK), device_function(x))
"""


@pytest.mark.parametrize(
    "constant, edited, changes",
    [
        ("SCALE", {"SCALE = 2": "SCALE = 5"}, True),
        ("LIMIT", {"LIMIT = 3": "LIMIT = 5"}, True),
        ("helpers.LIMIT", {"LIMIT = 3": "LIMIT = 5"}, True),
        ("SCALE", {"LIMIT = 3": "LIMIT = 5"}, False),
        ("SCALE", {"What it does.": "Other words."}, False),
        ("SCALE", {"x * SCALE": "x + SCALE"}, True),
        ("SCALE", {"@triton.jit\ndef device_function": "@triton.jit(noinline=True)\ndef device_function"}, True),
    ],
    ids=str,
)
def test_keys_know_every_constant(
    constant: str, edited: dict[str, str], changes: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    before, after = (text_of(tmp_path, constant, replaced) for replaced in ({}, edited))
    assert (before != after) == changes


def text_of(folder: pathlib.Path, constant: str, edited: dict[str, str]) -> str:
    """The text of the kernel above, from modules of its own, whose names it does not tell."""
    helpers, kernels = (f"{kind}_{uuid.uuid4().hex}" for kind in ("helpers", "kernels"))
    source = KERNELS.format(helpers=helpers, constant=constant, docstring="What it does.")
    for name, text in ((helpers, HELPERS), (kernels, source)):
        for old, new in edited.items():
            text = text.replace(old, new)
        (folder / f"{name}.py").write_text(text)
    text = source_text(importlib.import_module(kernels).kernel)
    return text.replace(helpers, "helpers").replace(kernels, "kernels")


DEVICE = "@triton.jit\ndef device_function"
WRAPPED = {
    DEVICE: f"def wrapped(function):\n    return function\n\n@triton.jit\n@wrapped{DEVICE[len('@triton.jit') :]}"
}


@pytest.mark.parametrize(
    "constant, edited, complaint",
    [('TABLE["x"]', {}, "names TABLE of type dict"), ("SCALE", WRAPPED, "wrapped of type func")],
    ids=["constant", "decorator"],
)
def test_what_a_key_cannot_follow_is_refused(
    constant: str, edited: dict[str, str], complaint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownGlobalError, match=complaint):
        text_of(tmp_path, constant, edited)
