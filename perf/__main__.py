"""Measure the kernels, report, compare and predict.

python -m perf run [--device cpu|cuda] [--quick] [--out FILE]   measure everything, write one JSON file
python -m perf report FILE [FILE ...]                           tables and plots into docs/perf/
python -m perf compare BEFORE AFTER                             exit status 1 if a row lost over 5 % of its speed, broke
                                                                or is gone
python -m perf predict [--device NAME] [--write]                times that the model expects of a device
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    run = commands.add_parser("run", help="measure")
    run.set_defaults(command=_run)
    run.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    run.add_argument("--quick", action="store_true", help="few workloads")
    run.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="workloads whose key contains one of these")
    run.add_argument("--modes", nargs="+", default=[], metavar="MODE", help="only these modes")
    run.add_argument("--providers", nargs="+", default=[], metavar="NAME", help="only these providers")
    run.add_argument("--out", type=Path, default=Path("perf_output/result.json"), help="(default: %(default)s)")
    report = commands.add_parser("report", help="write tables and plots")
    report.set_defaults(command=_report)
    report.add_argument("results", nargs="+", type=Path, help="result files, of one device each")
    report.add_argument("--out", type=Path, default=DOCS, help="directory (default: docs/perf)")
    compare = commands.add_parser("compare", help="find what became slower, broke, or is gone")
    compare.set_defaults(command=_compare)
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    predict = commands.add_parser("predict", help="what the time model expects")
    predict.set_defaults(command=_predict)
    predict.add_argument("--device", default="h200", help="name in perf/devices or path of a description")
    predict.add_argument("--write", action="store_true", help="write the page of the docs")
    return parser


def _run(options: argparse.Namespace) -> int:
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
    from perf.suite.report import write_report

    for path in options.results:
        print(f"Written to {write_report(path, options.out)}.")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from perf.suite.compare import compare
    from perf.suite.results import load

    text, failed = compare(load(options.before), load(options.after))
    print(text)
    return int(failed)


def _predict(options: argparse.Namespace) -> int:
    from perf import model

    page = model.page(model.read_device(options.device))
    if options.write:
        (DOCS / f"predictions_{Path(options.device).stem}.md").write_text(page)
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
