"""Measure the kernels, report, compare and predict.

python -m perf run [--device cpu|cuda] [--quick] [--out FILE]   measure everything, write one JSON file
python -m perf run --plan [--device cpu|cuda] [--quick]         what that would measure
python -m perf report FILE [FILE ...]                           tables and plots into docs/perf/
python -m perf compare BEFORE AFTER                             exit status 1 if a row lost over 5 % of its speed, broke
                                                                or is gone, 2 if a file is damaged
python -m perf predict                                          times that the model expects of a device
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_OUT = Path("perf_output") / "result.json"
DEFAULT_REPORT = Path(__file__).resolve().parent.parent / "docs" / "perf"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["predict"]:
            from perf import model

            return model.main(arguments[1:])
        options = _parser().parse_args(arguments)
        return options.command(options)
    except ModuleNotFoundError as error:
        print(f"python -m perf needs {error.name}: pip install 'torch-training-primitives[perf]'.", file=sys.stderr)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure")
    run.set_defaults(command=_run)
    run.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    run.add_argument("--quick", action="store_true", help="few workloads, in two minutes")
    run.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="workloads whose key contains one of these")
    run.add_argument("--modes", nargs="+", default=[], metavar="MODE", help="only these modes")
    run.add_argument("--providers", nargs="+", default=[], metavar="NAME", help="only these providers")
    run.add_argument("--seconds", type=float, help="time that the run may take")
    run.add_argument("--plan", action="store_true", help="only say what would be measured")
    run.add_argument("--out", type=Path, default=DEFAULT_OUT, help="result file (default: %(default)s)")
    report = commands.add_parser("report", help="write tables and plots")
    report.set_defaults(command=_report)
    report.add_argument("results", nargs="+", type=Path, help="result files, of one device each")
    report.add_argument("--out", type=Path, default=DEFAULT_REPORT, help="directory (default: docs/perf)")
    compare = commands.add_parser("compare", help="find what became slower, broke, or is gone")
    compare.set_defaults(command=_compare)
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    compare.add_argument("--fall", type=_part, default=0.05, help="part of its speed that a row may lose (%(default)s)")
    # The model reads its own arguments.
    commands.add_parser("predict", help="what the time model expects", add_help=False)
    return parser


def _part(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a part of one, as 0.05 for 5 %, got {text}.")
    return value


def _run(options: argparse.Namespace) -> int:
    import torch

    from perf.suite.plan import Options, make_plan, summary
    from perf.suite.providers import reason_against
    from perf.suite.results import OK, check_writable, write_json

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = (tuple(options.only), tuple(options.modes), tuple(options.providers))
    asked = Options(device, options.quick, *names, options.seconds)
    if options.plan:
        print(summary(make_plan(asked, {name: reason_against(name) for name in asked.names})))
        return 0
    from perf.suite.report import print_summary
    from perf.suite.run import run

    check_writable(options.out)
    result = run(asked)
    print_summary(result)
    statuses = {row["status"] for row in result["rows"] if row["provider"] == "primitives"}
    path = options.out
    if OK not in statuses:
        path = path.with_name(f"{path.stem}.failed.json")
        print(f"No row of this package is right: {options.out} is left as it was.")
    write_json(path, result)
    print(f"Written to {path}.")
    return 1 if OK not in statuses or statuses & {"wrong", "error"} else 0


def _report(options: argparse.Namespace) -> int:
    from perf.suite.report import write_report

    for path in options.results:
        print(f"Written to {write_report(path, options.out)}.")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from perf.suite.compare import compare
    from perf.suite.results import load

    comparison = compare(load(options.before), load(options.after), options.fall)
    print(comparison.text)
    return 1 if comparison.failed else 0


if __name__ == "__main__":
    sys.exit(main())
