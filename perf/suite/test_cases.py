"""The cases as pytest collects them. Results are files, so that nothing is lost with a worker that dies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf.suite.worker import Worker

if TYPE_CHECKING:
    import pytest

_workers: dict[str, Worker] = {}


def test_case(item: dict[str, Any], pytestconfig: pytest.Config) -> None:
    """Compile one provider of a unit, or measure the unit."""
    directory = str(pytestconfig.getoption("--run-directory"))
    if directory not in _workers:
        _workers[directory] = Worker(Path(directory))
    worker = _workers[directory]
    if item["provider"] is None:
        worker.measure(item["unit"])
    else:
        worker.compile(item["unit"], item["provider"])
