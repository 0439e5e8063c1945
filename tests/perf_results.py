"""Made-up results of a GPU, as the tests of the perf suite compare and report them."""

from __future__ import annotations

from perf.suite.plan import Options, make_plan
from perf.suite.results import CANNOT, OK, SCHEMA, WRONG, row_for

# Times in units of that of a copy of the minimum of bytes.
COPIES = {"primitives": 1.06, "torch": 1.9, "torch.compile": 1.2, "liger": 1.1}
COPY_GBPS = 4000.0
MINIMUM_BYTES = 134_000_000


def spread(median, width=0.01):
    return {"median": median, "p20": median * (1 - width), "p80": median * (1 + width), "samples": 20}


def make_row(unit, provider, copies, **values):
    copy_us = MINIMUM_BYTES / COPY_GBPS * 1e-3
    timed = {
        "device_us": spread(copies * copy_us),
        "call_us": spread(copies * copy_us + 10),
        "vs_torch_device": spread(copies / COPIES["torch"]) if provider != "torch" else None,
        "minimum_bytes": MINIMUM_BYTES,
        "copy_gbps": COPY_GBPS,
        "gbps": COPY_GBPS / copies,
        "fraction_of_copy": 1 / copies,
        "kernel_bytes": MINIMUM_BYTES if provider == "primitives" else None,
        "kernel_fraction": 1 / copies if provider == "primitives" else None,
        "error": 1e-3,
        "tolerance": 4e-2,
        "peak_bytes": 67_000_000,
        "launches": 1,
    }
    return row_for(unit, provider, OK, **{**timed, **values})


def gpu_result(modes=("forward", "jvp"), slower=1.0):
    """A quick run on a GPU; `slower` multiplies the times of this package."""
    plan = make_plan(Options("cuda", quick=True, modes=modes), dict.fromkeys((*COPIES, "quack", "flash-attn", "apex")))
    rows = []
    for number, unit in enumerate(plan["units"]):
        wobble = 1 + 0.001 * number
        for name, copies in COPIES.items():
            if name == "liger" and unit["mode"] == "jvp":
                message = "RuntimeError: liger | has no JVP"
                rows.append(row_for(unit, name, CANNOT, message))
            elif name == "torch" and unit["mode"] == "jvp" and unit["op"] == "log_softmax":
                rows.append(row_for(unit, name, WRONG, "error 9.0e-01, at most 4e-02 is right", error=0.9))
            else:
                rows.append(make_row(unit, name, copies * wobble * (slower if name == "primitives" else 1.0)))
    return {
        "schema": SCHEMA,
        "created": "2026-01-01T00:00:00+00:00",
        "options": plan["options"],
        "complete": True,
        "seconds": {"total": 100.0, "compile": 40.0},
        "device": {
            "type": "cuda",
            "name": "Imaginary GPU",
            "capability": "9.0",
            "processors": 132,
            "l2_bytes": 60 * 2**20,
        },
        "environment": {"python": "3.12", "packages": {"torch": "2.11"}, "threads": 1, "cores": 16, "processor": "CPU"},
        "clocks": {"0": [{"driver_version": "1", "clocks.sm": "1980 MHz", "clocks.mem": "3201 MHz"}]},
        "providers": dict.fromkeys(COPIES) | {"quack": "ModuleNotFoundError: no quack"},
        "calibration": {"512000000": {"copy_gbps": COPY_GBPS}},
        "overhead": None,
        "rows": rows,
    }
