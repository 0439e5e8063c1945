"""Bring the committed table of machine code up to date, or check all of it: `python -m perf.machine_code --help`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys

from triton_kernels.launch.chips import CHIPS


def _report(label: str, lines: list[str]) -> None:
    if lines:
        sys.stderr.write(f"{label}:\n" + "".join(f"  {line}\n" for line in lines))


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 1 if a kernel does not compile, breaks a rule, or (`--check`) differs from the table."""
    parser = argparse.ArgumentParser(prog="python -m perf.machine_code", description=__doc__)
    parser.add_argument("--all", action="store_true", help="recompile also what the table has already")
    parser.add_argument("--check", action="store_true", help="recompile everything, compare, and write nothing")
    parser.add_argument("--chip", choices=CHIPS, action="append", help="only this chip (may be repeated)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--folder", type=pathlib.Path, help="where the table lies instead of docs/perf/machine_code")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}:
        parser.error("TRITON_INTERPRET must not be set: the interpreter compiles nothing")

    import triton

    from perf.machine_code.rules import broken_rules
    from perf.machine_code.table import TABLE, VERSION_FILE, Row, read_table, read_version, write_table
    from perf.machine_code.workers import find_keys, make_rows

    folder = options.folder or TABLE
    chip_names = options.chip or list(CHIPS)
    old = {chip: {row.key: row for row in read_table(chip, folder)} for chip in chip_names}
    fresh = options.all or options.check or read_version(folder) != triton.__version__
    needed = find_keys(chip_names, options.jobs)
    known = {chip: {} if fresh else {k: r for k, r in old[chip].items() if k in needed[chip]} for chip in chip_names}
    made = make_rows(chip_names, known, options.jobs)

    failures, broken, differing = [], [], []
    for chip in chip_names:
        failures += [row for row in made[chip].values() if isinstance(row, str)]
        rows = {key: row for key, row in made[chip].items() if isinstance(row, Row)}
        for key, row in known[chip].items():
            # The case of a row that needs no compiling is the first one of today.
            rows[key] = dataclasses.replace(row, case=needed[chip][key][1])
        broken += [problem for row in rows.values() for problem in broken_rules(chip, row, triton.__version__)]
        differing += [f"{chip}: {row}" for row in sorted(set(rows.values()) ^ set(old[chip].values()))]
        if not options.check:
            write_table(chip, rows.values(), folder)
        sys.stdout.write(f"{chip}: {len(rows)} kernels, {len(made[chip])} compiled\n")
    if not options.check:
        (folder / VERSION_FILE.name).write_text(f"{triton.__version__}\n")
    _report("Does not compile", failures)
    _report("Breaks a rule", broken)
    if options.check:
        _report("Differs from the table", differing)
    return 1 if failures or broken or (options.check and differing) else 0


if __name__ == "__main__":
    sys.exit(main())
