"""The committed table of machine code is of these kernels, keeps the rules, and is what the compiler makes of them.

No GPU takes part and little is compiled: `docs/gates.md` says how. One process for all of it, because the interpreter,
in which the other kernel tests run, and the compiler exclude each other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
import triton

from perf.machine_code.rules import broken_rules
from perf.machine_code.table import FIELDS, Row, read_table, read_version, write_table
from triton_kernels.launch.chips import CHIPS

REPOSITORY = pathlib.Path(__file__).parents[2]
OUT_OF_DATE = "the table of machine code is out of date: run `make machine-code` and commit what it changes"


def run_probe(chip_name: str, *arguments: str) -> dict:
    """What `perf.machine_code.probe` prints."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", "-m", "perf.machine_code.probe", "--chip", chip_name, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{chip_name}: the probe ended with exit status {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


# Mistakes in a plan, and the rule that the kernel then breaks, on a chip of either vendor.
CAUGHT = {
    "sm_90": {"few warps": "spills", "unknown alignment": "narrow", "many stages": "shared memory"},
    "gfx942": {"few warps": "spills", "unknown alignment": "narrow"},
}


# One test for all that a process finds out, because starting it takes longer than most of that.
@pytest.mark.parametrize("chip_name", CHIPS)
def test_kernels_and_table_agree(chip_name: str) -> None:
    probe = run_probe(chip_name, *(["--faults"] if chip_name in CAUGHT else []))
    for fault, complaint in CAUGHT.get(chip_name, {}).items():
        problems = broken_rules(chip_name, Row(**probe["faults"][fault]))
        assert any(complaint in problem for problem in problems), f"{fault} is not caught: {problems}"

    sample = [Row(**row) for row in probe["sample"]]
    assert not probe["failures"], "\n".join(probe["failures"])
    assert len({row.kernel for row in sample}) == len(sample) > 1
    broken = [problem for row in sample for problem in broken_rules(chip_name, row)]
    assert not broken, "\n".join(broken)
    if triton.__version__ != read_version():
        pytest.skip(
            f"the table is of Triton {read_version()}, and another release makes other code: with Triton "
            f"{triton.__version__} {len(sample)} kernels were compiled and held to the rules, and no keys compared"
        )

    table = {row.key: row for row in read_table(chip_name)}
    missing = sorted(f"{kernel} ({case})" for key, (kernel, case) in probe["keys"].items() if key not in table)
    stale = sorted(f"{row.kernel} ({row.case})" for key, row in table.items() if key not in probe["keys"])
    assert not missing, f"{OUT_OF_DATE}; it lacks\n" + "\n".join(missing)
    assert not stale, f"{OUT_OF_DATE}; nothing launches any more\n" + "\n".join(stale)
    for row in sample:
        assert row.figures() == table[row.key].figures(), (
            f"{OUT_OF_DATE}; {chip_name} {row.kernel} ({row.case}) differs"
        )


@pytest.mark.parametrize("chip_name", CHIPS)
def test_every_row_keeps_the_rules(chip_name: str) -> None:
    rows = read_table(chip_name)
    assert rows == sorted(rows)
    for op in ("layer_norm", "batch_norm", "log_softmax"):
        assert sum(row.case.startswith(op) for row in rows) > 50
    broken = [problem for row in rows for problem in broken_rules(chip_name, row)]
    assert not broken, "\n".join(broken)


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


def test_table_files(tmp_path: pathlib.Path) -> None:
    other = dataclasses.replace(ROW, kernel="another", spills=3)
    write_table("sm_90", [ROW, other], tmp_path)
    assert read_table("sm_90", tmp_path) == [other, ROW]
    assert (tmp_path / "sm_90.csv").read_text().splitlines()[0] == ",".join(FIELDS)
    assert read_table("sm_80", tmp_path) == []
    assert read_version(tmp_path) == ""
