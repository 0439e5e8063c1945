"""Options of the bench, its units as tests, a GPU for each worker, and the result file that the controller writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

# Has the processes keep the memory that they free, where their C library is glibc: otherwise it follows from what was
# allocated before whether a call finds its output's memory at hand, or fetches it from the system page by page, which
# takes as long as layer norm itself.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_MAX_": "0"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the bench; `-k` chooses workloads and modes by their names."""
    add = parser.getgroup("bench").addoption
    add("--device", choices=("cpu", "cuda"), help="where to measure (default: cuda where torch sees a GPU)")
    add("--quick", action="store_true", help="few workloads")
    add("--every-mode", action="store_true", help="all modes of all workloads, on a GPU, not of some of each family")
    add("--providers", help="only these, between commas")
    add("--result", type=Path, default=Path("perf_output/result.json"), help="file to write (default: %(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    """Show a worker the one GPU that it owns, before torch looks for GPUs; the controller gives it."""
    os.environ.update(KEEP_FREED_MEMORY)
    if (worker := getattr(config, "workerinput", None)) is None:
        providers_of(config)
        config.pluginmanager.register(Collector(config))
    elif "gpu" in worker:
        os.environ["CUDA_VISIBLE_DEVICES"] = worker["gpu"]


class Collector:
    """Gives workers their GPUs, and collects the rows of their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.path: Path = config.option.result
        self.gpus = visible_gpus() if _device(config) == "cuda" else []
        self.owned: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.devices: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a new worker the GPU that has the fewest."""
        if self.gpus:
            node.workerinput["gpu"] = min(self.gpus, key=self.owned.count)
            self.owned.append(node.workerinput["gpu"])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take back the GPU of a worker that has ended."""
        if (gpu := node.workerinput.pop("gpu", None)) is not None:
            self.owned.remove(gpu)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the rows of a test; a unit in which its process died is an error of this package."""
        found = dict[str, Any](report.user_properties)
        if report.when == "teardown" and "rows" in found:
            self.rows += found["rows"]
            self.devices.add(found["device"])
        elif report.when not in {"setup", "call", "teardown"}:
            workload, _, mode = report.nodeid.partition("[")[2].removesuffix("]").rpartition(": ")
            row = {"workload": workload, "mode": mode, "provider": "primitives", "status": "error"}
            self.rows.append({**row, "message": report.longreprtext.strip().rpartition("\n")[2]})

    def pytest_sessionfinish(self) -> None:
        """Write what was measured, after Ctrl-C too."""
        if self.rows:
            from perf.results import write_result

            write_result(self.path, self.rows, sorted(self.devices))


def visible_gpus() -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` may say of each GPU that this process sees."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return said.split(",") if said else [str(index) for index in range(torch.cuda.device_count())]


def _device(config: pytest.Config) -> str:
    name = config.option.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device; --device cpu compares on the CPU.")
    return name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each workload and mode."""
    from perf import workloads

    option, kind = metafunc.config.option, _device(metafunc.config)
    units = workloads.units(kind, quick=option.quick, every_mode=option.every_mode)
    metafunc.parametrize("unit", units, ids=lambda unit: f"{unit[0].key}: {unit[1]}")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Where this worker measures."""
    return torch.device(_device(pytestconfig))


def providers_of(config: pytest.Config) -> list[str]:
    """Who is measured: by default all but who tunes for long, and on a CPU no compiler."""
    from perf import workloads as w

    if config.option.providers:
        names = config.option.providers.split(",")
        if unknown := set(names) - set(w.PROVIDERS):
            raise pytest.UsageError(f"--providers: {', '.join(unknown)} must be among {', '.join(w.PROVIDERS)}.")
        return names
    is_gpu = _device(config) == "cuda"
    return [name for name in w.PROVIDERS if name != w.TUNED] if is_gpu else [w.OURS, w.EAGER, w.MATH]
