"""Bring the committed table of machine code up to date, or check it: `python -m perf.machine_code --help`.

Kernels are compiled in processes of their own: as many as there are cores, each with its own cache.
"""

from __future__ import annotations

import argparse
import os
import sys

from perf.machine_code.processes import walked
from perf.machine_code.rules import broken_rules
from perf.machine_code.table import TABLE, VERSION_FILE, Row, read_table, read_version, write_table
from perf.ops import CASES
from primitives.kernels.runtime.chips import CHIPS


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
    old = {chip: {row.key: row for row in read_table(chip)} for chip in chips}
    recompiles, parts, problems = options.check or options.op or version != of_table, 1 if options.keys else jobs, []
    known = {chip: None if options.keys else {*()} if recompiles else {*old[chip]} for chip in chips}
    tasks = [(chip, options.op, part, parts, known[chip]) for chip in chips for part in range(parts)]
    found = walked(tasks, jobs)
    for number, chip in enumerate(chips):
        needed, made = found[number * parts][0], [row for _, rows in found[number * parts :][:parts] for row in rows]
        problems += [row for row in made if isinstance(row, str)]
        rows = [row for row in made if isinstance(row, Row)]
        # The case of a row that needs no compiling is the first one of today.
        rows += [] if recompiles else [old[chip][key]._replace(case=needed[key]) for key in needed.keys() & old[chip]]
        problems += [problem for row in rows for problem in broken_rules(chip, row)]
        if writes:
            write_table(chip, rows)
        elif options.op:
            sys.stdout.write("".join(f"{row}\n" for row in sorted(rows)))
        else:
            problems += [f"{chip}: not in the table: {needed[key]}" for key in needed.keys() - old[chip]]
            problems += [f"{chip}: differs from the table: {row}" for row in sorted({*rows} ^ {*old[chip].values()})]
        sys.stdout.write(f"{chip}: {len(needed)} kernels, {len(made)} compiled\n")
    if writes:
        (TABLE / VERSION_FILE).write_text(f"{version}\n")
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
