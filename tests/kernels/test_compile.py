"""Every kernel, as its launcher configures it, compiles for each supported chip: no register spills, wide loads.

No GPU takes part: `compile_support` says how. One process per chip, because the interpreter, in which the other kernel
tests run, and the compiler exclude each other.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.kernels.compile_support import CHIPS

REPOSITORY = pathlib.Path(__file__).parents[2]
FAMILIES = (
    "layer_norm",
    "layer_norm_second",
    "batch_norm",
    "batch_norm_second",
    "log_softmax",
    "log_softmax_second",
)

# Cases whose tensors allow loads of 16 bytes per thread everywhere.
ALIGNED_CASES = (" rows 4096x4096 bfloat16", "classes of pixels")

# On NVIDIA, float64 division and square root are subroutines, around whose calls a few registers go to the stack.
FLOAT64_SPILLS = 64


def _allowed_spills(record: dict) -> int:
    return FLOAT64_SPILLS if record["case"].endswith("float64") else 0


def compile_all(target: str) -> list[dict]:
    """Records, and errors, of all cases for one chip."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.kernels.compile_support", "--target", target]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode and not any("error" in record for record in records):
        pytest.fail(f"compiling for {target} ended with exit status {done.returncode}:\n{done.stderr[-4000:]}")
    return records


@pytest.mark.parametrize("target", CHIPS)
def test_kernels_compile(target):
    records = compile_all(target)

    errors = [record for record in records if "error" in record]
    assert not errors, "\n".join(f"{record['case']}:\n{record['error'][-2000:]}" for record in errors)

    for family in FAMILIES:
        assert any(record["case"].startswith(f"{family} ") for record in records), f"no {family} kernel was compiled"

    spilling = [record for record in records if record["spills"] > _allowed_spills(record) or record["local_bytes"]]
    assert not spilling, "\n".join(map(str, spilling))

    aligned = [record for record in records if any(name in record["case"] for name in ALIGNED_CASES)]
    assert aligned
    narrow = [record for record in aligned if record["widest_load_bytes"] < 16]
    assert not narrow, "\n".join(map(str, narrow))
