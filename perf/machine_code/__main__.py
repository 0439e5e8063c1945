"""Bring the committed table of machine code up to date, or check it: `python -m perf.machine_code --help`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys

from perf.machine_code.rules import broken_rules
from perf.machine_code.table import TABLE, VERSION_FILE, Row, read_table, read_version, write_table
from perf.machine_code.workers import find_keys, make_rows
from triton_kernels.launch.chips import CHIPS


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.machine_code", description=__doc__)
    parser.add_argument("--all", action="store_true", help="recompile also what the table has already")
    parser.add_argument("--check", action="store_true", help="recompile everything, compare, and write nothing")
    parser.add_argument("--keys", action="store_true", help="compare keys alone, compile and write nothing")
    parser.add_argument("--chip", choices=CHIPS, action="append", help="only this chip (may be repeated)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--folder", type=pathlib.Path, default=TABLE, help="where the table lies")
    options = parser.parse_args(argv)
    options.check = options.check or options.keys
    if os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}:
        parser.error("TRITON_INTERPRET must not be set: the interpreter compiles nothing")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 1 if a kernel does not compile, breaks a rule, or (`--check`) differs from the table."""
    options = _options(argv)
    import triton

    version, chips = triton.__version__, options.chip or list(CHIPS)
    is_of_table = read_version(options.folder) == version
    needed = find_keys(chips, options.jobs)
    old = {chip: {row.key: row for row in read_table(chip, options.folder)} for chip in chips}
    wanted = needed
    if options.keys:
        wanted = {chip: {} for chip in chips}
    elif is_of_table and not (options.all or options.check):
        wanted = {chip: {key: v for key, v in needed[chip].items() if key not in old[chip]} for chip in chips}
    made = make_rows(wanted, options.jobs)

    problems = [row for rows in made.values() for row in rows.values() if isinstance(row, str)]
    for chip in chips:
        new = {key: row for key, row in made[chip].items() if isinstance(row, Row)}
        # The case of a row that needs no compiling is the first one of today.
        kept = {key: row for key, row in old[chip].items() if key in needed[chip] and key not in wanted[chip]}
        rows = {key: dataclasses.replace(row, case=needed[chip][key][1]) for key, row in kept.items()} | new
        checked = new if options.check and not is_of_table else rows
        problems += [problem for row in checked.values() for problem in broken_rules(chip, row, version)]
        if not options.check:
            write_table(chip, rows.values(), options.folder)
        elif is_of_table:
            problems += [f"{chip}: not in the table: {needed[chip][key]}" for key in needed[chip].keys() - old[chip]]
            differing = sorted(set(rows.values()) ^ set(old[chip].values()))
            problems += [f"{chip}: differs from the table: {row}" for row in differing]
        sys.stdout.write(f"{chip}: {len(needed[chip])} kernels, {len(made[chip])} compiled\n")
    if not options.check:
        (options.folder / VERSION_FILE.name).write_text(f"{version}\n")
    elif not is_of_table:
        sys.stdout.write(f"The table is of Triton {read_version(options.folder)}, this is {version}: rules alone.\n")
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
