"""Measure the kernels, report and compare; `docs/developers/measuring.md` says how."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DOCS = Path(__file__).resolve().parent.parent / "docs" / "perf"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands and return the exit status."""
    options = _parser().parse_args(arguments)
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

    add = command(_run)
    add("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    add("--quick", action="store_true", help="few workloads")
    add("--only", nargs="+", default=[], metavar="WORDS", help="workloads whose key contains one of these")
    add("--modes", nargs="+", default=[], metavar="MODE", help="only these modes")
    add("--providers", nargs="+", default=[], metavar="NAME", help="only these providers")
    add("--out", type=Path, default=Path("perf_output/result.json"), help="(default: %(default)s)")
    add = command(_report)
    add("results", nargs="+", type=Path, help="result files, of one device each")
    add("--out", type=Path, default=DOCS, help="directory (default: docs/perf)")
    add = command(_compare)
    add("before", type=Path)
    add("after", type=Path)
    command(_memory)
    add = command(_compile)
    add("--only", nargs="+", default=[], metavar="WORDS", help="steps whose name contains one of these")
    add("--write", action="store_true", help="write the page of the docs")
    command(_eager)
    return parser


def _eager(_options: argparse.Namespace) -> int:
    """Times of plain calls on the CPU: torch, torch repaired, primitives."""
    from perf import eager

    return eager.main()


def _run(options: argparse.Namespace) -> int:
    """Measure."""
    import torch

    from perf.suite.plan import Options
    from perf.suite.report import print_summary
    from perf.suite.results import OK, write_json
    from perf.suite.run import run

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    path: Path = options.out
    if path.is_dir():
        raise ValueError(f"--out must name a file, got the directory {path}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    result = run(Options(device, options.quick, tuple(options.only), tuple(options.modes), tuple(options.providers)))
    print_summary(result)
    statuses = {row["status"] for row in result["rows"] if row["provider"] == "primitives"}
    if OK not in statuses:
        path = path.with_name(f"{path.stem}.failed.json")
        print(f"No row of this package is right: {options.out} is left as it was.")
    write_json(path, result)
    print(f"Written to {path}.")
    return 0 if statuses == {OK} else 1


def _report(options: argparse.Namespace) -> int:
    """Write tables and plots."""
    from perf.suite.report import write_report

    for path in options.results:
        print(f"Written to {write_report(path, options.out)}.")
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Find what became slower, broke, or is gone."""
    from perf.suite.compare import compare
    from perf.suite.results import load

    text, failed = compare(load(options.before), load(options.after))
    print(text)
    return int(failed)


def _memory(options: argparse.Namespace) -> int:
    """Peak memory of linear_cross_entropy in each mode, beside full logits; some minutes."""
    from perf import memory

    for line in memory.lines():
        print(line, flush=True)
    return 0


def _compile(options: argparse.Namespace) -> int:
    """Training steps with derivatives in the loss, compiled; takes a quarter of an hour."""
    from perf import compiled_steps

    found = []
    for each in compiled_steps.results(options.only):
        found.append(each)
        print("\n".join([*compiled_steps.lines([each])][2:3]), flush=True)
    print("\n".join([*compiled_steps.lines(found)][len(found) + 2 :]))
    if options.write:
        compiled_steps.write(found, DOCS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
