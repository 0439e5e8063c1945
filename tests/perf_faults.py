"""A tiny suite with planted faults, as a plug-in of the workers of a run.

torch's layer norm is off by a percent at two rows, and has the run stopped at four.
"""

from __future__ import annotations

import os
import signal
import time

from perf import workloads
from perf.suite import providers

TINY = tuple(workloads.Workload("tiny", "layer_norm", (n, 8), dtype="float32", quick=True) for n in (2, 3, 4))
provider = providers.provider


def faulty(name):
    side = provider(name)

    def function(workload):
        right = side.function(workload)

        def layer_norm(x, *params):
            if len(x) == 4:
                os.kill(os.getppid(), signal.SIGINT)
                time.sleep(60)
            return right(x, *params) * (1.01 if len(x) == 2 else 1.0)

        return layer_norm

    return side._replace(function=function) if name == "torch" else side


def pytest_configure(config):
    # Before the modules are imported that call it.
    if hasattr(config, "workerinput"):
        workloads.CPU_WORKLOADS = TINY
        providers.provider = faulty
