"""Measure the kernels, report and compare; `docs/developers/measuring.md` says how."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from perf.pages import DOCS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands and return the exit status."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    options.rest = rest
    if rest and options.command is not _run:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return options.command(options)
    except ModuleNotFoundError as error:
        print(f"python -m perf needs {error.name}: pip install 'torch-training-primitives[perf]'.", file=sys.stderr)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    def command(function: Callable[[argparse.Namespace], int]) -> Callable[..., object]:
        made = commands.add_parser(function.__name__.removeprefix("_"), help=function.__doc__)
        made.set_defaults(command=function)
        return made.add_argument

    command(_run)
    add = command(_report)
    add("results", nargs="+", type=Path, help="result files, of one device each")
    add("--out", type=Path, default=DOCS / "perf", help="directory (default: docs/perf)")
    add = command(_compare)
    add("before", type=Path)
    add("after", type=Path)
    add = command(_compile)
    add("--only", nargs="+", default=[], metavar="WORDS", help="steps whose name contains one of these")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    add("--write", action="store_true", help="write the page of the docs")
    command(_eager)
    add = command(_emulate)
    add("op", help="name of an operation")
    add("--chip", default="sm_80", help="sm_80 or sm_90")
    add("--mode", action="append", help="only this mode (may be repeated)")
    return parser


def _emulate(options: argparse.Namespace) -> int:
    """Execute the compiled calls of an operation on the CPU, in a small size: values, counts of each launch, faults."""
    from perf import ops
    from primitives.kernels.runtime.chips import CHIPS, use_chip
    from primitives.testing import check_kernel
    from tests.kernels.truth import check_values

    records = {case.name: case for case in ops.CASES}
    if options.op not in records or not records[options.op].workloads("small"):
        raise ValueError(f"emulate: the operation must be one of {', '.join(records)}, got {options.op}.")
    workload, is_wrong = records[options.op].workloads("small")[0], False
    for mode in options.mode or workload.modes:
        for call in workload.record.calls(workload, mode):
            with use_chip(CHIPS[options.chip]):
                report = check_kernel(call.launcher, call.args, chip=options.chip, raise_on_failure=False)
            values = "within their bounds of the truth in float64"
            try:
                check_values(call, report.results if isinstance(report.results, (tuple, list)) else [report.results])
            except AssertionError as error:
                values, is_wrong = f"wrong: {error}", True
            print(f"{mode}, {call.launcher.__name__}. {report}\nValues:\n  {values}", flush=True)
            is_wrong |= not report.ok
    return int(is_wrong)


def _eager(_options: argparse.Namespace) -> int:
    """Times of plain calls on the CPU: torch, torch repaired, primitives."""
    from perf import eager

    return eager.main()


def _run(options: argparse.Namespace) -> int:
    """Measure, by pytest and a worker for each GPU: -k WORDS, --quick, --device, --providers, --result FILE."""
    import pytest
    import torch

    # Two runs on one processor at a time would spoil each other.
    workers = 1 if "cpu" in options.rest else torch.cuda.device_count() or 1
    # One unit at a time goes to a worker, in the order of the plan; one that dies is replaced.
    spread = ["-n", str(workers), "--dist", "load", "--maxschedchunk", "1", "--max-worker-restart", "1000"]
    # A unit that takes longer, with all that it compiles, hangs: its process ends, and another goes on.
    limit = ["--timeout", "300", "--timeout-method", "thread"]
    return pytest.main([str(Path(__file__).parent / "test_bench.py"), *spread, *limit, *options.rest])


def _report(options: argparse.Namespace) -> int:
    """Write the page of results."""
    from perf.results import write_report

    for path in options.results:
        print(f"Written to {write_report(path, options.out)}.")
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Find what became slower, broke, or is gone."""
    from perf.results import compare, load

    text, failed = compare(load(options.before), load(options.after))
    print(text)
    return int(failed)


def _compile(options: argparse.Namespace) -> int:
    """Training steps with derivatives in the loss, compiled; takes a quarter of an hour."""
    from perf import compiled_steps
    from perf.pages import line

    found = []
    for each in compiled_steps.results(options.only, options.device):
        found.append(each)
        print(line(compiled_steps.cells(each, each["ms"])), flush=True)
    print("\n".join(compiled_steps.means(found)))
    if options.write:
        compiled_steps.write(found, DOCS / "perf", options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
