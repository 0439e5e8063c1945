"""A tiny suite with planted faults, as a plug-in of the workers of a run and as a program that starts one.

torch's layer norm is off by a percent at two rows, ends its process at three, and has the run stopped at four,
which comes last because xdist puts off what a dead worker was given.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from perf import workloads
from perf.suite import providers

workloads.CPU_WORKLOADS = tuple(
    workloads.Workload("tiny", "layer_norm", (rows, 8), dtype="float32", quick=True) for rows in (2, 3, 4, 5)
)
workloads.CPU_TRAINING = ()
provider = providers.provider


def faulty(name):
    side = provider(name)
    make = side.functions["layer_norm"]

    def layer_norm(workload):
        right = make(workload)

        def function(x, *params):
            if len(x) == 3:
                os._exit(3)
            if len(x) == 4:
                os.kill(os.getppid(), signal.SIGINT)
                time.sleep(60)
            return right(x, *params) * (1.01 if len(x) == 2 else 1.0)

        return function

    if name == "torch":
        side.functions["layer_norm"] = layer_norm
    return side


# Before the modules are imported that call it.
providers.provider = faulty

if __name__ == "__main__":
    from perf.__main__ import main

    # A shell that runs tests in the background has them ignore Ctrl-C, and a run leaves ignored signals ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
