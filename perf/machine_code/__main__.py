"""Bring the committed table of machine code up to date, or check it: `python -m perf.machine_code --help`.

Kernels are compiled in processes of their own: as many as there are cores, each with its own cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

from perf.machine_code.rules import broken_rules
from perf.machine_code.table import TABLE, VERSION_FILE, Row, read_table, read_version, write_table
from perf.ops import CASES
from primitives.kernels.runtime.chips import CHIPS

# For each key the kernel's name and the first case with it.
Keys = dict[str, tuple[str, str]]


def walk(chip: str, op: str | None, wanted: Keys | None = None) -> dict[str, Any]:
    """The `Keys` that the cases need on a chip, of one op if it is named; of those wanted the rows, or complaints."""
    # A kernel from an earlier compiler or an earlier edit must not stand in for this one.
    with tempfile.TemporaryDirectory() as cache, warnings.catch_warnings():
        # Torch and Triton warn of the missing GPU, and of defaults to come: once per process, over the progress.
        warnings.simplefilter("ignore")
        # Line tables take a tenth of the time and change no instruction.
        os.environ.update(TRITON_CACHE_DIR=cache, TRITON_DISABLE_LINE_INFO="1")
        from perf.machine_code.compiling import described_calls, try_compile

        found: dict[str, Any] = {}
        cases = None if wanted is None else {case for _, case in wanted.values()}
        for case, launches in described_calls(chip, cases, op):
            for launch in launches:
                if launch.key not in found and (wanted is None or launch.key in wanted):
                    is_named = wanted is None
                    found[launch.key] = (launch.kernel.__name__, case) if is_named else try_compile(chip, launch, case)
        return found


def _in_processes(tasks: Sequence[tuple], jobs: int) -> list[dict[str, Any]]:
    """`walk` of each task; a single job needs no process of its own."""
    if jobs == 1 or not tasks:
        return [walk(*task) for task in tasks]
    # Spawned, because threads of torch do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(tasks)), maxtasksperchild=1) as pool:
        return pool.starmap(walk, tasks, chunksize=1)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.machine_code", description=__doc__)
    parser.add_argument("--check", action="store_true", help="recompile everything, compare, and write nothing")
    parser.add_argument("--keys", action="store_true", help="compare keys alone, compile and write nothing")
    parser.add_argument(
        "--op",
        choices=[case.name for case in CASES],
        help="compile the cases of this operation, print them, write nothing",
    )
    parser.add_argument("--chip", choices=CHIPS, action="append", help="only this chip (may be repeated)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}:
        parser.error("TRITON_INTERPRET must not be set: the interpreter compiles nothing")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 1 if a kernel does not compile, breaks a rule, or (`--check`) differs from the table."""
    options = _options(argv)
    import triton

    chips, jobs, writes = options.chip or list(CHIPS), options.jobs, not (options.check or options.keys or options.op)
    version, of_table = triton.__version__, read_version()
    if not (writes or options.op) and version != of_table:
        sys.stdout.write(f"The table is of Triton {of_table}, this is {version}: nothing to compare.\n")
        return 0
    walked = dict(zip(chips, _in_processes([(chip, options.op) for chip in chips], jobs), strict=True))
    problems = []
    for chip, needed in walked.items():
        old = {row.key: row for row in read_table(chip)}
        recompiles = options.check or options.op or version != of_table
        wanted = {} if options.keys else {k: v for k, v in needed.items() if recompiles or k not in old}
        parts = [{key: wanted[key] for key in list(wanted)[part::jobs]} for part in range(min(jobs, len(wanted)))]
        made = dict(ChainMap(*_in_processes([(chip, options.op, part) for part in parts], jobs)))
        problems += [row for row in made.values() if isinstance(row, str)]
        # The case of a row that needs no compiling is the first one of today.
        kept = [(old[key], case) for key, (_, case) in needed.items() if key in old and key not in wanted]
        rows = [row._replace(case=case) for row, case in kept]
        rows += [row for row in made.values() if isinstance(row, Row)]
        problems += [problem for row in rows for problem in broken_rules(chip, row)]
        if writes:
            write_table(chip, rows)
        elif options.op:
            sys.stdout.write("".join(f"{row.summary()}\n" for row in sorted(rows)))
        else:
            problems += [f"{chip}: not in the table: {needed[key]}" for key in needed.keys() - old]
            problems += [f"{chip}: differs from the table: {row}" for row in sorted({*rows} ^ {*old.values()})]
        sys.stdout.write(f"{chip}: {len(needed)} kernels, {len(made)} compiled\n")
    if writes:
        (TABLE / VERSION_FILE).write_text(f"{version}\n")
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
