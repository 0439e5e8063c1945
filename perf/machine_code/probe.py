"""What the gate in the tests asks of a process that compiles: keys, a small sample of rows, planted faults, batches."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from perf.machine_code.stand_in import is_amd
from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Collection

    from perf.machine_code.launches import Launch
    from triton_kernels.launch._planned import Request

# Kernels that are compiled anew, whatever they are, and of those that are close to a limit.
SAMPLE_SIZE = 2
TIGHT_SAMPLE_SIZE = 1


def choose_sample(keys: dict[str, tuple[str, str]], tight: Collection[str]) -> list[str]:
    """Keys of a few different kernels, first of them `tight` ones; other ones whenever any kernel or plan changes."""
    seed = "".join(sorted(keys))
    # No order but that of a hash, and the same one on every machine.
    order = sorted(keys, key=lambda key: hashlib.sha256(f"{key} {seed}".encode()).digest())
    chosen: dict[str, str] = {}
    for candidates, size in (([key for key in order if key in tight], TIGHT_SAMPLE_SIZE), (order, SAMPLE_SIZE)):
        wanted = len(chosen) + size
        for key in candidates:
            if len(chosen) < wanted:
                chosen.setdefault(keys[key][0], key)
    return list(chosen.values())


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


# What is launched in clusters: of each op that has such candidates, rows that one program sweeps otherwise, and modes
# that reach its kernels of first order. Second order has candidates for log-softmax, which hold fewer values.
CLUSTERED = {"layer_norm": (512, 131072), "log_softmax": (2048, 128256)}
CLUSTERED_MODES = ("forward", "backward", "jvp")


class _ClusterAdvisor:
    """Answers every request for a plan with the first candidate that has clusters, where there is one."""

    def advise(self, request: Request) -> tuple[Any, bool]:
        """The plan to take; it is not settled, so that nobody remembers it."""
        clustered = (plan for plan in request.candidates() if getattr(plan, "num_ctas", 1) > 1)
        return next(clustered, request.default), False


def _clusters(chip_name: str) -> dict[str, dict[str, Any] | str]:
    """What the compiler makes of each op and mode in a cluster; nothing where this release plans none."""
    from perf.machine_code.cases import Shape, launch_mode
    from perf.machine_code.compiling import try_compile
    from perf.machine_code.launches import watch_launches
    from triton_kernels.launch._planned import set_advisor

    found: dict[str, dict[str, Any] | str] = {}
    for op, mode in itertools.product(CLUSTERED, CLUSTERED_MODES):
        shape, launches = Shape(op, CLUSTERED[op]), []
        set_advisor(_ClusterAdvisor())
        try:
            with watch_launches(chip_name, [shape], launches.append):
                launch_mode(shape, mode)
                for launch in launches:
                    if launch.constants.get("num_ctas", 1) > 1:
                        row = try_compile(chip_name, launch, f"{shape} {mode} in clusters")
                        found[f"{op} {mode}"] = row if isinstance(row, str) else dataclasses.asdict(row)
        finally:
            set_advisor(None)
    return found


def _probe(chip_name: str) -> dict[str, Any]:
    from perf.machine_code.compiling import compile_keys, needed_keys
    from perf.machine_code.rules import is_tight
    from perf.machine_code.table import read_table

    keys = needed_keys(chip_name)
    sample = frozenset(choose_sample(keys, {row.key for row in read_table(chip_name) if is_tight(chip_name, row)}))
    rows = list(compile_keys(chip_name, sample.__contains__, {keys[key][1] for key in sample}).values())
    return {
        "keys": keys,
        "sample": [dataclasses.asdict(row) for row in rows if not isinstance(row, str)],
        "failures": [row for row in rows if isinstance(row, str)],
    }


def main() -> int:
    """Print one JSON object, with an entry for each chip."""
    parser = argparse.ArgumentParser(prog="python -m perf.machine_code.probe", description=__doc__)
    parser.add_argument("--chip", choices=CHIPS, action="append", required=True, help="may be repeated")
    parser.add_argument("--faults", choices=CHIPS, action="append", default=[], help="compile planted faults as well")
    parser.add_argument("--clusters", choices=CHIPS, action="append", default=[], help="compile clusters as well")
    parser.add_argument(
        "--batches", choices=CHIPS, action="append", default=[], help="launch other batch sizes as well"
    )
    options = parser.parse_args()
    found = {}
    # A kernel from an earlier compiler or an earlier edit must not stand in for this one.
    with tempfile.TemporaryDirectory() as cache_dir:
        os.environ["TRITON_CACHE_DIR"] = cache_dir
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        for chip_name in options.chip:
            found[chip_name] = _probe(chip_name)
            if chip_name in options.faults:
                found[chip_name]["faults"] = _planted(chip_name)
            if chip_name in options.clusters:
                found[chip_name]["clusters"] = _clusters(chip_name)
            if chip_name in options.batches:
                from perf.machine_code.batches import compiled_anew

                found[chip_name]["compiled_anew"] = compiled_anew(chip_name)
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
