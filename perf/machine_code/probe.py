"""What the gate in the tests asks of a process that compiles: keys, a small sample of rows, planted faults."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from perf.machine_code.stand_in import is_amd
from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from perf.machine_code.launches import Launch

SAMPLE_SIZE = 2


def choose_sample(keys: dict[str, tuple[str, str]], chip_name: str) -> list[str]:
    """Keys of a few kernels, others for each chip; the same ones until the kernels change."""
    kernels = sorted({kernel for kernel, _ in keys.values()})
    # Spread over the families, which the names sort by.
    step = len(kernels) // SAMPLE_SIZE
    first = list(CHIPS).index(chip_name) * max(step // len(CHIPS), 1)
    chosen = [kernels[(first + number * step) % len(kernels)] for number in range(SAMPLE_SIZE)]
    return [min(key for key, (kernel, _) in keys.items() if kernel == name) for name in chosen]


def plant_fault(name: str, launch: Launch) -> Launch:
    """The launch of a layer norm backward with a mistake in its plan."""
    changes = {
        "few warps": {"num_warps": 1},
        "unknown alignment": {"ALIGN": 1},
        # On NVIDIA the loop's loads for rows ahead go to shared memory, more here than a chip has.
        "many stages": {"LOOP_STAGES": 16},
    }
    return launch._replace(constants={**launch.constants, **changes[name]})


FAULTS = ("few warps", "unknown alignment", "many stages")


def _planted(chip_name: str) -> dict[str, dict[str, Any] | str]:
    """What the compiler makes of each fault."""
    from perf.machine_code.cases import Shape, launch_mode
    from perf.machine_code.compiling import try_compile
    from perf.machine_code.launches import watch_launches

    shape, launches, found = Shape("layer_norm", (8192, 4096)), [], {}
    with watch_launches(chip_name, [shape], launches.append):
        launch_mode(shape, "backward")
        for name in FAULTS[: 2 if is_amd(chip_name) else 3]:
            row = try_compile(chip_name, plant_fault(name, launches[0]), f"{shape} with {name}")
            found[name] = row if isinstance(row, str) else dataclasses.asdict(row)
    return found


def _probe(chip_name: str) -> dict[str, Any]:
    from perf.machine_code.compiling import compile_keys, needed_keys

    keys = needed_keys(chip_name)
    sample = frozenset(choose_sample(keys, chip_name))
    rows = list(compile_keys(chip_name, sample.__contains__).values())
    return {
        "keys": keys,
        "sample": [dataclasses.asdict(row) for row in rows if not isinstance(row, str)],
        "failures": [row for row in rows if isinstance(row, str)],
    }


def main() -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m perf.machine_code.probe", description=__doc__)
    parser.add_argument("--chip", choices=CHIPS, required=True)
    parser.add_argument("--faults", action="store_true", help="compile the planted faults as well")
    options = parser.parse_args()
    # A kernel from an earlier compiler or an earlier edit must not stand in for this one.
    with tempfile.TemporaryDirectory() as cache_dir:
        os.environ["TRITON_CACHE_DIR"] = cache_dir
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        found = _probe(options.chip)
        if options.faults:
            found["faults"] = _planted(options.chip)
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
